"""Stacked experts: what is found of a stock class and what is refused, live models beside stock, and the CPU kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from kconvert import load_converted
from kconvert.kernels import apply_kernel
from kconvert.kernels.gated_variant import GatedVariant
from kconvert.kernels.grouped_mm import grouped_mm
from kconvert.kernels.layout import is_patched
from kconvert.kernels.ops.experts import plain
from kconvert.kernels.ops.experts.cpu import CpuFusedMoE, _loop
from kconvert.kernels.ops.experts.cuda import CudaFusedMoE
from kconvert.kernels.ops.experts.layout import ExpertsCall, ExpertsLayout, plain_call, prove_experts
from kconvert.kernels.ops.experts.proof import ExpertsVariant
from tests.support import Kind, convert, save_tiny, tiny_model

KERNEL = "cpu_fused_moe"
KINDS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
IDS = torch.tensor([[3, 9, 27, 17, 51, 25, 11], [2, 4, 8, 16, 32, 5, 6]])
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
"""Of the largest value."""


def config(**kw: Any) -> Any:
    """What the `__init__` of experts reads, under all the names that they have for it."""
    values: dict[str, Any] = {
        "num_experts": 5,
        "hidden_size": 32,
        "moe_intermediate_size": 24,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "moe_latent_size": None,
        "mlp_hidden_act": "relu2",
        "zero_expert_num": 0,
        "_experts_implementation": "eager",
        **kw,
    }
    values.update(num_local_experts=values["num_experts"], n_routed_experts=values["num_experts"])
    values.update(moe_num_experts=values["num_experts"], expert_ffn_hidden_size=values["moe_intermediate_size"])
    values.update(intermediate_size=values["moe_intermediate_size"])
    return SimpleNamespace(**values)


def stock(cls: Callable[[Any], nn.Module], *, dtype: torch.dtype = torch.float64, **kw: Any) -> Any:
    """Experts of a class with random parameters."""
    module = cls(config(**kw))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return module.to(dtype)


def patched(module: nn.Module) -> Any:
    """A packed copy; the parameters are the module's own."""
    memo: dict[int, Any] = {id(weight): weight for weight in module.parameters()}
    return ExpertsLayout.patch([copy.deepcopy(module, memo)])


def inputs(module: Any, *, tokens: int = 9, top_k: int = 3, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    num_experts = module.down_proj.shape[0]
    hidden = torch.randn(tokens, 32, generator=generator).to(dtype)
    ids = torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k].contiguous()
    return [hidden, ids, torch.rand(tokens, top_k, generator=generator).to(dtype)]


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert float((found.detach().double() - expected.detach().double()).abs().max()) <= tolerance * float(
        expected.detach().double().abs().max()
    )


# --- what is found ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "kw", "gate", "is_transposed"),
    [
        (Qwen3MoeExperts, {}, GatedVariant("silu"), False),
        (MixtralExperts, {"hidden_act": "gelu"}, GatedVariant("gelu"), False),
        (DeepseekV3Experts, {"hidden_act": "gelu_pytorch_tanh"}, GatedVariant("gelu_tanh"), False),
        (AriaExperts, {}, GatedVariant("silu"), True),
        (GptOssExperts, {}, GatedVariant("swiglu_oai", 7.0, 1.702, is_interleaved=True), True),
        (LongcatFlashExperts, {"num_experts": 2}, GatedVariant("silu"), False),
        (Qwen3MoeExperts, {"hidden_size": 48}, GatedVariant("silu"), False),  # a square gate_up_proj
    ],
)
def test_the_variant_is_found(cls: Any, kw: dict[str, Any], gate: GatedVariant, *, is_transposed: bool) -> None:
    packed = patched(stock(cls, **kw))
    assert packed.kconvert_variant == (ExpertsVariant(gate, is_transposed), "")
    assert prove_experts(packed) is None


def test_limit_and_factor_are_those_of_the_instance() -> None:
    module = stock(GptOssExperts, num_experts=1)
    module.limit, module.alpha = 3, 1.5
    expected = GatedVariant("swiglu_oai", 3.0, 1.5, is_interleaved=True)
    assert patched(module).kconvert_variant[0] == ExpertsVariant(expected, True)


