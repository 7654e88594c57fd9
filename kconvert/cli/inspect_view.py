"""What `kconvert inspect` prints for people.

Names come from files that anyone may have written: what a terminal could take for a command is shown escaped.
Lines are folded at the width of the terminal, never cut; only a path in a command to be copied stays whole.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kconvert.cli.devices import devices_text
from kconvert.cli.output import (
    NO_PATCHES,
    command_lines,
    format_bytes,
    make_console,
    print_folded,
    print_table,
    print_text,
    printable,
    shell_quote,
)
from kconvert.patterns import braced

__all__ = ["show_converted", "show_source"]

_MOST_SHAPES = 3
_COLUMNS = ("name", "count", "shape", "dtype", "size")


def show_source(value: dict[str, Any]) -> None:
    """Print what `source_value` gave."""
    _show_head("Source checkpoint", value, [])
    _show_tensors(value)
    print_text("What could be packed")
    if value["names_unsettled"]:
        print_folded(
            f"{value['names_unsettled']}: modules may have other names than shown here, and lists of experts are "
            "stacked in any case",
            indent=2,
        )
    for found in value["packable"]:
        _show_packable(found)
    if not value["packable"]:
        print_folded("nothing that a layout of this version joins", indent=2)
    print_text("")
    print_text("Recipes that fit")
    for recipe in value["recipes"]:
        _show_command(recipe["name"], value["path"])
    if not value["recipes"]:
        kind = f"model type {value['model_type']}" if value["model_type"] else "config.json, which names no model_type"
        print_folded(f"none that comes with kconvert is for {kind}; docs/recipe.md shows how to draft one", indent=2)


def show_converted(value: dict[str, Any]) -> None:
    """Print what `converted_value` gave."""
    checked = "yes" if value["model_checked"] else "no: tensors without a place in the model are not known"
    versions = f"kconvert {value['kconvert_version']}, transformers {value['transformers_version']}"
    _show_head(
        "Converted by kconvert",
        value,
        [
            ("recipe", value["recipe"]),
            ("written by", f"{value['written_by']} ({versions})"),
            ("devices", devices_text(value["devices"], value["view_devices"])),
            ("model checked", checked),
        ],
    )
    print_text("Patches")
    for patch in value["patches"]:
        _show_patch(patch)
    if not value["patches"]:
        print_folded(NO_PATCHES, indent=2)
    print_text("")
    _show_tensors(value)
    if value["carried"]:
        print_folded(f"carried along without a place in the model: {', '.join(value['carried'])}")
    for item in value["omitted"]:
        print_folded(f"left out: {item['name']} ({item['reason']})")


def _show_head(title: str, value: dict[str, Any], more: Sequence[tuple[str, str]]) -> None:
    files = value["files"]
    size = f"{format_bytes(value['size_bytes'])} in {_count(value['num_tensors'], 'tensor')}"
    tied = {True: "yes", False: "no", None: "not said, the model's class decides"}[value["tied_embeddings"]]
    rows = [
        ("path", value["path"]),
        ("model type", value["model_type"] or "not said"),
        ("architecture", ", ".join(value["architectures"]) or "not said"),
        *more,
        ("weights", f"{size}, {_count(len(files), 'file')}"),
        ("dtypes", ", ".join(f"{dtype} {format_bytes(size)}" for dtype, size in value["bytes_by_dtype"].items())),
        ("quantisation", value["quantization_method"] or "none"),
        ("tied embeddings", f"{tied} (config.json)" if value["tied_embeddings"] is not None else tied),
    ]
    print_text(title)
    for name, text in rows:
        print_folded(text, first=f"  {name:<17}", indent=19)
    print_text("")


def _show_tensors(value: dict[str, Any]) -> None:
    print_table("Tensors", _COLUMNS, _tensor_rows(value["tensors"]), right=("count", "size"), names="name")


def _tensor_rows(groups: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row per kind of tensor; those of numbered modules stand below a row with the path up to the number."""
    rows: list[tuple[str, ...]] = []
    above = ""
    for group in groups:
        head, name = map(printable, _split(group["name"]))
        if head and head != above:
            rows.append((head, "", "", "", ""))
        above = head
        shapes = [str(list(shape)) for shape in group["shapes"]]
        shown = [
            *shapes[:_MOST_SHAPES],
            *([f"{len(shapes) - _MOST_SHAPES} more"] if len(shapes) > _MOST_SHAPES else []),
        ]
        rows.append(
            (
                f"  {name}" if head else name,
                str(group["count"]),
                "\n".join(shown),
                "\n".join(group["dtypes"]),
                format_bytes(group["size_bytes"]),
            )
        )
    return rows


def _split(name: str) -> tuple[str, str]:
    """`model.layers.*.mlp.weight` as `model.layers.*` and `mlp.weight`; no head where there is no number."""
    parts = name.split(".")
    place = parts.index("*") + 1 if "*" in parts[:-1] else 0
    return ".".join(parts[:place]), ".".join(parts[place:])


def _show_packable(found: dict[str, Any]) -> None:
    count, size = _count(len(found["paths"]), "module"), format_bytes(found["size_bytes"])
    state = {"ready": size, "already packed": f"{size}, already packed", "refused": f"{size}, cannot be packed"}
    print_folded(f"{found['layout']}  {found['modules']}  ({count}, {state[found['state']]})", indent=2, hang=4)
    if found["reason"]:
        print_folded(found["reason"], indent=6)
        for paths in braced(found["paths"]):
            print_folded(f"in {paths}", indent=6)
        return
    for join in found["joins"]:
        if found["state"] == "ready":
            print_folded(f"{' + '.join(join['sources'])} -> {join['target']}", indent=6)


def _show_patch(patch: dict[str, Any]) -> None:
    count, size = _count(patch["modules"], "module"), format_bytes(patch["size_bytes"])
    share = "all" if patch["packed_bytes"] == patch["size_bytes"] else format_bytes(patch["packed_bytes"])
    packed = f", {share} of it packed" if patch["packed_bytes"] else ""
    kind = "fusion, " if patch["kind"] == "fuse" else ""
    print_folded(
        f"{patch['layout']}, version {patch['layout_version']}  ({kind}{count}, {size}{packed})", indent=2, hang=4
    )
    for pattern in patch["patterns"]:
        print_folded(f"{pattern['class']} at {pattern['path']}", indent=6)
    print_folded(f"kernels: {', '.join(patch['kernels'])}", indent=6, hang=8)
    if patch["package"]:
        package = patch["package"]
        commit = f", commit {package['commit']}" if package["commit"] else ""
        print_folded(f"package: {package['package_id']}{commit}", indent=6, hang=8)
        print_folded(package["digest"], indent=8)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _show_command(recipe: str, path: str) -> None:
    """The command that tries a recipe."""
    for line in command_lines([f"kconvert plan {recipe}", shell_quote(path)], make_console(sys.stdout).width):
        print_text(line)
