"""A rank's execution engine: its lowered program, its pieces of the inputs, and the step function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from distir.backends.lowering.body import Lowered, Observers, Tap
from distir.backends.lowering.captured import Captured, capture
from distir.backends.lowering.generate import RankLowering
from distir.backends.lowering.profile import Profiler
from distir.backends.tensors.torch_namespace import torch_dtype
from distir.backends.transport.torch_distributed import Network
from distir.executor.reference.sequential import fit
from distir.ir.device import Mesh
from distir.ir.errors import UsageError
from distir.ir.function import Function, Value
from distir.ir.type import BFloat16, DType, Tensor
from distir.runtime.pieces import is_primary
from distir.runtime.samples import Chosen
from distir.transforms.differentiation.gradients import gradients
from distir.transforms.rank.project import ranks
from distir.transforms.rank.rank_program import RankOptions, rank_program

OnGradient = Callable[[int, tuple[int, ...], np.ndarray], None]
"""(position of the weight, this rank's coordinate on the gradient's mesh, its piece: only valid during the call)"""

_WARM_UP = 2
"""Steps that run before one is captured: they load and compile kernels."""
Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Allocates an uninitialised tensor of a shape and dtype in host memory."""


def to_torch(x: np.ndarray, dtype: DType, device: torch.device, allocate: Allocate | None = None) -> torch.Tensor:
    """A copy of a numpy array as a tensor of that dtype, in memory from `allocate` if given."""
    if allocate is not None:
        y = allocate(x.shape, torch_dtype(dtype))
        if x.dtype == dtype.numpy:  # without an intermediate copy
            narrow = dtype is BFloat16  # torch does not know numpy's
            np.copyto((y.view(torch.int16) if narrow else y).numpy(), x.view(np.int16) if narrow else x)
            return y
        return y.copy_(to_torch(x, dtype, device))
    if x.dtype.name == "bfloat16":  # torch does not know numpy's
        bits = torch.from_numpy(np.array(x, order="C").view(np.int16))
        return bits.view(torch.bfloat16).to(device, torch_dtype(dtype))
    return torch.from_numpy(np.array(x, order="C")).to(device, torch_dtype(dtype))


def to_numpy(x: torch.Tensor, dtype: DType) -> np.ndarray:
    """A tensor as a numpy array of that dtype."""
    x = x.detach().to("cpu").contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(dtype.numpy)
    return x.numpy()


def own_array(x: torch.Tensor) -> np.ndarray:
    """A copy of a tensor as a numpy array; bfloat16 is converted to float32."""
    x = x.detach().to("cpu", torch.float32) if x.dtype == torch.bfloat16 else x.detach().to("cpu")
    return np.array(x.numpy())


