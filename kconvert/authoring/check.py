"""`check_kernel`: every check of a two-class package, in an order in which a later one can rely on the earlier.

The person names the package's folder in the call itself, and that is the consent to run its code: nothing in a model
directory or a recipe can add to it.  ID and digest are printed before the import.  A check that fails does not stop the
others unless they need what it did not find.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kconvert.authoring.behaviour import check_compile, check_state
from kconvert.authoring.classes import check_classes, check_signature
from kconvert.authoring.numbers import check_gradient, check_inverse, check_numerics, check_reference, check_shapes
from kconvert.authoring.report import Check, CheckReport, Outcome, worst_first
from kconvert.authoring.subject import OWN_RECIPE, KernelPath, Trial, build_trials, recipe_for
from kconvert.checkpoint import Checkpoint, open_checkpoint
from kconvert.convert.prepare import Prepared, check, open_source
from kconvert.convert.resolve import ResolvedRecipe, resolve_recipe
from kconvert.convert.stock import build_stock_model
from kconvert.errors import CheckpointError, KconvertError, KernelRefusedError, RecipeError, one_line
from kconvert.kernels.packages import copy_package, import_package
from kconvert.plan import Plan, match_entries
from kconvert.recipe import Recipe, profile_of

__all__ = ["check_kernel"]


def check_kernel(
    kernel: str,
    *,
    model_dir: str | Path,
    targets: Sequence[tuple[str, str]] = (),
    recipe: str | Path | None = None,
    device: str = "cpu",
) -> CheckReport:
    """Check a two-class package against the modules that it is to replace; its code runs.

    Args:
        kernel: `folder:ClassName`.
        model_dir: a checkpoint that has such modules; a small one will do, it is loaded whole.
        targets: (class name, path pattern) of the replaced module, or of the fused ones in pair order.
        recipe: in place of `targets`, a recipe that gives the kernel to modules.
        device: where everything runs, as torch names it.

    Returns:
        The report; `report.failures` is empty for a kernel that can be used.

    Raises:
        UsageError: the call itself is wrong.
        RecipeError: a pattern matches nothing, or a class is another one.
        CheckpointError: the model directory is damaged, or is none.
    """
    named = KernelPath.parse(kernel)
    directory = Path(model_dir)
    checks: list[Check] = []
    with _without_place():
        made = recipe_for(named, targets, Path(recipe) if recipe is not None else None, directory)
    resolved = _resolve(made, named, checks)
    digest = next(iter(resolved.packages.values())).copy.digest if resolved is not None else None
    prepared = _prepare(made, resolved, directory, checks) if resolved is not None else None
    modules: tuple[tuple[str, ...], ...] = ()
    if prepared is not None:
        trials = _trials(prepared, directory, device, checks)
        modules = tuple(trial.paths for trial in trials)
        if not any(check.name == "signature" and check.outcome is Outcome.FAILED for check in checks):
            _run(trials, checks)  # else every call would fail for that one reason
    return CheckReport(named.text, digest, device, modules, tuple(checks))


def _resolve(recipe: Recipe, kernel: KernelPath, checks: list[Check]) -> ResolvedRecipe | None:
    """Import the package: the two classes under their names, and a mapping of known rules."""
    try:
        resolved = resolve_recipe(recipe, trust_remote_code=True)
    except KconvertError as error:
        checks.append(Check(_stage_of(kernel), Outcome.FAILED, error.what, error.fix))
        return None
    classes = next(iter(resolved.packages.values())).classes
    name = kernel.class_name
    text = f"{name} and {name}Layout are in one module" if classes.layout is not None else f"{name} has no layout"
    checks += [Check("classes", Outcome.OK, text), check_classes(classes)]
    return resolved


def _stage_of(kernel: KernelPath) -> str:
    """What an error of `resolve_recipe` is about: the two classes, or else the mapping."""
    try:
        import_package(copy_package(kernel.folder, kernel.text), kernel.class_name)
    except KconvertError:
        return "classes"
    return "mapping"


def _prepare(recipe: Recipe, resolved: ResolvedRecipe, model_dir: Path, checks: list[Check]) -> Prepared | None:
    """Everything that `apply` checks before it writes."""
    checkpoint = open_checkpoint(model_dir)
    try:
        prepared = check(open_source(profile_of(recipe, None), model_dir, resolved=resolved))
    except (CheckpointError, RecipeError, KernelRefusedError) as error:
        if checkpoint.quantization is not None or checkpoint.model_type not in recipe.model_type:
            raise
        _check_places(checkpoint, resolved)
        name = "signature" if isinstance(error, KernelRefusedError) else "mapping"
        checks.append(Check(name, Outcome.FAILED, error.what, error.fix))
        return None
    checks.append(Check("mapping", Outcome.OK, _mapping_text(prepared.plan)))
    return prepared


def _mapping_text(plan: Plan) -> str:
    num_places, num_targets = len(plan.claims), sum(step.entry is not None for step in plan.steps)
    where = "1 place" if num_places == 1 else f"{num_places} places"
    return f"every tensor of {where} is taken, and all {num_targets // num_places} parameters of the layout are filled"


def _check_places(checkpoint: Checkpoint, resolved: ResolvedRecipe) -> None:
    """Raise what is wrong with the model or with the paths, whatever package they are given."""
    stock = build_stock_model(checkpoint)
    with _without_place():
        match_entries(resolved.entries, tuple(stock.classes), stock.classes)


@contextmanager
def _without_place() -> Iterator[None]:
    """Errors of the recipe that is written here do not name its lines, which nobody has seen."""
    try:
        yield
    except RecipeError as error:
        where = error.where if error.where and not error.where.startswith(f"{OWN_RECIPE}:") else None
        raise type(error)(error.what, where=where, fix=error.fix) from None


def _trials(prepared: Prepared, model_dir: Path, device: str, checks: list[Check]) -> list[Trial]:
    try:
        trials, failure = build_trials(prepared, model_dir, device)
    except KconvertError:
        raise
    except Exception as error:  # noqa: BLE001 - the layout's own __init__ may raise anything outside meta
        fix = "the layout's __init__ has to work on any device"
        checks.append(Check("layout", Outcome.FAILED, f"the layout cannot be built ({one_line(error)})", fix))
        return []
    kernel = next(iter(prepared.resolved.packages.values())).classes.kernel
    checks.append(worst_first([check_signature(kernel, type(trial.stock[0])) for trial in trials]))
    if failure is not None:
        checks.append(Check("inputs", Outcome.NOT_RUN, f"the model does not run on tokens alone ({failure})"))
    return trials


def _run(trials: Iterable[Trial], checks: list[Check]) -> None:
    """Every check on every trial; of each check the result that says most is kept."""
    by_name: dict[str, list[Check]] = {}
    for trial in trials:
        for found in _checks(trial):
            by_name.setdefault(found.name, []).append(found)
    checks += [worst_first(same) for same in by_name.values()]


def _checks(trial: Trial) -> Iterator[Check]:
    yield check_inverse(trial)
    yield check_reference(trial)
    yield from check_numerics(trial)
    yield from check_shapes(trial)
    yield check_gradient(trial)
    yield check_state(trial)
    yield check_compile(trial)
