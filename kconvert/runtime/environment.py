"""What this machine has for kconvert, and what of it can be used: the decision, made from probed facts alone.

`environment_probe` asks the machine and gives an `Environment`; `diagnose` says of every part whether it is usable,
why not, and the way out.  It looks at nothing itself, so that every machine can be told about on any other.
Which versions are wanted is read from kconvert's own metadata; nothing is refused here, a diagnosis is not an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "OPTIONAL",
    "REQUIRED",
    "DeviceFacts",
    "Environment",
    "KernelCounts",
    "KernelsRange",
    "PackageFacts",
    "Part",
    "Requirement",
    "Usable",
    "diagnose",
    "version_fits",
]

REQUIRED = ("torch", "transformers", "safetensors")
OPTIONAL: Mapping[str, str] = {
    "triton": "for kernels on NVIDIA GPUs",
    "torch_npu": "for Ascend NPUs",
    "kernels": "for transformers' kernels from the Hub",
    "accelerate": "for device_map= at load, and for Trainer",
}
"""Import name of every part that kconvert works without, and what it is for."""

_ORDER = ("torch", "device", "triton", "torch_npu", "kernels", "transformers", "safetensors", "accelerate")
_REPAIRS = {
    "torch_npu": "install the CANN toolkit and source its set_env.sh, or `pip uninstall torch_npu`",
}


@dataclass(frozen=True)
class Requirement:
    """What kconvert's metadata says of a package: its versions (`>=5.18,<6`, or empty), and the extra that brings it."""

    versions: str
    extra: str | None = None


@dataclass(frozen=True)
class PackageFacts:
    """A package as it was found; `failure` is why its import failed, None where it did not or was not tried."""

    is_installed: bool
    version: str | None = None
    failure: str | None = None


@dataclass(frozen=True)
class DeviceFacts:
    """What torch sees.

    Attributes:
        accelerator: the device type that this process uses: `cuda`, `npu`, ..., or `cpu`.
        name: of the first such device.
        memory_bytes: of the first such device; the machine's memory for the CPU.
        count: how many such devices there are.
        cuda_build: the CUDA version torch is built for, None for another build.
        reasons: why the other device types cannot be used, by type.
        warning: the first line of what torch warned of while it was asked.
    """

    accelerator: str
    name: str | None = None
    memory_bytes: int | None = None
    count: int = 1
    cuda_build: str | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    warning: str | None = None


@dataclass(frozen=True)
class KernelsRange:
    """Whether transformers takes the installed `kernels`, and the versions that it takes (`>=0.17.2,<0.18.0`)."""

    is_taken: bool
    versions: str


@dataclass(frozen=True)
class KernelCounts:
    """Kernels that run here, kernels that are known, and modules with kernels that do not import."""

    num_usable: int
    num_known: int
    num_broken_modules: int = 0


@dataclass(frozen=True)
class Environment:
    """All facts.

    Attributes:
        python: version of Python.
        kconvert: version of kconvert.
        requirements: by import name, `python` included; None where kconvert has no metadata, as it is not installed.
        packages: by import name, those of `REQUIRED` and `OPTIONAL`.
        broken_backends: those without which torch imports, and with which it does not.
        device: what torch sees; None where it could not be asked.
        device_failure: why it could not.
        c_compiler: the compiler that Triton would find.
        kernels_range: what transformers says of `kernels`; None where it could not be asked.
        kernels: how many kernels run here; None where torch could not be asked.
    """

    python: str
    kconvert: str
    requirements: Mapping[str, Requirement] | None
    packages: Mapping[str, PackageFacts]
    broken_backends: tuple[str, ...] = ()
    device: DeviceFacts | None = None
    device_failure: str | None = None
    c_compiler: str | None = None
    kernels_range: KernelsRange | None = None
    kernels: KernelCounts | None = None


class Usable(StrEnum):
    """Whether a part can be used; ABSENT is an optional one that is not installed."""

    YES = "yes"
    PARTLY = "partly"
    NO = "no"
    ABSENT = "absent"


@dataclass(frozen=True)
class Part:
    """What is said of one part: `note` is a reason or a remark, `fix` the way out; both may be empty."""

    name: str
    version: str
    usable: Usable
    note: str = ""
    fix: str = ""


