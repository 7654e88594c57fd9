"""torch's own grouped GEMM: where it is, and what it takes.

    grouped_mm(rows, weights, offs=ends)[r] = rows[r] @ weights[e]    for the rows from ends[e - 1] to ends[e]

Rows past the last end are not written.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["grouped_mm", "grouped_mm_reason"]

grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None)

_DTYPES = {
    "cpu": (torch.float32, torch.float16, torch.bfloat16),
    # others go through a loop there, which waits for the device
    "cuda": (torch.bfloat16,),
}
_OLDEST_CAPABILITY = (8, 0)


def grouped_mm_reason(rows: torch.Tensor, *weights: torch.Tensor) -> str | None:
    """Why the product of `rows` `[R, n]` with stacked weights `[E, n, m]` cannot be taken so, or None."""
    if grouped_mm is None:
        return "this torch has no grouped_mm"
    dtypes = _DTYPES.get(rows.device.type, ())
    # inductor knows of one dtype only
    if rows.dtype not in dtypes or (torch.compiler.is_compiling() and rows.dtype != torch.bfloat16):
        return f"it does not take {str(rows.dtype).removeprefix('torch.')} on {rows.device.type}"
    units = 16 // rows.element_size()
    for weight in weights:
        # what goes in and comes out has rows as long as a weight is wide and high
        strides, (_, *sizes) = sorted(weight.stride()), weight.shape
        if strides[0] != 1 or any(each % units for each in (*strides[1:], *sizes)):
            return "a weight has rows or columns that are not multiples of 16 bytes"
        if not torch.compiler.is_compiling() and weight.data_ptr() % 16:
            return "a weight is not aligned to 16 bytes"
    if rows.is_cuda and torch.cuda.get_device_capability(rows.device) < _OLDEST_CAPABILITY:
        return "the device is too old"
    return None
