"""The outcomes of the sweep as the generated part of `docs/baking.md`: counts, ops, and a row per class.

The text depends on the outcomes and the versions alone: no times, no dates, no paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.bake.outcome import Outcome

__all__ = ["is_shown", "read_rows", "row_of", "rules_of", "update_page", "write_table"]

_BEGIN = "<!-- Written by `make sweep-bake`; do not edit. -->\n"
_END = "<!-- end of the sweep -->\n"

_INTRO = """\
## Types whose tensors are renamed or joined while loading

Every model type of transformers {transformers} (torch {torch}, CPU, float32), in the class that a published checkpoint
names, and every further class that has a mapping of its own. For each class with a mapping:

1. A tiny model is built from the defaults of its config class, with random weights, and saved as a source: as
   `save_pretrained` does (*saved*); with the prefixes that the mapping takes away or adds (*prefixed*); with only the
   outermost of nested mappings undone (*outer*); with matrices turned over where the mapping looks at shapes
   (*transposed*).
2. It is converted with a recipe of `bake: true` and `patches: []`. Names, dtypes, shapes and bytes must be those of
   `save_pretrained(save_original_format=False)` of the model.
3. The result is loaded: the same state as in the stock model that is loaded from the source, and, where a forward on
   random token IDs, an image or sound runs, the same output bit for bit.
4. It is saved with `save_pretrained`: the source's bytes under the source's names, or, where transformers does not
   write them back, those of a save of the stock model.

"""

_LEGEND = """
- **rules**: the kinds of rules of the mapping that took a name while loading.
- **sources**: the forms of the source in which file names and module names differ; in brackets those in which they
  do not.
- **output**: whether a forward was run and compared; if not, tensors are compared all the same.
- **result**: *equal*: all of the above holds. *stock fails*: transformers does not bring its own save back. *not
  built*: no tiny model was made, so nothing is known. *refused*: kconvert says that it cannot.

| type | class | rules | sources | output | result | notes |
|---|---|---|---|---|---|---|
"""


def is_shown(outcome: Outcome) -> bool:
    """Whether the class has a mapping, as far as is known."""
    return outcome.status != "no mapping"


def write_table(outcomes: Iterable[Outcome], *, transformers: str, torch: str) -> str:
    """The generated part of the page."""
    rows = sorted(outcomes, key=lambda outcome: (outcome.model_type, outcome.class_name))
    intro = _INTRO.format(transformers=transformers, torch=torch.partition("+")[0])
    shown = [outcome for outcome in rows if is_shown(outcome)]
    return intro + _summary(rows) + _ops(shown) + _LEGEND + "".join(f"{row_of(outcome)}\n" for outcome in shown)


def update_page(page: Path, outcomes: Iterable[Outcome], *, transformers: str, torch: str) -> None:
    """Write the table into the page, at its end where it has none; the rest of the page stays as it is."""
    text = page.read_text(encoding="utf-8") if page.is_file() else "# Baking\n\n"
    table = f"{_BEGIN}{write_table(outcomes, transformers=transformers, torch=torch)}{_END}"
    before, begin, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    page.parent.mkdir(exist_ok=True)
    page.write_text(before + table + after if begin else f"{text.rstrip()}\n\n{table}", encoding="utf-8")


def _summary(rows: Sequence[Outcome]) -> str:
    shown = [outcome for outcome in rows if is_shown(outcome)]
    built = [outcome for outcome in shown if outcome.status != "not built"]
    equal = [outcome for outcome in shown if outcome.status == "equal"]
    statuses = Counter(outcome.status for outcome in shown)
    lines = [
        ("looked at", rows),
        ("with a mapping", shown),
        ("tried: a tiny model was built", built),
        ("result: equal", equal),
        ("of these, file names and module names differ", [outcome for outcome in equal if outcome.renamed]),
        ("of these, a forward was compared", [outcome for outcome in equal if outcome.logits]),
    ]
    lines += [
        (f"result: {status}", [outcome for outcome in shown if outcome.status == status])
        for status in ("stock fails", "refused", "WRONG", "not built")
        if statuses[status] or status != "refused"
    ]
    table = "".join(
        f"| {name.replace('WRONG', '**wrong**')} | {len(found)} | {len({item.model_type for item in found})} |\n"
        for name, found in lines
    )
    return f"| | classes | types |\n|---|---|---|\n{table}\n"


def _ops(shown: Sequence[Outcome]) -> str:
    having: dict[str, list[str]] = {}
    for outcome in shown:
        for rule in outcome.rules:
            having.setdefault(rule, []).append(outcome.class_name)
    order = sorted(having, key=lambda rule: (-len(having[rule]), rule))
    table = "".join(f"| {_code(rule)} | {len(having[rule])} | {_code(having[rule][0])} |\n" for rule in order)
    return f"| kind of rule | classes | for example |\n|---|---|---|\n{table}"


def rules_of(outcomes: Iterable[Outcome]) -> set[str]:
    """The kinds of rules that were in use."""
    return {rule for outcome in outcomes for rule in outcome.rules}


def row_of(outcome: Outcome) -> str:
    """The row of one class, without the line end."""
    same = [form for form in outcome.forms if form not in outcome.renamed]
    sources = ", ".join([*outcome.renamed, *(f"({form})" for form in same)])
    notes = "; ".join([*([outcome.reason] if outcome.reason else []), *outcome.notes])
    cells = [
        _code(outcome.model_type),
        _code(outcome.class_name),
        ", ".join(_code(rule) for rule in outcome.rules),
        sources,
        "yes" if outcome.logits else "",
        outcome.status,
        _plain(notes),
    ]
    return " | ".join(["", *cells, ""]).strip()


def _code(text: str) -> str:
    return f"`{text}`"


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def read_rows(text: str) -> dict[tuple[str, str], str]:
    """Type and class to the row in the page."""
    _, _, table = text.partition("| type | class |")
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    return {(row.split("`")[1], row.split("`")[3]): row for row in rows}
