"""Times every kernel that runs on a device, once it was seen to be right there.

Each subject is a call of the same inputs: the kernel, the stock module (the reference's arithmetic), that under
`torch.compile`, and where there is one torch's own function and Liger's module.  All of them are timed in turn, in one
process.  A kernel whose result or gradients are further from the stock module than `verify` allows is not timed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn

from kconvert import __version__
from kconvert.benching.cases import Case, Inputs, cases_of, first_tensor
from kconvert.benching.parts import Part, parts_of
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
_SHORT = 50e-6
"""Seconds of a call on the device up to which the host is what it may wait for."""


@dataclass(frozen=True)
class BenchRow:
    """One kernel on one case.

    Attributes:
        kernel: its ID.
        case: the sizes.
        dtype: of the weights and inputs.
        mode: `forward`, or `forward + backward`.
        error: the largest difference from the stock module, as a share of its largest value.
        seconds: subject (`kernel`, `reference`, `compile`, `torch`, `grouped_mm`, `liger`) to seconds on the device.
        host_seconds: the same on the host, until the device has its work; where the device is that fast only.
        bytes_moved: what the kernel has to read and write at least; 0 where that is not what it costs.
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
    bytes_moved: int
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

    found = {"kconvert": __version__}
    for name in ("torch", "triton", "transformers", "liger-kernel"):
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
        return BenchRow(kernel_id, case, dtype_name, "forward", None, {}, {}, 0, None, problem)

    if reason is not None:
        yield refused("-", reason)
        return
    is_small, is_gelu = device.type == "cpu", kernel_id.endswith("_geglu")
    for case in cases_of(kernel.layout.spec.name, is_small=is_small, is_gelu=is_gelu):
        torch.manual_seed(0)
        try:
            subject = _Subject.of_case(case, kernel_id, kernel, device, dtype)
        except _NotMeasured as why_not:
            yield refused(case.label, str(why_not))
            continue
        yield from _rows_of_subject(subject, has_backward=kernel.has_backward)
        del subject
    for part in parts_of(kernel_id):
        torch.manual_seed(0)
        yield from _rows_of_subject(_Subject.of_part(part, kernel_id, device, dtype), has_backward=kernel.has_backward)


def _rows_of_subject(subject: _Subject, *, has_backward: bool) -> Iterator[BenchRow]:
    dtype = str(subject.dtype).removeprefix("torch.")
    for needs_grad in (False, True) if has_backward else (False,):
        mode = "forward + backward" if needs_grad else "forward"
        error, problem = subject.check(needs_grad=needs_grad)
        if problem is not None:
            yield BenchRow(subject.kernel_id, subject.label, dtype, mode, error, {}, {}, 0, None, problem)
            return
        yield subject.timed(mode, error, needs_grad=needs_grad)


class _NotMeasured(Exception):
    """Why a kernel is not timed on a case."""


