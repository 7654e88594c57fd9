"""Checkpoints as anybody may have written them, with any ops on the way to the converted form; imports no torch.

A checkpoint has modules `m0`, `m1`, ... whose tensors are baked by one chain of ops and packed by another, and tensors
outside of all.  Its files are written by hand: headers with any spaces, order of keys and metadata, indexes of any style.
`convert_case` writes the converted directory through the planner and the rewrite, with rules in the place of a model's.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from kconvert.checkpoint import DTYPE_BITS
from kconvert.convert import build_job, final_items
from kconvert.convert.prepare import Prepared, open_source
from kconvert.convert.record import build_manifest
from kconvert.convert.resolve import ResolvedRecipe
from kconvert.manifest import LayoutRecord
from kconvert.patterns import PathPattern
from kconvert.plan import Entry, ModuleTensor, Pair, build_plan
from kconvert.recipe import parse_recipe, profile_of
from kconvert.rewrite import Writing
from kconvert.transforms import (
    BoundRule,
    Chunk,
    Collected,
    Concatenate,
    Interleave,
    Operation,
    PermuteHeads,
    Reshape,
    Stack,
    StackHalves,
    Transpose,
    Unstack,
    UnstackHalves,
    whole,
)

__all__ = ["Case", "Module", "Tensor", "cases", "convert_case", "write_case"]

RECIPE = "recipe: 1\nname: generated\nmodel_type: [made_up]\nbake: true\npatches: []\n"
HALVES = ("F16", "BF16", "F32")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """A tensor of the source: its name in the files, dtype and shape."""

    name: str
    dtype: str
    shape: Shape

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Module:
    """A module of the model: its tensors in the files, how they are baked and packed, and the dtype of what is joined."""

    path: str
    tensors: tuple[Tensor, ...]
    baking: tuple[BoundRule, ...]
    packing: tuple[BoundRule, ...]
    dtype: str | None = None

    def baked(self) -> tuple[ModuleTensor, ...]:
        """The stock model's tensors out of those of the files."""
        shapes = {tensor.name: tensor.shape for tensor in self.tensors}
        return tuple(
            ModuleTensor(name, made, rule.label if rule.operations else "copy")
            for rule in self.baking
            for name, made in rule.arrange({name: whole(name, shapes[name]) for name in rule.sources}).items()
        )


@dataclass(frozen=True)
class Case:
    """A whole source, as data.

    Attributes:
        modules, others: all tensors.
        files: file name to its tensors, in the order of their data.
        seed: for the bytes, and the way in which headers are written.
        index: the name of the index and the indent of its text; None for a single file.
        sidecars: name to content.
        max_shard_bytes, digests: of the conversion.
        runs: runs shorter than these bytes are gathered, and this is the size of what is gathered and copied at a time.
    """

    modules: tuple[Module, ...]
    others: tuple[Tensor, ...]
    files: Mapping[str, tuple[Tensor, ...]]
    seed: int
    index: tuple[str, int | None] | None
    sidecars: Mapping[str, bytes] = field(default_factory=dict)
    max_shard_bytes: int | None = None
    digests: bool = False
    runs: tuple[int, int] = (64 << 10, 8 << 20)


# --- writing a source -------------------------------------------------------------------------------------


def write_case(directory: Path, case: Case) -> Path:
    """The source of a case, with files that are left out when it is converted."""
    rng = random.Random(case.seed)
    directory.mkdir(parents=True)
    config: dict[str, Any] = {"model_type": "made_up", "architectures": ["MadeUp"], "seed": case.seed}
    chosen = case.index[0] if case.index is not None else next(iter(case.files))
    if chosen not in ("model.safetensors", "model.safetensors.index.json"):
        config["transformers_weights"] = chosen
    (directory / "config.json").write_text(json.dumps(config, indent=rng.choice([None, 1, 4])), encoding="utf-8")
    for name, tensors in case.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        header = _header(tensors, rng)
        data = rng.randbytes(sum(tensor.size_bytes for tensor in tensors))
        path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    if case.index is not None:
        (directory / case.index[0]).write_bytes(_index(case, case.index[1], rng))
    for name, content in case.sidecars.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    (directory / "pytorch_model.bin").write_bytes(b"left out")
    return directory


