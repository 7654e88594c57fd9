"""A hostile model directory: whatever its data files say, no code of it runs, and nothing is fetched.

Every file of code that the attacker brings leaves a mark when it is imported.  The stand-in Hub is online and serves
the repositories that the directory names, so that a fetch would succeed, and be seen.
"""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kconvert import load_converted
from kconvert.cli import main
from kconvert.errors import KconvertError
from kconvert.kernels.packages import copy_package
from kconvert.manifest import Manifest, PackageRecord, load_manifest
from kconvert.names import CONFIG_NAME, KERNELS_DIR, MANIFEST_NAME
from tests.hub.helpers import forget_packages, marked, norm_layers
from tests.hub.stand_in import StandInHub, built_package
from tests.packages.helpers import failure, run_recipe
from tests.packages.helpers import replace as replace_entry
from tests.support import write_recipe

KERNEL = "./package:Norm"
CLAIMED = "kernels-community/norm:Norm"


class Victim:
    """A directory that was converted by an honest package, and what an attacker may do to it."""

    def __init__(self, directory: Path, marker: Path) -> None:
        self.directory, self.marker = directory, marker
        self.honest = self.package.digest

    @property
    def manifest(self) -> Manifest:
        return load_manifest(self.directory)

    @property
    def package(self) -> PackageRecord:
        record = self.manifest.patches[0].layout.package
        assert record is not None
        return record

    @property
    def vendored(self) -> Path:
        return self.directory / KERNELS_DIR / self.package.digest.removeprefix("sha256:")

    def evil_code(self) -> str:
        return norm_layers("evil", marker=self.marker)

    def write_manifest(self, **package: Any) -> None:
        """A manifest with a digest of itself that fits, whose package says something else."""
        patch = self.manifest.patches[0]
        layout = replace(patch.layout, package=replace(self.package, **package))
        kernels = (str(package.get("package_id", self.package.package_id)),)
        changed = replace(self.manifest, patches=(replace(patch, layout=layout, kernels=kernels),))
        (self.directory / MANIFEST_NAME).write_bytes(changed.to_bytes())

    def swap_code(self, **package: Any) -> None:
        """Hostile code under a digest that fits it, in code and manifest."""
        old = self.vendored
        (old / "layers.py").write_text(self.evil_code(), encoding="utf-8")
        digest = copy_package(old, KERNEL).digest
        old.rename(old.with_name(digest.removeprefix("sha256:")))
        self.write_manifest(digest=digest, **package)

    def write_config(self, **values: Any) -> None:
        path = self.directory / CONFIG_NAME
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **values}), encoding="utf-8")


