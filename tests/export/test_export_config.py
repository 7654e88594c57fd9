"""`export-kernel-config`: what it prints, what it refuses and why, and with which exit code."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kconvert.cli import main as run_kconvert
from kconvert.errors import KernelRefusedError, TrustError, UsageError
from kconvert.export import PackagePlace, export_package, kernel_config
from kconvert.manifest import LayoutRecord, Manifest, PackageRecord, load_manifest
from kconvert.names import KERNELS_DIR, MANIFEST_NAME
from tests.docs.blocks import ROOT, find_blocks, run_blocks
from tests.hub.stand_in import StandInHub, built_package, use_hub
from tests.packages.helpers import CUSTOM, FUSED, copy_example, fuse, run_recipe
from tests.packages.helpers import replace as replace_entry
from tests.support import convert, save_tiny, write_recipe

HUB = PackagePlace("acme/kernels")


def entry(kernel: str, name: str, path: str) -> str:
    return f'  - kernel: {kernel}\n    replace: {{class: {name}, path: "{path}"}}\n'


def norm(place: str) -> str:
    return entry("cpu_fused_rmsnorm", "Qwen3RMSNorm", f"model.{place}")


def changed(directory: Path, target: Path, **kw: Any) -> Path:
    """A copy of a converted directory whose manifest has other values."""
    shutil.copytree(directory, target)
    manifest: Manifest = replace(load_manifest(directory), **kw)
    (target / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    return target


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run_kconvert([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_the_config_of_a_package_on_the_hub(converted_fused_dir: Path) -> None:
    made = kernel_config(converted_fused_dir, PackagePlace("acme/kernels", version=3))
    names: dict[str, Any] = {}
    exec(made.to_python(), names)
    metadata = {"version": 3, "trust_remote_code": False}
    pairs = (("Qwen3RMSNorm", "model.layers.*.post_attention_layernorm"), ("Qwen3MLP", "model.layers.*.mlp"))
    assert names["kernel_config"].kernel_mapping == {
        pairs: ("acme/kernels:FusedQwen3MLP", metadata),
        "Qwen3RMSNorm": ("acme/kernels:FusedQwen3RMSNorm", metadata),
        "Qwen3Attention": ("acme/kernels:PackedQwen3Attention", metadata),
    }
    assert names["kernel_config"].inherit_mapping is False
    assert names["kernel_config"].use_local_kernel is False
    assert "LOCAL_KERNELS" not in made.to_python()
    assert f'Qwen3ForCausalLM.from_pretrained("{converted_fused_dir}"' in made.to_python()


def test_the_config_as_json(converted_fused_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--package", "acme/kernels", "--revision", "main", "--trust-remote-code", "--json")
    code, out, _ = run(capsys, "export-kernel-config", converted_fused_dir, *arguments)
    assert code == 0
    value = json.loads(out)
    where = {"revision": "main", "trust_remote_code": True}
    assert value["kernel_mapping"] == [
        {
            "fuse": [["Qwen3RMSNorm", "model.layers.*.post_attention_layernorm"], ["Qwen3MLP", "model.layers.*.mlp"]],
            "kernel": "acme/kernels:FusedQwen3MLP",
            **where,
        },
        {"replace": "Qwen3RMSNorm", "kernel": "acme/kernels:FusedQwen3RMSNorm", **where},
        {"replace": "Qwen3Attention", "kernel": "acme/kernels:PackedQwen3Attention", **where},
    ]
    assert (value["model_class"], value["variant"], value["inherit_mapping"]) == ("Qwen3ForCausalLM", "kconvert", False)
    assert value["local_kernels"] == {}


def test_the_page_says_how(converted_qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(converted_qwen3_dir, tmp_path / "my-model-kconvert")
    page = ROOT / "docs" / "export.md"
    assert run_blocks(page, tmp_path) == {"console"}
    (block,) = [each for each in find_blocks(page.read_text(encoding="utf-8")) if "def config_from_json" in each.text]
    shown: dict[str, Any] = {}
    exec(block.text, shown)
    made = kernel_config(tmp_path / "my-model-kconvert", PackagePlace(str(tmp_path / "my-kernels")))
    names: dict[str, Any] = {}
    monkeypatch.setenv("LOCAL_KERNELS", "")  # so that it is as before when the test ends
    exec(made.to_python(), names)
    config = shown["config_from_json"](json.dumps(made.to_json()))
    assert config.kernel_mapping == names["kernel_config"].kernel_mapping
    assert config.inherit_mapping is False


def test_without_a_package_it_says_how_to_make_one(
    converted_qwen3_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "export-kernel-config", converted_qwen3_dir)
    assert (code, out) == (8, "")
    assert "no Hub package holds the kernels of gated_mlp, qkv_proj, rms_norm; run `kconvert export-package" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--package", "acme/kernels", "--version", "1", "--revision", "main"),
        ("--package", "no-such-folder"),
        ("--package", "a/b/c"),
        ("--version", "2"),
        ("--package", ".", "--version", "2"),
    ],
)
def test_wrong_options(
    arguments: tuple[str, ...], converted_qwen3_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "export-kernel-config", converted_qwen3_dir, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kconvert: error: ")


@pytest.mark.parametrize(
    ("patches", "words"),
    [
        (
            norm("layers.*.input_layernorm") + norm("layers.*.post_attention_layernorm"),
            "two fusions under one parent class",
        ),
        (entry("cpu_fused_swiglu", "Qwen3MLP", "model.layers.{1}.mlp"), "only model.layers.{1}.mlp is patched"),
        (norm("norm"), "Qwen3RMSNorm is patched in some places, not at 'model.layers.0.input_layernorm'"),
    ],
    ids=["two fusions", "layer set", "mixed"],
)
def test_what_kernel_config_cannot_express_is_refused(
    patches: str, words: str, qwen3_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converted = convert(write_recipe(tmp_path / "recipe.yaml", patches), qwen3_dir, tmp_path / "out").output
    code, out, err = run(capsys, "export-kernel-config", converted, "--package", "acme/kernels")
    assert (code, out) == (8, "")
    assert words in err
    assert len(err.splitlines()) == 1
    code, out, err = run(capsys, "export-package", converted, tmp_path / "package", "--json")
    value = json.loads(out)
    assert (code, value["exit_code"]) == (8, 8)
    assert [words in reason for reason in value["refused"]] == [True]
    assert not (tmp_path / "package").exists()


def test_every_reason_has_a_line(qwen3_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patches = norm("norm") + entry("cpu_fused_swiglu", "Qwen3MLP", "model.layers.{1}.mlp")
    converted = convert(write_recipe(tmp_path / "recipe.yaml", patches), qwen3_dir, tmp_path / "out").output
    code, _, err = run(capsys, "export-kernel-config", converted, "--package", "acme/kernels")
    assert code == 8
    first, second, last = err.splitlines()
    assert first.startswith("kconvert: refused: patch 0 (rms_norm): ")
    assert second.startswith("kconvert: refused: patch 1 (gated_mlp): ")
    assert "and 1 more like it" in last


def test_an_activation_that_the_export_has_not_is_refused(tmp_path: Path) -> None:
    """The conversion allows it: the reference runs any activation."""
    source = save_tiny(tmp_path / "source", "qwen3", hidden_act="relu")
    converted = convert("qwen3", source, tmp_path / "out").output
    with pytest.raises(KernelRefusedError, match=r"Qwen3MLP: its forward is not down\(act\(gate\) \* up\)") as caught:
        kernel_config(converted, HUB)
    assert len(caught.value.details["refused"]) == 1


def test_a_norm_that_computes_something_else_here_is_refused(converted_qwen3_dir: Path, tmp_path: Path) -> None:
    facts = {"Qwen3RMSNorm": {"offset": 1.0, "cast_first": True}}
    patches = tuple(replace(patch, facts=patch.facts and facts) for patch in load_manifest(converted_qwen3_dir).patches)
    converted = changed(converted_qwen3_dir, tmp_path / "out", patches=patches)
    with pytest.raises(KernelRefusedError, match=r"Qwen3RMSNorm computes .*'offset': 0.0.* here, at conversion it was"):
        kernel_config(converted, HUB)


def test_a_conversion_that_never_saw_the_model_is_refused(qwen3_dir: Path, tmp_path: Path) -> None:
    converted = convert("qwen3", qwen3_dir, tmp_path / "out", model_check=False).output
    with pytest.raises(KernelRefusedError, match="the model was not checked at the conversion"):
        kernel_config(converted, HUB)


@pytest.mark.parametrize(
    "record",
    [
        PackageRecord('./a:X")}, print("run"), {("', None, "sha256:" + "0" * 64, 'X")}, print("run"), {("'),
        PackageRecord("./a:X", None, "sha256:" + "0" * 64, "Y"),
        PackageRecord("a/b:X", 'main", "x": print("run"), "y": "', "sha256:" + "0" * 64, "X"),
        PackageRecord("a/b:X", None, "sha256:" + "0" * 64, "X"),
        PackageRecord("./a:X", None, "sha256:../../elsewhere", "X"),
    ],
)
def test_a_manifest_cannot_put_code_into_what_is_written(
    record: PackageRecord, converted_qwen3_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = LayoutRecord(f"{record.class_name}Layout", 1, record)
    patches = tuple(replace(patch, layout=layout) for patch in load_manifest(converted_qwen3_dir).patches[-1:])
    converted = changed(converted_qwen3_dir, tmp_path / "out", patches=patches, tensors=())
    code, out, err = run(capsys, "export-kernel-config", converted, "--package", "acme/kernels")
    assert (code, out) == (4, "")
    assert "do not use this checkpoint" in err


def test_names_of_the_directory_are_no_code(converted_qwen3_dir: Path, tmp_path: Path) -> None:
    hostile = tmp_path / 'a\nprint("run") #"'
    changed(converted_qwen3_dir, hostile, model_type='"""\nprint("run")')
    made = kernel_config(hostile, HUB).to_python()
    assert [line for line in made.splitlines() if line.startswith("print")] == []
    package = export_package(hostile, tmp_path / "package").directory
    assert "print" not in (package / "build" / "torch-cpu" / "layers.py").read_text(encoding="utf-8")


