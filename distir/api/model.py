"""A model ready to be spread: its program, the arrays that go with it, and where it came from."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from distir.api.masks import with_causal_attention
from distir.executor.sequential import evaluate
from distir.ir.errors import UsageError
from distir.ir.function import Function, Value
from distir.ir.type import DType, Tensor
from distir.transforms.claims import check_rewrite
from distir.transforms.fuse import fuse
from distir.transforms.roles import batch_dims, batch_size, weights
from distir.transforms.training import Optimizer, initial_state, optimizer_named, training_step

DTYPES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}
"""Names of floating-point types, as users write them."""


@dataclass(frozen=True, repr=False)
class Model:
    """A program and what is known of its inputs: `arrays` of parameters and constants, read when asked for.

    `path` is the file it came from; `optimizer` that of a training step.
    """

    function: Function
    arrays: Mapping[Value, Any] = field(default_factory=dict)
    path: Path | None = None
    optimizer: Optimizer | None = None

    def __repr__(self) -> str:
        held = dict.fromkeys(weights(self.function))
        data = [f"{v.name}: {v.type!r}" for v in self.function.inputs if v not in held and v.kind in ("data", None)]
        shapes = [v.type.global_shape for v in held if v.kind != "state" and isinstance(v.type, Tensor)]
        parameters = sum(map(math.prod, shapes))
        trained = f", {type(self.optimizer).__name__}" if self.optimizer else ""
        return (
            f"Model({self.name}: ({', '.join(data)}), {parameters:,} parameters, {len(self.function.ops)} ops{trained})"
        )

    @property
    def name(self) -> str:
        """The file's name, or the function's."""
        return self.path.name if self.path else self.function.name

    @property
    def batch(self) -> int:
        """Samples a step. Raises InfeasibleError if the data inputs do not agree."""
        numbers = {self.function.inputs.index(v): dim for v, dim in batch_dims(self.function).items()}
        return batch_size(self.function, numbers)

    @property
    def tokens(self) -> int | None:
        """Tokens a step: elements of the first input of integers per sample. None where samples are not sequences."""
        for v, dim in batch_dims(self.function).items():
            t = v.type
            if isinstance(t, Tensor) and t.dtype.kind == "int" and len(t.global_shape) == 2 and dim == 0:
                return t.global_shape[0] * t.global_shape[1]
        return None

    def training(self, loss: str, optimizer: Optimizer | str = "sgd", output: int | str = 0) -> Model:
        """One step of training it. See `training_step` for `loss`.

        Raises MismatchError if an op that is put in the place of several does not compute the same.
        """
        check_rewrite(self.function, fuse(self.function), evaluate)
        settings = optimizer_named(optimizer) if isinstance(optimizer, str) else optimizer
        step = training_step(self.function, loss, settings, output=output)
        return replace(self, function=step, optimizer=settings)

    def with_dtype(self, dtype: DType | str) -> Model:
        """The model computing in another floating-point type. Raises UsageError for an unknown name."""
        from distir.transforms.precision import with_dtype

        new = with_dtype(self.function, dtype_named(dtype))
        arrays = _Renamed(dict(zip(new.inputs, self.function.inputs, strict=True)), self.arrays)
        return replace(self, function=new, arrays=arrays)

    def initial(self, seed: int = 0) -> dict[Value, Any]:
        """An array for every parameter, state and known constant: as given, state zero, others drawn.

        Drawn are parameters without an array, normal with a variance of 1 / (size of the first dim).
        """
        arrays: dict[Value, Any] = {v: self.arrays[v] for v in self.function.inputs if v in self.arrays}
        arrays |= {v: x for v, x in initial_state(self.function).items() if v not in arrays}
        for k, v in enumerate(self.function.inputs):
            if v not in arrays and v in weights(self.function):
                shape = v.type.erased().global_shape  # type: ignore[union-attr]
                draw = np.random.default_rng((seed, k)).standard_normal(shape)
                arrays[v] = (draw / np.sqrt(max(1, shape[0] if shape else 1))).astype(v.type.dtype.numpy)  # type: ignore[union-attr]
        return arrays


class _Renamed(Mapping[Value, Any]):
    """Arrays under other Values, read when asked for."""

    def __init__(self, before: Mapping[Value, Value], arrays: Mapping[Value, Any]) -> None:
        self._before = {new: old for new, old in before.items() if old in arrays}
        self._arrays = arrays

    def __getitem__(self, v: Value) -> Any:
        return self._arrays[self._before[v]]

    def __iter__(self):
        return iter(self._before)

    def __len__(self) -> int:
        return len(self._before)


def load(
    path: str | os.PathLike[str],
    dims: Mapping[str, int] | None = None,
    *,
    loss: str | None = None,
    optimizer: Optimizer | str = "sgd",
    dtype: DType | str | None = None,
    batch: str | None = None,
    output: int | str = 0,
) -> Model:
    """The model in an ONNX file; with `loss`, one step of training it.

    `dims` gives the sizes of symbolic dims, `batch` names the one that is the batch's, if not the first. `loss` is
    "cross-entropy", "mse" or the name of a value; `output` is the one the first two look at. `dtype` ("float64", ...)
    changes the type it computes in.

    Raises ModelError for a file that is broken or uses what distir does not know, UsageError for arguments that do
    not fit it.
    """
    from distir.importer import import_from_onnx

    function, arrays = import_from_onnx(path, dims=dims, batch=batch)
    model = Model(with_causal_attention(function, arrays), arrays, Path(path))
    if loss is not None:
        model = model.training(loss, optimizer, output)
    return model if dtype is None else model.with_dtype(dtype)


def as_model(model: Model | Function | str | os.PathLike[str]) -> Model:
    """A Model, from one, a Function, or the path of a file."""
    if isinstance(model, Model):
        return model
    return Model(model) if isinstance(model, Function) else load(model)


def dtype_named(dtype: DType | str) -> DType:
    """The floating-point type of that name. Raises UsageError for another."""
    if isinstance(dtype, DType):
        return dtype
    found = DType.all.get(DTYPES.get(dtype, dtype))
    if found is None or not found.floating:
        raise UsageError(f"unknown dtype {dtype!r}", f"choose from {', '.join(DTYPES)}")
    return found
