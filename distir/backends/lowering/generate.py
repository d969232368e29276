"""Generate Python from a rank's program: each function becomes straight-line code over torch calls.

    def fwd0(args, t):
        v0, v1, v2, = args; args.clear()
        v3 = addmm(v2, v0, t_1(v1))
        h4 = allreduce_tp(v3)
        del v3
        v5 = gelu(v0)
        v4 = h4(); del h4
        ...

A value is deleted at its last use; arguments are passed in a list that the callee clears, so that it can free them.
The result of communication (`h4`) is waited for at its first use, which may be in another function. `t` is the
microbatch of a body, None where nothing depends on it. Memory that is no longer live is overwritten in place (`relu_`),
see `transforms.rank.alias_analysis`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distir.backends.lowering.body import NO_OBSERVERS, FunctionLowering, Lowered, Observers
from distir.backends.lowering.context import RankContext
from distir.backends.lowering.function_writer import Waits
from distir.backends.transport.torch_distributed import Network
from distir.ir.function import Function
from distir.ir.verify import verify
from distir.transforms.rank.alias_analysis import Ownership
from distir.transforms.rank.outline import sort


class RankLowering:
    """Lowers the functions of one rank's program; each callee once per combination of waits."""

    def __init__(
        self,
        network: Network,
        device: torch.device,
        observers: Observers = NO_OBSERVERS,
        compiling: bool = False,
        proxy: bool = False,
    ) -> None:
        self.observers, self.compiling = observers, compiling
        self.context = RankContext(network, device, proxy)
        self.done: dict[tuple[Function, tuple[Waits, ...]], Lowered] = {}
        self._ownership: Ownership | None = None
        self._names: dict[str, int] = {}

    def __call__(self, program: Function, updates: Mapping[int, int] | None = None) -> Lowered:
        """Lower a rank's program. `updates`: position of an output -> position of the input that it replaces before the
        next step. Raises IRTypeError if the program is not well typed.
        """
        verify(program)
        self._ownership = Ownership(program, self.context.aliases, updates or {})
        return self._lower(program, (0,) * len(program.inputs))

    def _lower(self, function: Function, waits: tuple[Waits, ...]) -> Lowered:
        """Lower a function; `waits` are those of its inputs."""
        owned = self._ownership
        if owned is None:
            raise ValueError("no program is being lowered")
        lowered = self.done.get((function, waits))
        if lowered is None:
            persistent = owned.keeps_buffers and owned.calls[function] <= 1
            memory = owned.memory[function]
            body = FunctionLowering(
                self.context, self.observers, function, memory, waits, persistent, self.compiles, self._lower
            )
            name = self._function_name(function.name)
            lowered = self.done[function, waits] = Lowered(name, *body.lower(name))
        return lowered

    def compiles(self, function: Function) -> bool:
        """Whether the function, as a whole, is for torch.compile."""
        return self.compiling and bool(function.ops) and all(sort(op) == "joins" for op in function.ops)

    @property
    def keeps_buffers(self) -> bool:
        """Whether communication buffers may be kept from step to step, in functions that a step calls once."""
        return self._ownership is not None and self._ownership.keeps_buffers

    def source(self) -> str:
        """The source of all functions, callees first."""
        return "\n\n".join(lowered.source for lowered in self.done.values())

    def _function_name(self, name: str) -> str:
        """A unique Python name for a function."""
        plain = "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
        plain = plain if plain and not plain[0].isdigit() else f"f{plain}"
        k = self._names[plain] = self._names.get(plain, -1) + 1
        return f"{plain}_{k}" if k else plain
