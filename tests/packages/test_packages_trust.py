"""Trust: whose code runs, when it is asked, and that nothing ran where it was refused."""

from __future__ import annotations

import os
import py_compile
import shutil
import sys
from pathlib import Path

import pytest

from kconvert.cli import main
from kconvert.errors import KernelRefusedError, OutputError, RecipeError, TrustError
from kconvert.kernels.packages import copy_package, import_package
from kconvert.manifest import load_manifest
from kconvert.names import KERNELS_DIR
from tests.packages.helpers import NORM, failure, load, logits, replace, run_recipe, stock, write_package
from tests.support import write_recipe

KERNEL = "./package:Norm"


def _marked(directory: Path, marker: Path, *, name: str = "package") -> Path:
    """A package that leaves a file behind when it is imported."""
    return write_package(directory, NORM + f"\nopen({str(marker)!r}, 'a').write('imported ' + __file__)\n", name)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def converted(tmp_path: Path, marker: Path, qwen3_dir: Path) -> Path:
    """A directory converted by a package that marks its import; the mark is gone, and so is the module."""
    _marked(tmp_path, marker)
    output = run_recipe(tmp_path, replace(KERNEL), qwen3_dir)
    assert marker.exists()
    marker.unlink()
    _forget()
    return output


def _forget() -> None:
    for name in [name for name in sys.modules if name.startswith("kconvert_package_")]:
        del sys.modules[name]


def _vendored(output: Path) -> Path:
    (folder,) = (output / KERNELS_DIR).iterdir()
    return folder


