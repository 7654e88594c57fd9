"""Float values of one dtype as another, in blocks of bytes: F64, F32, F16 or BF16 to F32, F16 or BF16.

Values are those of torch's `.to()`, bit for bit: round to nearest, ties to even; what is too large becomes infinite;
and from F64 to a half, rounded to F32 on the way, as torch does.  numpy has no BF16, so that is done on the bits.

NaN stays NaN.  torch's NaN bits depend on where in a tensor the value stands; here they do not: sign and payload stay
where the target can hold them, so F16 and BF16 come back from F32 bit for bit.  Else the sign and the first bits of
the payload stay, quiet, and a BF16 gets the bits 0x7FC0.

Refused: any other pair of dtypes, and one dtype as itself, which is a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from kconvert.checkpoint import DTYPE_BITS, FLOAT_DTYPES

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

__all__ = ["Cast"]

_STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class Cast:
    """`source` and `target` as safetensors names dtypes, e.g. `F32` and `BF16`."""

    source: str
    target: str

    def __post_init__(self) -> None:
        if self.source not in FLOAT_DTYPES or self.target not in _FROM_F32 or self.source == self.target:
            raise ValueError(f"no cast from {self.source} to {self.target}")

    @property
    def source_bytes(self) -> int:
        """Bytes of a source value."""
        return DTYPE_BITS[self.source] // 8

    @property
    def target_bytes(self) -> int:
        """Bytes of a target value."""
        return DTYPE_BITS[self.target] // 8

    def size_after(self, size_bytes: int) -> int:
        """How many bytes `size_bytes` bytes of the source become."""
        return size_bytes // self.source_bytes * self.target_bytes

    def whole(self, most_bytes: int) -> int:
        """The size of the whole source values that `most_bytes` hold; of one at least."""
        return max(most_bytes // self.source_bytes, 1) * self.source_bytes

    def convert(self, data: memoryview) -> memoryview:
        """The converted bytes of whole source values; `data` is left as it is."""
        import numpy as np

        with np.errstate(all="ignore"):  # infinity is the answer to what is too large
            made = _FROM_F32[self.target](_to_f32(np.frombuffer(data, _STORED[self.source]), self.source))
        return made.astype(_STORED[self.target], copy=False).view("u1").data


def _to_f32(values: Array, dtype: str) -> Array:
    import numpy as np

    if dtype == "BF16":
        return (values.astype("<u4") << np.uint32(16)).view("<f4")
    found = values.astype("<f4")
    is_nan = np.isnan(found)
    if dtype == "F16" and is_nan.any():  # numpy makes some of them quiet
        bits = values.view("<u2")[is_nan].astype("<u4")
        found.view("<u4")[is_nan] = (bits & 0x8000) << 16 | 0x7F80_0000 | (bits & 0x03FF) << 13
    return found


def _to_f16(values: Array) -> Array:
    import numpy as np

    found = values.astype("<f2")
    is_nan = np.isnan(values)
    if is_nan.any():  # numpy keeps no payload, or an unquiet one, depending on how it was built
        bits = values.view("<u4")[is_nan]
        quiet = np.where(bits & 0x1FFF, 0x0200, 0).astype("<u4")
        found.view("<u2")[is_nan] = (bits >> 16 & 0x8000) | 0x7C00 | quiet | (bits >> 13 & 0x03FF)
    return found


def _to_bf16(values: Array) -> Array:
    import numpy as np

    bits = values.view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    kept = np.where(bits & np.uint32(0xFFFF), np.uint16(0x7FC0), (bits >> np.uint32(16)).astype("<u2"))
    return np.where(np.isnan(values), kept, rounded.astype("<u2"))


_FROM_F32: dict[str, Callable[[Array], Array]] = {"F32": lambda values: values, "F16": _to_f16, "BF16": _to_bf16}
