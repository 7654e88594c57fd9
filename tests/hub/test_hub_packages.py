"""Kernel packages from the Hub: which commit, what is brought, offline reuse, the lock, and what is said when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kconvert.kernels.hub as hub_module
import kconvert.kernels.variants as variants_module
from kconvert.cli import main
from kconvert.errors import KernelRefusedError, RecipeError, TrustError
from kconvert.kernels.hub import fetch_package, wanted_revision
from kconvert.names import KERNELS_DIR
from tests.hub.helpers import KERNEL, OWN, PLAIN, REPO, convert_hub, norm_layers, package_record
from tests.hub.stand_in import StandInHub, built_package, kernel_metadata, use_hub
from tests.packages.helpers import failure, load, logits, replace, stock
from tests.support import write_recipe


def _note(output: Path) -> str:
    """Which version of the kernel a converted directory holds."""
    (folder,) = (output / KERNELS_DIR).iterdir()
    text = (folder / "build/torch-cpu/layers.py").read_text(encoding="utf-8")
    return text.rpartition("NOTE = '")[2].partition("'")[0]


# --- which commit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ("", "one"),
        ("version: 1", "one"),
        ("version: 2", "two"),
        ("revision: v2", "two"),
        ("revision: release", "two"),
        ("revision: main", "one"),
    ],
)
def test_version_and_revision_choose_the_commit(
    keys: str, note: str, hub: StandInHub, tmp_path: Path, qwen3_dir: Path
) -> None:
    output = convert_hub(tmp_path / "work", qwen3_dir, keys=keys)
    record = package_record(output)
    assert _note(output) == note
    assert record.commit == hub.repositories[REPO].branches["v1" if note == "one" else "v2"]
    assert record.package_id == KERNEL
    assert [path.name for path in (output / KERNELS_DIR).iterdir()] == [record.digest.removeprefix("sha256:")]


def test_a_commit_is_a_revision(hub: StandInHub, tmp_path: Path, qwen3_dir: Path) -> None:
    old = hub.repositories[REPO].branches["v1"]
    hub.publish(REPO, built_package(norm_layers("newer")), branch="v1")
    assert _note(convert_hub(tmp_path / "branch", qwen3_dir, keys="version: 1")) == "newer"
    output = convert_hub(tmp_path / "commit", qwen3_dir, keys=f"revision: {old}")
    assert (_note(output), package_record(output).commit) == ("one", old)


def test_wanted_revision() -> None:
    assert wanted_revision(version=None, revision=None) == "v1"
    assert wanted_revision(version=3, revision=None) == "v3"
    assert wanted_revision(version=None, revision="main") == "main"


# --- a whole way ------------------------------------------------------------------------------------


def test_converted_once_it_loads_without_the_hub_and_without_kernels(
    hub: StandInHub,
    tmp_path: Path,
    qwen3_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = convert_hub(tmp_path / "work", qwen3_dir)
    record = package_record(output)
    announced = capsys.readouterr().err
    assert KERNEL in announced
    assert f"commit {record.commit}" in announced
    assert record.digest in announced
    hub.stop()
    before = len(hub.requests)
    monkeypatch.setattr(variants_module, "has_kernels_library", lambda: False)
    model = load(output, trust_remote_code=False, trust_kernels={KERNEL: record.digest})
    assert model.kconvert_report.to_dict()["kernels"] == {KERNEL: 2}
    assert abs(logits(model) - logits(stock(qwen3_dir))).max() <= 1e-5
    assert len(hub.requests) == before
    packed = tmp_path / "packed"
    model.save_pretrained(packed, variant="kconvert")
    assert package_record(packed) == record


def test_every_variant_is_brought_and_byte_code_is_not(hub: StandInHub, tmp_path: Path, qwen3_dir: Path) -> None:
    files: dict[str, Any] = built_package(norm_layers(), variants=("torch-cpu", "torch-cuda", "torch-npu"))
    files["build/torch-cpu/__pycache__/layers.cpython-311.pyc"] = b"\0"
    hub.publish(REPO, {**files, "README.md": "# Norm\n", "torch-ext/norm/extra.py": ""}, branch="v1")
    output = convert_hub(tmp_path / "work", qwen3_dir)
    (folder,) = (output / KERNELS_DIR).iterdir()
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {name for name in files if not name.endswith(".pyc")}


def test_of_a_large_package_compiled_variants_for_other_machines_stay_behind(
    hub: StandInHub, tmp_path: Path, qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_MAX_BYTES", 10_000)
    compiled = "torch213-cxx11-cu130-s390x-linux"
    files: dict[str, Any] = built_package(norm_layers(), variants=("torch-cpu", "torch-cuda"))
    files.update({f"build/{compiled}/{name}": text for name, text in (("layers.py", ""), ("big.so", "x" * 20_000))})
    files[f"build/{compiled}/metadata.json"] = kernel_metadata("norm", "cuda")
    hub.publish(REPO, files, branch="v1")
    fewer = fetch_package(REPO, KERNEL)
    assert sorted({name.split("/")[1] for name in fewer.copy.files}) == ["torch-cpu", "torch-cuda"]
    use_hub(monkeypatch, hub, tmp_path / "cache", offline=True)
    assert fetch_package(REPO, KERNEL).copy.digest == fewer.copy.digest
    use_hub(monkeypatch, hub, tmp_path / "cache")
    monkeypatch.setattr(hub_module, "_MAX_BYTES", 1_000_000)
    assert f"build/{compiled}/big.so" in fetch_package(REPO, KERNEL).copy.files


# --- offline ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", ["version: 2", "revision: release", ""])
def test_what_was_downloaded_once_is_used_offline(
    keys: str, hub: StandInHub, tmp_path: Path, qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = convert_hub(tmp_path / "online", qwen3_dir, keys=keys)
    before = len(hub.requests)
    use_hub(monkeypatch, hub, tmp_path / "cache", offline=True)
    second = convert_hub(tmp_path / "offline", qwen3_dir, keys=keys)
    assert len(hub.requests) == before
    assert package_record(second) == package_record(first)


def test_a_hub_that_is_down_is_like_offline(hub: StandInHub) -> None:
    first = fetch_package(REPO, KERNEL)
    hub.stop()
    again = fetch_package(REPO, KERNEL)
    assert (again.commit, again.copy.digest) == (first.commit, first.copy.digest)


def test_offline_without_a_download_before(
    hub: StandInHub, tmp_path: Path, qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, hub, tmp_path / "cache", offline=True)
    with pytest.raises(KernelRefusedError) as caught:
        convert_hub(tmp_path / "work", qwen3_dir, keys="version: 2")
    code, text = failure(caught.value)
    assert code == 8
    for words in (
        f"{tmp_path}/work/recipe.yaml:5",
        KERNEL,
        "version 2 is not whole in the Hub cache",
        "HF_HUB_OFFLINE",
    ):
        assert words in text
    assert hub.requests == []


def test_settings_come_from_the_environment(hub: StandInHub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME, KERNELS_CACHE and HF_HUB_OFFLINE, which the library reads when it is imported."""
    code = (
        "from kconvert.kernels.hub import fetch_package\n"
        f"made = fetch_package({REPO!r}, {KERNEL!r}, version=2)\n"
        "print(made.commit, made.source)"
    )
    kernels_cache = tmp_path / "kernels cache"
    for offline in (False, True):
        hub.requests.clear()
        environment = {**hub.environment(tmp_path / "home", offline=offline), "KERNELS_CACHE": str(kernels_cache)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "PYTHONPATH": os.getcwd()},  # noqa: PTH109 - the checkout under test
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        commit, source = done.stdout.strip().split(" ", 1)
        assert commit == hub.repositories[REPO].branches["v2"]
        assert Path(source).is_relative_to(kernels_cache)
        assert bool(hub.requests) is not offline


