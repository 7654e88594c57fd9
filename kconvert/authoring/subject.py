"""What a kernel is checked on: the package, the conversion that it asks for, and real modules to run.

The conversion is prepared with the code of `apply`, from a recipe that names the package and the modules.  Then the
stock model is loaded, and for every kind of place (same classes, same shapes) one is packed in memory, with the code
that loading uses.  A small model of the type will do: it is loaded whole.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from kconvert.checkpoint import open_checkpoint
from kconvert.convert.prepare import Prepared
from kconvert.errors import RecipeError, UsageError
from kconvert.kernels.assign import assign_selections
from kconvert.kernels.model import converted_class
from kconvert.kernels.package_module import build_package_module
from kconvert.kernels.packages import PackageClasses
from kconvert.kernels.packing import Packing, pack_state
from kconvert.kernels.probe import capture_calls, forked_random_state
from kconvert.kernels.select import ANY_DEVICE, Candidate
from kconvert.kernels.stateless import stateless_layout
from kconvert.names import near_misses
from kconvert.parity.inputs import ModuleInput
from kconvert.parity.job import SEED, VerifyJob
from kconvert.parity.loading import load_stock
from kconvert.recipe import Recipe, find_recipe, load_recipe, parse_recipe
from kconvert.recipe.reference import check_class_name
from kconvert.runtime.modelclass import build_meta_model
from kconvert.runtime.patching import PatchedOnInit, PatchJob, packings_of, patching, resolve_package

__all__ = ["CALL_SIZES", "OWN_RECIPE", "KernelPath", "Trial", "build_trials", "recipe_for", "representatives"]

CALL_SIZES: Mapping[str, tuple[int, int]] = {
    "2 x 7": (2, 7),
    "batch 1": (1, 7),
    "1 token": (2, 1),
    "batch 1, 1 token": (1, 1),
}
"""(batch, tokens) of the calls that a kernel is run with; the first one is used for everything but odd shapes."""


OWN_RECIPE = "check-kernel"
"""What errors call the recipe that is written here."""


@dataclass(frozen=True)
class KernelPath:
    """A kernel as the command line names it: the package's folder, absolute, and the class."""

    folder: Path
    class_name: str

    @classmethod
    def parse(cls, text: str) -> KernelPath:
        """Parse `folder:ClassName`.

        Raises:
            UsageError: no class, a class name that is none, or no such folder.
        """
        folder, colon, name = text.rpartition(":")
        if not (colon and folder and name):
            raise UsageError(f"kernel {text!r} names no class", fix="write FOLDER:ClassName")
        try:
            check_class_name(name)
        except RecipeError as error:
            raise UsageError(error.what, fix=error.fix) from None
        path = Path(folder)
        if not path.is_dir():
            raise UsageError(f"{folder!r} is no folder", fix="give the folder that holds layers.py")
        return cls(path.resolve(), name)

    @property
    def text(self) -> str:
        """`folder:ClassName`."""
        return f"{self.folder}:{self.class_name}"


Targets = Sequence[tuple[str, str]]
"""(class name, path pattern) of a replacement, or of the modules of a fusion in pair order."""


def recipe_for(kernel: KernelPath, targets: Targets, recipe: Path | None, model_dir: Path) -> Recipe:
    """The recipe that gives the kernel to these modules, or to those that a recipe file gives it.

    Raises:
        UsageError: neither or both are given, or the file does not name the kernel.
        RecipeError: the file is malformed, or a pattern is.
        CheckpointError: the model directory cannot be read.
    """
    if (recipe is None) is (not targets):
        raise UsageError(
            "the modules that the kernel replaces are given twice" if targets else "no modules are named",
            fix="give --class and --path, once for each module, or --recipe FILE",
        )
    if recipe is None:
        return _write_recipe(kernel, [targets], [open_checkpoint(model_dir).model_type or "unknown"])
    loaded = load_recipe(find_recipe(str(recipe)))
    return _write_recipe(kernel, list(_targets_in(loaded, kernel)), loaded.model_type)


def _targets_in(recipe: Recipe, kernel: KernelPath) -> Iterator[Targets]:
    base = recipe.path.parent if recipe.path is not None else Path()
    named = []
    found = False
    for patch in recipe.patches:
        for reference in patch.kernels:
            named.append(reference.text)
            if (
                reference.kind == "local"
                and KernelPath((base / reference.source).resolve(), str(reference.class_name)) == kernel
            ):
                found = True
                yield [(target.class_name, target.path.text) for target in patch.targets]
    if not found:
        near = near_misses(kernel.class_name, [name.rpartition(":")[2] for name in named])
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(
            f"recipe {recipe.name!r} does not name {kernel.text!r}, but {', '.join(named)}",
            fix=f"{hint}check the folder and the class, or give --class and --path",
        )


def _write_recipe(kernel: KernelPath, entries: Sequence[Targets], model_types: Sequence[str]) -> Recipe:
    lines = ["recipe: 1", f"name: {OWN_RECIPE}", f"model_type: {json.dumps(list(model_types))}", "patches:"]
    for targets in entries:
        pairs = [f"{{class: {json.dumps(name)}, path: {json.dumps(path)}}}" for name, path in targets]
        modules = f"replace: {pairs[0]}" if len(pairs) == 1 else f"fuse: [{', '.join(pairs)}]"
        lines += [f"  - kernel: {json.dumps(kernel.text)}", "    trust_remote_code: true", f"    {modules}"]
    return parse_recipe("\n".join(lines) + "\n", OWN_RECIPE)


