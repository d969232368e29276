"""GOAL schedules, of the simulator LogGOPSim: of each rank computations, sends and receives, and what requires what.

Runs of computation are one `calc`; a collective is a ring of sends and receives. The text of a class of devices is made
once; for each rank the numbers of its partners are put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from distir.executor.cost_model.seconds import wire_of
from distir.export.rank_steps import Across, Along, Partners, RankStep
from distir.ir.device import Device


class _Peer(NamedTuple):
    """The rank `offset` further in a group, or at the other end of a transfer."""

    where: Along | Across
    offset: int


class Hop(NamedTuple):
    """A round of a collective: bytes sent to the rank `to` further, and received from the one `source` further."""

    size: int
    to: int
    source: int


def write(
    path: Path, name: str, steps: Sequence[Sequence[RankStep]], partners: Partners, on_rank: Callable[[int], None]
) -> None:
    """Write the schedule of all ranks to `path`. It needs no `name`."""
    templates = [_Writer(row).parts() for row in steps]
    with open(path, "w", encoding="ascii") as file:
        file.write(f"num_ranks {len(partners.devices)}\n")
        for rank, (device, c) in enumerate(partners.devices):
            peers: dict[_Peer, str] = {}
            out = [f"\nrank {rank} {{\n"]
            for part in templates[c]:
                if isinstance(part, str):
                    out.append(part)
                    continue
                if part not in peers:
                    peers[part] = str(_rank(part, device, partners))
                out.append(peers[part])
            file.write("".join([*out, "}\n"]))
            on_rank(rank)


def _rank(peer: _Peer, device: Device, partners: Partners) -> int:
    if isinstance(peer.where, Across):
        return partners.partner(peer.where, device)
    group = partners.group(peer.where, device)
    return group[(group.index(partners.rank[device]) + peer.offset) % len(group)]


def hops(step: RankStep, where: Along) -> list[Hop]:
    """The rounds of a collective: around a ring, all pairs one distance after another, or one shift."""
    op, n = step.op, where.mesh.size(where.axis)
    wire = wire_of(op.spec)
    whole = wire.size(op.inputs[0].type.bytes, op.outputs[0].type.bytes)
    a, b = wire.sent(n)
    rounds = wire.steps(n)
    if "pairs" in wire.patterns:
        return [Hop(-(-whole // n), k, -k) for k in range(1, n)]
    if "next" in wire.patterns:
        shift = op.attributes.get("shift", 1)
        return [Hop(-(-whole * a // b), shift, -shift)]
    return [Hop(-(-whole * a // (b * rounds)), 1, -1)] * rounds


class _Writer:
    """The text of a class: strings, and the partners whose numbers go between them."""

    def __init__(self, row: Sequence[RankStep]) -> None:
        self.row = row
        self.found: list[str | _Peer] = []
        self._label = 0
        self._ends: list[tuple[int, ...]] = []
        """The labels after which each step has ended."""
        self._requires: list[str] = []

    def parts(self) -> list[str | _Peer]:
        """The lines, joined where no partner is between them."""
        for run in _runs(self.row):
            first = run[0]
            after = self._after(first)
            if first.where is None:
                self._ends += [self._calc(run, after)] * len(run)
            elif isinstance(first.where, Across):
                word = "send" if first.where.sends else "recv"
                size = first.op.inputs[0].type.bytes
                self._ends.append((self._message(word, size, _Peer(first.where, 0), first.message, after),))
            else:
                self._ends.append(self._collective(first, first.where, after))
            self.found.append("".join(self._requires))
            self._requires.clear()
        joined: list[str | _Peer] = []
        for part in self.found:
            if isinstance(part, str) and joined and isinstance(joined[-1], str):
                joined[-1] += part
            else:
                joined.append(part)
        return joined

    def _after(self, step: RankStep) -> list[int]:
        """The labels that a step requires: of the step before it on its stream, and of those on other streams."""
        wanted = [j for j in step.needs if self.row[j].stream != step.stream]
        wanted += [step.before] if step.before >= 0 else []
        return sorted({label for j in wanted for label in self._ends[j]})

    def _new(self, after: Sequence[int]) -> int:
        label = self._label
        self._label += 1
        self._requires += [f"l{label} requires l{other}\n" for other in after]
        return label

    def _calc(self, run: Sequence[RankStep], after: Sequence[int]) -> tuple[int, ...]:
        label = self._new(after)
        self.found.append(f"l{label}: calc {round(sum([step.seconds for step in run]) * 1e9)}\n")
        return (label,)

    def _message(self, word: str, size: int, peer: _Peer, tag: int, after: Sequence[int]) -> int:
        label = self._new(after)
        self.found += [
            f"l{label}: {word} {size}b {'to' if word == 'send' else 'from'} ",
            peer,
            f" tag {tag}\n",
        ]
        return label

    def _collective(self, step: RankStep, where: Along, after: Sequence[int]) -> tuple[int, ...]:
        """A round begins when this rank has sent and received what the round before it does."""
        before = after
        for hop in hops(step, where):
            sent = self._message("send", hop.size, _Peer(where, hop.to), step.message, before)
            got = self._message("recv", hop.size, _Peer(where, hop.source), step.message, before)
            before = [sent, got]
        return tuple(before)


def _runs(row: Sequence[RankStep]) -> Iterator[list[RankStep]]:
    """The steps; those that compute one after another, and are waited for only as a whole, are one run."""
    awaited = {j for step in row for j in step.needs if row[j].stream != step.stream}
    run: list[RankStep] = []
    for k, step in enumerate(row):
        alone = step.where is not None or any([row[j].stream != step.stream for j in step.needs])
        if run and (alone or step.stream != run[-1].stream):
            yield run
            run = []
        run.append(step)
        if step.where is not None or k in awaited:
            yield run
            run = []
    if run:
        yield run