def _header(tensors: Sequence[Tensor], rng: random.Random) -> bytes:
    """The JSON of a file's header, as one of many writers would write it."""
    fields: list[tuple[str, Any]] = []
    begin = 0
    for tensor in tensors:
        entry = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.size_bytes],
        }
        fields.append((tensor.name, dict(rng.sample([*entry.items()], 3))))
        begin += tensor.size_bytes
    rng.shuffle(fields)
    metadata = rng.choice([None, {}, {"format": "pt"}, {"format": "pt", "by": "größe \n\t\\ 層", "": ""}])
    if metadata is not None:
        fields.insert(rng.randrange(len(fields) + 1), ("__metadata__", metadata))
    separators = rng.choice([(",", ":"), (", ", ": "), (" ,\n", "\t: ")])
    text = json.dumps(dict(fields), ensure_ascii=rng.random() < 0.5, separators=separators)
    return text.encode() + b" " * rng.choice([0, 0, 1, 7, 8, 63])


def _index(case: Case, indent: int | None, rng: random.Random) -> bytes:
    weight_map = [(tensor.name, name) for name, tensors in case.files.items() for tensor in tensors]
    rng.shuffle(weight_map)
    index: dict[str, Any] = {"weight_map": dict(weight_map)}
    metadata = rng.choice([None, {}, {"total_size": 3}, {"total_size": "many", "author": "größe"}])
    if metadata is not None:
        index = {"metadata": metadata, **index} if rng.random() < 0.5 else {**index, "metadata": metadata}
    return (json.dumps(index, indent=indent, ensure_ascii=rng.random() < 0.5) + rng.choice(["", "\n"])).encode()


# --- converting it ----------------------------------------------------------------------------------------


def convert_case(source: Path, output: Path, case: Case) -> Path:
    """Convert a written case; gives `output`.

    Raises:
        CheckpointError: a chain would cut a byte that holds several values.
    """
    entries = tuple(
        Entry(
            number=number,
            where="generated",
            kind="replace",
            pairs=(Pair("Made", PathPattern.parse(module.path), "generated"),),
            kernels=("cpu_fused_swiglu",),
            layout=LayoutRecord("gated_mlp", 1),
            changes_parameters=True,
            bind=lambda paths, names, module=module: module.packing,  # type: ignore[misc]
            dtype=module.dtype,
        )
        for number, module in enumerate(case.modules)
    )
    opened = open_source(profile_of(parse_recipe(RECIPE, "generated"), None), source, resolved=ResolvedRecipe(entries))
    tensors = [tensor for module in case.modules for tensor in module.baked()]
    tensors += [ModuleTensor(tensor.name, whole(tensor.name, tensor.shape)) for tensor in case.others]
    plan = build_plan(opened.checkpoint, entries, tensors=tensors, max_shard_bytes=case.max_shard_bytes)
    manifest = build_manifest(
        opened.checkpoint, opened.profile, plan, opened.sidecars, opened.sidecar_digests, opened.headers
    )
    prepared = Prepared(opened, plan, manifest, (), 0.0)
    with Writing(build_job(opened, plan, digests=case.digests), output) as writing:
        writing.publish(final_items(prepared, writing.wait()))
    return output


# --- making one up ----------------------------------------------------------------------------------------

