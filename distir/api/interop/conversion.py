"""Writes a plan for another tool, and reads another tool's file as a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, fields, replace
from os import PathLike
from typing import Any, NamedTuple

from distir.api.interop.from_megatron import read_megatron
from distir.api.interop.from_torchtitan import read_torchtitan
from distir.api.interop.plan_settings import (
    ReadConfig,
    Request,
    Step,
    TrainingSettings,
    in_effect,
    nearest_request,
)
from distir.api.interop.to_megatron import MEGATRON_STEPS, megatron_arguments, megatron_notes
from distir.api.interop.to_torchtitan import TORCHTITAN_STEPS, torchtitan_notes, torchtitan_toml
from distir.api.model import Precision
from distir.ir.errors import InfeasibleError, counted
from distir.transforms.plan import BALANCED, Plan


class _Tool(NamedTuple):
    """A tool for which plans are written: its name, the steps to what it can carry out, the text of such a request,
    and what it does otherwise."""

    title: str
    steps: Sequence[Step]
    text: Callable[[Request], str]
    notes: Callable[[Request], Sequence[str]]


def _distir_toml(request: Request) -> str:
    """The plan as TOML; a comment says of what step it is, which `simulate` and `run` are to be told."""
    of, text = request.settings, request.plan.to_toml()
    if of.batch is None:
        return text
    step = counted(of.batch, "sample") + ("" if of.seq is None else f" of {of.seq} tokens")
    flags = [f"--precision {of.precision.products}"] if of.precision.products != Precision().products else []
    flags += [f"--dtype {of.dtype}"] if of.dtype is not None else []
    first, rest = text.split("\n", 1)
    return f"{first}, for a step of {', '.join([step, *flags])}\n{rest}"


_TOOLS = {
    "distir": _Tool("distir", (), _distir_toml, lambda r: ()),
    "torchtitan": _Tool("torchtitan", TORCHTITAN_STEPS, torchtitan_toml, torchtitan_notes),
    "megatron": _Tool("Megatron-LM", MEGATRON_STEPS, megatron_arguments, megatron_notes),
}
TARGETS = tuple(_TOOLS)
"""For which plans are written."""
READERS: dict[str, Callable[[str | PathLike[str], int | None, int | None], ReadConfig]] = {
    "torchtitan": read_torchtitan,
    "megatron": read_megatron,
}
"""Of which plans are read: functions of a path, the number of devices, and the model's number of layers."""


def emit(plan: Plan, target: str, settings: TrainingSettings) -> str:
    """The text of a plan for one of `TARGETS`: TOML of distir or torchtitan, or arguments of Megatron-LM.

    Raises InfeasibleError for a plan that the tool cannot express, with the nearest that it can as flags, and for a
    batch that the plan does not divide.
    """
    tool = _TOOLS[target]
    if not tool.steps:
        return tool.text(Request(plan, settings))
    request = Request(plan, settings)
    near, reasons = nearest_request(request, tool.steps)
    if reasons:
        raise InfeasibleError(f"{tool.title} cannot express {'; '.join(reasons)}", f"nearest: {_flags(request, near)}")
    return tool.text(near)


def emit_notes(plan: Plan, target: str, settings: TrainingSettings) -> Sequence[str]:
    """What a tool does otherwise than a plan that `emit` writes for it."""
    return _TOOLS[target].notes(Request(plan, settings))


def nearest_plan(plan: Plan, target: str, settings: TrainingSettings) -> tuple[Plan, TrainingSettings, Sequence[str]]:
    """The nearest plan, and settings, that `emit` writes for a tool, and what of this plan it cannot express."""
    near, reasons = nearest_request(Request(plan, settings), _TOOLS[target].steps)
    return near.plan, near.settings, reasons


def check_faults(read: ReadConfig, given: Collection[str]) -> None:
    """Raises InfeasibleError for the first thing in a file that distir cannot do, but in fields that are `given`."""
    for fault in read.faults:
        if fault.field not in given:
            raise InfeasibleError(fault.message, fault.hint)


def _flags(request: Request, near: Request) -> str:
    """What is changed, as flags."""
    found: list[str] = []
    plan = in_effect(request.plan)
    usual = all(replace(x, order=()).order == x.order for x in (plan, near.plan))
    for f in fields(Plan):
        x = getattr(near.plan, f.name)
        if x != getattr(plan, f.name) and not (f.name == "order" and usual):
            found.append(_flag(f, x))
    (products, gradients), before = near.settings.precision, request.settings.precision
    found += [f"--precision {products}"] if products != before.products else []
    found += [f"--grad-dtype {gradients}"] if gradients != before.gradients else []
    found += ["no --dtype"] if near.settings.dtype != request.settings.dtype else []
    return " ".join(found)


def _flag(f: Field[Any], x: Any) -> str:
    name = f.name.replace("_", "-")
    if isinstance(x, bool):
        return f"--{name}" if x else f"--no-{name}"
    if f.name == "split":
        return " ".join([f"--split '{split}'" for split in x]) or "no --split"
    if f.name == "cut" and not x:
        return f"--cut {BALANCED}"
    if isinstance(x, tuple):
        return f"--{name} {','.join(x)}" if x else f"no --{name}"
    return f"--{name} {x!r}" if isinstance(x, float) else f"--{name} {x}"
