"""A recipe written from a live model: every place where a built-in layout is proven to fit.

Each layout that replaces one module is tried on copies of the modules that have its structure; where its reference
gives the bits of the stock forward, the place gets an entry, and what was left out stands in a comment with the
reason.  Of a layout's kernels those are listed whose CPU form supports the modules.  Where none does, all are
listed if the layout packs parameters, and a module that would gain nothing is left out.

Refused: a model that is patched already, and a text without entries.  The same model gives the same text.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kconvert.convert.cover import cover_paths, is_expressible, path_shape
from kconvert.errors import RecipeError, UsageError
from kconvert.kernels.specs import layout_specs
from kconvert.names import natural_key, parents
from kconvert.transforms import KernelEntry, LayoutSpec, is_taken

if TYPE_CHECKING:
    from torch import nn

    from kconvert.kernels.layout import Layout

__all__ = ["DraftEntry", "DraftRecipe", "LeftOut", "draft_recipe"]


@dataclass(frozen=True)
class DraftEntry:
    """One patch entry.

    Attributes:
        layout: the layout's name.
        kernels: kernel IDs, best first.
        class_name: the class of every module that the entry takes.
        pattern: their path pattern.
        modules: their paths.
        not_supported: why no CPU kernel stands in for the stock forward, so that the reference runs; else None.
    """

    layout: str
    kernels: tuple[str, ...]
    class_name: str
    pattern: str
    modules: tuple[str, ...]
    not_supported: str | None = None


@dataclass(frozen=True)
class LeftOut:
    """Modules of one class that have a layout's structure and must not have the layout, with the reason."""

    layout: str
    class_name: str
    pattern: str
    modules: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class DraftRecipe:
    """A recipe as data; `to_yaml` gives the text."""

    name: str
    model_type: str
    class_name: str
    entries: tuple[DraftEntry, ...]
    left_out: tuple[LeftOut, ...]

    def to_yaml(self) -> str:
        """The text of the recipe, with a comment for what was left out.

        Raises:
            RecipeError: there is no entry, and a recipe without one says nothing.
        """
        if not self.entries:
            listed = "; ".join(f"{item.layout} at {item.pattern}: {item.reason}" for item in self.left_out)
            raise RecipeError(
                f"no module of the {self.class_name} can have a built-in layout{f' ({listed})' if listed else ''}",
                fix="use the model as it is, or a kernel package of its own",
            )
        lines = [
            f"# Drafted from {self.class_name}: every module where a built-in layout gives the stock result bit for bit.",
            "recipe: 1",
            f"name: {self.name}",
            f"model_type: [{self.model_type}]",
            "patches:",
        ]
        for entry in self.entries:
            if entry.not_supported is not None:
                lines.append(f"  # The reference runs here, no kernel does: {_comment(entry.not_supported)}.")
            lines.append(f"  - kernel: [{', '.join(entry.kernels)}]")
            lines.append(f'    replace: {{class: {entry.class_name}, path: "{entry.pattern}"}}')
        if self.left_out:
            lines.append("# Left out:")
        for item in self.left_out:
            lines.append(f'#   {item.layout} at "{item.pattern}": {item.class_name} {_comment(item.reason)}.')
        return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    """Any text as part of one comment line."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


@dataclass(frozen=True)
class _Place:
    """A module that a layout was tried on.  Places that agree in everything but the path can share an entry."""

    path: str
    class_name: str
    kernels: tuple[str, ...]
    not_supported: str | None
    facts: str
    reason: str | None

    @property
    def key(self) -> tuple[object, ...]:
        return (self.class_name, self.kernels, self.not_supported, self.facts, self.reason, path_shape(self.path))


def draft_recipe(model: Any, *, name: str | None = None) -> DraftRecipe:
    """Write a recipe for a live model.

    Args:
        model: a stock transformers model with its weights in memory; it runs once on a few random tokens and is
            otherwise left as it is.
        name: the recipe's name; the model type if left out.

    Raises:
        UsageError: (a `ValueError`) the model is patched already, or is no transformers model.
    """
    from kconvert.kernels.layout import is_patched

    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model_type, str) or not model_type:
        raise UsageError(f"{type(model).__name__} has no config with a model_type", fix="pass a transformers model")
    if any(is_patched(module) for module in model.modules()):
        raise UsageError("the model is patched already", fix="draft the recipe from the stock model")
    paths = tuple(path for path, _ in model.named_modules(remove_duplicate=False) if path)
    entries: list[DraftEntry] = []
    left_out: list[LeftOut] = []
    owners: dict[str, LayoutSpec] = {}
    specs = [spec for spec in layout_specs().values() if _can_be_tried(spec)]
    for spec in sorted(specs, key=lambda spec: (not spec.changes_parameters, spec.name)):
        places = [_without_overlap(place, spec, owners) for place in _try_layout(model, spec)]
        owners.update({place.path: spec for place in places if place.reason is None})
        for first, pattern, modules in _grouped(places, paths):
            if first.reason is not None:
                left_out.append(LeftOut(spec.name, first.class_name, pattern, modules, first.reason))
                continue
            found = (spec.name, first.kernels, first.class_name, pattern, modules, first.not_supported)
            entries.append(DraftEntry(*found))
    return DraftRecipe(name or model_type, model_type, type(model).__name__, tuple(entries), tuple(left_out))


def _can_be_tried(spec: LayoutSpec) -> bool:
    """Whether there is something to gain that can be told here: packed parameters, or a kernel with a CPU form."""
    gains = spec.changes_parameters or any(entry.device == "cpu" for entry in spec.kernels)
    return gains and not spec.is_fusion and spec.is_proposed


def _try_layout(model: Any, spec: LayoutSpec) -> Iterator[_Place]:
    """Every module with the structure of the layout, in the order of the model."""
    from kconvert.kernels.assign import load_layout
    from kconvert.kernels.qualify import qualify

    layout = load_layout(spec.name)
    if layout is None:
        return
    for (path,), reason in qualify(model, layout).items():
        module = model.get_submodule(path)
        class_name = type(module).__name__
        if reason is None and not is_expressible(path):
            reason = "has a path that cannot stand in a recipe"
        if reason is not None:
            yield _Place(path, class_name, (), None, "", reason)
            continue
        packed = layout.patch([copy.deepcopy(module)])
        kernels, not_supported = _kernels_for(packed, layout)
        if not_supported is not None and not spec.changes_parameters:
            yield _Place(path, class_name, (), None, "", f"gains nothing: {not_supported}")
            continue
        yield _Place(path, class_name, kernels, not_supported, repr(packed.facts()), None)  # type: ignore[operator]


def _kernels_for(packed: nn.Module, layout: type[Layout]) -> tuple[tuple[str, ...], str | None]:
    """The kernel IDs for a packed module, and why the reference has to run, or None.

    A kernel is told by what its CPU form says of the module; the forms on other devices have the same name behind
    the device.  Those of other projects, whose IDs begin with their name, are for who asks for them.
    """
    from kconvert.kernels.assign import layout_kernels

    known = layout_kernels(layout)
    refusals: dict[str, str | None] = {
        _family(entry): known[entry.kernel_id].supports(packed)
        for entry in layout.spec.kernels
        if entry.device == "cpu" and entry.kernel_id in known
    }
    supported = {family for family, reason in refusals.items() if reason is None}
    if supported:
        return tuple(entry.kernel_id for entry in layout.spec.kernels if _family(entry) in supported), None
    reasons = dict.fromkeys(reason for reason in refusals.values() if reason is not None)
    every = tuple(entry.kernel_id for entry in layout.spec.kernels if entry.kernel_id.startswith(f"{entry.device}_"))
    return every, " and ".join(reasons) or "the layout has no CPU kernel"


def _family(entry: KernelEntry) -> str:
    """A kernel's name without its device: `fused_swiglu`."""
    return entry.kernel_id.removeprefix(f"{entry.device}_")


def _without_overlap(place: _Place, spec: LayoutSpec, owners: Mapping[str, LayoutSpec]) -> _Place:
    """The place, left out where another layout has taken it, a module around it or a part of it."""
    if place.reason is not None:
        return place
    above = [path for path in (place.path, *parents(place.path)) if path in owners]
    taken = [path for path in above if path == place.path or is_taken(place.path, path, owners[path].takes)]
    taken += [path for path in owners if is_taken(path, place.path, spec.takes)]
    if not taken:
        return place
    reason = f"overlaps with {owners[taken[0]].name}"
    return _Place(place.path, place.class_name, (), None, "", reason)


def _grouped(places: Iterable[_Place], paths: Sequence[str]) -> Iterator[tuple[_Place, str, tuple[str, ...]]]:
    """Places that can share an entry, the pattern of the entry, and the paths that it takes."""
    groups: dict[tuple[object, ...], list[_Place]] = {}
    for place in places:
        groups.setdefault(place.key, []).append(place)
    for group in groups.values():
        members = sorted((place.path for place in group), key=natural_key)
        for pattern, taken in cover_paths(members, paths):
            yield group[0], pattern, taken
