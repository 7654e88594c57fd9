"""`load_converted`: a converted directory as a normal transformers model with kernels in place.

Nothing global is patched: no other model in the process changes, also when loading fails.  transformers itself
changes global state while it loads, so loads run one at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, cast

from torch import nn

from kconvert.errors import (
    KernelUnavailableError,
    ManifestError,
    TrustError,
    UnknownKernelError,
    UsageError,
    one_line,
)
from kconvert.files import blob_folders
from kconvert.kernels.assign import assign_kernels, assign_selections
from kconvert.kernels.dispatch import Dispatch
from kconvert.kernels.layout import Layout, is_patched
from kconvert.kernels.model import converted_class
from kconvert.kernels.packages import PackageClasses, check_trust, copy_package, import_package
from kconvert.kernels.registry import get_known_kernel
from kconvert.kernels.report import device_in
from kconvert.kernels.select import Candidate, Mode
from kconvert.manifest import Manifest, PackageRecord, load_manifest, sha256_digest
from kconvert.names import KERNELS_DIR, VARIANT
from kconvert.runtime.buffers import restore_buffers
from kconvert.runtime.checks import check_files, check_loaded, refuse_arguments
from kconvert.runtime.modelclass import load_config, model_class, read_config
from kconvert.runtime.offload import join_offload_hooks
from kconvert.runtime.patching import PatchJob, ResolvedPatch, packings_of, patching, resolve_layout, resolve_package
from kconvert.runtime.saving import LoadedModel, Origin

__all__ = ["load_converted"]

_LOAD_LOCK = RLock()
_LOADER_ARGUMENTS = frozenset({"attn_implementation", "experts_implementation"})


def load_converted(
    path: str | Path,
    *,
    dtype: Any = "auto",
    device_map: Any = None,
    kernels: str | Sequence[str] = "auto",
    strict: bool = False,
    trust_remote_code: bool = False,
    trust_kernels: Mapping[str, str] | None = None,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Load a directory that `kconvert apply` wrote.

    Args:
        path: the converted directory.
        dtype: as in `from_pretrained`; "auto" is the checkpoint's.
        device_map: as in `from_pretrained`.
        kernels: "auto" for the recipe's candidates and then the layouts' defaults, "reference" for the stock
            arithmetic, or a list of kernel IDs that alone may run.
        strict: raise where a module would run its reference, also where a kernel fails at its first call.
        trust_remote_code: run kernel packages, and model code, that come with the directory.
        trust_kernels: package ID to digest; trusts just these packages.
        from_pretrained_kwargs: anything else that `from_pretrained` takes.

    Returns:
        A model of the class that config.json names, in eval mode.  `model.kconvert_report` says which kernel
        runs in which module; with `output_loading_info=True` a pair of model and info, as in transformers.

    Raises:
        UsageError: an argument that a converted checkpoint cannot honour, or an unknown choice of kernels.
        UnknownKernelError: (a `ValueError`) a kernel ID that nothing has.
        ManifestError: the directory is not whole.
        TrustError: it holds code that is not trusted, or has changed.
        LoadError: a tensor is missing, unexpected, or without data.
        KernelUnavailableError: `strict`, and a module would run its reference.
    """
    refuse_arguments(from_pretrained_kwargs)
    _check_choice(kernels)
    directory = Path(path)
    manifest = load_manifest(directory)
    _check_package_ids(kernels, manifest)
    check_files(directory, manifest)
    raw, config_bytes = read_config(directory)
    is_changed = sha256_digest(config_bytes) != manifest.config_digest
    if is_changed:
        warnings.warn(f"{directory}: config.json was changed after the conversion", stacklevel=2)
    patches = _resolve(directory, manifest, trust_remote_code, trust_kernels)
    stock = model_class(directory, raw, trust_remote_code=trust_remote_code)
    config = load_config(
        directory,
        stock,
        attention=from_pretrained_kwargs.get("attn_implementation"),
        experts=from_pretrained_kwargs.get("experts_implementation"),
    )
    with_info = bool(from_pretrained_kwargs.pop("output_loading_info", False))
    for name in ("local_files_only", "use_safetensors"):  # both are so anyway
        from_pretrained_kwargs.pop(name, None)
    for name in [key for key in from_pretrained_kwargs if hasattr(config, key) and key not in _LOADER_ARGUMENTS]:
        setattr(config, name, from_pretrained_kwargs.pop(name))
    job = PatchJob(manifest, patches)
    with _LOAD_LOCK, patching(job), _blamed_on_config(directory, is_changed):
        model, info = converted_class(LoadedModel, stock).from_pretrained(
            str(directory),
            config=config,
            variant=VARIANT,
            dtype=dtype,
            device_map=device_map,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            **from_pretrained_kwargs,
        )
    join_offload_hooks(model, tuple(paths[0] for patch in patches for paths in patch.record.modules))
    restore_buffers(model, job)
    check_loaded(model, info, manifest)
    model.kconvert_origin = Origin(directory.resolve(), manifest)
    _assign(model, patches, kernels, strict)
    return (model, info) if with_info else model


@contextmanager
def _blamed_on_config(directory: Path, is_changed: bool) -> Iterator[None]:
    """What a model's own code raises inside as one line, where config.json is not the one of the conversion.

    Raises:
        ManifestError: instead of a foreign error.
    """
    try:
        yield
    except Exception as error:
        if not is_changed or hasattr(error, "exit_code"):
            raise
        raise ManifestError(
            f"config.json was changed after the conversion, and the model does not load with it ({one_line(error)})",
            where=str(directory),
            fix="take config.json from the source again, or change it there and convert again",
        ) from error


