"""The structural check: the model, built on meta, against the plan.  Before a byte is written.

It translates file names into module names through transformers' own mapping, gives the class of every
module, and then builds the packed model with the code that loading uses: its names and shapes have to be
what will be written.  Fusions are proven by watching one forward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from kconvert.checkpoint import Checkpoint
from kconvert.convert.resolve import ResolvedRecipe
from kconvert.errors import CheckpointError, RecipeError, TrustError
from kconvert.kernels.assign import load_layout
from kconvert.kernels.dataflow import check_chains
from kconvert.kernels.model import converted_class
from kconvert.manifest import Manifest
from kconvert.plan import Claim, Entry, Plan
from kconvert.runtime.modelclass import build_meta_model, load_config, model_class
from kconvert.runtime.patching import PatchedOnInit, PatchJob, ResolvedPatch, packings_of, patching, resolve_layout

__all__ = ["StockModel", "build_stock_model", "check_fit", "check_packed_model"]


@dataclass(frozen=True)
class StockModel:
    """The stock model on meta, with what the planner needs of it."""

    model: Any
    config: Any
    classes: Mapping[str, str]
    module_names: Mapping[str, str]
    warnings: tuple[str, ...]


def build_stock_model(checkpoint: Checkpoint) -> StockModel:
    """Build the model of `config.json` on meta and translate the checkpoint's names.

    Raises:
        CheckpointError: no such class, or tensors that transformers would join or split while loading.
        TrustError: the class is defined by code in the directory, which is never run here.
    """
    directory = checkpoint.model_dir
    try:
        cls = model_class(directory, checkpoint.config)
    except TrustError as error:
        raise TrustError(
            error.what,
            where=error.where,
            fix="it is never run here: convert with --no-model-check, names are checked at load",
        ) from error
    try:
        config = load_config(directory, cls, checkpoint.config)
        model = build_meta_model(cls, config)
    except Exception as error:  # whatever a model's or config's own __init__ raises, huggingface_hub's strict types too
        if hasattr(error, "exit_code"):
            raise
        raise CheckpointError(
            f"the model cannot be built from config.json ({type(error).__name__}: {error})",
            where=str(directory),
            fix="check config.json, or skip the check with --no-model-check",
        ) from error
    classes = {path: type(module).__name__ for path, module in model.named_modules() if path}
    names = _module_names(checkpoint, model)
    return StockModel(model, config, classes, names, _tie_warnings(model, set(names.values())))


def _tie_warnings(model: Any, stored: set[str]) -> tuple[str, ...]:
    """Of tensors that the config ties and the checkpoint stores both of; transformers keeps them if they differ."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    return tuple(
        f"{target} is tied to {source} by the config, but both are stored; both are kept"
        for target, source in sorted(ties.items())
        if target in stored and source in stored
    )


def _module_names(checkpoint: Checkpoint, model: Any) -> dict[str, str]:
    """File name to module name, by the rules and in the order of transformers' loader."""
    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    state = model.state_dict()
    prefix = model.base_model_prefix
    names = {}
    for name in checkpoint.tensors:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        if pattern is not None and renamed in state and renamed != name:
            raise CheckpointError(
                f"transformers joins or splits {name!r} into {renamed!r} while loading, which cannot be written yet",
                where=str(checkpoint.model_dir),
                fix="load the model with transformers and save it with save_original_format=False, then convert that",
            )
        names[name] = renamed
    return names


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
    """What goes into the layouts has to have the shapes of the stock parameters, each part for itself."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for step in plan.steps:
        for part in step.parts if step.entry is not None else ():
            found = step.shape and (*step.shape[: step.axis], part.rows, *step.shape[step.axis + 1 :])
            if shapes.get(part.source, found) != found:
                raise CheckpointError(
                    f"{part.source!r} is {list(found)} in the checkpoint and {list(shapes[part.source])} in the model",
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
        layout = None if package is not None else resolve_layout(record, packings[number])
        patches.append(ResolvedPatch(record, layout, package.classes if package is not None else None))
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
        if ties.get(name) not in steps and not any(pattern.search(name) for pattern in ignored)
    ]
    if missing:
        raise CheckpointError(
            f"the model needs {sorted(missing)[0]!r}, which the checkpoint does not give ({len(missing)} missing)",
            where=where,
            fix="the checkpoint is not whole, or config.json is of another model; if a kernel package is used, "
            "its conversion_mapping has to fill every parameter",
        )
    for name in sorted(state.keys() & steps.keys()):
        if tuple(state[name].shape) != steps[name].shape:
            raise CheckpointError(
                f"{name!r} is {list(steps[name].shape)} in the checkpoint and {list(state[name].shape)} in the model",
                where=where,
                fix="check config.json",
            )
    carried = tuple(sorted(steps.keys() - state.keys()))
    stray = [name for name in carried if steps[name].entry is not None]
    if stray:
        step = steps[stray[0]]
        raise CheckpointError(
            f"the layout at {plan.entries[step.entry or 0].where} has no parameter for {stray[0]!r} (from {step.parts[0].source!r})",
            where=where,
            fix="a kernel package's conversion_mapping has to lead to its layout's parameters",
        )
    return carried


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
