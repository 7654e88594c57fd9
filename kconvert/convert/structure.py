"""The structural check: the plan against the model, on meta, before a byte is written.

The packed model is built with the code that loading uses: its names and shapes have to be what will be
written.  Layouts have to fit the modules they are put on, fusions are proven by watching one forward, and a
tensor must not move into or out of what the model keeps in float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from kconvert.checkpoint import Checkpoint, Sidecars
from kconvert.convert.bake import check_stable_names
from kconvert.convert.record import build_manifest
from kconvert.convert.resolve import ResolvedRecipe
from kconvert.convert.stock import StockModel
from kconvert.errors import CheckpointError, RecipeError
from kconvert.kernels.assign import load_layout
from kconvert.kernels.dataflow import check_chains
from kconvert.kernels.model import converted_class
from kconvert.manifest import Manifest
from kconvert.plan import Claim, Entry, Plan
from kconvert.recipe import Profile
from kconvert.runtime.modelclass import build_meta_model
from kconvert.runtime.patching import (
    PatchedOnInit,
    PatchJob,
    ResolvedPatch,
    packings_of,
    patching,
    resolve_layout,
    resolve_package,
)

__all__ = ["check_fit", "check_packed_model"]


def check_fit(stock: StockModel, entries: Sequence[Entry], claims: Sequence[Claim]) -> None:
    """Refuse modules whose structure is not what the entry's built-in layout packs.

    Raises:
        RecipeError: naming the module and what is wrong with it.
    """
    for claim in claims:
        entry = entries[claim.entry]
        layout = None if entry.layout.package is not None else load_layout(entry.layout.name)
        reason = None if layout is None else layout.unfit([stock.model.get_submodule(path) for path in claim.paths])
        if reason is not None:
            raise RecipeError(
                f"layout {entry.layout.name!r} does not fit {' and '.join(map(repr, claim.paths))}: {reason}",
                where=entry.where,
                fix="use a kernel for this kind of module, or narrow the path",
            )


@dataclass(frozen=True)
class LayoutShapes:
    """The shapes of the packed model's tensors, for conversion mappings that ask: it is built when the first one does."""

    stock: StockModel
    checkpoint: Checkpoint
    profile: Profile
    resolved: ResolvedRecipe

    def __call__(self, claims: Sequence[Claim]) -> Callable[[str], tuple[int, ...] | None]:
        """The shape of a tensor of the model in which the modules of `claims` are patched, by full name, or None."""

        @cache
        def shapes() -> dict[str, tuple[int, ...]]:
            taken = tuple(claim for claim in claims if claim.entry in self.resolved.packages)
            bare = Plan("", "", self.resolved.entries, taken, (), (), ())
            manifest = build_manifest(self.checkpoint, self.profile, bare, Sidecars((), (), ()), {}, b"")
            packed, _ = _build_packed(self.stock, manifest, self.resolved)
            return {name: tuple(tensor.shape) for name, tensor in packed.state_dict().items()}

        return lambda name: shapes().get(name)


def check_packed_model(
    checkpoint: Checkpoint, stock: StockModel, plan: Plan, manifest: Manifest, resolved: ResolvedRecipe
) -> Manifest:
    """Check the packed model against the plan; returns the manifest with what was learned.

    Raises:
        CheckpointError: a parameter is missing or of another shape than the model's.
        RecipeError: a fusion that is not one, or that transformers would store in another dtype.
    """
    _check_fusions(stock, plan)
    _check_float32_lists(stock.model, plan)
    _check_source_shapes(checkpoint, stock.model, plan)
    packed, patches = _build_packed(stock, manifest, resolved)
    _check_initialisation(stock, packed, resolved)
    records = tuple(
        replace(patch.record, facts=_facts(packed, patch, entry.where))
        for patch, entry in zip(patches, plan.entries, strict=True)
    )
    manifest = _with_views(manifest, packed, patches)
    if checkpoint.quantization is not None:
        # the quantiser changes modules and names while loading, so only the layouts can be checked here
        return replace(manifest, patches=records)
    return replace(manifest, patches=records, carried=_compare(checkpoint, packed, plan), model_checked=True)