@contextmanager
def double_scalars() -> Iterator[None]:
    """Context in which numbers computed from integers (0.999 ** step) are float64, as in numpy."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TorchRank:
    """One rank of a distributed program: `load` inputs, then `step` repeatedly.

    All ranks must be given the same program, in a process group that is already joined (not needed for one rank).
    `tap` is called with every value that is computed, `profiler` times every op, `on_gradient` is called with the
    position of a weight and this rank's piece of its gradient before an optimizer uses it. `compiled`: compute ops go
    through torch.compile at their first run, without `tap` and `profiler` inside. `proxy`: the contents of values do
    not matter, and are not copied. Raises ModelError for an op that cannot run, UsageError for a program that is not
    scheduled.
    """

    def __init__(
        self,
        program: Function,
        rank: int,
        device: torch.device | str = "cpu",
        tap: Tap | None = None,
        profiler: Profiler | None = None,
        compiled: bool = False,
        on_gradient: OnGradient | None = None,
        proxy: bool = False,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = False  # convolutions of float32 as precise as torch's matrix products
        self.program = program
        # a tap needs a received value at once: with receives posted ahead it would wait for it too early
        self.mine = rank_program(program, rank, RankOptions(compiled, receives_ahead=tap is None))
        self.network = Network(self.mine.function, ranks(program), rank, self.device)
        if profiler is not None:
            self.network.watch = profiler.watch
        drain = self.network.transfers.drain
        self.drain = drain if profiler is None else profiler.waiting("Send", drain)
        self.on_gradient = on_gradient
        shown = None if on_gradient is None else self._show_gradient
        self.lowering = RankLowering(self.network, self.device, Observers(tap, profiler, shown), compiled, proxy)
        self.updates = replaced(program)
        with double_scalars():
            self.lowered: Lowered = self.lowering(self.mine.function, replaced(self.mine.function))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of operands that ops were traced with: see `trace`
        if self.lowered.varies:
            raise UsageError(f"{program.name}: %{self.lowered.varies} varies in time, but the program is not scheduled")
        self.values: dict[int, torch.Tensor] = {}
        plain = tap is None and profiler is None and not proxy and len(ranks(program)) <= 1
        self.captures = plain and self.device.type == "cuda" and bool(self.updates)
        """Whether steps become a CUDA graph: on a GPU, of a training program of one rank, if nothing observes them."""
        self._captured: Captured | None = None
        self._steps = 0

    def load(self, arrays: Mapping[int, Any]) -> None:
        """Load this rank's pieces of whole arrays, by position among the program's inputs; other arrays are ignored.

        Inputs in their source shape are padded with zeros. Raises UsageError for another shape.
        """
        with torch.inference_mode():  # as in steps: torch.compile would recompile for other tensors
            self.values |= self.pieces(arrays, self.network.memory.allocate if self.device.type == "cpu" else None)

    def reserve(self) -> None:
        """Buffers of any contents for this rank's pieces of the inputs that are not loaded."""
        for k in self.mine.inputs:
            t = self.program.inputs[k].type
            if k not in self.values and isinstance(t, Tensor):
                with torch.inference_mode():
                    self.values[k] = torch.empty(t.shape, dtype=torch_dtype(t.dtype), device=self.device)

    def pieces(self, arrays: Mapping[int, Any], allocate: Allocate | None = None) -> dict[int, torch.Tensor]:
        """This rank's pieces of whole arrays, by position."""
        return {k: self.cut(self.program.inputs[k], arrays[k], allocate) for k in self.mine.inputs if k in arrays}

    def cut(self, v: Value, x: Any, allocate: Allocate | None = None) -> torch.Tensor:
        """This rank's piece of the whole array for input `v`, in memory from `allocate` if given."""
        if isinstance(x, Chosen) and isinstance(v.type, Tensor) and (v.role is None or v.role.source is None):
            return to_torch(x.piece(v.type, self.coordinate(v.type)), v.type.dtype, self.device, allocate)
        whole, t = fit(x, v), v.type
        if not isinstance(t, Tensor):
            raise UsageError(f"input %{v.name} is not a tensor: {t}")
        piece = t.cut(whole, self.network.coordinate(t.device)) if isinstance(t.device, Mesh) else whole
        return to_torch(piece, t.dtype, self.device, allocate)

    def step(self) -> dict[int, torch.Tensor]:
        """Run one step; returns this rank's pieces of the outputs, by position. Outputs that are updates replace their
        inputs, and may be overwritten by the next step.

        Raises UsageError if an input has not been loaded.
        """
        missing = [self.program.inputs[k].name for k in self.mine.inputs if k not in self.values]
        if missing:
            raise UsageError(f"no array for input %{', %'.join(missing)}")
        with torch.inference_mode(), double_scalars():
            if self.captures and self.on_gradient is None and self._steps >= _WARM_UP:
                self._captured = self._captured or capture(self._run, self.values, self.updates)
                self.captures = self._captured is not None
                if self._captured is not None:
                    return self._captured(self.values)
            outputs = self._run(self.values)
        for k, x in outputs.items():
            if k in self.updates:
                self.values[self.updates[k]] = x
        self._steps += 1
        return outputs

    def _run(self, values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The outputs of a step on these values; those that will be replaced are taken out, and so can be freed at
        their last use."""
        renewed = {self.updates[k] for k in self.mine.outputs if k in self.updates}
        args = [values.pop(k) if k in renewed else values[k] for k in self.mine.inputs]
        results = self.lowered.call(args, None)
        outputs = {
            k: x() if waits else x for k, x, waits in zip(self.mine.outputs, results, self.lowered.waits, strict=True)
        }
        self.drain()
        return outputs

    def _show_gradient(self, function: str, result: str, x: torch.Tensor) -> None:
        gradient = gradients(self.program).get((function, result))
        if gradient is None or self.on_gradient is None or not isinstance(t := gradient.type, Tensor):
            return
        if self.holds_first(t):
            self.on_gradient(gradient.weight, self.coordinate(t), to_numpy(x, t.dtype))

    def synchronize(self) -> None:
        """Wait until the device has completed all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def holds_first(self, t: Tensor) -> bool:
        """Whether this rank is the first of those with the same piece of a value of type `t`, and so reports it."""
        return not isinstance(t.device, Mesh) or is_primary(t, self.network.coordinate(t.device))

    def coordinate(self, t: Tensor) -> tuple[int, ...]:
        """This rank's coordinate on the value's mesh; () if the value is on one device."""
        return self.network.coordinate(t.device) if isinstance(t.device, Mesh) else ()

    def source(self) -> str:
        """The generated Python."""
        return self.lowering.source()


def replaced(program: Function) -> dict[int, int]:
    """Positions of outputs that are updates and of the inputs that they replace, where both are on the same devices."""
    position = {v: k for k, v in enumerate(program.inputs)}
    updates = {k: program.updates[v] for k, v in enumerate(program.outputs) if v in program.updates}
    return {k: position[old] for k, old in updates.items() if old.type.device is program.outputs[k].type.device}


def python_source(program: Function, rank: int) -> str:
    """The Python that a rank would run, for reading; needs no process group. Raises UsageError for an unknown rank."""
    mine = rank_program(program, rank).function
    cpu = torch.device("cpu")
    lowering = RankLowering(Network(mine, ranks(program), rank, cpu, connect=False), cpu)
    with double_scalars():
        lowering(mine, replaced(mine))
    return lowering.source()
