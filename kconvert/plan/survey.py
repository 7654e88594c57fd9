"""What a checkpoint holds, told from names, dtypes and shapes alone: for looking at one before there is a recipe.

Tensors are grouped by their names with the numbers starred.  For every layout that joins tensors, the modules
whose tensors its rules take are found: those that could be packed, those that hold the joined tensor already, and
those that cannot be packed, with the reason.  The rules are bound by the code that a conversion uses.

A layout of several modules is left out: tensors do not tell which siblings belong together.  Whether a module
computes what the layout computes is not decided here either; that takes the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kconvert.checkpoint import FLOAT_DTYPES
from kconvert.errors import KconvertError
from kconvert.garbage import collector_stopped
from kconvert.names import modules_above, natural_key, starred
from kconvert.transforms import BoundRule, LayoutSpec, Op, Rule, ShapeError, bind_spec, whole

__all__ = [
    "Join",
    "PackState",
    "Packable",
    "StoredTensor",
    "TensorGroup",
    "find_packable",
    "group_tensors",
    "size_by_dtype",
]


class StoredTensor(Protocol):
    """What a header says of a tensor."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def size_bytes(self) -> int: ...


@dataclass(frozen=True)
class TensorGroup:
    """Tensors whose names differ in numbers only.

    `name` has stars for the numbers; `shapes` and `dtypes` are those that occur; `size_bytes` is of all together.
    """

    name: str
    count: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    size_bytes: int


class PackState(StrEnum):
    """Whether modules can be packed."""

    READY = "ready"
    PACKED = "already packed"
    REFUSED = "refused"


@dataclass(frozen=True)
class Join:
    """Tensors that become one, by their names in the module, in part order."""

    sources: tuple[str, ...]
    target: str


@dataclass(frozen=True)
class Packable:
    """Modules whose paths differ in numbers only, and that a layout treats alike.

    Attributes:
        layout: name of the layout.
        modules: their path with stars for the numbers.
        paths: the path of each, in natural order.
        state: whether they can be packed.
        joins: what becomes one tensor in each; where they are packed already, source and target are the same.
        size_bytes: of the tensors that are joined, or that would be but for `reason`, in all modules.
        reason: why they cannot be packed; None unless refused.
    """

    layout: str
    modules: str
    paths: tuple[str, ...]
    state: PackState
    joins: tuple[Join, ...]
    size_bytes: int
    reason: str | None

    def __post_init__(self) -> None:
        if (self.state is PackState.REFUSED) != (self.reason is not None):
            raise ValueError(f"{self.modules!r} is {self.state}, with the reason {self.reason!r}")


@collector_stopped()
def group_tensors(tensors: Mapping[str, StoredTensor]) -> tuple[TensorGroup, ...]:
    """The tensors by their names with stars for numbers, in natural order of the first of each."""
    groups: dict[str, list[StoredTensor]] = {}
    for name in sorted(tensors, key=natural_key):
        groups.setdefault(starred(name), []).append(tensors[name])
    return tuple(
        TensorGroup(
            name=name,
            count=len(group),
            shapes=tuple(dict.fromkeys(tensor.shape for tensor in group)),
            dtypes=tuple(dict.fromkeys(tensor.dtype for tensor in group)),
            size_bytes=sum(tensor.size_bytes for tensor in group),
        )
        for name, group in groups.items()
    )


