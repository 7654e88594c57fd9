"""The exported package: its files, what is in `layers.py`, and the numbers of its forwards beside kconvert's kernels."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from kconvert.errors import KernelRefusedError, OutputError, UsageError
from kconvert.export import PackagePlace, export_package, forwards, kernel_config
from kconvert.export.forwards import NotExportedError
from kconvert.export.layers import layers_source
from kconvert.export.pieces import JoinRows, pack_children, split_rows
from kconvert.export.routes import plan_routes
from kconvert.export.stock import load_stock, read_names
from kconvert.kernels.ops.gated_mlp.cpu import gated_product_cpu
from kconvert.kernels.ops.rms_norm.cpu import rms_norm_torch
from kconvert.kernels.ops.rms_norm.layout import RMSNormVariant
from tests.support import Kind, convert, save_tiny, tiny_config

VARIANTS = {"torch-cpu": "cpu", "torch-cuda": "cuda", "torch-npu": "cann"}


def import_layers(package: Path, name: str) -> ModuleType:
    """`layers.py` of the CPU variant as a module of its own."""
    spec = importlib.util.spec_from_file_location(name, package / "build" / "torch-cpu" / "layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def package(converted_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_package(converted_qwen3_dir, tmp_path_factory.mktemp("package") / "out").directory


@pytest.fixture(scope="module")
def layers(package: Path) -> ModuleType:
    return import_layers(package, "exported_qwen3_layers")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModuleType]:
    """`layers.py` for a tiny model of a kind."""

    def make(recipe: str, kind: Kind, **kw: Any) -> ModuleType:
        directory = tmp_path_factory.mktemp(kind)
        converted = convert(recipe, save_tiny(directory / "source", kind, **kw), directory / "converted").output
        return import_layers(export_package(converted, directory / "package").directory, f"exported_{directory.name}")

    return make


def test_every_variant_is_what_the_kernels_library_wants(package: Path) -> None:
    rust = pytest.importorskip("kernels._rust")
    assert sorted(path.name for path in (package / "build").iterdir()) == sorted(VARIANTS)
    identities = set()
    for variant, backend in VARIANTS.items():
        folder = package / "build" / variant
        assert sorted(path.name for path in folder.iterdir()) == ["__init__.py", "layers.py", "metadata.json"]
        metadata = rust.Metadata.read_from_file(folder / "metadata.json")
        assert (str(metadata.name), metadata.version, metadata.license) == ("qwen3-kconvert", 1, "Apache-2.0")
        assert str(metadata.backend.backend_type) == backend
        assert metadata.id.isidentifier(), "it becomes the name of a module"
        identities.add(metadata.id)
        assert (folder / "layers.py").read_bytes() == (package / "build" / "torch-cpu" / "layers.py").read_bytes()
    assert len(identities) == len(VARIANTS)


def test_nothing_in_it_needs_kconvert(package: Path) -> None:
    tree = ast.parse((package / "build" / "torch-cpu" / "layers.py").read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in modules} == {
        "collections",
        "functools",
        "hashlib",
        "inspect",
        "torch",
        "transformers",
        "typing",
    }


def test_the_kernels_are_stateless_and_their_layouts_beside_them(layers: ModuleType) -> None:
    plain = set(dir(nn.Module))
    for name in ("FusedQwen3RMSNorm", "PackedQwen3Attention", "PackedQwen3MLP"):
        kernel, layout = getattr(layers, name), getattr(layers, f"{name}Layout")
        assert set(dir(kernel)) - plain == {"has_backward", "can_torch_compile"}
        assert kernel.__init__ is nn.Module.__init__
        assert layout.__dict__["forward"] is kernel.forward, "in training transformers runs the layout's own"
        assert isinstance(layout.conversion_mapping, list)
        assert kernel.__doc__


@pytest.mark.parametrize(
    ("recipe", "kind", "offset", "cast_first"), [("qwen3", "qwen3", 0.0, True), ("gemma2", "gemma2", 1.0, False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_has_the_numbers_of_the_kernel(
    recipe: str, kind: Kind, offset: float, cast_first: bool, dtype: torch.dtype, exported: Callable[..., ModuleType]
) -> None:
    module = exported(recipe, kind)
    name = "FusedQwen3RMSNormLayout" if kind == "qwen3" else "FusedGemma2RMSNormLayout"
    norm = getattr(module, name)(32, eps=1e-3).to(dtype)
    hidden = 0.1 * torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(32, generator=torch.Generator().manual_seed(1)))
        expected = rms_norm_torch(hidden, norm.weight, eps=1e-3, offset=offset, cast_first=cast_first)
        assert torch.equal(norm(hidden), expected)
        assert not torch.equal(
            norm(hidden), rms_norm_torch(hidden, norm.weight, eps=1e-6, offset=offset, cast_first=cast_first)
        )


@pytest.mark.parametrize(
    ("recipe", "kind", "activation"), [("qwen3", "qwen3", "silu"), ("gemma2", "gemma2", "gelu_tanh")]
)
def test_the_gated_mlp_has_the_numbers_of_the_kernel(
    recipe: str, kind: Kind, activation: str, exported: Callable[..., ModuleType]
) -> None:
    module = exported(recipe, kind)
    config = tiny_config(kind)
    layout = module.PackedQwen3MLPLayout if kind == "qwen3" else module.PackedGemma2MLPLayout
    torch.manual_seed(0)
    mlp, stock = layout(config), layout.__mro__[1](config)
    with torch.no_grad():
        mlp.gate_up_proj.weight.copy_(torch.cat([stock.gate_proj.weight, stock.up_proj.weight]))
        mlp.down_proj.weight.copy_(stock.down_proj.weight)
        hidden = torch.randn(2, 3, 32)
        expected = mlp.down_proj(gated_product_cpu(mlp.gate_up_proj(hidden), activation))
        assert torch.equal(mlp(hidden), expected)
        assert torch.allclose(expected, stock(hidden), atol=1e-6)


def test_a_class_that_is_built_packed_has_nothing_to_pack(exported: Callable[..., ModuleType]) -> None:
    module = exported("phi3", "phi3")
    assert module.PackedPhi3MLPLayout.conversion_mapping == []
    assert "__init__" not in module.PackedPhi3MLPLayout.__dict__


def test_biases_are_packed_where_there_are_some(exported: Callable[..., ModuleType]) -> None:
    """Qwen2 has them in q, k and v, and not in the MLP."""
    module = exported("qwen2", "qwen2")
    targets = [item.target_patterns for item in module.PackedQwen2AttentionLayout.conversion_mapping]
    assert targets == [["self_attn.qkv_proj.weight"], ["self_attn.qkv_proj.bias"]]
    assert [item.target_patterns for item in module.PackedQwen2MLPLayout.conversion_mapping] == [
        ["mlp.gate_up_proj.weight"]
    ]
    attention = module.PackedQwen2AttentionLayout(tiny_config("qwen2"), 0)
    assert attention.qkv_proj.bias.shape == (128,)
    assert attention.qkv_proj_rows == (64, 32, 32)


def test_the_mapping_leaves_packed_names_alone(converted_fused_dir: Path, tmp_path: Path) -> None:
    module = import_layers(export_package(converted_fused_dir, tmp_path / "package").directory, "exported_fused_layers")

    def renamed(name: str, layout: Any) -> str:
        for item in layout.conversion_mapping:
            name, _ = item.rename_source_key(name)
        return name

    fused, attention = module.FusedQwen3MLPLayout, module.PackedQwen3AttentionLayout
    before = "model.layers.0."
    for stock, packed in (
        ("post_attention_layernorm.weight", "post_attention_layernorm.norm.weight"),
        ("mlp.gate_proj.weight", "post_attention_layernorm.mlp.gate_up_proj.weight"),
        ("mlp.up_proj.weight", "post_attention_layernorm.mlp.gate_up_proj.weight"),
        ("mlp.down_proj.weight", "post_attention_layernorm.mlp.down_proj.weight"),
    ):
        assert renamed(before + stock, fused) == before + packed
        assert renamed(before + packed, fused) == before + packed
    assert renamed("model.layers.0.self_attn.k_proj.weight", attention) == "model.layers.0.self_attn.qkv_proj.weight"
    for other in ("model.layers.0.shared_mlp.gate_proj.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight"):
        assert renamed(other, fused) == other, "a match begins at a segment"


def test_parts_of_any_rows_come_apart_again() -> None:
    """K and v have fewer rows than q, so that the plain reverse of a concatenation would cut them wrongly."""
    attention: Any = nn.Module()
    for name, rows in (("q", 4), ("k", 2), ("v", 1)):
        attention.add_module(name, nn.Linear(3, rows, bias=False))
    weights = [attention.get_parameter(f"{name}.weight").detach().clone() for name in "qkv"]
    pack_children(attention, "qkv", ("q", "k", "v"))
    assert torch.equal(attention.qkv.weight, torch.cat(weights))
    assert [part.shape[-1] for part in split_rows(torch.zeros(2, 7), attention.qkv_rows)] == [4, 2, 1]
    patterns = ["attn.q.weight", "attn.k.weight", "attn.v.weight"]
    model = nn.ModuleDict({"attn": attention})
    packed: dict[str, Any] = {"attn.qkv.weight": [attention.qkv.weight]}
    cut: dict[str, Any] = JoinRows("qkv").reverse_op.convert(
        packed, ["attn.qkv.weight"], patterns, full_layer_name=patterns[0], model=model
    )
    assert list(cut) == patterns
    assert all(torch.equal(cut[name], weight) for name, weight in zip(patterns, weights, strict=True))


def test_another_stock_forward_is_refused_at_import(package: Path, tmp_path: Path) -> None:
    text = (package / "build" / "torch-cpu" / "layers.py").read_text(encoding="utf-8")
    digest = text.partition('check_stock(modeling_qwen3.Qwen3MLP, "')[2].partition('"')[0]
    assert len(digest) == 16
    (tmp_path / "build" / "torch-cpu").mkdir(parents=True)
    (tmp_path / "build" / "torch-cpu" / "layers.py").write_text(text.replace(digest, "0" * 16), encoding="utf-8")
    with pytest.raises(ImportError, match=r"qwen3\.Qwen3MLP computes something else .* export the package again"):
        import_layers(tmp_path, "exported_from_another_version")


def test_the_same_directory_gives_the_same_package(package: Path, converted_qwen3_dir: Path, tmp_path: Path) -> None:
    again = export_package(converted_qwen3_dir, tmp_path / "again").directory
    files = sorted(path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert len(files) == 9
    assert all((again / file).read_bytes() == (package / file).read_bytes() for file in files)


def test_name_and_version_are_in_the_metadata(converted_qwen3_dir: Path, tmp_path: Path) -> None:
    made = export_package(converted_qwen3_dir, tmp_path / "out", name="my-kernels", version=3)
    value = json.loads((made.directory / "build" / "torch-cuda" / "metadata.json").read_text())
    assert (value["name"], value["version"], value["id"][:17]) == ("my-kernels", 3, "_my_kernels_cuda_")
    assert made.kernels == ("FusedQwen3RMSNorm", "PackedQwen3Attention", "PackedQwen3MLP")


@pytest.mark.parametrize("kw", [{"name": "My_Kernels"}, {"name": "x"}, {"version": 0}])
def test_a_name_or_version_that_kernels_does_not_take(
    kw: dict[str, Any], converted_qwen3_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError):
        export_package(converted_qwen3_dir, tmp_path / "out", **kw)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(converted_qwen3_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(OutputError, match="is there already"):
        export_package(converted_qwen3_dir, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    assert export_package(converted_qwen3_dir, tmp_path / "empty").directory == tmp_path / "empty"


def test_a_layout_that_has_no_form_is_named(converted_qwen3_dir: Path) -> None:
    stock = load_stock(converted_qwen3_dir)
    entry = plan_routes(stock.manifest.patches, read_names(stock.model)).entries[-1]
    with pytest.raises(NotExportedError, match="layout 'their_layout' has no form outside kconvert"):
        layers_source(stock, [replace(entry, layout="their_layout")])


def test_a_kernel_that_two_entries_have_stands_once(converted_qwen3_dir: Path) -> None:
    """As a fusion under two parent classes gives, which may call the module by other names."""
    stock = load_stock(converted_qwen3_dir)
    entry = plan_routes(stock.manifest.patches, read_names(stock.model)).entries[-1]
    layer = stock.model.model.layers[1]
    layer.ffn = layer.mlp
    parts = [replace(entry, claims=((path,),)) for path in ("model.layers.0.mlp", "model.layers.1.ffn")]
    text = layers_source(stock, parts)
    assert text.count("class PackedQwen3MLP(") == 1
    assert r"(?<![^.])mlp\.gate_proj\.weight" in text
    assert r"(?<![^.])ffn\.gate_proj\.weight" in text


def test_a_model_that_has_a_packed_tensor_of_its_own_is_refused(converted_qwen3_dir: Path) -> None:
    """As MiniMax in some of its layers: saving goes by names, and would cut that one too."""
    stock = load_stock(converted_qwen3_dir)
    entry = plan_routes(stock.manifest.patches, read_names(stock.model)).entries[-1]
    other = stock.model.model.other = nn.Module()
    other.mlp = nn.Module()
    other.mlp.gate_up_proj = nn.Linear(2, 2, bias=False)
    with pytest.raises(NotExportedError, match=r"a tensor 'model.other.mlp.gate_up_proj.weight' of its own"):
        layers_source(stock, [entry])


def test_a_model_that_initialises_the_parts_by_name_is_refused(
    converted_qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ModernBERT's decoder: loading would stop there."""

    def fill(self: Any, module: nn.Module) -> None:
        if isinstance(module, modeling_qwen3.Qwen3Attention):
            nn.init.zeros_(module.q_proj.weight)

    monkeypatch.setattr(modeling_qwen3.Qwen3PreTrainedModel, "_init_weights", fill)
    words = r"Qwen3Attention: its model initialises it by its stock parts \(AttributeError: .*q_proj"
    with pytest.raises(KernelRefusedError, match=words):
        kernel_config(converted_qwen3_dir, PackagePlace("acme/kernels"))


