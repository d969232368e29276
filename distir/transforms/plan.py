"""The plan: every setting of how a program is spread over devices, as one value.

`Plan` is the table: a field is a line, with its default and a sentence of help. The flags of the command line, JSON,
TOML and `repr` are made from its fields. A field with a strategy is an axis of the mesh of devices, and its value the
number of devices along it; what a strategy does is a row of `sharding.strategies.STRATEGIES`.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import re
from collections.abc import Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from functools import cached_property
from os import PathLike, fspath
from typing import Any, NamedTuple

from distir.ir.device import STREAMS, TIME
from distir.ir.errors import InfeasibleError, UsageError, counted, did_you_mean
from distir.ir.files import read_toml, written
from distir.transforms.pipeline.keep_whole import GATHERED_AGAIN
from distir.transforms.pipeline.phases import BACKWARD, PHASES
from distir.transforms.pipeline.recompute import WORDS
from distir.transforms.pipeline.schedule import Schedule, check_name, make_table
from distir.transforms.pipeline.schedule_table import as_table, format_table, parse_table

BATCH, WEIGHTS, STAGES, INPUTS = "batch", "weights", "stages", "inputs"
"""Strategies: the axis splits the batch; the weights; the program, into pipeline stages; dims of inputs by name."""
_NESTING = (WEIGHTS, INPUTS, BATCH, STAGES)
"""The order of axes, from consecutive device numbers to the outermost: weights' axes send the most bytes."""
BUCKET_MB = 25.0
"""The size of gradient buckets, in MiB: torch's DistributedDataParallel has the same default."""
MIB = 1 << 20
MOST = 1 << 20
"""The most devices of a plan: that many can be listed in a few seconds."""
EVEN, BALANCED = "even", "balanced"
"""In place of weights to cut at: as many layers in each stage; stages balanced by cost, the default."""
_NO_NUMBER = "inf"
"""Infinity, as TOML has it and JSON has not."""


class Axis(NamedTuple):
    """An axis of the mesh of devices: how many devices it has, and by which strategy values are placed along it."""

    name: str
    size: int
    strategy: str


class InputSplit(NamedTuple):
    """An axis along which dims of inputs are split: its name and size, and the dims, each as (name of the input, dim).

    A name may have `*` for any characters. As text: `cp=4:tokens.1,labels.1`.
    """

    axis: str
    size: int
    dims: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.axis}={self.size}:{','.join([f'{name}.{dim}' for name, dim in self.dims])}"

    @staticmethod
    def parse(text: str) -> InputSplit:
        """The axis that a text says. Raises UsageError for one that says none."""
        head, _, tail = text.partition(":")
        axis, _, size = head.partition("=")
        dims = [(name, dim) for name, _, dim in [part.strip().rpartition(".") for part in tail.split(",")]]
        readable = size.isdecimal() and len(size) < 10 and int(size) > 0
        if not readable or not all(name and dim.isdecimal() and len(dim) < 10 for name, dim in dims):
            raise UsageError(
                f"split: expected AXIS=N:INPUT.DIM,..., got {text!r}", "such as --split cp=4:tokens.1,labels.1"
            )
        if not _AXIS_NAME.fullmatch(axis):
            raise UsageError(f"split: expected a name of letters and digits for an axis, got {axis!r}")
        return InputSplit(axis, int(size), tuple([(name, int(dim)) for name, dim in dims]))


class Sharding(NamedTuple):
    """The settings that decide placements, and the axes of more than one device, but that of stages."""

    axes: tuple[Axis, ...] = ()
    microbatches: int = 1
    zero: int = 0
    sequence: bool = False
    pad_multiple: int = 1

    def along(self, strategy: str) -> tuple[Axis, ...]:
        """The axes of a strategy."""
        return tuple([a for a in self.axes if a.strategy == strategy])

    @property
    def pieces(self) -> int:
        """The number of pieces into which the batch is split, over microbatches and devices."""
        return self.microbatches * math.prod([a.size for a in self.along(BATCH)])


def _setting(default: Any, text: str, **more: Any) -> Any:
    """A field with its help. `more`: `choices`; `check`, a function that gives the value or raises ValueError; `usual`,
    one that makes the default; `read`, one of what TOML gives and of where that is; `written`, one of a plan that gives
    TOML for a value that is neither a string nor a path; `kind`, how a flag is read, if not as the default's type.
    """
    return field(default=default, metadata={"help": text, **more})