_SHAPES: tuple[Shape, ...] = ((4, 6), (4, 6), (8, 6), (4, 12), (2, 4, 6), (12,), (6,), (1, 8), (2, 2, 2, 3), (0, 6), ())
_BYTE_SHAPES: tuple[Shape, ...] = ((2, 8), (2, 8), (4, 8), (2, 2, 8))
"""For dtypes below a byte: the last axis, which is left alone, is a whole number of bytes."""
_SIDECARS = st.dictionaries(
    st.sampled_from(
        [
            "tokenizer.json",
            "README.md",
            "chat_template.jinja",
            "größe.txt",
            "onnx/deep/model.onnx",
            "projector.safetensors",
            "modeling_made_up.py",
            "1_Pooling/config.json",
        ]
    ),
    st.binary(max_size=40),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any source; where no shard would have a tensor it has one outside the modules."""
    modules = tuple(draw(_modules(number)) for number in range(draw(st.integers(0, 3))))
    others = draw(_others(at_least=0 if modules else 1))
    tensors = draw(st.permutations([*others, *(tensor for module in modules for tensor in module.tensors)]))
    files, index = draw(_sharding(tensors))
    return Case(
        modules,
        others,
        files,
        draw(st.integers(0, 2**32)),
        index,
        draw(_SIDECARS),
        draw(st.sampled_from([None, None, 1, 100, 1000])),
        draw(st.booleans()),
        draw(st.sampled_from([(64 << 10, 8 << 20), (1, 64), (16, 48), (64 << 10, 40)])),
    )


@st.composite
def _others(draw: st.DrawFn, at_least: int) -> tuple[Tensor, ...]:
    names = draw(
        st.lists(
            st.sampled_from(
                [
                    "lm_head.weight",
                    "model.embed_tokens.weight",
                    "scale",
                    "größe.層",
                    'quote"\\.weight',
                    "mtp.2.x",
                    "mtp.10.x",
                    "\U0001f600",
                    "a" * 300,
                    "tab\t.x",
                ]
            ),
            unique=True,
            min_size=at_least,
            max_size=6,
        )
    )
    shapes: st.SearchStrategy[Shape] = st.sampled_from([(), (0, 3), (5, 3), (1,), (3,)])
    return tuple(
        Tensor(name, dtype, draw(shapes) if DTYPE_BITS[dtype] >= 8 else draw(st.sampled_from(_BYTE_SHAPES)))
        for name, dtype in ((name, draw(st.sampled_from(sorted(DTYPE_BITS)))) for name in names)
    )


@st.composite
def _sharding(
    draw: st.DrawFn, tensors: Sequence[Tensor]
) -> tuple[Mapping[str, tuple[Tensor, ...]], tuple[str, int | None] | None]:
    count = draw(st.integers(1, 4))
    places = draw(st.lists(st.integers(0, count - 1), min_size=len(tensors), max_size=len(tensors)))
    shards = [[t for t, place in zip(tensors, places, strict=True) if place == number] for number in range(count)]
    shards = [shard for shard in shards if shard]
    if len(shards) == 1 and draw(st.booleans()):
        return {draw(st.sampled_from(["model.safetensors", "own.safetensors"])): tuple(shards[0])}, None
    pattern = draw(
        st.sampled_from(["model-{:05d}-of-00004.safetensors", "sub/größe-{}.safetensors", "{}/model.safetensors"])
    )
    indent = draw(st.sampled_from([None, 0, 2]))
    name = draw(st.sampled_from(["model.safetensors.index.json", "own.safetensors.index.json"]))
    return {pattern.format(number): tuple(shard) for number, shard in enumerate(shards, start=1)}, (name, indent)


@st.composite
def _modules(draw: st.DrawFn, number: int) -> Module:
    path = f"m{number}"
    dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
    is_whole = DTYPE_BITS[dtype] >= 8
    shapes = draw(st.lists(st.sampled_from(_SHAPES if is_whole else _BYTE_SHAPES), min_size=1, max_size=6))
    joined = draw(st.sampled_from([None, None, "F32"])) if dtype in HALVES else None
    dtypes = [draw(st.sampled_from(HALVES)) if joined is not None else dtype for _ in shapes]
    tensors = tuple(
        Tensor(f"files.{number}.t{place}", *each) for place, each in enumerate(zip(dtypes, shapes, strict=True))
    )
    inputs = {tensor.name: tensor.shape for tensor in tensors}
    # what transformers joins while loading is of one dtype
    baking, baked = draw(_rules(inputs, f"{path}.b", joins=joined is None, whole_bytes=not is_whole))
    packing, _ = draw(_rules(baked, f"{path}.p", joins=True, whole_bytes=not is_whole))
    return Module(path, tensors, baking, packing, joined)


@st.composite
def _rules(
    draw: st.DrawFn, inputs: Mapping[str, Shape], prefix: str, *, joins: bool, whole_bytes: bool
) -> tuple[tuple[BoundRule, ...], dict[str, Shape]]:
    """Rules that take every input once, and the shapes of what they make."""
    left, rules, made = dict(inputs), list[BoundRule](), dict[str, Shape]()
    while left:
        rule = draw(_rule(left, f"{prefix}{len(rules):02d}", joins=joins, whole_bytes=whole_bytes))
        rules.append(rule)
        out = rule.arrange({name: whole(name, left.pop(name)) for name in rule.sources})
        made |= {name: tensor.shape for name, tensor in out.items()}
    return tuple(rules), made


@st.composite
def _rule(draw: st.DrawFn, left: Mapping[str, Shape], target: str, *, joins: bool, whole_bytes: bool) -> BoundRule:
    """A rule that takes the first of the tensors that are left, and perhaps others."""
    first, shape = next(iter(left.items()))
    alike = [name for name in left if left[name] == shape]
    free = len(shape) - whole_bytes
    kind = draw(st.sampled_from(["rename", "one", "one", "join", "stack", "halves"])) if joins else "rename"
    if kind == "rename":
        return BoundRule.renamed(first, target)
    if kind == "halves" and len(alike) >= 4 and len(shape) == 2:
        both = (Collected("gate", tuple(alike[:2])), Collected("up", tuple(alike[2:4])))
        return _bound(both, target, [StackHalves(0, 1)], ("x", "y"))
    collected: tuple[Collected, ...] = (Collected(first, (first,)),)
    operations: list[Operation] = []
    if kind == "stack" and len(alike) >= 2:
        collected = (Collected("all", tuple(alike[: draw(st.integers(2, len(alike)))])),)
        operations.append(Stack(draw(st.integers(0, max(free, 0)))))
    if kind == "join" and free > 0:
        axis = draw(st.integers(0, free - 1))
        fitting = [n for n in left if len(left[n]) == len(shape) and _without(left[n], axis) == _without(shape, axis)]
        collected = tuple(Collected(name, (name,)) for name in fitting[: draw(st.integers(1, len(fitting)))])
        operations.append(Concatenate(axis))
    is_joined = bool(operations) and isinstance(operations[0], Concatenate)
    for _ in range(draw(st.integers(0, 2))):
        shape = _shape_after(collected, operations, left)
        operations += draw(st.sampled_from(_unary(shape, whole_bytes=whole_bytes)))
    shape = _shape_after(collected, operations, left)
    last = draw(st.sampled_from(["", "", "chunk", "unstack", "unstack halves"]))
    if last == "chunk" and not is_joined and shape and shape[0] >= 2 and shape[0] % 2 == 0:
        return _bound(collected, target, [*operations, Chunk(0)], ("x", "y"))
    if last == "unstack" and len(shape) >= 2 and 1 <= shape[0] <= 12:
        return _bound(collected, target, [*operations, Unstack(0)], ("_*",))
    if last == "unstack halves" and not operations and len(shape) == 3 and shape[0] and shape[1] % 2 == 0:
        return _bound(collected, target, [UnstackHalves(0, 1)], ("x_*", "y_*"))
    return _bound(collected, target, operations, ("",)) if operations else BoundRule.renamed(first, target)


def _bound(
    collected: tuple[Collected, ...], target: str, operations: Sequence[Operation], ends: Sequence[str]
) -> BoundRule:
    """A rule whose targets are `target` with these ends."""
    base = target.rpartition(".")[2]
    return BoundRule(collected, f"{target}{ends[0]}", tuple(operations), tuple(f"{base}{end}" for end in ends))


def _shape_after(collected: tuple[Collected, ...], operations: Sequence[Operation], left: Mapping[str, Shape]) -> Shape:
    inputs = {name: whole(name, left[name]) for each in collected for name in each.names}
    if not operations:
        (only,) = inputs.values()
        return only.shape
    (made,) = _bound(collected, "m.x", operations, ("",)).arrange(inputs).values()
    return made.shape


def _unary(shape: Shape, *, whole_bytes: bool) -> list[list[Operation]]:
    """What may be done to a tensor of this shape."""
    axes = range(len(shape) - 1 if whole_bytes else len(shape))
    found: list[list[Operation]] = [[]]
    found += [[Transpose(one, two)] for one in axes for two in axes if one < two]
    found += [
        [Interleave(axis, inverse)]
        for axis in axes
        if shape[axis] and shape[axis] % 2 == 0
        for inverse in (False, True)
    ]
    if len(shape) in (1, 2) and shape[0] % 4 == 0 and axes:
        found += [[PermuteHeads(2)], [PermuteHeads(2, inverse=True)]]
    if len(shape) > 1 and not whole_bytes:
        found.append([Reshape((-1,), len(shape))])
    return found


def _without(shape: Shape, axis: int) -> Shape:
    return shape[:axis] + shape[axis + 1 :]
