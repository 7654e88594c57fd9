"""The text of an exported `layers.py`: per entry a class with the forward and one with the layout.

Everything in it has one source: the layouts' rules, the forwards of the CPU kernels (plain torch, for any device), the
facts in the manifest, and `pieces`.  A layout derives from the stock class, so that what the model does with the module
stays as it was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from textwrap import indent

import transformers
from torch import nn

from kconvert.export import pieces
from kconvert.export.attention import definition_source
from kconvert.export.entries import Entry
from kconvert.export.forwards import NotExportedError, Parts, home_of, make_parts
from kconvert.export.stock import Stock
from kconvert.kernels import packed_linear
from kconvert.kernels.ops.gated_mlp import cpu as gated_mlp_cpu
from kconvert.kernels.ops.gated_mlp import layout as gated_mlp_layout
from kconvert.kernels.ops.rms_norm import cpu as rms_norm_cpu
from kconvert.kernels.specs import layout_specs
from kconvert.transforms import Op, Rule

__all__ = ["kernel_name", "layers_source"]


_PIECES: dict[str, object] = {
    "source_digest": pieces,
    "check_stock": pieces,
    "join_linears": packed_linear,
    "pack_children": pieces,
    "split_rows": pieces,
    "rms_norm_torch": rms_norm_cpu,
    "ACTIVATIONS": gated_mlp_layout,
    "gated_product_cpu": gated_mlp_cpu,
    "Renaming": pieces,
    "Packing": pieces,
    "JoinRows": pieces,
    "CutRows": pieces,
}
"""Every definition that can go into a package, in this order, and the module that has it."""


def kernel_name(entry: Entry) -> str:
    """The class name of an entry's kernel: `FusedQwen3RMSNorm`, `PackedQwen3MLP`, or what its package calls it."""
    if entry.package is not None:
        return entry.package.class_name
    # a name with RMSNorm in it makes some models fill `weight`, which a fused module has not: the last class names it
    word = "Packed" if len(entry.classes) == 1 and entry.layout != "rms_norm" else "Fused"
    return f"{word}{entry.classes[-1]}"


def layers_source(stock: Stock, entries: Sequence[Entry], *, more_imports: Sequence[str] = ()) -> str:
    """The module's text.

    Args:
        stock: the stock model and the manifest.
        entries: those whose kernels are built into kconvert.
        more_imports: import lines to add, for packages that are copied in.

    Raises:
        NotExportedError: an entry that has no form here; the text says why.
    """
    made = [(entry, make_parts(stock, entry)) for entry in _merged(entries)]
    names = sorted({name for entry in entries for name in entry.classes})
    classes = {name: _stock_class(stock, name) for name in names}
    homes = {cls.__module__: home_of(cls) for cls in classes.values()}
    if len(set(homes.values())) != len(homes):
        raise NotExportedError(f"two modules of transformers are called {min(homes.values())}")
    needed = {name for _, each in made for name in each.pieces}
    needed |= {"source_digest", "check_stock"} if classes else set()
    definitions = "\n\n\n".join(definition_source(module, name) for name, module in _PIECES.items() if name in needed)
    checks = "\n".join(
        f'check_stock({homes[cls.__module__]}.{name}, "{pieces.source_digest(cls)}")' for name, cls in classes.items()
    )
    bodies = "\n\n\n".join(_class_text(stock, entry, each, classes) for entry, each in made)
    text = "\n\n\n".join(filter(None, [definitions, checks, bodies]))
    text = re.sub(r"\bgated_product_cpu\b", "gated_product", text)
    stock_imports = [f"from {home.rpartition('.')[0]} import {name}" for home, name in sorted(homes.items())]
    head = _HEAD.format(model=stock.model_type, version=transformers.__version__)
    lines = [head, *_imports(text), *stock_imports, *more_imports, "", "", text]
    return "\n".join(lines).rstrip() + "\n"


def _merged(entries: Sequence[Entry]) -> list[Entry]:
    """Entries of one kernel, such as a fusion under two parent classes, as one with all the modules."""
    found: dict[str, Entry] = {}
    for entry in entries:
        first = found.setdefault(kernel_name(entry), entry)
        if first is not entry:
            found[kernel_name(entry)] = replace(first, claims=(*first.claims, *entry.claims))
    return list(found.values())


def _imports(text: str) -> list[str]:
    """The import lines that the text needs."""
    lines = []
    for module, names in _IMPORTS:
        needed = [name for name in names if re.search(rf"\b{name.rpartition(' ')[2]}\b", text)]
        if needed and module:
            lines.append(f"from {module} import {', '.join(needed)}")
        lines += [] if module else [f"import {name}" for name in needed]
        lines += [""] if names == _STANDARD_LAST and lines else []
    return lines