def _axis(strategy: str, text: str) -> Any:
    return _setting(1, text, strategy=strategy)


def _recomputed(x: Any) -> str:
    """What to recompute. Raises ValueError unless it is one of the words, or a number of bytes."""
    text = str(x)
    if text not in WORDS and not 0 <= float(text) < math.inf:
        raise ValueError(text)
    return text


def _splits(given: Any) -> tuple[InputSplit, ...]:
    """The further axes, from texts or as they are. Raises UsageError for what is none, or an axis given twice."""
    if isinstance(given, str) or not isinstance(given, list | tuple):
        raise UsageError(f"split is a list of texts such as 'cp=4:tokens.1', got {given!r}")
    found = tuple([x if isinstance(x, InputSplit) else InputSplit.parse(str(x)) for x in given])
    names = [split.axis for split in found]
    for name in names:
        if name in STREAMS:
            raise UsageError(f"split: an axis cannot be named {name}, as a device's streams are", "choose another name")
        if name in _RESERVED or name in [f.name for f in AXES] or names.count(name) > 1:
            raise UsageError(f"split: the plan has an axis {name} already", "choose another name")
    return found


def _cuts(given: Any) -> tuple[str, ...]:
    """Where stages begin: names and numbers of layers, or a word. Raises UsageError for what is none."""
    words = (given,) if given in (EVEN, BALANCED) else given
    if not isinstance(words, list | tuple) or not all(_is_cut(x) for x in words):
        raise UsageError(f"cut is a list of names or numbers of layers, {EVEN!r} or {BALANCED!r}, got {given!r}")
    found = tuple(map(str, words))
    return () if found == (BALANCED,) else found


def _is_cut(x: Any) -> bool:
    number = isinstance(x, numbers.Integral) and not isinstance(x, bool) and int(x) >= 0
    return number or (isinstance(x, str) and x != "")


