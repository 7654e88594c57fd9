"""Level `modules`: every patched module against the stock modules it stands for, on the same weights and inputs.

Each runs on random hidden states in a call that the stock model really makes, in the checkpoint's dtype and cast to
float32, bfloat16, float16 and (reference only) float64.  There a single flipped bit of a weight shows, but for the
lowest bits of a float32 weight whose result the stock code itself rounds to float32.  The reference has to give the
stock bits, the kernel that "auto" chooses may be as far away as `tolerances` says.  A fusion is compared from the
input of its first member to the output of its last.  A module that a forward on tokens does not reach is reported
as such, and is no pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from kconvert.errors import one_line
from kconvert.kernels.assign import load_layout
from kconvert.kernels.dispatch import Dispatch
from kconvert.kernels.layout import Layout
from kconvert.kernels.probe import capture_calls
from kconvert.kernels.report import REFERENCE
from kconvert.kernels.select import Mode
from kconvert.manifest import PatchRecord
from kconvert.parity.compare import Output, compare_outputs, judge
from kconvert.parity.inputs import ModuleInput, cast_module, run_chain
from kconvert.parity.job import SEED, VerifyJob
from kconvert.parity.loading import choose_kernels, dtype_name, load_packed, load_stock, reference_only, release
from kconvert.parity.results import ModuleResult, ModulesLevel, Result, Verdict
from kconvert.parity.tolerances import MODULE_LIMITS, REFERENCE_LIMITS, limit_of

__all__ = ["compare_modules"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_KERNEL_DTYPES = ("float32", "bfloat16", "float16")


class _Expected:
    """What the stock modules of one claim take and give, by dtype; text in place of an output says why it is missing."""

    def __init__(self, inputs: ModuleInput) -> None:
        self.inputs = inputs
        self.outputs: dict[str, Output | str] = {}


def compare_modules(job: VerifyJob) -> ModulesLevel:
    """Run the level; one model is in memory at a time."""
    own, expected, stopped = _observe_stock(job)
    release()
    modules = _compare_packed(job, own, expected) if expected else _unreached(job)
    return ModulesLevel(
        modules=modules,
        own_dtype=own,
        from_source=job.source is not None,
        stopped=stopped,
        settings={"seed": SEED, "limits": {"reference": REFERENCE_LIMITS, "auto": MODULE_LIMITS}},
    )


def _claims(job: VerifyJob) -> Iterator[tuple[PatchRecord, tuple[str, ...]]]:
    for record in job.manifest.patches:
        for paths in record.modules:
            yield record, paths


def _observe_stock(job: VerifyJob) -> tuple[str, dict[tuple[str, ...], _Expected], str | None]:
    """The checkpoint's dtype, what every claim that is reached gives, and why the model did not run."""
    model = load_stock(job)
    own = dtype_name(model.dtype)
    claims = list(_claims(job))
    calls, stopped = capture_calls(model, [paths[0] for _, paths in claims], seed=SEED)
    expected: dict[tuple[str, ...], _Expected] = {}
    for number, (record, paths) in enumerate(claims):
        if paths[0] not in calls:
            continue
        layout = load_layout(record.layout.name) if record.layout.package is None else None
        modules = tuple(model.get_submodule(path) for path in paths)
        found = _Expected(ModuleInput.from_call(modules[0], calls[paths[0]], seed=SEED + number))
        for dtype in _dtypes_of(modules, own, job):
            found.outputs[dtype_name(dtype)] = _stock_output(modules, layout, found.inputs, dtype, own, job.device)
        expected[paths] = found
    return own, expected, stopped


