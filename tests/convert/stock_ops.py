"""transformers' converters on real tensors, beside ours on the same: for every op that it has.

`CASES` has examples per op, by the class name in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from transformers import core_model_loading as stock
from transformers.core_model_loading import WeightConverter

from kconvert.convert.adapter import operations_of
from kconvert.kernels.rearrange import rearrange
from kconvert.transforms import BoundRule, Collected, whole

__all__ = ["CASES", "PREFIX", "Case", "converted_by_stock", "converted_by_us", "op_names", "tensors_of"]

PREFIX = "model.layers.10."
Tensors: TypeAlias = dict[str, list[torch.Tensor]]
"""Source pattern to the tensors that it matched, in order."""


@dataclass(frozen=True)
class Case:
    """A converter, the shapes of what each source pattern matches, and what the model says.

    `shapes_in_model` are by target pattern; the ops are made when they are asked for, as an older transformers may
    lack one.
    """

    operations: Callable[[], Sequence[Any]]
    sources: Mapping[str, Sequence[tuple[int, ...]]]
    targets: Sequence[str]
    config: Any = None
    shapes_in_model: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def converter(self) -> WeightConverter:
        return WeightConverter(list(self.sources), list(self.targets), operations=list(self.operations()))

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self.shapes_in_model.get(name.removeprefix(PREFIX))


def op_names() -> list[str]:
    """The conversion ops of the installed transformers, by introspection."""
    base = stock.ConversionOps
    return sorted(
        name
        for name, value in vars(stock).items()
        if isinstance(value, type)
        and issubclass(value, base)
        and value is not base
        and value.__module__ == stock.__name__
    )


def tensors_of(case: Case, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    """Random tensors for every source pattern."""
    generator = torch.Generator().manual_seed(seed)
    return {
        pattern: [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        for pattern, shapes in case.sources.items()
    }


def converted_by_stock(
    case: Case, tensors: Tensors, converter: WeightConverter | None = None
) -> dict[str, torch.Tensor]:
    """Full target name to what transformers' own ops make of the tensors."""
    made_by: Any = converter or case.converter()
    for pattern, found in tensors.items():
        for number, tensor in enumerate(found):
            made_by.add_tensor("target", f"source {number}", pattern, tensor)
    model = SimpleNamespace(get_parameter=lambda name: torch.empty(_known(case, name), device="meta"))
    made = made_by.convert(PREFIX + made_by.target_patterns[0], model=model, config=case.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _known(case: Case, name: str) -> tuple[int, ...]:
    shape = case.shape_of(name)
    if shape is None:
        raise AttributeError(name)
    return shape


def converted_by_us(case: Case, tensors: Tensors, converter: WeightConverter | None = None) -> dict[str, torch.Tensor]:
    """The same by the adapter and arrangements."""
    converter = converter or case.converter()
    flat = {
        f"{PREFIX}{pattern.replace('*', str(number))}#{number}": tensor
        for pattern, found in tensors.items()
        for number, tensor in enumerate(found)
    }
    names = iter(flat)
    collected = tuple(Collected(pattern, tuple(next(names) for _ in found)) for pattern, found in tensors.items())
    targets = tuple(converter.target_patterns)
    rule = BoundRule(collected, PREFIX + targets[0], operations_of(converter, lambda: case.config), targets)
    made = rule.arrange({name: whole(name, tuple(tensor.shape)) for name, tensor in flat.items()}, case.shape_of)
    return {name: rearrange(arrangement, flat) for name, arrangement in made.items()}


def _heads(count: int, **more: Any) -> Any:
    return SimpleNamespace(num_attention_heads=count, **more)


def _op(name: str, *args: Any, **kwargs: Any) -> Callable[[], list[Any]]:
    return lambda: [getattr(stock, name)(*args, **kwargs)]


def _ops(*each: tuple[Any, ...]) -> Callable[[], list[Any]]:
    return lambda: [getattr(stock, name)(*args) for name, *args in each]


_QKV = {"q.weight": [(12, 6)], "k.weight": [(8, 6)], "v.weight": [(8, 6)]}
_HALVES = ["gate.weight", "up.weight"]
_SHARDS = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_shards=3))
_EXPERTS = {"experts.*.gate.weight": [(3, 4)] * 12, "experts.*.up.weight": [(3, 4)] * 12}
_BOTH = ["text.gate_up", "vision.gate_up"]

