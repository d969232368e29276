"""The graph of a module: names of inputs, outputs and dims, what is trained, and what torch's exporter refuses."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from distir.backends.modules import module_export
from distir.backends.modules.module_export import export_module
from distir.ir.errors import ModelError, UsageError


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    loss: Any
    more: Any
    cache: Any = None


class Nested(nn.Module):
    """Arguments of all kinds, nested; a tied weight; outputs in all containers, one twice, one of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.linear = nn.Parameter(torch.ones(3))  # named as the exporter names a value

    def forward(self, batch: Any, *more: Any, scale: float = 2.0, **rest: Any) -> Any:
        y = self.second(self.first(batch["a"])) * scale + batch["b"][0] + self.linear
        z = y + more[0] + rest["mask"]
        return Output(y.sum(), OrderedDict(pair=Pair(y, [z, object()]), again=y, same=batch["a"]))


def info(values: Any) -> list[tuple[str, list[Any]]]:
    return [(v.name, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]) for v in values]


def test_names() -> None:
    module = Nested()
    forward = module.forward
    inputs = {"batch": {"a": torch.ones(2, 3), "b": [torch.ones(2, 3)]}, "scale": 3.0, "mask": torch.ones(1, 3)}
    with pytest.raises(UsageError, match="do not fit Nested's forward"):
        export_module(module, {k: x for k, x in inputs.items() if k != "batch"})
    found = export_module(Positional(module), (inputs["batch"], torch.ones(3), inputs["mask"]), {"batch": 5})
    assert info(found.graph.graph.input) == [
        ("batch_a", ["batch", 3]),
        ("batch_b_0", ["batch", 3]),
        ("more", [3]),
        ("mask", [1, 3]),
    ]
    assert [v.name for v in found.graph.graph.output] == ["loss", "more.pair.first", "more.pair.second.0", "batch_a"]
    assert found.dims == {"batch": 5}
    assert found.trained == ["inner.linear", "inner.first.weight", "inner.first.bias", "inner.second.bias"]
    assert all(found.stored[name] is p for name, p in Positional(module).named_parameters())
    assert not found.graph.graph.initializer
    assert "forward" not in module.__dict__
    assert module.forward == forward


class Positional(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Any, more: Any, mask: Any) -> Any:
        return self.inner(batch, more, scale=0.5, mask=mask)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, ids: torch.Tensor, table: torch.Tensor) -> Any:
        return (table[ids] * self.w * 0.1).sum(-1), ids.clamp(max=3)


def test_named_dims() -> None:
    inputs = torch.zeros(2, 3, dtype=torch.int64), torch.ones(7, 4).double()
    names = {"ids": {0: "samples", 1: "length"}, "table": {0: "rows"}}
    found = export_module(Sum().double(), inputs, {"length": 6, "rows": 2}, names)
    assert info(found.graph.graph.input) == [("ids", ["samples", "length"]), ("table", ["rows", 4])]
    assert [v.name for v in found.graph.graph.output] == ["output.0", "output.1"]
    assert found.dims == {"samples": 2, "length": 6, "rows": 2}
    assert 0.1 in found.numbers.values()
    assert all(torch.tensor(x).item() == near for near, x in found.numbers.items())
    for bad, text in [
        ({"idx": {0: "n"}}, "no input 'idx'"),
        ({"ids": {2: "n"}}, "no dim 2"),
        ({"ids": {0: "n"}, "table": {0: "n"}}, "dim n of Sum is 2 and, in table, 7"),
    ]:
        with pytest.raises(UsageError, match=text):
            export_module(Sum().double(), inputs, {}, bad)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Untranslated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svd(x)[1]


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"x": None}


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3))
        self.b = nn.Parameter(self.a.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a + self.b


@pytest.mark.parametrize(
    ("module", "texts"),
    [
        (Branches(), ["Branches: torch.export", "data-dependent", "return x if x.sum() > 0 else -x", "torch.where"]),
        pytest.param(
            Untranslated(),
            ["Untranslated: torch.onnx.export", "node %", "svd"],
            marks=pytest.mark.slow,
            id="Untranslated",
        ),
        (Nothing(), ["Nothing", "no tensor"]),
        (Overlapping(), ["parameters a and b", "share memory"]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_cannot_be_exported(module: nn.Module, texts: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError) as e:
        export_module(module, torch.ones(3, 3))
    assert "\n" not in str(e.value)
    assert [t for t in texts if t not in str(e.value)] == []
    assert "forward" not in module.__dict__
    assert capfd.readouterr() == ("", "")


def test_without_onnxscript(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UsageError, match=r"onnxscript: it is not installed .*pip install 'distir\[modules\]'"):
        export_module(nn.Linear(2, 2), torch.ones(1, 2))


def test_modes_and_hooks_stay() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    module.forward = forward = lambda x: nn.Sequential.forward(module, x)  # type: ignore[method-assign]
    graph = module_export.export_module(module, torch.ones(2, 3)).graph.graph
    assert "Dropout" in [n.op_type for n in graph.node]
    assert module.training
    assert module.forward is forward
