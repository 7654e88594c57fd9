"""What a model directory holds, decided from headers alone.

The file set is the one that stock transformers would read: the config's `transformers_weights`, else
`model.safetensors`, else exactly the files of the index.  Refused: an output of kconvert, pickle weights (never
opened), a single file beside an index of other files, a missing shard, a tensor that its shard lacks, and a
tensor that two files hold.  A tensor that a shard holds and the index omits is kept, with a warning.
Names are checked as text and links are followed, so a snapshot in the Hub cache works; nothing is resolved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, NamedTuple

from kconvert.checkpoint.header import Header, file_problem, parse_json_object, read_header
from kconvert.checkpoint.index import Index, read_bounded, read_index
from kconvert.checkpoint.stamp import FileStamp, check_stamp
from kconvert.errors import CheckpointError
from kconvert.files import hub_repo_dirs
from kconvert.garbage import collector_stopped
from kconvert.names import (
    CONFIG_NAME,
    KERNELS_DIR,
    MANIFEST_NAME,
    PARITY_NAME,
    SOURCE_HEADERS_NAME,
    STOCK_INDEX_NAME,
    STOCK_SINGLE_NAME,
    is_own_name,
    natural_key,
    unsafe_name_reason,
)

__all__ = ["Checkpoint", "SourceFile", "SourceTensor", "is_inside_hub_cache", "open_checkpoint"]

_EXPLICIT_KEY = "transformers_weights"
MAX_CONFIG_BYTES = 64 * 1024 * 1024
_PICKLE_SUFFIXES = (".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_FOREIGN_SUFFIXES = (".gguf", ".h5", ".msgpack", ".ot", ".onnx", ".npz")
_HUB_NAME = re.compile(r"[a-z0-9][\w.-]*/[\w.-]+", re.ASCII | re.IGNORECASE)
_DOWNLOAD = "download the checkpoint again"
_CONVERT = (
    "write safetensors first, where the file is trusted: "
    "`AutoModelForCausalLM.from_pretrained(SOURCE).save_pretrained(TARGET)`"
)


@dataclass(frozen=True)
class SourceFile:
    """A weight file; `name` is relative to the model directory, with `/`."""

    name: str
    path: Path
    size_bytes: int
    header: Header
    stamp: FileStamp


_EXACT = frozenset({("F16", "F32"), ("BF16", "F32")})
"""(source, target) of the conversions that keep every value."""


class SourceTensor(NamedTuple):
    """A tensor and where its bytes lie: `size_bytes` at the absolute `offset` of the `SourceFile` named `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    size_bytes: int

    def is_rounded_to(self, dtype: str) -> bool:
        """Whether values are lost where it is stored in the float dtype `dtype`."""
        return self.dtype != dtype and (self.dtype, dtype) not in _EXACT


@dataclass(frozen=True)
class Checkpoint:
    """A checked source.  `files` and `tensors` are in natural order, whatever the shards' order.

    `index` and `index_name` are None for a single file.
    """

    model_dir: Path
    config: dict[str, Any]
    config_bytes: bytes
    files: tuple[SourceFile, ...]
    tensors: Mapping[str, SourceTensor]
    index: Index | None
    index_name: str | None
    warnings: tuple[str, ...]

    @property
    def model_type(self) -> str | None:
        """`model_type` of the config."""
        value = self.config.get("model_type")
        return value if isinstance(value, str) else None

    @property
    def architectures(self) -> tuple[str, ...]:
        """`architectures` of the config; empty where it has none."""
        value = self.config.get("architectures")
        return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()

    @property
    def quantization(self) -> dict[str, Any] | None:
        """`quantization_config` of the config, else that of its `text_config`."""
        return quantization_of(self.config)


@collector_stopped()
def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Read config, index and headers of a model directory; reads no tensor data.

    Raises:
        CheckpointError: the directory is not a whole safetensors checkpoint; the line says what and where.
    """
    names = _top_level_names(model_dir)
    _refuse_converted(model_dir, names)
    config_bytes = _read_config(model_dir, names)
    config = parse_json_object(config_bytes, what=CONFIG_NAME, where=str(model_dir / CONFIG_NAME))
    _check_config(config, model_dir)
    index_name, index, file_names = _choose_weights(model_dir, config, names)
    if index is not None and index_name is not None:
        _check_shards_exist(model_dir, index, model_dir / index_name)
    files = tuple(open_file(model_dir, name) for name in sorted(file_names, key=natural_key))
    tensors = collect_tensors({file.name: file.header for file in files}, where=str(model_dir))
    warnings: tuple[str, ...] = ()
    if index is not None and index_name is not None:
        warnings = check_index(index, tensors, where=str(model_dir / index_name))
    if "adapter_config.json" in names:
        warnings += ("adapter_config.json: only the base weights are converted; merge the adapter first to keep it",)
    return Checkpoint(model_dir, config, config_bytes, files, tensors, index, index_name, warnings)


def _top_level_names(model_dir: Path) -> frozenset[str]:
    if not model_dir.is_dir():
        what = "is not a directory" if os.path.lexists(model_dir) else "no such directory"
        fix = "give the folder that holds config.json and the weights"
        if _HUB_NAME.fullmatch(str(model_dir)) and not os.path.lexists(model_dir.parent):
            fix = f"download a model from the Hub first (`hf download {model_dir}`) and give the folder that it prints"
        raise CheckpointError(what, where=str(model_dir), fix=fix)
    try:
        return frozenset(path.name for path in model_dir.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot be listed: {error.strerror or error}", where=str(model_dir)) from error


def _refuse_converted(model_dir: Path, names: frozenset[str]) -> None:
    if MANIFEST_NAME in names:
        raise CheckpointError(
            f"already converted: it holds {MANIFEST_NAME}",
            where=str(model_dir),
            fix="give the original checkpoint",
        )
    harmless = (KERNELS_DIR, PARITY_NAME, SOURCE_HEADERS_NAME)
    own = sorted(name for name in names if is_own_name(name) and name not in harmless)
    if own:
        raise CheckpointError(
            f"holds {_some(own)} without {MANIFEST_NAME}: left over from an unfinished or damaged conversion",
            where=str(model_dir),
            fix="give the original checkpoint, or remove these files",
        )


def _read_config(model_dir: Path, names: frozenset[str]) -> bytes:
    if CONFIG_NAME not in names:
        raise CheckpointError(
            f"holds no {CONFIG_NAME}", where=str(model_dir), fix="give the folder that from_pretrained would take"
        )
    return read_bounded(model_dir / CONFIG_NAME, MAX_CONFIG_BYTES)


def _check_config(config: dict[str, Any], model_dir: Path) -> None:
    for key, value in _quantization_entries(config):
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(
                f"{key} is not a JSON object", where=str(model_dir / CONFIG_NAME), fix="repair the config"
            )


def _quantization_entries(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    return [
        ("quantization_config", config.get("quantization_config")),
        ("text_config.quantization_config", inner),
    ]


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`quantization_config` of a config, else that of its `text_config`."""
    return next((value for _, value in _quantization_entries(config) if isinstance(value, dict)), None)


def _choose_weights(
    model_dir: Path, config: Mapping[str, Any], names: frozenset[str]
) -> tuple[str | None, Index | None, frozenset[str]]:
    """Name of the index, the index, and the weight files."""
    chosen = config.get(_EXPLICIT_KEY)
    if chosen is not None:
        return _explicit_weights(model_dir, chosen)
    if STOCK_INDEX_NAME in names:
        index = read_index(model_dir / STOCK_INDEX_NAME)
        files = frozenset(index.weight_map.values())
        if STOCK_SINGLE_NAME in names and files != {STOCK_SINGLE_NAME}:
            raise CheckpointError(
                f"holds both {STOCK_SINGLE_NAME} and {STOCK_INDEX_NAME}, which names other files; "
                f"stock transformers would read {STOCK_SINGLE_NAME} and ignore the index",
                where=str(model_dir),
                fix="remove the one that is not meant",
            )
        return STOCK_INDEX_NAME, index, files
    if STOCK_SINGLE_NAME in names:
        return None, None, frozenset({STOCK_SINGLE_NAME})
    raise _no_weights(model_dir, names)


def _explicit_weights(model_dir: Path, chosen: object) -> tuple[str | None, Index | None, frozenset[str]]:
    where = str(model_dir / CONFIG_NAME)
    reason = unsafe_name_reason(chosen)
    if reason or not isinstance(chosen, str):
        raise CheckpointError(
            f"{_EXPLICIT_KEY} names {chosen!r}, which is refused: {reason}", where=where, fix="repair the config"
        )
    if chosen.endswith(".safetensors.index.json"):
        index = read_index(model_dir / chosen)
        return chosen, index, frozenset(index.weight_map.values())
    if chosen.endswith(".safetensors"):
        return None, None, frozenset({chosen})
    raise CheckpointError(
        f"{_EXPLICIT_KEY} names {chosen!r}, which is no .safetensors file and no .safetensors.index.json",
        where=where,
        fix="repair the config",
    )


def _no_weights(model_dir: Path, names: frozenset[str]) -> CheckpointError:
    """The error for a directory without stock safetensors weights; looks at names and opens nothing."""

    def ending(suffixes: tuple[str, ...]) -> list[str]:
        return sorted(name for name in names if name.lower().endswith(suffixes))

    where = str(model_dir)
    if found := ending((".safetensors",)):
        return CheckpointError(
            f"holds {_some(found)}, but neither {STOCK_SINGLE_NAME} nor {STOCK_INDEX_NAME}",
            where=where,
            fix=f"add the index, or name the file in {_EXPLICIT_KEY} of {CONFIG_NAME}",
        )
    if found := ending(_PICKLE_SUFFIXES):
        return CheckpointError(
            f"holds only pickle weights ({_some(found)}), which are refused: unpickling can run any code",
            where=where,
            fix=_CONVERT,
        )
    if found := ending(_FOREIGN_SUFFIXES):
        return CheckpointError(
            f"holds weights only in a format that kconvert does not read ({_some(found)})", where=where, fix=_CONVERT
        )
    return CheckpointError(
        f"holds no weights: neither {STOCK_SINGLE_NAME} nor {STOCK_INDEX_NAME}", where=where, fix=_DOWNLOAD
    )


def _check_shards_exist(model_dir: Path, index: Index, index_path: Path) -> None:
    first_tensor: dict[str, str] = {}
    for tensor, file_name in index.weight_map.items():
        first_tensor.setdefault(file_name, tensor)
    for file_name in sorted(first_tensor, key=natural_key):
        problem = file_problem(model_dir / file_name)
        if problem:
            raise CheckpointError(
                f"maps {first_tensor[file_name]!r} to {file_name}, which {problem}",
                where=str(index_path),
                fix=_DOWNLOAD,
            )


def open_file(model_dir: Path, name: str) -> SourceFile:
    """Read the header of a weight file.

    Raises:
        CheckpointError: it is missing or damaged, or changes meanwhile.
    """
    path = model_dir / name
    problem = file_problem(path)
    if problem:
        raise CheckpointError(problem, where=str(path), fix=_DOWNLOAD)
    stamp = FileStamp.of(path)
    header = read_header(path)
    check_stamp(stamp, path, path)
    end = max((tensor.offset + tensor.size_bytes for tensor in header.tensors), default=header.data_offset)
    return SourceFile(name=name, path=path, size_bytes=end, header=header, stamp=stamp)


def collect_tensors(headers: Mapping[str, Header], *, where: str) -> Mapping[str, SourceTensor]:
    """The tensors of files by name, in natural order; `headers` are by file name, `where` names their folder in errors.

    Raises:
        CheckpointError: a tensor is in two files.
    """
    found: dict[str, SourceTensor] = {}
    for file, header in headers.items():
        for entry in header.tensors:
            if entry.name in found:
                raise CheckpointError(
                    f"tensor {entry.name!r} is in two files, {found[entry.name].file} and {file}",
                    where=where,
                    fix=_DOWNLOAD,
                )
            found[entry.name] = SourceTensor(entry.name, entry.dtype, entry.shape, file, entry.offset, entry.size_bytes)
    return MappingProxyType({name: found[name] for name in sorted(found, key=natural_key)})


def check_index(index: Index, tensors: Mapping[str, SourceTensor], *, where: str) -> tuple[str, ...]:
    """Refuse an index that says what the shards do not; gives a warning for tensors that it omits.

    Raises:
        CheckpointError: a tensor is not in the file that the index maps it to.
    """
    for name, file_name in index.weight_map.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.file != file_name:
            elsewhere = f" ({tensor.file} holds it)" if tensor else ""
            raise CheckpointError(
                f"maps {name!r} to {file_name}, which does not hold it{elsewhere}", where=where, fix=_DOWNLOAD
            )
    omitted: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if name not in index.weight_map:
            omitted.setdefault(tensor.file, []).append(name)
    return tuple(
        f"{file_name} holds {len(names)} tensors that {PurePath(where).name} omits ({_some(names)}); they are kept, "
        "as stock transformers reads them too"
        for file_name, names in sorted(omitted.items(), key=lambda item: natural_key(item[0]))
    )


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def is_inside_hub_cache(model_dir: Path) -> bool:
    """Whether a directory is, or lies in, `models--*/snapshots/<rev>` of a Hub cache, by its path or its real path."""
    return bool(hub_repo_dirs(model_dir))
