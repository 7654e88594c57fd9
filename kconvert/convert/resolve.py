"""From a recipe to entries that can be planned: kernel IDs to layouts, package folders to code.

Built-in IDs are resolved from specs alone, without torch.  A package is imported here, and only when the
recipe says so and this machine does too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kconvert.errors import KconvertError, KernelRefusedError, RecipeError, TrustError, UnknownKernelError
from kconvert.kernels.registry import Registry, kernel_entry_points
from kconvert.kernels.specs import kernel_specs
from kconvert.manifest import LayoutRecord, PackageRecord
from kconvert.names import near_misses
from kconvert.plan import Entry, Pair
from kconvert.recipe import KernelRef, Patch, Recipe
from kconvert.transforms import LayoutSpec, MappingRule, Op, bind_mapping, bind_spec

if TYPE_CHECKING:
    from kconvert.kernels.packages import PackageClasses, PackageCopy

__all__ = ["ResolvedPackage", "ResolvedRecipe", "resolve_recipe"]


@dataclass(frozen=True)
class ResolvedPackage:
    """A package that was imported: its private copy and its classes."""

    copy: PackageCopy
    classes: PackageClasses


@dataclass(frozen=True)
class ResolvedRecipe:
    """Entries for the planner, and the packages by entry number."""

    entries: tuple[Entry, ...]
    packages: Mapping[int, ResolvedPackage] = field(default_factory=dict)


def resolve_recipe(recipe: Recipe, *, trust_remote_code: bool = False) -> ResolvedRecipe:
    """Resolve every entry.

    Args:
        recipe: the loaded recipe.
        trust_remote_code: whether this machine was told to trust the packages that the recipe trusts.

    Raises:
        RecipeError: an unknown ID, kernels of different layouts, or a layout that does not fit the entry.
        TrustError: a package that the recipe or this machine does not trust.
        KernelRefusedError: a package that cannot be used.
    """
    entries, packages = [], {}
    for number, patch in enumerate(recipe.patches):
        reference = patch.kernels[0]
        if reference.is_package:
            entry, package = _package_entry(number, patch, reference, recipe, trust_remote_code)
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
    _check_dtype(patch, spec.name, [rule.op for rule in spec.rules])
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
    )


def _check_dtype(patch: Patch, layout: str, ops: Iterable[Op]) -> None:
    """Refuse a `dtype` that nothing would be stored in: only what is joined is converted."""
    if patch.dtype is not None and all(op is Op.RENAME for op in ops):
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


def _package_entry(
    number: int, patch: Patch, reference: KernelRef, recipe: Recipe, trust_remote_code: bool
) -> tuple[Entry, ResolvedPackage]:
    if reference.kind == "hub":
        raise KernelRefusedError(
            f"kernel package {reference.text!r} is on the Hub, which this version cannot fetch from",
            where=patch.where,
            fix="download it and name its folder, ./folder:ClassName",
        )
    if not patch.trust_remote_code:
        raise TrustError(
            f"kernel package {reference.text!r} runs code, and the recipe does not trust it",
            where=patch.where,
            fix="read the code, then set trust_remote_code: true",
        )
    package, rules = _import(patch, reference, recipe, trust_remote_code)
    _check_dtype(patch, f"{reference.class_name}Layout", [rule.op for rule in rules])
    record = PackageRecord(reference.text, None, package.copy.digest, str(reference.class_name))
    entry = Entry(
        number=number,
        where=patch.where,
        kind="fuse" if patch.fuse else "replace",
        pairs=_pairs(patch),
        kernels=(reference.text,),
        layout=LayoutRecord(f"{reference.class_name}Layout", 1, record),
        changes_parameters=True,
        bind=lambda paths, tensors: bind_mapping(rules, paths, tensors),
        dtype=patch.dtype,
    )
    return entry, package


def _import(
    patch: Patch, reference: KernelRef, recipe: Recipe, trust_remote_code: bool
) -> tuple[ResolvedPackage, tuple[MappingRule, ...]]:
    from kconvert.convert.adapter import rules_from_mapping
    from kconvert.kernels.packages import check_trust, copy_package, import_package

    base = recipe.path.parent if recipe.path is not None else Path()
    try:
        copied = copy_package(base / reference.source, reference.text)
        check_trust(copied, trust_remote_code=trust_remote_code, advice="pass --trust-remote-code")
        classes = import_package(copied, str(reference.class_name))
    except KconvertError as error:
        raise type(error)(error.what, where=error.where or patch.where, fix=error.fix) from error
    rules = rules_from_mapping(getattr(classes.layout, "conversion_mapping", ()), patch.where)
    return ResolvedPackage(copied, classes), rules