def _check_fusions(stock: StockModel, plan: Plan) -> None:
    fusions = [claim for claim in plan.claims if len(claim.paths) > 1]
    if not fusions:
        return
    for claim, reason in zip(fusions, check_chains(stock.model, [claim.paths for claim in fusions]), strict=True):
        if reason is not None:
            raise RecipeError(
                f"{' and '.join(map(repr, claim.paths))} cannot be fused: {reason}",
                where=plan.entries[claim.entry].where,
                fix="patch the modules one by one with replace:",
            )


def _check_source_shapes(checkpoint: Checkpoint, model: Any, plan: Plan) -> None:
    """What goes into the layouts has to be stock parameters with their shapes, each part for itself.

    A tensor that the model does not have, such as a packed one where the class has gate and up apart, may hold its
    parts in any order.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for step in plan.steps:
        for part in step.parts if step.entry is not None else ():
            if part.source not in shapes:
                raise CheckpointError(
                    f"{part.source!r} is no tensor of the model, so what is in it is not known",
                    where=str(checkpoint.model_dir),
                    fix=f"store the tensors that {plan.architecture} has, or leave these layers out of the path",
                )
            if shapes[part.source] != part.shape:
                raise CheckpointError(
                    f"{part.source!r} is {list(part.shape)} in the checkpoint and {list(shapes[part.source])} in the model",
                    where=str(checkpoint.model_dir),
                    fix="check config.json",
                )


def _check_float32_lists(model: Any, plan: Plan) -> None:
    """Refuse a tensor that moves into or out of a path that the model keeps in float32 by name."""
    patterns = [
        pattern
        for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for pattern in getattr(model, name, None) or ()
    ]
    if not patterns:
        return
    kept = re.compile("|".join(rf"(?:^|\.){pattern}(?:\.|$)" for pattern in patterns))
    for step in plan.steps:
        if step.entry is None:
            continue
        for part in step.parts:
            if bool(kept.search(part.source)) != bool(kept.search(step.target)):
                raise RecipeError(
                    f"the model keeps one of {part.source!r} and {step.target!r} in float32 by its path, and not the other",
                    where=plan.entries[step.entry].where,
                    fix="patch the modules one by one with replace:",
                )


def _build_packed(
    stock: StockModel, manifest: Manifest, resolved: ResolvedRecipe
) -> tuple[Any, tuple[ResolvedPatch, ...]]:
    packings = packings_of(manifest)
    patches = []
    for number, record in enumerate(manifest.patches):
        package = resolved.packages.get(number)
        if package is None:
            patches.append(ResolvedPatch(record, resolve_layout(record, packings[number]), None))
        else:
            patches.append(resolve_package(record, package.classes))
    cls = converted_class(PatchedOnInit, type(stock.model))
    try:
        with patching(PatchJob(manifest, patches)):
            return build_meta_model(cls, stock.config), tuple(patches)
    except Exception as error:
        if hasattr(error, "exit_code"):
            raise
        raise RecipeError(
            f"the packed model cannot be built ({type(error).__name__}: {error})",
            where=resolved.entries[0].where,
            fix="check that the layout's __init__ takes what the replaced class takes, or the fused modules in order",
        ) from error


def _initialise(model: Any) -> Exception | None:
    try:
        with torch.device("meta"), torch.no_grad():
            model.initialize_weights()
    except Exception as error:  # noqa: BLE001 - any failure of the model's own code is the answer
        return error
    return None


def _check_initialisation(stock: StockModel, packed: Any, resolved: ResolvedRecipe) -> None:
    """Loading runs the model's `_init_weights` over every module; it may read a name that a layout took away."""
    error = _initialise(packed)
    if error is not None and _initialise(stock.model) is None:
        raise RecipeError(
            f"the model's own initialisation fails on the packed modules ({type(error).__name__}: {error})",
            where=resolved.entries[0].where,
            fix=f"the layout has to offer what {type(stock.model).__name__}._init_weights reads",
        ) from error


