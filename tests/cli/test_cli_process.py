"""The command line in processes of its own: signals, broken backends, kernels of other packages, hash seeds."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kconvert.kernels.specs import kernel_specs
from kconvert.names import KERNELS_DIR, MANIFEST_NAME
from tests.packages.helpers import copy_example, fuse
from tests.support import qwen3_config, qwen3_tensors, write_checkpoint, write_recipe

ROOT = Path(__file__).parents[2]

# What the `kconvert` script does.  `kconvert.cli` imports next to nothing; all the rest is imported by `main`.
CHILD = """
import sys
from kconvert.cli import main
print("ready", flush=True)
sys.exit(main(sys.argv[1:]))
"""


def _command(*argv: str | Path) -> list[str]:
    return [sys.executable, "-c", CHILD, *map(str, argv)]


def _environment(*folders: Path, **more: str) -> dict[str, str]:
    """This one's, with folders on the path and nothing that says how torch loads backends."""
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    path = [*map(str, folders), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1", **more}


def _run(environment: Mapping[str, str], *argv: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout after the ready line, and stderr."""
    done = subprocess.run(_command(*argv), env=environment, capture_output=True, text=True, timeout=300, check=False)
    ready, _, out = done.stdout.partition("\n")
    assert ready == "ready"
    assert "Traceback" not in done.stderr
    return done.returncode, out, done.stderr


def _files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# --- Ctrl-C -------------------------------------------------------------------------------------------


DROPPED = re.compile(r"Exception ignored in: .*\nTraceback .*\n(?: .*\n)*KeyboardInterrupt: *\n")
"""Python drops an interrupt that falls into a callback of its import locks, and says so; the run goes on."""


@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.6, 1.5])
def test_an_interrupt_at_any_moment(qwen3_dir: Path, tmp_path: Path, seconds: float) -> None:
    """During the imports, the check or the copy: never a traceback, and an output that is whole or not there.

    What was finished beside the check is kept, and said to be.
    """
    output = tmp_path / "outputs" / "out"
    child = subprocess.Popen(
        _command("apply", "qwen3", qwen3_dir, "-o", output),
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(seconds)
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=120)
    finally:
        child.kill()
        child.wait()
    assert "Traceback" not in DROPPED.sub("", err)
    left = [path.name for path in output.parent.iterdir()] if output.parent.exists() else []
    if child.returncode == 130:
        assert [line for line in err.splitlines() if line.startswith("kconvert: error: interrupted")]
        is_kept = "the same command goes on from there" in err
        assert left == (["out.partial"] if is_kept else [])
    else:
        assert child.returncode in (0, -signal.SIGINT), err  # the latter while Python takes itself down
        assert left == ["out"]
        assert (output / MANIFEST_NAME).is_file()


# --- a broken backend ---------------------------------------------------------------------------------


@pytest.fixture
def broken_npu(tmp_path: Path) -> Path:
    """A folder with a torch_npu as pip leaves it on a machine without CANN; torch loads it by its entry point."""
    folder = tmp_path / "site"
    (folder / "torch_npu").mkdir(parents=True)
    (folder / "torch_npu" / "__init__.py").write_text(
        "from torch_npu import inner\n"
        "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"
    )
    (folder / "torch_npu" / "inner.py").write_text("")
    _write_distribution(folder, "torch_npu", "[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return folder


def _write_distribution(folder: Path, name: str, entry_points: str) -> None:
    info = folder / f"{name}-2.7.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.7.1\n")
    (info / "entry_points.txt").write_text(entry_points)


def _warnings(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("kconvert: warning: ")]


def _check_npu_warning(err: str) -> None:
    (line,) = _warnings(err)
    assert "torch_npu is installed but does not import (ImportError: libhccl.so: " in line
    assert line.endswith("; going on without it")


def test_the_broken_backend_of_these_tests_breaks_torch(broken_npu: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env=_environment(broken_npu),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "libhccl.so" in done.stderr


def test_list_kernels_without_a_broken_backend(broken_npu: Path) -> None:
    code, out, err = _run(_environment(broken_npu), "list-kernels", "--json")
    assert code == 0, err
    rows = {row["id"]: row for row in json.loads(out)}
    assert rows.keys() == kernel_specs().keys()
    assert rows["cpu_fused_swiglu"]["available"] is True
    assert rows["npu_fused_swiglu"]["available"] is False
    _check_npu_warning(err)


def test_load_converted_without_a_broken_backend(broken_npu: Path, converted_qwen3_dir: Path) -> None:
    program = (
        "from kconvert import load_converted\n"
        f"model = load_converted({str(converted_qwen3_dir)!r}, strict=True)\n"
        "from kconvert.kernels.base import DeviceType\n"
        "from kconvert.kernels.device import device_reason\n"
        "print(len(model.kconvert_report.modules), device_reason(DeviceType.NPU))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=_environment(broken_npu), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("13 torch_npu does not import (ImportError: libhccl.so: ")
    (line,) = [line for line in done.stderr.splitlines() if "torch_npu" in line]
    assert "UserWarning: torch_npu is installed but does not import (ImportError: libhccl.so: " in line
    assert line.endswith("; going on without it")


def test_apply_without_a_broken_backend(broken_npu: Path, qwen3_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    code, out, err = _run(_environment(broken_npu), "apply", "qwen3", qwen3_dir, "-o", output)
    assert code == 0, err
    assert out == f"{output}\n"
    assert (output / MANIFEST_NAME).is_file()
    _check_npu_warning(err)


# --- kernels of other packages ------------------------------------------------------------------------


FOREIGN = {
    "kconvert_test_raises": """
        from kconvert.kernels import BaseKernel, DeviceType, register_kernel

        print("imported")

        @register_kernel
        class Raises(BaseKernel):
            _kernel_id = "test_raises"
            _device = DeviceType.CPU

            @classmethod
            def check_deps(cls):
                print("asked")
                raise RuntimeError("no such library\\nsecond line")
    """,
    "kconvert_test_exits": "import sys\nsys.exit(3)\n",
    "kconvert_test_good": """
        from kconvert.kernels import BaseKernel, DeviceType, register_kernel

        @register_kernel
        class Good(BaseKernel):
            _kernel_id = "test_good"
            _device = DeviceType.CPU
    """,
}


def test_list_kernels_with_broken_kernels_of_other_packages(tmp_path: Path) -> None:
    for name, text in FOREIGN.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    points = "".join(f"{number} = {name}\n" for number, name in enumerate(FOREIGN))
    _write_distribution(tmp_path, "kconvert_test_kernels", f"[kconvert.kernels]\n{points}")
    code, out, err = _run(_environment(tmp_path), "list-kernels", "--json")
    assert code == 0, err
    rows: dict[str, dict[str, Any]] = {row["id"]: row for row in json.loads(out)}
    assert rows.keys() == {*kernel_specs(), "test_raises", "test_good"}
    assert rows["test_raises"]["available"] is False
    assert rows["test_raises"]["reason"].startswith("its check_deps() fails (RuntimeError: no such library")
    assert rows["test_good"]["available"] is True
    assert rows["cpu_fused_swiglu"]["available"] is True
    (line,) = _warnings(err)
    assert "kernel module kconvert_test_exits does not import (SystemExit: 3)" in line
    assert err.replace(f"{line}\n", "") == "imported\nasked\n"


@pytest.mark.parametrize("columns", [60, 80])
def test_list_kernels_keeps_ids_whole(columns: int) -> None:
    code, out, _ = _run(_environment(COLUMNS=str(columns)), "list-kernels", "--no-probe")
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    first = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert [word for word in first if word in kernel_specs()] == sorted(kernel_specs())


# --- the same bytes, whatever the process -------------------------------------------------------------


def test_the_output_does_not_depend_on_the_process(qwen3_sharded_dir: Path, tmp_path: Path) -> None:
    """Built-in layouts and a package, several shards, in two processes that order sets and strings differently."""
    copy_example("norm_mlp", tmp_path)
    rest = """\
  - kernel: [cuda_fused_rmsnorm, npu_fused_rmsnorm, cpu_fused_rmsnorm]
    replace: {class: Qwen3RMSNorm, path: "model.layers.*.self_attn.q_norm"}
"""
    recipe = write_recipe(tmp_path / "recipe.yaml", fuse() + rest)
    made = []
    for seed in ("0", "3"):
        output = tmp_path / seed / "out"
        more = "-o", output, "--trust-remote-code"
        code, _, err = _run(_environment(PYTHONHASHSEED=seed), "apply", recipe, qwen3_sharded_dir, *more)
        assert code == 0, err
        made.append(_files(output))
    assert made[0].keys() == made[1].keys()
    assert made[0][MANIFEST_NAME] == made[1][MANIFEST_NAME]
    assert made[0] == made[1]
    assert any(name.startswith(KERNELS_DIR) for name in made[0])
    assert len([name for name in made[0] if name.endswith(".safetensors")]) > 1


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_closed_streams(closed: str) -> None:
    command = f"{sys.executable} -m kconvert list-kernels --no-probe {closed}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("cpu_fused_qkv" in done.stdout) == (closed == "2>&-")


def test_names_out_of_foreign_files_do_not_drive_the_terminal(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), qwen3_config(model_type="a\x1b]0;title\x07b"))
    command = [sys.executable, "-m", "kconvert", "plan", "qwen3", str(source)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "a\\x1b]0;title\\x07b" in done.stderr
    assert done.stderr.strip().isprintable()
