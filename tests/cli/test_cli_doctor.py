"""`kconvert doctor`: what is said of every machine, told from facts; and what is found, with stand-in packages."""

from __future__ import annotations

import json
import platform
import re
import shutil
import tomllib
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from kconvert import __version__
from kconvert.cli import doctor, main
from kconvert.kernels.specs import kernel_specs
from kconvert.runtime.environment import (
    OPTIONAL,
    REQUIRED,
    DeviceFacts,
    Environment,
    KernelCounts,
    KernelsRange,
    PackageFacts,
    Part,
    Requirement,
    Usable,
    diagnose,
    version_fits,
)
from tests.cli.stand_ins import ROOT, environment, run_command, write_distribution, write_package

# --- the decision -------------------------------------------------------------------------------------

VERSIONS = {
    "torch": "2.13.0+cu128",
    "transformers": "5.22.2",
    "safetensors": "0.8.0",
    "triton": "3.5.0",
    "kernels": "0.17.2",
    "accelerate": "1.15.0",
}
WANTED = {
    "python": Requirement(">=3.11"),
    "torch": Requirement(">=2.6"),
    "transformers": Requirement(">=5.18,<6"),
    "safetensors": Requirement(">=0.8"),
    "triton": Requirement(">=3.2", "cuda"),
    "torch_npu": Requirement(">=2.6", "npu"),
    "kernels": Requirement(">=0.17.2", "hub"),
}
GPU = DeviceFacts("cuda", "NVIDIA H200", 150_120_890_368, count=2, cuda_build="12.8", reasons={"npu": "no torch_npu"})
CPU = DeviceFacts("cpu", "EPYC", 16 * 2**30, reasons={"cuda": "this torch is built without CUDA"})
GPU_MACHINE = Environment(
    python="3.12.1",
    kconvert="0.1.0",
    requirements=WANTED,
    packages={name: PackageFacts(name in VERSIONS, VERSIONS.get(name)) for name in (*REQUIRED, *OPTIONAL)},
    device=GPU,
    c_compiler="/usr/bin/gcc",
    kernels_range=KernelsRange(is_taken=True, versions=">=0.17.2,<0.18.0"),
    kernels=KernelCounts(5, 15),
)
"""A machine on which everything is as it should be, with two GPUs and no NPU."""


def _with(facts: Environment = GPU_MACHINE, /, **packages: PackageFacts) -> Environment:
    return replace(facts, packages={**facts.packages, **packages})


def _part(facts: Environment, name: str) -> Part:
    (part,) = [part for part in diagnose(facts) if part.name == name]
    return part


def test_a_machine_that_has_everything() -> None:
    parts = diagnose(GPU_MACHINE)
    assert [part.name for part in parts] == [
        "python", "kconvert", "torch", "device", "triton", "torch_npu", "kernels", "transformers", "safetensors",
        "accelerate",
    ]  # fmt: skip
    assert {part.name for part in parts if part.usable is not Usable.YES} == {"torch_npu"}
    assert _part(GPU_MACHINE, "device") == Part("device", "cuda", Usable.YES, "NVIDIA H200, 139.8 GiB, first of 2")
    assert _part(GPU_MACHINE, "torch_npu") == Part(
        "torch_npu", "-", Usable.ABSENT, "for Ascend NPUs", "pip install 'kconvert[npu]'"
    )
    assert doctor._closing_line(GPU_MACHINE) == ("5 of 15 kernels run here; `kconvert list-kernels` shows why.")


@pytest.mark.parametrize(
    ("version", "fits"),
    [("5.17.9", False), ("5.18.0", True), ("5.22.2", True), ("5.25.0.dev0", True), ("6.0.0", False), ("main", False)],
)
def test_versions_of_transformers(version: str, fits: bool) -> None:
    part = _part(_with(transformers=PackageFacts(True, version)), "transformers")
    assert part.usable is (Usable.YES if fits else Usable.NO)
    if not fits:
        assert (part.note, part.fix) == ("kconvert needs >=5.18,<6", "pip install 'transformers>=5.18,<6'")


