"""The generated parts of these pages: recipe keys from the schema, commands from the app, kernels from their specs, figures
from `benchmarks/results`.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`.  `python docs/generate.py` writes all of them
again, `--check` only says which ones are not what the code says.  Everything else on the pages is written by hand.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

from pydantic import BaseModel

import kconvert.errors as errors
from kconvert.cli import main as run_kconvert
from kconvert.cli.app import app
from kconvert.kernels.base import LayoutKernel
from kconvert.kernels.cuda import CudaKernel
from kconvert.kernels.liger import LigerKernel
from kconvert.kernels.npu import NpuKernel
from kconvert.kernels.registry import Registry
from kconvert.kernels.specs import layout_specs
from kconvert.recipe import Patch, Recipe, Target, load_recipe, shipped_recipes
from kconvert.transforms import NOTHING, LayoutSpec, Rule

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
_PART = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def recipe_keys() -> str:
    """Every key of a recipe, level by level."""
    levels: tuple[tuple[str, type[BaseModel]], ...] = (
        ("The recipe", Recipe),
        ("An item of `patches`", Patch),
        ("`replace`, and an item of `fuse`", Target),
    )
    return "\n\n".join(f"### {title}\n\n{_table(('Key', '', 'Meaning'), _keys(model))}" for title, model in levels)


def _keys(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        if field.description is None:
            raise SystemExit(f"{model.__name__}.{name} has no description")
        yield f"`{field.alias or name}`", "required" if field.is_required() else "", field.description


def recipes() -> str:
    """The shipped recipes."""
    rows = []
    for name, path in shipped_recipes().items():
        recipe = load_recipe(path)
        kinds = ", ".join(f"`{kind}`" for kind in recipe.model_type)
        rows.append((f"[`{name}`](../recipes/{path.name})", kinds, _opening_comment(recipe.text)))
    return _table(("Recipe", "Model types", "What it does"), rows)


def _opening_comment(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines)


def layouts() -> str:
    """Every layout: what it takes, what it makes, and its kernels."""
    parts = []
    for spec in layout_specs().values():
        kernels = [(f"`{entry.kernel_id}`", entry.device) for entry in spec.kernels]
        rules = [(_sources(rule, spec.members), f"`{rule.target}`", str(rule.op)) for rule in spec.rules]
        parts += [
            f"### `{spec.name}`, version {spec.version}",
            f"{spec.summary}. Takes {_takes(spec)}.",
            *([_table(("Source", "Target", "Op"), rules)] if rules else []),
            _table(("Kernel", "Device"), kernels),
        ]
    return "\n\n".join(parts)


def _takes(spec: LayoutSpec) -> str:
    members = " and ".join(f"the {member} module" for member in spec.members)
    if not spec.takes:
        return f"{members}, whole"
    if spec.takes == NOTHING:
        return f"the forward of {members}, and none of its tensors"
    sources = {source.name.partition(".")[0] for rule in spec.rules for source in rule.sources}
    return f"of {members} only {', '.join(f'`{name}`' for name in sorted(sources))}"


def _sources(rule: Rule, members: tuple[str, ...]) -> str:
    names = [
        f"`{source.name}`" if len(members) == 1 else f"`{source.name}` of the {members[source.member]}"
        for source in rule.sources
    ]
    return ", then ".join(names) + (" (where there is one)" if rule.optional else "")


def commands() -> str:
    """What `--help` says, of the whole and of every command, at 80 columns."""
    names = [str(command.name) for command in app.registered_commands]
    return "\n\n".join(
        f"## `{' '.join(['kconvert', *name])}`\n\n```text\n{_help(name)}\n```" for name in [[], *([n] for n in names)]
    )


def _help(command: list[str]) -> str:
    text = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="80", TERMINAL_WIDTH="80"), contextlib.redirect_stdout(text):
        run_kconvert([*command, "--help"])
    return text.getvalue().partition("\n  Exit codes:")[0].strip()  # which the page has once


def exit_codes() -> str:
    """The exit codes, from the error classes."""
    by_code: dict[int, list[str]] = {0: ["Done; for `verify`, everything holds."]}
    for name in errors.__all__:
        value = getattr(errors, name)
        if isinstance(value, type) and issubclass(value, errors.KconvertError) and "exit_code" in vars(value):
            by_code.setdefault(value.exit_code, []).append((value.__doc__ or "").splitlines()[0])
    by_code[1] = ["Unexpected: a fault in kconvert; `KCONVERT_TRACEBACK=1` shows where."]
    return _table(("Exit code", "Meaning"), [(str(code), " ".join(by_code[code])) for code in sorted(by_code)])


_TRIED = {
    "cuda": "one H200, and Triton's interpreter",
    "npu": "a stand-in for `torch_npu`",
    "cpu": "x86 CPUs",
}


def where() -> str:
    """Every kernel of the catalog: what it needs, and what it can do."""
    rows = []
    for kernel_id, kernel in Registry.catalog().items():
        if not issubclass(kernel, LayoutKernel) or not kernel.has_device_code():
            continue
        device = kernel.device().value
        needs = ["Triton"] if issubclass(kernel, CudaKernel) else []
        needs += ["liger-kernel"] if issubclass(kernel, LigerKernel) else []
        needs += [f"`{name}`" for name in kernel.operators] if issubclass(kernel, NpuKernel) else []
        chosen = "yes" if kernel.default else "where it is named"
        dtypes = "any" if kernel.dtypes is None else ", ".join(sorted(kernel.dtypes))
        compiled = "yes" if kernel.can_torch_compile else "the reference runs"
        gradient = "yes" if kernel.has_backward else "not used there"
        rows.append(
            (
                f"`{kernel_id}`",
                device,
                f"`{kernel.layout.spec.name}`",
                ", ".join(needs),
                chosen,
                dtypes,
                gradient,
                compiled,
            )
        )
    head = ("Kernel", "Device", "Layout", "Needs", "By default", "Dtypes", "Under gradients", "Under `torch.compile`")
    tried = list(_TRIED.items())
    return f"{_table(head, rows)}\n\n{_table(('Device', 'Kernels have run on'), tried)}"


def gpu_model() -> str:
    """What `benchmarks/cuda_model.py` measured."""
    found = json.loads((RESULTS / "cuda_model.json").read_text())
    names = ("stock", "liger", "kconvert", "products and attention")
    rows = []
    for what, entry in found["measured"].items():
        times = [f"{entry['ms'][name]:.2f}" if name in entry["ms"] else "" for name in names]
        ratios = [f"{value:.2f}" if (value := entry["ratio"].get(f"kconvert / {name}")) else "" for name in names[:2]]
        rows.append((what, *times, *ratios))
    head = ("ms", "stock", "Liger", "kconvert", "products and attention alone", "kconvert / stock", "kconvert / Liger")
    peaks = found["measured"]["training step"]["peak_gb"]
    memory = ", ".join(f"{name} {peaks[name]:.2f}" for name in names[:3])
    return f"{_table(head, rows)}\n\nPeak memory of a training step above the weights, GB: {memory}.\n\n{_machine(found['machine'])}"


def cpu_model() -> str:
    """What `benchmarks/cpu_model.py` measured."""
    found = json.loads((RESULTS / "cpu_model.json").read_text())
    names = {"stock": "stock", "grouped_mm": "grouped_mm"}
    rows = []
    for what, entry in found["measured"].items():
        times = [f"{entry['ms'][name]:.4g}" if name in entry["ms"] else "" for name in (*names, "kconvert")]
        ratios = [
            "{:.2f} ({:.2f} to {:.2f})".format(*entry["ratio"][name]) if name in entry["ratio"] else ""
            for name in names
        ]
        rows.append((what, *times, *ratios))
    head = ("ms", *names.values(), "kconvert", *(f"kconvert / {name}" for name in names.values()))
    return f"{_table(head, rows)}\n\n{_machine(found['machine'])}"


_PEERS = {
    "reference": "stock",
    "compile": "torch.compile",
    "torch": "torch",
    "liger": "Liger",
    "grouped_mm": "grouped_mm",
}


def gpu_kernels() -> str:
    """What `kconvert bench-kernels --json` measured, a table for each of its runs."""
    parts = []
    for run in json.loads((RESULTS / "cuda_kernels.json").read_text()):
        peers = [name for name in _PEERS if any(name in row["seconds"] for row in run["rows"])]
        timed = {name for row in run["rows"] for name in row["host_seconds"]}
        on_host = [name for name in ("kernel", "reference", "torch", "liger") if name in timed]
        rows = []
        for row in run["rows"]:
            mode = "" if row["mode"] == "forward" else ", and backward"
            times = [_microseconds(row["seconds"].get(name)) for name in ("kernel", *peers)]
            share = "" if row["copy_share"] is None else f"{100 * row['copy_share']:.0f} %"
            hosts = [_microseconds(row["host_seconds"].get(name)) for name in on_host]
            rows.append((row["case"] + mode, *times, share, " / ".join(hosts) if row["host_seconds"] else ""))
        host = f"host: {' / '.join({'kernel': 'kconvert', **_PEERS}[name] for name in on_host)}" if on_host else "host"
        head = ("us", "kconvert", *(_PEERS[name] for name in peers), "of a copy", host)
        kernel = run["rows"][0]["kernel"]
        parts.append(f"`{kernel}`\n\n{_table(head, rows)}")
    speed = f"{run['copy_bytes_per_second'] / 1e9:.0f}"
    return "\n\n".join([*parts, _machine({**run["versions"], "device": run["device_name"], "copy_gb_per_s": speed})])


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.3g}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


def _machine(machine: Mapping[str, str]) -> str:
    versions = ", ".join(
        f"{name} {value}" for name, value in machine.items() if name not in ("device", "copy_gb_per_s")
    )
    copy = f", a copy on it {machine['copy_gb_per_s']} GB/s read and written" if "copy_gb_per_s" in machine else ""
    return f"{machine['device']}{copy}; {versions}."


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "cpu-model": cpu_model,
    "exit-codes": exit_codes,
    "gpu-kernels": gpu_kernels,
    "gpu-model": gpu_model,
    "layouts": layouts,
    "recipe-keys": recipe_keys,
    "recipes": recipes,
    "where": where,
}


def generate(text: str) -> str:
    """A page with its generated parts made anew; a part that nothing makes is an error."""
    return _PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n\n{found[3]}", text)


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` compare them; the exit code."""
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        made = generate(text)
        if made != text:
            stale.append(page.name)
            if "--check" not in arguments:
                page.write_text(made, encoding="utf-8")
    if stale and "--check" in arguments:
        print(f"docs are not what the code says: {', '.join(stale)}; run `make docs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