def test_a_model_whose_code_comes_with_the_directory_is_refused(converted_qwen3_dir: Path, tmp_path: Path) -> None:
    converted = shutil.copytree(converted_qwen3_dir, tmp_path / "out")
    config = json.loads((converted / "config.json").read_text())
    config.update(architectures=["TheirModel"], auto_map={"AutoModelForCausalLM": "modeling_theirs.TheirModel"})
    (converted / "config.json").write_text(json.dumps(config))
    (converted / "modeling_theirs.py").write_text("raise SystemExit('imported')")
    with pytest.raises(TrustError, match="TheirModel is defined by code in this directory"):
        kernel_config(converted, HUB)


def test_a_package_from_a_folder_is_copied_in(qwen3_dir: Path, tmp_path: Path) -> None:
    copy_example("norm_mlp", tmp_path)
    converted = run_recipe(tmp_path, fuse(), qwen3_dir)
    made = export_package(converted, tmp_path / "package")
    assert made.kernels == ("RMSNormMLP",)
    folder = made.directory / "build" / "torch-cuda"
    (inner,) = [path for path in folder.iterdir() if path.is_dir()]
    assert (inner / "layers.py").read_bytes() == (tmp_path / "norm_mlp" / "layers.py").read_bytes()
    assert f"from .{inner.name}.layers import RMSNormMLP, RMSNormMLPLayout\n" in (folder / "layers.py").read_text()
    (inner / "layers.py").write_text("raise SystemExit")
    with pytest.raises(KernelRefusedError, match="holds no package that was made of this converted directory"):
        kernel_config(converted, PackagePlace(str(made.directory)))
    vendored = next((converted / KERNELS_DIR).iterdir()) / "layers.py"
    vendored.write_text(vendored.read_text() + "\n# changed\n")
    with pytest.raises(TrustError, match="has changed since the conversion"):
        export_package(converted, tmp_path / "again")


