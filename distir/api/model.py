"""A model: its program, the arrays of its weights and constants, and the file it came from."""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeGuard,
    TypeVar,
    Union,
    overload,
)

import numpy as np

from distir.api.masks import with_causal_attention
from distir.api.rewrites import check_origins
from distir.ir import parse, verify
from distir.ir.dtype import dtype_named
from distir.ir.errors import DistirError, ModelError, UsageError, did_you_mean
from distir.ir.function import Function, Value
from distir.ir.pause import no_collection
from distir.ir.type import DType, Float32, Tensor
from distir.models.config_file import is_config
from distir.models.configs import built_from, title_of
from distir.models.named import Built, built, is_named, model_names, own_loss
from distir.transforms.differentiation.training import Optimizer, initial_state, optimizer_named, training_step
from distir.transforms.passes import SEQUENTIAL, form_of
from distir.transforms.roles import batch_dims, batch_size, weights

if TYPE_CHECKING:
    import torch

    from distir.backends.modules.module_weights import Counter

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
ModelSource = Union[str, os.PathLike[str], Mapping[str, Any], "torch.nn.Module"]
"""What `load` takes."""
TEXT = ".distir"
"""Suffix of files that hold a program as text."""
NO_LOSS = "none"
"""The loss of a model that is not trained, though its name comes with one."""
PRECISIONS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
"""Names of the types in mixed precision."""


class Precision(NamedTuple):
    """Types in mixed precision, by name ("fp32", "bf16", "fp16"): of products, and of gradients while they are
    accumulated and reduced."""

    products: str = "fp32"
    gradients: str = "fp32"


def _by_columns(function: Function, ids: Value) -> bool:
    """Whether an op takes integers (batch, n) with another operand that has a dim for each of their n columns."""
    for op in function.ops:
        if op.callee is None and ids in op.inputs:
            shapes = [v.type.global_shape for v in op.inputs if isinstance(v.type, Tensor)]
            f, k = op.spec.factors(op.attributes, shapes), op.inputs.index(ids)
            if f is not None and len(f.ins) == len(op.inputs) and len(f.ins[k]) == 2:
                return any([f.ins[k][1] in names for j, names in enumerate(f.ins) if j != k])
    return False


@dataclass(frozen=True, repr=False)
class Model:
    """A program and the arrays of its parameters and constants, which are read lazily.

    `path` is the file it came from, `title` what it is called without one; `optimizer` that of a training step.
    `parameters`: those of the torch.nn.Module that it came from, and its buffers, by name; a run writes trained
    weights, and running statistics, into them. `counters`: its buffers that count steps.
    """

    function: Function
    arrays: Mapping[Value, Any] = field(default_factory=dict)
    path: Path | None = None
    optimizer: Optimizer | None = None
    title: str | None = None
    parameters: Mapping[str, torch.Tensor] | None = None
    counters: Sequence[Counter] = ()

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
        """Tokens per step: elements of the first input of integers (batch, length).

        None if there is no such input, or if each column picks rows of a table of its own: features, not a sequence.
        """
        for v, dim in batch_dims(self.function).items():
            t = v.type
            if isinstance(t, Tensor) and t.dtype.kind == "int" and len(t.global_shape) == 2 and dim == 0:
                return None if _by_columns(self.function, v) else t.global_shape[0] * t.global_shape[1]
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
        low, accumulated = map(precision_named, _precision(precision))
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


AnyModel = Model | Function | Built | ModelSource
"""What `as_model` takes."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is loaded.

    `dims`: sizes of symbolic dims, or fields of `Decoder`, such as `batch` and `seq`; `batch`: the symbolic dim of the
    batch, by default the first. `loss`: "cross-entropy" or "mse" of output `output` (number or name), or the name of a
    value that is the loss; without one, a model whose name comes with a loss (`distir.models.named`) is trained by
    that, one of a config by cross-entropy, but not with "none". `dtype` ("float64", ...): the floating-point type of
    the whole program; `precision`: see `Model.training`. With `batchnorm_groups` among `dims`, batch norms of an ONNX
    file that are in training mode take statistics of each of that many parts of the batch: with as many as replicas and
    microbatches have together, no replica waits for others, as in torch's DistributedDataParallel.

    Of a torch.nn.Module: `example_inputs` is a tensor, a tuple of positional arguments or a dict of those by name;
    `dim_names` names their dims, such as `{"input_ids": {0: "batch", 1: "seq"}}`; by default dim 0 of the first tensor,
    and of those of that size, is "batch".
    """

    dims: Mapping[str, int] | None = None
    loss: str | None = None
    optimizer: Optimizer | str = "sgd"
    dtype: DType | str | None = None
    batch: str | None = None
    output: int | str = 0
    precision: Precision | str = "fp32"
    example_inputs: Any = None
    dim_names: Mapping[str, Mapping[int, str]] | None = None


