"""One function on its way to the loop's lists: what each value hangs on, and which dependences must be kept."""

from __future__ import annotations

from collections.abc import Sequence

from distir.executor.maxplus import Call, Code, Part, Plan, Slots, Twin
from distir.ir.function import Op, Value


class Lowering:
    """The state of compiling one function: what each value hangs on, and which streams dominate each slot."""

    def __init__(self, code: Code, env: list[dict[Value, Slots]]) -> None:
        self.code, self.env = code, env
        inputs = len(code.columns)
        self.dominated: list[frozenset[int]] = [frozenset()] * inputs
        """Streams whose clock is never again before the slot's time."""
        self.on: list[frozenset[int]] = [frozenset()] * inputs
        """Streams the slot is a part on."""
        self.parts: list[Part | Call] = []

    def simple(self, op: Op, plan: Plan, part: Part) -> None:
        """An op that is one part on one stream of one class."""
        env, dominated, s = self.env[part.sources[0]], self.dominated, part.streams[0]
        self.code.needs.append([j for v in op.inputs for j in env[v] if s not in dominated[j]])
        slot = (len(dominated),)
        for v in op.outputs:
            env[v] = slot
        dominated.append(part.on)
        self.on.append(part.on)
        self.parts.append(part)
        self.code.plans.append(plan)

    def general(self, op: Op, plan: Plan) -> None:
        """An op that is free, or has several parts, or several streams."""
        env, dominated = self.env, self.dominated
        self.code.plans.append(plan)
        if not plan.parts:
            self.code.views.append(self._free(op, plan))
            return
        for part in plan.parts:
            on = part.on
            slots = {j for c in part.sources for v in op.inputs for j in env[c][v]}
            self.code.needs.append([j for j in slots if on.isdisjoint(dominated[j])])
            for c in part.targets:
                for v in op.outputs:
                    env[c][v] = (len(dominated),)
            dominated.append(on)
            self.on.append(on)
            self.parts.append(part)

    def _free(self, op: Op, plan: Plan) -> list[Slots]:
        slots: list[Slots] = []
        for v, classes in zip(op.outputs, plan.classes, strict=True):
            for c in classes:
                here = self.env[c]
                found = [here[x] for x in op.inputs if x in here]
                here[v] = found[0] if len(found) == 1 else self._latest({j for js in found for j in js})
                slots.append(here[v])
        return slots

    def _latest(self, slots: set[int]) -> Slots:
        """The slots that matter: those that no later part on one of their streams outlasts."""
        last: dict[int, int] = {}
        for j in slots:
            for s in self.on[j]:
                last[s] = max(last.get(s, -1), j)
        return tuple([j for j in sorted(slots) if not any(last.get(s, -1) > j for s in self.dominated[j])])

    def call(self, op: Op, body: Code | Twin) -> None:
        """A call: which inputs are live, and the map for these."""
        passed = body.passed
        live: list[int] = []
        needs: list[Slots] = []
        given = [self.env[c][op.inputs[i]] for i, c in body.columns]
        dominated = self.dominated
        for j, slots in enumerate(given):
            if j not in passed:
                slots = tuple([k for k in slots if body.waits(j, dominated[k])])
            if slots:
                live.append(j)
                needs.append(slots)
        summary = body.summary(tuple(live))
        self.code.needs.append(needs)
        call = Call(body, tuple(live), summary.rows, given)
        self.parts.append(call)
        self.code.plans.append(call)
        for (k, c, _), below in zip(body.outputs, summary.dominated, strict=True):
            if not summary.rows:  # nothing enters: all is there from the beginning
                self.env[c][op.outputs[k]] = ()
                continue
            self.env[c][op.outputs[k]] = (len(dominated),)
            dominated.append(below)
            self.on.append(frozenset())

    def finish(self) -> None:
        """The loop's lists, and who waits for the inputs."""
        code, inputs = self.code, len(self.code.columns)
        for part in self.parts:
            if isinstance(part, Call):
                code.duration.append(0.0)
                code.stream.append(-1)
                code.more.append(part)
            else:
                code.duration.append(part.duration)
                code.stream.append(part.streams[0])
                code.more.append(part.streams[1:] or None)
        used = dict.fromkeys(p.body.streams if isinstance(p, Call) else p.streams for p in self.parts)
        code.streams = tuple(dict.fromkeys(s for streams in used for s in streams))
        code.passed = frozenset(j for _, _, slots in code.outputs for j in slots if j < inputs)
        code.consumers = [set() for _ in range(inputs)]
        if not inputs:
            return
        for part, needs in zip(self.parts, code.needs, strict=True):
            if isinstance(part, Call):
                self._consume_by_call(part, needs)
                continue
            for j in needs:
                if j < inputs:
                    code.consumers[j].add(part.on)

    def _consume_by_call(self, call: Call, needs: Sequence[Slots]) -> None:
        consumers, body = self.code.consumers, call.body
        for j, slots in zip(call.live, needs, strict=True):
            for k in slots:
                if k < len(consumers):
                    consumers[k] |= body.consumers[j]
                    if j in body.passed:
                        consumers[k].add(frozenset())
