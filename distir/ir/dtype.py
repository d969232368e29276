"""Element types."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from distir.ir.errors import UsageError

if TYPE_CHECKING:
    import numpy as np


class DType:
    """An element type. Calling one gives itself, so that `Float()` reads like a type."""

    __slots__ = ("floating", "kind", "name", "size")
    all: ClassVar[dict[str, DType]] = {}

    def __init__(self, name: str, size: int, kind: str) -> None:
        self.name, self.size, self.kind, self.floating = name, size, kind, kind == "float"
        self.all[name] = self

    def __call__(self) -> DType:
        return self

    def __reduce__(self) -> str:
        return f"_{self.name}"

    def __repr__(self) -> str:
        return self.name

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy dtype; bf16 comes from ml_dtypes."""
        import numpy as np

        if self.name == "bf16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        names = {"f": "float", "i": "int", "u": "uint"}
        return np.dtype("bool" if self.name == "bool" else names[self.name[0]] + self.name[1:])


Float16 = _f16 = DType("f16", 2, "float")
BFloat16 = _bf16 = DType("bf16", 2, "float")
Float = Float32 = _f32 = DType("f32", 4, "float")
Float64 = _f64 = DType("f64", 8, "float")
Bool = _bool = DType("bool", 1, "bool")
UInt8 = _u8 = DType("u8", 1, "int")
Int8 = _i8 = DType("i8", 1, "int")
Int16 = _i16 = DType("i16", 2, "int")
Int32 = _i32 = DType("i32", 4, "int")
Int64 = _i64 = DType("i64", 8, "int")

_SPELLED = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}
"""Names of floating-point types, as users write them."""


def dtype_named(dtype: DType | str) -> DType:
    """The floating-point type of that name. Raises UsageError if there is none."""
    if isinstance(dtype, DType):
        return dtype
    found = DType.all.get(_SPELLED.get(dtype, dtype))
    if found is None or not found.floating:
        raise UsageError(f"unknown dtype {dtype!r}", f"choose from {', '.join(_SPELLED)}")
    return found