# --- what is not there ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "keys", "code", "words"),
    [
        (KERNEL, "version: 7", 3, ["no version 7", "it has version 1, 2"]),
        (KERNEL, "revision: nowhere", 3, ["no revision 'nowhere'", "it has version 1, 2"]),
        ("kernels-community/nothing:Norm", "", 3, ["no kernel repository 'kernels-community/nothing'"]),
        ("kernels-community/norm:Nrom", "", 3, ["has no class Nrom"]),
        ("kernels-community/plain:Norm", "", 3, ["no build/<variant>/metadata.json at v1"]),
        ("kernels-community/needy:Norm", "", 8, ["needs other kernel packages (kernels-community/norm)"]),
        (
            "kernels-community/alien:Norm",
            "",
            8,
            ["no build variant for this machine", "torch213-cxx11-cu130-s390x-linux"],
        ),
    ],
)
def test_what_is_not_there_is_one_line(
    kernel: str, keys: str, code: int, words: list[str], hub: StandInHub, tmp_path: Path, qwen3_dir: Path
) -> None:
    hub.publish("kernels-community/plain", {"layers.py": norm_layers()}, branch="v1")
    needs: dict[str, Any] = {"kernel-depends": [{"repo-id": REPO, "version": 1}]}
    needy = kernel_metadata("needy", **needs)
    hub.publish(
        "kernels-community/needy", {**built_package(norm_layers()), "build/torch-cpu/metadata.json": needy}, branch="v1"
    )
    alien = "build/torch213-cxx11-cu130-s390x-linux"
    hub.publish(
        "kernels-community/alien",
        {f"{alien}/layers.py": norm_layers(), f"{alien}/metadata.json": kernel_metadata("alien", "cuda")},
        branch="v1",
    )
    with pytest.raises((RecipeError, KernelRefusedError)) as caught:
        convert_hub(tmp_path / "work", qwen3_dir, kernel=kernel, keys=keys)
    found, text = failure(caught.value)
    assert found == code
    assert [word for word in [*words, kernel, f"{tmp_path}/work/recipe.yaml:5"] if word not in text] == [], text
    assert not (tmp_path / "work/out").exists()


