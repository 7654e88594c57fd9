"""`check-kernel`: every fault of a package shows in the check that is about it, with the way out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kconvert.authoring import Check, CheckReport, Outcome, check_kernel, numbers
from kconvert.authoring.subject import representatives
from kconvert.cli import main
from kconvert.errors import CheckpointError, RecipeError, UsageError
from kconvert.kernels.packing import unpack_state
from tests.packages.helpers import copy_example, fuse, write_package
from tests.support import write_recipe

Capture = pytest.CaptureFixture[str]
TARGET = ("Qwen3RMSNorm", "model.layers.*.input_layernorm")

GOOD = r"""
class Norm(nn.Module):
    has_backward = True

    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.scale * wide.to(hidden_states.dtype)

class NormLayout(nn.Module):
    conversion_mapping = [WeightRenaming(r"input_layernorm\.weight", "input_layernorm.scale")]

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
"""
RETURN = "return self.scale * wide.to(hidden_states.dtype)"
CHECKS = [
    "classes",
    "stateless",
    "mapping",
    "signature",
    "inverse",
    "reference",
    "numerics float32",
    "numerics bfloat16",
    "numerics float16",
    "shape: batch 1",
    "shape: 1 token",
    "shape: batch 1, 1 token",
    "shape: not contiguous",
    "gradient",
    "state",
    "torch.compile",
]


def _check(directory: Path, body: str, source: Path, target: tuple[str, str] = TARGET) -> CheckReport:
    return check_kernel(f"{write_package(directory, body)}:Norm", model_dir=source, targets=[target])


def _failed(report: CheckReport) -> set[str]:
    return {check.name for check in report.failures}


def _one(report: CheckReport, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


def test_a_good_kernel_passes_every_check(tmp_path: Path, qwen3_dir: Path, capsys: Capture) -> None:
    report = _check(tmp_path, COMPILED, qwen3_dir)
    assert [check.name for check in report.checks] == CHECKS
    assert {check.outcome for check in report.checks} == {Outcome.OK}, report.to_text()
    assert report.modules == (("model.layers.0.input_layernorm",),)
    printed = capsys.readouterr().err
    assert f"importing kernel package {tmp_path / 'package'}:Norm ({report.digest}" in printed
    assert printed.count("importing kernel package") == 1


def _with(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


COMPILED = _with("has_backward = True", "can_torch_compile = True")
FAULTS = {
    "stateless: __init__": (
        _with("has_backward = True", "def __init__(self):\n        super().__init__()"),
        {"stateless"},
        "an __init__ of its own, which never runs; move what it sets to NormLayout.__init__",
    ),
    "stateless: helper": (
        _with("has_backward = True", "def helper(self):\n        return 1"),
        {"stateless"},
        "Norm has helper, which its forward does not find: self is a NormLayout",
    ),
    "signature: one more": (
        _with("forward(self, hidden_states)", "forward(self, hidden_states, scale)"),
        None,
        "forward(hidden_states, scale) does not stand in for Qwen3RMSNorm.forward(hidden_states)",
    ),
    "mapping: not consumed": (
        _with(r"input_layernorm\.weight", r"input_layernorm\.other"),
        {"mapping"},
        "model.layers.0.input_layernorm.",
    ),
    "mapping: not filled": (
        _with("self.eps = eps", "self.eps, self.more = eps, nn.Parameter(torch.ones(2))"),
        {"mapping"},
        "input_layernorm.more",
    ),
    "mapping: another shape": (
        _with("torch.ones(hidden_size)", "torch.ones(hidden_size + 1)"),
        {"mapping"},
        "makes 'model.layers.0.input_layernorm.scale' [32], and its layout has [33]",
    ),
    "mapping: a typo in a pattern": (
        _with(r"input_layernorm\.weight", r"input_layernorm\.weights"),
        {"mapping"},
        "no rule of the package's conversion_mapping makes 'model.layers.0.input_layernorm.scale'",
    ),
    "classes: a layout of another name": (
        _with("class NormLayout", "class NormParameters"),
        {"classes"},
        "has no class NormLayout, but NormParameters, which has a conversion_mapping; call it NormLayout",
    ),
    "mapping: no rules": (_with("[WeightRenaming", "7 or [WeightRenaming"), {"mapping"}, "no list of rules"),
    "mapping: other arguments": (_with("hidden_size, eps=1e-6", "hidden_size, eps, more"), {"mapping"}, "more"),
    "classes: no layout class": (_with("class NormLayout(nn.Module)", "class NormLayout"), {"classes"}, "NormLayout"),
    "classes: does not import": (
        _with("class Norm(", "import nothing_like_this\nclass Norm("),
        {"classes"},
        "nothing_like_this",
    ),
    "layout: only on meta": (
        _with("self.eps = eps", "self.eps = eps\n        assert self.scale.is_meta, 'on meta alone'"),
        {"layout"},
        "the layout cannot be built (AssertionError: on meta alone); the layout's __init__ has to work on any device",
    ),
    "reference: another value than was loaded": (
        _with("self.eps = eps", "self.eps = eps\n        self.register_load_state_dict_post_hook(double)").replace(
            "return self.scale", "return 0.5 * self.scale"
        )
        + "\ndef double(layout, keys):\n    with torch.no_grad():\n        layout.scale.mul_(2)\n",
        {"reference", "gradient"},
        "model.layers.0.input_layernorm: 1.0e+00 of the largest value, allowed",
    ),
    "numerics: another eps": (
        _with("+ self.eps", "+ 10 * self.eps"),
        {name for name in CHECKS if name.startswith("numerics")}
        | {"shape: 1 token", "shape: not contiguous", "gradient"},
        "of the largest value, allowed 1e-05",
    ),
    "numerics: float16 squares": (
        _with("wide.square().mean(-1, keepdim=True)", "4096 * (wide / 64).square().mean(-1, keepdim=True)").replace(
            "hidden_states.float()", "hidden_states"
        ),
        {"numerics float16"},
        "of the largest value, allowed",
    ),
    "numerics: does not run in bfloat16": (
        _with("wide = hidden_states.float()", "wide = hidden_states if self.scale.dtype != torch.bfloat16 else 1 / 0"),
        {"numerics bfloat16"},
        "the kernel does not run (ZeroDivisionError: division by zero)",
    ),
    "shape: batch 1": (
        _with(RETURN, RETURN.replace("return", "return (") + ").squeeze(0)"),
        {"shape: batch 1", "shape: batch 1, 1 token"},
        "output 1 of 1 is float32 [7, 32], the stock module gives float32 [1, 7, 32]",
    ),
    "shape: 1 token": (
        _with(RETURN, RETURN.replace("return", "assert hidden_states.shape[1] > 1, 'one token'\n        return")),
        {"shape: 1 token", "shape: batch 1, 1 token"},
        "AssertionError: one token",
    ),
    "shape: not contiguous": (
        _with(
            "wide = hidden_states.float()",
            "b, t, h = hidden_states.shape\n        wide = hidden_states.as_strided((b, t, h), (t * h, h, 1)).float()",
        ),
        {"shape: not contiguous"},
        "model.layers.0.input_layernorm",
    ),
    "gradient: cut off": (_with("self.scale *", "self.scale.detach() *"), {"gradient"}, "scale gets no gradient"),
    "gradient: none at all": (
        _with("def forward", "@torch.no_grad()\n    def forward"),
        {"gradient"},
        "input, scale gets no gradient; give it a backward, or set has_backward = False",
    ),
    "gradient: wrong": (
        _with(
            RETURN,
            "y = self.scale * wide.to(hidden_states.dtype)\n        return hidden_states + (y - hidden_states).detach()",
        ),
        {"gradient"},
        "gets no gradient",
    ),
    "gradient: doubled": (
        _with(RETURN, "y = self.scale * wide.to(hidden_states.dtype)\n        return 2 * y - y.detach()"),
        {"gradient"},
        "of input: model.layers.0.input_layernorm: 1.0e+00 of the largest value, allowed 0.0001",
    ),
    "state: an attribute": (
        _with(RETURN, "self.last = hidden_states.shape\n        " + RETURN),
        {"state"},
        "the forward changes last of the module",
    ),
    "state: a list": (
        _with(RETURN, "self.seen.append(1)\n        " + RETURN).replace(
            "self.eps = eps", "self.eps, self.seen = eps, []"
        ),
        {"state"},
        "the forward changes seen of the module",
    ),
    "state: a parameter": (
        _with(
            RETURN, "y = self.scale * wide.to(hidden_states.dtype)\n        self.scale.data.add_(1)\n        return y"
        ),
        None,
        "the forward changes scale of the module",
    ),
    "state: the input": (
        _with(
            RETURN,
            "y = self.scale * wide.to(hidden_states.dtype)\n        hidden_states.detach().zero_()\n        return y",
        ),
        None,
        "the forward writes into its input; work on a copy",
    ),
    "torch.compile: cannot": (
        COMPILED.replace(
            "wide = hidden_states.float()", "wide = hidden_states.float()\n        print(float(wide.detach().sum()))"
        ),
        {"torch.compile"},
        "set can_torch_compile = False, or write the forward so that it can be traced",
    ),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_shows_where_it_belongs(fault: str, tmp_path: Path, qwen3_dir: Path) -> None:
    body, failed, said = FAULTS[fault]
    report = _check(tmp_path, body, qwen3_dir)
    name = fault.partition(": ")[0]
    if failed is None:
        assert name in _failed(report), report.to_text()
    else:
        assert _failed(report) == failed, report.to_text()
    lines = [check.line() for check in report.failures if check.name.startswith(name)]
    assert [line for line in lines if said in line], report.to_text()
    assert all("\n" not in line for line in lines)


def test_values_that_do_not_come_back_fail_the_inverse(
    tmp_path: Path, qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packings hold every value by the way they are made, so a fault is put in: every value in the place of the next."""

    def unpack_wrongly(*args: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.roll(1) for name, tensor in unpack_state(*args).items()}

    monkeypatch.setattr(numbers, "unpack_state", unpack_wrongly)
    report = _check(tmp_path, GOOD, qwen3_dir)
    assert _failed(report) == {"inverse"}, report.to_text()
    said = (
        "model.layers.0.input_layernorm.weight does not come back from the packed tensors; the conversion_mapping has"
    )
    assert _one(report, "inverse").line().startswith(said)
    monkeypatch.setattr(numbers, "unpack_state", lambda *args: {**unpack_state(*args), "more": torch.zeros(1)})
    report = _check(tmp_path / "more", GOOD, qwen3_dir)
    assert _failed(report) == {"inverse"}, report.to_text()
    assert _one(report, "inverse").text.startswith("more does not come back")


