"""Which kernel runs where: the report, and the dispatch behind it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from kconvert.kernels.assign import layout_kernels, load_layout
from kconvert.kernels.dispatch import Dispatch, attach
from kconvert.kernels.layout import Layout, is_patched, patched_class
from kconvert.kernels.registry import Registry, check_deps_reason
from kconvert.kernels.report import ModuleReport, Report, device_in
from kconvert.kernels.select import ANY_DEVICE, Candidate, Mode, Selection, Verdict, select
from tests.runtime.pairs import IDS, Pair, logits

COUNTS = {
    "qwen3": {"cpu_fused_qkv": 2, "cpu_fused_rmsnorm": 9, "cpu_fused_swiglu": 2},
    "qwen3-fused-norm-mlp": {"cpu_fused_qkv": 2, "cpu_fused_rmsnorm": 7, "cpu_fused_rmsnorm_swiglu": 2},
    "llama": {"cpu_fused_qkv": 2, "cpu_fused_rmsnorm": 5, "cpu_fused_swiglu": 2},
}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expectations here are those of a machine without an accelerator."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


# --- report -----------------------------------------------------------------------------------------


def test_the_report_counts_patched_modules_per_kernel(pair: Pair) -> None:
    """A17."""
    model = pair.load()
    report = model.kconvert_report.to_dict()
    assert report["kernels"] == COUNTS[pair.recipe]
    assert len(report["modules"]) == sum(COUNTS[pair.recipe].values())
    assert pair.load(kernels="reference").kconvert_report.to_dict()["kernels"] == {
        "reference": sum(COUNTS[pair.recipe].values())
    }


def test_the_report_names_every_patched_module(pair: Pair) -> None:
    model = pair.load()
    report = model.kconvert_report.to_dict()
    paths = [module["path"] for module in report["modules"]]
    expected = {paths[0] for patch in model.kconvert_origin.manifest.patches for paths in patch.modules}
    assert sorted(paths) == sorted(expected)
    for module in report["modules"]:
        assert set(module) == {"path", "class", "layout", "device", "kernel", "training_kernel", "by_view", "trace"}
        assert is_patched(model.get_submodule(module["path"]))
        assert module["device"] == "cpu"
        assert module["training_kernel"] == module["kernel"]
    classes = {module["class"] for module in report["modules"] if module["layout"] == "rms_norm"}
    assert classes == {"LlamaRMSNorm" if pair.recipe == "llama" else "Qwen3RMSNorm"}


def why_not(kernel_id: str) -> str:
    """Why a kernel of another device does not run in a model on the CPU of this machine."""
    kernel = Registry.catalog()[kernel_id]
    return check_deps_reason(kernel) or f"runs on {kernel.device()}, the input is on cpu"


def defaults(layout: str) -> list[str]:
    """The kernels of a layout that stand in where the recipe's cannot run."""
    found = layout_kernels(cast("type[Layout]", load_layout(layout)))
    return [kernel_id for kernel_id, kernel in found.items() if kernel.default]


def test_the_trace_has_every_candidate_with_its_reason(pair: Pair) -> None:
    model = pair.load()
    by_path = {paths[0]: patch for patch in model.kconvert_origin.manifest.patches for paths in patch.modules}
    for module in model.kconvert_report.to_dict()["modules"]:
        trace = module["trace"]
        named = list(by_path[module["path"]].kernels)
        others = [name for name in defaults(module["layout"]) if name not in named]
        assert [(item["kernel"], item["origin"]) for item in trace] == [
            *((name, "recipe") for name in named),
            *((name, "default") for name in others),
        ]
        accepted = [item for item in trace if item["accepted"]]
        assert [item["kernel"] for item in accepted] == [module["kernel"]]
        assert accepted[0]["reason"] == "chosen"
        for item in trace:
            device = item["kernel"].partition("_")[0]
            if device != "cpu":
                assert item["reason"] == why_not(item["kernel"])
            elif not item["accepted"]:
                assert (item["kernel"], item["reason"]) == (
                    "cpu_fused_geglu",
                    "its activation is silu, not gelu or gelu_tanh",
                )


def test_the_trace_is_what_select_decides(pair: Pair) -> None:
    """No second opinion: the report shows the selection that the dispatch was filled from."""
    for module in pair.load().kconvert_report.modules:
        candidates = [
            Candidate(item.kernel_id, Registry.catalog()[item.kernel_id].device().value, item.origin)
            for item in module.selection.trace
        ]
        again = select(
            candidates,
            device="cpu",
            dtype="float32",
            mode=Mode.INFERENCE,
            unavailable={item.kernel_id: why_not(item.kernel_id) for item in candidates if item.device != "cpu"},
            unsupported={"cpu_fused_geglu": "its activation is silu, not gelu or gelu_tanh"},
        )
        assert again == module.selection