@dataclass(frozen=True, repr=False)
class Plan:
    """How a program is spread over dp * tp * pp devices: replicas, tensor shards, pipeline stages.

    `split` are further axes, which multiply the number of devices: along each, named dims of inputs are split
    (`InputSplit`, or its text), and what is computed from them where that costs least. `cut` says where
    each pipeline stage but the first begins, by the name of a weight or the number of a layer, from 0; or it is "even",
    for as many layers each (`distir.transforms.pipeline.layers`). Without, stages are balanced. The batch is cut into
    `microbatches`. `schedule` is "1f1b", "gpipe", "interleaved" (with `chunks` stages a pipeline rank) or "distir2021";
    or a table of one's own (`distir.transforms.pipeline.schedule`), or the path of its file. `order` lists the axes,
    from the one whose devices have consecutive numbers to the outermost. Without `overlap` a device does one thing at a
    time, and gradients are reduced when all microbatches are done. Gradients are reduced in buckets of `bucket_mb` MiB:
    0 for one each, infinity for one in all. With `zero` 1, 2 or 3 replicas split the optimizer's state, also gradients,
    also parameters among them (Rajbhandari et al. 2020), and with devices along axes of `split`, but those that split
    the batch alone; `gathered_again` says which of these the backward pass gathers again: "all", or only those of
    "blocks" (`transforms.pipeline.keep_whole`). With `sequence_parallel` activations
    between the products of tensor parallelism are sharded by sequence (`transforms.sharding.sequence`). `recompute`
    says what the backward pass recomputes: "none", "gathers", "attention", "selective", "full", "products",
    "all-products", or a number of bytes (`transforms.pipeline.recompute`). Dims of weights are padded so that what a
    device holds of them is a multiple of `pad_multiple` (`transforms.sharding.pad`). `loss_gradient` says which pass
    computes the gradient of the loss with respect to itself: DistIR (2021) counted it to the forward pass.

    Raises UsageError for a value that is none of the field's, InfeasibleError for more devices than can be listed.
    """

    dp: int = _axis(BATCH, "replicas (data parallelism)")
    tp: int = _axis(WEIGHTS, "shards of each weight (tensor parallelism)")
    pp: int = _axis(STAGES, "pipeline ranks")
    microbatches: int = _setting(1, "pieces of the batch, one after the other")
    schedule: Schedule = _setting(  # noqa: RUF009
        "1f1b",
        "the pipeline schedule: a name, or the file of a table (see `distir schedule`)",
        check=lambda x: x,  # `make_table` checks schedules
        read=lambda x, where: _read_schedule(x, where),
        written=lambda plan: _table_as_toml(plan),
        kind="schedule",
    )
    order: tuple[str, ...] = _setting(
        (),
        "the axes, from the one whose devices have consecutive numbers to the outermost",
        usual=lambda: default_order(),
        read=lambda x, where: tuple(x) if isinstance(x, list) else x,
    )
    chunks: int = _setting(1, "stages per pipeline rank of an interleaved schedule")
    overlap: bool = _setting(
        True, "overlap communication with compute, and reduce gradients while the last backward pass still runs"
    )
    bucket_mb: float = _setting(
        BUCKET_MB, "MiB of gradients that are reduced together, in a bucket; 0: each gradient alone; inf: all in one"
    )
    zero: int = _setting(
        0,
        "ZeRO stage, what is sharded across the replicas, and what further axes leave whole across these: nothing (0), "
        "the optimizer's state (1), gradients too (2), parameters too (3)",
        choices=(0, 1, 2, 3),
    )
    gathered_again: str = _setting(
        "all",
        "with ZeRO 3, the weights that the backward pass gathers again: all, or blocks (those of repeated blocks but "
        "the last; all others stay whole)",
        choices=GATHERED_AGAIN,
    )
    sequence_parallel: bool = _setting(
        False,
        "sequence parallelism: shard activations along the sequence where tensor parallelism would replicate them",
    )
    recompute: str = _setting(
        "none",
        "activations that the backward pass recomputes instead of saving them: none, gathers (of shards), attention "
        "(gathers, scores and probabilities), selective (what is cheap), full (all of each repeated block but its "
        "input), products (that, but what attention and every second product make), all-products (the same, kept "
        "whether needed or not), or the bytes that a device may save of a microbatch",
        check=_recomputed,
    )
    loss_gradient: str = _setting(
        PHASES[BACKWARD].word,
        "whether the gradient of the loss itself is computed at the end of the forward pass, or in the backward pass",
        choices=tuple([phase.word for phase in PHASES.values() if phase.timed]),
    )
    split: tuple[InputSplit, ...] = _setting(
        (),
        "a further axis of N devices, along which these dims of inputs are split: such as cp=4:tokens.1,labels.1, or "
        "cp=4:*.1 for all data; may be given several times",
        check=lambda x: _splits(x),
        written=lambda plan: json.dumps([str(split) for split in plan.split]),
        kind="split",
    )
    cut: tuple[str, ...] = _setting(
        (),
        "weights, one for each pipeline stage but the first, which begins where its weight is first used; or numbers "
        "of layers, from 0; or `even`: as many layers each; or `balanced`, the default: by cost",
        check=lambda x: _cuts(x),
        kind="names",
    )
    pad_multiple: int = _setting(
        1, "pad dims of weights to a multiple of this on each device, if that makes them longer by less than 1/8"
    )

    def __post_init__(self) -> None:
        if isinstance(self.order, list):  # pyright: ignore[reportUnnecessaryIsInstance]
            object.__setattr__(self, "order", tuple(self.order))
        for f in fields(self):
            object.__setattr__(self, f.name, _checked(f, getattr(self, f.name)))
        if self.order in ((), default_order()):  # that without further axes
            object.__setattr__(self, "order", self._default_order())
        if self.size > MOST:
            raise InfeasibleError(f"{self.size:,} devices are more than the {MOST:,} that distir plans for")
        if sorted(self.order) != sorted(self._default_order()):
            raise UsageError(f"an order names {_listed(self._default_order())} once each, got {', '.join(self.order)}")

    def _default_order(self) -> tuple[str, ...]:
        return default_order([split.axis for split in self.split])

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """All axes of devices, also those of one device."""
        own = [Axis(f.name, getattr(self, f.name), f.metadata["strategy"]) for f in AXES]
        return (*own, *[Axis(split.axis, split.size, INPUTS) for split in self.split])

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod([a.size for a in self.axes])

    @property
    def stages(self) -> Axis:
        """The axis of pipeline ranks."""
        return next(a for a in self.axes if a.strategy == STAGES)

    @property
    def stage_count(self) -> int:
        """The number of pipeline stages, of all ranks."""
        return self.stages.size * self.chunks

    @cached_property
    def sharding(self) -> Sharding:
        """What decides placements."""
        axes = tuple([a for a in self.axes if a.strategy != STAGES and a.size > 1])
        return Sharding(axes, self.microbatches, self.zero, self.sequence_parallel, self.pad_multiple)

    def spacing(self, axis: str) -> int:
        """The stride along an axis: the difference between the numbers of neighbouring devices."""
        size = {a.name: a.size for a in self.axes}
        return math.prod([size[name] for name in self.order[: self.order.index(axis)]])

    def __str__(self) -> str:
        known = [a for a in self.axes if a.size > 1 or a.strategy != INPUTS]
        text = f"{' x '.join([f'{a.name} {a.size}' for a in known])}, {counted(self.microbatches, 'microbatch', 'es')}"
        if self.stages.size > 1:
            text += f", {_schedule_text(self)}" + (f" with {self.chunks} chunks" if self.chunks > 1 else "")
        if self.cut == (EVEN,):
            text += "" if self.stages.size == 1 else ", stages of equal numbers of layers"
        elif self.cut:
            text += f", cut at {', '.join(self.cut) if len(self.cut) < 5 else counted(len(self.cut), 'place')}"
        text += "" if self.order == self._default_order() else f", order {','.join(self.order)}"
        text += f", ZeRO {self.zero}" if self.zero else ""
        text += "" if self.gathered_again == "all" else f", {self.gathered_again} gathered again"
        if self.bucket_mb != BUCKET_MB:
            text += f", buckets of {self.bucket_mb:g} MiB"
        text += ", sequence parallel" if self.sequence_parallel else ""
        text += "" if self.pad_multiple == 1 else f", padded to multiples of {self.pad_multiple}"
        text += "" if self.recompute == "none" else f", recompute {self.recompute}"
        if self.loss_gradient != PHASES[BACKWARD].word:
            text += f", gradient of the loss in the {self.loss_gradient} pass"
        return text if self.overlap else f"{text}, no overlap"

    def __repr__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in self._changed()}
        if self.split:
            given["split"] = tuple(map(str, self.split))
        return f"Plan({', '.join([f'{name}={x!r}' for name, x in given.items()])})"

    def _changed(self) -> list[Field[Any]]:
        """The fields that are not at their default."""
        usual = {"order": self._default_order()}
        return [f for f in fields(self) if getattr(self, f.name) != usual.get(f.name, default_of(f))]

    def to_json(self) -> dict[str, Any]:
        """Its fields, and the number of devices."""
        said: dict[str, Any] = {"schedule": _schedule_text(self), "order": list(self.order), "devices": self.size}
        said |= {"split": list(map(str, self.split)), "cut": list(self.cut)}
        if math.isinf(self.bucket_mb):
            said["bucket_mb"] = _NO_NUMBER
        return {**asdict(self), **said}

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a TOML file that `load_plan` reads. Raises UsageError where that cannot be written."""
        with written(path) as file:
            file.write_text(self.to_toml(), encoding="utf-8")

    def to_toml(self) -> str:
        """The fields that are not at their default, each after its help, as TOML."""
        lines: list[str] = []
        for f in self._changed():
            x = getattr(self, f.name)
            if "written" in f.metadata and not isinstance(x, str | PathLike):
                text = f.metadata["written"](self)
            elif isinstance(x, float) and math.isinf(x):
                text = _NO_NUMBER
            else:
                text = json.dumps(fspath(x) if isinstance(x, PathLike) else list(x) if isinstance(x, tuple) else x)
            lines += [f"# {f.metadata['help']}", f"{f.name} = {text}"]
        return "\n".join(["# a plan of distir", *lines, ""])


AXES: tuple[Field[int], ...] = tuple([f for f in fields(Plan) if "strategy" in f.metadata])
"""The fields that are axes."""
_RESERVED = (TIME,)
"""Names of axes that a plan's may not have."""
_AXIS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def default_order(further: Sequence[str] = ()) -> tuple[str, ...]:
    """The default order in which device numbers run through the axes, with these further ones."""
    axes = [*[(f.name, f.metadata["strategy"]) for f in AXES], *[(name, INPUTS) for name in further]]
    return tuple([name for name, strategy in sorted(axes, key=lambda a: _NESTING.index(a[1]))])