def _dtypes_of(modules: tuple[nn.Module, ...], own: str, job: VerifyJob) -> tuple[torch.dtype, ...]:
    """The checkpoint's own dtype, and the others where all weights are plain floats that can be cast."""
    own_dtype = cast("torch.dtype", getattr(torch, own))
    kinds = {weight.dtype for module in modules for weight in (*module.parameters(), *module.buffers())}
    if not {kind for kind in kinds if kind not in (torch.bool, torch.int64)} <= set(_FLOATS):
        return (own_dtype,)
    has_float64 = torch.device(job.device).type in ("cpu", "cuda")
    others = [dtype for dtype in _FLOATS if dtype != own_dtype and (dtype != torch.float64 or has_float64)]
    return (own_dtype, *others)


def _stock_output(
    modules: tuple[nn.Module, ...],
    layout: type[Layout] | None,
    inputs: ModuleInput,
    dtype: torch.dtype,
    own: str,
    device: str,
) -> Output | str:
    is_own = dtype_name(dtype) == own
    try:
        run = modules if is_own else tuple(cast_module(module, dtype) for module in modules)
        result = run_chain(run, inputs.build(device, None if is_own else dtype), device)
        return Output(result if layout is None else layout.kconvert_in_order(result))
    except Exception as error:  # noqa: BLE001 - foreign model code may raise anything, e.g. in a dtype it is not for
        return f"the stock module does not run ({one_line(error)})"


def _unreached(job: VerifyJob) -> tuple[ModuleResult, ...]:
    return tuple(ModuleResult(paths, record.classes, record.layout.name, ()) for record, paths in _claims(job))


def _compare_packed(job: VerifyJob, own: str, expected: dict[tuple[str, ...], _Expected]) -> tuple[ModuleResult, ...]:
    model = load_packed(job)
    found = []
    for record, paths in _claims(job):
        results: list[Result] = []
        if paths in expected:
            module = model.get_submodule(paths[0])
            for dtype, output in expected[paths].outputs.items():
                results += _compare_in(job, module, paths[0], dtype, dtype == own, expected[paths].inputs, output)
        found.append(ModuleResult(paths, record.classes, record.layout.name, tuple(results)))
    return tuple(found)


def _compare_in(
    job: VerifyJob,
    module: nn.Module,
    path: str,
    dtype: str,
    is_own: bool,
    inputs: ModuleInput,
    expected: Output | str,
) -> Iterator[Result]:
    """The reference and, where kernels run in this dtype, the chosen one."""
    choices = ("reference", "auto") if is_own or dtype in _KERNEL_DTYPES else ("reference",)
    if isinstance(expected, str):
        verdict = Verdict.FAILED if is_own else Verdict.NOT_RUN
        yield from (Result(dtype, kernels, REFERENCE, verdict, None, 0.0, expected) for kernels in choices)
        return
    target = cast("torch.dtype", getattr(torch, dtype))
    if not is_own:
        module = cast_module(module, target)
        choose_kernels(module, job.manifest, prefix=path)
    for kernels in choices:
        limit = limit_of(REFERENCE_LIMITS if kernels == "reference" else MODULE_LIMITS, dtype)
        kernel = REFERENCE if kernels == "reference" else _chosen_kernel(module, job.device)
        call = inputs.build(job.device, None if is_own else target)
        try:
            if kernels == "reference":
                with reference_only(module):
                    result = run_chain((module,), call, job.device)
            else:
                result = run_chain((module,), call, job.device)
            output = Output(module.kconvert_in_order(result) if isinstance(module, Layout) else result)
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything, and that is a finding
            yield Result(dtype, kernels, kernel, Verdict.FAILED, None, limit, f"does not run ({one_line(error)})")
            continue
        difference = compare_outputs(expected, output)
        verdict, reason = judge(difference, limit=limit)
        yield Result(dtype, kernels, kernel, verdict, difference.relative, limit, reason)


def _chosen_kernel(module: Any, device: str) -> str:
    dispatch = cast("Dispatch", module.kconvert_dispatch)
    selection = dispatch.selection(torch.device(device).type, Mode.INFERENCE)
    return REFERENCE if selection is None or selection.kernel_id is None else selection.kernel_id
