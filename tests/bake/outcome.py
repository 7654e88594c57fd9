"""One class from end to end: tiny model, source, baking, comparison with transformers' own module form, loading, saving.

Three parties are compared: the reference that transformers writes in module names, the stock model loaded from the
source, and what kconvert makes of the source.  A class that transformers itself does not bring back from its own save
is `stock fails`, with what goes wrong; what kconvert refuses with a clean error is `refused`; anything else that is not
as it has to be is `WRONG`.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from kconvert import runtime
from kconvert.convert import apply_recipe
from kconvert.errors import KconvertError, one_line
from kconvert.kernels.probe import same_output
from kconvert.names import CONFIG_NAME
from tests.bake.forms import Form, describe_rules, difference, forms_of, load_stock, save_source, state_of
from tests.bake.inputs import run_forward
from tests.bake.mapped import Subject, has_mapping, may_have_mapping
from tests.bake.tiny import build_tiny_subject
from tests.support import RawTensor, bake_recipe, read_raw
from tests.sweep.outcome import aligned
from tests.sweep.tiny import NotBuiltError

__all__ = ["Outcome", "Status", "bake", "check_form", "check_subject"]

Status = Literal["equal", "no mapping", "refused", "stock fails", "not built", "WRONG"]
"""`no mapping` with a reason: it was not built, and neither it nor a part of it is among what has a mapping."""


@dataclass
class Outcome:
    """What came of a class.

    Attributes:
        model_type: as its config names it.
        class_name: of transformers.
        status: see `Status`.
        reason: why it is not equal, in one line.
        rules: the kinds of rules that matched a name of a source.
        renamed: the forms in which file names and module names differ.
        forms: the forms that were run.
        logits: the forms in which the forward was run and gave the stock bits.
        notes: what is peculiar to it.
    """

    model_type: str
    class_name: str = ""
    status: Status = "WRONG"
    reason: str = ""
    rules: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)
    logits: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


class _WrongError(Exception):
    """The product gave a result that it must not give."""


class _StockError(Exception):
    """Transformers itself does not bring the model back from its own save."""


class _RefusedError(Exception):
    """The product refused with a clean error."""


def check_subject(subject: Subject, directory: Path) -> Outcome:
    """Run one class through everything; never raises.

    Args:
        subject: one of `subjects()`.
        directory: an empty folder to work in.
    """
    outcome = Outcome(subject.model_type, subject.class_name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build_tiny_subject(subject)
            if not has_mapping(model):
                outcome.status = "no mapping"
                return outcome
            for form in forms_of(model):
                try:
                    check_form(outcome, model, form, directory / form)
                except _StockError as error:
                    if form == "saved":
                        raise
                    outcome.notes.append(str(error))
            outcome.status = "equal"
    except NotBuiltError as error:
        outcome.status = "not built" if may_have_mapping(subject) else "no mapping"
        outcome.reason = str(error)
    except _StockError as error:
        outcome.status, outcome.reason = "stock fails", str(error)
    except _RefusedError as error:
        outcome.status, outcome.reason = "refused", str(error)
    except _WrongError as error:
        outcome.status, outcome.reason = "WRONG", str(error)
    except Exception as error:  # noqa: BLE001 - of whatever kind, it is what the sweep looks for
        outcome.status, outcome.reason = "WRONG", one_line(error)
    outcome.reason = outcome.reason.replace(str(directory), "")
    return outcome


def check_form(outcome: Outcome, model: Any, form: Form, directory: Path, **options: Any) -> None:
    """Run one form of the source; raises what makes the class `refused`, `stock fails` or `WRONG`.

    Args:
        outcome: gets what is found.
        model: just built, not loaded.
        form: of the source.
        directory: to write in.
        options: of `save_pretrained`, for the source.
    """
    source, reference = directory / "source", directory / "reference"
    model.save_pretrained(reference, save_original_format=False)
    save_source(model, source, form, **options)
    expected = read_raw(reference)
    saved = state_of(model)
    try:
        stock = load_stock(type(model), source, saved)
    except Exception as error:
        raise _StockError(f"{form}: transformers does not load its own save: {one_line(error)}") from error
    fault = stock.fault or load_stock(type(model), reference, saved).fault
    if not stock.is_whole:
        raise _StockError(f"{form}: transformers does not bring the model back: {stock.fault}")
    outcome.rules = sorted({*outcome.rules, *describe_rules(stock.rules)})
    if read_raw(source).keys() != expected.keys():
        outcome.renamed.append(form)
    try:
        _check_model(outcome, stock.model, form, source, expected, directory)
    except (_WrongError, _RefusedError) as error:
        if fault:
            raise _StockError(f"{form}: transformers does not bring the model back: {fault}; here, {error}") from error
        raise
    if fault:
        outcome.notes.append(f"{form}: transformers changes tensors after loading: {fault}")
    outcome.forms.append(form)


def bake(source: Path, output: Path, work: Path) -> None:
    """Convert a source into module names, with a recipe that patches nothing."""
    model_type = json.loads((source / CONFIG_NAME).read_text(encoding="utf-8"))["model_type"]
    apply_recipe(str(bake_recipe(work, model_type)), source, output)


def _check_model(
    outcome: Outcome, stock: Any, form: Form, source: Path, expected: dict[str, RawTensor], directory: Path
) -> None:
    """Bake a source; compare the files with the reference, the loaded model with the stock one, and a save with stock's.

    Args:
        outcome: gets what is found.
        stock: the model that stock transformers loads from the source.
        form: of the source.
        source: the directory to convert.
        expected: the tensors of the reference.
        directory: to write in.
    """
    converted = directory / "converted"
    try:
        bake(source, converted, directory)
    except KconvertError as error:
        raise _RefusedError(f"{form}: {error.what}") from error
    _require(difference(read_raw(converted), expected), f"{form}: the converted files differ from the reference")
    loaded = aligned(runtime.load_converted(converted, kernels="reference"))
    _require(difference(state_of(loaded), state_of(stock)), f"{form}: the loaded model differs from the stock one")
    stock = aligned(stock)
    logits = run_forward(stock)
    if logits is not None and same_output(run_forward(stock), logits):  # some draw random numbers
        _require("" if same_output(run_forward(loaded), logits) else "other bits", f"{form}: the output differs")
        outcome.logits.append(form)
    stock.save_pretrained(directory / "stock_again")
    loaded.save_pretrained(directory / "loaded_again")
    again, written, original = (
        read_raw(path) for path in (directory / "stock_again", directory / "loaded_again", source)
    )
    if written != original:
        _require(
            difference(written, again), f"{form}: a save has neither the source's tensors nor those of a stock save"
        )
        outcome.notes.append(f"{form}: transformers does not write the source back: {difference(again, original)}")
    elif written != again:
        outcome.notes.append(f"{form}: transformers does not write the source back, kconvert does")


def _require(difference_found: str, what: str) -> None:
    if difference_found:
        raise _WrongError(f"{what}: {difference_found}")
