"""Times every kernel that runs on a device, once it was seen to be right there.

Each subject is a call of the same inputs: the kernel, the layout's reference (the stock arithmetic), the stock module under
`torch.compile`, and Liger's module where there is one.  All of them are timed in turn, in one process.  A kernel whose result
or gradients are further from the stock module than `verify` allows is not timed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from kconvert.benching.cases import Case, Inputs, cases_of
from kconvert.benching.timing import copy_bytes_per_second, host_seconds, median_seconds
from kconvert.errors import UsageError, one_line
from kconvert.kernels.assign import assign_kernels, load_layout
from kconvert.kernels.base import DeviceType, LayoutKernel
from kconvert.kernels.device import device_reason
from kconvert.kernels.layout import Layout, is_patched
from kconvert.kernels.registry import Registry, check_deps_reason, get_known_kernel
from kconvert.parity.compare import Output, compare_outputs, judge
from kconvert.parity.tolerances import MODULE_LIMITS, limit_of

__all__ = ["BenchReport", "BenchRow", "bench_kernels"]

_LARGE_COPY = 1 << 30


@dataclass(frozen=True)
class BenchRow:
    """One kernel on one case.

    Attributes:
        kernel: its ID.
        case: the sizes.
        dtype: of the weights and inputs.
        mode: `forward`, or `forward + backward`.
        error: the largest difference from the stock module, as a share of its largest value.
        seconds: subject (`kernel`, `reference`, `compile`, `liger`) to seconds on the device.
        host_seconds: the same on the host, until the device has its work; of one-row cases only.
        copy_share: of the kernel, the share of the speed of a copy of as many bytes; None where the case moves few.
        problem: why it was not timed.
    """

    kernel: str
    case: str
    dtype: str
    mode: str
    error: float | None
    seconds: Mapping[str, float]
    host_seconds: Mapping[str, float]
    copy_share: float | None
    problem: str | None


@dataclass(frozen=True)
class BenchReport:
    """All rows, the machine, and the speed of a copy of 1 GiB on it, in bytes read and written per second."""

    device: str
    device_name: str
    versions: Mapping[str, str]
    copy_bytes_per_second: float
    rows: tuple[BenchRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def bench_kernels(
    device: str,
    *,
    kernels: Sequence[str] = (),
    dtype: str = "bfloat16",
) -> BenchReport:
    """Time kernels on a device.

    Args:
        device: `cpu`, `cuda`, `cuda:1`, `npu`.
        kernels: IDs; every kernel of the device's type if left out.
        dtype: of weights and inputs.

    Raises:
        UsageError: a device or dtype that torch does not have, or one that cannot be used here.
        UnknownKernelError: an ID that nothing has.
    """
    where, kind = _device_of(device)
    floats = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in floats:
        raise UsageError(f"unknown dtype {dtype!r}", fix=f"one of {', '.join(floats)}")
    chosen = {kernel_id: get_known_kernel(kernel_id) for kernel_id in kernels} or Registry.catalog()
    rows: list[BenchRow] = []
    for kernel_id, kernel in chosen.items():
        if kernel.device() is not kind or not issubclass(kernel, LayoutKernel):
            if kernels:
                raise UsageError(f"kernel {kernel_id!r} is for {kernel.device()}, not for {device}")
            continue
        rows += _rows_of(kernel_id, kernel, where, floats[dtype])
    return BenchReport(device, _name_of(where), _versions(), copy_bytes_per_second(where, _LARGE_COPY), tuple(rows))


def _device_of(device: str) -> tuple[torch.device, DeviceType]:
    try:
        kind = DeviceType(device.partition(":")[0])
    except ValueError:
        known = ", ".join(each.value for each in DeviceType)
        raise UsageError(f"unknown device {device!r}", fix=f"one of {known}") from None
    reason = device_reason(kind)
    if reason is not None:
        raise UsageError(f"device {device!r} cannot be used: {reason}")
    return torch.device(device), kind


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads" if device.type == "cpu" else device.type


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("kconvert", "torch", "triton", "transformers", "liger-kernel"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _rows_of(
    kernel_id: str, kernel: type[LayoutKernel], device: torch.device, dtype: torch.dtype
) -> Iterator[BenchRow]:
    reason = check_deps_reason(kernel)
    dtype_name = str(dtype).removeprefix("torch.")

    def refused(case: str, problem: str) -> BenchRow:
        return BenchRow(kernel_id, case, dtype_name, "forward", None, {}, {}, None, problem)

    if reason is not None:
        yield refused("-", reason)
        return
    for case in cases_of(kernel.layout.spec.name, is_small=device.type == "cpu"):
        torch.manual_seed(0)
        try:
            subject = _Subject(case, kernel_id, kernel, device, dtype)
        except _NotMeasured as why_not:
            yield refused(case.label, str(why_not))
            continue
        for needs_grad in (False, True) if kernel.has_backward else (False,):
            mode = "forward + backward" if needs_grad else "forward"
            error, problem = subject.check(needs_grad=needs_grad)
            if problem is not None:
                yield BenchRow(kernel_id, case.label, dtype_name, mode, error, {}, {}, None, problem)
                break
            yield subject.timed(mode, error, needs_grad=needs_grad)
        del subject


class _NotMeasured(Exception):
    """Why a kernel is not timed on a case."""


class _Subject:
    """The modules of a case on the device, and calls of them."""

    def __init__(
        self, case: Case, kernel_id: str, kernel: type[LayoutKernel], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._case, self._kernel_id, self._device, self._dtype = case, kernel_id, device, dtype
        layout = cast("type[Layout]", load_layout(kernel.layout.spec.name))
        self._stock = [module.to(device=device, dtype=dtype) for module in case.modules()]
        self._inputs: Inputs = case.inputs(device, dtype)
        with torch.no_grad():
            self._packed = cast("Any", layout.patch([copy.deepcopy(module) for module in self._stock]))
            unfit = kernel.supports(self._packed)
        if unfit is not None:
            raise _NotMeasured(unfit)
        self._packed.kconvert_layout = layout.spec.name
        assign_kernels(self._packed, layout, (kernel_id,), origin="call", with_defaults=False, parts_with_defaults=True)
        for module in filter(is_patched, self._packed.modules()):
            module.kconvert_dispatch.strict = (
                True  # else the reference would be timed in the place of a kernel that fails
            )
        self._calls: dict[str, Callable[..., Any]] = {"kernel": self._packed, "reference": self._packed.reference}
        self._calls["compile"] = torch.compile(self._run_stock)
        try:
            if case.liger is not None:
                self._calls["liger"] = case.liger(self._stock[0])
        except ImportError:
            pass  # not installed

    def _run_stock(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self._stock
        result = first(*args, **kwargs)
        for module in others:
            result = module(result)
        return result

    def check(self, *, needs_grad: bool) -> tuple[float | None, str | None]:
        """How far the kernel is from the stock module, and why that is too far."""
        limit = limit_of(MODULE_LIMITS, str(self._dtype).removeprefix("torch."))
        try:
            expected = self._results(self._run_stock, self._stock, needs_grad=needs_grad)
            found = self._results(self._packed, [self._packed], needs_grad=needs_grad)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is a finding
            return None, f"does not run ({one_line(error)})"
        difference = compare_outputs(Output(expected), Output(found))
        verdict, reason = judge(difference, limit=limit)
        if verdict.is_pass:
            return difference.relative, None
        said = reason or f"{difference.relative} of the largest value away, allowed {limit:.1e}"
        return difference.relative, f"is not the stock result: {said}"

    def _results(
        self, call: Callable[..., Any], modules: Sequence[nn.Module], *, needs_grad: bool
    ) -> list[torch.Tensor]:
        """The result of a call, and with `needs_grad` the gradient of its first input."""
        inputs = self._with_grad() if needs_grad else self._inputs
        with torch.set_grad_enabled(needs_grad):
            output = _first(call(*inputs.args, **inputs.kwargs))
        if not needs_grad:
            return [output]
        torch.manual_seed(1)
        output.backward(torch.randn_like(output))
        for module in modules:
            module.zero_grad(set_to_none=True)
        return [output.detach(), cast("torch.Tensor", inputs.args[0].grad)]

    def _with_grad(self) -> Inputs:
        first, *others = self._inputs.args
        return Inputs((first.detach().clone().requires_grad_(), *others), self._inputs.kwargs)

    def timed(self, mode: str, error: float | None, *, needs_grad: bool) -> BenchRow:
        """The row of a kernel that is right."""
        seconds, host = {}, {}
        is_one_row = self._case.label.startswith("1 ")
        for name, call in self._calls.items():
            run = self._backward_of(call) if needs_grad else self._forward_of(call)
            try:
                seconds[name] = median_seconds(run, self._device)
                if is_one_row and self._device.type != "cpu":
                    host[name] = host_seconds(run, self._device)
            except Exception:
                if name == "kernel":
                    raise
        return BenchRow(
            self._kernel_id,
            self._case.label,
            str(self._dtype).removeprefix("torch."),
            mode,
            error,
            seconds,
            host,
            self._copy_share(seconds["kernel"]) if not needs_grad else None,
            None,
        )

    def _forward_of(self, call: Callable[..., Any]) -> Callable[[], Any]:
        args, kwargs = self._inputs.args, self._inputs.kwargs

        def run() -> Any:
            with torch.no_grad():
                return call(*args, **kwargs)

        return run

    def _backward_of(self, call: Callable[..., Any]) -> Callable[[], Any]:
        inputs = self._with_grad()
        with torch.enable_grad():
            gradient = torch.randn_like(_first(call(*inputs.args, **inputs.kwargs)))
        leaf = inputs.args[0]

        def run() -> None:
            leaf.grad = None
            _first(call(*inputs.args, **inputs.kwargs)).backward(gradient)

        return run

    def _copy_share(self, seconds: float) -> float | None:
        if not self._case.num_moved:
            return None
        moved = self._case.num_moved * self._dtype.itemsize
        return moved / seconds / copy_bytes_per_second(self._device, max(moved // 2, 1))


def _first(output: Any) -> torch.Tensor:
    """The first tensor of a result: the hidden states of attention, which gives its weights too."""
    return next(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