def test_a_local_version_fits() -> None:
    assert version_fits("2.13.0+cpu", ">=2.6")


@pytest.mark.parametrize("name", REQUIRED)
def test_a_required_package_that_is_absent(name: str) -> None:
    part = _part(_with(**{name: PackageFacts(False)}), name)
    assert part == Part(name, "-", Usable.NO, "not installed", f"pip install '{name}{WANTED[name].versions}'")


def test_optional_packages_that_are_absent_say_what_they_are_for() -> None:
    facts = _with(**{name: PackageFacts(False) for name in OPTIONAL})
    for name, purpose in OPTIONAL.items():
        extra = {"triton": "'kconvert[cuda]'", "torch_npu": "'kconvert[npu]'", "kernels": "'kconvert[hub]'"}
        fix = f"pip install {extra.get(name, name)}"
        assert _part(facts, name) == Part(name, "-", Usable.ABSENT, purpose, fix)


def test_kconvert_that_is_not_installed() -> None:
    facts = replace(_with(transformers=PackageFacts(True, "4.0")), requirements=None)
    assert _part(facts, "transformers").usable is Usable.YES
    assert "not installed" in _part(facts, "kconvert").note
    absent = _part(_with(facts, triton=PackageFacts(False)), "triton")
    assert absent.fix == "pip install triton"


def test_an_old_python() -> None:
    part = _part(replace(GPU_MACHINE, python="3.10.4"), "python")
    assert (part.usable, part.note) == (Usable.NO, "kconvert needs >=3.11")


def test_torch_npu_without_cann() -> None:
    failure = "ImportError: libhccl.so: cannot open shared object file: No such file or directory"
    facts = replace(_with(torch_npu=PackageFacts(True, "2.7.1", failure)), broken_backends=("torch_npu",))
    npu, torch = _part(facts, "torch_npu"), _part(facts, "torch")
    assert (npu.usable, npu.version, npu.note) == (Usable.NO, "2.7.1", f"does not import ({failure})")
    assert "CANN" in npu.fix
    assert "pip uninstall torch_npu" in npu.fix
    assert (torch.usable, torch.version) == (Usable.PARTLY, "2.13.0+cu128")
    assert torch.note == "imports only without torch_npu"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in torch.fix


@pytest.mark.parametrize(
    ("reason", "usable"), [(None, Usable.YES), ("torch_npu is installed, but there is no NPU", Usable.PARTLY)]
)
def test_torch_npu_that_imports(reason: str | None, usable: Usable) -> None:
    device = DeviceFacts("cpu" if reason else "npu", reasons={"npu": reason} if reason else {})
    part = _part(replace(_with(torch_npu=PackageFacts(True, "2.7.1")), device=device), "torch_npu")
    assert (part.usable, part.note) == (usable, reason or "")


@pytest.mark.parametrize(
    ("warning", "why"),
    [
        (None, "no CUDA device, or no driver for it"),
        ("CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)", None),
    ],
)
def test_a_cuda_build_without_a_driver(warning: str | None, why: str | None) -> None:
    reasons = {"cuda": "no CUDA device, or no driver for it"}
    device = DeviceFacts("cpu", "EPYC", 2**34, cuda_build="12.8", reasons=reasons, warning=warning)
    part = _part(replace(GPU_MACHINE, device=device), "device")
    assert (part.usable, part.version) == (Usable.PARTLY, "cpu")
    assert part.note == f"EPYC, 16.0 GiB; torch is built for CUDA 12.8, but no GPU can be used ({warning or why})"
    assert "nvidia-smi" in part.fix


def test_a_machine_without_a_gpu_is_as_it_should_be() -> None:
    assert _part(replace(GPU_MACHINE, device=CPU), "device") == Part("device", "cpu", Usable.YES, "EPYC, 16.0 GiB")