def test_flags_that_promise_nothing_are_said_so(tmp_path: Path, qwen3_dir: Path) -> None:
    body = _with("has_backward = True", "has_backward = False").replace(
        "    def forward", "    @torch.no_grad()\n    def forward"
    )
    report = _check(tmp_path, body, qwen3_dir)
    assert not report.failures
    assert _one(report, "gradient").line() == "has_backward is False: where gradients are needed the reference runs"
    assert (
        _one(report, "torch.compile").line() == "can_torch_compile is not True: in a compiled model the reference runs"
    )
    assert {_one(report, name).outcome for name in ("gradient", "torch.compile")} == {Outcome.NOT_RUN}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("class Norm(nn.Module)", "class Norm", "the kernels library refuses it; write class Norm(nn.Module)"),
        (
            "self.eps = eps",
            "self.eps = eps\n\n    def forward(self, x):\n        pass",
            "forward of its own, which is never run",
        ),
    ],
)
def test_what_harms_elsewhere_is_a_warning(old: str, new: str, said: str, tmp_path: Path, qwen3_dir: Path) -> None:
    report = _check(tmp_path, _with(old, new), qwen3_dir)
    assert not report.failures
    assert _one(report, "stateless").outcome is Outcome.WARNING
    assert said in _one(report, "stateless").line()