def test_a_norm_that_treats_mixed_dtypes_in_its_own_way_is_refused(
    converted_qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of T5 does."""
    variant = RMSNormVariant(1e-6, 0.0, True, mixes=False)
    monkeypatch.setattr(forwards, "prove_variant", lambda module: variant)
    with pytest.raises(KernelRefusedError, match="Qwen3RMSNorm treats an input of another dtype than its weight"):
        kernel_config(converted_qwen3_dir, PackagePlace("acme/kernels"))


def test_the_input_is_called_as_in_the_stock_forward(layers: ModuleType) -> None:
    """Callers may pass it by that name."""
    for layout in (layers.PackedQwen3MLPLayout, layers.FusedQwen3RMSNormLayout):
        assert list(signature(layout.forward).parameters) == list(signature(layout.__mro__[1].forward).parameters)
    attention = layers.PackedQwen3AttentionLayout
    assert list(signature(attention.forward).parameters) == list(signature(attention.__mro__[1].forward).parameters)


def test_a_changed_package_is_not_named_in_a_config(package: Path, converted_qwen3_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(package, tmp_path / "copy"))
    kernel_config(converted_qwen3_dir, PackagePlace(str(copy)))
    file = copy / "build" / "torch-cuda" / "layers.py"
    file.write_text(file.read_text().replace("offset=0.0", "offset=1.0"))
    with pytest.raises(KernelRefusedError, match="holds no package that was made of this converted directory"):
        kernel_config(converted_qwen3_dir, PackagePlace(str(copy)))
