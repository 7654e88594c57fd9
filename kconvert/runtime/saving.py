"""Saving packed: `save_pretrained(variant="kconvert")` of a loaded model, with its manifest.

Values and dtypes are those of the model now; names, parts and the source's headers are those of the
directory it came from, so that the result can be reverted and loaded like any converted directory.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from kconvert.errors import UsageError, one_line
from kconvert.kernels.packing import Packing, pack_state
from kconvert.manifest import Manifest, OmittedRecord, TensorRecord, sha256_digest
from kconvert.names import (
    CONFIG_NAME,
    INDEX_NAME,
    KERNELS_DIR,
    MANIFEST_NAME,
    PARITY_NAME,
    SOURCE_HEADERS_NAME,
    STOCK_INDEX_NAME,
    STOCK_SINGLE_NAME,
)
from kconvert.runtime.patching import PatchedOnInit
from kconvert.runtime.source_tensors import file_packings, loadable, source_tensors
from kconvert.transforms import whole

__all__ = ["LoadedModel", "Origin"]


@dataclass(frozen=True)
class Origin:
    """Where a model was loaded from."""

    directory: Path
    manifest: Manifest

    @cached_property
    def file_packings(self) -> tuple[Packing, ...]:
        """The stock model's tensors out of those of the source's files; none where the model was not checked."""
        return file_packings(self.manifest) if self.manifest.model_checked else ()

    @cached_property
    def loadable(self) -> tuple[Packing, ...]:
        """Those of them that a state dict may be told by."""
        return loadable(self.file_packings, self.manifest)


class LoadedModel(PatchedOnInit):
    """Mixin of a model that `load_converted` returns."""

    kconvert_origin: Origin

    @property
    def _weight_conversions(self) -> Any:
        """What transformers undoes when it saves.

        The files hold module names, so nothing was converted, also where a packed name looks like an original one.
        """
        origin = self.__dict__.get("kconvert_origin")
        if origin is None or not origin.manifest.model_checked:
            return self.__dict__.get("_weight_conversions")
        return source_tensors(origin.file_packings)

    @_weight_conversions.setter
    def _weight_conversions(self, conversions: Any) -> None:
        self.__dict__["_weight_conversions"] = conversions

    @property
    def kconvert_file_packings(self) -> tuple[Packing, ...]:
        """The model's stock tensors, out of those of the source's files."""
        origin = self.__dict__.get("kconvert_origin")
        return () if origin is None else origin.loadable

    def _check_undoable(self) -> None:
        lost = [record for record in self.kconvert_origin.manifest.tensors if not record.exact]
        if lost:
            raise UsageError(
                f"{lost[0].target!r} was made by {lost[0].op}, so the stock tensors cannot be given back",
                fix="save packed, with variant='kconvert'",
            )

    def _save_packed(self, directory: Any, is_main_process: bool, state: Any, kwargs: dict[str, Any]) -> Any:
        target = Path(directory)
        stock = next((name for name in (STOCK_SINGLE_NAME, STOCK_INDEX_NAME) if (target / name).exists()), None)
        if stock is not None:
            raise UsageError(
                f"{target} holds {stock}, stock weights that would be loaded instead", fix="save to an empty directory"
            )
        if kwargs.get("push_to_hub"):
            raise UsageError("a packed save cannot be pushed at once", fix="save, then upload the directory")
        packed = pack_state(self.kconvert_packings, state)
        model = cast("Any", self)
        state = {**packed, **_carried(self.kconvert_origin, packed, model.state_dict().keys())}
        if is_main_process:  # others may hold no state at all
            _check_names(self.kconvert_origin.manifest, state)
        kwargs["save_original_format"] = False
        whole = target.absolute()
        whole.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f"{whole.name}.saving-", dir=whole.parent))
        try:
            # past ConvertedModel: the state dict is to keep its packed names
            result = type(model).kconvert_stock_class.save_pretrained(
                model, beside, is_main_process=is_main_process, state_dict=state, **kwargs
            )
            if is_main_process:
                _complete(beside, self.kconvert_origin, _tied_names(model))
                _move(beside, target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return result


def _move(beside: Path, target: Path) -> None:
    """Put a finished save in place of an older one: until here that one is whole, and the manifest comes last."""
    target.mkdir(parents=True, exist_ok=True)
    fresh = {path.relative_to(beside).as_posix() for path in beside.rglob("*") if path.is_file()}
    (target / MANIFEST_NAME).unlink(missing_ok=True)
    for old in (INDEX_NAME, PARITY_NAME, *(path.name for path in target.glob("model.kconvert*.safetensors"))):
        if old not in fresh:
            (target / old).unlink(missing_ok=True)
    for name in sorted(fresh, key=lambda name: (name == MANIFEST_NAME, name)):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (beside / name).replace(target / name)


def _check_names(manifest: Manifest, state: Mapping[str, torch.Tensor]) -> None:
    """Refuse a state in part before anything is written: what it lacks would be gone.

    Raises:
        UsageError: naming a tensor that is missing.
    """
    lacking = sorted(record.target for record in manifest.tensors if record.target not in state)
    if lacking:
        raise UsageError(
            f"the state lacks {len(lacking)} tensors, e.g. {lacking[0]!r}", fix="pass the whole state dict"
        )


def _carried(origin: Origin, state: Mapping[str, torch.Tensor], own: Collection[str]) -> dict[str, torch.Tensor]:
    """The tensors that the directory holds and the model has no place for, so that a packed save loses none.

    `own` are the names that the model has; they tell which ones these are where the conversion had no model check.

    Raises:
        UsageError: the directory the model came from is gone.
    """
    manifest = origin.manifest
    wanted = set(manifest.carried)
    if not manifest.model_checked:
        wanted = {record.target for record in manifest.tensors} - set(own)
    found: dict[str, torch.Tensor] = {}
    for name in manifest.weight_files if wanted else ():
        path = origin.directory / name
        if not path.is_file():
            raise UsageError(
                f"{len(wanted)} tensors outside the model would be lost, e.g. {min(wanted)!r}: {path} is gone",
                fix="save the stock layout, without variant",
            )
        with safe_open(str(path), framework="pt") as opened:
            for key in wanted.intersection(opened.keys()) - state.keys():
                try:
                    found[key] = opened.get_tensor(key)
                except SafetensorError as error:
                    raise UsageError(
                        f"{key!r}, outside the model, cannot be saved: {one_line(error)}",
                        where=str(path),
                        fix="save the stock layout, without variant, which leaves it out",
                    ) from None
    return found


def _as_stored(record: TensorRecord, dtype: str, shape: tuple[int, ...]) -> TensorRecord:
    """The record of a tensor whose dtype or, after `resize_token_embeddings`, number of rows has changed."""
    if shape == record.shape:
        return replace(record, dtype=dtype)
    parts = record.parts
    if len(record.origins) == 1:
        pieces = (whole(record.target, shape).pieces[0].numbers(),)
        origins = (replace(record.origins[0], shape=shape, pieces=pieces),)
        parts = (replace(parts[0], shape=shape, pieces=pieces, origins=origins),)
    return replace(record, dtype=dtype, shape=shape, parts=parts)


def _copy_companions(target: Path, origin: Origin) -> None:
    manifest = origin.manifest
    if manifest.source_headers is not None and (origin.directory / SOURCE_HEADERS_NAME).is_file():
        shutil.copyfile(origin.directory / SOURCE_HEADERS_NAME, target / SOURCE_HEADERS_NAME)
    for patch in manifest.patches:
        package = patch.layout.package
        if package is not None:
            folder = package.digest.partition(":")[2]
            shutil.copytree(origin.directory / KERNELS_DIR / folder, target / KERNELS_DIR / folder, dirs_exist_ok=True)


def _tied_names(model: Any) -> set[str]:
    """Names that need not be in a file: loading fills them from the tensor that they are tied to."""
    return {*model.all_tied_weights_keys, *model.get_expanded_tied_weights_keys(all_submodels=True)}


def _not_saved(manifest: Manifest, sidecars: Collection[str]) -> tuple[OmittedRecord, ...]:
    """The files beside the weights, such as a tokenizer's, that a save has none of."""
    lost = [name for name in manifest.sidecars if name not in sidecars]
    return tuple(OmittedRecord(name, "save_pretrained of the model does not write it") for name in lost)


