"""Weights under transformers' names as those of a decoder's program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir.ir.errors import ModelError
from distir.models.architectures import Architecture
from distir.models.decoder import Decoder

if TYPE_CHECKING:
    import numpy as np

PIECES = {
    "attention.qkv": ("attention.q", "attention.k", "attention.v"),
    "attention.kv": ("attention.k", "attention.v"),
    "mlp.in": ("mlp.gate", "mlp.up"),
    "mlp.experts.in": ("mlp.experts.gate", "mlp.experts.up"),
    "mlp.shared.in": ("mlp.shared.gate", "mlp.shared.up"),
}
"""Products that are one in a decoder, and several in other programs: by the first the others, side by side."""
_TABLES = ("embedding", "positions")
"""Weights (rows, width) everywhere."""


class Pretrained(Mapping[str, Any]):
    """The arrays of a decoder's parameters, by name. Each is made, when it is asked for, of those in `state`, by the
    names in files that transformers saves.

    Raises ModelError for one that `state` has not, or that has another shape.
    """

    def __init__(
        self,
        config: Decoder,
        architecture: Architecture,
        shapes: Mapping[str, tuple[int, ...]],
        state: Mapping[str, Any],
    ) -> None:
        self._config, self._architecture, self._shapes, self._state = config, architecture, shapes, state

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes  # without making it

    def __getitem__(self, name: str) -> np.ndarray:
        import numpy as np

        expected = self._shapes[name]
        layer, _, rest = name.partition(".")
        part, kind = (rest if layer.isdecimal() else name).rpartition(".")[::2]
        if not part:  # a value that is no module's weight and bias
            part, kind = kind, "weight"
        found = np.ascontiguousarray(self._part(layer, part, kind))
        if found.shape != expected:
            raise ModelError(f"the weights of {name}: expected shape {expected}, got {found.shape}")
        return found

    def _part(self, layer: str, part: str, kind: str) -> np.ndarray:
        """The weight or bias of a part: of its own module, of its pieces side by side, or a piece of a whole."""
        import numpy as np

        modules = self._architecture.modules
        if part in modules:
            return self._module(modules[part], layer, part, kind)
        pieces = PIECES.get(part, ())
        if all(piece in modules for piece in pieces) and pieces:
            return np.concatenate([self._module(modules[p], layer, p, kind) for p in pieces], axis=-1)
        whole = self._module(modules["attention.qkv"], layer, "attention.qkv", kind)
        queries = self._config.heads * self._config.head_size
        return whole[..., :queries] if part == "attention.q" else whole[..., queries:]

    def _module(self, module: str, layer: str, part: str, kind: str) -> np.ndarray:
        import numpy as np

        if "{e}" in module:
            return np.stack([self._tensor(module.format(i=layer, e=e), kind) for e in range(self._config.experts)])
        turned = part not in _TABLES and (self._architecture.transposed or part == "head")
        found = self._tensor(module.format(i=layer), kind, turned)
        if part == "attention.qkv" and self._architecture.by_head:
            heads = (*found.shape[:-1], self._config.heads, 3, self._config.head_size)
            found = np.swapaxes(found.reshape(heads), -2, -3).reshape(found.shape)
        return found

    def _tensor(self, module: str, kind: str, turned: bool = True) -> np.ndarray:
        import numpy as np

        name = f"{module}.{kind}"
        names: Sequence[str] = (name, name.partition(".")[2])  # some files leave the outermost module out
        for name in names:
            if name in self._state:
                found = np.asarray(self._state[name])
                return found.T if turned and found.ndim == 2 else found
        raise ModelError(f"the weights have no {names[0]}")
