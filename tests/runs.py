"""What tests of whole runs share: a small model, and all processes of a run."""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path

import distir
from distir.ir.function import FunctionMaker, Role
from distir.ir.type import Float32, Float64, Int64, Tensor

ROOT = Path(__file__).parents[1]


def small(dtype: str = "float32", optimizer: str = "adamw", width: int = 12) -> distir.Model:
    """Tokens to classes; 13 of these, which two devices only share once they are padded."""
    f = FunctionMaker("small")
    t = {"float32": Float32, "float64": Float64}[dtype]
    x = f.add_input_value("x", Tensor(Int64, (8, 4)), Role("data", 0))
    table = f.add_input_value("table", Tensor(t, (13, width)), Role("parameter"))
    h = f.emit("Gather", table, x, axis=0)
    for k in range(2):
        up = f.add_input_value(f"up{k}", Tensor(t, (width, 2 * width)), Role("parameter"))
        down = f.add_input_value(f"down{k}", Tensor(t, (2 * width, width)), Role("parameter"))
        h = f.emit("Add", h, f.emit("MatMul", f.emit("Tanh", f.emit("MatMul", h, up)), down))
    f.set_outputs([f.emit("MatMul", h, f.emit("Transpose", table, perm=(1, 0)))])
    return distir.Model(f.finalize()).training("cross-entropy", optimizer)


class Family:
    """All processes that have a mark in their environment: whoever started them, however they were left."""

    def __init__(self) -> None:
        self.mark = f"DISTIR_TEST_RUN={uuid.uuid4().hex}"

    def env(self, **more: str) -> dict[str, str]:
        """This environment, with the mark."""
        name, _, value = self.mark.partition("=")
        return os.environ | {name: value, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more

    def alive(self) -> dict[int, str]:
        """The names of those that have not ended, by process id."""
        found: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = self.mark.encode() in (folder / "environ").read_bytes().split(b"\0")
                name, _, state = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue  # it ended in the meantime
            if marked and state.split()[0] != "Z":
                found[int(folder.name)] = name
        return found

    def wait_for_the_end(self, seconds: float) -> None:
        """Fails if any is left after so many seconds."""
        end = time.monotonic() + seconds
        while left := self.alive():
            assert time.monotonic() < end, left
            time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
