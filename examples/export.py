#!/usr/bin/env python3
"""Export a model with random weights to ONNX: `python examples/export.py NAME [--out FILE] [--ids-only] [sizes]`.

    gpt2-tiny  GPT-2 with 2 layers of width 64, 4 heads, a vocabulary of 509, sequences of 16; one file
    gpt2       GPT-2 small (124M parameters), sequences of 128; weights in FILE.data beside the file
    mlp        8 linear layers of width 32 with ReLU between them; one file

The batch is symbolic and named `batch`. GPT-2 takes `input_ids` (batch, S), an additive float
`attention_mask` (1, 1, S, S) and `position_ids` (1, S), and gives `logits` (batch, S, vocabulary). The MLP
maps `x` (batch, width) to `y` (batch, width). Every parameter of the module, tied or not, is one initializer
of the same name. With `--ids-only` GPT-2 takes `input_ids` alone; that it is causal, and where a token stands, is then
in the file.

Tests import `build` and `export` to compare with the module in PyTorch. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir
    import torch

SIZES: dict[str, dict[str, int]] = {
    "gpt2-tiny": {"layers": 2, "width": 64, "heads": 4, "vocab": 509, "seq": 16},
    "gpt2": {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "seq": 128},
    "mlp": {"layers": 8, "width": 32},
}
OUTPUT = {"gpt2-tiny": "logits", "gpt2": "logits", "mlp": "y"}
POSITIONS = {"gpt2": 1024}  # rows of the position table; elsewhere as many as the sequence is long
EXTERNAL_DATA = {"gpt2"}
SEED = 0
OPSET = 20


def build(
    name: str, *, batch: int = 4, ids_only: bool = False, **sizes: int
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The module in eval mode and example inputs for it, by name: the same ones on every call.

    `sizes` overrides entries of `SIZES[name]`; `ids_only`: GPT-2 makes mask and positions itself. Raises ValueError for
    what does not apply or fit.
    """
    size = _resolve(name, sizes, ids_only)
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = _mlp(size) if name == "mlp" else _gpt2(size, POSITIONS.get(name, 0))
        _spread(module)
        if name == "mlp":
            inputs = {"x": torch.randn(batch, size["width"])}
        else:
            inputs = {"input_ids": torch.randint(size["vocab"], (batch, size["seq"]))}
            if not ids_only:
                inputs |= {
                    "attention_mask": causal_mask(size["seq"]),
                    "position_ids": torch.arange(size["seq"])[None],
                }
    return module.eval(), inputs


def export(name: str, out: str | os.PathLike[str] | None = None, ids_only: bool = False, **sizes: int) -> Path:
    """Write the model to `out` (default: `NAME.onnx` beside this script) and return that path.

    Nothing is seen at `out` before it is complete. Raises ValueError as `build` does, OSError where it cannot
    be written, and RuntimeError if the exporter did not leave each parameter as it is in the module.
    """
    path = Path(out) if out is not None else Path(__file__).with_name(f"{name}.onnx")
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    module, inputs = build(name, ids_only=ids_only, **sizes)
    import torch

    batch = torch.export.Dim("batch")
    first = next(iter(inputs))  # the only input with a batch dim
    with _quiet():
        program = torch.onnx.export(
            module,
            (),
            kwargs=inputs,
            dynamo=True,
            dynamic_shapes={key: {0: batch} if key == first else None for key in inputs},
            output_names=[OUTPUT[name]],
            opset_version=OPSET,
            optimize=False,
            verbose=False,
        )
        assert program is not None  # only the exporter without dynamo returns nothing
        _name_parameters(program.model, module)
        with _hidden_parameters(program.model, module):
            program.optimize()
    _strip_metadata(program.model)
    _save(program.model, path, external=name in EXTERNAL_DATA)
    return path


def causal_mask(seq: int) -> torch.Tensor:
    """(1, 1, seq, seq) float32, added to the scores: 0 where a position may look, else the lowest number."""
    import torch

    return torch.full((1, 1, seq, seq), torch.finfo(torch.float32).min).triu(1)


def _resolve(name: str, sizes: dict[str, int], ids_only: bool = False) -> dict[str, int]:
    if name not in SIZES:
        raise ValueError(f"unknown model {name!r}: choose from {', '.join(SIZES)}")
    if extra := sorted(sizes.keys() - SIZES[name].keys()):
        raise ValueError(f"{name} has no {' or '.join(extra)}: its sizes are {', '.join(SIZES[name])}")
    size = {**SIZES[name], **sizes}
    if bad := [f"{key} {value}" for key, value in size.items() if value < 1]:
        raise ValueError(f"sizes must be positive, got {', '.join(bad)}")
    if ids_only and "vocab" not in size:
        raise ValueError(f"{name} takes no ids")
    if "heads" in size and size["width"] % size["heads"]:
        raise ValueError(f"width {size['width']} is not divisible by {size['heads']} heads")
    if "seq" in size and size["seq"] > (limit := POSITIONS.get(name, size["seq"])):
        raise ValueError(f"{name} has {limit} positions, too few for seq {size['seq']}")
    return size