@pytest.fixture(scope="module")
def honest_dir(qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`qwen3_dir` by an honest package on disk."""
    directory = tmp_path_factory.mktemp("honest")
    (directory / "package").mkdir()
    (directory / "package/layers.py").write_text(norm_layers("honest"), encoding="utf-8")
    return run_recipe(directory, replace_entry(KERNEL), qwen3_dir)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def victim(honest_dir: Path, tmp_path: Path, marker: Path, hub: StandInHub) -> Victim:
    for repo in ("evil/kernel", "org/repo", "kernels-community/norm"):
        hub.publish(repo, built_package(norm_layers(marker=marker)), branch="v1")
        hub.publish(repo, built_package(norm_layers(marker=marker)), branch="main")
    forget_packages()
    return Victim(Path(shutil.copytree(honest_dir, tmp_path / "victim")), marker)


# --- the attacks ------------------------------------------------------------------------------------


def hostile_layers(victim: Victim) -> None:
    (victim.vendored / "layers.py").write_text(victim.evil_code(), encoding="utf-8")


def one_more_file(victim: Victim) -> None:
    (victim.vendored / "__init__.py").write_text(marked(victim.marker), encoding="utf-8")


def changed_digest(victim: Victim) -> None:
    victim.swap_code()


def untrusted_owner(victim: Victim) -> None:
    victim.swap_code(package_id="evil/kernel:Norm", commit="0" * 40)


def claimed_owner(victim: Victim) -> None:
    victim.swap_code(package_id=CLAIMED, commit="0" * 40)


def another_id(victim: Victim) -> None:
    """Hostile code, in the hope that the user has trusted the ID and not the digest."""
    victim.swap_code(package_id=KERNEL)


def path_as_digest(victim: Victim) -> None:
    evil = victim.directory / "evil"
    evil.mkdir()
    (evil / "layers.py").write_text(victim.evil_code(), encoding="utf-8")
    victim.write_manifest(digest="sha256:../evil")


def _plant_byte_code(victim: Victim, target: Path) -> None:
    """Byte code that an import of the unchanged `layers.py` would take: time and size of the source fit."""
    source = victim.vendored / "layers.py"
    evil = victim.directory.parent / "evil.py"
    evil.write_text(victim.evil_code(), encoding="utf-8")
    py_compile.compile(str(evil), cfile=str(target), doraise=True)
    data = bytearray(target.read_bytes())
    state = source.stat()
    data[8:16] = int(state.st_mtime).to_bytes(4, "little") + (state.st_size & 0xFFFFFFFF).to_bytes(4, "little")
    target.write_bytes(data)


def byte_code_in_the_cache_folder(victim: Victim) -> None:
    source = victim.vendored / "layers.py"
    target = Path(importlib.util.cache_from_source(str(source)))
    target.parent.mkdir()
    _plant_byte_code(victim, target)


def byte_code_beside(victim: Victim) -> None:
    _plant_byte_code(victim, victim.vendored / "layers.pyc")


def link_instead_of_code(victim: Victim) -> None:
    evil = victim.directory.parent / "evil.py"
    evil.write_text(victim.evil_code(), encoding="utf-8")
    (victim.vendored / "layers.py").unlink()
    (victim.vendored / "layers.py").symlink_to(evil)


def model_code(victim: Victim) -> None:
    (victim.directory / "modeling_x.py").write_text(marked(victim.marker) + "class XForCausalLM: ...", encoding="utf-8")
    victim.write_config(
        architectures=["XForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM", "AutoConfig": "modeling_x.XConfig"},
    )


def attention_of_the_hub(victim: Victim) -> None:
    victim.write_config(attn_implementation="org/repo")


def attention_of_the_hub_in_its_other_name(victim: Victim) -> None:
    victim.write_config(_attn_implementation="org/repo:forward")


REFUSED_WITHOUT_TRUST: tuple[Callable[[Victim], None], ...] = (
    hostile_layers,
    one_more_file,
    changed_digest,
    untrusted_owner,
    claimed_owner,
    another_id,
    path_as_digest,
    byte_code_in_the_cache_folder,
    byte_code_beside,
    link_instead_of_code,
)
"""Refused for one reason or another where nothing is trusted."""

REFUSED_ALTHOUGH_TRUSTED = (
    hostile_layers,
    one_more_file,
    path_as_digest,
    byte_code_in_the_cache_folder,
    byte_code_beside,
    link_instead_of_code,
)
"""Not what the manifest says: refused although the machine trusts whatever comes along."""


def _load(victim: Victim, **kw: Any) -> int:
    """The exit code that loading ends with; 0 where it loads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load_converted(victim.directory, **kw)
        except KconvertError as error:
            return failure(error)[0]
    return 0


def _check_nothing_ran(victim: Victim, hub: StandInHub) -> None:
    assert not victim.marker.exists()
    assert hub.requests == []


@pytest.mark.parametrize("attack", REFUSED_WITHOUT_TRUST, ids=lambda attack: attack.__name__)
def test_nothing_runs_without_trust(attack: Callable[[Victim], None], victim: Victim, hub: StandInHub) -> None:
    attack(victim)
    assert _load(victim) == 8
    assert main(["verify", str(victim.directory)]) == 8
    assert main(["inspect", str(victim.directory)]) == 0
    _check_nothing_ran(victim, hub)


@pytest.mark.parametrize("attack", REFUSED_WITHOUT_TRUST, ids=lambda attack: attack.__name__)
def test_nothing_runs_where_the_honest_digest_is_trusted(
    attack: Callable[[Victim], None], victim: Victim, hub: StandInHub
) -> None:
    attack(victim)
    for package_id in (KERNEL, CLAIMED, "evil/kernel:Norm"):
        assert _load(victim, trust_kernels={package_id: victim.honest}) == 8
    trust = ["--trust-kernel", f"{victim.package.package_id}={victim.honest}"]
    assert main(["verify", str(victim.directory), *trust]) == 8
    _check_nothing_ran(victim, hub)


@pytest.mark.parametrize("attack", REFUSED_ALTHOUGH_TRUSTED, ids=lambda attack: attack.__name__)
def test_code_that_is_not_what_the_manifest_says_never_runs(
    attack: Callable[[Victim], None], victim: Victim, hub: StandInHub
) -> None:
    attack(victim)
    with pytest.raises(KconvertError) as caught:
        load_converted(victim.directory, trust_remote_code=True)
    code, text = failure(caught.value)
    assert code == 8
    assert ("byte code" in text) is attack.__name__.startswith("byte_code")
    assert main(["verify", str(victim.directory), "--trust-remote-code"]) == 8
    _check_nothing_ran(victim, hub)


@pytest.mark.parametrize(
    "attack",
    [model_code, attention_of_the_hub, attention_of_the_hub_in_its_other_name],
    ids=lambda attack: attack.__name__,
)
def test_config_runs_no_code(attack: Callable[[Victim], None], victim: Victim, hub: StandInHub) -> None:
    attack(victim)
    assert _load(victim, trust_kernels={KERNEL: victim.honest}) == 8
    # its config.json is not the one of the conversion, which `verify` says first
    assert main(["verify", str(victim.directory), "--trust-kernel", f"{KERNEL}={victim.honest}"]) == 5
    _check_nothing_ran(victim, hub)


def test_an_auto_map_beside_a_known_class_is_not_followed(victim: Victim, hub: StandInHub) -> None:
    model_code(victim)
    victim.write_config(architectures=["Qwen3ForCausalLM"])
    assert _load(victim, trust_kernels={KERNEL: victim.honest}) == 0
    _check_nothing_ran(victim, hub)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("module", "os"),
        ("path", "/tmp/evil.py"),
        ("code", "open('marker', 'w')"),
    ],
)
def test_the_manifest_has_no_place_for_a_path_to_code(key: str, value: str, victim: Victim, hub: StandInHub) -> None:
    """The schema is closed, also where the digest over it is right."""
    from kconvert.manifest.canonical import canonical_json, sha256_digest

    path = victim.directory / MANIFEST_NAME
    body = json.loads(path.read_bytes())
    body.pop("digest")
    body["patches"][0]["layout"]["package"][key] = value
    path.write_bytes(canonical_json({**body, "digest": sha256_digest(canonical_json(body))}))
    assert _load(victim, trust_remote_code=True) == 4
    assert main(["verify", str(victim.directory), "--trust-remote-code"]) == 4
    _check_nothing_ran(victim, hub)


