"""Which devices a conversion is for, as `apply`, `plan` and `inspect` say it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kconvert.manifest import Manifest
from kconvert.recipe import Profile

__all__ = ["devices_text", "devices_value", "left_out_texts"]


def devices_value(manifest: Manifest, profile: Profile) -> dict[str, Any]:
    """As plain data."""
    return {
        "device": manifest.device,
        "devices": list(manifest.devices),
        "view_devices": list(manifest.view_devices),
        "entries_left_out": [
            {"where": patch.where, "devices": list(patch.devices or ())} for patch in profile.left_out
        ],
    }


def devices_text(devices: Sequence[str], view_devices: Sequence[str]) -> str:
    """`cpu, cuda; npu reads some weights through a view`."""
    at_best = [name for name in devices if name not in view_devices]
    reads = "reads" if len(view_devices) == 1 else "read"
    views = [f"{' and '.join(view_devices)} {reads} some weights through a view"] if view_devices else []
    return "; ".join([", ".join(at_best) or "none in particular", *views])


def left_out_texts(profile: Profile) -> list[str]:
    """What is not used of the recipe, and how it would be: a line for each set of devices."""
    counts = Counter(patch.devices or () for patch in profile.left_out)
    way = ": see --device" if profile.device is None else ""
    return [
        f"{count} {'entry' if count == 1 else 'entries'} for {' and '.join(devices)} only{way}"
        for devices, count in counts.items()
    ]
