"""A model: its program, the arrays of its weights and constants, and the file it came from."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distir.api.masks import with_causal_attention
from distir.api.rewrites import check_origins
from distir.ir import parse, verify
from distir.ir.errors import DistirError, ModelError, UsageError
from distir.ir.function import Function, Value
from distir.ir.pause import no_collection
from distir.ir.type import DType, Tensor
from distir.models.config_file import is_config
from distir.models.configs import built_from, title_of
from distir.models.named import Built, built, is_named, own_loss
from distir.transforms.differentiation.training import Optimizer, initial_state, optimizer_named, training_step
from distir.transforms.passes import SEQUENTIAL, form_of
from distir.transforms.roles import batch_dims, batch_size, weights

TEXT = ".distir"
"""Suffix of files that hold a program as text."""
DTYPES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}
"""Names of floating-point types, as users write them."""
NO_LOSS = "none"
"""The loss of a model that is not trained, though its name comes with one."""
PRECISIONS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
"""Names of the types in mixed precision."""


class Precision(NamedTuple):
    """Types in mixed precision, by name ("fp32", "bf16", "fp16"): of products, and of gradients while they are
    accumulated and reduced."""

    products: str = "fp32"
    gradients: str = "fp32"


@dataclass(frozen=True, repr=False)
class Model:
    """A program and the arrays of its parameters and constants, which are read lazily.

    `path` is the file it came from, `title` what it is called without one; `optimizer` that of a training step.
    """

    function: Function
    arrays: Mapping[Value, Any] = field(default_factory=dict)
    path: Path | None = None
    optimizer: Optimizer | None = None
    title: str | None = None

    def __repr__(self) -> str:
        weight_inputs = dict.fromkeys(weights(self.function))
        data = [
            f"{v.name}: {v.type!r}" for v in self.function.inputs if v not in weight_inputs and v.kind in ("data", None)
        ]
        shapes = [v.type.global_shape for v in weight_inputs if v.kind != "state" and isinstance(v.type, Tensor)]
        parameters = sum(map(math.prod, shapes))
        trained = f", {type(self.optimizer).__name__}" if self.optimizer else ""
        return (
            f"Model({self.name}: ({', '.join(data)}), {parameters:,} parameters, {len(self.function.ops)} ops{trained})"
        )

    @property
    def name(self) -> str:
        """The file's name, its title, or the function's name."""
        return self.path.name if self.path else self.title or self.function.name

    @property
    def batch(self) -> int:
        """Samples per step. Raises InfeasibleError if the batch sizes of the data inputs differ."""
        numbers = {self.function.inputs.index(v): dim for v, dim in batch_dims(self.function).items()}
        return batch_size(self.function, numbers)

    @property
    def tokens(self) -> int | None:
        """Tokens per step: elements of the first input of integers (batch, length). None if there is no such input."""
        for v, dim in batch_dims(self.function).items():
            t = v.type
            if isinstance(t, Tensor) and t.dtype.kind == "int" and len(t.global_shape) == 2 and dim == 0:
                return t.global_shape[0] * t.global_shape[1]
        return None

    def training(
        self,
        loss: str,
        optimizer: Optimizer | str = "sgd",
        output: int | str = 0,
        precision: Precision | str = "fp32",
    ) -> Model:
        """The model of one training step. See `training_step` for `loss`.

        `precision`: of products, "fp32", "bf16" or "fp16"; weights and statistics stay float32 (mixed precision).
        Raises MismatchError if a rewrite of the program violates its law (see `distir.api.rewrites`).
        """
        settings = optimizer_named(optimizer) if isinstance(optimizer, str) else optimizer
        if (form := form_of(self.function)) != SEQUENTIAL:
            raise UsageError(f"{self.name} is {form}: only a sequential program can be made a training step")
        given = precision if isinstance(precision, Precision) else Precision(precision)
        low, accumulated = map(precision_named, given)
        step = training_step(self.function, loss, settings, output=output, precision=low, grad_dtype=accumulated)
        check_origins(step)
        return replace(self, function=step, optimizer=settings)

    def with_dtype(self, dtype: DType | str) -> Model:
        """The model with another floating-point type. Raises UsageError for an unknown name."""
        from distir.transforms.rewriting.precision import with_dtype

        new = with_dtype(self.function, dtype_named(dtype))
        arrays = _Renamed(dict(zip(new.inputs, self.function.inputs, strict=True)), self.arrays)
        return replace(self, function=new, arrays=arrays)

    def initial(self, seed: int = 0) -> dict[Value, Any]:
        """An array for every parameter, optimizer state and known constant. State is zero.

        Parameters without an array are random: normal, with variance 1 / (size of the first dim).
        """
        arrays: dict[Value, Any] = {v: self.arrays[v] for v in self.function.inputs if v in self.arrays}
        arrays |= {v: x for v, x in initial_state(self.function).items() if v not in arrays}
        for k, v in enumerate(self.function.inputs):
            if v not in arrays and v in weights(self.function):
                # what is padded is drawn as it was before
                shape = (v.role and v.role.source) or v.type.erased().global_shape  # type: ignore[union-attr]
                draw = np.random.default_rng((seed, k)).standard_normal(shape)
                arrays[v] = (draw / np.sqrt(max(1, shape[0] if shape else 1))).astype(v.type.dtype.numpy)  # type: ignore[union-attr]
        return arrays


class _Renamed(Mapping[Value, Any]):
    """A lazy mapping of arrays, with other keys."""

    def __init__(self, before: Mapping[Value, Any], arrays: Mapping[Any, Any]) -> None:
        self._before = {new: old for new, old in before.items() if old in arrays}
        self._arrays = arrays

    def __getitem__(self, v: Value) -> Any:
        return self._arrays[self._before[v]]

    def __iter__(self):
        return iter(self._before)

    def __len__(self) -> int:
        return len(self._before)


@no_collection()
def load(
    path: str | os.PathLike[str] | Mapping[str, Any],
    dims: Mapping[str, int] | None = None,
    *,
    loss: str | None = None,
    optimizer: Optimizer | str = "sgd",
    dtype: DType | str | None = None,
    batch: str | None = None,
    output: int | str = 0,
    precision: Precision | str = "fp32",
) -> Model:
    """The model in an ONNX file, the program in a .distir file, the model of a Hugging Face config.json (the file, its
    folder, or its fields; see `distir.models.from_config`), or a model by its name and sizes, such as
    "gpt:layers=12,hidden=768,heads=12" or "dlrm" (`distir.models.Decoder` and `Recommender` list them); with `loss`,
    its training step.

    `dims`: sizes of symbolic dims, or fields of `Decoder`, such as `batch` and `seq`; `batch`: the symbolic dim of the
    batch, by default the first. `loss`: "cross-entropy" or "mse" of output `output` (number or name), or the name of a
    value that is the loss; without one, a model whose name comes with a loss (`distir.models.named`) is trained by
    that, one of a config by cross-entropy, but not with "none". `dtype` ("float64", ...): the floating-point type of
    the whole program; `precision`: see `Model.training`. With `batchnorm_groups` among `dims`, batch norms of an ONNX
    file that are in training mode take statistics of each of that many parts of the batch: with as many as replicas and
    microbatches have together, no replica waits for others, as in torch's DistributedDataParallel.

    Raises ModelError for a file that is malformed or has unsupported ops, UsageError for arguments that do not fit it.
    """
    if isinstance(path, Mapping) or (is_config(path) and not is_named(str(path))):
        _no_batch_dim(title_of(path), batch)
        model = _of_built(built_from(path, dims or {}), title_of(path))
    elif is_named(str(path)):
        model = _built(str(path), dims or {}, batch)
    elif Path(path).suffix == TEXT:
        model = _from_text(Path(path), dims or {}, batch)
    else:
        from distir.importer import import_from_onnx

        function, arrays = import_from_onnx(path, dims=dims, batch=batch)
        model = Model(with_causal_attention(function, arrays), arrays, Path(path))
    if loss is None:
        loss = own_loss(path)
    if loss not in (None, NO_LOSS):
        model = model.training(loss, optimizer, output, precision)
    return model if dtype is None else model.with_dtype(dtype)


def _built(text: str, dims: Mapping[str, int], batch: str | None) -> Model:
    """A model by its name and sizes; its weights are random."""
    _no_batch_dim(text, batch)
    return _of_built(built(text, dims), text.partition(":")[0])


def _no_batch_dim(name: str, batch: str | None) -> None:
    if batch is not None:
        raise UsageError(f"{name} has no symbolic dimensions: --batch-dim is for ONNX files", "leave --batch-dim out")


def _of_built(made: Built, title: str | None = None) -> Model:
    return Model(made.function, _Renamed({v: v.name for v in made.function.inputs}, made.arrays), title=title)


def _from_text(path: Path, dims: Mapping[str, int], batch: str | None) -> Model:
    """The program in a .distir file, verified; it has no arrays, and may be sequential, placed or distributed."""
    if dims or batch is not None:
        given = [f"--dim {name}" for name in dims] or ["--batch-dim"]
        raise UsageError(f"{path} has no symbolic dimensions: {given[0]} is for ONNX files", f"leave {given[0]} out")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ModelError(f"cannot read {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ModelError(f"{path} is not text", "distir show and pformat write a program as text") from e
    try:
        function = parse(text)
        verify(function)
    except DistirError as e:
        raise ModelError(f"{path}: {e.message}", e.hint) from None
    return Model(function, {}, path)


def as_model(model: Model | Function | Built | str | os.PathLike[str]) -> Model:
    """A Model, made of a Function or loaded from a path if necessary."""
    if isinstance(model, Model):
        return model
    if isinstance(model, Built):
        return _of_built(model)
    return Model(model) if isinstance(model, Function) else load(model)


def precision_named(name: str) -> DType:
    """The floating-point type of that precision. Raises UsageError if there is none."""
    if name not in PRECISIONS:
        raise UsageError(f"unknown precision {name!r}", f"choose from {', '.join(PRECISIONS)}")
    return DType.all[PRECISIONS[name]]


def dtype_named(dtype: DType | str) -> DType:
    """The floating-point type of that name. Raises UsageError if there is none."""
    if isinstance(dtype, DType):
        return dtype
    found = DType.all.get(DTYPES.get(dtype, dtype))
    if found is None or not found.floating:
        raise UsageError(f"unknown dtype {dtype!r}", f"choose from {', '.join(DTYPES)}")
    return found
