"""What KernelConfig would make of entries that are right one by one.

It keeps one patch per class name and one kernel per kernel name, and it looks for names more widely than they are
written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import replace

from kconvert.export.entries import Entry, ModelNames, Refusal

__all__ = ["anchor", "find_clashes", "too_wide_reason"]


def find_clashes(entries: Sequence[Entry]) -> list[Refusal]:
    """Entries that KernelConfig would keep only one of: by the patched class, or by the kernel's class name."""
    refusals = []
    seen: dict[str, Entry] = {}
    kernels: dict[str, Entry] = {}
    for entry in entries:
        name = entry.patched
        first = seen.setdefault(name, entry) if name is not None else entry
        if first is not entry:
            both = "two fusions" if entry.parent and first.parent else "a fusion and a replacement"
            where = f"under one parent class, {name}" if entry.parent and first.parent else f"of one class, {name}"
            reason = f"{both} {where} ({_shown(first)} and {_shown(entry)}), of which KernelConfig keeps one"
            refusals.append(Refusal((*first.patches, *entry.patches), entry.layout, reason))
        if entry.package is not None:
            other = kernels.setdefault(entry.package.class_name, entry)
            if other.package != entry.package:
                reason = (
                    f"another package has a kernel {entry.package.class_name} too, and KernelConfig goes by that name"
                )
                refusals.append(Refusal((*other.patches, *entry.patches), entry.layout, reason))
    return refusals


def _shown(entry: Entry) -> str:
    return " + ".join(entry.children) if entry.patterns else entry.classes[0]


def anchor(entry: Entry, model: ModelNames, patched: Set[str | None]) -> Entry:
    """The entry with its class name anchored where it is part of another class's; a fusion's parent has no spelling."""
    return replace(entry, anchored=not entry.patterns and bool(_wider(entry, model, patched)))


def _wider(entry: Entry, model: ModelNames, patched: Set[str | None]) -> list[str]:
    """Classes that the patch would reach too: transformers searches its name in theirs, as a regular expression."""
    name = entry.patched
    if name is None:
        return []
    return sorted(found for found in set(model.classes.values()) - patched if re.search(name, found))


def too_wide_reason(entry: Entry, model: ModelNames, patched: Set[str | None]) -> str | None:
    """Why the entry would change more than its modules, or None."""
    name = entry.patched
    if name is None:
        return None
    wider = _wider(entry, model, patched)
    if wider and not entry.anchored:
        return f"KernelConfig searches the name {name} in other names too, and would also patch {wider[0]}"
    kernel = entry.package.class_name if entry.package is not None else ""
    stock = sorted(found for found, layer in model.layers.items() if layer == kernel and found != name)
    if stock:
        return f"{stock[0]} has the layer name {kernel}, so KernelConfig would put the kernel in there too"
    return None