@pytest.mark.parametrize(
    ("device", "compiler", "note", "fix"),
    [
        (GPU, "gcc", "", ""),
        (GPU, None, "no C compiler: only its interpreter can be used", "install gcc, or set CC"),
        (CPU, "gcc", "no GPU: only its interpreter can be used", "for tests without a GPU, set TRITON_INTERPRET=1"),
        (
            CPU,
            None,
            "no GPU, no C compiler: only its interpreter can be used",
            "for tests without a GPU, set TRITON_INTERPRET=1, install gcc, or set CC",
        ),
        (
            None,
            "gcc",
            "no GPU is known, as torch could not be asked: only its interpreter can be used",
            "repair torch",
        ),
    ],
)
def test_triton(device: DeviceFacts | None, compiler: str | None, note: str, fix: str) -> None:
    part = _part(replace(GPU_MACHINE, device=device, c_compiler=compiler), "triton")
    assert part == Part("triton", "3.5.0", Usable.PARTLY if note else Usable.YES, note, fix)


@pytest.mark.parametrize("version", ["0.17.0", "0.18.1"])
def test_kernels_that_transformers_keeps_disabled(version: str) -> None:
    facts = replace(_with(kernels=PackageFacts(True, version)), kernels_range=KernelsRange(False, ">=0.17.2,<0.18.0"))
    part = _part(facts, "kernels")
    assert (part.usable, part.version) == (Usable.NO, version)
    assert part.note == "transformers wants >=0.17.2,<0.18.0 and keeps it disabled"
    assert part.fix == "pip install 'kernels>=0.17.2,<0.18.0'"


def test_kernels_where_transformers_cannot_be_asked() -> None:
    assert _part(replace(GPU_MACHINE, kernels_range=None), "kernels").usable is Usable.PARTLY


def test_torch_that_is_broken_is_to_blame_for_what_fails_alike() -> None:
    failure = "OSError: libcudart.so.12: cannot open shared object file"
    broken = PackageFacts(True, "2.13.0", failure)
    facts = replace(
        _with(torch=broken, transformers=broken, accelerate=PackageFacts(True, "1.15.0", "ImportError: other")),
        device=None,
        kernels=None,
    )
    assert _part(facts, "torch").note == f"does not import ({failure})"
    assert _part(facts, "torch").fix == "pip install --force-reinstall 'torch>=2.6'"
    assert (_part(facts, "transformers").note, _part(facts, "transformers").fix) == (
        "does not import, because torch does not",
        "repair torch",
    )
    assert _part(facts, "accelerate").note == "does not import (ImportError: other)"
    assert _part(facts, "accelerate").fix.endswith(", or `pip uninstall accelerate`")
    assert _part(facts, "device") == Part(
        "device", "-", Usable.NO, "not known, because torch does not import", "repair torch"
    )
    assert _part(facts, "safetensors").usable is Usable.YES
    assert doctor._closing_line(facts) == "No kernel runs here: torch could not be asked."


# --- what is found ------------------------------------------------------------------------------------

TORCH = """
    import os

    __version__ = "2.9.0+cu128"
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    if autoload and {has_backend}:
        try:
            import torch_npu
        except Exception as error:
            raise RuntimeError("Failed to load the backend extension: torch_npu. Disable it.") from error


    class version:
        cuda = "12.8"


    class cuda:
        @staticmethod
        def is_available():
            import warnings

            warnings.warn("CUDA initialization: the driver is too old\\nsecond line")
            return False


    class xpu:
        is_available = staticmethod(lambda: False)


    class backends:
        class mps:
            is_available = staticmethod(lambda: False)
"""
IMPORT_UTILS = """
    KERNELS_MIN_VERSION = "0.17.2"
    KERNELS_MAX_VERSION = "0.18.0"


    def is_kernels_available():
        return {taken}
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with stand-ins that work: torch for CUDA without a driver, transformers, accelerate, and metadata."""
    folder = tmp_path / "site"
    write_package(folder, "torch", TORCH.format(has_backend=False), version="2.9.0+cu128")
    transformers = {"utils____init__": "", "modeling_utils": "import torch\n"}
    write_package(
        folder,
        "transformers",
        "",
        version="5.20.0",
        utils__import_utils=IMPORT_UTILS.format(taken=True),
        **transformers,
    )
    write_package(folder, "accelerate", "", version="0.1.0")
    write_package(folder, "kernels", "print('hello')\n", version="0.17.2")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [
        f"Requires-Python: {project['requires-python']}",
        *map("Requires-Dist: {}".format, project["dependencies"]),
    ]
    for extra, wanted in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        for text in wanted:
            bare, _, marker = text.partition(";")
            marker = f"({marker.strip()}) and extra == '{extra}'" if marker else f"extra == '{extra}'"
            lines.append(f"Requires-Dist: {bare}; {marker}")
    write_distribution(folder, "kconvert", __version__, metadata="".join(f"{line}\n" for line in lines))
    return folder


