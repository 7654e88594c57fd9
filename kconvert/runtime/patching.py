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

from kconvert.errors import CheckpointError, ManifestError
from kconvert.kernels.assign import load_layout
from kconvert.kernels.layout import Layout
from kconvert.kernels.live import place_layout
from kconvert.kernels.model import ConvertedModel, adopt_model
from kconvert.kernels.package_module import build_package_module
from kconvert.kernels.packages import PackageClasses
from kconvert.kernels.packing import Packing
from kconvert.manifest import Manifest, PatchRecord
from kconvert.runtime.capture import capture_constructors
from kconvert.transforms import bind_spec

__all__ = ["PatchJob", "ResolvedPatch", "packings_of", "patching", "resolve_layout"]


@dataclass(frozen=True)
class ResolvedPatch:
    """A patch of the manifest with its code at hand: a built-in layout class, or a package's classes."""

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
        by_target = packings_of(job.manifest)
        for patch in job.patches:
            for paths in patch.record.modules:
                _modules(model, patch, paths)
        _check_rows(model, by_target)
        for number, patch in enumerate(job.patches):
            for paths in patch.record.modules:
                modules = _modules(model, patch, paths)
                packings = [by_target[number][name] for name in by_target[number] if name.startswith(f"{paths[0]}.")]
                if patch.layout is not None:
                    _check_fit(job.manifest, patch.layout, modules, paths)
                    packed = patch.layout.patch(modules)
                    place_layout(model, paths, packed, patch.record.layout.name)
                    continue
                package = cast("PackageClasses", patch.package)
                arguments = calls.arguments(modules[0]) if patch.record.kind == "replace" else None
                packed = build_package_module(package.layout, modules, paths, packings, arguments)
                job.arguments[paths[0]], job.members[paths[0]] = arguments, tuple(modules)
                place_layout(model, paths, packed, patch.record.layout.name)
        adopt_model(model, [packing for group in by_target.values() for packing in group.values()])


def _check_fit(manifest: Manifest, layout: type[Layout], modules: Sequence[nn.Module], paths: tuple[str, ...]) -> None:
    """The structure, where the conversion could not look at it."""
    reason = None if manifest.model_checked else layout.unfit(modules)
    if reason is not None:
        raise ManifestError(
            f"layout {layout.spec.name!r} does not fit {' and '.join(map(repr, paths))}: {reason}",
            fix="convert again with the model check, and a recipe that fits",
        )


def _check_rows(model: nn.Module, by_target: Mapping[int, Mapping[str, Packing]]) -> None:
    """The parts of a packed tensor have to be parameters of the model, as large as it has them."""
    sizes = {name: tensor.shape for name, tensor in model.state_dict(keep_vars=True).items()}
    for packing in (packing for group in by_target.values() for packing in group.values()):
        for name, rows in packing.parts:
            if name not in sizes:
                raise ManifestError(
                    f"the model has no tensor {name!r}, so what {packing.target!r} holds is not known",
                    fix="convert again, with the model check and this transformers version",
                )
            shape = sizes[name]
            found = shape[packing.axis] if packing.axis < len(shape) else 1
            if found != rows:
                raise ManifestError(
                    f"{name!r} has {found} rows in the model and {rows} in the manifest",
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


def packings_of(manifest: Manifest) -> dict[int, dict[str, Packing]]:
    """Patch number to its target tensors."""
    found: dict[int, dict[str, Packing]] = {number: {} for number in range(len(manifest.patches))}
    for record in manifest.tensors:
        if record.patch is not None:
            parts = tuple((part.source, part.rows) for part in record.parts)
            found[record.patch][record.target] = Packing(record.target, record.axis, parts)
    return found


def resolve_layout(record: PatchRecord, tensors: Mapping[str, Packing]) -> type[Layout]:
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
    spec = layout.spec
    if spec.version != record.layout.version:
        raise ManifestError(
            f"layout {name!r} was written in version {record.layout.version}, this kconvert has {spec.version}",
            fix="convert again",
        )
    for paths in record.modules:
        inside = {target: packing for target, packing in tensors.items() if target.startswith(f"{paths[0]}.")}
        sources = [source for packing in inside.values() for source, _ in packing.parts]
        try:
            bound = bind_spec(spec, paths, sources)
        except CheckpointError as error:
            raise ManifestError(f"the manifest is not whole: {error.what}", fix="convert again") from None
        expected = {rule.target: (rule.axis, rule.sources) for rule in bound}
        found = {
            target: (packing.axis, tuple(source for source, _ in packing.parts)) for target, packing in inside.items()
        }
        if expected != found:
            raise ManifestError(
                f"the parts of {paths[0]!r} in the manifest are not those of layout {name!r}: {found} instead of {expected}",
                fix="convert again",
            )
    return layout
