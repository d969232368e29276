"""The most memory a rank takes: what is freed again counts, what is mapped from a file does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GROWN = """
import sys
import numpy as np, torch
from distir.backends.tensors.resident import Growth
data = np.memmap(sys.argv[1], np.uint8, "r")
before = bytearray(48 << 20)  # what was freed before does not count
del before
growth = Growth(torch.device("cpu"))
if growth.bytes() is None:
    print("none")
    sys.exit()
first = growth.bytes()
data.sum()
mapped = growth.bytes()
x = bytearray(32 << 20)
del x
print(first, mapped, growth.bytes())
"""


def test_growth(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(64 << 20))
    command = [sys.executable, "-c", GROWN, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    if done.stdout.strip() == "none":
        pytest.skip("this system does not count resident memory as Linux does")
    first, mapped, last = (int(n) / 2**20 for n in done.stdout.split())
    assert abs(first) < 2
    assert abs(mapped) < 8
    assert 30 < last < 42
