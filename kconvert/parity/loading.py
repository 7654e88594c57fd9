"""The two models of a comparison: the stock one and the converted one, one at a time.

The stock weights come from the source, else out of the converted file.  Then the manifest says which rows are which
tensor, and the file is never held twice: what is not packed is read where it lies.  Refused: weights that leave a
parameter of the stock model random, and a quantised checkpoint without its source, because a quantiser changes
names and modules while it loads.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers.utils import logging

from kconvert.checkpoint import quantization_of
from kconvert.errors import CheckpointError, LoadError, TrustError, UsageError, one_line
from kconvert.kernels.assign import assign_kernels, load_layout
from kconvert.kernels.dispatch import Dispatch, attach
from kconvert.kernels.layout import is_patched
from kconvert.kernels.packing import unpack_state
from kconvert.kernels.rearrange import rearrange
from kconvert.manifest import Manifest
from kconvert.parity.job import VerifyJob
from kconvert.runtime.loader import load_converted
from kconvert.runtime.modelclass import load_config, model_class, read_config
from kconvert.runtime.patching import packings_of

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

__all__ = ["choose_kernels", "dtype_name", "load_packed", "load_stock", "reference_only", "release"]


def load_stock(job: VerifyJob) -> Any:
    """The stock model in the checkpoint's dtype, on the job's device.

    Raises:
        CheckpointError: the source cannot be loaded as a stock model.
        LoadError: a parameter is not in the weights.
        TrustError: the model is defined by code that is not trusted.
        UsageError: quantised, and no source.
    """
    with _quiet_transformers():
        model = _from_converted(job) if job.source is None else _from_source(job, job.source)
        return model.to(job.device)


def load_packed(job: VerifyJob) -> Any:
    """The converted model with the kernels that "auto" chooses, on the job's device; raises as `load_converted`."""
    with _quiet_transformers():
        model = load_converted(
            job.directory, trust_remote_code=job.trust_remote_code, trust_kernels=job.trust_kernels
        ).to(job.device)
    choose_kernels(model, job.manifest)
    return model


def release() -> None:
    """Give back the memory of a model that nobody refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no notes of transformers inside: both models load silently."""
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


def _stock_class(job: VerifyJob, directory: Path) -> tuple[Any, Any, dict[str, Any]]:
    """The model class, its config, and config.json as data."""
    raw, _ = read_config(directory)
    try:
        cls = model_class(directory, raw, trust_remote_code=job.trust_remote_code)
    except TrustError as error:
        raise TrustError(error.what, where=error.where, fix="read it, then pass --trust-remote-code") from None
    return cls, load_config(directory, cls), raw


def _from_source(job: VerifyJob, source: Path) -> Any:
    if (source / "adapter_config.json").exists():
        raise CheckpointError(
            "adapter_config.json is here, and from_pretrained would follow it to another base model",
            where=str(source),
            fix="move it away while you verify",
        )
    cls, config, raw = _stock_class(job, source)
    if isinstance(raw.get("transformers_weights"), str):  # the reader has checked the name
        config.transformers_weights = raw["transformers_weights"]
    try:
        model, info = cls.from_pretrained(
            str(source),
            config=config,
            dtype="auto",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=job.trust_remote_code,
        )
    except (KeyError, TypeError) as error:  # of an index without metadata, for one
        raise CheckpointError(
            f"transformers does not load the source ({one_line(error)})",
            where=str(source),
            fix="compare without --source, or with --level bytes alone, which needs no model",
        ) from error
    _check_whole(info, str(source))
    _store_as_converted(model, job.manifest, source)
    return model


def _store_as_converted(model: Any, manifest: Manifest, source: Path) -> None:
    """Give the stock weights the values that a recipe's `dtype:` left of them: that was asked for, and is no fault."""
    parameters = dict(model.named_parameters())
    for record in manifest.tensors:
        if all(origin.dtype == record.dtype for origin in record.origins):
            continue
        for part in record.parts:
            if part.source not in parameters:
                continue
            stored = {}
            for origin in part.origins:  # once more out of the files: the loaded weight may have been rounded already
                with safe_open(str(source / origin.file), framework="pt") as opened:
                    stored[origin.file_name] = opened.get_tensor(origin.file_name).to(_DTYPES[record.dtype])
            weight = parameters[part.source]
            weight.data = rearrange(part.stored(), stored).to(weight.dtype).contiguous()


def _from_converted(job: VerifyJob) -> Any:
    cls, config, raw = _stock_class(job, job.directory)
    if quantization_of(raw) is not None:
        raise UsageError(
            "the checkpoint is quantised, and the stock model cannot be made out of the converted file",
            where=str(job.directory),
            fix="give the source with --source DIR",
        )
    state: dict[str, torch.Tensor] = {}
    for name in job.manifest.weight_files:
        with safe_open(str(job.directory / name), framework="pt") as opened:
            state.update({key: opened.get_tensor(key) for key in opened.keys()})  # noqa: SIM118 - not a dict
    packings = [packing for group in packings_of(job.manifest).values() for packing in group]
    model, info = cls.from_pretrained(
        None, config=config, state_dict=unpack_state(packings, state), dtype="auto", output_loading_info=True
    )
    _check_whole(info, str(job.directory))
    return model


def _check_whole(info: Mapping[str, Any], where: str) -> None:
    for kind in ("missing_keys", "mismatched_keys", "error_msgs", "conversion_errors"):
        if info.get(kind):
            first = sorted(map(str, info[kind]))[0]
            raise LoadError(
                f"the stock model has {len(info[kind])} {kind.replace('_', ' ')}, e.g. {first}",
                where=where,
                fix="use the transformers version that it was converted with",
            )


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")


def choose_kernels(root: nn.Module, manifest: Manifest, *, prefix: str = "") -> None:
    """Choose the kernels of patched modules again, as loading in their present dtype and place would.

    Args:
        root: the model, or a copy of a module of it.
        manifest: names the candidates.
        prefix: the path of `root` in the model.
    """
    named = {paths[0]: record.kernels for record in manifest.patches for paths in record.modules}
    for name, module in root.named_modules():
        path = ".".join(part for part in (prefix, name) if part)
        layout = load_layout(str(module.__dict__.get("kconvert_layout"))) if path in named else None
        if layout is not None:  # a kernel package runs in any dtype and place
            assign_kernels(module, layout, named[path], origin="recipe", with_defaults=True)
            for patched in filter(is_patched, module.modules()):
                cast("Dispatch", patched.kconvert_dispatch).raise_failures()


@contextmanager
def reference_only(root: nn.Module) -> Iterator[None]:
    """Every patched module inside `root` runs its reference, as with `kernels="reference"`."""
    chosen = [(module, module.__dict__["kconvert_dispatch"]) for module in root.modules() if is_patched(module)]
    for module, _ in chosen:
        attach(module, Dispatch())
    try:
        yield
    finally:
        for module, dispatch in chosen:
            attach(module, dispatch)