def test_a_kernel_without_a_layout(tmp_path: Path, qwen3_dir: Path) -> None:
    kernel = (
        GOOD[: GOOD.index("class NormLayout")]
        .replace("self.scale", "self.weight")
        .replace("self.eps", "self.variance_epsilon")
    )
    report = _check(tmp_path, kernel, qwen3_dir)
    assert {check.outcome for check in report.checks if check.name != "torch.compile"} == {Outcome.OK}, report.to_text()
    assert _one(report, "classes").text == "Norm has no layout"
    more = _check(tmp_path / "more", kernel.replace("(self, hidden_states)", "(self, hidden_states, scale)"), qwen3_dir)
    assert _failed(more) == {"signature"}, more.to_text()
    report = _check(tmp_path / "wrong", kernel.replace("self.variance_epsilon", "1e-3"), qwen3_dir)
    assert "numerics float32" in _failed(report)


def test_a_fusion_by_its_recipe(tmp_path: Path, qwen3_dir: Path) -> None:
    copy_example("norm_mlp", tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml", fuse())
    report = check_kernel(f"{tmp_path / 'norm_mlp'}:RMSNormMLP", model_dir=qwen3_dir, recipe=recipe)
    assert not report.failures, report.to_text()
    assert report.modules == (("model.layers.0.post_attention_layernorm", "model.layers.0.mlp"),)
    assert _one(report, "gradient").text.startswith("of input, scale, gate_up_proj.weight, down_proj.weight: ")


def test_every_kind_of_place_is_tried(tmp_path: Path, qwen3_dir: Path) -> None:
    """q_norm and input_layernorm are of one class, and have other sizes."""
    body = _with(
        r'r"input_layernorm\.weight", "input_layernorm.scale"', r'r"(q_norm|input_layernorm)\.weight", r"\1.scale"'
    )
    package = write_package(tmp_path, body)
    entries = "".join(
        f'  - kernel: ./package:Norm\n    replace: {{class: Qwen3RMSNorm, path: "model.layers.*.{name}"}}\n'
        for name in ("input_layernorm", "self_attn.q_norm")
    )
    recipe = write_recipe(
        tmp_path / "recipe.yaml", entries.replace("    replace", "    trust_remote_code: true\n    replace")
    )
    report = check_kernel(f"{package}:Norm", model_dir=qwen3_dir, recipe=recipe)
    assert not report.failures, report.to_text()
    assert report.modules == (("model.layers.0.input_layernorm",), ("model.layers.0.self_attn.q_norm",))


ATTENTION = r"""
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

class Norm(nn.Module):
    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = hidden_states.shape[:-1]
        q, k, v = (part.view(*shape, -1, 16) for part in self.qkv(hidden_states).split(self.sizes, dim=-1))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        is_causal = attention_mask is None and q.shape[2] > 1
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, is_causal=is_causal, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(*shape, -1)), None

class NormLayout(nn.Module):
    conversion_mapping = [
        WeightConverter(
            [rf"self_attn\.{name}_proj\.weight" for name in "qkv"], "self_attn.qkv.weight", operations=[Concatenate(dim=0)]
        ),
    ]

    def __init__(self, config, layer_idx):
        super().__init__()
        self.sizes = [heads * 16 for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        self.qkv = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(self.sizes[0], config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (Qwen3RMSNorm(16, config.rms_norm_eps) for _ in "qk")
"""


def test_a_kernel_of_many_inputs(tmp_path: Path, qwen3_dir: Path) -> None:
    """Positions and masks are those of the model, in every shape."""
    target = ("Qwen3Attention", "model.layers.*.self_attn")
    report = _check(tmp_path, ATTENTION, qwen3_dir, target)
    assert not report.failures, report.to_text()
    assert _one(report, "gradient").text.startswith(
        "of input, qkv.weight, o_proj.weight, q_norm.weight, k_norm.weight: "
    )
    assert {_one(report, name).outcome for name in CHECKS if name.startswith(("shape", "numerics"))} == {Outcome.OK}
    report = _check(tmp_path / "renamed", ATTENTION.replace("attention_mask", "mask"), qwen3_dir, target)
    assert "its parameter mask is called attention_mask in the stock forward" in _one(report, "signature").text
    report = _check(tmp_path / "swapped", ATTENTION.replace('"qkv"]', '"kqv"]'), qwen3_dir, target)
    assert "numerics float32" in _failed(report), report.to_text()


def test_places_of_one_entry_with_other_sizes_are_tried_too() -> None:
    sizes = {"a": (2, 2), "b": (2, 3), "c": (2, 2), "d": (2, 3)}
    model = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
    model["d"].to(torch.bfloat16)
    record = SimpleNamespace(modules=[(name,) for name in sizes], classes=("Linear",))
    assert representatives([record], model) == [(0, ("a",)), (0, ("b",)), (0, ("d",))]


@pytest.mark.parametrize(
    ("kernel", "options", "error", "said"),
    [
        ("package", {"targets": [TARGET]}, UsageError, "names no class; write FOLDER:ClassName"),
        ("package:", {"targets": [TARGET]}, UsageError, "names no class"),
        ("package:a-b", {"targets": [TARGET]}, UsageError, "no Python identifier"),
        ("nothing:Norm", {"targets": [TARGET]}, UsageError, "is no folder"),
        ("package:Norm", {}, UsageError, "no modules are named"),
        ("package:Norm", {"targets": [TARGET], "recipe": "recipe.yaml"}, UsageError, "given twice"),
        ("package:Other", {"recipe": "recipe.yaml"}, UsageError, "does not name"),
        ("package:Norm", {"recipe": "absent.yaml"}, RecipeError, "no recipe file"),
        ("package:Norm", {"targets": [("Qwen3RMSNorm", "model.layers.*.norm")]}, RecipeError, "matches no module"),
        (
            "package:Norm",
            {"targets": [("RMSNorm", TARGET[1])]},
            RecipeError,
            "is a Qwen3RMSNorm, the recipe names RMSNorm",
        ),
        ("package:Norm", {"targets": [("Qwen3RMSNorm", "model..x")]}, RecipeError, "path pattern"),
    ],
)
def test_a_call_that_is_wrong(
    kernel: str,
    options: dict[str, object],
    error: type[Exception],
    said: str,
    tmp_path: Path,
    qwen3_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_package(tmp_path, GOOD)
    write_recipe(tmp_path / "recipe.yaml", fuse("./package:Norm"))
    with pytest.raises(error, match=said) as caught:
        check_kernel(kernel, model_dir=qwen3_dir, **options)  # type: ignore[arg-type]
    assert "check-kernel:" not in str(caught.value)


def test_a_recipe_for_another_model_type(tmp_path: Path, llama_dir: Path) -> None:
    package = write_package(tmp_path, GOOD)
    recipe = write_recipe(tmp_path / "recipe.yaml", fuse("./package:Norm"))
    with pytest.raises(RecipeError, match="is for model type qwen3"):
        check_kernel(f"{package}:Norm", model_dir=llama_dir, recipe=recipe)


def test_a_model_directory_that_is_none(tmp_path: Path) -> None:
    write_package(tmp_path, GOOD)
    with pytest.raises(CheckpointError):
        check_kernel(f"{tmp_path / 'package'}:Norm", model_dir=tmp_path / "absent", targets=[TARGET])


def test_nothing_in_a_model_directory_names_code_to_run(tmp_path: Path, qwen3_dir: Path) -> None:
    """Only the folder on the command line is run, not another one that the recipe names."""
    marker = tmp_path / "marker"
    write_package(tmp_path, GOOD)
    write_package(tmp_path, GOOD + f"\nopen({str(marker)!r}, 'w')\n", "other")
    patches = "".join(
        f"  - kernel: ./{name}:Norm\n    trust_remote_code: true\n"
        f'    replace: {{class: Qwen3RMSNorm, path: "model.layers.*.{path}"}}\n'
        for name, path in (("package", "input_layernorm"), ("other", "post_attention_layernorm"))
    )
    recipe = write_recipe(tmp_path / "recipe.yaml", patches)
    report = check_kernel(f"{tmp_path / 'package'}:Norm", model_dir=qwen3_dir, recipe=recipe)
    assert not report.failures
    assert not marker.exists()


# --- the command ------------------------------------------------------------------------------------


def _command(directory: Path, body: str, source: Path, *options: str) -> list[str]:
    kernel = f"{write_package(directory, body)}:Norm"
    return ["check-kernel", kernel, "--model-dir", str(source), "--class", TARGET[0], "--path", TARGET[1], *options]


def test_the_command_shows_a_line_for_each_check(
    tmp_path: Path, qwen3_dir: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(_command(tmp_path, GOOD, qwen3_dir)) == 0
    out = capsys.readouterr().out
    assert [name for name in CHECKS if f" {name} " not in out] == []
    assert "OK: the kernel can stand in for modules such as model.layers.0.input_layernorm." in out


def test_a_refused_kernel_is_exit_code_8(
    tmp_path: Path, qwen3_dir: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    body = _with("+ self.eps", "+ 10 * self.eps")
    assert main(_command(tmp_path, body, qwen3_dir)) == 8
    captured = capsys.readouterr()
    assert "FAILED" in captured.out
    (line,) = [line for line in captured.err.splitlines() if line.startswith("kconvert: error: ")]
    assert "numerics float32: model.layers.0.input_layernorm: " in line
    assert "(and 5 more); compare the forward with that of the replaced module" in line


def test_json_of_a_refused_kernel_holds_every_check(tmp_path: Path, qwen3_dir: Path, capsys: Capture) -> None:
    body = _with("self.scale *", "self.scale.detach() *")
    assert main(_command(tmp_path, body, qwen3_dir, "--json")) == 8
    value = json.loads(capsys.readouterr().out)
    assert value["exit_code"] == 8
    assert [check["check"] for check in value["checks"]] == CHECKS
    assert [check["check"] for check in value["checks"] if check["result"] == "failed"] == ["gradient"]
    assert value["modules"] == [["model.layers.0.input_layernorm"]]


def test_as_many_classes_as_paths(tmp_path: Path, qwen3_dir: Path, capsys: Capture) -> None:
    assert main(_command(tmp_path, GOOD, qwen3_dir, "--class", "Qwen3MLP")) == 2
    assert "2 times --class and 1 times --path" in capsys.readouterr().err
