"""One model type from end to end: tiny model, drafted recipe, conversion, loading, saving.

The order of work is that of a user: save the stock model, draft a recipe from it, `apply` with the structural check,
load with the reference (the stock bits are wanted) and with kernels, save in both forms and load again.  What the
product refuses with a clean error is `refused`; anything else that is not as it has to be is `WRONG`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.core_model_loading import dot_natural_key

from kconvert.convert import apply_recipe, draft_recipe
from kconvert.errors import KconvertError, one_line
from kconvert.runtime import load_converted
from kconvert.runtime.stock_names import StockNames
from tests.support import read_raw
from tests.sweep.tiny import NotBuiltError, build_tiny, logits_of

__all__ = ["Outcome", "Status", "aligned", "check_type"]

Status = Literal["equal", "nothing fits", "refused", "not built", "WRONG"]
TOLERANCE = 1e-5
"""For kernels in float32, relative to the largest logit."""


@dataclass
class Outcome:
    """What came of a model type.

    Attributes:
        model_type: as transformers maps it.
        status: see `Status`.
        class_name: the model class.
        reason: why it is not equal, in one line.
        kernels: layout to kernel ID (or `reference`) to the number of modules.
        reference: layout to the reasons why the reference runs.
        left_out: reason to the last names of the modules that the draft left out for it.
        names: how the source's tensors are named: as the model's are (`same`), in names that transformers maps (`mapped`), or
            in names of tensors of which it joins or splits some while loading (`joined`).
    """

    model_type: str
    status: Status = "WRONG"
    class_name: str = ""
    reason: str = ""
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    reference: dict[str, list[str]] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    names: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def count(self, layout: str) -> int:
        """How many modules have the layout."""
        return sum(self.kernels.get(layout, {}).values())


class _WrongError(Exception):
    """The product gave a result that it must not give."""


def check_type(model_type: str, directory: Path) -> Outcome:
    """Run one type through everything; never raises.

    Args:
        model_type: one of `causal_types()`.
        directory: an empty folder to work in.
    """
    outcome = Outcome(model_type)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check(outcome, directory)
    except NotBuiltError as error:
        outcome.status, outcome.reason = "not built", str(error)
        outcome.names = ""
    except _WrongError as error:
        outcome.status, outcome.reason = "WRONG", str(error)
    except Exception as error:  # noqa: BLE001 - of whatever kind, it is what the sweep looks for
        outcome.status, outcome.reason = "WRONG", one_line(error)
    outcome.reason = outcome.reason.replace(str(directory), "")
    return outcome


def _check(outcome: Outcome, directory: Path) -> None:
    model = build_tiny(outcome.model_type)
    outcome.class_name = type(model).__name__
    source = directory / "source"
    model.save_pretrained(source)
    outcome.names = _names(read_raw(source).keys(), model)
    stock = aligned(type(model).from_pretrained(source))
    expected = logits_of(stock)
    if not torch.equal(expected, logits_of(model)):
        raise NotBuiltError("transformers itself does not bring the model back from a save")
    draft = draft_recipe(stock)
    for item in draft.left_out:
        _note(outcome.left_out, item.reason, item.pattern.rpartition(".")[2])
    for entry in draft.entries:
        if entry.not_supported is not None:
            _note(outcome.reference, entry.layout, entry.not_supported)
    if not draft.entries:
        outcome.status = "nothing fits"
        return
    _require(draft == draft_recipe(stock), "the draft differs from run to run")
    recipe = directory / "recipe.yaml"
    recipe.write_text(draft.to_yaml(), encoding="utf-8")
    try:
        apply_recipe(str(recipe), source, directory / "converted")
    except KconvertError as error:
        outcome.status, outcome.reason = "refused", error.what
        return
    _check_loaded(outcome, directory / "converted", expected)
    _check_saved(directory, stock, expected)
    wanted = {path for entry in draft.entries for path in entry.modules}
    found = sum(outcome.count(layout) for layout in outcome.kernels)
    _require(found == len(wanted), f"{len(wanted)} modules were drafted and {found} are patched")
    outcome.status = "equal"


def _names(stored: Iterable[str], model: Any) -> str:
    """How the names in the files are related to those of the model."""
    namer = StockNames(model)
    if namer.state.keys() >= {*stored}:
        return "same"
    patterns = [namer.rename(name)[1] for name in sorted(stored, key=dot_natural_key)]
    return "joined" if any(patterns) else "mapped"


def _note(notes: dict[str, list[str]], key: str, text: str) -> None:
    """Add a text to the list at `key`, once."""
    known = notes.setdefault(key, [])
    if text not in known:
        known.append(text)


def aligned(model: Any) -> Any:
    """The model with its weights in memory of their own.

    A loader maps tensors as they lie in the file, and the last bit of a float32 GEMM can depend on where in a cache
    line an operand starts.  That is no difference between models, so it is taken away from both.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def _check_loaded(outcome: Outcome, converted: Path, expected: torch.Tensor) -> None:
    reference = aligned(load_converted(converted, kernels="reference"))
    _require(torch.equal(logits_of(reference), expected), "the reference gives other logits than the stock model")
    model = aligned(load_converted(converted))
    found = logits_of(model)
    error = ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-9)).item()
    _require(error <= TOLERANCE, f"the kernels' logits are off by {error:.1e}")
    counts: dict[str, Counter[str]] = {}
    for module in model.kconvert_report.modules:
        counts.setdefault(module.layout, Counter())[module.kernel] += 1
    outcome.kernels = {layout: dict(sorted(counter.items())) for layout, counter in sorted(counts.items())}


def _check_saved(directory: Path, stock: Any, expected: torch.Tensor) -> None:
    """Both forms of `save_pretrained`; a stock save has the tensors of the source under the source's names."""
    model = load_converted(directory / "converted", kernels="reference")
    model.save_pretrained(directory / "stock")
    _require(read_raw(directory / "stock") == read_raw(directory / "source"), "a stock save gives other tensors")
    again = aligned(type(stock).from_pretrained(directory / "stock"))
    _require(torch.equal(logits_of(again), expected), "a stock save gives other logits")
    model.save_pretrained(directory / "packed", variant="kconvert")
    packed = aligned(load_converted(directory / "packed", kernels="reference"))
    _require(torch.equal(logits_of(packed), expected), "a packed save gives other logits")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise _WrongError(what)
