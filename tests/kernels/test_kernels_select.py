"""The choice of a kernel is a pure function: every rejection and every device is tried on any machine."""

from __future__ import annotations

from typing import Any

import pytest

from kconvert.kernels.select import ANY_DEVICE, Candidate, Mode, Selection, Verdict, select

CUDA = Candidate("cuda_k", "cuda", "recipe")
NPU = Candidate("npu_k", "npu", "recipe")
CPU = Candidate("cpu_k", "cpu", "default")
PACKAGE = Candidate("./p:K", ANY_DEVICE, "recipe")
INFERENCE_ONLY = Candidate("fast_k", "cuda", "recipe", has_backward=False)
BF16_ONLY = Candidate("bf16_k", "cuda", "recipe", dtypes=frozenset({"bfloat16", "float16"}))


def choose(candidates: list[Candidate], device: str = "cpu", **kw: Any) -> Selection:
    values: dict[str, Any] = {"dtype": "float32", "mode": Mode.INFERENCE, "unavailable": {}, "unsupported": {}}
    return select(candidates, device=device, **{**values, **kw})


@pytest.mark.parametrize(("device", "chosen"), [("cuda", "cuda_k"), ("npu", "npu_k"), ("cpu", "cpu_k"), ("xpu", None)])
def test_by_the_device_of_the_input(device: str, chosen: str | None) -> None:
    assert choose([CUDA, NPU, CPU], device).kernel_id == chosen


def test_every_candidate_is_in_the_trace_in_order() -> None:
    assert choose([CUDA, NPU, CPU], "npu").trace == (
        Verdict("cuda_k", "recipe", False, "runs on cuda, the input is on npu"),
        Verdict("npu_k", "recipe", True, "chosen"),
        Verdict("cpu_k", "default", False, "runs on cpu, the input is on npu"),
    )


def test_the_first_that_can_run_wins_and_the_others_say_so() -> None:
    second = Candidate("other_k", "cuda", "default")
    selection = choose([CUDA, second], "cuda")
    assert selection.kernel_id == "cuda_k"
    assert selection.trace[1] == Verdict("other_k", "default", False, "cuda_k comes first")
    assert choose([second, CUDA], "cuda").kernel_id == "other_k"


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu", "xpu", "mps"])
def test_a_package_runs_on_any_device(device: str) -> None:
    assert choose([PACKAGE], device).kernel_id == "./p:K"


@pytest.mark.parametrize(
    ("kw", "reason"),
    [
        ({"device": "npu"}, "runs on cuda, the input is on npu"),
        ({"unavailable": {"cuda_k": "no driver"}}, "no driver"),
        ({"unsupported": {"cuda_k": "gelu"}}, "gelu"),
        # an input that is moved would not help: what keeps the kernel from the machine comes first
        ({"device": "npu", "unavailable": {"cuda_k": "no driver"}}, "no driver"),
        ({"unavailable": {"cuda_k": "no driver"}, "unsupported": {"cuda_k": "gelu"}}, "no driver"),
    ],
)
def test_rejections(kw: dict[str, Any], reason: str) -> None:
    selection = choose([CUDA], **{"device": "cuda", **kw})
    assert selection == Selection(None, (Verdict("cuda_k", "recipe", False, reason),))
    assert selection.reasons() == f"cuda_k: {reason}"


def test_reasons_of_other_kernels_do_not_count() -> None:
    assert choose([CUDA], "cuda", unavailable={"npu_k": "x"}, unsupported={"cpu_k": "y"}).kernel_id == "cuda_k"


@pytest.mark.parametrize(("dtype", "chosen"), [("bfloat16", "bf16_k"), ("float16", "bf16_k"), ("float32", None)])
def test_dtypes(dtype: str, chosen: str | None) -> None:
    selection = choose([BF16_ONLY], "cuda", dtype=dtype)
    assert selection.kernel_id == chosen
    assert selection.trace[0].reason == ("chosen" if chosen else "does not take float32")


@pytest.mark.parametrize(("mode", "chosen"), [(Mode.INFERENCE, "fast_k"), (Mode.TRAINING, "cuda_k")])
def test_no_backward_no_training(mode: Mode, chosen: str) -> None:
    selection = choose([INFERENCE_ONLY, CUDA], "cuda", mode=mode)
    assert selection.kernel_id == chosen
    if mode is Mode.TRAINING:
        assert selection.trace[0] == Verdict("fast_k", "recipe", False, "has no backward")


def test_no_candidates_is_the_reference() -> None:
    assert choose([]) == Selection(None, ())
    assert choose([]).reasons() == ""


def test_the_same_arguments_give_the_same_choice() -> None:
    candidates = [CUDA, NPU, CPU]
    assert choose(candidates) == choose(candidates)
    assert candidates == [CUDA, NPU, CPU]