@dataclass(frozen=True)
class _Subject:
    """A kernel and what it is compared with, as calls of the same inputs.

    Attributes:
        label: the case, for people.
        calls: subject to call; `kernel` and `reference` are always there.
        stock: what the kernel has to give.
        modules: of the kernel's call and of `stock`, whose gradients are cleared.
        num_moved, result: see `Case`.
        in_order: what of a call is compared, without what the layout leaves open.
    """

    label: str
    kernel_id: str
    device: torch.device
    dtype: torch.dtype
    calls: Mapping[str, Callable[..., Any]]
    stock: Callable[..., Any]
    modules: Sequence[nn.Module]
    inputs: Inputs
    num_moved: int
    result: Callable[[Any], torch.Tensor] = first_tensor
    in_order: Callable[[Any], Any] = lambda result: result

    @classmethod
    def of_case(
        cls, case: Case, kernel_id: str, kernel: type[LayoutKernel], device: torch.device, dtype: torch.dtype
    ) -> _Subject:
        """The kernel in a patched module beside stock modules.

        Raises:
            _NotMeasured: the kernel does not take the module.
        """
        layout = cast("type[Layout]", load_layout(kernel.layout.spec.name))
        stock = [module.to(device=device, dtype=dtype) for module in case.modules()]
        with torch.no_grad():
            packed = cast("Any", layout.patch([copy.deepcopy(module) for module in stock]))
            unfit = kernel.supports(packed)
        if unfit is not None:
            raise _NotMeasured(unfit)
        packed.kconvert_layout = layout.spec.name
        assign_kernels(packed, layout, (kernel_id,), origin="call", with_defaults=False, parts_with_defaults=True)
        for module in filter(is_patched, packed.modules()):
            # else the reference would be timed in the place of a kernel that fails
            module.kconvert_dispatch.strict = True

        def run_stock(*args: Any, **kwargs: Any) -> Any:
            first, *others = stock
            result = first(*args, **kwargs)
            for module in others:
                result = module(result)
            return result

        calls = {"kernel": packed, "reference": run_stock}
        if case.is_compiled:
            calls["compile"] = torch.compile(run_stock)
        for name, make in case.peers.items():
            with suppress(ImportError):  # not installed
                calls[name] = make(stock[0])
        inputs = case.inputs(device, dtype)
        return cls(
            case.label,
            kernel_id,
            device,
            dtype,
            calls,
            run_stock,
            [packed, *stock],
            inputs,
            case.num_moved,
            case.result,
            layout.kconvert_in_order,
        )

    @classmethod
    def of_part(cls, part: Part, kernel_id: str, device: torch.device, dtype: torch.dtype) -> _Subject:
        """A function of tensors beside the stock one."""
        calls = {"kernel": part.kernel, "reference": part.stock, "compile": torch.compile(part.stock)}
        with suppress(ImportError):
            calls["liger"] = part.liger()
        inputs = part.inputs(device, dtype)
        return cls(part.label, kernel_id, device, dtype, calls, part.stock, (), inputs, part.num_moved)

    def check(self, *, needs_grad: bool) -> tuple[float | None, str | None]:
        """How far the kernel is from the stock module, and why that is too far."""
        limit = limit_of(MODULE_LIMITS, str(self.dtype).removeprefix("torch."))
        try:
            expected = self._results(self.stock, needs_grad=needs_grad)
            found = self._results(self.calls["kernel"], needs_grad=needs_grad)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is a finding
            return None, f"does not run ({one_line(error)})"
        difference = compare_outputs(Output(expected), Output(found))
        verdict, reason = judge(difference, limit=limit)
        if verdict.is_pass:
            return difference.relative, None
        said = reason or f"{difference.relative} of the largest value away, allowed {limit:.1e}"
        return difference.relative, f"is not the stock result: {said}"

    def _results(self, call: Callable[..., Any], *, needs_grad: bool) -> list[torch.Tensor]:
        """The result of a call, and with `needs_grad` the gradient of its first input."""
        inputs = self._with_grad() if needs_grad else self.inputs
        with torch.set_grad_enabled(needs_grad):
            output = self.result(self.in_order(call(*inputs.args, **inputs.kwargs)))
        if not needs_grad:
            return [output]
        torch.manual_seed(1)
        output.backward(torch.randn_like(output))
        for module in self.modules:
            module.zero_grad(set_to_none=True)
        return [output.detach(), cast("torch.Tensor", inputs.args[0].grad)]

    def _with_grad(self) -> Inputs:
        first, *others = self.inputs.args
        return Inputs((first.detach().clone().requires_grad_(), *others), self.inputs.kwargs)

    def timed(self, mode: str, error: float | None, *, needs_grad: bool) -> BenchRow:
        """The row of a kernel that is right."""
        seconds, host = {}, {}
        for name, call in self.calls.items():
            run = self._backward_of(call) if needs_grad else self._forward_of(call)
            try:
                seconds[name] = median_seconds(run, self.device)
                if seconds["kernel"] < _SHORT and self.device.type != "cpu":
                    host[name] = host_seconds(run, self.device)
            except Exception:
                if name == "kernel":
                    raise
        return BenchRow(
            self.kernel_id,
            self.label,
            str(self.dtype).removeprefix("torch."),
            mode,
            error,
            seconds,
            host,
            self.num_moved * self.dtype.itemsize if not needs_grad else 0,
            self._copy_share(seconds["kernel"]) if not needs_grad else None,
            None,
        )

    def _forward_of(self, call: Callable[..., Any]) -> Callable[[], Any]:
        args, kwargs = self.inputs.args, self.inputs.kwargs

        def run() -> Any:
            with torch.no_grad():
                return call(*args, **kwargs)

        return run

    def _backward_of(self, call: Callable[..., Any]) -> Callable[[], Any]:
        inputs = self._with_grad()
        with torch.enable_grad():
            gradient = torch.randn_like(self.result(call(*inputs.args, **inputs.kwargs)))
        leaf = inputs.args[0]

        def run() -> None:
            leaf.grad = None
            self.result(call(*inputs.args, **inputs.kwargs)).backward(gradient)

        return run

    def _copy_share(self, seconds: float) -> float | None:
        if not self.num_moved:
            return None
        moved = self.num_moved * self.dtype.itemsize
        return moved / seconds / copy_bytes_per_second(self.device, max(moved // 2, 1))
