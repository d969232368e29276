"""The table of import rules: from ONNX op type to a function of the node.

A rule returns the results, in order: values, or arrays if they are known at import; None if what the standard defines
the op by is to be imported. It reads from the node every
attribute that it supports; an attribute that no rule reads is an error, so none is ignored silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distir.importer.node import Node, Result

Rule = Callable[[Node], "Result | Sequence[Result] | None"]
RULES: dict[str, Rule] = {}


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Register a rule for these ONNX op types."""

    def register(f: Rule) -> Rule:
        for op_type in op_types:
            RULES[op_type] = f
        return f

    return register