def load_plan(path: str | PathLike[str]) -> dict[str, Any]:
    """The fields of a plan that a TOML file gives, checked.

    Raises UsageError, naming file, key, what was expected and what there is, for a file that cannot be read, is no
    TOML, or has an unknown key or a value that is none of the field's; InfeasibleError for too many devices.
    """
    name = fspath(path)
    given = read_toml(name, "a plan is lines such as: dp = 2")
    known = {f.name: f for f in fields(Plan)}
    found: dict[str, Any] = {}
    for key, x in given.items():
        if key not in known:
            hint = did_you_mean(key, known, f"known are {_listed(known)}")
            raise UsageError(f"{name}: a plan has no {key!r}", hint)
        if "read" in known[key].metadata:
            x = known[key].metadata["read"](x, f"{name}, {key}")
        try:
            found[key] = _checked(known[key], x)
        except UsageError as e:
            raise UsageError(f"{name}: {e.message}", e.hint) from None
    try:
        Plan(**found)  # fields that do not fit each other
    except (UsageError, InfeasibleError) as e:
        raise type(e)(f"{name}: {e.message}", e.hint) from None
    return found


def _checked(f: Field[Any], x: Any) -> Any:
    """A field's value. Raises UsageError for one that is none."""
    if "check" in f.metadata:
        try:
            return f.metadata["check"](x)
        except ValueError:
            raise UsageError(f"{f.name}: expected {f.metadata['help'].partition(': ')[2]}; got {x!r}") from None
    if "choices" in f.metadata:
        if isinstance(x, bool) or x not in f.metadata["choices"]:
            raise UsageError(f"{f.name} is {_listed(f.metadata['choices'], 'or')}, got {x!r}")
    elif isinstance(f.default, bool):
        if not isinstance(x, bool):
            raise UsageError(f"{f.name} is true or false, got {x!r}")
    elif isinstance(f.default, int):
        if not isinstance(x, int) or isinstance(x, bool) or x < 1:
            raise UsageError(f"{f.name} is a whole number of at least 1, got {x!r}")
    elif isinstance(f.default, float):
        if isinstance(x, bool) or not isinstance(x, int | float) or not x >= 0:
            raise UsageError(f"{f.name} is a number of at least 0, got {x!r}")
    elif isinstance(f.default, tuple) and not (isinstance(x, tuple) and all(isinstance(n, str) for n in x)):
        raise UsageError(f"{f.name} is a list of names, got {x!r}")
    return x


