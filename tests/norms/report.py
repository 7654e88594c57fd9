"""The outcomes of all norms as `docs/norms.md`: what was run, a summary, and a row per class and way to build it.

The text depends on the outcomes and the versions alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.norms.outcome import Outcome

__all__ = ["read_rows", "row_of", "write_report"]

_HEAD = """\
# Norms

<!-- Written by `make sweep-norms`; do not edit. -->

Every norm class of transformers {transformers}: those whose name contains Norm and whose own code computes a mean or a
sum of squares, and those that are called RMSNorm or L2Norm. With torch {torch} on a CPU, for each class:

1. An instance is built, with the defaults of its constructor, and again with every option that changes what it computes.
2. The stock forward runs on random weights and inputs, and a formula has to give the same bits everywhere: that is how
   kconvert finds the variant of a norm when it patches a model. A class that has no such formula is refused, and keeps
   its stock forward.
3. Where a variant is found, it is checked again without what the proof used: instances of other sizes and other eps,
   other weights, inputs of one to five dimensions and of magnitudes from 1e-6 to 1e4, in float32, bfloat16 and float16,
   in training and in evaluation, and a formula that is written down a second time. Every bit has to be the same.

Kernels for devices are held against these formulas with tolerances.

## Summary

"""

_LEGEND = """
## Classes

- **weight, cast before it**: normed values are cast to the dtype of the input and then multiplied by the weight (Llama).
- **weight, cast after it**: the product is made in float32 and cast (OLMo 2).
- **1 + weight, cast after it**: the same with `1 + weight` (Gemma).
- **no weight**: normed and cast.
- *other dtypes of input and weight: the stock forward*: where the two differ in dtype the class computes something of
  its own, and its stock forward runs.
- Gated norms: the gate's function, and whether it comes before or after the norm; *in groups*: the last dimension is
  normed in parts; *drops a dimension of one row*: `[n, 1, hidden]` gives `[n, hidden]`, which the kernels do too.

| module | class | options | result |
|---|---|---|---|
"""


def write_report(outcomes: Sequence[Outcome], *, transformers: str, torch: str) -> str:
    """The whole page."""
    head = _HEAD.format(transformers=transformers, torch=torch.partition("+")[0])
    return head + _summary(outcomes) + _LEGEND + "".join(f"{row_of(outcome)}\n" for outcome in outcomes)


def _summary(outcomes: Sequence[Outcome]) -> str:
    classes: dict[tuple[str, str], set[str]] = {}
    for outcome in outcomes:
        classes.setdefault((outcome.module, outcome.name), set()).add(outcome.status)
    of_classes = [
        ("classes", len(classes)),
        ("a variant, as it is built by default or otherwise", sum("accepted" in found for found in classes.values())),
        ("refused", sum(found == {"refused"} for found in classes.values())),
        ("not built", sum(found == {"not built"} for found in classes.values())),
        ("**wrong**", sum("WRONG" in found for found in classes.values())),
    ]
    ways = Counter(_result(outcome) for outcome in outcomes)
    return (
        _table("number of classes", of_classes)
        + "\n"
        + _table("number of ways to build a class", sorted(ways.items(), key=lambda item: (-item[1], item[0])))
    )


def _table(head: str, lines: Iterable[tuple[str, int]]) -> str:
    return f"| | {head} |\n|---|---|\n" + "".join(f"| {name} | {count} |\n" for name, count in lines)


def _result(outcome: Outcome) -> str:
    return outcome.what if outcome.status == "accepted" else f"{outcome.status}: {outcome.what}"


def row_of(outcome: Outcome) -> str:
    """A row of the table."""
    options = f"`{outcome.options}`" if outcome.options else ""
    return f"| {outcome.module.partition('.')[0]} | `{outcome.name}` | {options} | {_result(outcome)} |"


def read_rows(text: str) -> list[str]:
    """The rows of a page."""
    _, _, table = text.partition("| module | class | options | result |\n|---|---|---|---|\n")
    return table.splitlines()