def test_a_foreign_kernel_id_on_a_built_in_layout_is_not_fetched(
    converted_qwen3_dir: Path, tmp_path: Path, hub: StandInHub, marker: Path
) -> None:
    directory = Path(shutil.copytree(converted_qwen3_dir, tmp_path / "victim"))
    manifest = load_manifest(directory)
    patches = tuple(replace(patch, kernels=("evil/kernel:Norm", *patch.kernels)) for patch in manifest.patches)
    (directory / MANIFEST_NAME).write_bytes(replace(manifest, patches=patches).to_bytes())
    model = load_converted(directory)
    assert "evil/kernel:Norm" not in model.kconvert_report.to_dict()["kernels"]
    assert hub.requests == []


def test_control_characters_of_a_manifest_do_not_reach_the_terminal(
    victim: Victim, capsys: pytest.CaptureFixture[str]
) -> None:
    victim.write_manifest(package_id="./package\x1b[2J:Norm", commit="\x1b[1A")
    assert _load(victim, trust_remote_code=True) == 0
    err = capsys.readouterr().err
    assert "importing kernel package" in err
    assert "\x1b" not in err


# --- the source of a conversion ---------------------------------------------------------------------


@pytest.fixture
def source(qwen3_dir: Path, tmp_path: Path, hub: StandInHub, marker: Path) -> Path:
    hub.publish("org/repo", built_package(norm_layers(marker=marker)), branch="main")
    return Path(shutil.copytree(qwen3_dir, tmp_path / "source"))


