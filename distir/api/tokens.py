"""Tokenise a text with a byte-level BPE, which is trained on the text unless given. Needs the package tokenizers.

A file that is not UTF-8 is read as Latin-1: one character per byte.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distir.ir.errors import UsageError
from distir.ir.files import written

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTES = 256
"""The smallest vocabulary: every byte is a token."""
_LINES, _TOGETHER = 4096, 64
"""Lines read at a time, and lines per text: the library tokenizes the texts in parallel."""


def read_tokens(path: Path, vocabulary: int, tokenizer: str | os.PathLike[str] | None = None) -> np.ndarray:
    """The tokens of a text file as one row (n,) of int32, all below `vocabulary`.

    `tokenizer`: file of a BPE, as the library writes it; it is read if it exists, else the BPE trained on the text is
    written to it. Raises UsageError for a file that is empty or cannot be read, a vocabulary that is too small, or if
    tokenizers is not installed.
    """
    try:
        if path.stat().st_size == 0:
            raise UsageError(f"{path} is empty")
        encoding = _encoding(path)
    except OSError as e:
        raise UsageError(f"cannot read data file {path}: {e.strerror or e}") from None
    bpe = _tokenizer(path, encoding, vocabulary, tokenizer)
    parts: list[np.ndarray] = []
    for lines in _lines(path, encoding):
        texts = ["".join(lines[k : k + _TOGETHER]) for k in range(0, len(lines), _TOGETHER)]
        parts += [np.array(e.ids, np.int32) for e in bpe.encode_batch(texts, add_special_tokens=False)]
    return np.concatenate(parts)


def _encoding(path: Path) -> str:
    """ "utf-8" if the whole file is valid UTF-8, else "latin-1". Raises OSError."""
    try:
        with open(path, encoding="utf-8") as file:
            while file.read(1 << 20):
                pass
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8"


def _lines(path: Path, encoding: str) -> Iterator[list[str]]:
    with open(path, encoding=encoding, newline="") as file:
        while lines := list(islice(file, _LINES)):
            yield lines


def _tokenizer(path: Path, encoding: str, vocabulary: int, given: str | os.PathLike[str] | None) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise UsageError("text needs tokenizers, which is not installed", "pip install 'distir[text]'") from None
    if given is not None and os.path.exists(given):
        try:
            bpe = Tokenizer.from_file(os.fspath(given))
        except Exception as e:  # the library raises nothing narrower
            raise UsageError(f"{os.fspath(given)} is not a tokenizer: {e}") from None
        if bpe.get_vocab_size() > vocabulary:
            raise UsageError(f"{os.fspath(given)} has {bpe.get_vocab_size():,} tokens, the model has {vocabulary:,}")
        return bpe
    bpe = _trained(path, encoding, vocabulary)
    if given is not None:
        with written(given) as file:
            file.write_text(bpe.to_str(pretty=True), encoding="utf-8")  # the library itself raises no OSError
    return bpe


def _trained(path: Path, encoding: str, vocabulary: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocabulary < _BYTES:
        raise UsageError(f"a text needs a vocabulary of at least {_BYTES} tokens, the model has {vocabulary:,}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(_lines(path, encoding), trainer)
    return bpe
