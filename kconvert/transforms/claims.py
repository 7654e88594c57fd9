"""What of a module an entry takes: its whole subtree, or the children that its layout names.

A layout that takes named children leaves the others where they are, so that they pass through untouched or
belong to another entry: q, k and v are packed in an attention module whose q and k norms get a kernel of
their own.  Claims never overlap.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["NOTHING", "claims_overlap", "is_taken"]

NOTHING = frozenset({""})
"""What a layout takes that changes a module's forward alone: no child has this name."""


def is_taken(name: str, path: str, takes: Collection[str]) -> bool:
    """Whether an entry at the module `path` takes the tensor or module `name`, one below that path.

    Args:
        name: a full name.
        path: the module path of the claim.
        takes: the children that the layout takes; empty for the whole subtree.
    """
    if not name.startswith(f"{path}."):
        return False
    return not takes or name[len(path) + 1 :].partition(".")[0] in takes


def claims_overlap(one: str, one_takes: Collection[str], two: str, two_takes: Collection[str]) -> bool:
    """Whether the claims on two module paths have a module in common."""
    return one == two or is_taken(two, one, one_takes) or is_taken(one, two, two_takes)