def default_of(f: Field[Any]) -> Any:
    """The default of a field of a plan, also of one whose default is made."""
    return f.metadata["usual"]() if "usual" in f.metadata else f.default


def _listed(names: Any, word: str = "and") -> str:
    """Names in a row: "a, b and c"."""
    *head, last = map(str, names)
    return f"{', '.join(head)} {word} {last}" if head else last


def _schedule_text(plan: Plan) -> str:
    """A schedule's name or file; a table's rows, parted by semicolons."""
    schedule = plan.schedule
    if isinstance(schedule, str | os.PathLike):
        return fspath(schedule)
    if callable(schedule):
        return getattr(schedule, "__name__", type(schedule).__name__)
    return format_table(schedule).replace("\n", "; ")


def _read_schedule(x: Any, where: str) -> Schedule:
    """A schedule as TOML has it: a name, a path, the text of a table or its rows. Raises UsageError else."""
    if isinstance(x, str):
        if "\n" in x:
            return parse_table(x, where)
        check_name(x, f"{where}: ")
        return x
    return as_table(x, where)


def _table_as_toml(plan: Plan) -> str:
    """A schedule that is no name or file, as a string of TOML."""
    table = make_table(plan.schedule, plan.stages.size, plan.microbatches, plan.chunks)
    return f'"""\n{format_table(table)}\n"""'
