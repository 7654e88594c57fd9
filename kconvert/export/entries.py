"""The entries of a KernelConfig as plain data, and the names in a model that they are about.

Says how each is written: the key by class name or by pairs of class and path, and which class transformers registers a
patch for.  What cannot be an entry is a `Refusal`; whether something is one is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kconvert.manifest import PackageRecord

__all__ = ["Entry", "ModelNames", "Refusal"]


@dataclass(frozen=True)
class ModelNames:
    """The names in a stock model.

    Attributes:
        classes: module path to class name, in module order; the model itself is at "".
        models: names of the classes that are whole models.
        layers: class name to the name under which the `kernels` library knows it, where it does.
    """

    classes: Mapping[str, str]
    models: frozenset[str] = frozenset()
    layers: Mapping[str, str] = field(default_factory=dict)

    def of_class(self, name: str) -> list[str]:
        """The paths of a class's modules."""
        return [path for path, found in self.classes.items() if found == name]


@dataclass(frozen=True)
class Entry:
    """One entry of a KernelConfig.

    Attributes:
        layout: the layout's name.
        classes: the class per pair.
        patterns: the path per pair as KernelConfig wants it; empty for a replacement by class name.
        parent: the class that a fusion changes.
        layer: the name by which a kernel without a layout is put in; None for every other kernel.
        package: the package of the kernel; None where it is built into kconvert.
        patches: the numbers of the manifest's patches.
        claims: the module paths, in pair order.
        anchored: whether the class name is written as a regular expression for this name alone, `^Norm$`: transformers
            searches it in other names too, and the model has one that contains it.
    """

    layout: str
    classes: tuple[str, ...]
    patches: tuple[int, ...]
    claims: tuple[tuple[str, ...], ...]
    patterns: tuple[str, ...] = ()
    parent: str | None = None
    layer: str | None = None
    package: PackageRecord | None = None
    anchored: bool = False

    @property
    def key(self) -> str | tuple[tuple[str, str], ...]:
        """The entry's key in a KernelConfig."""
        if self.patterns:
            return tuple(zip(self.classes, self.patterns, strict=True))
        name = self.layer or self.classes[0]
        return f"^{name}$" if self.anchored else name

    @property
    def children(self) -> tuple[str, ...]:
        """The names of a fusion's modules in their parent."""
        return tuple(pattern.rpartition(".")[2] for pattern in self.patterns)

    @property
    def patched(self) -> str | None:
        """The class name that KernelConfig registers a patch for."""
        return None if self.layer is not None else (self.parent or self.classes[0])


@dataclass(frozen=True)
class Refusal:
    """Patches that KernelConfig cannot express, and why."""

    patches: tuple[int, ...]
    layout: str
    reason: str

    def __str__(self) -> str:
        numbers = ", ".join(str(number) for number in dict.fromkeys(self.patches))
        return f"patch {numbers} ({self.layout}): {self.reason}"