def _complete(target: Path, origin: Origin, tied: Collection[str]) -> None:
    """Everything but the weights: source headers, vendored kernels, and the manifest last."""
    manifest = origin.manifest
    _copy_companions(target, origin)
    files = tuple(sorted(path.name for path in target.glob("model.kconvert*.safetensors")))
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in files:
        with safe_open(str(target / name), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a dict
                part = opened.get_slice(key)
                stored[key] = (part.get_dtype(), tuple(part.get_shape()))
    stray = sorted(stored.keys() - {record.target for record in manifest.tensors})
    if stray:
        raise UsageError(
            f"{len(stray)} tensors were not there at conversion, e.g. {stray[0]!r}",
            fix="save the stock layout, without variant, and convert that",
        )
    lost = sorted({record.target for record in manifest.tensors} - stored.keys() - set(tied))
    if lost:
        raise UsageError(
            f"{lost[0]!r} shares its memory with another tensor, was left out, and could not be loaded again",
            fix="give it memory of its own, or set tie_word_embeddings in model.config",
        )
    tensors = tuple(
        _as_stored(record, *stored[record.target]) for record in manifest.tensors if record.target in stored
    )
    sidecars = sorted(path.name for path in target.glob("*.json") if path.name not in (INDEX_NAME, MANIFEST_NAME))
    changed = replace(
        manifest,
        tensors=tensors,
        carried=tuple(name for name in manifest.carried if name in stored),
        omitted=(*manifest.omitted, *_not_saved(manifest, sidecars)),
        config_digest=sha256_digest((target / CONFIG_NAME).read_bytes()),
        weight_files=files,
        written_by="save_pretrained",
        sidecars=tuple(sidecars),
        sidecar_digests={name: sha256_digest((target / name).read_bytes()) for name in sidecars},
        digests=None,
    )
    (target / MANIFEST_NAME).write_bytes(changed.to_bytes())
    for name in files:  # safetensors makes its files private; the umask decides here as everywhere else
        (target / name).chmod((target / MANIFEST_NAME).stat().st_mode & 0o777)