def _write_config(directory: Path, **values: Any) -> None:
    path = directory / CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **values}), encoding="utf-8")


@pytest.mark.parametrize("trust", [False, True])
def test_apply_never_runs_model_code(trust: bool, source: Path, hub: StandInHub, marker: Path, tmp_path: Path) -> None:
    """`--trust-remote-code` of `apply` is for kernel packages."""
    (source / "modeling_x.py").write_text(marked(marker) + "class XForCausalLM: ...", encoding="utf-8")
    _write_config(
        source,
        architectures=["XForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM", "AutoConfig": "modeling_x.XConfig"},
    )
    flags = ["--trust-remote-code"] if trust else []
    assert main(["apply", "qwen3", str(source), "-o", str(tmp_path / "out"), *flags]) == 8
    assert not marker.exists()
    assert not (tmp_path / "out").exists()
    assert hub.requests == []


def test_model_code_beside_a_known_class_is_copied_and_not_run(
    source: Path, hub: StandInHub, marker: Path, tmp_path: Path
) -> None:
    (source / "modeling_x.py").write_text(marked(marker), encoding="utf-8")
    _write_config(source, auto_map={"AutoModelForCausalLM": "modeling_x.Qwen3ForCausalLM"})
    assert main(["apply", "qwen3", str(source), "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/modeling_x.py").read_text(encoding="utf-8") == marked(marker)
    load_converted(tmp_path / "out")
    assert main(["verify", str(tmp_path / "out"), "--source", str(source)]) == 0
    assert not marker.exists()
    assert hub.requests == []


def test_attention_of_the_hub_in_a_source(source: Path, hub: StandInHub, marker: Path, tmp_path: Path) -> None:
    _write_config(source, attn_implementation="org/repo")
    assert main(["apply", "qwen3", str(source), "-o", str(tmp_path / "out")]) == 8
    assert not marker.exists()
    assert hub.requests == []


@pytest.mark.parametrize("command", ["apply", "plan"])
def test_a_recipe_that_names_an_untrusted_owner(
    command: str, source: Path, hub: StandInHub, marker: Path, tmp_path: Path
) -> None:
    """The recipe comes with the model, and trusts what it names: the machine does not."""
    hub.publish("evil/kernel", built_package(norm_layers(marker=marker)), branch="v1")
    recipe = write_recipe(source / "recipe.yaml", replace_entry("evil/kernel:Norm"))
    output = ["-o", str(tmp_path / "out")] if command == "apply" else []
    assert main([command, str(recipe), str(source), *output]) == 8
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def test_files_named_like_modules_in_the_current_folder(
    victim: Victim, monkeypatch: pytest.MonkeyPatch, hub: StandInHub
) -> None:
    for name in ("layers.py", "kernels.py", "torch_npu.py", "triton.py"):
        (victim.directory / name).write_text(marked(victim.marker), encoding="utf-8")
    monkeypatch.chdir(victim.directory)
    assert os.fspath(victim.directory) not in map(os.fspath, __import__("sys").path)
    assert _load(victim, trust_kernels={KERNEL: victim.honest}) == 0
    _check_nothing_ran(victim, hub)
