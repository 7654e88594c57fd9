"""From a recipe to entries that can be planned: kernel IDs to layouts, packages to code.

Built-in IDs are resolved from specs alone, without torch.  A package is imported here, and only when the recipe says so
and this machine does too; a package that was just downloaded from an owner that is trusted by default needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kconvert.errors import KconvertError, RecipeError, TrustError, UnknownKernelError
from kconvert.kernels.registry import Registry, kernel_entry_points
from kconvert.kernels.specs import kernel_specs
from kconvert.manifest import LayoutRecord, PackageRecord
from kconvert.names import near_misses
from kconvert.plan import Entry, Pair
from kconvert.recipe import KernelRef, Patch, Recipe
from kconvert.transforms import BoundRule, LayoutSpec, MappingRule, Op, bind_mapping, bind_spec

if TYPE_CHECKING:
    from kconvert.kernels.packages import PackageClasses, PackageCopy

__all__ = ["ResolvedPackage", "ResolvedRecipe", "resolve_recipe"]


@dataclass(frozen=True)
class ResolvedPackage:
    """A package that was imported: its private copy, its classes, and the commit of a Hub package.

    `needs_trust` says whether this machine had to be told to trust it.
    """

    copy: PackageCopy
    classes: PackageClasses
    commit: str | None = None
    needs_trust: bool = True


@dataclass(frozen=True)
class ResolvedRecipe:
    """Entries for the planner, and the packages by entry number."""

    entries: tuple[Entry, ...]
    packages: Mapping[int, ResolvedPackage] = field(default_factory=dict)


def resolve_recipe(
    recipe: Recipe,
    *,
    trust_remote_code: bool = False,
    trust_kernels: Mapping[str, str] | None = None,
    config_of: Callable[[], Any] | None = None,
) -> ResolvedRecipe:
    """Resolve every entry.

    Args:
        recipe: the loaded recipe.
        trust_remote_code: whether this machine was told to trust the packages that the recipe trusts.
        trust_kernels: package ID to digest: trusts just these of them.
        config_of: gives the model's config, which some ops of a package's conversion mapping read.

    Raises:
        RecipeError: an unknown ID, kernels of different layouts, or a layout that does not fit the entry; a package, or a
            version of it, that is not there.
        TrustError: a package that the recipe or this machine does not trust.
        KernelRefusedError: a package that cannot be used.
    """
    entries, packages = [], {}
    for number, patch in enumerate(recipe.patches):
        reference = patch.kernels[0]
        if reference.is_package:
            entry, package = _package_entry(
                number, patch, reference, recipe, _Trust(trust_remote_code, trust_kernels or {}), config_of
            )
            packages[number] = package
        else:
            entry = _builtin_entry(number, patch)
        entries.append(entry)
    return ResolvedRecipe(tuple(entries), packages)


def _pairs(patch: Patch) -> tuple[Pair, ...]:
    return tuple(Pair(target.class_name, target.path, target.where) for target in patch.targets)


def _builtin_entry(number: int, patch: Patch) -> Entry:
    specs = {reference.text: _spec_of(reference.text, patch.where) for reference in patch.kernels}
    names = {kernel_id: spec.name for kernel_id, spec in specs.items()}
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{kernel_id} has {name}" for kernel_id, name in names.items())
        raise RecipeError(
            f"kernels of one entry have different layouts: {listed}", where=patch.where, fix="give each its own entry"
        )
    spec = next(iter(specs.values()))
    if len(spec.members) != len(patch.targets):
        wanted = f"fuse: with {len(spec.members)} modules ({', '.join(spec.members)})" if spec.is_fusion else "replace:"
        raise RecipeError(
            f"layout {spec.name!r} takes {len(spec.members)} modules, the entry names {len(patch.targets)}",
            where=patch.where,
            fix=f"use {wanted}",
        )
    _check_dtype(patch, spec.name, joins=any(rule.op is Op.CONCATENATE for rule in spec.rules))
    return Entry(
        number=number,
        where=patch.where,
        kind="fuse" if patch.fuse else "replace",
        pairs=_pairs(patch),
        kernels=tuple(names),
        layout=LayoutRecord(spec.name, spec.version),
        changes_parameters=spec.changes_parameters,
        bind=lambda paths, tensors: bind_spec(spec, paths, tensors),
        takes=spec.takes,
        dtype=patch.dtype,
        optional=patch.optional,
    )


def _check_dtype(patch: Patch, layout: str, *, joins: bool) -> None:
    """Refuse a `dtype` that nothing would be stored in: only what is joined is converted."""
    if patch.dtype is not None and not joins:
        raise RecipeError(
            f"'dtype' beside layout {layout!r}, which joins no tensors", where=patch.where, fix="remove 'dtype'"
        )


def _spec_of(kernel_id: str, where: str) -> LayoutSpec:
    known = kernel_specs()
    if kernel_id in known:
        return known[kernel_id][0]
    names = list(known)
    if kernel_entry_points():
        from kconvert.kernels.base import LayoutKernel

        catalog = Registry.catalog()
        kernel = catalog.get(kernel_id)
        if kernel is not None and not issubclass(kernel, LayoutKernel):
            raise RecipeError(
                f"kernel {kernel_id!r} has no layout",
                where=where,
                fix="use it with kconvert.kernels.apply_kernel on a live model",
            )
        if kernel is not None:
            return kernel.layout.spec
        names = list(catalog)
    near = near_misses(kernel_id, names)
    raise UnknownKernelError(
        f"unknown kernel {kernel_id!r}",
        where=where,
        fix=f"did you mean {' or '.join(near)}?" if near else "`kconvert list-kernels` shows what there is",
    )


@dataclass(frozen=True)
class _Trust:
    """What this machine was told to trust."""

    everything: bool
    digests: Mapping[str, str]


def _package_entry(
    number: int,
    patch: Patch,
    reference: KernelRef,
    recipe: Recipe,
    trust: _Trust,
    config_of: Callable[[], Any] | None,
) -> tuple[Entry, ResolvedPackage]:
    try:
        package = _import(patch, reference, recipe, trust)
    except KconvertError as error:
        raise type(error)(error.what, where=error.where or patch.where, fix=error.fix) from error
    layout = package.classes.layout
    name = f"{reference.class_name}Layout" if layout is not None else str(reference.class_name)
    rules: tuple[MappingRule, ...] = ()
    if layout is not None:
        from kconvert.convert.adapter import rules_from_mapping

        rules = rules_from_mapping(getattr(layout, "conversion_mapping", ()), patch.where, config_of=config_of)
    _check_dtype(patch, name, joins=any(rule.operations for rule in rules))
    record = PackageRecord(reference.text, package.commit, package.copy.digest, str(reference.class_name))
    entry = Entry(
        number=number,
        where=patch.where,
        kind="fuse" if patch.fuse else "replace",
        pairs=_pairs(patch),
        kernels=(reference.text,),
        layout=LayoutRecord(name, 1, record),
        changes_parameters=layout is not None,
        bind=(lambda paths, tensors: bind_mapping(rules, paths, tensors)) if layout is not None else _bind_nothing,
        dtype=patch.dtype,
        optional=patch.optional,
    )
    return entry, package


def _bind_nothing(paths: Sequence[str], tensors: Sequence[str]) -> tuple[BoundRule, ...]:
    """A kernel without a layout: every tensor stays what it is."""
    return tuple(BoundRule.renamed(name, name) for name in tensors)


def _import(patch: Patch, reference: KernelRef, recipe: Recipe, trust: _Trust) -> ResolvedPackage:
    from kconvert.kernels.packages import check_trust, copy_package, import_package

    base = recipe.path.parent if recipe.path is not None else Path()
    commit, is_trusted = None, False
    if reference.kind == "hub":
        from kconvert.kernels.hub import fetch_package, find_lock, is_trusted_owner

        if (base / reference.source).is_dir():
            # asking the Hub for a name that is meant as a folder would bring a stranger's code
            raise RecipeError(
                f"{reference.source!r} is a folder beside the recipe, and without ./ it means a repository of the Hub",
                fix=f"write ./{reference.text}, or move the folder if the repository is meant",
            )
        is_trusted = is_trusted_owner(reference.source)
        _check_recipe_trust(patch, reference, is_trusted=is_trusted)
        lock = find_lock((base, Path()))
        fetched = fetch_package(
            reference.source, reference.text, version=patch.version, revision=patch.revision, lock=lock
        )
        copied, source, commit = fetched.copy, fetched.source, fetched.commit
    else:
        _check_recipe_trust(patch, reference, is_trusted=False)
        source = base / reference.source
        copied = copy_package(source, reference.text)
    check_trust(
        copied,
        source=source,
        trust_remote_code=is_trusted or trust.everything,
        advice="pass --trust-kernel {option} or --trust-remote-code",
        trust_kernels=trust.digests,
        commit=commit,
    )
    classes = import_package(copied, str(reference.class_name), needs_layout=patch.fuse is not None)
    return ResolvedPackage(copied, classes, commit, needs_trust=not is_trusted)


def _check_recipe_trust(patch: Patch, reference: KernelRef, *, is_trusted: bool) -> None:
    if not (is_trusted or patch.trust_remote_code):
        raise TrustError(
            f"kernel package {reference.text!r} runs code, and the recipe does not trust it",
            where=patch.where,
            fix="read the code, then set trust_remote_code: true",
        )