def _gpt2(size: dict[str, int], positions: int) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    class GPT2(GPT2LMHeadModel):
        """Takes tensors and gives the logits. A 4-D mask passes through transformers' masking untouched."""

        def forward(self, input_ids, attention_mask=None, position_ids=None):  # pyright: ignore
            out = super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids)
            return out.logits

    config = GPT2Config(
        vocab_size=size["vocab"],
        n_positions=positions or size["seq"],
        n_embd=size["width"],
        n_layer=size["layers"],
        n_head=size["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",  # pyright: ignore[reportCallIssue]
    )
    return GPT2(config)


def _mlp(size: dict[str, int]) -> torch.nn.Module:
    from torch import nn

    class MLP(nn.Module):
        """Square linear layers with ReLU between them; transformers has no such model."""

        def __init__(self, layers: int, width: int):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
            for weight in self.layers.parameters():
                if weight.ndim == 2:  # He et al. 2015: keeps the scale of activations through ReLUs
                    nn.init.kaiming_normal_(weight, nonlinearity="relu")

        def forward(self, x):
            for layer in self.layers[:-1]:
                x = nn.functional.relu(layer(x))
            return self.layers[-1](x)

    return MLP(size["layers"], size["width"])


def _spread(module: torch.nn.Module) -> None:
    """Move vectors (biases, layer norms) off the constants they start at, so that leaving one out shows."""
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.02)


def _name_parameters(model: onnx_ir.Model, module: torch.nn.Module) -> None:
    """Make each parameter of `module` exactly one initializer, named as in `named_parameters()`."""
    initializers = model.graph.initializers
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    for names in aliases.values():
        found = [initializers[name] for name in names if name in initializers]
        if not found:
            raise RuntimeError(f"the exporter changed or dropped parameter {names[0]}")
        first, *copies = found
        for copy in copies:
            copy.replace_all_uses_with(first)
            del initializers[str(copy.name)]
        first.name = names[0]  # also its key in `initializers`


@contextlib.contextmanager
def _hidden_parameters(model: onnx_ir.Model, module: torch.nn.Module) -> Iterator[None]:
    """Make the parameters graph inputs for a while, so that an optimizer cannot look at their values.

    It would fold small ones into constants (the transposed copy of a tied embedding among them), merge those
    that are equal at the start (all layer norms) and drop biases that are zero: true of the values at export,
    wrong once they are trained.
    """
    graph = model.graph
    hidden = [(graph.initializers.pop(name), parameter) for name, parameter in module.named_parameters()]
    tensors = [value.const_value for value, _ in hidden]
    for value, _ in hidden:
        value.const_value = None
        graph.inputs.append(value)
    yield
    for (value, _), tensor in zip(hidden, tensors, strict=True):
        graph.inputs.remove(value)
        value.const_value = tensor
        graph.initializers.add(value)


def _strip_metadata(model: onnx_ir.Model) -> None:
    """Drop stack traces and the like: they weigh as much as a small model, and hold paths of this machine."""
    from onnx_ir.traversal import RecursiveGraphIterator

    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    for node in RecursiveGraphIterator(model.graph):
        node.metadata_props.clear()
        node.doc_string = None
        values += node.outputs
    for value in values:
        value.metadata_props.clear()
        value.doc_string = None


def _save(model: onnx_ir.Model, path: Path, external: bool) -> None:
    """Write into a temporary folder beside `path`, then rename: the data first, as the model refers to it."""
    import onnx_ir

    path.parent.mkdir(parents=True, exist_ok=True)
    data = f"{path.name}.data"
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        onnx_ir.save(model, Path(folder, path.name), external_data=data if external else None)
        for name in (data, path.name):
            if Path(folder, name).exists():
                os.replace(Path(folder, name), path.parent / name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notes on optional packages and deprecations: none concerns these models."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: list[str] | None = None) -> int:
    parser = _Parser(
        prog="export.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", choices=list(SIZES), help=", ".join(SIZES))
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: NAME.onnx beside this script")
    for size in SIZES["gpt2"]:
        parser.add_argument(f"--{size}", type=int, metavar="N")
    parser.add_argument("--ids-only", action="store_true", help="GPT-2 takes no mask and no positions")
    options = vars(parser.parse_args(argv))
    name, out, ids_only = options.pop("name"), options.pop("out"), options.pop("ids_only")
    sizes = {key: value for key, value in options.items() if value is not None}
    try:
        _resolve(name, sizes, ids_only)
    except ValueError as error:
        parser.error(str(error))
    try:
        path = export(name, out, ids_only, **sizes)
    except OSError as error:
        parser.error(f"cannot write {error.filename or out}: {error.strerror or error}")
    except ImportError as error:
        parser.error(f"{error}: pip install -e '.[dev]'")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
