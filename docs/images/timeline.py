"""Draw the picture of the README: `python docs/images/timeline.py` writes timeline.svg beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import distir
from distir import viz

if TYPE_CHECKING:
    from distir.viz.figure import Figure

MODEL = Path(__file__).parents[2] / "examples" / "gpt2-tiny.onnx"
FILE = Path(__file__).with_suffix(".svg")


def draw() -> tuple[Figure, str]:
    """The figure, and the predicted figures as text: the file keeps them, so that a test sees when they change."""
    model = distir.load(MODEL, {"batch": 256}, loss="cross-entropy", optimizer="adamw")
    prediction = distir.simulate(model, distir.Plan(dp=2, pp=2, microbatches=4), "cpu-2core")
    text = f"step {prediction.step_seconds * 1e3:.3g} ms, peak memory {prediction.peak_memory / 2**20:.3g} MiB a device"
    return viz.timeline(prediction.simulation), text


if __name__ == "__main__":
    import matplotlib as mpl

    mpl.rcParams["svg.hashsalt"] = "distir"  # the same figure gives the same file
    figure, text = draw()
    figure.savefig(FILE, metadata={"Description": text, "Date": None})
    FILE.write_text("".join(f"{line.rstrip()}\n" for line in FILE.read_text().splitlines()))
    print(f"{FILE.name}: {text}")