# --- apply ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_recipe", "by_machine"), [(False, True), (True, False), (False, False)])
def test_recipe_and_machine_must_both_trust(
    in_recipe: bool, by_machine: bool, tmp_path: Path, marker: Path, qwen3_dir: Path
) -> None:
    _marked(tmp_path, marker)
    with pytest.raises(TrustError) as caught:
        run_recipe(tmp_path, replace(KERNEL, trust=in_recipe), qwen3_dir, trust=by_machine)
    code, text = failure(caught.value)
    assert code == 8
    assert f"{tmp_path / 'recipe.yaml'}:5" in text
    assert KERNEL in text
    assert ("--trust-remote-code" if in_recipe else "trust_remote_code: true") in text
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def test_package_and_digest_are_printed_before_the_import(
    tmp_path: Path, qwen3_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_package(tmp_path, NORM + "\nimport sys\nprint('now importing', file=sys.stderr)\n")
    output = run_recipe(tmp_path, replace(KERNEL), qwen3_dir)
    package = load_manifest(output).patches[0].layout.package
    assert package is not None
    lines = capsys.readouterr().err.splitlines()
    announced = next(number for number, line in enumerate(lines) if KERNEL in line and package.digest in line)
    assert announced < lines.index("now importing")


def test_import_goes_from_a_private_copy(tmp_path: Path, marker: Path, qwen3_dir: Path) -> None:
    source = _marked(tmp_path, marker)
    run_recipe(tmp_path, replace(KERNEL), qwen3_dir)
    where = Path(marker.read_text(encoding="utf-8").removeprefix("imported "))
    assert where.name == "layers.py"
    assert source not in where.parents
    assert tmp_path not in where.parents
    assert where.parent.parent.stat().st_mode & 0o077 == 0
    assert not (source / "__pycache__").exists()


def test_the_private_copy_is_what_runs_when_the_source_changes(tmp_path: Path) -> None:
    source = write_package(tmp_path, NORM + "\nVALUE = 1\n")
    copied = copy_package(source, KERNEL)
    (source / "layers.py").write_text("raise RuntimeError('changed')", encoding="utf-8")
    classes = import_package(copied, "Norm")
    assert sys.modules[classes.layout.__module__].VALUE == 1
    assert copy_package(source, KERNEL).digest != copied.digest


def test_package_folder_is_relative_to_the_recipe(
    tmp_path: Path, marker: Path, qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    write_package(elsewhere, "raise RuntimeError('the wrong folder')")
    _marked(tmp_path, marker)
    monkeypatch.chdir(elsewhere)
    output = run_recipe(tmp_path, replace(KERNEL), qwen3_dir)
    assert marker.exists()
    assert (_vendored(output) / "layers.py").read_bytes() == (tmp_path / "package" / "layers.py").read_bytes()


def test_missing_package_folder(tmp_path: Path, qwen3_dir: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        run_recipe(tmp_path, replace("./nowhere:Norm"), qwen3_dir)
    code, text = failure(caught.value)
    assert code == 3
    assert str(tmp_path / "nowhere") in text


# --- load -------------------------------------------------------------------------------------------


def test_load_needs_trust(converted: Path, marker: Path) -> None:
    with pytest.raises(TrustError) as caught:
        load(converted, trust_remote_code=False)
    code, text = failure(caught.value)
    assert code == 8
    assert f"sha256:{_vendored(converted).name}" in text
    assert not marker.exists()


def test_load_trusts_one_digest(
    converted: Path, marker: Path, qwen3_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = f"sha256:{_vendored(converted).name}"
    capsys.readouterr()
    model = load(converted, trust_remote_code=False, trust_kernels={KERNEL: digest})
    assert marker.exists()
    assert model.kconvert_report.to_dict()["kernels"] == {KERNEL: 2}
    announced = capsys.readouterr().err
    assert KERNEL in announced
    assert digest in announced
    assert abs(logits(model) - logits(stock(qwen3_dir))).max() <= 1e-5


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_wrong_digest_is_refused_even_beside_the_flag(converted: Path, marker: Path, trust_remote_code: bool) -> None:
    with pytest.raises(TrustError) as caught:
        load(converted, trust_remote_code=trust_remote_code, trust_kernels={KERNEL: "sha256:" + "0" * 64})
    assert failure(caught.value)[0] == 8
    assert _vendored(converted).name in str(caught.value)
    assert not marker.exists()


def test_trust_in_another_package_is_no_trust(converted: Path, marker: Path) -> None:
    with pytest.raises(TrustError):
        load(converted, trust_remote_code=False, trust_kernels={"./other:Norm": f"sha256:{_vendored(converted).name}"})
    assert not marker.exists()


@pytest.mark.parametrize("change", ["edit", "add", "rename"])
def test_changed_vendored_code_is_refused(converted: Path, marker: Path, change: str) -> None:
    layers = _vendored(converted) / "layers.py"
    if change == "edit":
        layers.write_bytes(layers.read_bytes() + b"#")
    elif change == "add":
        (layers.parent / "more.py").write_bytes(b"")
    else:
        layers.rename(layers.with_name("__init__.py"))
    with pytest.raises(TrustError) as caught:
        load(converted)
    code, text = failure(caught.value)
    assert code == 8
    assert "has changed" in text
    assert not marker.exists()


def test_missing_vendored_code_is_named(converted: Path) -> None:
    shutil.rmtree(_vendored(converted))
    with pytest.raises(ValueError, match="is missing") as caught:
        load(converted)
    assert KERNEL in str(caught.value)


def test_a_package_with_other_code_does_not_share_a_module(tmp_path: Path) -> None:
    first = import_package(copy_package(write_package(tmp_path, NORM, "one"), "./one:Norm"), "Norm")
    second = import_package(copy_package(write_package(tmp_path, NORM + "\n#\n", "two"), "./two:Norm"), "Norm")
    assert first.layout is not second.layout
    assert first.layout.__module__ != second.layout.__module__


# --- what a package may hold ------------------------------------------------------------------------


def _byte_code(package: Path) -> str:
    py_compile.compile(str(package / "layers.py"))
    return "__pycache__/layers"


def _plain_byte_code(package: Path) -> str:
    py_compile.compile(str(package / "layers.py"), cfile=str(package / "helper.pyc"))
    return "helper.pyc"


def _link_to_file(package: Path) -> str:
    outside = package.parent / "outside.py"
    outside.write_text("", encoding="utf-8")
    (package / "helper.py").symlink_to(outside)
    return "helper.py"


def _link_to_folder(package: Path) -> str:
    outside = package.parent / "outside"
    outside.mkdir()
    (package / "inner").symlink_to(outside, target_is_directory=True)
    return "inner"


def _broken_link(package: Path) -> str:
    (package / "gone.py").symlink_to(package / "nothing")
    return "gone.py"


def _pipe(package: Path) -> str:
    os.mkfifo(package / "pipe")
    return "pipe"


def _name_not_utf8(package: Path) -> str:
    (package / os.fsdecode(b"x\xe9.txt")).write_text("", encoding="utf-8")
    return "holds a file named 'x\\\\udce9.txt'"


def _folder_not_utf8(package: Path) -> str:
    (package / os.fsdecode(b"d\xe9")).mkdir()
    return "holds a file named 'd\\\\udce9'"


@pytest.mark.parametrize(
    "spoil",
    [
        _byte_code,
        _plain_byte_code,
        _link_to_file,
        _link_to_folder,
        _broken_link,
        _pipe,
        _name_not_utf8,
        _folder_not_utf8,
    ],
    ids=lambda f: f.__name__,
)
def test_byte_code_links_and_special_files_are_refused(
    spoil: object, tmp_path: Path, marker: Path, qwen3_dir: Path
) -> None:
    assert callable(spoil)
    name = spoil(_marked(tmp_path, marker))
    with pytest.raises(KernelRefusedError) as caught:
        run_recipe(tmp_path, replace(KERNEL), qwen3_dir)
    code, text = failure(caught.value)
    assert code == 8
    assert name in text
    text.encode()
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def test_byte_code_put_into_a_converted_directory_is_refused(converted: Path, marker: Path) -> None:
    _byte_code(_vendored(converted))
    with pytest.raises(KernelRefusedError, match="byte code"):
        load(converted)
    assert not marker.exists()


# --- imports that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('first line\\nsecond line')", "RuntimeError: first line second line"),
        ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
        ("def broken(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
    ],
)
def test_import_that_fails_is_one_line_and_leaves_nothing(
    body: str, said: str, tmp_path: Path, qwen3_dir: Path
) -> None:
    write_package(tmp_path, body)
    before = set(sys.modules)
    with pytest.raises(KernelRefusedError) as caught:
        run_recipe(tmp_path, replace(KERNEL), qwen3_dir)
    code, text = failure(caught.value)
    assert code == 8
    assert said in text
    assert f"{tmp_path / 'recipe.yaml'}:5" in text
    assert not [name for name in set(sys.modules) - before if name.startswith("kconvert_package_")]
    assert not (tmp_path / "out").exists()


def test_submodules_of_a_failed_import_are_gone_too(tmp_path: Path, qwen3_dir: Path) -> None:
    package = write_package(tmp_path, NORM + "\nfrom .helper import VALUE\nraise RuntimeError('late')\n")
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "helper.py").write_text("VALUE = 1\n", encoding="utf-8")
    before = set(sys.modules)
    with pytest.raises(KernelRefusedError, match="late"):
        run_recipe(tmp_path, replace(KERNEL), qwen3_dir)
    assert not [name for name in set(sys.modules) - before if name.startswith("kconvert_package_")]


# --- the command line -------------------------------------------------------------------------------


def test_trust_by_digest_on_the_command_line(
    tmp_path: Path, marker: Path, qwen3_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _marked(tmp_path, marker)
    recipe = write_recipe(tmp_path / "recipe.yaml", replace(KERNEL))
    command = [str(recipe), str(qwen3_dir)]
    output = ["-o", str(tmp_path / "out")]
    digest = copy_package(tmp_path / "package", KERNEL).digest
    assert main(["apply", *command, *output]) == 8
    assert f"--trust-kernel {KERNEL}={digest}" in capsys.readouterr().err
    assert main(["apply", *command, *output, "--trust-kernel", f"{KERNEL}=sha256:{'0' * 64}"]) == 8
    assert main(["apply", *command, *output, "--trust-kernel", f"./other:Norm={digest}"]) == 8
    assert main(["plan", *command, "--trust-kernel", f"{KERNEL}=sha256:{'0' * 64}"]) == 8
    assert not marker.exists()
    trust = ["--trust-kernel", f"{KERNEL}={digest}"]
    assert main(["plan", *command, *trust]) == 0
    assert main(["apply", *command, "--dry-run", *output, *trust]) == 0
    assert main(["apply", *command, *output, *trust]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 8
    assert f"--trust-kernel {KERNEL}={digest}" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "out"), "--trust-kernel", f"{KERNEL}={digest.removeprefix('sha256:')}"]) == 0


@pytest.mark.parametrize("option", ["", "./package:Norm", "=sha256:" + "0" * 64, "./package:Norm=sha256:0", "a=b"])
def test_an_option_that_is_no_digest(option: str, qwen3_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["apply", "qwen3"], ["plan", "qwen3"], ["verify"]):
        assert main([*command, str(qwen3_dir), "--trust-kernel", option]) == 2
        assert f"--trust-kernel {option!r} is not ID=DIGEST" in capsys.readouterr().err


def test_the_recipe_has_to_trust_too(tmp_path: Path, marker: Path, qwen3_dir: Path) -> None:
    _marked(tmp_path, marker)
    digest = copy_package(tmp_path / "package", KERNEL).digest
    with pytest.raises(TrustError, match="the recipe does not trust it"):
        run_recipe(tmp_path, replace(KERNEL, trust=False), qwen3_dir, trust=False, trust_kernels={KERNEL: digest})
    assert not marker.exists()


def test_a_converted_directory_in_a_hub_cache(converted: Path, tmp_path: Path) -> None:
    """S2: the package is links into the blobs too, and its digest is that of the files; links elsewhere are refused."""
    blobs = tmp_path / "models--me--tiny" / "blobs"
    snapshot = blobs.parent / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in converted.rglob("*") if path.is_file())):
        link = snapshot / path.relative_to(converted)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blobs / f"sha{number}")
        link.symlink_to(os.path.relpath(blobs / f"sha{number}", link.parent))
    load(snapshot)
    assert main(["verify", str(snapshot), "--level", "bytes"]) == 0
    link = _vendored(snapshot) / "layers.py"
    link.unlink()
    link.symlink_to(_vendored(converted) / "layers.py")
    with pytest.raises(KernelRefusedError, match="holds a link"):
        load(snapshot)


@pytest.mark.parametrize("change", ["added", "edited"])
def test_a_package_of_an_output_that_somebody_has_worked_in(
    converted: Path, tmp_path: Path, qwen3_dir: Path, change: str
) -> None:
    """S8: `--overwrite` removes what kconvert wrote, and nothing else."""
    path = _vendored(converted) / ("notes.txt" if change == "added" else "layers.py")
    path.write_text("mine")
    with pytest.raises(OutputError, match="which kconvert did not write"):
        run_recipe(tmp_path, replace(KERNEL), qwen3_dir, overwrite=True)
    assert path.read_text() == "mine"
