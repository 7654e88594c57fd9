"""Which class and config a directory's model has, without running code from it unless it is trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from kconvert.errors import CheckpointError, TrustError
from kconvert.files import read_regular
from kconvert.manifest import unique_pairs
from kconvert.names import CONFIG_NAME

__all__ = ["build_meta_model", "load_config", "model_class", "read_config"]


_MOST_CONFIG_BYTES = 64 << 20

_OWN = {
    "attention": ("_attn_implementation_internal", ("eager", "sdpa", "flex_attention")),
    "experts": ("_experts_implementation_internal", ("eager", "batched_mm", "grouped_mm")),
}
"""What is part of transformers and torch.  Anything else may come from the Hub, `flash_attention_2` and `sonicmoe` too."""


def read_config(directory: Path) -> tuple[dict[str, Any], bytes]:
    """`config.json` as data and as it stands in the file.

    Raises:
        CheckpointError: missing or no JSON object.
    """
    path = directory / CONFIG_NAME
    try:
        data = read_regular(path, _MOST_CONFIG_BYTES)
        value = json.loads(data, object_pairs_hook=unique_pairs)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot be read ({error})", where=str(path), fix="download the checkpoint again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError("is no JSON object", where=str(path), fix="download the checkpoint again")
    return value, data


def model_class(directory: Path, config: dict[str, Any], *, trust_remote_code: bool = False) -> type[PreTrainedModel]:
    """The class named in `architectures[0]`: transformers' own, else the directory's where that is trusted.

    Raises:
        CheckpointError: no architecture, or one that transformers does not have.
        TrustError: the class would have to be run from the directory.
    """
    architectures = config.get("architectures")
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        raise CheckpointError(
            "config.json names no architecture", where=str(directory), fix='add "architectures": ["..."]'
        )
    name = architectures[0]
    reference = _remote_reference(config, name)
    if reference is not None and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        found: Any = get_class_from_dynamic_module(reference, str(directory))
    else:
        found = getattr(transformers, name, None)
    if isinstance(found, type) and issubclass(found, PreTrainedModel):
        return found
    if reference is not None:
        raise TrustError(
            f"{name} is defined by code in this directory",
            where=str(directory),
            fix="read it, then pass trust_remote_code=True",
        )
    raise CheckpointError(
        f"transformers {transformers.__version__} has no model class {name}",
        where=str(directory),
        fix="update transformers",
    )


def _remote_reference(config: dict[str, Any], name: str) -> str | None:
    auto_map = config.get("auto_map")
    values = auto_map.values() if isinstance(auto_map, dict) else ()
    return next((value for value in values if isinstance(value, str) and value.rpartition(".")[2] == name), None)


def load_config(directory: Path, cls: type[PreTrainedModel], *, attention: Any = None, experts: Any = None) -> Any:
    """The config object, without the keys by which a data file could redirect loading.

    `transformers_weights` would put another file's tensors into the packed model, and an implementation of attention or
    experts that is not part of transformers may be fetched from the Hub and run.

    Args:
        directory: where config.json is.
        cls: the model class.
        attention, experts: the implementation that the caller chose; config.json has no say then.

    Raises:
        TrustError: config.json asks for foreign code, and the caller chose none.
    """
    if cls.config_class is None:
        raise CheckpointError(f"{cls.__name__} has no config class", where=str(directory))
    config = cls.config_class.from_pretrained(str(directory))
    for each in (config, *_sub_configs(config)):
        each.__dict__.pop("transformers_weights", None)
        for word, chosen in (("attention", attention), ("experts", experts)):
            attribute, own = _OWN[word]
            named = each.__dict__.get(attribute)
            if chosen is not None:
                each.__dict__[attribute] = None
            elif isinstance(named, str) and named not in own:
                option = attribute.strip("_").removesuffix("_internal")
                raise TrustError(
                    f"config.json asks for {word} {named!r}, and transformers may fetch {word} code from the Hub",
                    where=str(directory),
                    fix=f"remove {option} from config.json, and pass {option}= if you want it",
                )
    return config


def _sub_configs(config: Any) -> list[Any]:
    """The configs of the model's parts, and of their parts."""
    found = [value for value in vars(config).values() if hasattr(value, "model_type") and hasattr(value, "to_dict")]
    return [each for value in found for each in (value, *_sub_configs(value))]


def build_meta_model(cls: type[PreTrainedModel], config: Any) -> Any:
    """The model on the meta device with eager attention: structure, no memory."""
    import copy

    import torch

    config = copy.deepcopy(config)
    for each in (config, *_sub_configs(config)):
        each._attn_implementation = "eager"
    with torch.device("meta"):
        return cls(config)
