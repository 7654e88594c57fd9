"""The outcomes of a sweep as `docs/model-types.md`: what was run, a summary, and a row per type.

The text depends on the outcomes and the versions alone: no times, no dates, no paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.sweep.outcome import Outcome

__all__ = ["COLUMNS", "read_rows", "row_of", "write_report"]

COLUMNS = {
    "experts": "experts",
    "gated_mlp": "gate/up",
    "gated_rms_norm": "gated norms",
    "qkv_proj": "q/k/v",
    "rms_norm": "norms",
    "topk_router": "routers",
}
"""Layout to the column that counts it."""

_HEAD = """\
# Model types

<!-- Written by `make sweep`; do not edit. -->

Every model type that transformers {transformers} maps to a causal language model, with torch {torch} on a CPU in
float32. For each type:

1. A tiny model is built from the defaults of its config class, with random weights, and saved with `save_pretrained`.
2. A recipe is drafted from it: every module where a layout fits and its reference gives the stock bits.
3. The recipe is applied, with the structural check.
4. The result is loaded with `kernels="reference"`: the logits must be those of the stock model, bit for bit.
5. It is loaded with kernels: within {tolerance:g} of the largest logit.
6. It is saved with `save_pretrained`, in the stock and in the packed form, and loaded again: the same tensors, the same
   logits.

Before logits are compared, the weights of both models are copied to fresh memory: the last bit of a float32 product can
depend on where in a cache line an operand starts, and a loader maps tensors as they lie in a file.

A tiny model is not the real one. What is shown here is that the structure of the type is handled; sizes, other
config values and other dtypes can change what qualifies. Attention that a forward on token IDs alone does not
reach (images, audio, an encoder's output) is left as it is.

## Summary

"""

_LEGEND = """
## Types

- **experts**, **gate/up**, **gated norms**, **q/k/v**, **norms**, **routers**: the number of modules with the layout, and what runs there
  on the CPU: a kernel (`moe`, `swiglu`, `geglu`, `gated_rmsnorm`, `qkv`, `rmsnorm`, `router`), or the reference, which is the stock arithmetic on packed weights.
- **names**: how the source's tensors were named, which is how `save_pretrained` writes them. *same*: as the model's
  are. *mapped*: in names that transformers maps while loading, and so does kconvert. *joined*: transformers also joins
  or splits some of the tensors while loading, and kconvert does that in the conversion.
- **result**: *equal*: all of the above holds. *nothing fits*: no module has the structure of a layout, or none
  qualifies; such a checkpoint is used as it is. *not built*: no tiny model that runs on token IDs was made, so nothing
  is known.

| type | experts | gate/up | gated norms | q/k/v | norms | routers | names | result | notes |
|---|---|---|---|---|---|---|---|---|---|
"""


def write_report(outcomes: Iterable[Outcome], *, transformers: str, torch: str, tolerance: float) -> str:
    """The whole page."""
    rows = sorted(outcomes, key=lambda outcome: outcome.model_type)
    head = _HEAD.format(transformers=transformers, torch=torch.partition("+")[0], tolerance=tolerance)
    return head + _summary(rows) + _LEGEND + "".join(f"{row_of(outcome)}\n" for outcome in rows)


def _summary(outcomes: Sequence[Outcome]) -> str:
    statuses = Counter(outcome.status for outcome in outcomes)
    lines = [("types", len(outcomes)), ("built", len(outcomes) - statuses["not built"])]
    for layout, name in COLUMNS.items():
        having = [outcome for outcome in outcomes if outcome.count(layout)]
        running = sum(1 for outcome in having if "reference" not in outcome.kernels[layout])
        lines.append((f"{name}: a kernel in every module that has the layout", running))
        lines.append((f"{name}: the reference in some", len(having) - running))
    lines += [(f"result: {status}", statuses[status]) for status in ("equal", "nothing fits", "refused", "not built")]
    lines += [("result: **wrong**", statuses["WRONG"])]
    table = "".join(f"| {name} | {count} |\n" for name, count in lines)
    return f"| | number of types |\n|---|---|\n{table}"


def row_of(outcome: Outcome) -> str:
    """The row of one type, without the line end."""
    cells = [f"`{outcome.model_type}`", *(_modules(outcome.kernels.get(layout, {})) for layout in COLUMNS)]
    return " | ".join(["", *cells, outcome.names, outcome.status, _notes(outcome), ""]).strip()


def _modules(kernels: dict[str, int]) -> str:
    return ", ".join(f"{count} {kernel_id.removeprefix('cpu_fused_')}" for kernel_id, count in kernels.items())


def _notes(outcome: Outcome) -> str:
    notes = [outcome.reason] if outcome.reason else []
    for layout, reasons in outcome.reference.items():
        notes.append(f"{COLUMNS[layout]} reference: {' and '.join(reasons)}")
    notes += [f"left out {', '.join(names)}: {reason}" for reason, names in outcome.left_out.items()]
    text = "; ".join(" ".join(note.split()) for note in notes)
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def read_rows(text: str) -> dict[str, str]:
    """Model type to its row in the page."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return {row.split("`")[1]: row for row in rows}