def _doctor(site: Path, **more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parts by name, and the whole value; nothing but JSON is on stdout, and the exit code is 0."""
    code, out, err = run_command(environment(site, **more), "doctor", "--json")
    assert code == 0, err
    value: dict[str, Any] = json.loads(out)
    return {part["name"]: part for part in value["parts"]}, value


def test_what_is_found_with_stand_ins(site: Path) -> None:
    parts, value = _doctor(site)
    assert {name: part["usable"] for name, part in parts.items()} == {
        "python": "yes",
        "kconvert": "yes",
        "torch": "yes",
        "device": "partly",
        "triton": "partly" if find_spec("triton") else "absent",
        "torch_npu": "absent",
        "kernels": "yes",
        "transformers": "yes",
        "safetensors": "yes",
        "accelerate": "yes",
    }
    assert parts["python"]["version"] == platform.python_version()
    assert parts["torch"]["version"] == "2.9.0+cu128"
    assert parts["transformers"]["version"] == "5.20.0"
    assert value["device"]["cuda_build"] == "12.8"
    assert value["device"]["memory_bytes"] > 2**28
    assert value["device"]["warning"] == "CUDA initialization: the driver is too old"
    assert "(CUDA initialization: the driver is too old)" in parts["device"]["note"]
    assert parts["accelerate"]["fix"] == ""


def test_the_versions_come_from_the_metadata(site: Path) -> None:
    for name, version in (("transformers", "5.17.0"), ("torch", "2.5.1")):
        (old,) = site.glob(f"{name}-*.dist-info")
        shutil.rmtree(old)
        write_distribution(site, name, version)
    parts, _ = _doctor(site)
    for name, version, wanted in (("transformers", "5.17.0", ">=5.18,<6"), ("torch", "2.5.1", ">=2.6")):
        assert (parts[name]["version"], parts[name]["usable"]) == (version, "no")
        assert parts[name]["note"] == f"kconvert needs {wanted}"


def test_kernels_that_transformers_refuses(site: Path) -> None:
    (site / "transformers" / "utils" / "import_utils.py").write_text(dedent(IMPORT_UTILS.format(taken=False)))
    parts, _ = _doctor(site)
    assert parts["kernels"]["note"] == "transformers wants >=0.17.2,<0.18.0 and keeps it disabled"
    assert parts["transformers"]["usable"] == "yes"


BREAKS = {
    "raises": "raise OSError('libfoo.so.1: cannot open\\nmore')\n",
    "exits": "import os\nos._exit(3)\n",
    "crashes": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
}
SAID = {
    "raises": "does not import (OSError: libfoo.so.1: cannot open)",
    "exits": "does not import (it ends the interpreter, with exit code 3)",
    "crashes": "does not import (it ends the interpreter, by SIGSEGV)",
}


@pytest.mark.parametrize(("name", "way"), [("triton", "raises"), ("kernels", "exits"), ("accelerate", "crashes")])
def test_one_broken_package_hides_no_other(site: Path, name: str, way: str) -> None:
    write_package(site, name, BREAKS[way])
    parts, value = _doctor(site)
    assert (parts[name]["usable"], parts[name]["note"]) == ("no", SAID[way])
    others = {other for other, part in parts.items() if part["usable"] == "no"} - {name}
    assert others == set()
    assert value["device"]["accelerator"] == "cpu"


@pytest.mark.parametrize("way", BREAKS)
def test_a_broken_torch(site: Path, way: str) -> None:
    write_package(site, "torch", BREAKS[way])
    parts, value = _doctor(site)
    assert (parts["torch"]["usable"], parts["torch"]["note"]) == ("no", SAID[way])
    assert parts["device"]["note"] == "not known, because torch does not import"
    assert parts["transformers"]["note"] == "does not import, because torch does not"
    assert value["device"] is None
    assert value["kernels"] is None
    assert {name for name, part in parts.items() if part["usable"] == "yes"} - {"kernels"} == {
        "python", "kconvert", "safetensors", "accelerate"
    }  # fmt: skip


def test_transformers_that_does_not_load_models_still_says_which_kernels_it_wants(site: Path) -> None:
    (site / "transformers" / "modeling_utils.py").write_text("import torchvision_that_is_not_here\n")
    (site / "transformers" / "utils" / "import_utils.py").write_text(dedent(IMPORT_UTILS.format(taken=False)))
    parts, _ = _doctor(site)
    assert parts["transformers"]["note"].startswith("does not import (ModuleNotFoundError: No module named 'torchvis")
    assert "keeps it disabled" in parts["kernels"]["note"]


def test_a_broken_torch_npu(site: Path) -> None:
    write_package(site, "torch", TORCH.format(has_backend=True))
    asks = "import torch\ntry:\n    import torch_npu\nexcept ModuleNotFoundError:\n    pass\n"
    (site / "transformers" / "modeling_utils.py").write_text(asks)
    write_package(
        site,
        "torch_npu",
        "import torch\nraise ImportError('libhccl.so: cannot open shared object file')\n",
        version="2.9.0",
    )
    parts, value = _doctor(site)
    assert parts["torch_npu"]["note"] == "does not import (ImportError: libhccl.so: cannot open shared object file)"
    assert parts["torch"]["usable"] == "partly"
    assert parts["torch"]["note"] == "imports only without torch_npu"
    assert {name for name, part in parts.items() if part["usable"] == "no"} == {"torch_npu"}
    assert value["device"]["accelerator"] == "cpu"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_table_fits_and_says_everything(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = f"ImportError: /a/path/{'x' * 90}.so: undefined symbol\x1b[31m"
    facts = _with(triton=PackageFacts(True, "3.5.0+git" + "0123456789abcdef" * 3, failure))
    monkeypatch.setattr(doctor, "probe_environment", lambda: facts)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    folded = re.sub(r"\s+", "", out)
    # a long version and a long note are folded line by line, so their pieces are mixed
    assert folded.count("x") >= 90
    assert "\x1b" not in out
    assert out.endswith("\n5 of 15 kernels run here; `kconvert list-kernels` shows why.\n")


@pytest.mark.parametrize(
    ("kernels", "line"),
    [
        (KernelCounts(7, 7), "7 of 7 kernels run here."),
        (
            KernelCounts(7, 7, 1),
            "7 of 7 kernels run here, and 1 kernel module does not import; `kconvert list-kernels` shows why.",
        ),
        (None, "No kernel runs here: torch could not be asked."),
    ],
)
def test_the_closing_line(kernels: KernelCounts | None, line: str) -> None:
    assert doctor._closing_line(replace(GPU_MACHINE, kernels=kernels)) == line


def test_this_machine() -> None:
    """With the packages that are really installed."""
    parts, value = _doctor(ROOT)
    assert {parts[name]["usable"] for name in ("python", "torch", "transformers", "safetensors")} == {"yes"}
    for name in ("torch", "transformers", "safetensors"):
        assert parts[name]["version"] == metadata.version(name)
    assert value["kernels"]["num_known"] == len(kernel_specs())
    assert value["kernels"]["num_broken_modules"] == 0
    on_cpu = sum(entry.device == "cpu" for _, entry in kernel_specs().values())
    assert on_cpu <= value["kernels"]["num_usable"]
    from transformers.utils import import_utils

    taken = import_utils.is_kernels_available()
    assert parts["kernels"]["usable"] == ("yes" if taken else "absent")