OPTIONS = {f.name: f for f in fields(LoadOptions)}
"""The fields of `LoadOptions`, by name."""


@no_collection()
def load(model: ModelSource, *given: Any, **settings: Any) -> Model:
    """The model in an ONNX file, the program in a .distir file, the model of a Hugging Face config.json (the file, its
    folder, or its fields; see `distir.models.from_config`), a model by its name and sizes, such as
    "gpt:layers=12,hidden=768,heads=12" or "dlrm" (`distir.models.Decoder` and `Recommender` list them), or a
    torch.nn.Module; with `loss`, its training step.

        load("gpt2.onnx", {"batch": 8}, loss="cross-entropy")
        load(module, (x,), {"batch": 8}, loss="mse")

    After the model come `dims`, or for a module `example_inputs` and `dims`; for all keywords see `LoadOptions`. A
    module is exported in memory, as it is now, in training or eval mode. Its weights are not copied: a run reads them
    from its parameters, and writes the trained ones back. Those with `requires_grad=False`, and buffers, are
    constants; but running statistics of batch norms in training mode are updated.

    Raises ModelError for a model that is malformed or has unsupported ops, UsageError for arguments that do not fit it.
    """
    names = ("example_inputs", "dims") if is_module(model) else ("dims",)
    if len(given) > len(names):
        raise UsageError(f"load takes a model, {' and '.join(names)}, then keywords: {len(given)} arguments are given")
    options = load_options({**dict(zip(names, given, strict=False)), **settings})
    first, last = _dtypes(options)
    made = _read(model, options)
    made = made if first is None else made.with_dtype(first)
    loss = options.loss
    if loss is None and isinstance(model, str | os.PathLike | Mapping):
        loss = own_loss(model)
    if loss not in (None, NO_LOSS):
        made = made.training(loss, options.optimizer, options.output, options.precision)
    return made if last is None else made.with_dtype(last)


def load_options(settings: Mapping[str, Any]) -> LoadOptions:
    """The options with these fields. Raises UsageError for an unknown one."""
    for name in settings:
        if name not in OPTIONS:
            hint = did_you_mean(name, OPTIONS, f"there are {', '.join(OPTIONS)}")
            raise UsageError(f"load has no option {name!r}", hint)
    return LoadOptions(**settings)


def _dtypes(options: LoadOptions) -> tuple[DType | None, DType | None]:
    """The types that the model gets before it is made a training step, and that all of the step gets; None as it is.

    In mixed precision float32 is that of the model, whose step keeps its 16 bits; float64 widens all of the step.
    Raises UsageError for mixed precision of a model that is to have 16 bits as a whole.
    """
    if options.dtype is None:
        return None, None
    dtype, products = dtype_named(options.dtype), _precision(options.precision).products
    if products == "fp32":
        return None, dtype
    if dtype.size < 4:
        raise UsageError(
            f"precision {products} keeps weights in float32, dtype {dtype} makes them {dtype}, too",
            f"leave out --dtype for mixed precision, --precision for a model in {dtype} as a whole",
        )
    return (dtype, None) if dtype is Float32 else (None, dtype)


def _read(model: ModelSource, options: LoadOptions) -> Model:
    """The model, before it is made a training step."""
    if is_module(model):
        return _of_module(model, options)
    if not isinstance(model, str | os.PathLike | Mapping):
        raise UsageError(f"a model is a file, a name, a config or a torch.nn.Module, not a {type(model).__name__}")
    for name in ("example_inputs", "dim_names"):
        if getattr(options, name) is not None:
            raise UsageError(f"{name} is for a torch.nn.Module", f"leave {name} out")
    dims, batch = options.dims or {}, options.batch
    if isinstance(model, Mapping) or (is_config(model) and not is_named(str(model))):
        _no_batch_dim(title_of(model), batch)
        return _of_built(built_from(model, dims), title_of(model))
    if is_named(str(model)):
        return _built(str(model), dims, batch)
    if Path(model).suffix == TEXT:
        return _from_text(Path(model), dims, batch)
    from distir.importer import import_from_onnx

    check_there(Path(model))
    function, arrays = import_from_onnx(model, dims=dims, batch=batch)
    return Model(with_causal_attention(function, arrays), arrays, Path(model))


