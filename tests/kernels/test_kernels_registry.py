"""The registry: what may be registered, what is seen from where, and that a broken file takes nothing down."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kconvert
from kconvert.errors import KconvertError, KernelUnavailableError, RegistrationError
from kconvert.kernels import (
    BaseKernel,
    DeviceType,
    LayoutKernel,
    Registry,
    apply_default_kernels,
    apply_kernel,
    ops,
    register_kernel,
    scan_all_kernels,
)
from kconvert.kernels import registry as module
from kconvert.kernels.assign import layout_kernels, load_layout
from kconvert.kernels.cuda import CudaKernel
from kconvert.kernels.device import current_accelerator, device_reason
from kconvert.kernels.registry import check_deps_reason, get_known_kernel
from kconvert.kernels.specs import kernel_specs, layout_specs
from tests.support import tiny_model

NAMES = (
    "rmsnorm",
    "gated_rmsnorm",
    "swiglu",
    "geglu",
    "qkv",
    "rope",
    "moe",
    "moe_transposed",
    "router",
    "rmsnorm_swiglu",
)
BUILT_IN = {
    f"{device}_fused_{name}": DeviceType(device)
    for device in ("cpu", "cuda", "npu")
    for name in (*NAMES, "decoder_layer")
    if (device, name) != ("cpu", "rope")
} | dict.fromkeys(("liger_rmsnorm", "liger_swiglu", "liger_geglu"), DeviceType.CUDA)


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything that a test registers or imports is gone afterwards."""
    Registry.catalog()
    kernels, scanned, modules = dict(Registry._kernels), set(Registry._scanned), set(sys.modules)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    Registry._kernels.clear()
    Registry._kernels.update(kernels)
    Registry._scanned.clear()
    Registry._scanned.update(scanned)
    for name in set(sys.modules) - modules:
        if "kconvert_test" in name or name.startswith("kconvert.kernels.ops."):
            del sys.modules[name]


def _kernel(kernel_id: Any = "test_kernel", device: Any = DeviceType.CPU) -> type[BaseKernel]:
    return type("TestKernel", (BaseKernel,), {"_kernel_id": kernel_id, "_device": device})


# --- register ---------------------------------------------------------------------------------------


def test_a_registered_kernel_is_found_and_returned() -> None:
    kernel = _kernel()
    assert register_kernel(kernel) is kernel
    assert Registry.get("test_kernel") is kernel
    assert Registry.catalog()["test_kernel"] is kernel
    assert get_known_kernel("test_kernel") is kernel


@pytest.mark.parametrize("value", [nn.Linear, object, 3, "cpu_fused_swiglu", None, _kernel()()])
def test_what_is_no_base_kernel_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="BaseKernel"):
        Registry.register(value)
    assert set(Registry.catalog()) == set(BUILT_IN)


@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({"_device": DeviceType.CPU}, "_kernel_id"),
        ({"_kernel_id": "", "_device": DeviceType.CPU}, "_kernel_id"),
        ({"_kernel_id": 3, "_device": DeviceType.CPU}, "_kernel_id"),
        ({"_kernel_id": "test_kernel"}, "_device"),
        ({"_kernel_id": "test_kernel", "_device": "cuda"}, "_device"),
        ({"_kernel_id": "test_kernel", "_device": None}, "_device"),
    ],
)
def test_both_attributes_are_wanted(attributes: dict[str, Any], named: str) -> None:
    with pytest.raises(RegistrationError, match=named) as caught:
        Registry.register(type("TestKernel", (BaseKernel,), attributes))
    assert isinstance(caught.value, KconvertError)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)
    assert "test_kernel" not in Registry.catalog()


@pytest.mark.parametrize("kernel_id", ["test_kernel", "cpu_fused_swiglu"])
def test_a_taken_id_is_refused_and_the_first_stays(kernel_id: str) -> None:
    if kernel_id == "test_kernel":
        Registry.register(_kernel())
    first = Registry.catalog()[kernel_id]
    with pytest.raises(ValueError, match=f"{kernel_id!r} is taken by {re.escape(first.__module__)}"):
        Registry.register(_kernel(kernel_id, DeviceType.NPU))
    assert Registry.catalog()[kernel_id] is first


# --- get and catalog --------------------------------------------------------------------------------


