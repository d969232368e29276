"""The types of one op's results, from its operands' types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from distir.ir.attributes import check, short
from distir.ir.device import Device, Mesh
from distir.ir.errors import IRTypeError
from distir.ir.exact_attributes import Attributes
from distir.ir.spec import Attrs, Spec, place
from distir.ir.type import Piece, Shard, Tensor, Type

WHERE = ("device", "place")
"""The attributes that only place an op: any op that computes may have them."""
_memo: dict[tuple[Any, ...], tuple[Type, ...]] = {}
_MEMO_LIMIT = 1 << 19


def infer(spec: Spec, attrs: Attrs, types: tuple[Type, ...]) -> tuple[Type, ...]:
    """Result types of one op. Memoised by identity of interned types.

    Raises IRTypeError that names the op, the operand, expected and got.
    """
    if attrs and "callee" in attrs:  # each call is different, and the memo would keep the callee alive
        return _infer(spec, attrs, types)
    form = attrs.form if isinstance(attrs, Attributes) else Attributes(attrs).form
    key = (spec, form, types)
    result = _memo.get(key)
    if result is None:
        if len(_memo) > _MEMO_LIMIT:
            _memo.clear()
        result = _memo[key] = _alike(spec, attrs, types) or _infer(spec, attrs, types)
    return result


def _alike(spec: Spec, attrs: Attrs, types: tuple[Type, ...]) -> tuple[Type, ...] | None:
    """The result types of an op that moves no data, from those on another mesh of the same axes: stages are alike.

    None if operands are not all on one mesh of which there is another, or if the types do not fit.
    """
    mesh = types[0].device if types else None
    if not isinstance(mesh, Mesh) or mesh.like is mesh or spec.comm is not None or "device" in attrs:
        return None
    if any([not isinstance(t, Tensor) or t.device is not mesh for t in types]):
        return None
    try:
        return tuple([t.moved(mesh) for t in infer(spec, attrs, tuple([t.moved(mesh.like) for t in types]))])
    except IRTypeError:  # the error that names this mesh follows
        return None


def forget() -> None:
    """Clear the memo: for measurements."""
    _memo.clear()


def _infer(spec: Spec, attrs: Attrs, types: tuple[Type, ...]) -> tuple[Type, ...]:
    try:
        if spec.each is not None:
            return _several(spec, spec.each, attrs, types)
        if spec.comm is None:
            return _local(spec, attrs, types)
        check(attrs, spec.attributes, 0)
        return tuple(spec.comm.infer(attrs, *types))
    except IRTypeError as e:
        raise IRTypeError(f"{spec.name}: {e.message}", e.hint) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        got = ", ".join(map(repr, types))
        raise IRTypeError(f"{spec.name}({got}) {_text(attrs)}: {type(e).__name__}: {e}") from e


def _several(spec: Spec, each: Spec, attrs: Attrs, types: tuple[Type, ...]) -> tuple[Type, ...]:
    """The result types of an op that repeats another (`each`), one repetition after the other."""
    check({k: v for k, v in attrs.items() if k not in WHERE}, spec.attributes, 0)
    rest = {k: v for k, v in attrs.items() if k != "count"}
    found: list[Type] = []
    for row in spec.rows(attrs, range(len(types))):
        try:
            found += _local(each, rest, tuple([types[k] for k in row]))
        except IRTypeError as e:  # numbers the operands of one repetition
            number = dict(enumerate(row))
            message = re.sub(r"\boperand (\d+)", lambda m, n=number: f"operand {n[int(m[1])]}", e.message)
            raise IRTypeError(message) from None
    return tuple(found)


def _text(attrs: Attrs) -> str:
    """The attributes on one line, long ones cut."""
    text = str(dict(attrs))
    return text if len(text) < 200 else text[:200] + "..."


def _local(spec: Spec, attrs: Attrs, types: tuple[Type, ...]) -> tuple[Tensor, ...]:
    """The rule of ops that move no data between devices."""
    tensors: list[Tensor] = []
    for k, t in enumerate(types):
        if not isinstance(t, Tensor):
            raise IRTypeError(f"operand {k}: expected a tensor, got {t}")
        tensors.append(t)
    check({k: v for k, v in attrs.items() if k not in WHERE}, spec.attributes, len(tensors[0].shape) if tensors else 0)
    device = tensors[0].device if tensors else attrs.get("device")
    if ("device" in attrs and attrs["device"] is not device) or not isinstance(device, Device | Mesh | None):
        raise IRTypeError(f"attribute device: expected where the operands are, {device}, got {short(attrs['device'])}")
    for k, t in enumerate(tensors):
        if t.device is not device:
            raise IRTypeError(f"operand {k}: expected it on {device}, got {t}")
    ins = [t.global_shape for t in tensors]
    outs = spec.shapes(attrs, ins)
    if spec.dtype:
        dtypes = spec.dtype(attrs, *[t.dtype for t in tensors])
    else:
        dtypes = [tensors[0].dtype] * len(outs)
    if not isinstance(device, Mesh):
        return tuple(Tensor(d, s, device) for d, s in zip(dtypes, outs, strict=True))
    free = _free(attrs, device)
    rows = []
    for i, (axis, n) in enumerate(zip(device.axes, device.sizes, strict=True)):
        try:
            rows.append(place(spec, attrs, ins, outs, [t.placements[i] for t in tensors], n, free.get(axis)))
        except IRTypeError as e:
            raise IRTypeError(f"on mesh axis {axis!r}: {e.message}", e.hint) from None
    piece = _piece(tensors)
    results: list[Tensor] = []
    for dtype, shape, placements in zip(dtypes, outs, zip(*rows, strict=True), strict=True):
        t = Tensor.whole(dtype, shape, device, placements)
        results.append(t.of(piece) if t.moves else t)
    indexed = spec.indexed(attrs)
    if indexed is not None:
        slot, dim = indexed
        _contiguous(slot, tensors[slot] if slot >= 0 else results[~slot], dim)
    return tuple(results)


def _free(attrs: Attrs, mesh: Mesh) -> dict[str, Shard]:
    """The mesh axes along which a result is split on a factor that no operand has: the attribute `place`."""
    free = dict(attrs.get("place", ()))
    if type(attrs.get("place", ())) is not tuple:
        raise IRTypeError(f"attribute place: expected a tuple of pairs, got {short(attrs['place'])}")
    for axis, split in free.items():
        if axis not in mesh.axes or not isinstance(split, Shard):
            raise IRTypeError(
                f"attribute place: expected a Shard along an axis of {mesh}, got {split!r} along {axis!r}"
            )
    return free


def _contiguous(slot: int, t: Tensor, dim: int | None) -> None:
    """An indexed dim (None: each) must be split in contiguous ranges: then one offset says which part a device
    holds."""
    for d in range(len(t.shape)) if dim is None else [dim % len(t.shape)]:
        inside = 1
        for outer, n, _ in t.subdims.get(d, ()):
            if outer != inside:
                what = f"operand {slot}" if slot >= 0 else f"result {~slot}"
                raise IRTypeError(f"{what}: expected dim {d} split in contiguous ranges, got {t}")
            inside *= n


def _piece(tensors: Sequence[Tensor]) -> Piece | None:
    """The microbatches that the operands, and so the results, are of."""
    moving = [(k, t) for k, t in enumerate(tensors) if t.moves]
    for k, t in moving:
        if t.piece != moving[0][1].piece:
            raise IRTypeError(f"operand {k}: expected microbatches {moving[0][1].piece}, got {t.piece}")
    return moving[0][1].piece if moving else None
