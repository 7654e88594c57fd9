"""Checks around loading: files before it, the model after it.

transformers only logs what is missing or unexpected and goes on with random weights.  Here each of these is
an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.core_model_loading import dot_natural_key

from kconvert.errors import LoadError, ManifestError, UsageError
from kconvert.files import check_regular, read_regular
from kconvert.manifest import Manifest, unique_pairs
from kconvert.names import INDEX_NAME, SINGLE_NAME, unsafe_name_reason
from kconvert.runtime.stock_names import StockNames

__all__ = ["check_files", "check_loaded", "refuse_arguments"]

_MOST_INDEX_BYTES = 512 << 20

_REFUSED = {
    "config": "edit config.json in the directory, or pass config values as keyword arguments",
    "gguf_file": "load the GGUF with transformers and convert what you save",
    "ignore_mismatched_sizes": "convert the checkpoint again",
    "key_mapping": "names are settled at conversion",
    "state_dict": "call load_state_dict on the loaded model; it takes stock names too",
    "subfolder": "pass the subfolder as the path",
    "variant": "the variant of a converted directory is fixed",
    "load_in_4bit": "quantise the stock model; packed layouts cannot be quantised at load yet",
    "load_in_8bit": "quantise the stock model; packed layouts cannot be quantised at load yet",
    "quantization_config": "quantise the stock model; packed layouts cannot be quantised at load yet",
    "tp_plan": "packed layouts cannot be sharded at load yet",
    "tp_size": "packed layouts cannot be sharded at load yet",
    "device_mesh": "packed layouts cannot be sharded at load yet",
    "distributed_config": "packed layouts cannot be sharded at load yet",
}


def refuse_arguments(kwargs: Mapping[str, Any]) -> None:
    """Refuse `from_pretrained` arguments that a converted checkpoint cannot honour.

    Raises:
        UsageError: (a `ValueError`) naming the argument.
    """
    if kwargs.get("use_safetensors") is False:
        raise UsageError(
            "load_converted does not take use_safetensors=False", fix="converted weights are always safetensors"
        )
    for name, fix in _REFUSED.items():
        if kwargs.get(name) not in (None, False):
            raise UsageError(f"load_converted does not take {name}", fix=fix)


def check_files(directory: Path, manifest: Manifest) -> None:
    """Compare the weight files with the manifest: one form, safe names, the same tensors and shapes.

    Raises:
        ManifestError: anything differs.
    """
    where, fix = str(directory), "convert the checkpoint again"
    if (directory / "adapter_config.json").exists():  # from_pretrained would follow it to another base model
        raise ManifestError("adapter_config.json is here, which kconvert did not write", where=where, fix="remove it")
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    if single.exists() and index.exists():
        raise ManifestError(f"both {SINGLE_NAME} and {INDEX_NAME} are here, from two conversions", where=where, fix=fix)
    files = [SINGLE_NAME] if single.exists() else _indexed_files(index)
    if sorted(files) != sorted(manifest.weight_files):
        raise ManifestError(
            f"weight files are {sorted(files)}, the manifest has {sorted(manifest.weight_files)}", where=where, fix=fix
        )
    found: dict[str, list[int]] = {}
    for name in files:
        try:
            check_regular(directory / name)
            with safe_open(str(directory / name), framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a dict
                    if key in found:
                        raise ManifestError(f"tensor {key!r} is in two files", where=where, fix=fix)
                    found[key] = list(opened.get_slice(key).get_shape())
        except (OSError, SafetensorError) as error:
            raise ManifestError(f"cannot be read ({error})", where=str(directory / name), fix=fix) from None
    expected = {record.target: list(record.shape) for record in manifest.tensors}
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise ManifestError(
            f"tensor {wrong[0]!r} is {found.get(wrong[0], 'absent')} in the files and {expected.get(wrong[0], 'absent')} "
            f"in the manifest ({len(wrong)} differ)",
            where=where,
            fix=fix,
        )


def _indexed_files(index: Path) -> list[str]:
    try:
        value = json.loads(read_regular(index, _MOST_INDEX_BYTES), object_pairs_hook=unique_pairs)
        names = sorted(set(value["weight_map"].values()))
        if not isinstance(value["metadata"], dict):  # which transformers reads
            raise ValueError("its metadata is no JSON object")
    except FileNotFoundError:
        raise ManifestError(
            "no converted weights here", where=str(index.parent), fix="convert the checkpoint again"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"cannot be read ({error})", where=str(index), fix="convert the checkpoint again") from None
    for name in names:
        reason = unsafe_name_reason(name)
        if reason:
            raise ManifestError(f"file name {name!r} is {reason}", where=str(index), fix="do not use this checkpoint")
    return names


def check_loaded(model: Any, info: Mapping[str, Any], manifest: Manifest) -> None:
    """Raise unless every parameter came from the files, and only the carried tensors were left over.

    Raises:
        LoadError: missing, unexpected or mismatched tensors, ties that do not hold, or tensors left on meta.
    """
    fix = "convert again with this transformers version"
    if not manifest.model_checked:
        fix = "convert again with the model check, which says what the checkpoint lacks"
    for kind in ("missing_keys", "mismatched_keys", "error_msgs", "conversion_errors"):
        if info.get(kind):
            first = sorted(map(str, info[kind]))[0]
            raise LoadError(f"{len(info[kind])} {kind.replace('_', ' ')} while loading, e.g. {first}", fix=fix)
    written = {record.target for record in manifest.tensors}
    state = model.state_dict()
    left_over = written - state.keys()
    allowed = (
        set(manifest.carried)
        if manifest.model_checked
        else {record.target for record in manifest.tensors if record.patch is None}
    )
    known = _reported(model, written, left_over & allowed, fix)
    stray = (left_over - allowed) | (set(info.get("unexpected_keys", ())) - known)
    if stray:
        raise LoadError(f"the model has no place for {len(stray)} tensors, e.g. {sorted(stray)[0]}", fix=fix)
    if manifest.model_checked and left_over != allowed:
        raise LoadError(f"{sorted(allowed - left_over)[0]!r} was carried along, and now the model has it", fix=fix)
    _check_ties(model, written)
    if "disk" not in (getattr(model, "hf_device_map", None) or {}).values() and not _is_offloaded(model):
        on_meta = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
        if on_meta:
            raise LoadError(f"{len(on_meta)} tensors were left without data, e.g. {on_meta[0]}", fix=fix)


def _reported(model: Any, written: Collection[str], carried: Collection[str], fix: str) -> set[str]:
    """What the loader calls the `carried` tensors of those that are `written`.

    Raises:
        LoadError: it has taken one of them for a tensor of the model.
    """
    if not carried:
        return set()
    names = StockNames(model)
    known = {*carried}
    for name in sorted(written, key=dot_natural_key):  # all, in the loader's order: a rule may depend on earlier names
        found = names.reported(name)
        if name not in carried:
            continue
        taken = found & names.state.keys()
        if taken:
            raise LoadError(f"transformers took {name!r}, which was carried along, for {min(taken)!r}", fix=fix)
        known |= found
    return known


def _is_offloaded(model: Any) -> bool:
    devices = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    return len(devices) > 1 and "cpu" in devices


def _check_ties(model: Any, written: set[str]) -> None:
    state = model.state_dict(keep_vars=True)
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if target in written and source in written:
            continue  # both are stored, with values of their own: transformers keeps them apart
        if target in state and source in state and state[target] is not state[source]:
            raise LoadError(
                f"{target!r} is tied to {source!r}, but they are two tensors after loading",
                fix="load models one at a time: transformers changes global state while it loads",
            )
