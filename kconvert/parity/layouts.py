"""Whether a manifest says of its tensors what the built-in layouts say: a manifest that was edited by hand may not.

What goes through keeps its name and its elements; what a patch holds is what the rules of its layout make of the tensors of
the patched modules, part by part and in their order.  What the mapping of transformers or of a kernel package has joined
is taken from the manifest: without running their code nothing says otherwise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from kconvert.kernels.bound import layout_problem, version_problem
from kconvert.kernels.specs import kernel_specs, layout_specs
from kconvert.manifest import Manifest, PatchRecord, TensorRecord
from kconvert.names import MANIFEST_NAME, parents
from kconvert.parity.results import Failure
from kconvert.transforms import LayoutSpec

__all__ = ["layout_failures"]


def layout_failures(manifest: Manifest) -> Iterator[Failure]:
    """What the manifest says that cannot be, a line for each claim or tensor."""
    for record in manifest.tensors:
        if record.patch is None and record.exact and not _is_passed_through(record):
            yield Failure(record.target, "the manifest gives it other parts, and no patch that would take them")
    targets = {record.target for record in manifest.tensors if record.patch is None}
    for name in manifest.carried:
        if name not in targets:
            yield Failure(name, "the manifest has carried it along, and has no such tensor outside the patches")
    parts = _Parts(manifest)
    for number, patch in enumerate(manifest.patches):
        records = [record for record in manifest.tensors if record.patch == number]
        yield from _stray(patch, records)
        if patch.layout.package is None:
            yield from _patch_failures(patch, records, parts)


class _Parts:
    """Every tensor of the stock model that the manifest has."""

    def __init__(self, manifest: Manifest) -> None:
        self._shapes = {part.source: part.shape for record in manifest.tensors for part in record.parts}
        self._names = sorted(self._shapes)

    def below(self, paths: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Name to shape of those in the modules at `paths`."""
        found = {}
        for path in paths:
            first, last = bisect_left(self._names, f"{path}."), bisect_left(self._names, f"{path}/")
            found.update({name: self._shapes[name] for name in self._names[first:last]})
        return found


def _is_passed_through(record: TensorRecord) -> bool:
    made = record.arrangement()
    return made.sources == (record.target,) and made.is_whole(record.parts[0].shape)


def _stray(patch: PatchRecord, records: Sequence[TensorRecord]) -> Iterator[Failure]:
    """Tensors of a patch that are in none of its modules."""
    homes = tuple(f"{paths[0]}." for paths in patch.modules)
    for record in records:
        if not record.target.startswith(homes):
            yield Failure(record.target, "the manifest gives it to a patch, none of whose modules holds it")


def _patch_failures(patch: PatchRecord, records: Sequence[TensorRecord], parts: _Parts) -> Iterator[Failure]:
    name = patch.layout.name
    spec = layout_specs().get(name)
    problem = version_problem(spec, name, patch.layout.version)
    if spec is not None and problem is None:
        problem = _patch_problem(spec, patch)
    if spec is None or problem is not None:
        yield Failure(MANIFEST_NAME, str(problem))
        return
    computed = next((record for record in records if not record.exact), None)
    if computed is not None:
        yield Failure(computed.target, f"the manifest says that it was computed, and layout {name!r} computes nothing")
        return
    by_module = _by_module(patch, records)
    for paths in patch.modules:
        found = {record.target: record.arrangement() for record in by_module[paths[0]]}
        problem = layout_problem(spec, paths, found, parts.below(paths))
        if problem is not None:
            yield Failure(paths[0], problem)


def _patch_problem(spec: LayoutSpec, patch: PatchRecord) -> str | None:
    """What of a patch, apart from its tensors, is not as its layout says."""
    if len(patch.classes) != len(spec.members) or (patch.kind == "fuse") != spec.is_fusion:
        return f"layout {spec.name!r} takes {', '.join(spec.members)}, the manifest gives it {', '.join(patch.classes)}"
    known = kernel_specs()
    foreign = next((kernel for kernel in patch.kernels if kernel in known and known[kernel][0].name != spec.name), None)
    return None if foreign is None else f"kernel {foreign!r} is for another layout than {spec.name!r}"


def _by_module(patch: PatchRecord, records: Sequence[TensorRecord]) -> dict[str, list[TensorRecord]]:
    """The tensors of each claim, by the path where its layout sits."""
    inside: dict[str, list[TensorRecord]] = {paths[0]: [] for paths in patch.modules}
    for record in records:
        for path in parents(record.target):
            if path in inside:
                inside[path].append(record)
    return inside
