"""Output shards: which tensors lie in which file, and in what order.

By default the source's own sharding: a tensor goes where its first origin lies.  With a limit, tensors fill one shard
after another in the order in which a model runs, which is told from their names alone, so that a plan is the same with
and without the model.  Within a shard wide items come first, because a safetensors file has no holes and a loader wants
tensors aligned to their item size.

A shard that would hold just what a file of the source holds is that file, byte for byte: it keeps its header and order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kconvert.checkpoint import DTYPE_BITS, SourceFile
from kconvert.errors import UsageError
from kconvert.names import SINGLE_NAME, shard_name
from kconvert.plan.model import OutputShard, Step

__all__ = ["execution_rank", "output_shards"]

_EMBEDDINGS, _ENCODER_LAYERS, _LAYERS, _REST, _HEADS = range(5)

_SEGMENTS: Mapping[int, str] = {
    # token, position and patch embeddings, and the norms on them
    _EMBEDDINGS: "embed_tokens embed_in embed_positions embed_tokens_per_layer vision_embed_tokens embeddings "
    "word_embeddings word_embedding token_embedding tokens_embed tok_embeddings input_embedding segment_embedding wte wpe "
    "shared position_embeddings position_embedding positions_embed pos_embed patch_embed patch_embedder patch_embedding "
    "patch_conv class_embedding gated_positional_embedding pre_tile_positional_embedding layernorm_embedding "
    "word_embeddings_layernorm embeddings_layer_norm",
    # what holds layers whose output goes into other layers
    _ENCODER_LAYERS: "visual vision_tower vision_model vision_encoder image_tower image_encoder video_tower audio_tower "
    "audio_model audio_encoder protein_encoder local_encoder encoder patcher qformer connector merger projector "
    "multi_modal_projector aligner",
    _HEADS: "lm_head lm_heads lm_loss embed_out output_projection generator_lm_head generator_predictions pred_layer cls",
}
_TOP_HEADS = "head output proj_out score classifier"
"""What means something else further down, such as the pooling head of a vision tower."""

_RANKS: Mapping[str, int] = {segment: rank for rank, listed in _SEGMENTS.items() for segment in listed.split()}
_TOP_RANKS: Mapping[str, int] = {**_RANKS, **dict.fromkeys(_TOP_HEADS.split(), _HEADS)}


def execution_rank(name: str) -> int:
    """Where a tensor comes in the order in which a model reads them; among those of one rank in natural order.

    Embeddings first, then what lies in numbered layers, those of encoders before the layers that they feed, then the rest,
    such as a final norm, and heads last.  The first segment that says something decides: an embedding inside of layer 61
    belongs to that layer.  Segments are called as in the causal and vision models of transformers.
    """
    layers, ranks = _LAYERS, _TOP_RANKS
    for segment in name.split("."):
        if segment.isdecimal():
            return layers
        rank = ranks.get(segment)
        if rank == _ENCODER_LAYERS:
            layers = rank
        elif rank is not None:
            return rank
        ranks = _RANKS
    return _REST


def output_shards(
    steps: Sequence[Step], files: Sequence[SourceFile], max_shard_bytes: int | None = None
) -> tuple[OutputShard, ...]:
    """The output files, with every step in one of them; none is empty.

    Args:
        steps: in natural order of their targets.
        files: the source's weight files, in natural order.
        max_shard_bytes: the most tensor data in a shard; a larger tensor has a shard of its own.  None for the source's
            sharding.

    Raises:
        UsageError: `max_shard_bytes` below 1.
    """
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise UsageError(f"a shard of at most {max_shard_bytes} bytes holds nothing", fix="give 1 or more")
    ordered = sorted(steps, key=lambda step: execution_rank(step.target))
    groups = _as_in_source(ordered, files) if max_shard_bytes is None else _filled(ordered, max_shard_bytes)
    sources = {file.name: file for file in files}
    return tuple(
        _shard(SINGLE_NAME if len(groups) == 1 else shard_name(number, len(groups)), group, sources)
        for number, group in enumerate(groups, start=1)
    )


def _as_in_source(ordered: Sequence[Step], files: Sequence[SourceFile]) -> list[list[Step]]:
    by_file: dict[str, list[Step]] = {file.name: [] for file in files}
    for step in ordered:
        by_file[step.origins[0].file].append(step)
    return [group for group in by_file.values() if group]


def _filled(ordered: Sequence[Step], max_shard_bytes: int) -> list[list[Step]]:
    groups: list[list[Step]] = []
    room = 0
    for step in ordered:
        if not groups or step.size_bytes > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(step)
        room -= step.size_bytes  # below zero behind a larger tensor, so that nothing joins it
    return groups


def _shard(name: str, steps: Sequence[Step], files: Mapping[str, SourceFile]) -> OutputShard:
    """The steps (in execution order) as a file."""
    file = files[steps[0].origins[0].file]
    if _is_unchanged(steps, file):
        by_name = {step.target: step for step in steps}
        return OutputShard(name, tuple(by_name[entry.name] for entry in file.header.tensors), same_as=file.name)
    return OutputShard(name, tuple(sorted(steps, key=lambda step: -DTYPE_BITS[step.dtype])))


def _is_unchanged(steps: Sequence[Step], file: SourceFile) -> bool:
    """Whether a file of these steps may be `file`, byte for byte; transformers loads none without `format`."""
    return (
        len(steps) == len(file.header.tensors)
        and (file.header.metadata or {}).get("format") == "pt"
        and all(
            not step.is_transformed and (step.target, file.name) == (step.origins[0].name, step.origins[0].file)
            for step in steps
        )
    )
