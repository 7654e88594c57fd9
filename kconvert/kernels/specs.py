"""The built-in layout specs, read without torch: what recipes may name, and what `list-kernels` shows."""

from __future__ import annotations

import pkgutil
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from kconvert.errors import one_line
from kconvert.transforms import KernelEntry, LayoutSpec

__all__ = ["kernel_specs", "layout_specs"]


@cache
def layout_specs() -> dict[str, LayoutSpec]:
    """Layout name to spec, for every folder below `kernels/ops` that has a `spec.py`."""
    from kconvert.kernels import ops

    specs = {}
    for found in pkgutil.iter_modules(ops.__path__, f"{ops.__name__}."):
        try:
            if found.ispkg and find_spec(f"{found.name}.spec") is not None:
                spec: LayoutSpec = import_module(f"{found.name}.spec").SPEC
                specs[spec.name] = spec
        except Exception as error:  # noqa: BLE001 - one broken file must not take the others down
            warnings.warn(f"layout spec {found.name}.spec does not import ({one_line(error)})", stacklevel=2)
    return dict(sorted(specs.items()))


@cache
def kernel_specs() -> dict[str, tuple[LayoutSpec, KernelEntry]]:
    """Kernel ID to its layout's spec and its entry there."""
    return {entry.kernel_id: (spec, entry) for spec in layout_specs().values() for entry in spec.kernels}