CASES: Mapping[str, Sequence[Case]] = {
    "Chunk": [
        Case(_op("Chunk", 0), {"qkv.weight": [(12, 5)]}, list(_QKV)),
        Case(_op("Chunk", 1), {"gate_up.weight": [(5, 8)]}, _HALVES),
        Case(_op("Chunk", -1), {"gate_up.weight": [(2, 5, 7)]}, _HALVES),
        Case(_op("Chunk", 0), {"uneven": [(7, 2)]}, ["one.x", "two.x", "three.x"]),
        Case(lambda: [stock.Chunk(0, "num_shards")], {"embed.weight": [(8, 2)]}, ["shards.*.weight"], _SHARDS),
    ],
    "Concatenate": [
        Case(_op("Concatenate", 0), _QKV, ["qkv.weight"]),
        Case(_op("Concatenate", 1), {"a": [(3, 2)], "b": [(3, 5)]}, ["c"]),
        Case(_op("Concatenate", -1), {"b": [(2, 3, 2)], "a": [(2, 3, 1)]}, ["c"]),
        Case(_op("Concatenate", 0), {"a": [(3,)], "b": [(0,)]}, ["c"]),
        Case(_op("Concatenate", 0), {"shards.*.weight": [(2, 3), (2, 3), (1, 3)]}, ["embed.weight"]),
    ],
    "Conv3dToLinear": [
        Case(_op("Conv3dToLinear", 3, (2, 4, 4)), {"proj.weight": [(5, 3, 2, 4, 4)]}, ["proj.linear"]),
        Case(_op("Conv3dToLinear", 3, (2, 4, 4)), {"proj.weight": [(5, 96)]}, ["proj.linear"]),
    ],
    "ErnieFuseAndSplitTextVisionExperts": [
        Case(_op("ErnieFuseAndSplitTextVisionExperts"), _EXPERTS, _BOTH),
        Case(_op("ErnieFuseAndSplitTextVisionExperts", 0, 2), _EXPERTS, _BOTH),
        Case(
            _op("ErnieFuseAndSplitTextVisionExperts"), {name: [(3, 4)] * 5 for name in _EXPERTS}, _BOTH
        ),  # three and two
    ],
    "ErnieSplitAndDecoupleTextVisionExperts": [
        Case(
            _op("ErnieSplitAndDecoupleTextVisionExperts"), {name: [(6, 6, 4)] for name in _BOTH}, list(_EXPERTS)
        ),
        Case(
            _op("ErnieSplitAndDecoupleTextVisionExperts"),
            {"text.gate_up": [(3, 6, 4)], "vision.gate_up": [(2, 6, 4)]},
            list(_EXPERTS),
        ),
    ],
    "Interleave": [
        Case(_op("Interleave", 0), {"a": [(8, 3)]}, ["b"]),
        Case(_op("Interleave", 1), {"a": [(2, 6)]}, ["b"]),
        Case(_op("Interleave", 2, inverse=True), {"a": [(2, 3, 10)]}, ["b"]),
        Case(_ops(("Interleave", 2), ("Transpose", 1, 2)), {"gate_up": [(3, 4, 6)]}, ["packed"]),
        Case(_ops(("Interleave", 1), ("Chunk", 1)), {"gate_up": [(3, 8, 2)]}, _HALVES),
    ],
    "LinearToConv3d": [
        Case(_op("LinearToConv3d", 3, (2, 4, 4)), {"proj.linear": [(5, 96)]}, ["proj.weight"]),
    ],
    "MergeModulelist": [
        Case(_op("MergeModulelist", 0), {"experts.*.down.weight": [(4, 3)] * 12}, ["experts.down"]),
        Case(_op("MergeModulelist", 1), {"experts.*.down.weight": [(4, 3)] * 3}, ["experts.down"]),
        Case(_ops(("MergeModulelist", 0), ("Concatenate", 1)), _EXPERTS, ["experts.gate_up"]),
        Case(
            _ops(("MergeModulelist", 0), ("Concatenate", 1), ("Transpose", 1, 2)), _EXPERTS, ["experts.gate_up"]
        ),
    ],
    "PermuteForRope": [
        Case(_op("PermuteForRope"), {"q.weight": [(12, 5)]}, ["q_proj.weight"], _heads(3)),
        Case(_op("PermuteForRope", inverse=True), {"q.weight": [(12, 5)]}, ["q_proj.weight"], _heads(2)),
        Case(_op("PermuteForRope"), {"q.bias": [(12,)]}, ["q_proj.bias"], _heads(3)),
        Case(_op("PermuteForRope"), {"q.conv": [(12, 2, 2)]}, ["q_proj.conv"], _heads(3)),
        Case(_op("PermuteForRope"), {"q.weight": [(12, 5)]}, ["q_proj.weight"], SimpleNamespace()),
        Case(
            _op("PermuteForRope", "vision_config"),
            {"q.weight": [(12, 5)]},
            ["q_proj.weight"],
            _heads(1, vision_config=_heads(3)),
        ),
        Case(
            lambda: [stock.Chunk(0), stock.PermuteForRope(None, ["q.weight", "k.weight"])],
            {"qkv.weight": [(24, 5)]},
            list(_QKV),
            _heads(2),
        ),
        Case(
            lambda: [stock.PermuteForRope(None, ["q.weight", "k.weight"], inverse=True), stock.Concatenate(0)],
            {name: [(12, 6)] for name in _QKV},
            ["qkv.weight"],
            _heads(2),
        ),
    ],
    "Split": [
        Case(
            _op("Split", 0),
            {"qkv.weight": [(28, 6)]},
            list(_QKV),
            shapes_in_model={name: shape for name, (shape,) in _QKV.items()},
        ),
        Case(
            _op("Split", 1),
            {"both": [(2, 7)]},
            ["a.weight", "b.weight"],
            shapes_in_model={"a.weight": (2, 5), "b.weight": (2, 2)},
        ),
    ],
    "SplitModulelist": [
        Case(_op("SplitModulelist", 0), {"experts.down": [(12, 4, 3)]}, ["experts.*.down.weight"]),
        Case(_op("SplitModulelist", 1), {"experts.down": [(4, 3, 2)]}, ["experts.*.down.weight"]),
        Case(_ops(("Chunk", 1), ("SplitModulelist", 0)), {"experts.gate_up": [(12, 6, 4)]}, list(_EXPERTS)),
    ],
    "Transpose": [
        Case(_op("Transpose", 0, 1), {"a": [(3, 5)]}, ["b"]),
        Case(_op("Transpose", -1, -2), {"a": [(2, 3, 5)]}, ["b"]),
        Case(_op("Transpose", 0, 2), {"a": [(2, 3, 5)]}, ["b"]),
        Case(_ops(("Transpose", 1, 2), ("Chunk", 1)), {"gate_up": [(2, 3, 8)]}, _HALVES),
        Case(lambda: [stock.Transpose(0, 1, check_dims=True)], {"a": [(3, 5)]}, ["b"], shapes_in_model={"a": (3, 5), "b": (5, 3)}),
        Case(lambda: [stock.Transpose(0, 1, check_dims=True)], {"a": [(3, 5)]}, ["b"], shapes_in_model={"a": (3, 5), "b": (3, 5)}),
    ],
    "VisionFuseAndPermuteForRope": [
        Case(
            _op("VisionFuseAndPermuteForRope", 0, ["q.weight", "k.weight"]),
            {"q.weight": [(12, 5)], "k.weight": [(12, 5)], "v.weight": [(12, 5)]},
            ["qkv.weight"],
            _heads(1, vision_config=_heads(3)),
        ),
    ],
    "VisionUnfuseAndPermuteForRope": [
        Case(
            _op("VisionUnfuseAndPermuteForRope", 0, ["q.weight", "k.weight"]),
            {"qkv.weight": [(36, 5)]},
            ["q.weight", "k.weight", "v.weight"],
            _heads(1, vision_config=_heads(3)),
        ),
    ],
}  # fmt: skip
