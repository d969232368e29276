"""The training step: a function with its loss, dropout, backward pass and optimizer, as one program.

`training_step(function, loss, optimizer)`. Inputs are those of the function (the same Values), then the labels, then
the optimizer's state; outputs are the loss, the gradients if asked for, then the next value of every parameter and
state, which `Function.updates` ties to its input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from distir.ir.dtype import DType
from distir.ir.errors import UsageError
from distir.ir.function import Attributes, Function, FunctionMaker, Role, Value
from distir.ir.pause import no_collection
from distir.ir.placement import Shard, splits
from distir.ir.spec import lookup
from distir.ir.type import Float16, Float32, Int64, Tensor
from distir.ops.rules import cast, shape_of, tensor
from distir.transforms.differentiation.batch_statistics import next_statistics, with_batch_statistics
from distir.transforms.differentiation.clip import clip_factor, sum_of_squares
from distir.transforms.differentiation.draw_dropout import step_of, with_dropout
from distir.transforms.differentiation.grad import find_loss, grad, parameters, sources
from distir.transforms.differentiation.loss_scale import LossScale, scale_loss, skips, unscale
from distir.transforms.rewriting.cleanup import extend, fold
from distir.transforms.rewriting.fuse import fuse
from distir.transforms.rewriting.laws import Law, rewrites
from distir.transforms.rewriting.mixed_precision import mixed_precision
from distir.transforms.rewriting.touch_rows import touch_rows

if TYPE_CHECKING:
    import numpy as np

_CAST = lookup("Cast")
IGNORED = -100
"""The label that is ignored in the cross-entropy and in its mean."""


@dataclass(frozen=True)
class LearningRate:
    """A schedule of the learning rate: from 0 to the optimizer's `lr` in `warmup` steps, linearly; then, if `decay` is
    "linear" or "cosine", down to `least`, which is reached at step number `steps`.

    Raises UsageError for another decay, or one that has no steps.
    """

    warmup: int = 0
    decay: str = "none"
    steps: int = 0
    least: float = 0.0

    def __post_init__(self) -> None:
        if self.decay not in ("none", "linear", "cosine"):
            raise UsageError(f"unknown decay {self.decay!r} of the learning rate", "choose from none, linear, cosine")
        if self.decay != "none" and self.steps <= self.warmup:
            raise UsageError(
                f"the learning rate decays from step {self.warmup} to step {self.steps}", "give it more steps"
            )


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, as `torch.optim.SGD`. With momentum, one buffer a parameter.

    `clip_norm`: see `clip`. `schedule`: of the learning rate. With `decay_vectors` false, weights of fewer than two
    dims, such as those of norms and biases, do not decay. `dropout_seed`: see `with_dropout`.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    clip_norm: float | None = None
    schedule: LearningRate | None = None
    decay_vectors: bool = True
    dropout_seed: int = field(default=0, repr=False)

    op_type: ClassVar[str] = "SGD"
    counts: ClassVar[bool] = False

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of its state, for one parameter."""
        return ("momentum",) if self.momentum else ()

    @property
    def attributes(self) -> dict[str, Any]:
        nesterov = {"nesterov": True} if self.nesterov else {}
        return {"lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay, **nesterov}


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, as `torch.optim.AdamW`. Two moments a parameter, one step counter for all.

    `clip_norm`, `schedule`, `decay_vectors`, `dropout_seed`: as of `SGD`.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    clip_norm: float | None = None
    schedule: LearningRate | None = None
    decay_vectors: bool = True
    dropout_seed: int = field(default=0, repr=False)

    op_type: ClassVar[str] = "AdamW"
    slots: ClassVar[tuple[str, ...]] = ("m", "v")
    counts: ClassVar[bool] = True

    @property
    def attributes(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": tuple(self.betas), "eps": self.eps, "weight_decay": self.weight_decay}


Optimizer = SGD | AdamW
OPTIMIZERS: dict[str, type[SGD] | type[AdamW]] = {"sgd": SGD, "adamw": AdamW}


def optimizer_named(name: str, **settings: Any) -> Optimizer:
    """The optimizer of that name ("sgd", "adamw"); settings that are None keep their default.

    Raises UsageError for another name, a setting it does not have, or a learning rate that would rise where it decays.
    """
    kind = OPTIMIZERS.get(name.lower())
    if kind is None:
        raise UsageError(f"unknown optimizer {name!r}", f"choose from {', '.join(OPTIMIZERS)}")
    given = {k: v for k, v in settings.items() if v is not None}
    names = [f.name for f in fields(kind)]
    if unknown := [k for k in given if k not in names]:
        raise UsageError(f"{name} has no {unknown[0]}", f"it has {', '.join(names)}")
    made = kind(**given)
    if made.schedule is not None and made.schedule.decay != "none" and made.schedule.least > made.lr:
        raise UsageError(
            f"the learning rate would decay from {made.lr:g} to {made.schedule.least:g}", "a lower --min-lr"
        )
    return made


@no_collection()
def training_step(
    function: Function,
    loss: str = "cross-entropy",
    optimizer: Optimizer | str = "sgd",
    gradients: bool = False,
    output: int | str = 0,
    precision: DType = Float32,
    grad_dtype: DType = Float32,
) -> Function:
    """One step of training `function`: forward, loss, backward, and the update of every parameter.

    `loss` is "cross-entropy" (adds an input `labels` of integers in [0, classes), of the shape of `output` without its
    last dim, the classes; -100 is ignored), "mse" (adds an input `target` of the shape of `output`), or the name of a
    value that is the loss. Both are means over the whole batch. `optimizer` is one of the dataclasses here, or "sgd",
    "adamw" with default settings.

    Inputs: the function's, the labels, then of role state for each parameter the optimizer's buffers, and the step
    counter; all start at zero (`initial_state`). Outputs: the loss; with `gradients` each parameter's gradient, in
    order; then, parameter by parameter, its next value and those of its buffers; the next step counter; the running
    statistics of batch norms in training mode. `updates` ties them to their inputs. A parameter that the loss does not
    depend on has no gradient, state or update. With another `precision` than float32 products are in it, weights and
    statistics in float32 (`mixed_precision`); gradients are accumulated in `grad_dtype`, float32 or that. In float16
    the loss is scaled (`loss_scale`). Dropout is drawn at random, from the optimizer's `dropout_seed` and the step
    counter (`with_dropout`).

    Raises UsageError for a loss that is not there or not a number, or if the function has no parameters.
    """
    settings = optimizer_named(optimizer) if isinstance(optimizer, str) else optimizer
    forward = with_batch_statistics(fuse(with_loss(function, loss, output)))
    forward = with_dropout(forward, settings.dropout_seed)
    if grad_dtype not in (Float32, precision):
        message = f"gradients are accumulated in f32 or in the precision, {precision}; got {grad_dtype}"
        raise UsageError(message, f"set the precision to {grad_dtype}, too")
    forward = forward if precision is Float32 else mixed_precision(forward, precision)
    forward = with_scaled_loss(forward) if precision is Float16 else forward
    target = forward.outputs[-1]
    needed = sources(forward, target)
    trained = [w for w in parameters(function) if w in needed]
    if not trained:
        raise UsageError(f"{function.name}: the loss %{target.name} depends on no parameter")
    backward = grad(forward, target, trained)
    scaling = LossScale.of(forward) if precision is Float16 else None
    return touch_rows(fold(with_updates(backward, settings, trained, gradients, grad_dtype, scaling)))


@rewrites(Law.MORE)
def with_loss(function: Function, loss: str, output: int | str = 0) -> Function:
    """The function with the loss as its one output: see `training_step`."""
    maker = extend(function)
    maker.set_outputs([add_loss(maker, function, loss, output)])
    return maker.finalize()


@rewrites(Law.MORE)
def with_scaled_loss(function: Function) -> Function:
    """A loss, with the scaled loss as second output."""
    maker = extend(function)
    maker.set_outputs([function.outputs[0], scale_loss(maker, function.outputs[0])])
    return maker.finalize()


@rewrites(Law.MORE)
def with_updates(
    backward: Function,
    optimizer: Optimizer,
    trained: Sequence[Value],
    gradients: bool,
    grad_dtype: DType = Float32,
    scaling: LossScale | None = None,
) -> Function:
    """A loss and the gradients of what is `trained`, with one step of the optimizer: see `training_step`."""
    maker = extend(backward)
    found = backward.outputs[len(backward.outputs) - len(trained) :]
    given = dict(zip(trained, narrowed(maker, found, grad_dtype), strict=True))
    new = update(maker, optimizer, given, scaling, step_of(backward))
    statistics = next_statistics(maker)
    maker.updates.update(statistics)
    if scaling is not None and gradients:
        inverse = maker.emit("Reciprocal", scaling.scale)
        found = [maker.emit("Scale", g, inverse) for g in found]
    maker.set_outputs([backward.outputs[0], *(found if gradients else ()), *new, *statistics])
    return maker.finalize()


def narrowed(maker: FunctionMaker, gradients: Sequence[Value], dtype: DType) -> Sequence[Value]:
    """Gradients in that dtype, as they were before they were cast from it; if it is float32, as they are."""
    if dtype is Float32:
        return gradients
    before = {op.outputs[0]: op.inputs[0] for op in maker.ops if op.spec is _CAST}
    narrow = [before.get(g, g) for g in gradients]
    return [v if tensor(v).dtype is dtype else cast(maker, g, dtype) for v, g in zip(narrow, gradients, strict=True)]


def initial_state(function: Function) -> dict[Value, np.ndarray]:
    """Zeros for every input of role state. Memory is taken when they are written to."""
    import numpy as np

    return {v: np.zeros(shape_of(v), tensor(v).dtype.numpy) for v in function.inputs if v.kind == "state"}


def add_loss(maker: FunctionMaker, function: Function, loss: str, output: int | str = 0) -> Value:
    """Append the loss and the input it needs; returns the loss, checked to be a scalar. See `training_step`."""
    if loss not in ("cross-entropy", "mse"):
        return find_loss(function, loss)
    x = _output(function, output)
    t = tensor(x)
    if not t.dtype.floating:
        raise UsageError(f"the loss {loss} needs an output of floating type, %{x.name} is {t}")
    batch = batch_dim(function, x)
    if loss == "mse":
        z = maker.add_input_value("target", t, Role("data", batch))
        return maker.add_op("MSELoss", "loss", [x, z], {"reduction": "mean"})
    shape = t.global_shape[:-1]
    if not t.global_shape or batch == len(shape):
        raise UsageError(f"the last dim of %{x.name}, {t}, is not one of classes", "use the loss mse")
    labels = maker.add_input_value("labels", Tensor(Int64, shape), Role("data", batch))
    attributes = {"ignore_index": IGNORED, "reduction": "mean"}
    return maker.add_op("SoftmaxCrossEntropyLoss", "loss", [x, labels], attributes)


def _output(function: Function, output: int | str) -> Value:
    for i, v in enumerate(function.outputs):
        if output in (i, v.name):
            return v
    names = ", ".join(v.name for v in function.outputs)
    raise UsageError(f"{function.name} has no output {output!r}", f"its outputs are {names}")


def batch_dim(function: Function, value: Value) -> int | None:
    """The dim of `value` that runs over the batch, followed from the data inputs through the ops; 0 if it is lost.

    None for a value of one number.
    """
    split: dict[Value, Shard] = {}
    for v in function.inputs:
        if v.kind == "data" and v.role is not None and v.role.batch is not None:
            split[v] = Shard(v.role.batch)
    sizes = {shape_of(v)[s.dim] for v, s in split.items()}
    if len(sizes) == 1:
        (size,) = sizes
        known: dict[tuple[object, ...], list[tuple[int, Shard]]] = {}  # layers are alike
        for op in function.ops:
            if split.keys().isdisjoint(op.inputs) or op.spec.comm is not None:
                continue
            slot, taken = next((k, split[v]) for k, v in enumerate(op.inputs) if v in split)
            key = op.spec, op.attributes.form, slot, taken, *[v.type for v in op.inputs]
            if key not in known:
                ins, outs = ([shape_of(v) for v in row] for row in (op.inputs, op.outputs))
                mapping = op.spec.mapping(op.attributes, ins, outs, slot, taken, size)
                known[key] = list(splits(mapping.outs if mapping else ()))
            for k, p in known[key]:
                split[op.outputs[k]] = p
    if value in split:
        return split[value].dim
    return 0 if shape_of(value) else None


def update(
    maker: FunctionMaker,
    optimizer: Optimizer,
    gradients: Mapping[Value, Value],
    scaling: LossScale | None = None,
    step: Value | None = None,
) -> Sequence[Value]:
    """Append one optimizer op for each parameter, given its gradient; gives the next values, in order.

    Adds the inputs that hold the optimizer's state, and ties each next value to its input in `maker.updates`. With
    `scaling` the gradients are those of the scaled loss. `step`: the step counter, if the program has one already.
    """
    before = len(maker.updates)
    factor = skip = None
    if gradients and (scaling is not None or optimizer.clip_norm is not None):
        squares = sum_of_squares(maker, [*gradients.values()])
        if scaling is not None:
            skip = skips(maker, scaling, squares)
            factor, squares = unscale(maker, scaling, squares)
        if optimizer.clip_norm is not None:
            clipping = clip_factor(maker, squares, optimizer.clip_norm)
            factor = clipping if factor is None else maker.emit("Mul", factor, clipping)
    shared = list(maker.updates)[before:]
    role = Role("state")
    state = {
        w: [maker.add_input_value(f"{w.name}.{slot}", w.type, role) for slot in optimizer.slots] for w in gradients
    }
    counter: list[Value] = []
    numbers: list[Value] = []
    """The operands that all weights share."""
    after: list[Value] = []
    if step is None and (optimizer.counts or optimizer.schedule is not None):
        step = maker.add_input_value("step", Tensor(Int64, ()), Role("state"))
    if step is not None:
        one = maker.emit("Constant", value=(1,), shape=(), dtype=Int64)
        taken = one if skip is None else maker.emit("Cast", maker.emit("Not", skip), to=Int64)
        counter = [maker.add_op("Add", "step.new", [step, taken])]
        maker.updates[counter[0]] = step
        numbers = counter if optimizer.counts else []
    given = optimizer.attributes
    if optimizer.schedule is not None:
        schedule = {"lr": float(optimizer.lr), **asdict(optimizer.schedule)}
        numbers = [*numbers, maker.add_op("LearningRate", "lr", counter, schedule)]
        given["scheduled"] = True
    if skip is not None:
        numbers = [*numbers, skip]
        given["skips"] = True
    attributes, flat = Attributes(given), Attributes({**given, "weight_decay": 0.0})
    for w, g in gradients.items():
        g = g if factor is None else maker.emit("Scale", g, factor)  # just before its use: it lives no longer
        old = [w, *state[w]]
        names = [f"{v.name}.new" for v in old]
        operands = [w, g, *state[w], *numbers]
        decays = optimizer.decay_vectors or len(shape_of(w)) > 1
        maker.add_op(optimizer.op_type, None, operands, attributes if decays else flat, output_names=names)
        new = maker.ops[-1].outputs
        maker.updates.update(zip(new, old, strict=True))
        after += new
    return [*after, *counter, *shared]
