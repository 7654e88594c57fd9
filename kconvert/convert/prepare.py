"""Everything up to the first byte: recipe, source, names, plan, structural check, manifest."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kconvert.checkpoint import Checkpoint, Sidecars, list_sidecars, open_checkpoint
from kconvert.convert.mapped_types import check_unmapped
from kconvert.convert.record import build_manifest, computed_warnings, rounding_warnings, source_headers
from kconvert.convert.resolve import ResolvedRecipe, resolve_recipe
from kconvert.errors import CheckpointError, RecipeError
from kconvert.manifest import Manifest
from kconvert.plan import Plan, build_plan
from kconvert.recipe import Recipe, find_recipe, load_recipe, recipes_for

__all__ = ["Prepared", "prepare", "prepare_recipe"]


@dataclass(frozen=True)
class Prepared:
    """A checked conversion that only has to be written."""

    checkpoint: Checkpoint
    recipe: Recipe
    resolved: ResolvedRecipe
    plan: Plan
    sidecars: Sidecars
    manifest: Manifest
    headers: bytes
    warnings: tuple[str, ...]
    check_seconds: float


def prepare(
    recipe_name: str,
    model_dir: Path,
    *,
    model_check: bool = True,
    trust_remote_code: bool = False,
    trust_kernels: Mapping[str, str] | None = None,
) -> Prepared:
    """Read and check everything; writes nothing.

    Args:
        recipe_name: a recipe file, or the name of a shipped recipe.
        model_dir: the source checkpoint.
        model_check: build the model on meta and compare; without it no torch is imported for built-in layouts.
        trust_remote_code: let kernel packages that the recipe trusts run on this machine.
        trust_kernels: package ID to digest: lets just these of them run.

    Raises:
        RecipeError, CheckpointError, TrustError, KernelRefusedError: see the error classes.
    """
    recipe = load_recipe(find_recipe(recipe_name))
    return prepare_recipe(
        recipe,
        model_dir,
        model_check=model_check,
        trust_remote_code=trust_remote_code,
        trust_kernels=trust_kernels,
    )


def prepare_recipe(
    recipe: Recipe,
    model_dir: Path,
    *,
    model_check: bool = True,
    trust_remote_code: bool = False,
    trust_kernels: Mapping[str, str] | None = None,
    resolved: ResolvedRecipe | None = None,
) -> Prepared:
    """`prepare` for a recipe that is loaded; `resolved` where its packages are imported already."""
    started = time.perf_counter()
    checkpoint = open_checkpoint(model_dir)
    warnings = checkpoint.warnings
    if checkpoint.model_type is None or not checkpoint.architectures:
        lacking = "model_type" if checkpoint.model_type is None else "architectures"
        raise CheckpointError(
            f"config.json names no {lacking}",
            where=str(model_dir),
            fix="take config.json from the model's own repository",
        )
    if checkpoint.model_type not in recipe.model_type:
        raise RecipeError(
            f"recipe {recipe.name!r} is for model type {', '.join(recipe.model_type)}, {model_dir} is {checkpoint.model_type}",
            where=recipe.where,
            fix=_other_recipe(checkpoint.model_type),
        )
    resolved = resolved or resolve_recipe(
        recipe,
        trust_remote_code=trust_remote_code,
        trust_kernels=trust_kernels,
        config_of=partial(_config_of, checkpoint),
    )
    if model_check:
        from kconvert.convert.compute import compute
        from kconvert.convert.mapping_scope import check_mapping_scope
        from kconvert.convert.stock import build_stock_model
        from kconvert.convert.structure import LayoutShapes, check_fit, check_packed_model

        stock = build_stock_model(checkpoint)
        warnings += stock.warnings
        plan = build_plan(
            checkpoint,
            resolved.entries,
            tensors=stock.tensors,
            classes=stock.classes,
            check_claims=partial(check_fit, stock, resolved.entries),
            shapes_of=LayoutShapes(stock, checkpoint, recipe, resolved),
            compute=lambda entry, rule, tensors: compute(
                rule, tensors, checkpoint, stock.model, error=RecipeError, where=entry.where
            ),
        )
        check_mapping_scope(resolved, stock.model.state_dict(), stock.classes)
    else:
        check_unmapped(str(checkpoint.model_type), model_dir)
        plan = build_plan(checkpoint, resolved.entries)
    sidecars = list_sidecars(checkpoint)
    warnings += sidecars.warnings + rounding_warnings(plan) + computed_warnings(plan)
    headers = source_headers(checkpoint)
    manifest = build_manifest(checkpoint, recipe, plan, sidecars, headers)
    if model_check:
        manifest = check_packed_model(checkpoint, stock, plan, manifest, resolved)
    return Prepared(
        checkpoint,
        recipe,
        resolved,
        plan,
        sidecars,
        manifest,
        headers,
        warnings,
        time.perf_counter() - started,
    )


def _config_of(checkpoint: Checkpoint) -> Any:
    """The model's config."""
    from kconvert.runtime.modelclass import load_config, model_class

    return load_config(checkpoint.model_dir, model_class(checkpoint.model_dir, checkpoint.config))


def _other_recipe(model_type: str) -> str:
    """The way out of a recipe for another model type."""
    names = recipes_for(model_type)
    drafted = "no shipped recipe is for it: kconvert.convert.draft_recipe(model).to_yaml() drafts one"
    return f"use {' or '.join(names)}" if names else drafted