def test_the_trace_of_a_call_says_so(qwen3: Pair) -> None:
    for module in qwen3.load(kernels=["cuda_fused_swiglu"]).kconvert_report.modules:
        names = [(item.kernel_id, item.origin, item.accepted) for item in module.selection.trace]
        assert names == ([("cuda_fused_swiglu", "call", False)] if module.layout == "gated_mlp" else [])
        assert module.kernel == "reference"


def test_the_table_fits_a_terminal(pair: Pair) -> None:
    model = pair.load()
    text = str(model.kconvert_report)
    assert max(map(len, text.splitlines())) <= 80
    rows = [line for line in text.splitlines() if line.startswith("model.")]
    assert sum(int(row.split()[1]) for row in rows) == sum(COUNTS[pair.recipe].values())
    assert "model.layers.*.input_layernorm" in text
    named = {name for patch in model.kconvert_origin.manifest.patches for name in patch.kernels}
    absent: dict[str, list[str]] = {}
    for name in sorted(name for name in named if not name.startswith("cpu_")):
        absent.setdefault(why_not(name), []).append(name)
    said = " ".join(f"{', '.join(names)}: {reason}" for reason, names in absent.items())
    assert " ".join(text.partition("not used:\n")[2].split()) == said
    assert repr(model.kconvert_report) == text


def test_default_kernels_are_named_where_the_reference_runs() -> None:
    def module(chosen: str | None, *rejected: tuple[str, str, str]) -> ModuleReport:
        trace = tuple(Verdict(kernel_id, origin, False, reason) for kernel_id, origin, reason in rejected)
        return ModuleReport("a.0", "A", "layout", "cpu", Selection(chosen, trace), chosen)

    helped = module("good", ("named", "recipe", "no driver"), ("spare", "default", "no driver"))
    alone = module(
        None, ("asked", "call", "no driver"), ("spare", "default", "gelu"), ("other", "default", "no driver")
    )
    assert str(Report((helped,))).splitlines()[2:] == ["not used:", "  named: no driver"]
    assert str(Report((alone, helped))).splitlines()[3:] == [
        "not used:",
        "  asked, named, other: no driver",
        "  spare: gelu",
    ]
    assert [len(item["trace"]) for item in Report((alone, helped)).to_dict()["modules"]] == [3, 2]


def test_the_report_of_every_reference(qwen3: Pair) -> None:
    text = str(qwen3.load(kernels="reference").kconvert_report)
    assert "not used:" not in text
    assert text.count("reference") == 7  # five kinds of norm, attention, MLP


def test_the_report_follows_the_model(pair: Pair) -> None:
    model = pair.load()
    model.to("meta")
    report = model.kconvert_report.to_dict()
    assert {module["device"] for module in report["modules"]} == {"meta"}
    assert report["kernels"] == {"reference": sum(COUNTS[pair.recipe].values())}
    model.to_empty(device="cpu")
    assert model.kconvert_report.to_dict()["kernels"] == COUNTS[pair.recipe]


def test_a_model_that_is_moved_to_another_dtype(pair: Pair) -> None:
    model, stock = pair.load(kernels="reference").to(torch.bfloat16), pair.stock().to(torch.bfloat16)
    assert torch.equal(logits(model), logits(stock))
    fast = pair.load().to(torch.bfloat16)
    torch.testing.assert_close(logits(fast), logits(stock), rtol=2e-2, atol=2e-2)


# --- dispatch ---------------------------------------------------------------------------------------


class Recorder:
    """A stand-in for a kernel: notes its calls and doubles the input."""

    calls = 0

    @classmethod
    def forward(cls, module: Any, hidden: torch.Tensor) -> torch.Tensor:
        cls.calls += 1
        return hidden * 2


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.weight.to(hidden.device)


class PlainLayout(Layout):
    pass


def patched(candidate: Candidate, devices: tuple[str, ...] = ("cpu",)) -> Any:
    """A patched `Plain` whose dispatch is filled by `select` alone."""
    module: Any = Plain()
    module.__class__ = patched_class(PlainLayout, Plain)
    attach(module, Dispatch())
    for device in devices:
        for mode in Mode:
            chosen = select([candidate], device=device, dtype="float32", mode=mode, unavailable={}, unsupported={})
            module.kconvert_dispatch.set(device, mode, chosen, Recorder if chosen.kernel_id else None)
    return module


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    Recorder.calls = 0