@pytest.mark.parametrize("accelerator", list(DeviceType))
def test_get_gives_what_this_process_can_use(accelerator: DeviceType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "current_accelerator", lambda: accelerator)
    for kernel_id, device in BUILT_IN.items():
        found = Registry.get(kernel_id)
        if device in (DeviceType.CPU, accelerator):
            assert found is Registry.catalog()[kernel_id]
        else:
            assert found is None
    assert Registry.get("nothing") is None


def test_the_accelerator_is_asked_for_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "current_accelerator", lambda: DeviceType.CPU)
    assert Registry.get("npu_fused_swiglu") is None
    monkeypatch.setattr(module, "current_accelerator", lambda: DeviceType.NPU)
    assert Registry.get("npu_fused_swiglu") is not None


@pytest.mark.parametrize("accelerator", list(DeviceType))
def test_the_catalog_is_the_same_everywhere_and_sorted(
    accelerator: DeviceType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "current_accelerator", lambda: accelerator)
    catalog = Registry.catalog()
    assert {kernel_id: kernel.device() for kernel_id, kernel in catalog.items()} == BUILT_IN
    assert list(catalog) == sorted(catalog)
    assert all(kernel.kernel_id() == kernel_id for kernel_id, kernel in catalog.items())


def test_the_catalog_is_a_copy() -> None:
    Registry.catalog().clear()
    assert set(Registry.catalog()) == set(BUILT_IN)


def test_specs_and_classes_agree() -> None:
    for spec in layout_specs().values():
        layout = load_layout(spec.name)
        assert layout is not None
        assert layout.spec is spec
        assert layout.conversion_mapping == spec.rules
        assert [(kernel_id, kernel.device().value) for kernel_id, kernel in layout_kernels(layout).items()] == [
            (entry.kernel_id, entry.device) for entry in spec.kernels
        ]
    assert set(kernel_specs()) == set(BUILT_IN)
    assert load_layout("nothing") is None


def test_fusion_kernels_are_not_default() -> None:
    assert {kernel_id for kernel_id, kernel in Registry.catalog().items() if not kernel.default} == {
        *(
            kernel_id
            for kernel_id in BUILT_IN
            if kernel_id.endswith(("rmsnorm_swiglu", "decoder_layer", "_transposed"))
        ),
        *(kernel_id for kernel_id in BUILT_IN if kernel_id.startswith("liger_")),
    }


# --- reasons ----------------------------------------------------------------------------------------


def test_cpu_kernels_run_and_others_say_why_not() -> None:
    for kernel_id, kernel in Registry.catalog().items():
        reason = check_deps_reason(kernel)
        device = BUILT_IN[kernel_id]
        assert kernel.has_device_code()
        assert reason == device_reason(device)


def test_a_kernel_with_code_asks_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    kernel = type("TestKernel", (LayoutKernel,), {"_device": DeviceType.CUDA, "forward": staticmethod(lambda m, x: x)})
    assert check_deps_reason(kernel) == "this torch is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_deps_reason(kernel) == "no CUDA device, or no driver for it"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert check_deps_reason(kernel) is None
    assert current_accelerator() in (DeviceType.CUDA, DeviceType.NPU)


