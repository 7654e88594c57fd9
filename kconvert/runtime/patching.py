"""From a manifest to a model class whose instances are built packed.

The class is a subclass of the stock model class under the same name.  Its `__init__` calls the original and
then patches this instance's submodules by path; the instructions travel in a context variable, so the
class itself holds no state and any other use of it builds a stock model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from kconvert.errors import ManifestError
from kconvert.kernels.assign import load_layout
from kconvert.kernels.bound import layout_problem, version_problem
from kconvert.kernels.layout import Layout
from kconvert.kernels.live import place_layout
from kconvert.kernels.model import ConvertedModel, adopt_model
from kconvert.kernels.package_module import build_package_module
from kconvert.kernels.packages import PackageClasses
from kconvert.kernels.packing import Packing, packings_of_targets
from kconvert.kernels.stateless import stateless_layout
from kconvert.manifest import Manifest, PatchRecord, TensorRecord
from kconvert.runtime.capture import capture_constructors, fit_arguments

__all__ = ["PatchJob", "ResolvedPatch", "packings_of", "patching", "resolve_layout", "resolve_package"]


@dataclass(frozen=True)
class ResolvedPatch:
    """A patch of the manifest with its code at hand: a built-in layout class, or a package's classes.

    A package without a layout has both: its kernel, and the layout that keeps the stock parameters.
    """

    record: PatchRecord
    layout: type[Layout] | None
    package: PackageClasses | None


@dataclass
class PatchJob:
    """What an `__init__` has to do, and what it did: the constructor arguments by layout path."""

    manifest: Manifest
    patches: Sequence[ResolvedPatch]
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]] | None] = field(default_factory=dict)
    members: dict[str, tuple[nn.Module, ...]] = field(default_factory=dict)


_JOB: ContextVar[PatchJob | None] = ContextVar("kconvert_patch_job", default=None)


@contextmanager
def patching(job: PatchJob) -> Iterator[None]:
    """Models of a class made with `PatchedOnInit` that are built inside are patched by `job`."""
    token = _JOB.set(job)
    try:
        yield
    finally:
        _JOB.reset(token)


class PatchedOnInit(ConvertedModel):
    """Mixin whose `__init__` patches the instance when a job is set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        job = _JOB.get()
        if job is None:
            super().__init__(*args, **kwargs)
            self.kconvert_packings = ()
            return
        _JOB.set(None)  # one model per job: a model that builds another one of its class gets a stock one
        names = {patch.record.classes[0] for patch in job.patches if patch.package and patch.record.kind == "replace"}
        with capture_constructors(names) as calls:
            super().__init__(*args, **kwargs)
        model = cast("nn.Module", self)
        packings = packings_of(job.manifest)
        for patch in job.patches:
            for paths in patch.record.modules:
                _modules(model, patch, paths)
        _check_shapes(model, packings)
        for number, patch in enumerate(job.patches):
            for paths in patch.record.modules:
                modules = _modules(model, patch, paths)
                if patch.layout is not None:
                    _check_fit(job.manifest, patch.layout, modules, paths)
                    packed = patch.layout.patch(modules)
                    place_layout(model, paths, packed, patch.record.layout.name)
                    continue
                layout = cast("type[nn.Module]", cast("PackageClasses", patch.package).layout)
                arguments = None
                if patch.record.kind == "replace":
                    arguments = fit_arguments(type(modules[0]), layout, *calls.arguments(modules[0]))
                here = [packing for packing in packings[number] if packing.is_in(paths[0])]
                packed = build_package_module(layout, modules, paths, here, arguments)
                job.arguments[paths[0]], job.members[paths[0]] = arguments, tuple(modules)
                place_layout(model, paths, packed, patch.record.layout.name)
        adopt_model(model, [packing for group in packings.values() for packing in group])


def _check_fit(manifest: Manifest, layout: type[Layout], modules: Sequence[nn.Module], paths: tuple[str, ...]) -> None:
    """The structure, where the conversion could not look at it."""
    reason = None if manifest.model_checked else layout.unfit(modules)
    if reason is not None:
        raise ManifestError(
            f"layout {layout.spec.name!r} does not fit {' and '.join(map(repr, paths))}: {reason}",
            fix="convert again with the model check, and a recipe that fits",
        )


def _check_shapes(model: nn.Module, packings: Mapping[int, Sequence[Packing]]) -> None:
    """The parts of packed tensors have to be tensors of the model, as the model has them."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    for packing in (packing for group in packings.values() for packing in group):
        for name, made in packing.sources.items():
            if name not in shapes:
                raise ManifestError(
                    f"the model has no tensor {name!r}, so what {made.sources[0]!r} holds is not known",
                    fix="convert again, with the model check and this transformers version",
                )
            if shapes[name] != made.shape:
                raise ManifestError(
                    f"{name!r} is {list(shapes[name])} in the model and {list(made.shape)} in the manifest",
                    fix="convert again",
                )


def _modules(model: nn.Module, patch: ResolvedPatch, paths: tuple[str, ...]) -> list[nn.Module]:
    """The modules of a claim in pair order, of the classes that the manifest says."""
    return [_module(model, path, name) for path, name in zip(paths, patch.record.classes, strict=True)]


def _module(model: nn.Module, path: str, class_name: str) -> nn.Module:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise ManifestError(
            f"the model has no module {path!r}", fix="convert again with this transformers version and the model check"
        ) from None
    if type(module).__name__ != class_name:
        raise ManifestError(
            f"{path!r} is a {type(module).__name__}, the manifest says {class_name}",
            fix="convert again with this transformers version",
        )
    return module


def packings_of(manifest: Manifest) -> dict[int, tuple[Packing, ...]]:
    """Patch number to the packings of its target tensors."""
    by_patch: dict[int, list[TensorRecord]] = {number: [] for number in range(len(manifest.patches))}
    for record in manifest.tensors:
        if record.patch is not None and record.exact:
            by_patch[record.patch].append(record)
    found: dict[int, tuple[Packing, ...]] = {}
    for number, records in by_patch.items():
        shapes = {part.source: part.shape for record in records for part in record.parts}
        try:
            found[number] = packings_of_targets({record.target: record.arrangement() for record in records}, shapes)
        except ValueError as error:
            raise ManifestError(
                f"patch {number} of the manifest cannot be undone: {error}", fix="convert again"
            ) from None
    return found


def resolve_package(record: PatchRecord, classes: PackageClasses) -> ResolvedPatch:
    """A patch with the classes of its package."""
    layout = stateless_layout(classes.kernel) if classes.layout is None else None
    return ResolvedPatch(record, layout, classes)


def resolve_layout(record: PatchRecord, packings: Sequence[Packing]) -> type[Layout]:
    """The class of a built-in layout; checks that the manifest's tensors are what its rules say, in that order.

    Raises:
        ManifestError: no such layout, another version, or other parts or part order.
    """
    name = record.layout.name
    layout = load_layout(name)
    if layout is None:
        raise ManifestError(
            f"the manifest names layout {name!r}, which is not installed", fix="install the package that has it"
        )
    problem = version_problem(layout.spec, name, record.layout.version)
    for paths in record.modules if problem is None else ():
        inside = [packing for packing in packings if packing.is_in(paths[0])]
        shapes = {source: made.shape for packing in inside for source, made in packing.sources.items()}
        found = {target: made for packing in inside for target, made in packing.targets.items()}
        problem = problem or layout_problem(layout.spec, paths, found, shapes)
    if problem is not None:
        raise ManifestError(problem, fix="convert again")
    return layout