def test_the_device_of_the_input_decides() -> None:
    """K1: at call time, not by what is installed."""
    module = patched(Candidate("k", "cpu", "recipe"))
    assert module(torch.full((4,), 3.0)).tolist() == [6.0] * 4
    assert Recorder.calls == 1
    found = module(torch.ones(4, device="meta"))
    assert found.device.type == "meta"
    assert Recorder.calls == 1


def test_a_kernel_for_another_device_leaves_the_reference() -> None:
    module = patched(Candidate("k", "npu", "recipe"), devices=("cpu", "npu"))
    assert module(torch.full((4,), 3.0)).tolist() == [4.0] * 4
    assert Recorder.calls == 0
    assert module.kconvert_dispatch.selection("npu", Mode.INFERENCE).kernel_id == "k"
    assert module.kconvert_dispatch.selection("cpu", Mode.INFERENCE).reasons() == "k: runs on npu, the input is on cpu"


def test_a_kernel_that_says_nothing_of_devices_runs_everywhere() -> None:
    module = patched(Candidate("k", ANY_DEVICE, "recipe"), devices=("cpu", ANY_DEVICE))
    module(torch.ones(4))
    module(torch.ones(4, device="meta"))
    assert Recorder.calls == 2


def test_keyword_inputs_count() -> None:
    module = patched(Candidate("k", "cpu", "recipe"))
    module(hidden=torch.ones(4))
    assert Recorder.calls == 1
    assert module.kconvert_dispatch.kernel_for(module, (), {}) is None
    assert module.kconvert_dispatch.kernel_for(module, (3, "x"), {"flag": True}) is None


def test_a_kernel_without_backward_never_takes_a_gradient() -> None:
    """K2: the mode is seen at each call, `model.train()` has nothing to do with it."""
    module = patched(Candidate("k", "cpu", "recipe", has_backward=False))
    hidden = torch.full((4,), 3.0)
    module.eval()
    module(hidden).sum().backward()
    assert Recorder.calls == 0
    assert module.weight.grad.tolist() == [1.0] * 4
    with torch.no_grad():
        assert module.train()(hidden).tolist() == [6.0] * 4
    with torch.inference_mode():
        module(hidden)
    assert Recorder.calls == 2
    module.requires_grad_(False)
    module(hidden)
    assert Recorder.calls == 3
    module(hidden.requires_grad_())
    assert Recorder.calls == 3


def test_a_kernel_with_backward_is_used_in_training() -> None:
    module = patched(Candidate("k", "cpu", "recipe"))
    hidden = torch.full((4,), 3.0, requires_grad=True)
    module.train()(hidden).sum().backward()
    assert Recorder.calls == 1
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [2.0] * 4


def test_the_empty_dispatch_is_the_reference() -> None:
    module = patched(Candidate("k", "cpu", "recipe"), devices=())
    module(torch.ones(4))
    assert Recorder.calls == 0
    assert module.kconvert_dispatch.devices() == ()
    assert module.kconvert_dispatch.selection("cpu", Mode.INFERENCE) is None


def test_a_changed_choice_takes_effect() -> None:
    module = patched(Candidate("k", "cpu", "recipe"))
    nothing = select([], device="cpu", dtype="float32", mode=Mode.INFERENCE, unavailable={}, unsupported={})
    for mode in Mode:
        module.kconvert_dispatch.set("cpu", mode, nothing, None)
    module(torch.ones(4))
    assert Recorder.calls == 0


def test_packed_modules_run_on_meta_by_their_reference(pair: Pair) -> None:
    model = pair.load()
    model.to("meta")
    with torch.no_grad():
        found = model(IDS.to("meta"), attention_mask=None).logits
    assert found.shape == (2, 7, 64)
    assert found.is_meta


def test_the_layout_base_says_nothing_of_its_own() -> None:
    with pytest.raises(TypeError, match="PlainLayout does not say what fits it"):
        PlainLayout.unfit([Plain()])
    assert patched(Candidate("k", "cpu", "recipe")).facts() == {}


def test_the_same_bases_give_the_same_class() -> None:
    one, two = patched_class(PlainLayout, Plain), patched_class(PlainLayout, Plain)
    assert one is two
    assert (one.__name__, one.__qualname__, one.__module__) == ("Plain", "Plain", Plain.__module__)
    assert issubclass(one, Plain)
    assert issubclass(one, PlainLayout)


def test_a_module_without_parameters_is_where_its_model_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.SiLU())
    assert device_in(model, model[1]) == "meta"
    assert device_in(nn.Sequential(nn.Linear(2, 2), model), model) == "meta"
    assert device_in(nn.SiLU(), nn.SiLU()) == "cpu"