def _check_choice(kernels: str | Sequence[str]) -> None:
    if kernels in ("auto", "reference"):
        return
    if isinstance(kernels, str) or not isinstance(kernels, Sequence):
        raise UsageError(f"kernels is {kernels!r}", fix='pass "auto", "reference" or a list of kernel IDs')
    for kernel_id in kernels:
        if not (isinstance(kernel_id, str) and ":" in kernel_id):
            get_known_kernel(kernel_id)


def _check_package_ids(kernels: str | Sequence[str], manifest: Manifest) -> None:
    """Refuse the ID of a kernel package, `owner/repo:ClassName`, that the directory does not have."""
    known = {kernel_id for patch in manifest.patches if patch.layout.package for kernel_id in patch.kernels}
    for kernel_id in () if isinstance(kernels, str) else kernels:
        if ":" in kernel_id and kernel_id not in known:
            fix = f"this directory has {', '.join(sorted(known))}" if known else "this directory has no kernel package"
            raise UnknownKernelError(f"unknown kernel {kernel_id!r}", fix=fix)


def _resolve(
    directory: Path, manifest: Manifest, trust_remote_code: bool, trust_kernels: Mapping[str, str] | None
) -> tuple[ResolvedPatch, ...]:
    packings = packings_of(manifest)
    patches = []
    for number, record in enumerate(manifest.patches):
        if record.layout.package is None:
            patches.append(ResolvedPatch(record, resolve_layout(record, packings[number]), None))
        else:
            needs_layout = record.kind == "fuse"
            classes = _vendored(directory, record.layout.package, needs_layout, trust_remote_code, trust_kernels)
            patches.append(resolve_package(record, classes))
    return tuple(patches)


def _vendored(
    directory: Path,
    record: PackageRecord,
    needs_layout: bool,
    trust_remote_code: bool,
    trust_kernels: Mapping[str, str] | None,
) -> PackageClasses:
    folder = record.digest.partition(":")[2]
    if not (record.digest.startswith("sha256:") and len(folder) == 64 and set(folder) <= set("0123456789abcdef")):
        raise TrustError(
            f"digest {record.digest!r} is malformed", where=str(directory), fix="do not use this checkpoint"
        )
    source = directory / KERNELS_DIR / folder
    if not source.is_dir():
        raise ManifestError(f"kernel package {record.package_id!r} is missing", where=str(source), fix="convert again")
    copied = copy_package(source, record.package_id, linked=next(iter(blob_folders(directory)), None))
    if copied.digest != record.digest:
        raise TrustError(
            f"kernel package {record.package_id!r} has changed since the conversion: {copied.digest} instead of {record.digest}",
            where=str(source),
            fix="convert again from a package that you trust",
        )
    # whoever the manifest says the package is from: nothing shows that it is, so no owner is trusted by default here
    check_trust(
        copied,
        source=source,
        trust_remote_code=trust_remote_code,
        advice="pass trust_kernels={trust} or trust_remote_code=True",
        trust_kernels=trust_kernels,
        commit=record.commit,
    )
    return import_package(copied, record.class_name, needs_layout=needs_layout)


def _assign(model: Any, patches: Sequence[ResolvedPatch], kernels: str | Sequence[str], strict: bool) -> None:
    fallbacks: list[tuple[str, str]] = []
    num_modules = 0
    for patch in patches:
        for paths in patch.record.modules:
            num_modules += 1
            module = model.get_submodule(paths[0])
            if patch.layout is not None:
                _check_facts(patch, module)
            _assign_module(patch, module, kernels)
            selection = cast("Dispatch", module.kconvert_dispatch).selection(device_in(model, module), Mode.INFERENCE)
            for patched in filter(is_patched, module.modules()):
                patched.kconvert_dispatch.strict = strict
            if selection is None or selection.kernel_id is None:
                fallbacks.append(("" if selection is None else selection.reasons(), paths[0]))
    why, where = next((item for item in fallbacks if item[0]), fallbacks[0] if fallbacks else ("", ""))
    example = f"{where} ({why or 'no kernel was asked for'})"
    nothing_runs = kernels != "reference" and len(fallbacks) == num_modules
    if fallbacks and not strict and (kernels == "auto" or nothing_runs):
        message = f"{len(fallbacks)} modules run their reference, e.g. {example}; see model.kconvert_report"
        warnings.warn(message, stacklevel=3)
    if strict and fallbacks:
        raise KernelUnavailableError(
            f"{len(fallbacks)} modules would run their reference, e.g. {example}",
            fix="load without strict, or with kernels that run here",
        )


def _assign_module(patch: ResolvedPatch, module: nn.Module, kernels: str | Sequence[str]) -> None:
    if patch.package is None:
        layout = cast("type[Layout]", patch.layout)
        if kernels == "auto":
            assign_kernels(module, layout, patch.record.kernels, origin="recipe", with_defaults=True)
        else:
            named = () if kernels == "reference" else kernels
            assign_kernels(module, layout, named, origin="call", with_defaults=False)
        return
    kernel_id, package = patch.record.kernels[0], patch.package
    is_wanted = kernels == "auto" or (kernels != "reference" and kernel_id in kernels)
    candidate = Candidate(kernel_id, package.device, "recipe", bool(getattr(package.kernel, "has_backward", True)))
    assign_selections(
        module,
        [candidate] if is_wanted else [],
        {kernel_id: package.kernel},
        unavailable={} if package.unavailable is None else {kernel_id: package.unavailable},
        unsupported={},
    )


def _check_facts(patch: ResolvedPatch, module: Any) -> None:
    """What was proven at conversion has to hold in this transformers version too."""
    expected = (patch.record.facts or {}).get(patch.record.classes[0])
    found = module.facts()
    if expected is not None and expected != found:
        raise ManifestError(
            f"{patch.record.classes[0]} computes {found} here, at conversion it was {expected}",
            fix="convert again with this transformers version",
        )