@pytest.mark.parametrize(
    ("found", "reason"),
    [("3.6.0", None), ("3.10.1", None), ("3.5.1", "Triton 3.5.1 is older than 3.6"), ("a build of mine", None)],
)
def test_cuda_kernels_want_a_triton_that_they_were_tried_on(
    monkeypatch: pytest.MonkeyPatch, found: str, reason: str | None
) -> None:
    kernel = type("TestKernel", (CudaKernel,), {"forward": staticmethod(lambda m, x: x)})
    monkeypatch.setattr("kconvert.kernels.device.device_reason", lambda device: None)
    monkeypatch.setattr("kconvert.kernels.cuda.find_spec", lambda name: object())
    monkeypatch.setattr("kconvert.kernels.cuda.version", lambda name: found)
    monkeypatch.setenv("CC", "cc")
    assert check_deps_reason(kernel) == reason
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert check_deps_reason(kernel) == "Triton finds no C compiler: install gcc, or set CC"
    monkeypatch.setattr("kconvert.kernels.cuda.find_spec", lambda name: None)
    assert check_deps_reason(kernel) == "Triton is not installed: pip install triton"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ImportError('libhccl.so: cannot open shared object file\\nmore')", "libhccl.so"),
        ("raise OSError('libascendcl.so')", "libascendcl.so"),
        ("raise RuntimeError", "RuntimeError"),
    ],
)
def test_torch_npu_without_cann_is_one_line_and_the_cpu_goes_on(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_npu.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    found = device_reason(DeviceType.NPU)
    assert found is not None
    assert reason in found
    assert "CANN" in found
    assert "\n" not in found
    assert current_accelerator() is not DeviceType.NPU
    assert Registry.get("cpu_fused_swiglu") is not None


@pytest.mark.parametrize(
    ("answer", "reason"), [(True, None), (None, None), (False, "check_deps"), ("no wheel", "no wheel")]
)
def test_check_deps_may_answer_with_a_bool(answer: Any, reason: str | None) -> None:
    kernel = _kernel()
    kernel.check_deps = classmethod(lambda cls: answer)  # type: ignore[method-assign,assignment]
    found = check_deps_reason(kernel)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("error", [RuntimeError("no driver"), ImportError("no driver"), AttributeError("no driver")])
def test_check_deps_that_raises_is_a_reason(error: Exception) -> None:
    def fails(cls: Any) -> None:
        raise error

    kernel = register_kernel(_kernel())
    kernel.check_deps = classmethod(fails)  # type: ignore[method-assign,assignment]
    assert check_deps_reason(kernel) == f"its check_deps() fails ({type(error).__name__}: no driver)"
    model = tiny_model("llama")
    with pytest.raises(KernelUnavailableError, match=r"'test_kernel' cannot run.*no driver"):
        apply_kernel("test_kernel", model=model)
    kernel.default = True
    apply_default_kernels(model, "auto")
    found = set(model.kconvert_report.to_dict()["kernels"])
    assert found == {"cpu_fused_rmsnorm", "cpu_fused_qkv", "cpu_fused_swiglu"}


# --- scanning ---------------------------------------------------------------------------------------


KERNEL_FILE = """
from kconvert.kernels import BaseKernel, DeviceType, register_kernel

@register_kernel
class Kernel(BaseKernel):
    _kernel_id = "{name}"
    _device = DeviceType.{device}
"""


def _publish(monkeypatch: pytest.MonkeyPatch, directory: Path, files: dict[str, str], *published: str) -> None:
    """Modules on the path, and entry points in a distribution's metadata."""
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text, encoding="utf-8")
    info = directory / "kconvert_test_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kconvert-test-kernels\nVersion: 1.0\n", encoding="utf-8"
    )
    lines = [f"{number}_{name} = {name}" for number, name in enumerate(published)]
    (info / "entry_points.txt").write_text("\n".join(["[kconvert.kernels]", *lines, ""]), encoding="utf-8")
    monkeypatch.syspath_prepend(str(directory))


def test_a_published_kernel_is_available_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _publish(
        monkeypatch, tmp_path, {"kconvert_test_a": KERNEL_FILE.format(name="test_npu", device="NPU")}, "kconvert_test_a"
    )
    assert [point.module for point in module.kernel_entry_points()] == ["kconvert_test_a"]
    assert scan_all_kernels() == ()
    first = Registry.catalog()["test_npu"]
    assert first.__module__ == "kconvert_test_a"
    assert scan_all_kernels() == ()
    assert Registry.catalog()["test_npu"] is first
    assert set(Registry.catalog()) == {*BUILT_IN, "test_npu"}


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first"),
        ("import kconvert_test_missing", "ModuleNotFoundError: No module named 'kconvert_test_missing'"),
        (
            KERNEL_FILE.format(name="cpu_fused_swiglu", device="CPU"),
            "RegistrationError: kernel ID 'cpu_fused_swiglu' is taken",
        ),
        ("raise ValueError", "ValueError: no message"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("raise SystemExit('no licence')", "SystemExit: no licence"),
    ],
)
def test_a_broken_module_is_named_and_taken_back(
    tail: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "kconvert_test_broken": KERNEL_FILE.format(name="test_lost", device="CPU") + tail,
        "kconvert_test_good": KERNEL_FILE.format(name="test_good", device="CPU"),
    }
    _publish(monkeypatch, tmp_path, files, "kconvert_test_broken", "kconvert_test_good")
    with pytest.warns(UserWarning, match="kconvert_test_broken does not import"):
        (failure,) = scan_all_kernels()
    assert failure.module == "kconvert_test_broken"
    assert failure.reason.startswith(reason)
    assert "\n" not in failure.reason
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert set(Registry.catalog()) == {*BUILT_IN, "test_good"}