@dataclass(frozen=True)
class Trial:
    """One place of the model: its stock modules, the packed one, and calls that the model really makes.

    Attributes:
        paths: the module paths in pair order.
        stock: copies of the stock modules, in eval mode.
        packed: the layout's module with the same weights; its forward runs the kernel.
        kernel: the kernel class.
        packings: what lies in which tensor, with names relative to the model.
        tensors: the stock tensors by full name.
        inputs: by the names of `CALL_SIZES`; a call that the model does not make is missing.
    """

    paths: tuple[str, ...]
    stock: tuple[nn.Module, ...]
    packed: Any
    kernel: type[Any]
    packings: tuple[Packing, ...]
    tensors: Mapping[str, torch.Tensor]
    inputs: Mapping[str, ModuleInput]


def build_trials(prepared: Prepared, model_dir: Path, device: str) -> tuple[list[Trial], str | None]:
    """One trial for every kind of place, and why the model does not run, or None."""
    manifest = prepared.manifest
    model = load_stock(VerifyJob(model_dir, manifest, model_dir, device, trust_remote_code=False))
    packages = prepared.resolved.packages
    patches = [resolve_package(record, packages[number].classes) for number, record in enumerate(manifest.patches)]
    job = PatchJob(manifest, patches)
    with patching(job):
        build_meta_model(converted_class(PatchedOnInit, type(model)), model.config)
    places = representatives(manifest.patches, model)
    calls: dict[str, dict[str, Any]] = {}
    failure = None
    for name, (batch, tokens) in CALL_SIZES.items():
        calls[name], stopped = capture_calls(model, [paths[0] for _, paths in places], batch=batch, tokens=tokens)
        failure = failure or stopped
    packings = packings_of(manifest)
    trials = []
    for number, paths in places:
        inputs = {
            name: ModuleInput.from_call(model.get_submodule(paths[0]), found[paths[0]], seed=SEED)
            for name, found in calls.items()
            if paths[0] in found
        }
        mine = tuple(packing for packing in packings[number] if packing.is_in(paths[0]))
        trials.append(_trial(model, paths, mine, packages[number].classes, job.arguments.get(paths[0]), inputs))
    return trials, failure


def representatives(records: Sequence[Any], model: nn.Module) -> list[tuple[int, tuple[str, ...]]]:
    """(entry, paths) of the first place of each kind: an entry, classes, and the names, shapes and dtypes of weights.

    Args:
        records: the entries, with the module paths of their places and the classes.
        model: the model that has them.
    """
    kinds: dict[object, tuple[int, tuple[str, ...]]] = {}
    for number, record in enumerate(records):
        for paths in record.modules:
            modules = [model.get_submodule(path) for path in paths]
            shapes = tuple(
                (name, tuple(weight.shape), weight.dtype)
                for module in modules
                for name, weight in module.named_parameters()
            )
            kinds.setdefault((number, record.classes, shapes), (number, paths))
    return list(kinds.values())


def _trial(
    model: nn.Module,
    paths: tuple[str, ...],
    packings: tuple[Packing, ...],
    classes: PackageClasses,
    arguments: Any,
    inputs: Mapping[str, ModuleInput],
) -> Trial:
    stock = tuple(copy.deepcopy(model.get_submodule(path)) for path in paths)
    tensors = {
        f"{path}.{name}": tensor.detach()
        for path, module in zip(paths, stock, strict=True)
        for name, tensor in module.state_dict().items()
    }
    members = [copy.deepcopy(module) for module in stock]
    kernel: Any = classes.kernel
    if classes.layout is None:
        packed: Any = stateless_layout(kernel).patch(members)
    else:
        packed = _packed(classes.layout, members, paths, packings, arguments, tensors)
    candidate = Candidate(kernel.__name__, ANY_DEVICE, "call", bool(getattr(kernel, "has_backward", True)))
    assign_selections(packed, [candidate], {kernel.__name__: kernel}, unavailable={}, unsupported={})
    cast("Any", packed).kconvert_dispatch.raise_failures()
    return Trial(paths, stock, packed.eval(), kernel, packings, tensors, inputs)


def _packed(
    layout: type[nn.Module],
    members: Sequence[nn.Module],
    paths: tuple[str, ...],
    packings: tuple[Packing, ...],
    arguments: Any,
    tensors: Mapping[str, torch.Tensor],
) -> Any:
    """The layout with the packed weights of its members, in their place and dtype."""
    device = next(iter(tensors.values())).device
    with forked_random_state(device):
        packed = cast("Any", build_package_module(layout, members, paths, packings, arguments))
    packed.to(device)
    packed.load_state_dict(
        {name.removeprefix(f"{paths[0]}."): tensor.clone() for name, tensor in pack_state(packings, tensors).items()}
    )
    packed.__dict__["kconvert_layout"] = layout.__name__
    return packed
