"""Buffers of package layouts: computed again outside the meta device.

While loading, the model is built on meta; a layout's non-persistent buffer is then uninitialised memory and a
plain tensor attribute stays on meta.  The layout is built once more, on the CPU, and these are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kconvert.errors import LoadError
from kconvert.runtime.patching import PatchJob

__all__ = ["restore_buffers"]


def restore_buffers(model: nn.Module, job: PatchJob) -> None:
    """Fill the non-persistent buffers and plain tensor attributes of every package module that has some.

    Raises:
        LoadError: one of them is made from weights, so that it cannot be computed again.
    """
    for patch in job.patches:
        layout = patch.package.layout if patch.package is not None else None
        if layout is None:  # a stock module, whose buffers the model computes itself
            continue
        for paths in patch.record.modules:
            module = model.get_submodule(paths[0])
            wanted = list(_volatile(module))
            if not wanted:
                continue
            arguments = job.arguments[paths[0]]
            args, kwargs = arguments if arguments is not None else (job.members[paths[0]], {})
            with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
                fresh: Any = layout(*args, **kwargs)
            for owner_path, name in wanted:
                owner, source = module.get_submodule(owner_path), fresh.get_submodule(owner_path)
                value = getattr(source, name)
                if value.is_meta:
                    raise LoadError(
                        f"{name!r} of the layout at {paths[0]!r} is made from weights, which are not there yet when it is built",
                        where=f"{paths[0]}.{owner_path}.{name}".replace("..", "."),
                        fix="make it a persistent buffer that the conversion_mapping fills, or compute it in the forward",
                    )
                old = getattr(owner, name)
                device = next((weight.device for weight in module.parameters() if not weight.is_meta), value.device)
                restored = value.to(device=device, dtype=old.dtype if old.is_floating_point() else None)
                if name in owner._buffers:
                    owner._buffers[name] = restored
                else:
                    owner.__dict__[name] = restored


def _volatile(module: nn.Module) -> Iterator[tuple[str, str]]:
    """(submodule path, name) of what no file holds."""
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name in owner._non_persistent_buffers_set:
                yield path, name
        for name, value in vars(owner).items():
            if isinstance(value, torch.Tensor):
                yield path, name
