"""Offloading: the parameters of a patched module come and go together.

accelerate hooks every child on its own and brings its parameters when that child is called.  A packed module
reads parameters without calling the child that holds them, and would meet them on meta; so where children
are offloaded, one hook on the patched module takes the place of theirs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["join_offload_hooks"]


def join_offload_hooks(model: Any, paths: tuple[str, ...]) -> None:
    """Give each patched module at `paths` one hook in place of those of its offloaded children."""
    claimed = {model.get_submodule(path) for path in paths}  # a claim inside another keeps a hook of its own
    for path in paths:
        module = model.get_submodule(path)
        children = [child for child in module.modules() if child not in claimed]
        hooks = [child._hf_hook for child in children if hasattr(child, "_hf_hook")]
        first = next((hook for hook in hooks if getattr(hook, "offload", False)), None)
        if first is None:
            continue
        accelerate: Any = import_module("accelerate.hooks")  # has no types
        for child in children:
            accelerate.remove_hook_from_module(child)
        joined = accelerate.AlignDevicesHook(
            execution_device=first.execution_device,
            offload=True,
            weights_map=accelerate.PrefixedDataset(first.weights_map.dataset, f"{path}."),
            offload_buffers=first.offload_buffers,
            place_submodules=True,
            tied_params_map=first.tied_params_map,
        )
        accelerate.add_hook_to_module(module, joined)