def size_by_dtype(tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Bytes per dtype, the largest first."""
    sizes: dict[str, int] = defaultdict(int)
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.size_bytes
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


@collector_stopped()
def find_packable(
    tensors: Mapping[str, StoredTensor], specs: Iterable[LayoutSpec], *, obstacle: str | None = None
) -> tuple[Packable, ...]:
    """The modules that the layouts' joining rules are about, by layout and starred path.

    Args:
        tensors: name to what its header says.
        specs: the layouts to look for; those that nothing proposes, and those that join nothing, are passed over.
        obstacle: why nothing in this checkpoint can be packed, such as a quantisation; None where nothing is known.
    """
    found = []
    for spec in specs:
        rules = [rule for rule in spec.rules if rule.op is Op.CONCATENATE]
        if rules and not spec.is_fusion and spec.is_proposed:
            found += _survey_layout(spec, rules, tensors, obstacle)
    return tuple(found)


@dataclass(frozen=True)
class _Finding:
    """What is said of one module; equal findings of modules with the same starred path are shown as one."""

    state: PackState
    joins: tuple[Join, ...]
    reason: str | None


def _survey_layout(
    spec: LayoutSpec, rules: Sequence[Rule], tensors: Mapping[str, StoredTensor], obstacle: str | None
) -> list[Packable]:
    groups: dict[tuple[str, _Finding], list[str]] = {}
    sizes: dict[tuple[str, _Finding], int] = defaultdict(int)
    wanted = _names_of(rules)
    judged: dict[tuple[str, tuple[tuple[str, str, tuple[int, ...]], ...]], _Finding] = {}  # most layers are alike
    for path, inside in _modules_with(wanted, tensors).items():
        here = starred(path).rpartition(".")[2]
        form = (here, tuple((name, tensor.dtype, tensor.shape) for name, tensor in inside.items()))
        finding = judged[form] = judged.get(form) or _judge(spec, rules, here, inside, obstacle)
        key = (starred(path), finding)
        groups.setdefault(key, []).append(path)
        sizes[key] += sum(tensor.size_bytes for name, tensor in inside.items() if name in wanted)
    return [
        Packable(
            spec.name, modules, tuple(paths), finding.state, finding.joins, sizes[modules, finding], finding.reason
        )
        for (modules, finding), paths in groups.items()
    ]


def _names_of(rules: Sequence[Rule]) -> frozenset[str]:
    """The names in a module that joining rules are about: their sources, and what stands for them joined."""
    sources = {source.name for rule in rules for source in rule.sources}
    return frozenset(sources | {rule.packed.name for rule in rules if rule.packed is not None})


def _modules_with(wanted: frozenset[str], tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Path of every module that holds one of the `wanted` names, to all that it holds, in natural order."""
    paths = {above for name in tensors for above in modules_above(name) if name[len(above) + 1 :] in wanted}
    inside: dict[str, dict[str, StoredTensor]] = {path: {} for path in sorted(paths, key=natural_key)}
    for name, tensor in tensors.items():
        for above in modules_above(name):
            if above in inside:
                inside[above][name[len(above) + 1 :]] = tensor
    return inside


def _judge(
    spec: LayoutSpec, rules: Sequence[Rule], here: str, inside: Mapping[str, StoredTensor], obstacle: str | None
) -> _Finding:
    """What is said of a module; `here` is the last segment of its path, so that it reads the same in every layer."""
    try:
        bound = bind_spec(spec, [here], [f"{here}.{name}" for name in inside])
    except KconvertError as error:
        return _Finding(PackState.REFUSED, (), error.what)
    named = {rule.target for rule in rules}
    joining = [rule for rule in bound if rule.target[len(here) + 1 :] in named]
    joins = tuple(
        Join(tuple(name[len(here) + 1 :] for name in rule.sources), rule.target[len(here) + 1 :]) for rule in joining
    )
    if all(len(rule.sources) == 1 for rule in joining):
        return _Finding(PackState.PACKED, joins, None)
    reason = obstacle or next(filter(None, (_unjoinable(rule, here, inside) for rule in joining)), None)
    return _Finding(PackState.READY if reason is None else PackState.REFUSED, joins, reason)


def _unjoinable(rule: BoundRule, path: str, inside: Mapping[str, StoredTensor]) -> str | None:
    """Why the sources of a rule do not make one tensor, or None."""
    parts = {name: inside[name[len(path) + 1 :]] for name in rule.sources}
    short = [name[len(path) + 1 :] for name in rule.sources]
    if len({part.dtype for part in parts.values()}) > 1:
        listed = ", ".join(f"{name} is {part.dtype}" for name, part in zip(short, parts.values(), strict=True))
        way_out = (
            "; `dtype:` in the patch settles it" if all(part.dtype in FLOAT_DTYPES for part in parts.values()) else ""
        )
        return f"mixed dtypes: {listed}{way_out}"
    try:
        rule.arrange({name: whole(name, part.shape) for name, part in parts.items()})
    except ShapeError as error:
        return f"{' and '.join(short)} do not join: {error}"
    return None
