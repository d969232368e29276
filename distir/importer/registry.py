"""The table of import rules: from ONNX op type to a function of the node.

A rule returns the results, in order: values, or arrays where they are known at import. It asks the node for every
attribute it understands; one that no rule asked for is an error, so nothing is dropped unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distir.importer.node import Node, Result

Rule = Callable[[Node], "Result | Sequence[Result]"]
RULES: dict[str, Rule] = {}


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Register a rule for these ONNX op types."""

    def register(f: Rule) -> Rule:
        for op_type in op_types:
            RULES[op_type] = f
        return f

    return register