@pytest.mark.parametrize(
    ("cls", "kw", "reason"),
    [
        (Llama4TextExperts, {}, "has a forward that takes hidden_states"),
        (NemotronHExperts, {}, "has no stacked gate_up_proj"),
        (LongcatFlashExperts, {"zero_expert_num": 2}, "shapes that do not go together"),
    ],
)
def test_another_structure_is_refused(cls: Any, kw: dict[str, Any], reason: str) -> None:
    assert reason in str(ExpertsLayout.unfit([cls(config(**kw))]))


class Own(nn.Module):
    """Experts whose gate, and what is done with the weights, can be anything."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(settings.num_experts, 48, 32))
        self.down_proj = nn.Parameter(torch.empty(settings.num_experts, 32, 24))
        self.act_fn = ACT2FN[settings.hidden_act]
        self.limit = 0.5

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return cast("torch.Tensor", self.act_fn(gate) * up)

    def forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.gate_up_proj.shape[0]):
            tokens, choices = torch.where(index == expert)
            rows = self.expert(hidden_states[tokens], expert, weights[tokens, choices, None])
            out.index_add_(0, tokens, rows)
        return out

    def expert(self, rows: torch.Tensor, expert: int, weights: torch.Tensor) -> torch.Tensor:
        return self.gate(rows @ self.gate_up_proj[expert].T) @ self.down_proj[expert].T * weights


class UpFirst(Own):
    def gate(self, both: torch.Tensor) -> torch.Tensor:
        up, gate = both.chunk(2, dim=-1)
        return cast("torch.Tensor", self.act_fn(gate) * up)


class ClampedAfter(Own):
    def gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return cast("torch.Tensor", self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit))


class WeightedBefore(Own):
    def expert(self, rows: torch.Tensor, expert: int, weights: torch.Tensor) -> torch.Tensor:
        return self.gate(rows * weights @ self.gate_up_proj[expert].T) @ self.down_proj[expert].T


class DropsInTraining(Own):
    def gate(self, both: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().gate(both), 0.1, self.training)


class SplitsByNumber(Own):
    def gate(self, both: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.act_fn(both[..., :24]) * both[..., 24:])


class OtherMethod(Own):
    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        return 2 * self.gate(both)


def test_up_may_come_first() -> None:
    assert patched(stock(UpFirst)).kconvert_variant[0] == ExpertsVariant(GatedVariant(is_up_first=True), False)


@pytest.mark.parametrize(
    ("cls", "kw", "reason"),
    [
        (Own, {"hidden_act": "relu"}, "not that of experts with a gate that is known"),
        (ClampedAfter, {}, "not that of experts with a gate that is known"),
        (WeightedBefore, {}, "not that of experts with a gate that is known"),
        (DropsInTraining, {}, "not that of experts with a gate that is known"),
        (SplitsByNumber, {}, "does not run on other sizes (RuntimeError)"),
        (OtherMethod, {}, "its _apply_gate is not the gate of its forward"),
    ],
)
def test_another_forward_is_refused(cls: Any, kw: dict[str, Any], reason: str) -> None:
    packed = patched(stock(cls, **kw))
    state = torch.get_rng_state()
    assert reason in str(prove_experts(packed))
    assert packed.kconvert_variant[0] is None
    for kernel in (CpuFusedMoE, CudaFusedMoE):
        assert kernel.supports(packed) == prove_experts(packed)
    assert torch.equal(torch.get_rng_state(), state)


# --- the CPU kernel -----------------------------------------------------------------------------------------


def call_of(packed: nn.Module, *args: torch.Tensor) -> ExpertsCall:
    """A call that the kernel takes."""
    call = plain_call(packed, args, {})
    assert call is not None
    return call


@pytest.mark.parametrize("cls", [Qwen3MoeExperts, GptOssExperts])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["forward", "loop"])
def test_cpu_kernel_and_its_gradients_are_those_of_the_stock_loop(cls: Any, dtype: torch.dtype, way: str) -> None:
    module = stock(cls, dtype=dtype)
    packed = patched(module)

    def run(*args: torch.Tensor) -> torch.Tensor:
        return CpuFusedMoE.forward(packed, *args) if way == "forward" else _loop(call_of(packed, *args))

    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    wide = copy.deepcopy(module).double()
    for results, kind, function, owner in ((found, dtype, run, module), (expected, torch.float64, wide, wide)):
        leaves = [tensor.to(kind) if tensor.is_floating_point() else tensor for tensor in inputs(module, dtype=dtype)]
        for number in (0, 2):
            leaves[number].requires_grad_()
        out = function(*leaves)
        assert out.dtype == kind
        weights = [leaves[0], leaves[2], *owner.parameters()]
        results += [out, *torch.autograd.grad(out.square().sum(), weights)]
    for one, two in zip(found, expected, strict=True):
        assert_near(one, two, {torch.float64: 1e-12, **TOLERANCES}[dtype] * 2)


def test_what_grouped_mm_does_not_take_goes_through_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from kconvert.kernels.ops.experts import cpu

    calls: list[str] = []

    def counting(name: str) -> Callable[..., torch.Tensor]:
        function = getattr(cpu, name)

        def run(*args: Any) -> torch.Tensor:
            calls.append(name)
            return cast("torch.Tensor", function(*args))

        return run

    for name in ("grouped_experts", "_loop"):
        monkeypatch.setattr(cpu, name, counting(name))
    for dtype, size in ((torch.float32, 24), (torch.float64, 24), (torch.float32, 22)):
        module = stock(Qwen3MoeExperts, dtype=dtype, moe_intermediate_size=size)
        args = inputs(module, dtype=dtype)
        with torch.no_grad():
            assert_near(CpuFusedMoE.forward(patched(module), *args), module(*args), 2e-6)
    assert calls == ["grouped_experts", "_loop", "_loop"]


@pytest.mark.parametrize("way", ["grouped", "loop"])
def test_cpu_kernel_leaves_out_what_names_no_expert_and_takes_no_tokens(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def poisoned(rows: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        made = grouped_mm(rows, weight, offs=offs)
        made[int(offs[-1]) :] = float("nan")  # as if it was in the memory
        return cast("torch.Tensor", made)

    monkeypatch.setattr(plain, "grouped_mm", poisoned)
    module = stock(Qwen3MoeExperts, dtype=torch.float32)
    packed = patched(module)
    function = plain.grouped_experts if way == "grouped" else _loop

    def run(*args: torch.Tensor) -> torch.Tensor:
        return function(call_of(packed, *args))

    hidden, ids, weights = inputs(module, dtype=torch.float32)
    ids[::2, 0] = 5
    with torch.no_grad():
        found = run(hidden, ids, weights)
        assert_near(found, module(hidden, ids, weights), 2e-6)
        assert run(hidden[:0], ids[:0], weights[:0]).shape == (0, 32)


def test_what_is_not_the_plain_case_runs_the_reference() -> None:
    """Tokens of another dtype than the parameters, autocast, and a call without weights."""
    module = stock(Qwen3MoeExperts, dtype=torch.float32)
    packed, (hidden, ids, weights) = patched(module), inputs(module, dtype=torch.float32)
    for kernel in (CpuFusedMoE, CudaFusedMoE):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected = module(hidden, ids, weights)
            assert torch.equal(kernel.forward(packed, hidden, ids, weights), expected)
            assert torch.equal(kernel.forward(packed, hidden, top_k_weights=weights, top_k_index=ids), expected)
        with pytest.raises(RuntimeError) as stock_error:
            module(hidden.double(), ids, weights)
        with pytest.raises(RuntimeError) as error:
            kernel.forward(packed, hidden.double(), ids, weights)
        assert str(error.value) == str(stock_error.value)
        with pytest.raises(TypeError, match="top_k_weights"):
            kernel.forward(packed, hidden, ids)


# --- the reference ------------------------------------------------------------------------------------------


def test_the_reference_goes_on_with_the_implementation_that_the_config_names() -> None:
    model = tiny_model("qwen3_moe")
    path = "model.layers.1.mlp.experts"
    packed = apply_kernel(KERNEL, model=copy.deepcopy(model)).get_submodule(path)
    args = inputs(packed, dtype=torch.float32)
    for name in ("eager", "batched_mm", "grouped_mm"):
        for each in (model.get_submodule(path), packed):
            each.config._experts_implementation = name
        with torch.no_grad():
            found = packed.reference(*args)
            assert torch.equal(found, model.get_submodule(path)(*args))
    seen = []

    def own(module: nn.Module, hidden_states: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        seen.append(module)
        return hidden_states

    ALL_EXPERTS_FUNCTIONS.register("own", own)
    try:
        packed.config._experts_implementation = "own"
        packed.reference(*args)
    finally:
        del ALL_EXPERTS_FUNCTIONS._global_mapping["own"]
    assert seen == [packed]


@pytest.fixture
def counted() -> Any:
    """A class with an implementation of experts that counts its calls."""

    @use_experts_implementation
    class Counted(Own):
        calls = 0

        def forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            return super().forward(hidden_states, index, weights)

    return Counted


def test_the_proof_runs_the_forward_of_the_class_whatever_the_config_says(counted: Any) -> None:
    packed = patched(stock(counted, _experts_implementation="grouped_mm"))
    assert prove_experts(packed) is None
    assert counted.calls == 9
    assert packed.config._experts_implementation == "grouped_mm"


# --- live models --------------------------------------------------------------------------------------------


def loss_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """In training mode: logits, and the gradients of what lies in MoE blocks."""
    model.train()
    model.zero_grad()
    found = model(input_ids=IDS, labels=IDS, use_cache=False)
    found.loss.backward()
    return found.logits.detach(), {
        name: weight.grad for name, weight in model.named_parameters() if ".mlp." in name and weight.grad is not None
    }


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_live_model_is_near_stock_in_inference_and_training(kind: Kind, dtype: torch.dtype) -> None:
    model = tiny_model(kind, dtype=dtype)
    model.set_experts_implementation("eager")
    packed = apply_kernel(KERNEL, model=copy.deepcopy(model))
    paths = [path for path, module in packed.named_modules() if is_patched(module)]
    assert paths == [path for path, _ in model.named_modules() if path.endswith("mlp.experts")]
    assert {item.kernel for item in packed.kconvert_report.modules} == {KERNEL}
    expected, gradients = loss_and_gradients(model)
    found, packed_gradients = loss_and_gradients(packed)
    assert all(packed.get_submodule(path).kconvert_dispatch.has_run == {CpuFusedMoE} for path in paths)
    # where a gradient is as small as the noise of its dtype, only its size can be compared
    tolerance = TOLERANCES[dtype] * (4 if dtype is torch.bfloat16 else 8)
    assert_near(found, expected, tolerance)
    assert packed_gradients.keys() == gradients.keys()
    assert any("gate_up_proj" in name for name in gradients)
    for name, gradient in gradients.items():
        assert_near(packed_gradients[name], gradient, tolerance * 2)
    assert list(packed.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_converted_model_runs_the_kernel_and_can_be_trained(kind: Kind, tmp_path: Path) -> None:
    recipe = kind.replace("_", "-")
    output = convert(recipe, save_tiny(tmp_path / "source", kind), tmp_path / "converted").output
    model, stock_model = load_converted(output), tiny_model(kind)
    report = {item.path: item.kernel for item in model.kconvert_report.modules}
    experts = [path for path, module in stock_model.named_modules() if path.endswith("mlp.experts")]
    assert experts
    assert {report[path] for path in experts} == {KERNEL}
    stock_model.set_experts_implementation("eager")
    expected, gradients = loss_and_gradients(stock_model)
    found, packed_gradients = loss_and_gradients(model)
    assert_near(found, expected, 1e-5)
    for path in experts:
        for name in ("gate_up_proj", "down_proj"):
            assert_near(packed_gradients[f"{path}.{name}"], gradients[f"{path}.{name}"], 4e-5)


# --- compiled -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Qwen3MoeExperts, GptOssExperts])
@pytest.mark.parametrize("kernel", [CpuFusedMoE, CudaFusedMoE])
def test_a_compiler_sees_one_graph(cls: Any, kernel: Any) -> None:
    module = stock(cls, dtype=torch.bfloat16)
    packed = patched(module)
    assert prove_experts(packed) is None  # looked at before a model is compiled
    args = inputs(module, dtype=torch.bfloat16)
    args[1][0, 0] = 4

    def run(*args: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", kernel.forward(packed, *args))

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = copy.deepcopy(module).double()(args[0].double(), args[1], args[2].double())
        assert_near(compiled(*args), expected, 1.6e-2)
    compiled(*args).square().sum().backward()
    assert all(weight.grad is not None for weight in packed.parameters())
