"""`bench-kernels`: right first, then timed, and shown as a person reads it.  No figure is asserted, only what it says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from kconvert.benching import bench_kernels, cases, parts, timing
from kconvert.benching.cases import cases_of
from kconvert.cli import main
from kconvert.errors import UsageError
from kconvert.kernels.ops.gated_mlp.cpu import CpuFusedSwiGLU
from kconvert.kernels.ops.rms_norm.cpu import CpuFusedRMSNorm
from kconvert.kernels.specs import layout_specs

Capture = pytest.CaptureFixture[str]

SIZES = {
    "rms_norm": ((1, 96), (20, 96)),
    "gated_rms_norm": ((4, 96),),
    "gated_mlp": ((4, 32, 48),),
    "norm_gated_mlp": ((4, 32, 48),),
    "qkv_proj": ((4, 32, 4, 2, 8),),
    "rope": ((4, 32, 4, 2, 8),),
    "decoder_layer": ((4, 32, 4, 2, 8),),
    "experts": ((4, 32, 16, 4, 2),),
    "experts_transposed": ((4, 32, 16, 4, 2),),
    "topk_router": ((4, 32, 16, 1), (4, 32, 16, 4)),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SECONDS", 0.0)
    monkeypatch.setattr("kconvert.benching.run._LARGE_COPY", 1 << 20)
    monkeypatch.setattr(torch, "compile", lambda call: call)
    monkeypatch.setattr(cases, "_SMALL", SIZES)


def test_rows_of_a_kernel() -> None:
    report = bench_kernels("cpu", kernels=["cpu_fused_rmsnorm"], dtype="float32")
    assert [(row.case, row.mode) for row in report.rows] == [
        (case, mode) for case in ("1 x 96", "20 x 96") for mode in ("forward", "forward + backward")
    ]
    for row in report.rows:
        assert row.problem is None
        assert row.error is not None
        assert row.error < 1e-5
        assert {"kernel", "reference", "compile"} <= row.seconds.keys()
        assert min(row.seconds.values()) > 0
        assert (row.copy_share is None) == (row.mode != "forward")


def test_every_kernel_of_the_device_is_right() -> None:
    rows = bench_kernels("cpu", dtype="float32").rows
    assert {row.kernel for row in rows} >= {"cpu_fused_rmsnorm", "cpu_fused_qkv", "cpu_fused_decoder_layer"}
    assert {row.problem for row in rows if row.error is not None} == {None}


def test_every_layout_has_cases() -> None:
    for name in layout_specs():
        for is_small in (False, True):
            assert list(cases_of(name, is_small=is_small)), name


@pytest.mark.parametrize(("kernel", "count"), [("cuda_fused_swiglu", 2), ("cuda_fused_rope", 1), ("cuda_fused_moe", 0)])
def test_a_part_is_the_stock_arithmetic(monkeypatch: pytest.MonkeyPatch, kernel: str, count: int) -> None:
    monkeypatch.setattr(parts, "_ACTIVATION_SIZES", ((4, 48), (3, 20)))
    monkeypatch.setattr(parts, "_ROTATION_SIZES", ((5, 4, 2, 16),))
    found = list(parts.parts_of(kernel))
    assert len(found) == count
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for part in found:
        inputs = part.inputs(device, torch.float32)
        with torch.no_grad():
            ours, stock = (tree_leaves(call(*inputs.args, **inputs.kwargs)) for call in (part.kernel, part.stock))
        assert len(ours) == len(stock)
        for one, other in zip(ours, stock, strict=True):
            assert torch.allclose(one, other, atol=1e-5)
        moved = sum(tensor.numel() for tensor in (*inputs.args[:2], *ours) if tensor.dim() != 3)
        assert part.num_moved == moved


def wrong(forward: Callable[..., Any]) -> Callable[..., Any]:
    def off(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs) * 1.01

    return off


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(CpuFusedRMSNorm, "forward", staticmethod(wrong(CpuFusedRMSNorm.forward)))
    argv = ["bench-kernels", "cpu_fused_rmsnorm", "--device", "cpu", "--dtype", "float32"]
    assert main(argv) == 5
    out, err = capsys.readouterr()
    assert "is not the stock result" in out
    assert "kconvert: error: kernel 'cpu_fused_rmsnorm', 1 x 96, forward: is not the stock result" in err
    assert main([*argv, "--json"]) == 5
    value = json.loads(capsys.readouterr().out)
    assert value["exit_code"] == 5
    assert {json.dumps(row["seconds"]) for row in value["rows"]} == {"{}"}


def test_a_kernel_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(CpuFusedSwiGLU, "forward", staticmethod(fails))
    rows = bench_kernels("cpu", kernels=["cpu_fused_swiglu"], dtype="float32").rows
    assert rows
    assert all("no such instruction" in str(row.problem) for row in rows)


def test_the_table_fits_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bench-kernels", "cpu_fused_rmsnorm", "cpu_fused_qkv", "--device", "cpu", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "20 x 96" in out
    assert "/ reference" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--device", "cpu", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["cuda_fused_rmsnorm", "--device", "cpu"], "is for cuda, not for cpu"),
    ],
)
def test_usage(argv: list[str], said: str, capsys: Capture) -> None:
    assert main(["bench-kernels", *argv]) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_kernel(capsys: Capture) -> None:
    assert main(["bench-kernels", "cpu_fused_rmsnrm", "--device", "cpu"]) == 3
    assert "cpu_fused_rmsnorm" in capsys.readouterr().err


def test_a_device_that_is_not_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("it is here")
    with pytest.raises(UsageError, match="'cuda' cannot be used"):
        bench_kernels("cuda")


def test_a_chart_needs_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    argv = ["bench-kernels", "cpu_fused_rmsnorm", "--device", "cpu", "--dtype", "float32"]
    assert main([*argv, "--chart", str(tmp_path / "c.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
