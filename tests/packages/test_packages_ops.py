"""Conversion mappings of packages with every op: the reference has the bits of stock, and every way back is exact."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.core_model_loading as loading
from transformers.core_model_loading import ConversionOps

from kconvert.errors import KconvertError
from kconvert.manifest import load_manifest
from kconvert.parity import verify
from tests.packages.helpers import failure, load, logits, replace, run_recipe, stock, write_package
from tests.support import read_raw, save_tiny, unpacked
from tests.sweep.outcome import aligned

MLP = r"""
import transformers.core_model_loading as loading


class MLP:
    def forward(self, hidden_states):
        return FORWARD


class MLPLayout(nn.Module):
    conversion_mapping = MAPPING

    def __init__(self, config):
        super().__init__()
        H, I = config.hidden_size, config.intermediate_size
        for name, shape in PARAMETERS.items():
            setattr(self, name, nn.Parameter(torch.empty(eval(shape, {"H": H, "I": I}))))
"""

GATE, UP, DOWN = (rf'r"mlp\.{name}_proj\.weight"' for name in ("gate", "up", "down"))
KEEP_UP = f'WeightRenaming({UP}, "mlp.up")'
KEEP_DOWN = f'WeightRenaming({DOWN}, "mlp.down")'
SILU = "nn.functional.silu"

# name: (mapping, parameters, forward, what the plan calls it)
CASES = {
    "concatenate": (
        f'[WeightConverter([{UP}, {GATE}], "mlp.up_gate", operations=[Concatenate(1)]), {KEEP_DOWN}]',
        '{"up_gate": "(I, 2 * H)", "down": "(H, I)"}',
        f"({SILU}(hidden_states @ self.up_gate[:, 32:].t()) * (hidden_states @ self.up_gate[:, :32].t())) @ self.down.t()",
        {"concatenate(1)", "rename"},
    ),
    "interleave": (
        (
            f'[WeightConverter([{GATE}, {UP}], "mlp.both", operations=[Concatenate(0), loading.Interleave(0, inverse=True), '
            f"Transpose(0, 1)]), {KEEP_DOWN}]"
        ),
        '{"both": "(H, 2 * I)", "down": "(H, I)"}',
        f"({SILU}((hidden_states @ self.both)[..., 0::2]) * (hidden_states @ self.both)[..., 1::2]) @ self.down.t()",
        {"concatenate(0), interleave(0, inverse), transpose(0, 1)", "rename"},
    ),
    "chunk": (
        f'[WeightConverter({GATE}, ["mlp.one", "mlp.two"], operations=[Chunk(0)]), {KEEP_UP}, {KEEP_DOWN}]',
        '{"one": "(I // 2, H)", "two": "(I // 2, H)", "up": "(I, H)", "down": "(H, I)"}',
        f"({SILU}(hidden_states @ torch.cat([self.one, self.two]).t()) * (hidden_states @ self.up.t())) @ self.down.t()",
        {"chunk(0)", "rename"},
    ),
    "split": (
        f'[WeightConverter({GATE}, ["mlp.one", "mlp.two"], operations=[loading.Split(0)]), {KEEP_UP}, {KEEP_DOWN}]',
        '{"one": "(I // 4, H)", "two": "(I - I // 4, H)", "up": "(I, H)", "down": "(H, I)"}',
        f"({SILU}(hidden_states @ torch.cat([self.one, self.two]).t()) * (hidden_states @ self.up.t())) @ self.down.t()",
        {"split(0)", "rename"},
    ),
    "transpose": (
        (
            f'[WeightConverter({GATE}, "mlp.gate", operations=[Transpose(0, 1, check_dims=True)]), '
            f'WeightConverter({UP}, "mlp.up", operations=[Transpose(0, 1, check_dims=True)]), {KEEP_DOWN}]'
        ),
        '{"gate": "(H, I)", "up": "(I, H)", "down": "(H, I)"}',
        f"({SILU}(hidden_states @ self.gate) * (hidden_states @ self.up.t())) @ self.down.t()",
        {"transpose(0, 1)", "rename"},
    ),
    "permute": (
        (
            f'[WeightConverter({GATE}, "mlp.gate", operations=[loading.PermuteForRope()]), '
            f'WeightConverter({UP}, "mlp.up", operations=[loading.PermuteForRope()]), {KEEP_DOWN}]'
        ),
        '{"gate": "(I, H)", "up": "(I, H)", "down": "(H, I)"}',
        # four heads of 12 rows, dealt out in pairs
        (
            f"(({SILU}(hidden_states @ self.gate.t()) * (hidden_states @ self.up.t()))"
            ".unflatten(-1, (4, 2, 6)).transpose(-1, -2).flatten(-3)) @ self.down.t()"
        ),
        {"permute(4 heads)", "rename"},
    ),
    "stack": (
        f'[WeightConverter({GATE}, "mlp.gates", operations=[loading.MergeModulelist(0)]), {KEEP_UP}, {KEEP_DOWN}]',
        '{"gates": "(1, I, H)", "up": "(I, H)", "down": "(H, I)"}',
        f"({SILU}(hidden_states @ self.gates[0].t()) * (hidden_states @ self.up.t())) @ self.down.t()",
        {"stack(0)", "rename"},
    ),
    "unstack": (
        (
            f'[WeightConverter({DOWN}, "mlp.row_*", operations=[loading.SplitModulelist(0)]), {KEEP_UP}, '
            f'WeightRenaming({GATE}, "mlp.gate")]'
        ),
        '{**{f"row_{n}": "(I,)" for n in range(32)}, "up": "(I, H)", "gate": "(I, H)"}',
        (
            f"({SILU}(hidden_states @ self.gate.t()) * (hidden_states @ self.up.t()))"
            ' @ torch.stack([getattr(self, f"row_{n}") for n in range(32)]).t()'
        ),
        {"unstack(0)", "rename"},
    ),
    "group rename": (
        (
            '[loading.GroupWeightRename([r"mlp\\.down_proj\\.weight", r"mlp\\.gate_proj\\.weight", r"mlp\\.up_proj\\.weight"],'
            ' ["mlp.down", "mlp.gate", "mlp.up"])]'
        ),
        '{"gate": "(I, H)", "up": "(I, H)", "down": "(H, I)"}',
        f"({SILU}(hidden_states @ self.gate.t()) * (hidden_states @ self.up.t())) @ self.down.t()",
        {"rename"},
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("ops") / "source", "qwen3")


def convert_case(name: str, source: Path, directory: Path) -> Path:
    mapping, parameters, forward, _ = CASES[name]
    body = MLP.replace("MAPPING", mapping).replace("PARAMETERS", parameters).replace("FORWARD", forward)
    write_package(directory, body)
    return run_recipe(directory, replace("./package:MLP", "model.layers.*.mlp", "Qwen3MLP"), source)


# older versions of transformers lack some ops
PRESENT = [
    name for name, case in CASES.items() if all(hasattr(loading, op) for op in re.findall(r"loading\.(\w+)\(", case[0]))
]


@pytest.mark.parametrize("name", PRESENT)
def test_an_op_in_a_package(name: str, source: Path, tmp_path: Path) -> None:
    output = convert_case(name, source, tmp_path)
    expected = logits(stock(source))
    reference, model = load(output, kernels="reference"), load(output)
    assert torch.equal(logits(reference), expected)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    manifest = load_manifest(output)
    assert {record.op for record in manifest.tensors if record.patch == 0} == CASES[name][3]
    assert unpacked(manifest, read_raw(output)) == read_raw(source)
    model.save_pretrained(tmp_path / "stock")
    assert read_raw(tmp_path / "stock") == read_raw(source)
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    assert read_raw(tmp_path / "packed") == read_raw(output)
    state = {key: 2 * value for key, value in stock(source).state_dict().items()}
    model.load_state_dict(state)
    reference.load_state_dict(state)
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(model), expected)


EXPERTS = r"""
class Experts:
    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise RuntimeError("the kernel was run")


