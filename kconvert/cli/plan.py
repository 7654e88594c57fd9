"""`kconvert plan`: what `apply` would do, with what every pattern matched."""

from __future__ import annotations

from typing import Any

from kconvert.cli.options import Json, ModelDir, NoModelCheck, RecipeName, TrustRemoteCode
from kconvert.cli.output import format_bytes, print_json, print_table, print_text, warn
from kconvert.convert import Prepared, prepare
from kconvert.plan import explain_plan

__all__ = ["plan_command", "plan_value", "show_plan"]


def plan_command(
    recipe: RecipeName,
    model_dir: ModelDir,
    no_model_check: NoModelCheck = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Show what `apply` would do; writes nothing."""
    prepared = prepare(recipe, model_dir, model_check=not no_model_check, trust_remote_code=trust_remote_code)
    show_plan(prepared, as_json=json)


def show_plan(prepared: Prepared, *, as_json: bool) -> None:
    """Print a prepared conversion."""
    for message in prepared.warnings:
        warn(message)
    value = plan_value(prepared)
    if as_json:
        print_json(value)
        return
    print_table("Patches", ("path", "class", "layout", "modules"), list(_patch_rows(value)), right=("modules",))
    print_text("Tensors")
    for line in _tensor_lines(value):
        print_text(f"  {line}")
    print_text("")
    files = [(file["name"], str(file["tensors"]), format_bytes(file["bytes"])) for file in value["files"]]
    print_table("Output", ("file", "tensors", "size"), files, right=("tensors", "size"))
    copied, transformed = value["bytes_copied"], value["bytes_transformed"]
    print_text(f"{format_bytes(copied)} copied as they are, {format_bytes(transformed)} packed")
    if value["carried"]:
        print_text(f"carried along without a place in the model: {', '.join(value['carried'])}")
    for item in value["omitted"]:
        print_text(f"left out: {item['name']} ({item['reason']})")


def plan_value(prepared: Prepared) -> dict[str, Any]:
    """The plan as plain data, with what is carried, copied and left out."""
    manifest = prepared.manifest
    return {
        **explain_plan(prepared.plan),
        "model_checked": manifest.model_checked,
        "carried": list(manifest.carried),
        "sidecars": list(manifest.sidecars),
        "omitted": [{"name": item.name, "reason": item.reason} for item in manifest.omitted],
        "warnings": list(prepared.warnings),
    }


def _patch_rows(value: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (pattern["path"], pattern["class"], patch["layout"], str(len(pattern["matched"])))
        for patch in value["patches"]
        for pattern in patch["patterns"]
    ]


def _starred(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _tensor_lines(value: dict[str, Any]) -> list[str]:
    """Two lines per kind of changed tensor, what it becomes and of what; then what is copied as it is."""
    groups: dict[tuple[str, str], int] = {}
    same = 0
    for tensor in value["tensors"]:
        sources = [part["source"] for part in tensor["parts"]]
        if sources == [tensor["target"]]:
            same += 1
            continue
        made_of = " + ".join(dict.fromkeys(_starred(name) for name in sources))
        key = (f"{_starred(tensor['target'])}  {tensor['dtype']} {tensor['shape']}", made_of)
        groups[key] = groups.get(key, 0) + 1
    lines = []
    for (target, made_of), count in groups.items():
        lines += [
            f"{count} x {target}",
            *(f"      {'+' if number else '='} {name}" for number, name in enumerate(made_of.split(" + "))),
        ]
    return [*lines, f"{same} others, as they are"]