def test_without_the_kernels_library(hub: StandInHub, tmp_path: Path, qwen3_dir: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(hub_module, "has_kernels_library", lambda: False)
    with pytest.raises(KernelRefusedError) as caught:
        convert_hub(tmp_path / "work", qwen3_dir)
    code, text = failure(caught.value)
    assert code == 8
    assert "pip install 'kconvert[hub]'" in text
    assert hub.requests == []


# --- the lock ---------------------------------------------------------------------------------------


def _lock(folder: Path, commit: str, *, version: int = 1, repo: str = REPO) -> None:
    """A `kernels.lock` as `kernels lock` writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    entry = {"dependency": {"repo-id": repo, "version": version}, "lock": {"commit": commit}}
    (folder / "kernels.lock").write_text(json.dumps([entry]), encoding="utf-8")


@pytest.mark.parametrize("beside_recipe", [True, False])
def test_a_lock_decides_the_commit(
    beside_recipe: bool, hub: StandInHub, tmp_path: Path, qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = hub.repositories[REPO].branches["v1"]
    hub.publish(REPO, built_package(norm_layers("newer")), branch="v1")
    project = tmp_path / "project"
    _lock(tmp_path / "work" if beside_recipe else project, old)
    if beside_recipe:  # it comes first
        _lock(project, "0" * 40)
    monkeypatch.chdir(project)
    output = convert_hub(tmp_path / "work", qwen3_dir)
    assert (_note(output), package_record(output).commit) == ("one", old)


@pytest.mark.parametrize(
    ("keys", "locked", "words"),
    [
        ("version: 2", {}, ["asks for version 2", "version 1 is locked"]),
        ("revision: main", {}, ["asks for revision 'main'", "version 1 is locked"]),
        ("", {"repo": "kernels-community/other"}, ["it is not locked"]),
    ],
)
def test_what_the_lock_does_not_say_is_refused(
    keys: str, locked: dict[str, str], words: list[str], hub: StandInHub, tmp_path: Path, qwen3_dir: Path
) -> None:
    _lock(tmp_path / "work", hub.repositories[REPO].branches["v1"], **locked)  # type: ignore[arg-type]
    with pytest.raises(RecipeError) as caught:
        convert_hub(tmp_path / "work", qwen3_dir, keys=keys)
    code, text = failure(caught.value)
    assert code == 3
    assert [word for word in [*words, "kernels.lock", "kernels lock"] if word not in text] == [], text
    assert hub.requests == []


def test_a_damaged_lock_is_refused(hub: StandInHub, tmp_path: Path, qwen3_dir: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/kernels.lock").write_text("{", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"kernels\.lock"):
        convert_hub(tmp_path / "work", qwen3_dir)


# --- trust ------------------------------------------------------------------------------------------


@pytest.fixture
def marker(tmp_path: Path, hub: StandInHub) -> Path:
    """Touched when `somebody/norm` is imported."""
    marker = tmp_path / "marker"
    hub.publish("somebody/norm", built_package(norm_layers(marker=marker)), branch="v1")
    return marker


@pytest.mark.parametrize(("in_recipe", "by_machine"), [(False, False), (False, True), (True, False)])
def test_another_owner_needs_recipe_and_machine(
    in_recipe: bool, by_machine: bool, hub: StandInHub, marker: Path, tmp_path: Path, qwen3_dir: Path
) -> None:
    keys = "trust_remote_code: true" if in_recipe else ""
    with pytest.raises(TrustError) as caught:
        convert_hub(tmp_path / "work", qwen3_dir, kernel=OWN, keys=keys, trust=by_machine)
    code, text = failure(caught.value)
    assert code == 8
    assert OWN in text
    assert not marker.exists()
    assert not (tmp_path / "work/out").exists()
    if in_recipe:  # it was downloaded, to be read
        assert f"--trust-kernel {OWN}=sha256:" in text
        assert str(tmp_path / "cache") in text
    else:
        assert "trust_remote_code: true" in text
        assert hub.requests == []


def test_another_owner_by_digest(hub: StandInHub, marker: Path, tmp_path: Path, qwen3_dir: Path) -> None:
    digest = fetch_package("somebody/norm", OWN).copy.digest
    assert not marker.exists()
    keys, trusted = "trust_remote_code: true", {OWN: digest}
    output = convert_hub(tmp_path / "work", qwen3_dir, kernel=OWN, keys=keys, trust_kernels=trusted)
    assert marker.exists()
    assert package_record(output).digest == digest
    marker.unlink()
    hub.publish("somebody/norm", built_package(norm_layers("changed", marker=marker)), branch="v1")
    for trust in (False, True):
        with pytest.raises(TrustError, match=digest) as caught:
            convert_hub(tmp_path / "again", qwen3_dir, kernel=OWN, keys=keys, trust=trust, trust_kernels=trusted)
        assert failure(caught.value)[0] == 8
    assert not marker.exists()


def test_a_digest_holds_for_a_trusted_owner_too(hub: StandInHub, tmp_path: Path, qwen3_dir: Path) -> None:
    with pytest.raises(TrustError, match="trusted is sha256:00"):
        convert_hub(tmp_path / "work", qwen3_dir, trust_kernels={KERNEL: "sha256:" + "0" * 64})


def test_a_name_that_only_looks_like_the_trusted_owner(hub: StandInHub, tmp_path: Path, qwen3_dir: Path) -> None:
    for number, owner in enumerate(("kernels-community2", "Kernels-Community", "kernels_community")):
        with pytest.raises(TrustError, match="the recipe does not trust it"):
            convert_hub(tmp_path / str(number), qwen3_dir, kernel=f"{owner}/norm:Norm")
    assert hub.requests == []


def test_a_file_that_was_changed_in_the_cache_is_refused(
    hub: StandInHub, tmp_path: Path, qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    source = fetch_package(REPO, KERNEL).source
    blob = (source / "build/torch-cpu/layers.py").resolve()
    blob.write_text(norm_layers("one", marker=marker), encoding="utf-8")
    use_hub(monkeypatch, hub, tmp_path / "cache", offline=True)
    with pytest.raises(KernelRefusedError) as caught:
        convert_hub(tmp_path / "work", qwen3_dir)
    code, text = failure(caught.value)
    assert code == 8
    assert "build/torch-cpu/layers.py in the Hub cache is not what was downloaded" in text
    assert not marker.exists()


@pytest.mark.parametrize("plant", ["byte code", "link"])
def test_what_was_put_into_the_cache_is_refused(
    plant: str, hub: StandInHub, tmp_path: Path, qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch_package(REPO, KERNEL).source / "build/torch-cpu"
    if plant == "byte code":
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__/layers.cpython-311.pyc").write_bytes(b"\0")
    else:
        (tmp_path / "outside.py").write_text("", encoding="utf-8")
        (folder / "more.py").symlink_to(tmp_path / "outside.py")
    use_hub(monkeypatch, hub, tmp_path / "cache", offline=True)
    with pytest.raises(KernelRefusedError, match="byte code" if plant == "byte code" else "holds a link") as caught:
        convert_hub(tmp_path / "work", qwen3_dir)
    assert failure(caught.value)[0] == 8


def test_plan_proposes_the_flag_only_where_it_is_needed(
    hub: StandInHub, marker: Path, tmp_path: Path, qwen3_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kernel, trusted in ((KERNEL, False), (OWN, True)):
        entry = replace(kernel, trust=trusted)
        recipe = write_recipe(tmp_path / "recipe.yaml", entry)
        assert main(["plan", str(recipe), str(qwen3_dir), *(["--trust-remote-code"] if trusted else [])]) == 0
        assert ("--trust-remote-code" in capsys.readouterr().out) is trusted


def test_loading_does_not_take_the_manifests_word_for_the_owner(
    hub: StandInHub, tmp_path: Path, qwen3_dir: Path
) -> None:
    output = convert_hub(tmp_path / "work", qwen3_dir)
    with pytest.raises(TrustError) as caught:
        load(output, trust_remote_code=False)
    code, text = failure(caught.value)
    assert code == 8
    assert f"'{KERNEL}': '{package_record(output).digest}'" in text


# --- built packages on disk -------------------------------------------------------------------------


def test_a_built_local_package(hub: StandInHub, tmp_path: Path, qwen3_dir: Path) -> None:
    work = tmp_path / "work"
    cuda = 'raise RuntimeError("the wrong variant")'
    files = {
        **built_package(norm_layers()),
        "build/torch-cuda/layers.py": cuda,
        "README.md": "",
        "tests/test_it.py": "",
    }
    for name, text in files.items():
        (work / "package" / name).parent.mkdir(parents=True, exist_ok=True)
        (work / "package" / name).write_text(text, encoding="utf-8")
    keys = "trust_remote_code: true"
    output = convert_hub(work, qwen3_dir, kernel="./package:Norm", keys=keys, trust=True)
    record = package_record(output)
    assert record.commit is None
    (folder,) = (output / KERNELS_DIR).iterdir()
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {name for name in files if name.startswith("build/")}
    assert load(output).kconvert_report.to_dict()["kernels"] == {"./package:Norm": 2}
    assert hub.requests == []


def test_a_package_for_another_device_converts_and_runs_its_reference(
    hub: StandInHub, tmp_path: Path, qwen3_dir: Path
) -> None:
    hub.publish(REPO, built_package(norm_layers(), variants=("torch-npu",)), branch="v1")
    output = convert_hub(tmp_path / "work", qwen3_dir)
    with pytest.warns(UserWarning, match="run their reference.*none is for cpu"):
        model = load(output)
    assert model.kconvert_report.to_dict()["kernels"] == {"reference": 2}
    assert (logits(model) == logits(stock(qwen3_dir))).all()


# --- kernels without a layout -----------------------------------------------------------------------


def test_a_kernel_without_a_layout_swaps_the_forward_and_no_tensor(
    hub: StandInHub, tmp_path: Path, qwen3_dir: Path
) -> None:
    hub.publish(REPO, built_package(PLAIN), branch="v1")
    output = convert_hub(tmp_path / "work", qwen3_dir)
    model = load(output)
    assert model.kconvert_report.to_dict()["kernels"] == {KERNEL: 2}
    assert set(model.state_dict()) == set(stock(qwen3_dir).state_dict())
    assert abs(logits(model) - logits(stock(qwen3_dir))).max() <= 1e-5