def check_there(path: Path) -> None:
    """Raises UsageError if there is no such file, with the model's name, or the file beside it, that may have been
    meant."""
    if not path.exists():
        known = model_names()
        files = [str(p) for p in path.parent.glob("*") if p.suffix == path.suffix] if path.suffix else []
        listed = None if path.suffix else f"models by name are {', '.join(known)}"
        hint = did_you_mean(str(path).partition(":")[0], known) or did_you_mean(str(path), files, listed)
        raise UsageError(f"there is no file {path}", hint)


def is_module(x: object) -> TypeGuard[torch.nn.Module]:
    """Whether it is a torch.nn.Module; loads no torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.nn.Module)


def _of_module(module: torch.nn.Module, options: LoadOptions) -> Model:
    name = type(module).__name__
    if options.example_inputs is None:
        hint = "distir.load(module, example_inputs), or example_inputs=(x,): a tensor, a tuple, or a dict by name"
        raise UsageError(f"{name} is a torch.nn.Module: it is exported with example inputs, and there are none", hint)
    from distir.api.module_outputs import compare_outputs
    from distir.backends.modules.module_export import export_module
    from distir.backends.modules.module_weights import dtype_of_tensor, reader_of
    from distir.importer.onnx import import_graph

    found = export_module(module, options.example_inputs, options.dims, options.dim_names)
    stored = {}
    for key, x in found.stored.items():
        where = f"{name}: {key}"
        stored[key] = dtype_of_tensor(x, where), tuple(x.shape), reader_of(x, where)
    function, arrays = import_graph(found.graph, name, stored, found.trained, found.dims, options.batch, found.numbers)
    function = with_causal_attention(function, arrays)
    compare_outputs(found, function, arrays)
    return Model(function, arrays, title=name, parameters=found.stored, counters=found.counters)


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


def as_model(model: AnyModel, **settings: Any) -> Model:
    """A Model, made of a Function or loaded if necessary. Raises UsageError for `settings` of one that is loaded."""
    if not isinstance(model, Model | Built | Function):
        return load(model, **settings)
    if settings:
        name = model.name if isinstance(model, Model | Function) else model.function.name
        raise UsageError(f"{name} is loaded already: it takes no {next(iter(settings))}", "distir.load takes it")
    if isinstance(model, Model):
        return model
    return _of_built(model) if isinstance(model, Built) else Model(model)


class Loading(Protocol[P, R]):
    """A function of a model, or of what can be loaded and `LoadOptions`."""

    @overload
    def __call__(self, model: AnyModel, *args: P.args, **given: P.kwargs) -> R: ...
    @overload
    def __call__(self, model: ModelSource, *args: Any, **given: Any) -> R: ...


def loads(function: Callable[Concatenate[Model, P], R]) -> Loading[P, R]:
    """Decorator of a function of a Model: it takes all that `load` takes, too, with `LoadOptions` as keywords."""

    @functools.wraps(function)
    def loading(model: AnyModel, *args: Any, **given: Any) -> Any:
        settings = {k: given.pop(k) for k in [*given] if k in OPTIONS}
        known = given.keys() <= shown.parameters.keys()  # else the function says so, before the model is read
        return function(as_model(model, **settings) if known else model, *args, **given)  # type: ignore[arg-type]

    shown = inspect.signature(function)
    first, *others = shown.parameters.values()
    for f in OPTIONS.values():
        others.append(inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type))
    loading.__signature__ = shown.replace(parameters=[first.replace(annotation="AnyModel"), *others])  # type: ignore[attr-defined]
    return loading  # type: ignore[return-value]


def _precision(given: Precision | str) -> Precision:
    """What is given; by one name that of products."""
    return given if isinstance(given, Precision) else Precision(given)


def precision_named(name: str) -> DType:
    """The floating-point type of that precision. Raises UsageError if there is none."""
    if name not in PRECISIONS:
        raise UsageError(f"unknown precision {name!r}", f"choose from {', '.join(PRECISIONS)}")
    return DType.all[PRECISIONS[name]]
