"""Out of kconvert and into transformers: an exported package, loaded through KernelConfig, gives the stock model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import kernel_config as kernel_config_module

from kconvert.cli import main as run_kconvert
from kconvert.export import PackagePlace, export_package, kernel_config
from tests.hub.stand_in import StandInHub
from tests.packages.helpers import copy_example, fuse, run_recipe
from tests.support import Kind, convert, save_tiny, write_recipe

pytest.importorskip("kernels")
if not hasattr(kernel_config_module, "KERNELS_SUPPORTED_DEVICE_TYPES"):
    pytest.skip("KernelConfig of this transformers has its devices in its code", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
ONE_PAIR = '  - kernel: cpu_fused_rmsnorm\n    replace: {class: Qwen3RMSNorm, path: "model.layers.*.input_layernorm"}\n'
TOLERANCE = 5e-6
"""Of float32 logits of size 1 to 10: the norms are torch's own op, and a packed product may sum in another order."""


class Jobs:
    """Conversions, exports and configs, gathered to be loaded by one process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.jobs: list[dict[str, Any]] = []
        self.sources: dict[str, Path] = {}

    def source(self, kind: Kind) -> Path:
        if kind not in self.sources:
            self.sources[kind] = save_tiny(self.directory / f"{kind}-source", kind)
        return self.sources[kind]

    def add(self, name: str, source: Path, converted: Path, config: str, **kw: Any) -> None:
        architecture = json.loads((source / "config.json").read_text())["architectures"][0]
        job = {"name": name, "source": str(source), "converted": str(converted), "config": config}
        self.jobs.append({**job, "model_class": architecture, "out": str(self.directory / f"{name}.json"), **kw})

    def add_recipe(self, name: str, recipe: str | Path, kind: Kind) -> Path:
        """Convert, export into a folder, and load from there."""
        source, output = self.source(kind), self.directory / name
        converted = convert(recipe, source, output / "converted").output
        package = export_package(converted, output / "package").directory
        self.add(name, source, converted, kernel_config(converted, PackagePlace(str(package))).to_python())
        return converted

    def run(self, environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        path = self.directory / "jobs.json"
        path.write_text(json.dumps(self.jobs), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "tests.export.loading", str(path)],
            cwd=ROOT,
            env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return {job["name"]: json.loads(Path(job["out"]).read_text(encoding="utf-8")) for job in self.jobs}


@pytest.fixture(scope="module")
def hub() -> Iterator[StandInHub]:
    with StandInHub() as running:
        yield running


@pytest.fixture(scope="module")
def answers(hub: StandInHub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("round-trip")
    jobs = Jobs(directory)
    qwen3 = jobs.add_recipe("qwen3", "qwen3", "qwen3")
    jobs.add_recipe("fused", "qwen3-fused-norm-mlp", "qwen3")
    jobs.add_recipe("gemma2", "gemma2", "gemma2")
    jobs.add_recipe("phi3", "phi3", "phi3")
    jobs.add_recipe("qwen3-moe", "qwen3-moe", "qwen3_moe")
    jobs.add_recipe("one-pair", write_recipe(directory / "one-pair.yaml", ONE_PAIR), "qwen3")
    source, package = jobs.source("qwen3"), directory / "qwen3" / "package"
    jobs.add("from-source", source, qwen3, jobs.jobs[0]["config"], from_source=True)
    jobs.add("fused-from-source", source, Path(jobs.jobs[1]["converted"]), jobs.jobs[1]["config"], from_source=True)
    _add_package(jobs)
    # on the Hub: version 2 is the package, version 1 is not
    hub.publish("acme/kernels", {"build/torch-cpu/layers.py": "raise SystemExit"}, branch="v1")
    hub.publish("acme/kernels", package, branch="v2")
    place = PackagePlace("acme/kernels", version=2)
    jobs.add("hub", source, qwen3, kernel_config(qwen3, place, trust_remote_code=True).to_python())
    jobs.add("hub-untrusted", source, qwen3, kernel_config(qwen3, place).to_python())
    # what transformers cannot do
    jobs.add("cpu", source, qwen3, jobs.jobs[0]["config"], allow_cpu=False)
    jobs.add("local", source, qwen3, _local_config(package), use_local_kernel=True)
    return jobs.run(hub.environment(directory / "cache"))


def _add_package(jobs: Jobs) -> None:
    """A two-class package from a folder, with the norm and the MLP fused."""
    (jobs.directory / "two-class").mkdir()
    copy_example("norm_mlp", jobs.directory / "two-class")
    source = jobs.source("qwen3")
    converted = run_recipe(jobs.directory / "two-class", fuse(), source)
    package = export_package(converted, jobs.directory / "two-class" / "exported").directory
    text = kernel_config(converted, PackagePlace(str(package))).to_python()
    jobs.add("two-class", source, converted, text, own_forward=False)


def _local_config(package: Path) -> str:
    return (
        "from transformers import KernelConfig\n"
        f'kernel_config = KernelConfig({{"Qwen3MLP": "{package}:PackedQwen3MLP"}}, use_local_kernel=True)'
    )


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "fused",
        "gemma2",
        "phi3",
        "qwen3-moe",
        "one-pair",
        "two-class",
        "hub",
        "from-source",
        "fused-from-source",
    ],
)
def test_the_loaded_model_is_the_stock_model(name: str, answers: dict[str, dict[str, Any]]) -> None:
    found = answers[name]
    assert "error" not in found, found.get("traceback")
    assert (found["missing"], found["unexpected"]) == ([], [])
    assert found["names_equal"]
    assert found["values_equal"]
    assert found["difference"] < TOLERANCE
    assert found["tokens_equal"]


@pytest.mark.parametrize(
    ("name", "kernels", "stock"),
    [
        (
            "qwen3",
            ("FusedQwen3RMSNorm", "PackedQwen3Attention", "PackedQwen3MLP"),
            "Qwen3RMSNorm Qwen3Attention Qwen3MLP",
        ),
        ("fused", ("FusedQwen3RMSNorm", "PackedQwen3Attention", "FusedQwen3MLP"), "Qwen3RMSNorm Qwen3Attention"),
        ("gemma2", ("FusedGemma2RMSNorm", "PackedGemma2Attention", "PackedGemma2MLP"), "Gemma2RMSNorm Gemma2MLP"),
        ("phi3", ("FusedPhi3RMSNorm", "PackedPhi3MLP"), "Phi3RMSNorm Phi3MLP"),
        (
            "qwen3-moe",
            ("FusedQwen3MoeRMSNorm", "PackedQwen3MoeAttention", "PackedQwen3MoeMLP"),
            "Qwen3MoeRMSNorm Qwen3MoeAttention Qwen3MoeMLP",
        ),
        ("one-pair", ("FusedQwen3RMSNorm",), ""),
        ("two-class", ("RMSNormMLP",), "Qwen3MLP"),
        (
            "hub",
            ("FusedQwen3RMSNorm", "PackedQwen3Attention", "PackedQwen3MLP"),
            "Qwen3RMSNorm Qwen3Attention Qwen3MLP",
        ),
    ],
)
def test_the_kernels_run(name: str, kernels: tuple[str, ...], stock: str, answers: dict[str, dict[str, Any]]) -> None:
    """Their forwards are in the modules, each in its layout, and no module of these stock classes is left."""
    found = answers[name]
    assert {f"{kernel}.forward" for kernel in kernels} <= set(found["forwards"])
    assert {f"{kernel}Layout" for kernel in kernels} <= set(found["classes"])
    assert not set(stock.split()) & set(found["classes"])


@pytest.mark.parametrize(
    "name", ["qwen3", "fused", "gemma2", "phi3", "one-pair", "hub", "from-source", "fused-from-source"]
)
def test_it_trains_and_saves_the_stock_layout(name: str, answers: dict[str, dict[str, Any]]) -> None:
    found = answers[name]
    assert found["gradients"]
    assert found["later_difference"] < TOLERANCE, "a plain load of the same type, later in the process"
    assert found["saved_names_equal"]
    assert found["saved_equal"]


def test_a_mixture_of_experts_trains_and_is_saved_in_module_names(answers: dict[str, dict[str, Any]]) -> None:
    """Its experts are stacked, in the converted files and in what is saved: `KernelConfig` takes no stack apart."""
    found = answers["qwen3-moe"]
    assert found["gradients"]
    assert found["later_difference"] < TOLERANCE
    assert not found["saved_names_equal"]
    assert found["saved_in_module_names"]


def test_the_package_was_downloaded_in_the_version_that_the_config_names(
    hub: StandInHub, answers: dict[str, dict[str, Any]]
) -> None:
    assert "error" not in answers["hub"]
    commit = hub.repositories["acme/kernels"].branches["v2"]
    assert any(f"/acme/kernels/resolve/{commit}/build/torch-cpu/layers.py" in line for line in hub.requests)
    assert not any(hub.repositories["acme/kernels"].branches["v1"] in line for line in hub.requests)


def test_an_owner_is_trusted_only_where_the_config_says_so(answers: dict[str, dict[str, Any]]) -> None:
    assert "is not from a trusted publisher" in answers["hub-untrusted"]["error"]


def test_what_transformers_refuses_on_its_own(answers: dict[str, dict[str, Any]]) -> None:
    """The two reasons for what the config looks like, and for the GPU: they may go with a later transformers."""
    assert "Only devices in" in answers["cpu"]["error"]
    assert "got: cpu" in answers["cpu"]["error"]
    assert "'tuple' object has no attribute 'split'" in answers["local"]["error"]


def test_the_commands_do_the_same(
    converted_qwen3_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    assert run_kconvert(["export-package", str(converted_qwen3_dir), str(package)]) == 0
    assert capsys.readouterr().out == f"{package}\n"
    assert run_kconvert(["export-kernel-config", str(converted_qwen3_dir), "--package", str(package)]) == 0
    printed = capsys.readouterr().out
    assert printed == kernel_config(converted_qwen3_dir, PackagePlace(str(package))).to_python() + "\n"
    monkeypatch.setenv("LOCAL_KERNELS", "other/one=/there")
    names: dict[str, Any] = {}
    exec(printed, names)
    assert os.environ["LOCAL_KERNELS"] == f"local/qwen3-kconvert={package}:other/one=/there"
    assert sorted(names["kernel_config"].kernel_mapping) == ["Qwen3Attention", "Qwen3MLP", "Qwen3RMSNorm"]
