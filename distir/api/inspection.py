"""What a model is, before any plan: its inputs and outputs, weights, work of a sample, and what is not supported."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distir.api.compilation import ONE, cost_model, distribute, predict
from distir.api.figures import Parameters, count, flops, flops_of, parameters, parameters_of, summed
from distir.api.masks import with_causal_attention
from distir.api.model import NO_LOSS, TEXT, AnyModel, Model, as_model, check_there, is_module, load
from distir.api.results import html_table, listed, paragraphs, size
from distir.executor.simulator.categories import ACTIVATION, BUFFER
from distir.ir.errors import DistirError, counted
from distir.ir.function import Function, Value
from distir.ir.pause import no_collection
from distir.ir.type import DType, Tensor
from distir.models.config_file import is_config
from distir.models.configs import described
from distir.models.named import is_named, own_loss, sizes_of, whole_sizes
from distir.transforms.differentiation.training import batch_dim
from distir.transforms.passes import SEQUENTIAL, form_of
from distir.transforms.roles import weights

if TYPE_CHECKING:
    from distir.importer.survey import Unsupported

_SHOWN = 12
"""Lines of a list that are printed; the rest is counted."""
_REASON = 90
"""The most characters of a reason that are printed."""


class Port(NamedTuple):
    """An input or output: sizes and names of symbolic dims; `dims` is None if the rank is not known."""

    name: str
    dtype: str
    dims: tuple[int | str | None, ...] | None

    def __str__(self) -> str:
        dims = "..." if self.dims is None else ", ".join(["?" if d is None else str(d) for d in self.dims])
        return f"{self.dtype}[{dims}]"


class SampleWork(NamedTuple):
    """What a sample costs: FLOPs, two for a multiply-add, and the most bytes of activations, and of buffers for a
    moment, that are live at once on one device, beside inputs, weights, gradients and the optimizer's state.

    `activations` is None where it is not known.
    """

    flops: float
    activations: float | None


@dataclass(frozen=True)
class Inspection:
    """What a model is. Prints as text; all figures are also attributes.

    `form`: what kind of file, and of program. `dims`: the sizes that can be set (`--dim NAME=N`), None for those that
    must be; `assumed`: sizes taken for the latter in what follows. `parameters`: by element type. `forward`,
    `training`: of a sample; the training step by the loss `trained_by`, or None and the reason (`untrained`).
    `losses`: values of `--loss` that fit, with the output that each is of. `unsupported`: every op that cannot be
    imported; then `forward` counts what could be, and `untried` are the nodes that were not tried, as the types of
    their operands are not known. `external`: bytes of weights in other files, `files`.
    """

    model: str
    form: str
    inputs: list[Port] = field(default_factory=list)
    outputs: list[Port] = field(default_factory=list)
    dims: Mapping[str, int | None] = field(default_factory=dict)
    assumed: dict[str, int] = field(default_factory=dict)
    batch: int | None = None
    parameters: dict[str, Parameters] = field(default_factory=dict)
    forward: SampleWork | None = None
    training: SampleWork | None = None
    trained_by: str | None = None
    untrained: str | None = None
    losses: list[tuple[str, str]] = field(default_factory=list)
    opset: int | None = None
    external: int = 0
    files: list[str] = field(default_factory=list)
    unsupported: list[Unsupported] = field(default_factory=list)
    untried: int = 0

    @property
    def ok(self) -> bool:
        """Whether the model can be loaded, once its dims are given."""
        return not self.unsupported

    def needed(self) -> str:
        """The flags that must be given, with sizes to begin with; empty if there are none."""
        return " ".join(f"--dim {name}={self.assumed.get(name, 1)}" for name, n in self.dims.items() if n is None)

    def table(self) -> list[tuple[str, str, str]]:
        """A row per input and output, and per kind of parameters."""
        rows = [("", "name", "type")]
        for what, ports in (("input", self.inputs), ("output", self.outputs)):
            rows += [(what, p.name, str(p)) for p in ports[:_SHOWN]]
            if len(ports) > _SHOWN:
                rows.append((what, f"and {len(ports) - _SHOWN} more", ""))
        return rows

    def unsupported_table(self) -> list[tuple[str, str, str, str]]:
        """A header, and a row per op that cannot be imported; empty if all can."""
        if self.ok:
            return []
        rows = [("not supported", "count", "first", "why")]
        for u in self.unsupported:
            why = u.reason if len(u.reason) <= _REASON else f"{u.reason[:_REASON]} ..."
            rows.append((u.op, f"{u.count:,}", u.first, why))
        return rows

    def head(self) -> list[str]:
        """The file, and what must be given."""
        lines = [f"{self.model}: {self.form}"]
        if flags := self.needed():
            taken = ", ".join(f"{name} = {n}" for name, n in self.assumed.items())
            lines.append(f"needs {flags} (or other sizes); below, {taken}")
        elif self.dims:
            lines.append(f"sizes (--dim NAME=N): {', '.join(f'{name} {n:,}' for name, n in self.dims.items())}")
        return lines

    def lines(self) -> list[str]:
        """Parameters, work of a sample, losses."""
        total = summed(self.parameters)
        kinds = ", ".join(f"{counted(p.tensors, 'tensor')} of {name}" for name, p in self.parameters.items())
        lines = [f"parameters: {total.elements:,} in {size(total.bytes)} ({kinds or 'none'})"]
        if self.opset is not None:
            where = (
                f"{size(self.external)} of them outside the file, in {listed(self.files)}"
                if self.files
                else "in the file"
            )
            lines[0] += f", {where}"
        for name, work in (("forward", self.forward), (f"training by {self.trained_by}", self.training)):
            if work is not None:
                parts = [f"{'at least ' if self.unsupported else ''}{count(work.flops)}FLOPs"]
                parts += [] if work.activations is None else [f"{size(work.activations)} of activations"]
                lines.append(f"{name}: {', '.join(parts)} a sample")
        if self.untrained:
            lines.append(f"not trained: {self.untrained}")
        if self.losses:
            lines.append(f"losses: {', '.join(f'--loss {loss} (of {of})' for loss, of in self.losses[:_SHOWN])}")
        return lines

    def end(self) -> list[str]:
        """What could not be tried."""
        return [f"not tried, for want of the operands' types: {counted(self.untried, 'node')}"] if self.untried else []

    def __str__(self) -> str:
        parts = [self.head(), _left(self.table()), self.lines()]
        if not self.ok:
            parts.append([*_left(self.unsupported_table()), *self.end()])
        return "\n\n".join("\n".join(part) for part in parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rest = "" if self.ok else html_table(self.unsupported_table()) + paragraphs(self.end())
        return paragraphs(self.head()) + html_table(self.table()) + paragraphs(self.lines()) + rest

    def to_json(self) -> dict[str, Any]:
        """JSON; FLOPs and bytes are of a sample."""
        ports = {"inputs": self.inputs, "outputs": self.outputs}
        return {
            **{name: getattr(self, name) for name in ("model", "form", "opset", "dims", "assumed", "batch")},
            **{name: [p._asdict() for p in row] for name, row in ports.items()},
            "parameters": {name: p._asdict() for name, p in self.parameters.items()},
            "external_bytes": self.external,
            "external_files": self.files,
            "forward": self.forward and self.forward._asdict(),
            "training": self.training and self.training._asdict(),
            "trained_by": self.trained_by,
            "not_trained": self.untrained,
            "losses": [{"loss": loss, "output": of} for loss, of in self.losses],
            "supported": self.ok,
            "unsupported": [u._asdict() for u in self.unsupported],
            "untried_nodes": self.untried,
        }


@no_collection()
def inspect(
    model: AnyModel,
    dims: Mapping[str, int] | None = None,
    *,
    batch: str | None = None,
    loss: str | None = None,
    example_inputs: Any = None,
) -> Inspection:
    """What a model is: whatever `load` takes, or a Model. Nothing is run, and no weight is read.

    `dims`, `batch` and a module's `example_inputs` are as of `load`; dims that are left out are assumed
    (`Inspection.assumed`). `loss` is what the training step is made with, by default the first that fits. Ops that
    distir does not know are no error: all of them are listed (`Inspection.unsupported`). Raises ModelError for a file
    that is no model, UsageError as `load`.
    """
    if is_module(model):
        made = load(model, example_inputs, dims, batch=batch, loss=NO_LOSS)
        return _of_model(made, "a torch.nn.Module", loss)
    if isinstance(model, str | os.PathLike) and not _is_built(model) and Path(model).suffix != TEXT:
        return _of_onnx(Path(model), dims or {}, batch, loss)
    if not isinstance(model, str | os.PathLike | Mapping):
        return _of_model(as_model(model), "a program", loss)
    found = load(model, dims, batch=batch, loss=NO_LOSS)
    if not _is_built(model):
        return _of_model(found, f"a program as text, {form_of(found.function)}", loss)
    if not isinstance(model, Mapping) and is_named(os.fspath(model)):
        form, sizes = "a model by its name", sizes_of(os.fspath(model), dims or {})
    else:
        form, sizes = "a Hugging Face config", whole_sizes(described(model, dims))
    return replace(_of_model(found, form, loss or own_loss(model)), dims=sizes)


def _is_built(model: str | os.PathLike[str] | Mapping[str, Any]) -> bool:
    """Whether distir makes the program itself: of a name, or of a config."""
    return isinstance(model, Mapping) or is_named(os.fspath(model)) or is_config(model)


def _of_onnx(path: Path, dims: Mapping[str, int], batch: str | None, loss: str | None) -> Inspection:
    from distir.importer.survey import survey

    check_there(path)
    found = survey(path, dims, batch)
    symbols = dict.fromkeys([d for p in found.inputs for d in p.dims or () if isinstance(d, str)])
    form = f"ONNX, opset {found.opset}, {counted(found.nodes, 'node')}"
    if found.program is not None:
        function, arrays = found.program
        made = _of_model(Model(with_causal_attention(function, arrays), arrays, path), form, loss)
    else:
        sizes = {**dims, **found.assumed}
        samples = sizes.get(batch or next(iter(symbols), ""), 1)
        made = Inspection(
            path.name,
            form,
            parameters=parameters_of([(name, shape, DType.all[name].size) for name, shape in found.weights]),
            forward=SampleWork(flops_of(found.ops) / samples, None) if found.ops else None,
        )
    return replace(
        made,
        inputs=[Port(*x) for x in found.inputs],
        outputs=[Port(*x) for x in found.outputs],
        dims={d: dims.get(d) for d in symbols},
        assumed=found.assumed,
        external=found.external,
        files=found.files,
        opset=found.opset,
        unsupported=found.unsupported,
        untried=found.untried,
    )


def _of_model(model: Model, form: str, loss: str | None) -> Inspection:
    """All that a program says; its training step too, if it is a forward pass of one device."""
    function = model.function
    held = dict.fromkeys(weights(function))
    inputs = [v for v in function.inputs if v not in held and v.kind in ("data", None)]
    made = Inspection(
        model.name,
        form,
        [Port(v.name, v.type.dtype.name, v.type.global_shape) for v in inputs if isinstance(v.type, Tensor)],
        [_port(v) for v in function.outputs if v not in function.updates],
        batch=model.batch,
        parameters=parameters(function),
    )
    if form_of(function) != SEQUENTIAL or function.updates:
        what = "training" if function.updates else "forward"
        done = SampleWork(flops(function) / model.batch, None)
        return replace(made, **{what: done}, trained_by="its own loss" if function.updates else None)
    losses = _losses(function)
    by = loss if loss not in (None, NO_LOSS) else next((name for name, _ in losses), None)
    step, why = None, None if by else "no output is a number, or numbers of a batch"
    if by is not None:
        try:
            step = _work(model.training(by))
        except DistirError as e:
            why = e.message
    return replace(made, forward=_work(model), training=step, trained_by=by, untrained=why, losses=losses)


def _port(v: Value) -> Port:
    t = v.type
    return Port(v.name, t.dtype.name, t.global_shape) if isinstance(t, Tensor) else Port(v.name, "bundle", None)


def _work(model: Model) -> SampleWork:
    """What a sample of a sequential program costs, run op by op on one device."""
    cost = cost_model("cpu-2core", ONE)
    device = cost.topology.devices[0]
    program = distribute(model, ONE, [device], check=False)
    use = predict(model, ONE, program, cost).simulation.memory(device)
    live = max([point.highest[ACTIVATION] + point.highest[BUFFER] for point in use.curve], default=0)
    return SampleWork(flops(model.function) / model.batch, max(0, live - use.start[BUFFER]) / model.batch)


def _losses(function: Function) -> list[tuple[str, str]]:
    """What `--loss` may be: single numbers by their names; then the losses of the first output that fit it."""
    floats = {v: t.global_shape for v in function.outputs if isinstance(t := v.type, Tensor) and t.dtype.floating}
    found = [(v.name, v.name) for v, shape in floats.items() if shape == ()]
    first = function.outputs[0]
    if shape := floats.get(first):
        if len(shape) > 1 and batch_dim(function, first) != len(shape) - 1:
            found.append(("cross-entropy", first.name))
        found.append(("mse", first.name))
    return found


def _left(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table of texts."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows]
