"""Text as tokens: whatever bytes there are, below the model's vocabulary, in windows with labels shifted by one."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from distir.api.data import Data
from distir.api.tokens import read_tokens
from distir.ir.errors import UsageError
from distir.ir.function import Function, FunctionMaker, Role
from distir.ir.type import Float32, Int64, Tensor
from distir.models import gpt, mlp
from distir.transforms.differentiation.training import training_step

TEXT = "".join(f"the {k} quick brown foxes jump over {k * 7} lazy dogs\n" for k in range(200))


def corpus(folder: Path, text: str | bytes = TEXT) -> Path:
    path = folder / "corpus.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def model(vocabulary: int = 300, sequence: int = 8, batch: int = 4) -> Function:
    return training_step(gpt(1, 8, 2, vocabulary, sequence, batch), "cross-entropy")


@settings(max_examples=30)
@given(st.binary(min_size=1, max_size=400), st.integers(256, 400))
def test_any_bytes_become_tokens_and_come_back(tmp_path_factory, content: bytes, vocabulary: int):
    folder = tmp_path_factory.mktemp("text")
    path, file = corpus(folder, content), folder / "bpe.json"
    tokens = read_tokens(path, vocabulary, file)
    assert tokens.dtype == np.int32
    assert 0 <= tokens.min() <= tokens.max() < vocabulary
    text = Tokenizer.from_file(str(file)).decode(tokens.tolist())
    assert content in (text.encode(), text.encode("latin-1", "replace"))


def test_common_words_are_one_token(tmp_path: Path):
    few, many = (read_tokens(corpus(tmp_path), n) for n in (256, 600))
    assert len(few) == len(TEXT)
    assert len(many) < len(few) / 3


def test_a_tokenizer_is_written_once_and_used(tmp_path: Path):
    file = tmp_path / "bpe.json"
    first = read_tokens(corpus(tmp_path), 300, file)
    written = file.read_bytes()
    other = tmp_path / "other.txt"
    other.write_text("".join(TEXT.splitlines(keepends=True)[:64]))
    again = read_tokens(other, 400, file)
    assert file.read_bytes() == written
    np.testing.assert_array_equal(again, first[: len(again)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bpe.json", "corpus.txt", "other.txt"]


def test_windows_and_labels(tmp_path: Path):
    path, file = corpus(tmp_path), tmp_path / "bpe.json"
    function = model()
    data = Data(function, source=path, tokenizer=file)
    row = read_tokens(path, 300, file)
    inputs = {v.name: v for v in function.inputs}
    seen = 0
    for k in range(3):
        step = data.step(k)
        assert step.keys() == {inputs["input_ids"], inputs["labels"]}
        for ids, labels in zip(step[inputs["input_ids"]], step[inputs["labels"]], strict=True):
            np.testing.assert_array_equal(ids, row[seen : seen + 8])
            np.testing.assert_array_equal(labels, row[seen + 1 : seen + 9])
            seen += 8
    assert data.fixed().keys() == {inputs["attention_mask"], inputs["position_ids"]}
    train, held_out = data.samples(epochs=True, share=0.2)
    assert held_out is not None
    assert held_out.first == train.count
    assert train.count + held_out.count == (len(row) - 1) // 8
    assert held_out.count % 4 == 0


def two_inputs() -> Function:
    f = FunctionMaker()
    a, b = (f.add_input_value(n, Tensor(Int64, (4, 8)), Role("data", 0)) for n in "ab")
    table = f.add_input_value("w", Tensor(Float32, (300, 300)), Role("parameter"))
    f.set_outputs([f.emit("Add", f.emit("Gather", table, a, axis=0), f.emit("Gather", table, b, axis=0))])
    return training_step(f.finalize(), "cross-entropy")


@pytest.mark.parametrize(
    ("function", "content", "words"),
    [
        (model(), b"", ["corpus.txt is empty"]),
        (model(), b"too short", ["corpus.txt is too short", "2 tokens", "4 sequences of 8 and one more"]),
        (model(100), TEXT, ["at least 256 tokens", "the model has 100"]),
        (gpt(1, 8, 2, 300, 8, 4), TEXT, ["a label for each token", "--loss cross-entropy"]),
        (training_step(gpt(1, 8, 2, 300, 8, 4), "mse"), TEXT, ["a label for each token"]),
        (training_step(mlp(2, 4, 8), "mse"), TEXT, ["one input of tokens, integers (batch, length): it has none"]),
        (two_inputs(), TEXT, ["it has a, b"]),
    ],
)
def test_what_cannot_be_trained_on(tmp_path: Path, function: Function, content: str | bytes, words: list[str]):
    with pytest.raises(UsageError) as e:
        Data(function, source=corpus(tmp_path, content))
    for word in words:
        assert word in str(e.value)


def test_files_that_are_not_there(tmp_path: Path):
    for path in (tmp_path / "missing.txt", tmp_path):
        with pytest.raises(UsageError, match="cannot read data file"):
            read_tokens(path, 300)
    with pytest.raises(UsageError, match="cannot write"):
        read_tokens(corpus(tmp_path), 300, tmp_path / "no" / "bpe.json")


def test_tokenizers_of_another_kind(tmp_path: Path):
    path, file = corpus(tmp_path), tmp_path / "bpe.json"
    read_tokens(path, 400, file)
    with pytest.raises(UsageError, match="has 400 tokens, the model has 300"):
        read_tokens(path, 300, file)
    file.write_text(json.dumps({"not": "one"}))
    with pytest.raises(UsageError, match="is not a tokenizer"):
        read_tokens(path, 400, file)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = builtins.__import__

    def without(name, *args):
        if name == "tokenizers":
            raise ModuleNotFoundError(name, name=name)
        return found(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError) as e:
        read_tokens(corpus(tmp_path), 300)
    assert e.value.hint == "pip install 'distir[text]'"
    assert e.value.exit_code == 2
