"""One rank's execution: its program as Python over torch, its pieces of the weights, one step after the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from distir.backends.comm import Network
from distir.backends.lowering import Lowered, Lowering, Tap
from distir.backends.namespace import torch_dtype
from distir.backends.pieces import is_primary
from distir.backends.profile import Profiler
from distir.backends.samples import Chosen
from distir.executor.collectives import cut
from distir.executor.sequential import fit
from distir.ir.device import Mesh
from distir.ir.errors import UsageError
from distir.ir.function import Function, Value
from distir.ir.type import DType, Tensor
from distir.transforms.ahead import posted_ahead
from distir.transforms.gradients import gradients
from distir.transforms.project import project, ranks

OnGradient = Callable[[int, tuple[int, ...], np.ndarray], None]
"""(position of the weight, this rank's coordinate on the gradient's mesh, its piece: only valid during the call)"""


def to_torch(x: np.ndarray, dtype: DType, device: torch.device) -> torch.Tensor:
    """A copy of a numpy array as a tensor of that dtype."""
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
    """A copy of a tensor as a numpy array; bfloat16, which numpy lacks, as float32."""
    x = x.detach().to("cpu", torch.float32) if x.dtype == torch.bfloat16 else x.detach().to("cpu")
    return np.array(x.numpy())


@contextmanager
def double_scalars() -> Iterator[None]:
    """Numbers that ops compute from integers (0.999 ** step) are float64, as in numpy; arrays keep their
    dtypes.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TorchRank:
    """One rank of a distributed program, ready to run: `load`, then `step` as often as wanted.

    Every rank must be made of the same program, in a process group that is already joined (none is needed for
    one rank). `tap` is told of every value that is made, `profiler` times every op, `on_gradient` is called with the
    position of a weight and this rank's piece of its gradient before an optimizer takes that. `compiled`: what only
    computes goes through torch.compile, when it first runs; `tap` and `profiler` do not see into that. Raises
    ModelError for an op that cannot run, UsageError for a program that is not scheduled.
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
    ) -> None:
        self.device = torch.device(device)
        self.program = program
        self.mine = project(program, rank)
        if tap is None:  # which is shown what is received at once, and so must not wait for it ahead of time
            self.mine = posted_ahead(self.mine)
        self.network = Network(program, ranks(program), rank, self.device)
        if profiler is not None:
            self.network.watch = profiler.watch
        drain = self.network.transfers.drain
        self.drain = drain if profiler is None else profiler.waiting("Send", drain)
        self.on_gradient = on_gradient
        shown = None if on_gradient is None else self._show_gradient
        self.lowering = Lowering(self.network, self.device, tap, profiler, compiled, shown)
        self.updates = replaced(program)
        with double_scalars():
            self.lowered: Lowered = self.lowering(self.mine.function, replaced(self.mine.function))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of what ops were tried on: see `trace`
        if self.lowered.varies:
            raise UsageError(f"{program.name}: %{self.lowered.varies} varies in time, but the program is not scheduled")
        self.values: dict[int, torch.Tensor] = {}

    def load(self, arrays: Mapping[int, Any]) -> None:
        """Take this rank's pieces of whole arrays, by position among the program's inputs; others are not
        looked at.

        Padded inputs given in their source shape are padded with zeros. Raises UsageError for another shape.
        """
        with torch.inference_mode():  # as what steps make: for other tensors what is compiled is compiled again
            self.values |= {k: self.network.memory.held(x) for k, x in self.pieces(arrays).items()}

    def pieces(self, arrays: Mapping[int, Any]) -> dict[int, torch.Tensor]:
        """What `load` takes, without taking it."""
        return {k: self.cut(self.program.inputs[k], arrays[k]) for k in self.mine.inputs if k in arrays}

    def cut(self, v: Value, x: Any) -> torch.Tensor:
        """This rank's piece of the whole array for input `v`."""
        if isinstance(x, Chosen) and isinstance(v.type, Tensor) and (v.role is None or v.role.source is None):
            return to_torch(x.piece(v.type, self.coordinate(v.type)), v.type.dtype, self.device)
        whole, t = fit(x, v), v.type
        if not isinstance(t, Tensor):
            raise UsageError(f"input %{v.name} is not a tensor: {t}")
        piece = cut(whole, t, self.network.coordinate(t.device)) if isinstance(t.device, Mesh) else whole
        return to_torch(piece, t.dtype, self.device)

    def step(self) -> dict[int, torch.Tensor]:
        """Run once; this rank's pieces of the outputs, by position. Outputs that are updates replace their
        inputs, and may be overwritten by the next step.

        Raises UsageError if an input was never loaded.
        """
        missing = [self.program.inputs[k].name for k in self.mine.inputs if k not in self.values]
        if missing:
            raise UsageError(f"no array for input %{', %'.join(missing)}")
        renewed = {self.updates[k] for k in self.mine.outputs if k in self.updates}
        # what will be replaced is handed over, so that it can be freed once it is used
        args = [self.values.pop(k) if k in renewed else self.values[k] for k in self.mine.inputs]
        with torch.inference_mode(), double_scalars():
            results = self.lowered.call(args, None)
            outputs = {
                k: x() if waits else x
                for k, x, waits in zip(self.mine.outputs, results, self.lowered.waits, strict=True)
            }
            self.drain()
        for k, x in outputs.items():
            if k in self.updates:
                self.values[self.updates[k]] = x
        return outputs

    def _show_gradient(self, function: str, result: str, x: torch.Tensor) -> None:
        gradient = gradients(self.program).get((function, result))
        if gradient is None or self.on_gradient is None or not isinstance(t := gradient.type, Tensor):
            return
        if self.holds_first(t):
            self.on_gradient(gradient.weight, self.coordinate(t), to_numpy(x, t.dtype))

    def synchronize(self) -> None:
        """Wait for the device to finish what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def holds_first(self, t: Tensor) -> bool:
        """Whether this rank, of those with the same piece of a value of type `t`, is the first: it reports
        it.
        """
        return not isinstance(t.device, Mesh) or is_primary(t, self.network.coordinate(t.device))

    def coordinate(self, t: Tensor) -> tuple[int, ...]:
        """Where this rank is on the value's mesh; () if it is on one device."""
        return self.network.coordinate(t.device) if isinstance(t.device, Mesh) else ()

    def source(self) -> str:
        """The Python that runs."""
        return self.lowering.source()


def replaced(program: Function) -> dict[int, int]:
    """Positions of outputs, and of the inputs that they replace: of those that are made where these are held."""
    position = {v: k for k, v in enumerate(program.inputs)}
    updates = {k: program.updates[v] for k, v in enumerate(program.outputs) if v in program.updates}
    return {k: position[old] for k, old in updates.items() if old.type.device is program.outputs[k].type.device}


def python_source(program: Function, rank: int) -> str:
    """The Python that a rank would run, to be read. No process group is needed. Raises UsageError for no such rank."""
    mine = posted_ahead(project(program, rank)).function
    cpu = torch.device("cpu")
    lowering = Lowering(Network(program, ranks(program), rank, cpu, connect=False), cpu)
    with double_scalars():
        lowering(mine, replaced(mine))
    return lowering.source()