def _compare(checkpoint: Checkpoint, packed: Any, plan: Plan) -> tuple[str, ...]:
    where = str(checkpoint.model_dir)
    state: dict[str, torch.Tensor] = packed.state_dict()
    steps = plan.by_target()
    ties = getattr(packed, "all_tied_weights_keys", None) or {}
    ignored = [re.compile(pattern) for pattern in packed._keys_to_ignore_on_load_missing or ()]
    missing = [
        name
        for name in state.keys() - steps.keys()
        if not _is_tied_to(steps, name, ties) and not any(pattern.search(name) for pattern in ignored)
    ]
    if missing:
        first = min(missing)
        package = _package_entry(plan, first)
        if package is not None:
            raise CheckpointError(
                f"no rule of the package's conversion_mapping makes {first!r}, a parameter of its layout",
                where=package.where,
                fix="check the rules' patterns and targets, and the parameters that the layout's __init__ makes",
            )
        raise CheckpointError(
            f"the model needs {first!r}, which the checkpoint does not give ({len(missing)} missing)",
            where=where,
            fix="the checkpoint is not whole, or config.json is of another model",
        )
    for name in sorted(state.keys() & steps.keys()):
        if tuple(state[name].shape) != steps[name].shape:
            package = _package_entry(plan, name)
            if package is not None:
                raise CheckpointError(
                    f"the package's conversion_mapping makes {name!r} {list(steps[name].shape)}, "
                    f"and its layout has {list(state[name].shape)}",
                    where=package.where,
                    fix="make the mapping's ops and the layout's __init__ agree",
                )
            raise CheckpointError(
                f"{name!r} is {list(steps[name].shape)} in the checkpoint and {list(state[name].shape)} in the model",
                where=where,
                fix="check config.json",
            )
    check_stable_names(packed, steps, where)
    carried = tuple(sorted(steps.keys() - state.keys()))
    stray = [name for name in carried if steps[name].entry is not None]
    if stray:
        step = steps[stray[0]]
        entry = plan.entries[step.entry or 0]
        raise CheckpointError(
            f"the layout at {entry.where} has no parameter for {stray[0]!r} (from {step.parts[0].source!r})",
            where=where,
            fix="leave these layers out of the path, or check config.json"
            if entry.layout.package is None
            else "a kernel package's conversion_mapping has to lead to its layout's parameters",
        )
    return carried


def _package_entry(plan: Plan, name: str) -> Entry | None:
    """The entry of a kernel package in whose module the tensor `name` of the packed model is."""
    for claim in plan.claims:
        entry = plan.entries[claim.entry]
        if entry.layout.package is not None and name.startswith(f"{claim.paths[0]}."):
            return entry
    return None


def _is_tied_to(stored: Collection[str], name: str, ties: Mapping[str, str]) -> bool:
    """Whether another tensor of the group that `name` is tied in is stored: transformers fills the group from any."""
    source = ties.get(name, name)
    return source in stored or any(other in stored for other, tied_to in ties.items() if tied_to == source)


def _with_views(manifest: Manifest, packed: Any, patches: Sequence[ResolvedPatch]) -> Manifest:
    """The manifest, which the layouts gave every device that may need a view, with those that do."""
    first = (
        packed.get_submodule(patch.record.modules[0][0]) for patch in patches if patch.layout and patch.record.modules
    )
    found = {name for module in first for name in module.kconvert_views()}
    return replace(manifest, view_devices=tuple(name for name in manifest.view_devices if name in found))


def _facts(packed: Any, patch: ResolvedPatch, where: str) -> dict[str, dict[str, Any]] | None:
    """What is proven of the patch's classes, if its layout has anything to prove."""
    if patch.layout is None:
        return None
    facts: dict[str, dict[str, Any]] = {}
    for paths in patch.record.modules:
        found = packed.get_submodule(paths[0]).facts()
        if found:
            known = facts.setdefault(patch.record.classes[0], found)
            if known != found:
                raise RecipeError(
                    f"{patch.record.classes[0]} computes {known} in one place and {found} at {paths[0]!r}",
                    where=where,
                    fix="give the two kinds entries of their own",
                )
    return facts or None
