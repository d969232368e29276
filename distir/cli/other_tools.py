"""The flags --torchtitan, --megatron-args and --emit: plans of other tools, read and written."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distir.api import Model, Plan
from distir.api.model import Precision
from distir.cli.commands import loss_of
from distir.cli.output import first_rank
from distir.ir.errors import DistirError, ModelWarning, UsageError, counted
from distir.ir.files import check_writable, written
from distir.models.config_file import is_config
from distir.models.configs import described
from distir.models.named import is_named, named
from distir.transforms.pipeline.layers import layers
from distir.transforms.plan import EVEN

if TYPE_CHECKING:  # `distir.api.interop` is imported where one of the flags is given
    from distir.api.interop.plan_settings import ReadConfig, TrainingSettings

_FLAGS = {"torchtitan": "torchtitan", "megatron": "megatron_args"}
_SHOWN = 12
"""The most options that a note names."""
_PRECISION = ("precision", "grad_dtype", "dtype")


def read_other_plan(args: argparse.Namespace) -> ReadConfig | None:
    """What the file of another tool says, put into the flags that are not given; None without such a file.

    Raises UsageError for more than one file, InfeasibleError for what distir cannot do and no flag overrides.
    """
    given = {flag: getattr(args, flag) for flag in ("plan", *_FLAGS.values()) if getattr(args, flag) is not None}
    if len(given) > 1:
        names = [f"--{flag.replace('_', '-')}" for flag in given]
        raise UsageError(f"{' and '.join(names)} each give a plan", "give one of them")
    tool = next((tool for tool, flag in _FLAGS.items() if flag in given), None)
    if tool is None:
        if args.gpus is not None:
            raise UsageError("--gpus is of a file of another tool", "--torchtitan or --megatron-args; or --dp N")
        return None
    from distir.api.interop.conversion import READERS, check_faults

    path = given[_FLAGS[tool]]
    read = READERS[tool](path, args.gpus, _layers(args))
    overridden = {name for name in [*read.fields, "cut", *_PRECISION] if getattr(args, name) is not None}
    check_faults(read, overridden)
    staged = [f for f in ("pp", "chunks") if f in overridden and getattr(args, f) != read.fields[f]]
    always = tool == "megatron" and read.fields.get("cut") == (EVEN,)
    if staged and not always and "cut" not in overridden and read.fields.pop("cut", ()):
        _note(f"{path}: with --{staged[0]} stages are balanced by cost, not as it says")
    for name, x in read.fields.items():
        if name not in overridden:
            setattr(args, name, x)
    _set_sizes(args, read.settings)
    names = f"{', '.join(read.ignored[:_SHOWN])}{', ...' if len(read.ignored) > _SHOWN else ''}"
    ignored = [f"{path}: {counted(len(read.ignored), 'option')} outside the plan ignored: {names}"]
    for note in [*read.notes, *(ignored if read.ignored else [])]:
        _note(note)
    return read


def _set_sizes(args: argparse.Namespace, settings: TrainingSettings) -> None:
    """Put the file's precision into the flags, and the batch and length of sequences of a decoder."""
    precision = settings.precision
    if loss_of(args) is not None and args.precision is None and precision.products != "fp32":
        args.precision = precision.products
        args.grad_dtype = args.grad_dtype or precision.gradients
    args.dtype = args.dtype or settings.dtype
    if _layers(args) is None:
        return
    sizes = args.model.partition(":")[2] if is_named(args.model) else ""
    said = [entry.partition("=")[0] for entry in sizes.split(",")]
    said += [*[name for name, _ in args.dim], *[name for name in ("batch", "seq") if getattr(args, name) is not None]]
    sizes = {"batch": settings.batch, "seq": settings.seq}
    args.dim += [(name, n) for name, n in sizes.items() if n is not None and name not in said]


def check_layers(args: argparse.Namespace, read: ReadConfig | None, model: Model) -> None:
    """Leave it to distir where stages begin, and say so, if the model has not as many layers as the file says."""
    if read is None or not args.cut or args.cut != read.fields.get("cut"):
        return
    said, found = read.settings.layers, len(layers(model.function).first)
    if found != said if said is not None else found < (args.pp or 1) * (args.chunks or 1):
        by_file = "" if said is None else f", not the {said} of the file"
        _note(f"{counted(found, 'layer')} that repeat in the model{by_file}: stages are balanced by cost")
        args.cut = ()


def note_differences(args: argparse.Namespace, read: ReadConfig | None, model: Model) -> None:
    """Say where the model's batch or sequences are not those of the file that was read."""
    if read is None:
        return
    path = next(getattr(args, flag) for flag in _FLAGS.values() if getattr(args, flag) is not None)
    here = settings_of(args, model)
    for what, x, other in (
        ("samples a step", here.batch, read.settings.batch),
        ("tokens a sample", here.seq, read.settings.seq),
    ):
        if x is not None and other is not None and x != other:
            _note(f"{path} has {other} {what}, the model {x}")


def check_targets(args: argparse.Namespace) -> None:
    """Raises UsageError for a tool of --emit for which no plans are written, and for files that cannot be written."""
    if args.emit:
        from distir.api.interop.conversion import TARGETS

        for tool, _ in args.emit:
            if tool not in TARGETS:
                raise UsageError(f"--emit: no plans are written for {tool!r}", f"known are {', '.join(TARGETS)}")
    others = [getattr(args, name, None) for name in ("save_plan", "trace", "plot", "report")]
    check_writable(*[path for _, path in args.emit], *[path for path in others if path is not None])


def write_plans(targets: Sequence[tuple[str, str]], plan: Plan, settings: TrainingSettings) -> list[dict[str, str]]:
    """Write the files of --emit; returns JSON of them. Raises InfeasibleError, before any is written, for a plan that a
    tool cannot express."""
    from distir.api.interop.conversion import emit, emit_notes

    texts = [(path, emit(plan, tool, settings)) for tool, path in targets]
    found = [{"tool": tool, "file": path} for tool, path in targets]
    if not first_rank():
        return found
    for tool, _ in targets:
        for note in emit_notes(plan, tool, settings):
            _note(note)
    for path, text in texts:
        with written(path) as file:
            file.write_text(text, encoding="utf-8")
    return found


def written_lines(emitted: Sequence[dict[str, str]]) -> list[str]:
    """What was written for which tool, as lines."""
    return [f"plan written for {x['tool']} to {x['file']}" for x in emitted]


def settings_of(args: argparse.Namespace, model: Model) -> TrainingSettings:
    """What --emit says beside the plan, of the flags --precision, --grad-dtype and --dtype."""
    dtype = None if args.dtype == "float32" else args.dtype
    return training_settings(args, model, Precision(args.precision or "fp32", args.grad_dtype or "fp32"), dtype)


def training_settings(
    args: argparse.Namespace, model: Model, precision: Precision, dtype: str | None = None
) -> TrainingSettings:
    """What --emit says beside the plan."""
    from distir.api.interop.plan_settings import TrainingSettings

    seq = model.tokens // model.batch if model.tokens is not None else None
    return TrainingSettings(model.batch, seq, precision, dtype, _layers(args))


def _layers(args: argparse.Namespace) -> int | None:
    """The layers of a decoder by its name or its config; None for any other model."""
    try:
        if is_config(args.model):
            return described(args.model, dict(args.dim)).layers
        return named(args.model, dict(args.dim)).layers if is_named(args.model) else None
    except DistirError:  # said where the model is loaded
        return None


def _note(text: str) -> None:
    warnings.warn(text, ModelWarning, stacklevel=1)  # from one place, so that what is said twice is shown once