class ExpertsLayout(nn.Module):
    conversion_mapping = [
        WeightConverter(r"experts\.gate_up_proj", "experts.first", operations=[Transpose(FROM, TO)]),
        WeightConverter(r"experts\.down_proj", "experts.second", operations=[Transpose(FROM, TO)]),
    ]
    gate_up_proj = down_proj = property(lambda self: torch.empty(0))  # for the model's own initialisation

    def __init__(self, config):
        super().__init__()
        E, I, H = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.first = nn.Parameter(torch.empty(E, 2 * I, H).transpose(FROM, TO).contiguous())
        self.second = nn.Parameter(torch.empty(E, H, I).transpose(FROM, TO).contiguous())
"""


@pytest.mark.parametrize(("one", "two"), [(1, 2), (0, 2), (0, 1)])
def test_the_reference_of_transposed_experts(one: int, two: int, tmp_path: Path) -> None:
    """The grouped products of transformers round otherwise on transposed weights, and refuse ones without a unit stride."""
    source = save_tiny(tmp_path / "source", "qwen3_moe")
    write_package(tmp_path, EXPERTS.replace("FROM", str(one)).replace("TO", str(two)))
    patch = replace("./package:Experts", "model.layers.1.mlp.experts", "Qwen3MoeExperts")
    output = run_recipe(tmp_path, patch, source, model_type="qwen3_moe")
    reference, theirs = (aligned(model) for model in (load(output, kernels="reference"), stock(source)))
    assert torch.equal(logits(reference), logits(theirs))
    reference.save_pretrained(tmp_path / "stock")
    assert read_raw(tmp_path / "stock") == read_raw(source)
    # with stock weights out of the converted file, which have to be contiguous too; the kernel itself fails by design
    report = verify(output, levels=["modules"], trust_remote_code=True)
    assert [failure.what for failure in report.failures if not failure.is_kernel] == []


def test_gradients_reach_the_stock_parameters_through_a_view(source: Path, tmp_path: Path) -> None:
    model = load(convert_case("interleave", source, tmp_path), kernels="reference").train()
    theirs = stock(source).train()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    for each in (model, theirs):
        each(input_ids=ids, labels=ids).loss.backward()
    packed, parts = model.model.layers[0].mlp.both.grad, theirs.model.layers[0].mlp
    assert torch.equal(packed[:, 0::2].t(), parts.gate_proj.weight.grad)
    assert torch.equal(packed[:, 1::2].t(), parts.up_proj.weight.grad)


COMPUTED = r"""
from transformers.integrations.gguf.gguf_conversion_mapping import SubtractOne