def test_a_module_that_a_broken_one_imported_keeps_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "kconvert_test_broken": "import kconvert_test_good\nraise RuntimeError('late')",
        "kconvert_test_good": KERNEL_FILE.format(name="test_good", device="CPU"),
    }
    _publish(monkeypatch, tmp_path, files, "kconvert_test_broken", "kconvert_test_good")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [failure.module for failure in scan_all_kernels()] == ["kconvert_test_broken"]
        assert set(Registry.catalog()) == {*BUILT_IN, "test_good"}


def test_a_repaired_module_is_found_by_the_next_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = KERNEL_FILE.format(name="test_kernel", device="CPU")
    _publish(monkeypatch, tmp_path, {"kconvert_test_a": text + "import kconvert_test_later"}, "kconvert_test_a")
    with pytest.warns(UserWarning, match="kconvert_test_later"):
        assert len(scan_all_kernels()) == 1
    (tmp_path / "kconvert_test_later.py").write_text("", encoding="utf-8")
    monkeypatch.setattr(sys, "path_importer_cache", {})
    assert scan_all_kernels() == ()
    assert "test_kernel" in Registry.catalog()


def test_entry_points_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, f"module_{name}", module.ENTRY_POINT_GROUP) for name in "bca"]
    monkeypatch.setattr(module, "entry_points", lambda group: points)
    assert [point.name for point in module.kernel_entry_points()] == ["a", "b", "c"]


@pytest.mark.parametrize("error", ["RuntimeError('boom')", "ImportError('boom')"])
@pytest.mark.parametrize("file", ["__init__.py", "cpu.py"])
def test_a_broken_folder_below_ops_takes_nothing_down(
    file: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("aaa_broken", "bbb_good"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "aaa_broken" / file).write_text(f"raise {error}", encoding="utf-8")
    (tmp_path / "bbb_good" / "cpu.py").write_text(KERNEL_FILE.format(name="test_good", device="CPU"), encoding="utf-8")
    monkeypatch.setattr(ops, "__path__", [*ops.__path__, str(tmp_path)])
    with pytest.warns(UserWarning, match="aaa_broken"):
        failures = scan_all_kernels()
    suffix = "aaa_broken" if file == "__init__.py" else "aaa_broken.cpu"
    assert [failure.module for failure in failures] == [f"kconvert.kernels.ops.{suffix}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert set(Registry.catalog()) == {*BUILT_IN, "test_good"}


# --- torch ------------------------------------------------------------------------------------------


BROKEN_TORCH = """
import sys, warnings
from kconvert.errors import KernelUnavailableError
from kconvert.kernels import Registry, apply_kernel, scan_all_kernels

warnings.simplefilter("error")
for number, call in enumerate((scan_all_kernels, Registry.catalog, lambda: Registry.get("cpu_fused_swiglu"))):
    try:
        call()
    except KernelUnavailableError as error:
        assert str(error).startswith("torch does not import (OSError: libhccl.so: no such file); where"), error
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in str(error)
    else:
        raise AssertionError(number)
print(len(open(sys.argv[1]).read()))
"""


def test_a_torch_that_does_not_import_is_tried_once_and_named(tmp_path: Path) -> None:
    """A second try can crash the interpreter, and nine kernel files would each report the same."""
    (tmp_path / "torch").mkdir()
    tries = tmp_path / "tries"
    (tmp_path / "torch" / "__init__.py").write_text(
        f"with open({str(tries)!r}, 'a') as opened:\n    opened.write('x')\n"
        "raise OSError('libhccl.so: no such file\\nsecond line')\n",
        encoding="utf-8",
    )
    root = Path(kconvert.__file__).resolve().parents[1]
    found = subprocess.run(
        [sys.executable, "-c", BROKEN_TORCH, str(tries)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])},
        cwd=tmp_path,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["1"]
