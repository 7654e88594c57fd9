"""Which files a command opens in a directory that somebody hostile has put together: S4, S5, S8, B25.

The kernel tells (inotify), so it does not matter who opens a file: Python, or a library behind it.  A pickle, byte code,
a pipe, or what a link outside leads to is never opened, not even to look at it.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kconvert.manifest import load_manifest
from tests.support import convert, qwen3_config, qwen3_tensors, write_checkpoint

ROOT = Path(__file__).parents[2]
NAMES = list(qwen3_tensors())
_IN_OPEN, _IN_ISDIR, _IN_NONBLOCK = 0x20, 0x40000000, os.O_NONBLOCK
_EVENT = struct.Struct("iIII")

WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
KEPT = ["README.md", "chat_template.jinja", "modeling_evil.py", "sub/tokenizer.model"]
LEFT = [
    *(
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "model.pt",
        "optimizer.pkl",
        "rng.pickle",
        "x.ckpt",
        "y.pth",
    ),
    *("sub/training_args.bin", "consolidated.safetensors", ".git/config", "__pycache__/modeling_evil.cpython-311.pyc"),
    *("kconvert_kernels/evil/layers.py", "kconvert_source_headers.json.gz", "adapter_config.json", "model.gguf"),
]


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def hostile(tmp_path: Path, marker: Path) -> Path:
    """A sound checkpoint among pickles, code, links and a pipe; whatever of it is run touches the marker."""
    config = qwen3_config(auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Config"})
    source = write_checkpoint(tmp_path / "in", qwen3_tensors(), config, [NAMES[:9], NAMES[9:]])
    code = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n"
    pickle = f"cposix\nsystem\n(S'touch {marker}'\ntR."
    for name in [*KEPT, *LEFT]:
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code if name.endswith(".py") else pickle)
    for name in ("sitecustomize.py", "kconvert.py", "safetensors.py", "torch.py"):
        (source / "sub" / name).write_text(code)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (source / "notes.txt").symlink_to(outside / "secret.txt")
    (source / "sub" / "up.txt").symlink_to("../../outside/secret.txt")
    (source / "folder").symlink_to(outside)
    os.mkfifo(source / "pipe")
    return source


@contextmanager
def watched(*folders: Path) -> Iterator[set[str]]:
    """The files below `folders` that are opened meanwhile, relative to the parent of the first; filled in at the end."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(_IN_NONBLOCK)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "inotify")
    found: set[str] = set()
    try:
        watches = {}
        for folder in folders:
            for path in (folder, *(path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink())):
                watch = libc.inotify_add_watch(descriptor, os.fsencode(path), _IN_OPEN)
                if watch < 0:
                    raise OSError(ctypes.get_errno(), "inotify", str(path))
                watches[watch] = path.relative_to(folders[0].parent)
        yield found
        try:
            data = os.read(descriptor, 1 << 22)
        except BlockingIOError:
            data = b""
        at = 0
        while at < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, at)
            name = os.fsdecode(data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0"))
            at += _EVENT.size + length
            if not mask & _IN_ISDIR and name:
                found.add(str(watches[watch] / name))
    finally:
        os.close(descriptor)


def kconvert(*arguments: str | Path, cwd: Path = ROOT, expected: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kconvert", *map(str, arguments)],  # -P: as the installed command does it
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == expected, done.stderr
    return done.stdout


def _inside(folder: str, *names: str) -> set[str]:
    return {f"{folder}/{name}" for name in names}


COPIED = [*KEPT, *(f"sub/{name}" for name in ("kconvert.py", "safetensors.py", "sitecustomize.py", "torch.py"))]
NEEDED = {"config.json", *WEIGHTS}


def test_the_watch_sees_what_is_opened(hostile: Path) -> None:
    with watched(hostile, hostile.parent / "outside") as opened:
        (hostile / "pytorch_model.bin").read_bytes()
        (hostile / "notes.txt").read_bytes()
        (hostile / "sub" / "tokenizer.model").stat()
        sorted(hostile.iterdir())
    assert opened == {"in/pytorch_model.bin", "outside/secret.txt"}


@pytest.mark.parametrize(
    "command", [["inspect"], ["plan", "qwen3"], ["apply", "qwen3", "--dry-run"]], ids=lambda c: c[0]
)
def test_what_is_only_looked_at(command: list[str], hostile: Path, marker: Path) -> None:
    flags = [] if command[0] == "inspect" else ["--no-model-check"]
    with watched(hostile, hostile.parent / "outside") as opened:
        kconvert(*command, hostile, *flags)
    assert _inside("in", *NEEDED) <= opened <= _inside("in", *NEEDED, *COPIED)
    assert not marker.exists()


@pytest.mark.parametrize("flags", [["--no-model-check"], []], ids=["no model check", "model check"])
def test_apply(flags: list[str], hostile: Path, marker: Path, tmp_path: Path) -> None:
    with watched(hostile, tmp_path / "outside") as opened:
        kconvert("apply", "qwen3", hostile, "-o", tmp_path / "out", *flags)
    assert _inside("in", *NEEDED, *COPIED) == opened
    assert not marker.exists()
    written = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if not path.is_dir()}
    assert {name for name in written if not name.startswith(("kconvert_", "model."))} == {"config.json", *COPIED}
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_symlink()] == []
    omitted = {item.name for item in load_manifest(tmp_path / "out").omitted}
    assert {"notes.txt", "sub/up.txt", "folder", "pipe", "pytorch_model.bin", "sub/training_args.bin"} <= omitted


