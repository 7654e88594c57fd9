"""How far two results of a forward are apart.

Every tensor in them is compared, in whatever containers.  NaN equals NaN and infinity equals infinity of the same
sign; finite values are subtracted in float64.  A tensor of nothing but zeros and NaN proves nothing, and that is
said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from kconvert.parity.results import Verdict

__all__ = ["Difference", "Output", "compare_outputs", "judge", "same_bits"]

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Output:
    """A result of a forward: its tensors, on the CPU, and its structure."""

    def __init__(self, value: Any) -> None:
        leaves, self.structure = tree_flatten(value)
        # objects such as caches are told by their type: they hold no result of their own
        self.leaves = [leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else _token(leaf) for leaf in leaves]


def _token(leaf: object) -> object:
    return leaf if leaf is None or isinstance(leaf, bool | int | float | str) else type(leaf).__name__


@dataclass(frozen=True)
class Difference:
    """Between a stock result and a converted one.

    Attributes:
        is_equal: the bits are the same, NaN counting as NaN.
        relative: see `Result.difference`.
        is_proof: whether every float tensor of the stock result holds a value that is finite and not zero.
        reason: why they cannot be subtracted, or why they prove nothing.
    """

    is_equal: bool
    relative: float | None
    is_proof: bool = True
    reason: str | None = None


def compare_outputs(expected: Output, found: Output) -> Difference:
    """Compare a converted result with the stock one."""
    if expected.structure != found.structure:
        return Difference(False, None, reason="gives another structure than the stock module")
    differences = []
    for number, (one, two) in enumerate(zip(expected.leaves, found.leaves, strict=True)):
        where = f"output {number + 1} of {len(expected.leaves)}"
        if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
            differences.append(_compare_tensors(one, two, where))
        elif isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor) or one != two:
            return Difference(False, None, reason=f"{where} is {_kind(two)}, the stock module gives {_kind(one)}")
    return _joined(differences)


def _kind(leaf: object) -> str:
    return "a tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)


def _joined(differences: Sequence[Difference]) -> Difference:
    """The worst of each, with the reason of the first that has one."""
    if not differences:
        return Difference(True, 0.0, is_proof=False, reason="gives no tensor, so nothing is compared")
    apart = next((each for each in differences if each.relative is None), None)
    if apart is not None:
        return apart
    return Difference(
        is_equal=all(each.is_equal for each in differences),
        relative=max(each.relative or 0.0 for each in differences),
        is_proof=all(each.is_proof for each in differences),
        reason=next((each.reason for each in differences if each.reason), None),
    )


def _compare_tensors(expected: torch.Tensor, found: torch.Tensor, where: str) -> Difference:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        text = f"{where} is {_described(found)}, the stock module gives {_described(expected)}"
        return Difference(False, None, reason=text)
    if not expected.is_floating_point():
        num_wrong = int((expected != found).sum())
        reason = f"{where} has {num_wrong} other integers than the stock module" if num_wrong else None
        return Difference(not num_wrong, None if num_wrong else 0.0, reason=reason)
    one, two = expected.double(), found.double()
    finite = one.isfinite() & two.isfinite()
    special = ~finite & ~((one == two) | (one.isnan() & two.isnan()))
    if special.any():
        count = int(special.sum())
        return Difference(
            False, None, reason=f"{where} has NaN or infinity in {count} places where stock has not, or other"
        )
    largest = _largest(one[one.isfinite()])
    apart = _largest((one - two)[finite])
    relative = 0.0 if apart == 0.0 else (apart / largest if largest else None)
    if relative is None:
        return Difference(False, None, reason=f"{where} is zero everywhere in the stock module, and not here")
    is_proof = largest > 0.0
    text = f"{where} is {'zero' if finite.any() else 'NaN or infinity'} everywhere, which proves nothing"
    return Difference(same_bits(expected, found), relative, is_proof, None if is_proof else text)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two float tensors of one shape and dtype have the same bits; NaN is NaN, whatever its bits."""
    kind = _SAME_SIZE[one.element_size()]
    same = one.contiguous().view(kind) == two.contiguous().view(kind)
    return bool((same | (one.isnan() & two.isnan())).all())


def judge(difference: Difference, *, limit: float) -> tuple[Verdict, str | None]:
    """The verdict on a difference, with its reason where it is no pass; limit 0 asks for equal bits."""
    if difference.relative is None or not math.isfinite(difference.relative):
        return Verdict.FAILED, difference.reason
    if not difference.is_equal and difference.relative > limit:
        return Verdict.FAILED, None
    if not difference.is_equal and limit == 0.0:
        return Verdict.FAILED, "differs in the sign of a zero"
    if not difference.is_proof:
        return Verdict.NO_PROOF, difference.reason
    return (Verdict.EQUAL if difference.is_equal else Verdict.WITHIN), None