def test_a_package_on_the_hub_is_named_by_its_commit(
    qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("kernels")
    layers = (copy_example("norm_mlp", tmp_path) / "layers.py").read_text(encoding="utf-8")
    with StandInHub() as hub:
        commit = hub.publish("acme/norm-mlp", built_package(layers, name="norm-mlp"), branch="v1")
        use_hub(monkeypatch, hub, tmp_path / "cache")
        converted = run_recipe(tmp_path, fuse("acme/norm-mlp:RMSNormMLP"), qwen3_dir)
    (item,) = kernel_config(converted, trust_remote_code=True).to_json()["kernel_mapping"]
    assert (item["kernel"], item["revision"], item["trust_remote_code"]) == ("acme/norm-mlp:RMSNormMLP", commit, True)
    with pytest.raises(UsageError, match="every kernel of it is in a Hub package"):
        kernel_config(converted, HUB)
    code, _, err = run(capsys, "export-package", converted, tmp_path / "package")
    assert code == 8
    assert "no kernel of it is built into kconvert; `kconvert export-kernel-config` needs no package here" in err


def test_packages_that_patch_some_places_are_refused(qwen3_dir: Path, tmp_path: Path) -> None:
    copy_example("custom_rms_norm", tmp_path)
    copy_example("norm_mlp", tmp_path)
    converted = run_recipe(tmp_path, replace_entry(CUSTOM) + fuse(FUSED), qwen3_dir)
    with pytest.raises(KernelRefusedError) as caught:
        kernel_config(converted, HUB)
    one, two = caught.value.details["refused"]
    assert "Qwen3RMSNorm is patched in some places" in one
    assert "Qwen3RMSNorm is replaced elsewhere by CustomRMSNormLayout" in two
