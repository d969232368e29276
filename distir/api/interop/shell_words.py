"""The command-line options in a shell script: its words, with variables that the script sets put in.

That is as much of a shell as launch scripts of training use: comments, quotes, continued lines, assignments, arrays,
`$NAME`, `${NAME}`, `${NAME:-value}` and products, `$((A*B))`. Options in an array or a variable count where they are
assigned, those of all branches of conditions.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from distir.ir.errors import UsageError

_ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_USED = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\]|:?-([^}]*))?\})")
_COMMENT = re.compile(r"(?<!\S)#.*")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_OPTION = "--"


class ShellOptions(NamedTuple):
    """The options of a script, by name the words that follow each, where it is given last; and its variables."""

    options: dict[str, list[str]]
    variables: dict[str, str]


def shell_options(path: str) -> ShellOptions:
    """The options in a file. Raises UsageError for one that cannot be read, or whose quotes do not end."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as e:
        reason = (e.strerror or str(e)) if isinstance(e, OSError) else "it is not text"
        raise UsageError(f"cannot read {os.fspath(path)}: {reason}") from e
    variables: dict[str, str] = {}
    options: dict[str, list[str]] = {}
    last: list[str] = []
    text = _ARITHMETIC.sub(lambda match: match[0].replace(" ", ""), _COMMENT.sub("", text))
    try:
        for word in _words(shlex.split(text), variables):
            if word.startswith(_OPTION) and len(word) > len(_OPTION):
                name, given, value = word.partition("=")
                last = [value] if given else []
                options[name] = last
            else:
                last.append(word)
    except ValueError as e:
        raise UsageError(f"{path}: {e}", "a file of Megatron-LM's arguments is one as a shell reads it") from e
    return ShellOptions(options, variables)


def _words(found: list[str], variables: dict[str, str]) -> Iterator[str]:
    """The words, without assignments and the brackets of arrays."""
    for raw in found:
        word = raw
        if (assigned := _ASSIGNED.fullmatch(word)) is not None:
            name, word = assigned.groups()
            value = _with_values(word, variables)
            if not word.startswith("(") and _OPTION not in value:
                variables[name] = value
                continue
            variables[name] = ""  # its options count here
        for part in _with_values(word, variables).split():
            yield from [x for x in [part if "$" in part else part.strip("();")] if x]


def _with_values(word: str, variables: dict[str, str]) -> str:
    """A word with the values of variables; what is not known stays."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name, match[0] if match[3] is None else match[3])

    def product(match: re.Match[str]) -> str:
        factors = [variables.get(x, x) for x in match[1].split("*")]
        return str(math.prod(map(int, factors))) if all(x.isdecimal() for x in factors) else match[0]

    return _ARITHMETIC.sub(product, _USED.sub(value, word))
