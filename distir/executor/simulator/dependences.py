"""Building the flat lists of one function: which slots each value depends on, and which dependences are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from distir.executor.simulator.maxplus import Call, Code, OpPlan, Slots, Twin
from distir.ir.communication import TRANSFERS
from distir.ir.function import Function, Op, Value


class CodeBuilder:
    """The state of compiling one function: the slots each value depends on, and the streams that dominate each slot.

    `hosts` gives the stream of a class's host, where hosts wait for transfers.
    """

    def __init__(self, code: Code, env: list[dict[Value, Slots]], hosts: Callable[[int], int] | None = None) -> None:
        self.code, self.env = code, env
        self.dominated: list[frozenset[int]] = [frozenset()] * len(code.columns)
        """For each slot the streams whose clock is never earlier than it afterwards; for a part its own streams."""
        self.hosts = hosts
        self.received: set[Value] = set()
        """What transfers give, where hosts wait for it."""
        self.results: set[int] = set()
        """The slots that are results of calls."""
        self._waiting: dict[tuple[Code | Twin, int, Slots], Slots] = {}
        """The slots of an input of a body that it waits for."""

    def run(self, ops: Iterable[tuple[Op, OpPlan | None]], body: Callable[[Function], Code | Twin]) -> None:
        """Lower all ops, each with its plan; without one it is a call."""
        code, envs, dominated = self.code, self.env, self.dominated
        duration, stream, needs, more, plans = code.duration, code.stream, code.needs, code.more, code.plans
        issues = code.issues
        for op, plan in ops:
            if plan is None:
                self._call(op, body(op.attributes["callee"]))
                continue
            part = plan.simple
            if part is None:
                self._general(op, plan)
                continue
            # the hot loop for nearly all ops, those of one part on one stream: inlined, no calls
            env, s = envs[part.sources[0]], part.streams[0]
            needs.append([j for v in op.inputs for j in env[v] if s not in dominated[j]])
            slot = (len(dominated),)
            for v in op.outputs:
                env[v] = slot
            dominated.append(part.on)
            duration.append(part.duration)
            stream.append(s)
            more.append(None)
            plans.append(plan)
            if issues is not None:
                issues.append(part.issues)

    def _general(self, op: Op, plan: OpPlan) -> None:
        """An op that is free, or has several parts, or several streams."""
        env, dominated, code = self.env, self.dominated, self.code
        code.plans.append(plan)
        if not plan.parts:
            code.views.append(self._free(op, plan))
            return
        if self.hosts is not None and op.spec.route in TRANSFERS:
            self.received.update(op.outputs)
        for part in plan.parts:
            on = part.on
            if len(op.inputs) == 1 and len(part.sources) == 1:  # a transfer
                slots = env[part.sources[0]][op.inputs[0]]
            else:
                slots = {j for c in part.sources for v in op.inputs for j in env[c][v]}
            code.needs.append([j for j in slots if on.isdisjoint(dominated[j])])
            slot = (len(dominated),)
            for c in part.targets:
                for v in op.outputs:
                    env[c][v] = slot
            dominated.append(on)
            code.duration.append(part.duration)
            code.stream.append(part.streams[0])
            code.more.append(part.streams[1:] or None)
            if code.issues is not None:
                code.issues.append(part.issues)

    def _free(self, op: Op, plan: OpPlan) -> list[Slots]:
        """The slots that the results of a free op depend on, in each class: those of its operands there."""
        slots: list[Slots] = []
        known: dict[int, Slots] = {}
        for v, classes in zip(op.outputs, plan.classes, strict=True):
            for c in classes:
                here = self.env[c]
                if c not in known:
                    found = [here[x] for x in op.inputs if x in here]
                    known[c] = found[0] if len(found) == 1 else self._latest({j for js in found for j in js})
                here[v] = known[c]
                slots.append(known[c])
        return slots

    def _latest(self, slots: set[int]) -> Slots:
        """The slots that are not dominated: those without a later part on one of their streams."""
        last: dict[int, int] = {}
        for j in slots:
            for s in self.dominated[j] if j not in self.results else ():
                last[s] = max(last.get(s, -1), j)
        found: list[int] = []
        for j in sorted(slots):
            for s in self.dominated[j]:
                if last.get(s, -1) > j:
                    break
            else:
                found.append(j)
        return tuple(found)

    def _call(self, op: Op, body: Code | Twin) -> None:
        """A call: which inputs are live, and the map for these."""
        env, dominated, code = self.env, self.dominated, self.code
        passed, waits, inputs, outputs = body.passed, body.waits, op.inputs, op.outputs
        live: list[int] = []
        needs: list[Slots] = []
        given = [env[c][inputs[i]] for i, c in body.columns]
        for j, slots in enumerate(given):
            if len(slots) == 1 and j not in passed:
                slots = slots if waits(j, dominated[slots[0]]) else ()
            elif slots and j not in passed:
                # a stage's calls have the weights' slots in common
                key = body, j, slots
                slots = self._waiting.get(key)
                if slots is None:
                    slots = self._waiting[key] = tuple([k for k in key[2] if waits(j, dominated[k])])
            if slots:
                live.append(j)
                needs.append(slots)
        waited: dict[int, list[int]] = {}
        if self.hosts is not None and self.received:
            for (i, c), slots in zip(body.columns, given, strict=True):
                if inputs[i] in self.received:
                    waited.setdefault(self.hosts(c), []).extend(slots)
        call = Call(body, tuple(live), given, waited)
        code.needs.append(needs)
        code.plans.append(call)
        code.duration.append(0.0)
        code.stream.append(-1)
        code.more.append(call)
        if code.issues is not None:
            code.issues.append(None)
        for (k, c, _), below in zip(body.outputs, body.dominated, strict=True):
            if not call.rows:  # no live entry: the results are always ready
                env[c][outputs[k]] = ()
                continue
            slot = len(dominated)
            env[c][outputs[k]] = (slot,)
            self.results.add(slot)
            dominated.append(below)

    def finish(self) -> None:
        """Compute what callers of a body need: its streams, which wait for each input, which dominate each output."""
        code, inputs = self.code, len(self.code.columns)
        code.passed = frozenset(j for _, _, slots in code.outputs for j in slots if j < inputs)
        code.consumers = [set() for _ in range(inputs)]
        streams: dict[int, None] = {host: None for issue in code.issues or () if issue for host, _ in issue}
        slot = inputs
        for s, needs, more in zip(code.stream, code.needs, code.more, strict=True):
            if more is None:  # as most
                streams[s] = None
            elif isinstance(more, Call):
                streams.update(dict.fromkeys((*more.streams, *more.waits)))
                self._consume_by_call(more, needs)
                slot += more.slots
                continue
            else:
                streams.update(dict.fromkeys((s, *more)))
            for j in needs:
                if j < inputs:
                    code.consumers[j].add(self.dominated[slot])
            slot += 1
        code.streams = tuple(streams)
        after = self._after()
        sets: dict[int, frozenset[int]] = {}
        everything = _mask(streams)
        for _, _, slots in code.outputs:
            mask = everything
            for j in slots:
                mask &= after[j]
            if mask not in sets:
                sets[mask] = frozenset([s for s in streams if mask >> s & 1])
            code.dominated.append(sets[mask])

    def _after(self) -> list[int]:
        """For each slot the streams that dominate it when the body ends: parts come after what they need, and after
        what is earlier on their streams or those of their hosts. Sets of streams are bit masks.
        """
        code, dominated = self.code, self.dominated
        masks: dict[frozenset[int], int] = {}
        after: list[int] = []
        for on in dominated:
            mask = masks.get(on)
            if mask is None:
                mask = masks[on] = _mask(on)
            after.append(mask)
        last: dict[int, int] = {}
        """Of each stream those that are never earlier, once the next part on it has run."""
        slot = len(dominated)
        issues = code.issues or [None] * len(code.needs)
        for needs, more, s, issue in zip(
            reversed(code.needs), reversed(code.more), reversed(code.stream), reversed(issues), strict=True
        ):
            if isinstance(more, Call):  # that its results come after its operands is left out
                made = more.slots
                for j in range(slot - made, slot):
                    for x in dominated[j]:
                        after[j] |= last.get(x, 0)
                slot -= made
                for host, slots in more.waits.items():
                    mask = last.get(host, 0) | 1 << host
                    for j in slots:
                        after[j] |= mask
                continue
            slot -= 1
            mask = after[slot] | last.get(s, 0)
            if more is None:  # as most
                after[slot] = last[s] = mask
            else:
                for x in more:
                    mask |= last.get(x, 0)
                for x in more:
                    last[x] = mask
                after[slot] = last[s] = mask
            if issue:
                for host, _ in issue:
                    last[host] = last.get(host, 0) | mask
            for j in needs:
                after[j] |= mask
        return after

    def _consume_by_call(self, call: Call, needs: Iterable[Slots]) -> None:
        consumers, body = self.code.consumers, call.body
        for j, slots in zip(call.live, needs, strict=True):
            for k in slots:
                if k < len(consumers):
                    consumers[k] |= body.consumers[j]
                    if j in body.passed:
                        consumers[k].add(frozenset())


def _mask(streams: Iterable[int]) -> int:
    """A set of streams as a bit mask."""
    mask = 0
    for s in streams:
        mask |= 1 << s
    return mask
