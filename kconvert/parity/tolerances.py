"""How far a kernel may be from the stock forward, and why.

The reference has to give the same bits in every dtype that models run in.  In float64, which is here to make a
flipped bit of a weight show, a matrix product depends on where the rows begin in memory, so a share of 1e-13 is let
pass; the lowest bit of a float32 weight of common size is 1e4 times as much.  A kernel may round otherwise: it adds
in another order, or casts at another place.  All limits are shares of the largest absolute value of the stock output,
because a sum that cancels to almost nothing carries the rounding of its large terms.

- float32, one module: 1e-5.  The shipped CPU kernels were measured at 1e-7 at most; a wrong eps, a missing offset or
  a swapped factor is far above.
- bfloat16 and float16, one module: 8 units in the last place of the largest value (a unit is at most `eps`).  The
  shipped CPU kernels give the stock bits.  A kernel that rounds only once was measured on SmolLM2-135M, as the stock
  module in float32 with its result rounded: norms and MLPs are 1 unit away, whole attention modules 4 to 6.5,
  because the stock code rounds at every step.
- whole models: the roundings of all layers add up.  float32: 1e-4, measured 3e-7.  bfloat16 and float16: 16 units;
  measured between the stock model and itself in float32: 6 to 7.
"""

from __future__ import annotations

__all__ = ["LOGITS_LIMITS", "MODULE_LIMITS", "REFERENCE_LIMITS", "TOP1_RULE", "limit_of"]

_BFLOAT16_EPS = 2.0**-7
_FLOAT16_EPS = 2.0**-10

REFERENCE_LIMITS = {"float64": 1e-13, "float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
MODULE_LIMITS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 8 * _BFLOAT16_EPS, "float16": 8 * _FLOAT16_EPS}
LOGITS_LIMITS = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 16 * _BFLOAT16_EPS, "float16": 16 * _FLOAT16_EPS}

TOP1_RULE = (
    "two models may find different tokens most likely where the stock model's logits for the two are closer than "
    "the limit; else it is a failure"
)


def limit_of(limits: dict[str, float], dtype: str) -> float:
    """The limit of a dtype; that of bfloat16 for one that is not in the table."""
    return limits.get(dtype, limits["bfloat16"])
