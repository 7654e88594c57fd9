"""Faults of package layouts that would be silent: buffers on meta, dtypes, class names, train and eval mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel

from kconvert.errors import KconvertError
from tests.packages.helpers import NORM, failure, fuse, load, logits, replace, run_recipe, stock, write_package
from tests.support import read_raw

BUFFERS = r"""
class Norm:
    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.inner.eps + self.shift)
        return self.scale * wide.to(hidden_states.dtype) * self.table.sum()

class Inner(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.register_buffer("eps", torch.tensor(eps, dtype=torch.float64), persistent=False)

class NormLayout(nn.Module):
    conversion_mapping = [WeightRenaming(r"input_layernorm\.weight", "input_layernorm.scale")]

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.register_buffer("table", torch.full((4,), 0.25), persistent=False)
        self.register_buffer("counts", torch.arange(5), persistent=False)
        self.shift = torch.zeros(())
        self.inner = Inner(eps)
"""


def test_buffers_and_tensor_attributes_have_their_values(tmp_path: Path, qwen3_dir: Path) -> None:
    write_package(tmp_path, BUFFERS)
    model = load(run_recipe(tmp_path, replace("./package:Norm"), qwen3_dir))
    for layer in model.model.layers:
        norm = layer.input_layernorm
        assert norm.table.tolist() == [0.25] * 4
        assert norm.counts.tolist() == [0, 1, 2, 3, 4]
        assert not norm.shift.is_meta
        assert float(norm.shift) == 0.0
        assert float(norm.inner.eps) == pytest.approx(1e-6)
    torch.testing.assert_close(logits(model), logits(stock(qwen3_dir)), rtol=0, atol=1e-5)


def test_buffers_follow_the_model(tmp_path: Path, qwen3_bf16_dir: Path) -> None:
    write_package(tmp_path, BUFFERS)
    model = load(run_recipe(tmp_path, replace("./package:Norm"), qwen3_bf16_dir))
    assert model.model.layers[1].input_layernorm.table.tolist() == [0.25] * 4
    assert not [name for name, tensor in model.named_buffers() if tensor.is_meta]


FUSED_BUFFERS = r"""
class Fused:
    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        normed = self.scale * wide.to(hidden_states.dtype) * self.one
        return self.mlp(normed)

class FusedLayout(nn.Module):
    conversion_mapping = [
        WeightRenaming(r"post_attention_layernorm\.weight", "post_attention_layernorm.scale"),
        WeightRenaming(r"mlp\.(\w+)_proj\.weight", r"post_attention_layernorm.mlp.\1_proj.weight"),
    ]

    def __init__(self, norm, mlp):
        super().__init__()
        self.scale, self.eps, self.mlp = nn.Parameter(torch.ones(32)), norm.variance_epsilon, mlp
        self.register_buffer("one", ONE, persistent=False)
"""


def test_buffers_of_a_fusion(tmp_path: Path, qwen3_dir: Path) -> None:
    write_package(tmp_path, FUSED_BUFFERS.replace("ONE", "torch.ones(())"))
    model = load(run_recipe(tmp_path, fuse("./package:Fused"), qwen3_dir))
    assert [float(layer.post_attention_layernorm.one) for layer in model.model.layers] == [1.0, 1.0]
    torch.testing.assert_close(logits(model), logits(stock(qwen3_dir)), rtol=0, atol=1e-5)


def test_a_buffer_made_from_weights_is_an_error_and_not_random_memory(tmp_path: Path, qwen3_dir: Path) -> None:
    write_package(tmp_path, FUSED_BUFFERS.replace("ONE", "norm.weight.detach().clone()"))
    output = run_recipe(tmp_path, fuse("./package:Fused"), qwen3_dir)
    with pytest.raises(KconvertError) as caught:
        load(output)
    code, text = failure(caught.value)
    assert code == 5
    assert "post_attention_layernorm.one" in text


def test_an_explicit_dtype_gives_way_to_that_of_the_stock_parameter(tmp_path: Path, qwen3_bf16_dir: Path) -> None:
    write_package(tmp_path, NORM.replace("torch.ones(hidden_size)", "torch.ones(hidden_size, dtype=torch.float32)"))
    output = run_recipe(tmp_path, replace("./package:Norm"), qwen3_bf16_dir)
    assert {tensor.dtype for tensor in read_raw(output).values()} == {"BF16"}
    model = load(output)
    assert model.model.layers[0].input_layernorm.scale.dtype == torch.bfloat16
    assert model(input_ids=torch.tensor([[1, 2]])).logits.dtype == torch.bfloat16
    model = load(output, dtype=torch.float32)
    assert model.model.layers[0].input_layernorm.scale.dtype == torch.float32


NAMED = r"""
class MyRMSNormThing:
    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.mlp(self.weight * wide.to(hidden_states.dtype))

class MyRMSNormThingLayout(nn.Module):
    conversion_mapping = [
        WeightRenaming(r"mlp\.(\w+)_proj\.weight", r"post_attention_layernorm.mlp.\1_proj.weight"),
    ]

    def __init__(self, norm, mlp):
        super().__init__()
        self.weight, self.eps, self.mlp = nn.Parameter(torch.zeros(32)), norm.variance_epsilon, mlp
        self.register_buffer("bias", torch.full((32,), 3.0), persistent=False)
"""


def test_a_layout_called_rmsnorm_keeps_its_loaded_weight(tmp_path: Path, qwen3_dir: Path) -> None:
    write_package(tmp_path, NAMED)
    model, plain = load(run_recipe(tmp_path, fuse("./package:MyRMSNormThing"), qwen3_dir)), stock(qwen3_dir)
    for layer, stock_layer in zip(model.model.layers, plain.model.layers, strict=True):
        weight = stock_layer.post_attention_layernorm.weight
        assert not torch.equal(weight, torch.ones_like(weight))
        assert torch.equal(layer.post_attention_layernorm.weight, weight)
        # transformers' own _init_weights fills what it takes for a bias; the buffer is computed again after that
        assert layer.post_attention_layernorm.bias.tolist() == [3.0] * 32
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-5)


def test_after_a_failed_load_a_stock_load_is_stock(tmp_path: Path, qwen3_dir: Path) -> None:
    write_package(tmp_path, NORM + "\nclass Boom(Exception): pass\n")
    output = run_recipe(tmp_path, replace("./package:Norm"), qwen3_dir)
    weights = next(output.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(KconvertError):
        load(output)
    plain = stock(qwen3_dir)
    assert not [path for path, module in plain.named_modules() if "kconvert_dispatch" in vars(module)]
    assert list(dict(plain.model.layers[0].input_layernorm.named_parameters())) == ["weight"]


GPT2_MLP = r"""
class Mlp:
    def forward(self, hidden_states):
        return self.c_proj(torch.tanh(self.first(hidden_states)))

class MlpLayout(nn.Module):
    conversion_mapping = [WeightRenaming(r"mlp\.c_fc\.", "mlp.first.")]

    def __init__(self, intermediate_size, config):
        super().__init__()
        from transformers.pytorch_utils import Conv1D
        self.first, self.c_proj = Conv1D(intermediate_size, config.n_embd), Conv1D(config.n_embd, intermediate_size)
"""


def _gpt2(directory: Path) -> Path:
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.5, bos_token_id=0, eos_token_id=1
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    return directory


def test_the_reference_follows_train_and_eval(tmp_path: Path) -> None:
    source = _gpt2(tmp_path / "source")
    write_package(tmp_path, GPT2_MLP)
    patches = replace("./package:Mlp", "transformer.h.*.mlp", "GPT2MLP")
    output = run_recipe(tmp_path, patches, source, model_type="gpt2")
    plain, model = stock(source), load(output, kernels="reference")
    assert torch.equal(logits(model), logits(plain))
    mlp = model.transformer.h[0].mlp
    hidden = torch.ones(1, 8, 32)
    for training in (True, False):
        torch.manual_seed(0)
        expected = plain.train(training).transformer.h[0].mlp(hidden)
        torch.manual_seed(0)
        assert torch.equal(model.train(training).transformer.h[0].mlp(hidden), expected)
        assert bool((expected == 0).any()) is training
    assert type(mlp).__name__ == "GPT2MLP"


def test_a_name_that_the_models_own_initialisation_reads(
    tmp_path: Path, qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs over every module while loading, and would fail there with a bare AttributeError."""

    def reads_weight(self: Any, module: Any) -> None:
        if type(module).__name__ == "Qwen3RMSNorm":
            module.weight.data.fill_(1.0)

    write_package(tmp_path, NORM)
    monkeypatch.setattr(Qwen3PreTrainedModel, "_init_weights", reads_weight)
    with pytest.raises(KconvertError) as caught:
        run_recipe(tmp_path, replace("./package:Norm"), qwen3_dir)
    code, text = failure(caught.value)
    assert code == 3
    assert "initialisation fails" in text
    assert "'weight'" in text


def test_the_reference_takes_keyword_arguments(converted_both_dir: Path, qwen3_dir: Path) -> None:
    model, plain = load(converted_both_dir, kernels="reference"), stock(qwen3_dir)
    hidden = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    ours, theirs = model.model.layers[0], plain.model.layers[0]
    assert torch.equal(ours.input_layernorm(hidden_states=hidden), theirs.input_layernorm(hidden_states=hidden))
    fused = ours.post_attention_layernorm(hidden_states=hidden)
    assert torch.equal(fused, theirs.mlp(theirs.post_attention_layernorm(hidden)))


def test_a_replaced_mlp_takes_its_own_keyword(tmp_path: Path, qwen3_dir: Path) -> None:
    body = r"""
class Mlp:
    def forward(self, x):
        return self.down(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

class MlpLayout(nn.Module):
    conversion_mapping = [WeightRenaming(r"mlp\.down_proj\.", "mlp.down.")]

    def __init__(self, config):
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(*sizes, bias=False), nn.Linear(*sizes, bias=False)
        self.down = nn.Linear(*reversed(sizes), bias=False)
"""
    write_package(tmp_path, body)
    output = run_recipe(tmp_path, replace("./package:Mlp", "model.layers.*.mlp", "Qwen3MLP"), qwen3_dir)
    plain, hidden = stock(qwen3_dir), torch.ones(1, 3, 32)
    expected = plain.model.layers[0].mlp(hidden)
    assert torch.equal(load(output, kernels="reference").model.layers[0].mlp(x=hidden), expected)
    torch.testing.assert_close(load(output).model.layers[0].mlp(x=hidden), expected, rtol=0, atol=1e-5)