_HEAD = '''\
"""Packed layouts and their forwards for {model}, written by `kconvert export-package` for transformers {version}.

Each kernel is a class with a forward, and a class `...Layout` with the parameters that it expects.
"""
'''
_STANDARD_LAST = ("Any", "cast")
_IMPORTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ("hashlib", "inspect")),
    ("collections.abc", ("Callable", "Sequence")),
    ("functools", ("partial",)),
    ("typing", _STANDARD_LAST),
    ("", ("torch",)),
    ("torch", ("nn",)),
    ("torch.nn", ("functional as F",)),
    ("transformers.core_model_loading", ("Concatenate", "ConversionOps", "WeightConverter", "WeightRenaming")),
)


def _stock_class(stock: Stock, name: str) -> type[nn.Module]:
    return next(type(module) for module in stock.model.modules() if type(module).__name__ == name)


def _class_text(stock: Stock, entry: Entry, made: Parts, classes: dict[str, type[nn.Module]]) -> str:
    name = kernel_name(entry)
    base = "nn.Module"
    if len(entry.classes) == 1:
        cls = classes[entry.classes[0]]
        base = f"{home_of(cls)}.{cls.__name__}"
    summary = layout_specs()[entry.layout].summary.partition(";")[0]
    lines = [
        f"class {name}(nn.Module):",
        f'    """{" and ".join(entry.classes)}: {summary}."""',
        "",
        "    has_backward = True",
        "    can_torch_compile = True",
        "",
        indent(made.forward, "    "),
        "",
        "",
        f"class {name}Layout({base}):",
        f'    """The parameters that {name} expects."""',
        "",
        indent(_mapping(stock, entry), "    "),
        "    # transformers gives a layout an empty forward, and keeps that where it puts no kernel in, as in training",
        f"    forward = {name}.forward",
    ]
    build = _constructor(entry, made.build, base)
    return "\n".join([*lines, *(["", indent(build, "    ")] if build else [])])


def _constructor(entry: Entry, build: str, base: str) -> str:
    if len(entry.classes) > 1:
        members = layout_specs()[entry.layout].members
        stored = [f"    self.{member} = {member}" for member in members]
        return "\n".join(
            [f"def __init__(self, {', '.join(members)}):", "    super().__init__()", *stored, indent(build, "    ")]
        )
    if entry.patterns:  # a fusion of one pair, whose layout gets the stock module
        taken = ["    nn.Module.__init__(self)", "    self.__dict__.update(vars(module))"]
        return "\n".join(["def __init__(self, module):", *taken, indent(build, "    ")]).rstrip()
    if not build:
        return ""
    return "\n".join(
        ["def __init__(self, *args, **kwargs):", "    super().__init__(*args, **kwargs)", indent(build, "    ")]
    )


def _mapping(stock: Stock, entry: Entry) -> str:
    rules = [text for rule in layout_specs()[entry.layout].rules for text in _rule(stock, rule, entry)]
    if not rules:
        return "conversion_mapping = []"
    return "\n".join(["conversion_mapping = [", *(indent(text, "    ") + "," for text in rules), "]"])


def _rule(stock: Stock, rule: Rule, entry: Entry) -> list[str]:
    """A rule as an item of the mapping, under each name that the layout's modules have in their parents.

    Without items for tensors that these modules have not: a bias, or the parts of a class that is built packed, which
    saving would tear apart.
    """
    rows = sorted(
        {
            tuple(path.rpartition(".")[2] for path in claim)
            for claim in entry.claims
            if all(
                source.name in dict(stock.module(claim[source.member]).named_parameters()) for source in rule.sources
            )
        }
    )
    found = []
    for children in rows:
        target = f"{children[0]}.{rule.target}"
        sources = [f"{children[source.member]}.{source.name}" for source in rule.sources]
        if sources == [target]:
            continue
        native = next((name for name in stock.parameters if f".{name}".endswith(f".{target}")), None)
        if native is not None:
            raise NotExportedError(f"the model has a tensor {native!r} of its own, which saving would tear apart")
        if rule.op is Op.CONCATENATE:
            packed = rule.target.rpartition(".")[0].rpartition(".")[2]
            op = "Concatenate(dim=0)" if len(sources) == 2 else f'JoinRows("{packed}")'
            listed = "\n".join(f"        {_pattern(name, target)}," for name in sources)
            found.append(f'Packing(\n    [\n{listed}\n    ],\n    "{target}",\n    operations=[{op}],\n)')
        else:
            found.append(f'Renaming({_pattern(sources[0], target)}, "{target}")')
    return found


def _pattern(source: str, target: str) -> str:
    """A regular expression for a source name that begins at a segment, and not inside its own target."""
    before = target.removesuffix(source) if target.endswith(f".{source}") else ""
    inside = f"(?<!{re.escape(before)})" if before else ""
    return f'r"{inside}(?<![^.]){re.escape(source)}"'