def version_fits(version: str, versions: str) -> bool:
    """Whether a version is one of `versions`, pre-releases included; one that cannot be read is not."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(versions).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def diagnose(facts: Environment) -> tuple[Part, ...]:
    """Every part, in the order in which it is shown."""
    special = {
        "torch": _torch,
        "device": _device,
        "triton": _triton,
        "torch_npu": _torch_npu,
        "kernels": _kernels,
    }
    parts = (special[name](facts) if name in special else _package(facts, name) for name in _ORDER)
    return (_python(facts), _kconvert(facts), *parts)


def _python(facts: Environment) -> Part:
    wanted = (facts.requirements or {}).get("python")
    if wanted is None or version_fits(facts.python, wanted.versions):
        return Part("python", facts.python, Usable.YES)
    return Part("python", facts.python, Usable.NO, f"kconvert needs {wanted.versions}", "use another Python")


def _kconvert(facts: Environment) -> Part:
    if facts.requirements is not None:
        return Part("kconvert", facts.kconvert, Usable.YES)
    note = "not installed, so which versions it needs of the others is not known"
    return Part("kconvert", facts.kconvert, Usable.YES, note, "pip install it")


def _package(facts: Environment, name: str) -> Part:
    """What goes for any package: installed, imports, and of a version that is wanted."""
    package = facts.packages[name]
    wanted = (facts.requirements or {}).get(name, Requirement(""))
    version = package.version or "-"
    if not package.is_installed:
        if name in OPTIONAL:
            return Part(name, "-", Usable.ABSENT, OPTIONAL[name], _install(name, wanted))
        return Part(name, "-", Usable.NO, "not installed", _install(name, wanted))
    if package.failure is not None:
        return Part(name, version, Usable.NO, *_failure(facts, name, package.failure, wanted))
    if package.version is not None and not version_fits(package.version, wanted.versions):
        return Part(name, version, Usable.NO, f"kconvert needs {wanted.versions}", _pin(name, wanted.versions))
    return Part(name, version, Usable.YES)


def _failure(facts: Environment, name: str, failure: str, wanted: Requirement) -> tuple[str, str]:
    """Why an import failed and the way out; of several that fail alike, one is to blame."""
    for other in ("torch", "kernels", "safetensors"):
        if other != name and facts.packages[other].failure == failure:
            return f"does not import, because {other} does not", f"repair {other}"
    reinstall = f"pip install --force-reinstall '{name}{wanted.versions}'"
    if name in OPTIONAL:
        reinstall += f", or `pip uninstall {name}`"
    return f"does not import ({failure})", _REPAIRS.get(name, reinstall)


def _install(name: str, wanted: Requirement) -> str:
    return f"pip install 'kconvert[{wanted.extra}]'" if wanted.extra else _pin(name, wanted.versions)


def _pin(name: str, versions: str) -> str:
    return f"pip install '{name}{versions}'" if versions else f"pip install {name}"


def _torch(facts: Environment) -> Part:
    part, broken = _package(facts, "torch"), " and ".join(facts.broken_backends)
    if part.usable is not Usable.YES or not broken:
        return part
    fix = f"kconvert's commands do so; in other programs set TORCH_DEVICE_BACKEND_AUTOLOAD=0, or uninstall {broken}"
    return Part(part.name, part.version, Usable.PARTLY, f"imports only without {broken}", fix)


def _device(facts: Environment) -> Part:
    device = facts.device
    if device is None:
        broken = not _imports(facts, "torch")
        note = "not known, because torch does not import" if broken else f"not known ({facts.device_failure})"
        return Part("device", "-", Usable.NO, note, "repair torch")
    shown = [device.name or "", _memory(device.memory_bytes), f"first of {device.count}" if device.count > 1 else ""]
    named = ", ".join(filter(None, shown))
    if device.accelerator != "cpu" or device.cuda_build is None:
        return Part("device", device.accelerator, Usable.YES, named)
    why = device.warning or device.reasons.get("cuda", "")
    return Part(
        "device",
        device.accelerator,
        Usable.PARTLY,
        f"{named}; torch is built for CUDA {device.cuda_build}, but no GPU can be used ({why})",
        "on a machine with a GPU, install or update its driver until nvidia-smi shows it",
    )


def _memory(size_bytes: int | None) -> str:
    """GiB, as memory is sold."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes is not None else ""


def _triton(facts: Environment) -> Part:
    part = _package(facts, "triton")
    if part.usable is not Usable.YES:
        return part
    lacking, fixes = [], []
    if facts.device is None:
        lacking.append("no GPU is known, as torch could not be asked")
        fixes.append("repair torch")
    elif facts.device.accelerator not in ("cuda", "xpu"):
        lacking.append("no GPU")
        fixes.append("for tests without a GPU, set TRITON_INTERPRET=1")
    if facts.c_compiler is None:
        lacking.append("no C compiler")
        fixes.append("install gcc, or set CC")
    if not lacking:
        return part
    note = f"{', '.join(lacking)}: only its interpreter can be used"
    return Part(part.name, part.version, Usable.PARTLY, note, ", ".join(fixes))


def _torch_npu(facts: Environment) -> Part:
    part = _package(facts, "torch_npu")
    reason = facts.device.reasons.get("npu") if facts.device is not None else None
    if part.usable is not Usable.YES or reason is None:
        return part
    return Part(part.name, part.version, Usable.PARTLY, reason, "`npu-smi info` has to show one")


def _kernels(facts: Environment) -> Part:
    part, taken = _package(facts, "kernels"), facts.kernels_range
    if part.usable in (Usable.ABSENT, Usable.NO) and facts.packages["kernels"].failure is None:
        if part.usable is Usable.NO and taken is not None and not taken.is_taken:
            return _disabled(part, taken)
        return part
    if part.usable is not Usable.YES:
        return part
    if taken is None:
        return Part(part.name, part.version, Usable.PARTLY, "transformers could not be asked whether it takes it")
    return part if taken.is_taken else _disabled(part, taken)


def _disabled(part: Part, taken: KernelsRange) -> Part:
    note = f"transformers wants {taken.versions} and keeps it disabled"
    return Part(part.name, part.version, Usable.NO, note, _pin(part.name, taken.versions))


def _imports(facts: Environment, name: str) -> bool:
    package = facts.packages[name]
    return package.is_installed and package.failure is None
