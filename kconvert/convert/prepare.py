"""Everything up to the first byte: recipe, source, names, plan, structural check, manifest."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from kconvert.checkpoint import Checkpoint, FileStamp, Sidecars, list_sidecars, open_checkpoint
from kconvert.convert.mapped_types import check_unmapped
from kconvert.convert.record import (
    build_manifest,
    computed_warnings,
    rounding_warnings,
    sidecar_digests,
    source_headers,
)
from kconvert.convert.resolve import ResolvedRecipe, resolve_recipe
from kconvert.errors import CheckpointError, RecipeError
from kconvert.manifest import Manifest
from kconvert.plan import Plan, build_plan
from kconvert.recipe import Profile, Recipe, find_recipe, load_recipe, profile_of, recipes_for

__all__ = ["Opened", "Prepared", "check", "open_source", "plan_of_files", "prepare"]


@dataclass(frozen=True)
class Opened:
    """A recipe and a source that belong together, before anything is planned.

    `sidecar_stamps` are those with which the sidecars had the digests in `sidecar_digests`.
    """

    checkpoint: Checkpoint
    profile: Profile
    resolved: ResolvedRecipe
    sidecars: Sidecars
    sidecar_digests: Mapping[str, str]
    sidecar_stamps: Mapping[Path, FileStamp]
    headers: bytes

    @property
    def recipe(self) -> Recipe:
        """The recipe, with the entries that are used."""
        return self.profile.recipe


@dataclass(frozen=True)
class Prepared:
    """A checked conversion that only has to be written; `checked` is its manifest where the model was looked at."""

    opened: Opened
    plan: Plan
    checked: Manifest | None
    warnings: tuple[str, ...]
    check_seconds: float

    @cached_property
    def manifest(self) -> Manifest:
        """What will stand beside the output."""
        return self.manifest_of(range(len(self.plan.steps)))

    def manifest_of(self, steps: Iterable[int]) -> Manifest:
        """The manifest with the tensors of some of the plan's steps alone, which are given by their numbers."""
        if self.checked is not None:
            return replace(self.checked, tensors=tuple(self.checked.tensors[number] for number in steps))
        return _manifest(self.opened, replace(self.plan, steps=tuple(self.plan.steps[number] for number in steps)))

    @property
    def checkpoint(self) -> Checkpoint:
        """The source."""
        return self.opened.checkpoint

    @property
    def recipe(self) -> Recipe:
        """The recipe, with the entries that are used."""
        return self.opened.recipe

    @property
    def resolved(self) -> ResolvedRecipe:
        """The recipe's entries and packages."""
        return self.opened.resolved

    @property
    def sidecars(self) -> Sidecars:
        """What is copied beside the weights, and what is not."""
        return self.opened.sidecars

    @property
    def headers(self) -> bytes:
        """The source's headers, as they are kept for `revert`."""
        return self.opened.headers


def prepare(
    recipe_name: str,
    model_dir: Path,
    *,
    device: str | None = None,
    model_check: bool = True,
    max_shard_bytes: int | None = None,
    trust_remote_code: bool = False,
    trust_kernels: Mapping[str, str] | None = None,
) -> Prepared:
    """Read and check everything; writes nothing.

    Args:
        recipe_name: a recipe file, or the name of a shipped recipe.
        model_dir: the source checkpoint.
        device: use the entries that are for this device too: `cpu`, `cuda` or `npu`.
        model_check: build the model on meta and compare; without it no torch is imported for built-in layouts.
        max_shard_bytes: how many bytes of tensors an output file holds at most; the source's sharding if left out.
        trust_remote_code: let kernel packages that the recipe trusts run on this machine.
        trust_kernels: package ID to digest: lets just these of them run.

    Raises:
        UsageError, RecipeError, CheckpointError, TrustError, KernelRefusedError: see the error classes.
    """
    profile = profile_of(load_recipe(find_recipe(recipe_name)), device)
    opened = open_source(profile, model_dir, trust_remote_code=trust_remote_code, trust_kernels=trust_kernels)
    return check(opened, model_check=model_check, max_shard_bytes=max_shard_bytes)


def open_source(
    profile: Profile,
    model_dir: Path,
    *,
    trust_remote_code: bool = False,
    trust_kernels: Mapping[str, str] | None = None,
    resolved: ResolvedRecipe | None = None,
) -> Opened:
    """Read the headers, resolve the profile's recipe, list the sidecars; `resolved` where its packages are imported already.

    Raises:
        RecipeError: the recipe is malformed, or not for this model.
        CheckpointError: the source is damaged.
        TrustError, KernelRefusedError: a package may not, or cannot, run.
    """
    recipe = profile.recipe
    try:
        checkpoint = open_checkpoint(model_dir)
    except OSError as error:  # of a disk, while files are looked at
        raise CheckpointError(
            f"cannot be read: {error.strerror or error}", where=str(error.filename or model_dir)
        ) from error
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
    sidecars = list_sidecars(checkpoint)
    digests, stamps = sidecar_digests(checkpoint, sidecars)
    return Opened(checkpoint, profile, resolved, sidecars, digests, stamps, source_headers(checkpoint))


def check(opened: Opened, *, model_check: bool = True, max_shard_bytes: int | None = None) -> Prepared:
    """Plan the conversion and check it; see `prepare`."""
    started = time.perf_counter()
    checkpoint, resolved = opened.checkpoint, opened.resolved
    warnings = checkpoint.warnings
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
            shapes_of=LayoutShapes(stock, checkpoint, opened.profile, resolved),
            compute=lambda entry, rule, tensors: compute(
                rule, tensors, checkpoint, stock.model, error=RecipeError, where=entry.where
            ),
            max_shard_bytes=max_shard_bytes,
        )
        check_mapping_scope(resolved, stock.model.state_dict(), stock.classes)
    else:
        plan = plan_of_files(opened, max_shard_bytes=max_shard_bytes)
    warnings += opened.sidecars.warnings + rounding_warnings(plan) + computed_warnings(plan)
    checked = check_packed_model(checkpoint, stock, plan, _manifest(opened, plan), resolved) if model_check else None
    return Prepared(opened, plan, checked, warnings, time.perf_counter() - started)


def _manifest(opened: Opened, plan: Plan) -> Manifest:
    """The manifest before the model is looked at."""
    return build_manifest(
        opened.checkpoint, opened.profile, plan, opened.sidecars, opened.sidecar_digests, opened.headers
    )


def plan_of_files(opened: Opened, *, max_shard_bytes: int | None = None) -> Plan:
    """The plan without the model: the names in the files are taken for those in the model.

    Raises:
        CheckpointError: transformers gives tensors of this model type other names, or the tensors do not fit.
        RecipeError: the recipe does not fit.
    """
    check_unmapped(str(opened.checkpoint.model_type), opened.checkpoint.model_dir)
    return build_plan(opened.checkpoint, opened.resolved.entries, max_shard_bytes=max_shard_bytes)


def _config_of(checkpoint: Checkpoint) -> Any:
    """The model's config."""
    from kconvert.runtime.modelclass import load_config, model_class

    return load_config(checkpoint.model_dir, model_class(checkpoint.model_dir, checkpoint.config))


def _other_recipe(model_type: str) -> str:
    """The way out of a recipe for another model type."""
    names = recipes_for(model_type)
    drafted = "no shipped recipe is for it: kconvert.convert.draft_recipe(model).to_yaml() drafts one"
    return f"use {' or '.join(names)}" if names else drafted
