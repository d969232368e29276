"""How many parameters a function takes; read from the source."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST = 8


def parameters(function):
    """Names, `self` and `cls` left out; `*more` and `**more` count one each."""
    a = function.args
    names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    more = [x.arg for x in (a.vararg, a.kwarg) if x is not None]
    return [*names[names[:1] in (["self"], ["cls"]) :], *more]


def too_many(source, evals=False):
    """The functions and methods of a file with more parameters than `MOST`; without `evals`, but for those of ops: they
    begin with the array namespace, `xp`."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and len(found := parameters(node)) > MOST and (evals or found[0] != "xp"):
            yield getattr(node, "name", "lambda"), len(found)


def test_no_function_has_more_than_eight_parameters():
    """But evals of ops, whose operands and attributes are the op's. Constructors of dataclasses are not written out."""
    for path in sorted((ROOT / "distir").rglob("*.py")):
        found = [f"{name}: {n}" for name, n in too_many(path.read_text(), evals=path.parent != ROOT / "distir" / "ops")]
        assert not found, f"{path}: {', '.join(found)}"


def test_one_too_many_is_seen():
    source = (
        "class A:\n    def f(self, a, b, /, c, d, *e, f, g, **h): ...\n    def g(self, a, b, c, d, e, *f, g, h, i): ..."
    )
    assert list(too_many(source)) == [("g", 9)]
    assert list(too_many("lambda a, b, c, d, e, f, g, h, i: 0")) == [("lambda", 9)]
    assert list(too_many("lambda xp, a, b, c, d, e, f, g, h: 0")) == []
    assert list(too_many("lambda xp, a, b, c, d, e, f, g, h: 0", evals=True)) == [("lambda", 9)]