class Norm:
    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.scale + 1) * wide.to(hidden_states.dtype)


class NormLayout(nn.Module):
    conversion_mapping = [
        WeightConverter(r"input_layernorm\.weight", "input_layernorm.scale", operations=[SubtractOne()])
    ]

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps
"""


def test_an_op_that_changes_values_runs_through_transformers_and_is_marked(source: Path, tmp_path: Path) -> None:
    from kconvert.convert import prepare
    from kconvert.plan import explain_plan
    from tests.support import write_recipe

    write_package(tmp_path, COMPUTED)
    patch = replace("./package:Norm", name="Qwen3RMSNorm")
    recipe = write_recipe(tmp_path / "marked.yaml", patch, model_type="qwen3")
    prepared = prepare(str(recipe), source, trust_remote_code=True)
    (warning,) = prepared.warnings
    assert "2 tensors are made by compute(SubtractOne), which has no exact inverse" in warning
    marked = [tensor for tensor in explain_plan(prepared.plan)["tensors"] if tensor["op"] == "compute(SubtractOne)"]
    assert len(marked) == 2
    output = run_recipe(tmp_path, patch, source)
    model = load(output)
    before, after = read_raw(source), read_raw(output)
    weight = torch.frombuffer(bytearray(before["model.layers.1.input_layernorm.weight"].data), dtype=torch.float32)
    scale = torch.frombuffer(bytearray(after["model.layers.1.input_layernorm.scale"].data), dtype=torch.float32)
    assert torch.equal(scale, weight - 1)
    torch.testing.assert_close(logits(model), logits(stock(source)), rtol=0, atol=1e-5)
    assert [record.exact for record in load_manifest(output).tensors].count(False) == 2
    model.save_pretrained(tmp_path / "packed", variant="kconvert")
    assert read_raw(tmp_path / "packed") == after
    calls: dict[str, Any] = {
        "the stock tensors cannot be given back": lambda: model.save_pretrained(tmp_path / "stock"),
        "so its reference cannot run": lambda: logits(load(output, kernels="reference")),
    }
    for text, call in calls.items():
        with pytest.raises(KconvertError) as caught:
            call()
        assert text in str(caught.value)
    assert not (tmp_path / "stock" / "model.safetensors").exists()


class Rotate(ConversionOps):
    """An op of nobody's."""

    def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return input_dict


def test_an_op_that_nobody_knows_is_named(source: Path, tmp_path: Path) -> None:
    body = COMPUTED.replace("SubtractOne()", "Rotate()").replace(
        "from transformers.integrations.gguf.gguf_conversion_mapping import SubtractOne",
        f"from {Rotate.__module__} import Rotate",
    )
    write_package(tmp_path, body)
    with pytest.raises(KconvertError) as caught:
        run_recipe(tmp_path, replace("./package:Norm", name="Qwen3RMSNorm"), source)
    code, text = failure(caught.value)
    assert code == 3
    assert "conversion op Rotate of tests.packages.test_packages_ops is not known" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "old", "new", "text"),
    [
        pytest.param(
            "split",
            "(I // 4, H)",
            "(I // 3, H)",
            "sizes [16, 36] do not add up to axis 0",
            marks=pytest.mark.skipif("split" not in PRESENT, reason="this transformers has no Split"),
        ),
        ("concatenate", r'r"mlp\.up_proj\.weight"', r'r"mlp\.upper\.weight"', "needs a tensor that matches"),
        ("chunk", '"mlp.two"', '"self_attn.two"', "outside the module 'model.layers.0.mlp'"),
    ],
)
def test_a_chain_that_does_not_fit(
    name: str, old: str, new: str, text: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping, parameters, forward, ops = CASES[name]
    changed = mapping.replace(old, new), parameters.replace(old, new), forward, ops
    assert changed != CASES[name]
    monkeypatch.setitem(CASES, name, changed)
    with pytest.raises(KconvertError) as caught:
        convert_case(name, source, tmp_path)
    assert text in str(caught.value)
    assert not (tmp_path / "out").exists()
