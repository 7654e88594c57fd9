"""`kconvert inspect`: what a source checkpoint or a converted directory holds, from config, headers and manifest.

Nothing is loaded and no code is run: neither torch nor transformers is imported, no tensor data is read.  A directory
that holds a manifest is a converted one; everything else has to be a source checkpoint, by the rules of `apply`.
Refused: whatever these rules refuse, and a converted directory whose weight files are not what its manifest says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kconvert.checkpoint import (
    MAX_CONFIG_BYTES,
    Checkpoint,
    Converted,
    open_checkpoint,
    open_converted,
    parse_json_object,
    quantization_of,
    read_bounded,
)
from kconvert.cli.inspect_view import show_converted, show_source
from kconvert.cli.options import Json, complete_path
from kconvert.cli.output import print_json, shell_quote, warn
from kconvert.convert.mapped_types import unsettled_names
from kconvert.kernels.specs import layout_specs
from kconvert.manifest import Manifest, PatchRecord, sha256_digest
from kconvert.names import CONFIG_NAME, MANIFEST_NAME
from kconvert.plan import StoredTensor, find_packable, group_tensors, size_by_dtype
from kconvert.recipe import recipes_for

__all__ = ["converted_value", "inspect_command", "source_value"]


def inspect_command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A source checkpoint, or a directory that kconvert wrote.",
            autocompletion=complete_path,
        ),
    ],
    json: Json = False,
) -> None:
    """Show what a checkpoint holds, and what can be packed.

    Takes a source or a converted directory, and reads headers only.
    """
    is_converted = os.path.lexists(path / MANIFEST_NAME)
    value = converted_value(path) if is_converted else source_value(path)
    for message in value["warnings"]:
        warn(message)
    if json:
        print_json(value)
    elif is_converted:
        show_converted(value)
    else:
        show_source(value)


def source_value(model_dir: Path) -> dict[str, Any]:
    """A source checkpoint as plain data.

    Raises:
        CheckpointError: see `open_checkpoint`.
    """
    checkpoint = open_checkpoint(model_dir)
    quantization, kind = checkpoint.quantization, checkpoint.model_type
    obstacle = f"the checkpoint is quantised ({_method(quantization)})" if quantization is not None else None
    return {
        "path": str(model_dir),
        "kind": "source",
        "model_type": kind,
        "architectures": list(checkpoint.architectures),
        **_weights_value(checkpoint.tensors, _file_sizes(checkpoint)),
        **_config_value(checkpoint.config),
        "names_unsettled": unsettled_names(kind) if kind is not None else None,
        "packable": [
            {**asdict(found), "state": found.state.value}
            for found in find_packable(checkpoint.tensors, layout_specs().values(), obstacle=obstacle)
        ],
        "recipes": _fitting_recipes(kind, model_dir),
        "warnings": list(checkpoint.warnings),
    }


def _file_sizes(read: Checkpoint | Converted) -> dict[str, int]:
    return {file.name: file.size_bytes for file in read.files}


def _fitting_recipes(model_type: str | None, model_dir: Path) -> list[dict[str, str]]:
    """The shipped recipes for a model type, each with the command that tries it."""
    names = () if model_type is None else recipes_for(model_type)
    return [{"name": name, "command": f"kconvert plan {name} {shell_quote(str(model_dir))}"} for name in names]


def converted_value(directory: Path) -> dict[str, Any]:
    """A converted directory as plain data.

    Raises:
        ManifestError: the manifest is damaged, or the weight files are not those that it describes.
        CheckpointError: config.json or a weight file is damaged or missing.
    """
    converted = open_converted(directory)
    manifest, tensors = converted.manifest, converted.tensors
    raw = read_bounded(directory / CONFIG_NAME, MAX_CONFIG_BYTES)
    config = parse_json_object(raw, what=CONFIG_NAME, where=str(directory / CONFIG_NAME))
    is_changed = sha256_digest(raw) != manifest.config_digest
    return {
        "path": str(directory),
        "kind": "converted",
        "model_type": manifest.model_type,
        "architectures": [manifest.architecture],
        **_weights_value(tensors, _file_sizes(converted)),
        **_config_value(config),
        "recipe": manifest.recipe_name,
        "kconvert_version": manifest.kconvert_version,
        "transformers_version": manifest.transformers_version,
        "written_by": manifest.written_by,
        "device": manifest.device,
        "devices": list(manifest.devices),
        "view_devices": list(manifest.view_devices),
        "model_checked": manifest.model_checked,
        "patches": [_patch_value(patch, number, manifest, tensors) for number, patch in enumerate(manifest.patches)],
        "carried": list(manifest.carried),
        "omitted": [asdict(item) for item in manifest.omitted],
        "sidecars": list(manifest.sidecars),
        "warnings": [f"{directory}: config.json was changed after the conversion"] if is_changed else [],
    }


def _patch_value(
    patch: PatchRecord, number: int, manifest: Manifest, tensors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    records = [record for record in manifest.tensors if record.patch == number]
    packed = [record for record in records if len(record.parts) > 1]
    return {
        "kind": patch.kind,
        "layout": patch.layout.name,
        "layout_version": patch.layout.version,
        "package": asdict(patch.layout.package) if patch.layout.package is not None else None,
        "patterns": [
            {"class": class_name, "path": path, "matched": [paths[pair] for paths in patch.modules]}
            for pair, (class_name, path) in enumerate(zip(patch.classes, patch.patterns, strict=True))
        ],
        "modules": len(patch.modules),
        "kernels": list(patch.kernels),
        "size_bytes": sum(tensors[record.target].size_bytes for record in records),
        "packed_bytes": sum(tensors[record.target].size_bytes for record in packed),
    }


def _weights_value(tensors: Mapping[str, StoredTensor], file_sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "num_tensors": len(tensors),
        "size_bytes": sum(tensor.size_bytes for tensor in tensors.values()),
        "files": [{"name": name, "size_bytes": size} for name, size in file_sizes.items()],
        "bytes_by_dtype": size_by_dtype(tensors),
        "tensors": [asdict(group) for group in group_tensors(tensors)],
    }


def _config_value(config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says beside the model's class; None where it does not say."""
    text = config.get("text_config")
    places = (config, text if isinstance(text, dict) else {})
    tied = next((place["tie_word_embeddings"] for place in places if "tie_word_embeddings" in place), None)
    quantization = quantization_of(config)
    return {
        "tied_embeddings": tied if isinstance(tied, bool) else None,
        "quantization": quantization,
        "quantization_method": _method(quantization) if quantization is not None else None,
    }


def _method(quantization: Mapping[str, Any]) -> str:
    return str(quantization.get("quant_method", "unknown method"))
