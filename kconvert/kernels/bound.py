"""Whether the tensors that a manifest gives a built-in layout are those that the layout's rules make.

Parts in another order, such as up before gate, load without any other error and compute something else.  Told without
torch, for the loader and for `verify --level bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kconvert.errors import CheckpointError, KconvertError, RecipeError
from kconvert.transforms import Arrangement, LayoutSpec, ShapeError, bind_spec, whole

__all__ = ["layout_problem", "version_problem"]


def version_problem(spec: LayoutSpec | None, name: str, version: int) -> str | None:
    """Why a layout of this name and version cannot be looked at; `spec` is the one of the name, where there is one."""
    if spec is None:
        return f"the manifest names layout {name!r}, which is not installed"
    if spec.version != version:
        return f"layout {name!r} was written in version {version}, this kconvert has {spec.version}"
    return None


def layout_problem(
    spec: LayoutSpec,
    paths: Sequence[str],
    found: Mapping[str, Arrangement],
    shapes: Mapping[str, tuple[int, ...]],
) -> str | None:
    """What is wrong with the tensors of one claim, or None.

    Args:
        spec: the layout.
        paths: the module paths of the claim, in pair order.
        found: every target of the claim, by full name, out of tensors of the stock model.
        shapes: those of these tensors.
    """
    expected: dict[str, Arrangement] = {}
    try:
        for rule in bind_spec(spec, paths, tuple(shapes)):
            expected.update(rule.arrange({source: whole(source, shapes[source]) for source in rule.sources}))
    except (CheckpointError, RecipeError, ShapeError) as error:
        return f"the manifest is not whole: {error.what if isinstance(error, KconvertError) else error}"
    if expected == found:
        return None
    wrong = min(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    return f"the parts of {wrong!r} in the manifest are not those of layout {spec.name!r}" + _order(
        expected.get(wrong), found.get(wrong)
    )


def _order(expected: Arrangement | None, found: Arrangement | None) -> str:
    """Which tensors come in which order, where that is what differs."""
    if expected is None or found is None or expected.sources == found.sources:
        return ""
    listed = [", ".join(made.sources) for made in (found, expected)]
    return f": they are {listed[0]}, and have to be {listed[1]}"
