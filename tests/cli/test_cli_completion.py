"""Shell completion as the shells ask for it: in processes of their own, and in a real bash where there is one."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kconvert.cli.options import complete_path, complete_recipe
from kconvert.kernels.specs import kernel_specs
from kconvert.recipe import shipped_recipes
from tests.cli.stand_ins import environment, run_command

COMPLETE = "_KCONVERT_COMPLETE"
BASH = shutil.which("bash")

# The last line of stderr tells what the answer has loaded.
PROBE = """
import json, sys
from kconvert.cli import main
try:
    main([])
finally:
    print(json.dumps(sorted({"torch", "transformers"} & set(sys.modules))), file=sys.stderr)
"""


def _bash(*words: str, cwd: Path) -> list[str]:
    """What `kconvert` offers for the last word, as the function of `--show-completion bash` asks for it."""
    asked = {COMPLETE: "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    code, out, err = run_command(environment(**asked), cwd=cwd)
    assert (code, err) == (0, "")
    return out.split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with recipes, other files and folders."""
    for name in ("qwen3-mine.yaml", "quick.yml", "quiet.txt", "nothing.yaml", "notes.md", ".q.yaml", "q name.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "qwen-model").mkdir()
    return tmp_path


def test_recipes_and_recipe_files(folder: Path) -> None:
    shipped = list(shipped_recipes())
    offered = _bash("kconvert", "apply", "q", cwd=folder)
    own = [name for name in shipped if name.startswith("q")]
    assert {"qwen3", "qwen3-fused-norm-mlp"} <= set(own)
    assert offered == [*own, "quick.yml", "qwen-model/", "qwen3-mine.yaml"]
    assert _bash("kconvert", "plan", "", cwd=folder) == [
        *shipped, "nothing.yaml", "quick.yml", "qwen-model/", "qwen3-mine.yaml"
    ]  # fmt: skip


def test_nothing_is_offered_where_the_shell_knows_better(folder: Path) -> None:
    """Where no shipped recipe starts so, and for folders: the shell completes file names."""
    assert complete_recipe("./q") == []
    assert _bash("kconvert", "apply", "no", cwd=folder) == []
    assert complete_path("q") == []
    assert _bash("kconvert", "apply", "qwen3", "q", cwd=folder) == []
    assert _bash("kconvert", "inspect", "q", cwd=folder) == []


def test_devices_of_kernels(tmp_path: Path) -> None:
    devices = sorted({entry.device for _, entry in kernel_specs().values()})
    assert devices == ["cpu", "cuda", "npu"]
    assert _bash("kconvert", "list-kernels", "--device", "", cwd=tmp_path) == devices
    assert _bash("kconvert", "list-kernels", "--device", "c", cwd=tmp_path) == ["cpu", "cuda"]


def test_commands_and_options(tmp_path: Path) -> None:
    assert {"apply", "plan", "inspect", "list-kernels", "doctor"} <= set(_bash("kconvert", "", cwd=tmp_path))
    assert _bash("kconvert", "insp", cwd=tmp_path) == ["inspect"]
    assert _bash("kconvert", "inspect", "--j", cwd=tmp_path) == ["--json"]


def test_completing_loads_no_torch(tmp_path: Path) -> None:
    asked = {COMPLETE: "complete_bash", "COMP_WORDS": "kconvert apply qw", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=environment(**asked),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "qwen3" in done.stdout.split()
    assert json.loads(done.stderr.splitlines()[-1]) == []


def test_zsh(tmp_path: Path) -> None:
    asked = {COMPLETE: "complete_zsh", "_TYPER_COMPLETE_ARGS": "kconvert apply qwen3-f"}
    code, out, _ = run_command(environment(**asked), cwd=tmp_path)
    assert code == 0
    assert out.split() == ["_arguments", "'*:", ':(("qwen3-fused-norm-mlp"))\'']
    asked["_TYPER_COMPLETE_ARGS"] = "kconvert apply qwen3 my"
    assert run_command(environment(**asked), cwd=tmp_path)[1].strip() == "_files"


def test_fish(tmp_path: Path) -> None:
    asked = {COMPLETE: "complete_fish", "_TYPER_COMPLETE_ARGS": "kconvert apply qwen3-f"}
    action = "_TYPER_COMPLETE_FISH_ACTION"
    code, out, _ = run_command(environment(**asked, **{action: "get-args"}), cwd=tmp_path)
    assert (code, out.split()) == (0, ["qwen3-fused-norm-mlp"])
    assert run_command(environment(**asked, **{action: "is-args"}), cwd=tmp_path)[0] == 0
    asked["_TYPER_COMPLETE_ARGS"] = "kconvert apply qwen3 my"
    assert run_command(environment(**asked, **{action: "is-args"}), cwd=tmp_path)[0] == 1  # fish completes files


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_in_a_real_bash(folder: Path) -> None:
    """The script that `--show-completion bash` prints, read and called by bash."""
    script = folder / "kconvert"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom kconvert.cli import main\nsys.exit(main())\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    text = """
        source <(kconvert --show-completion bash) || exit 1
        complete -p kconvert
        COMP_WORDS=(kconvert apply qwen3-) COMP_CWORD=2
        _kconvert_completion kconvert
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    env = environment(PATH=os.pathsep.join([str(folder), os.environ.get("PATH", "")]))
    done = subprocess.run(
        [str(BASH), "--norc", "-c", text], env=env, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    shown, *offered = done.stdout.splitlines()
    assert shown == "complete -o default -F _kconvert_completion kconvert"
    own = [name for name in shipped_recipes() if name.startswith("qwen3-")]
    assert offered == [*own, "qwen3-mine.yaml"]