def test_the_folder_is_no_place_to_import_from(hostile: Path, marker: Path) -> None:
    with watched(hostile, hostile.parent / "outside") as opened:
        kconvert("list-kernels", "--no-probe", cwd=hostile / "sub")
        kconvert("inspect", "..", cwd=hostile / "sub")
    assert not {name for name in opened if name.endswith((".py", ".bin", ".pkl", ".pickle", ".pt"))}
    assert not marker.exists()


PROBE = """
import json
from kconvert.runtime import environment_probe
print(json.dumps(environment_probe._ask("packaging", [], load_backends=False)))
"""


def test_nor_is_it_for_the_processes_of_doctor(hostile: Path, marker: Path) -> None:
    """They are started wherever the user is, and `python -c` looks there first."""
    for name in ("json.py", "packaging.py", "typing.py"):
        (hostile / "sub" / name).write_text((hostile / "modeling_evil.py").read_text())
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROBE],
        cwd=hostile / "sub",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "failure" not in json.loads(done.stdout)
    assert not marker.exists()


@pytest.fixture
def converted(hostile: Path, marker: Path, tmp_path: Path) -> Path:
    """The hostile source converted, with the same kind of things put beside the result."""
    output = convert("qwen3", hostile, tmp_path / "out", model_check=False).output
    for name in ("pytorch_model.bin", "weights.pkl", "model.kconvert.bin", "kconvert_kernels/evil/__init__.py"):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(f"cposix\nsystem\n(S'touch {marker}'\ntR.")
    (output / "link.txt").symlink_to(tmp_path / "outside" / "secret.txt")
    os.mkfifo(output / "other-pipe")
    return output


def _own(output: Path) -> set[str]:
    return {path.name for path in output.iterdir() if path.name.startswith(("kconvert_manifest", "model.kconvert-"))}


def test_a_converted_directory_is_inspected(converted: Path, marker: Path) -> None:
    with watched(converted, converted.parent / "outside") as opened:
        kconvert("inspect", converted)
    extra = {"config.json", "model.safetensors.index.kconvert.json"}
    assert opened <= _inside("out", *_own(converted), *extra)
    assert "out/kconvert_manifest.json" in opened
    assert not marker.exists()


def test_a_converted_directory_is_reverted(converted: Path, marker: Path, hostile: Path, tmp_path: Path) -> None:
    with watched(converted, tmp_path / "outside") as opened:
        kconvert("revert", converted, "-o", tmp_path / "back")
    headers = "kconvert_source_headers.json.gz"
    assert opened == _inside("out", *_own(converted), headers, "config.json", *COPIED)
    assert not marker.exists()
    back = {
        str(path.relative_to(tmp_path / "back")): path for path in (tmp_path / "back").rglob("*") if not path.is_dir()
    }
    assert back.keys() == {"config.json", *WEIGHTS, *COPIED}
    assert {name: path.read_bytes() for name, path in back.items()} == {
        name: (hostile / name).read_bytes() for name in back
    }
    assert [name for name, path in back.items() if path.is_symlink()] == []


def test_a_sidecar_that_became_a_link(converted: Path, tmp_path: Path) -> None:
    """What lies outside of the converted directory does not come along, whatever the manifest names."""
    (converted / "README.md").rename(tmp_path / "outside" / "README.md")
    (converted / "README.md").symlink_to(tmp_path / "outside" / "README.md")
    kconvert("revert", converted, "-o", tmp_path / "back", expected=4)
    assert not (tmp_path / "back").exists()


def test_bytes_are_verified_without_opening_anything_else(converted: Path, marker: Path, hostile: Path) -> None:
    with watched(hostile, converted, hostile.parent / "outside") as opened:
        kconvert("verify", converted, "--source", hostile, "--level", "bytes")
    own = {"kconvert_parity.json", "kconvert_parity.json.partial", "kconvert_source_headers.json.gz"}
    read = {*NEEDED, *COPIED, *own, *_own(converted), "model.safetensors.index.kconvert.json"}
    assert opened - _inside("in", *read) - _inside("out", *read) == set()
    assert not marker.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pkl"])
def test_a_pickle_alone_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    """S4; a pipe under that name would keep whoever opens it for ever."""
    source = tmp_path / "in"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(qwen3_config()))
    os.mkfifo(source / name)
    with watched(source) as opened:
        for command in (["inspect"], ["apply", "qwen3"]):
            kconvert(*command, source, expected=4)
    assert opened == {"in/config.json"}
