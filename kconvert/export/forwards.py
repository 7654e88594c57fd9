"""What an exported kernel computes, and how its layout is built, per layout of kconvert.

The text calls definitions that go into the package as they stand (`Parts.pieces`).  What a class computes is proven on
the stock model and has to agree with the facts in the manifest.  Refused: a layout that has no form here, an activation
or a norm that the text would not honour, and an attention forward that cannot be written down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import cast

import torch
from torch import nn

from kconvert.errors import one_line
from kconvert.export.attention import NotJoinableError, joined_source
from kconvert.export.entries import Entry
from kconvert.export.pieces import pack_children
from kconvert.export.stock import Stock
from kconvert.kernels.assign import load_layout
from kconvert.kernels.ops.gated_mlp.layout import ACTIVATIONS, GatedMLPLayout, prove_activation
from kconvert.kernels.ops.rms_norm.layout import RMSNormVariant, prove_variant
from kconvert.kernels.packed_linear import PackedLinearLayout
from kconvert.kernels.specs import layout_specs

__all__ = ["NotExportedError", "Parts", "home_of", "make_parts"]


class NotExportedError(Exception):
    """Why an entry has no form outside kconvert."""


@dataclass(frozen=True)
class Parts:
    """What the two classes of a kernel are made of.

    Attributes:
        forward: the text of the forward, not indented.
        pieces: names of the definitions that it needs.
        build: the lines of the layout's constructor after the stock one; empty where that is all.
    """

    forward: str
    pieces: tuple[str, ...]
    build: str = ""


def home_of(cls: type) -> str:
    """The name by which the text reaches the module of a stock class: `modeling_qwen3`."""
    return cls.__module__.rpartition(".")[2]


def stays_stock(layout: str) -> bool:
    """Whether a layout has no form here and needs none: it changes no tensor, so its modules run as transformers has them."""
    spec = layout_specs().get(layout)
    return layout not in _LAYOUTS and spec is not None and not spec.changes_parameters


def make_parts(stock: Stock, entry: Entry) -> Parts:
    """The parts of an entry whose kernel is built into kconvert.

    Raises:
        NotExportedError: it has no form here; the text says why.
    """
    make = _LAYOUTS.get(entry.layout)
    if make is None:
        raise NotExportedError(f"layout {entry.layout!r} has no form outside kconvert")
    return make(stock, entry)


def _rms_norm(stock: Stock, entry: Entry) -> Parts:
    hidden = _input_name(stock, entry)
    call = _norm_call(stock, entry, 0, "self", hidden)
    return Parts(f"def forward(self, {hidden}):\n    return {call}", ("rms_norm_torch",))


def _input_name(stock: Stock, entry: Entry) -> str:
    """What the first class calls its one input: callers may pass it by that name."""
    _, name = signature(type(stock.module(entry.claims[0][0])).forward).parameters
    return name


def _norm_call(stock: Stock, entry: Entry, member: int, owner: str, hidden: str) -> str:
    """The call of the norm formula with the facts of the manifest."""
    name = entry.classes[member]
    modules = [stock.module(claim[member]) for claim in entry.claims]
    variants = {
        (variant.offset, variant.cast_first, variant.mixes, variant.has_weight, variant.why_not)
        for variant in map(prove_variant, modules)
    }
    if len(variants) != 1:
        raise NotExportedError(f"{name} computes different things in different places")
    variant = prove_variant(modules[0])
    if variant.why_not is not None:
        raise NotExportedError(f"{name}: {variant.why_not}")
    if not variant.mixes:
        raise NotExportedError(f"{name} treats an input of another dtype than its weight in a way of its own")
    _check_facts(stock, entry, variant)
    eps = _eps_name(modules, name)
    facts = f"offset={variant.offset!r}, cast_first={variant.cast_first!r}"
    weight = f"{owner}.weight" if variant.has_weight else "None"
    return f"rms_norm_torch({hidden}, {weight}, eps={owner}.{eps}, {facts})"


def _check_facts(stock: Stock, entry: Entry, variant: RMSNormVariant) -> None:
    found = variant.facts()
    for number in entry.patches:
        facts = (stock.manifest.patches[number].facts or {}).get(entry.classes[0])
        if facts != found:
            raise NotExportedError(f"{entry.classes[0]} computes {found} here, at conversion it was {facts}")


def _eps_name(modules: Sequence[nn.Module], name: str) -> str:
    """The attribute that holds eps in every one of these."""
    for attribute in ("variance_epsilon", "eps", "epsilon"):
        if all(hasattr(module, attribute) for module in modules):
            return attribute
    raise NotExportedError(f"{name} has no eps")


def _gated_mlp(stock: Stock, entry: Entry) -> Parts:
    hidden = _input_name(stock, entry)
    call, build = _gated_call(stock, entry, 0, "self", hidden)
    return Parts(f"def forward(self, {hidden}):\n    return {call}", _GATED_PIECES, build)


_GATED_PIECES = ("join_linears", "pack_children", "ACTIVATIONS", "gated_product_cpu", "Packing")


def _gated_call(stock: Stock, entry: Entry, member: int, owner: str, hidden: str) -> tuple[str, str]:
    """The gated MLP as an expression, and the line that packs its projections."""
    layout = cast("type[PackedLinearLayout]", load_layout("gated_mlp"))
    modules = [stock.module(claim[member]) for claim in entry.claims]
    name = entry.classes[member]
    for claim in entry.claims:
        _check_initialisation(stock, claim[member], layout)
    packed = [cast("GatedMLPLayout", layout.patch([deepcopy(module)])) for module in modules]
    reasons = {known: [prove_activation(module, known) for module in packed] for known in ACTIVATIONS}
    activation = next((known for known, found in reasons.items() if not any(found)), None)
    if activation is None:
        raise NotExportedError(f"{name}: {next(reason for reason in next(iter(reasons.values())) if reason)}")
    expression = f'{owner}.down_proj(gated_product_cpu({owner}.gate_up_proj({hidden}), "{activation}"))'
    return expression, _pack_lines(layout, modules, name, owner)


def _pack_lines(layout: type[PackedLinearLayout], modules: Sequence[nn.Module], name: str, owner: str) -> str:
    """The lines that pack linear children; none where the class is built packed."""
    lines = []
    for packed, parts in layout.kconvert_joined.items():
        listed = ", ".join(f'"{part}"' for part in parts)
        built = {packed in dict(module.named_children()) for module in modules}
        if len(built) != 1:
            raise NotExportedError(f"{name} is built packed in some places only")
        if built == {False}:
            lines.append(f'pack_children({owner}, "{packed}", ({listed}))')
    return "\n".join(lines)


def _check_initialisation(stock: Stock, path: str, layout: type[PackedLinearLayout]) -> None:
    """Refuse a module whose model fills its projections by their old names: loading would stop there."""
    module = deepcopy(stock.module(path))
    children = dict(module.named_children())
    for packed, parts in layout.kconvert_joined.items():
        if packed not in children:
            pack_children(module, packed, parts)
    try:
        with torch.random.fork_rng(devices=[]):
            stock.owner(path)._init_weights(module)
    except Exception as error:  # noqa: BLE001 - it is the model's own code
        name = type(module).__name__
        raise NotExportedError(f"{name}: its model initialises it by its stock parts ({one_line(error)})") from None


def _qkv_proj(stock: Stock, entry: Entry) -> Parts:
    layout = cast("type[PackedLinearLayout]", load_layout("qkv_proj"))
    ((packed, parts),) = layout.kconvert_joined.items()
    modules = [stock.module(claim[0]) for claim in entry.claims]
    cls = type(modules[0])
    try:
        forward = joined_source(cls, packed, parts, home_of(cls))
    except NotJoinableError as error:
        raise NotExportedError(f"{cls.__name__}: {error}") from None
    for claim in entry.claims:
        _check_initialisation(stock, claim[0], layout)
    build = _pack_lines(layout, modules, cls.__name__, "self")
    return Parts(forward, ("join_linears", "pack_children", "split_rows", "Packing", "JoinRows", "CutRows"), build)


def _norm_gated_mlp(stock: Stock, entry: Entry) -> Parts:
    hidden = _input_name(stock, entry)
    norm = _norm_call(stock, entry, 0, "self.norm", hidden)
    mlp, build = _gated_call(stock, entry, 1, "self.mlp", hidden)
    forward = "\n".join([f"def forward(self, {hidden}):", f"    {hidden} = {norm}", f"    return {mlp}"])
    return Parts(forward, ("rms_norm_torch", *_GATED_PIECES, "Renaming"), build)


_LAYOUTS: dict[str, Callable[[Stock, Entry], Parts]] = {
    "rms_norm": _rms_norm,
    "gated_mlp": _gated_mlp,
    "qkv_proj": _qkv_proj,
    "norm_gated_mlp": _norm_gated_mlp,
}
