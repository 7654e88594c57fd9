"""Asking this machine what it has: `probe_environment` gives the facts that `environment.diagnose` decides on.

Every package is imported in a process of its own, because a broken one can raise anything, hang, end its
interpreter, or leave modules behind that break the next one.  Here only metadata is read, so one broken part never
hides another.  A backend of torch that does not import is kept from the processes that ask about the rest, as the
commands of kconvert do.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kconvert import __version__
from kconvert.backends import TORCH_BACKENDS
from kconvert.errors import one_line
from kconvert.kernels.cuda import c_compiler
from kconvert.runtime.environment import (
    OPTIONAL,
    REQUIRED,
    DeviceFacts,
    Environment,
    KernelCounts,
    KernelsRange,
    PackageFacts,
    Requirement,
)

__all__ = ["answer", "probe_environment"]

_TIMEOUT_SECONDS = 120
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kconvert.runtime.environment_probe import answer; answer(sys.argv[2], json.loads(sys.argv[3]))"
)


def probe_environment() -> Environment:
    """Ask the machine; takes some seconds, as torch and transformers are imported.  Raises nothing for what is broken."""
    found = {name: _is_installed(name) for name in (*REQUIRED, *OPTIONAL)}
    present = [name for name in found if found[name]]
    answers = _ask_all([name for name in present if name not in ("kernels", "transformers", "accelerate")])
    hidden = [name for name in TORCH_BACKENDS if "failure" in answers.get(name, {})]
    broken_backends: list[str] = []
    if hidden and "failure" in answers.get("torch", {}):
        without = _ask("torch", hidden, load_backends=False)
        if "failure" not in without:
            broken_backends, answers["torch"] = hidden, without
    second = [name for name in ("kernels", "transformers", "accelerate") if name in present]
    device, device_failure = (answers.get("torch", {}).get(key) for key in ("device", "device_failure"))
    answers |= _ask_all([*second, *(["catalog"] if device is not None else [])], hidden)
    taken = answers.get("transformers", {}).get("kernels_range")
    counts = answers.get("catalog", {"failure": "not asked"})
    return Environment(
        python=platform.python_version(),
        kconvert=__version__,
        requirements=_requirements(),
        packages={name: _package_facts(name, found[name], answers.get(name, {})) for name in found},
        broken_backends=tuple(broken_backends),
        device=DeviceFacts(**device) if device is not None else None,
        device_failure=device_failure,
        c_compiler=c_compiler(),
        kernels_range=KernelsRange(**taken) if taken is not None else None,
        kernels=KernelCounts(**counts) if "failure" not in counts else None,
    )


def _is_installed(name: str) -> bool:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None  # a folder that only bears the name has no origin


def _package_facts(name: str, is_installed: bool, given: Mapping[str, Any]) -> PackageFacts:
    version = _distribution_version(name) or given.get("version") if is_installed else None
    return PackageFacts(is_installed, version, given.get("failure"))


def _distribution_version(name: str) -> str | None:
    for distribution in (name, name.replace("_", "-")):
        with suppress(metadata.PackageNotFoundError, KeyError):
            return metadata.version(distribution)
    return None


def _requirements() -> dict[str, Requirement] | None:
    """What the metadata of the installed kconvert asks for, tools for developers left out; None without metadata."""
    from packaging.requirements import Requirement as Parsed

    try:
        distribution = metadata.distribution("kconvert")
    except metadata.PackageNotFoundError:
        return None
    about = distribution.metadata
    extras = [None, *(extra for extra in about.get_all("Provides-Extra") or () if extra != "dev")]
    found = {"python": Requirement(about["Requires-Python"] or "")}
    for text in distribution.requires or ():
        parsed = Parsed(text)
        for extra in extras:
            if parsed.marker is None or parsed.marker.evaluate({"extra": extra or ""}):
                found.setdefault(parsed.name.replace("-", "_"), Requirement(_in_order(parsed.specifier), extra))
                break
    return found


def _in_order(specifiers: Iterable[Any]) -> str:
    """`>=5.18,<6`, whatever the order in the metadata: the least version first."""
    return ",".join(sorted(map(str, specifiers), key=lambda text: (text.startswith("<"), text)))


# --- one process per question ---------------------------------------------------------------------------------------


def _ask_all(questions: Sequence[str], hidden: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    with ThreadPoolExecutor(max_workers=max(os.cpu_count() or 1, 2)) as pool:
        asked = {name: pool.submit(_ask, name, hidden, load_backends=name == "torch") for name in questions}
        return {name: future.result() for name, future in asked.items()}


def _ask(question: str, hidden: Sequence[str], *, load_backends: bool) -> dict[str, Any]:
    """The answer of a process of its own; `failure` in it where there is none."""
    environment = dict(os.environ)
    if not load_backends:
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # -P: the folder that one is in is no place to import from
    command = [sys.executable, "-P", "-c", _CHILD, json.dumps(sys.path), question, json.dumps(list(hidden))]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"not done after {_TIMEOUT_SECONDS} seconds"}
    except OSError as error:
        return {"failure": one_line(error)}
    if done.returncode < 0:
        return {"failure": f"it ends the interpreter, by {signal.Signals(-done.returncode).name}"}
    try:
        given: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"failure": f"it ends the interpreter, with exit code {done.returncode}"}
    return given


def answer(question: str, hidden: Sequence[str]) -> None:
    """What the process of its own does: import the package, or ask torch, and print the answer as JSON.

    Args:
        question: the name of a package, or `catalog`.
        hidden: packages that are to be as if not installed.
    """
    channel = os.dup(1)  # what the package prints must not get between
    os.dup2(2, 1)
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's own way to say: not importable
    asked = {"torch": _ask_torch, "catalog": _ask_catalog, "transformers": _ask_transformers}
    given: dict[str, Any] = {}
    try:
        if question != "catalog":
            given["version"] = _own_version(import_module(question))
        if question in asked:
            asked[question](given)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a broken package raises what it likes
        given["failure"] = one_line(error)
    with os.fdopen(channel, "w") as out:
        json.dump(given, out)


def _own_version(module: Any) -> str | None:
    version = getattr(module, "__version__", None)
    return version if isinstance(version, str) else None


def _ask_torch(given: dict[str, Any]) -> None:
    """Ask torch for the device."""
    try:
        given["device"] = _device_fields()
    except Exception as error:  # noqa: BLE001 - a driver that does not fit raises what it likes
        given["device_failure"] = one_line(error)


def _device_fields() -> dict[str, Any]:
    """The fields of `DeviceFacts`."""
    import torch

    from kconvert.kernels.base import DeviceType
    from kconvert.kernels.device import current_accelerator, device_reason

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reasons = {kind.value: device_reason(kind) for kind in DeviceType}
        accelerator = current_accelerator().value
    name, memory_bytes, count = _cpu() if accelerator == "cpu" else _first_device(torch, accelerator)
    return {
        "accelerator": accelerator,
        "name": name,
        "memory_bytes": memory_bytes,
        "count": count,
        "cuda_build": torch.version.cuda,
        "reasons": {kind: reason for kind, reason in reasons.items() if reason is not None},
        "warning": str(caught[0].message).strip().splitlines()[0] if caught else None,
    }


def _first_device(torch: Any, accelerator: str) -> tuple[str | None, int | None, int]:
    module = getattr(torch, accelerator)
    if not hasattr(module, "get_device_properties"):  # mps has none
        return platform.processor() or None, None, 1
    properties = module.get_device_properties(0)
    return str(properties.name), int(properties.total_memory), int(module.device_count())


def _cpu() -> tuple[str | None, int | None, int]:
    name = platform.processor() or platform.machine() or None
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    try:
        return name, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 1
    except (ValueError, OSError):
        return name, None, 1


def _ask_catalog(given: dict[str, Any]) -> None:
    """Give the fields of `KernelCounts`."""
    from kconvert.kernels.registry import Registry, check_deps_reason, scan_all_kernels

    failures = scan_all_kernels()
    kernels = Registry.catalog().values()
    reasons = [check_deps_reason(kernel) for kernel in kernels]
    given.update(num_usable=reasons.count(None), num_known=len(reasons), num_broken_modules=len(failures))


def _ask_transformers(given: dict[str, Any]) -> None:
    """Give what transformers says of `kernels`, then import what loading needs."""
    from transformers.utils import import_utils

    with suppress(ImportError, AttributeError):  # a release that does not decide so says nothing
        limits = import_utils.KERNELS_MIN_VERSION, import_utils.KERNELS_MAX_VERSION
        taken = bool(import_utils.is_kernels_available())
        given["kernels_range"] = {"is_taken": taken, "versions": ">={},<{}".format(*limits)}
    import_module("transformers.modeling_utils")
