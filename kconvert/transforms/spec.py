"""A layout, declared once: member modules, rules, and the kernels that implement it.

Specs import no torch, so that planning, the catalog and `list-kernels --no-probe` stay light.
"""

from __future__ import annotations

from dataclasses import dataclass

from kconvert.transforms.operations import Op
from kconvert.transforms.rules import Rule

__all__ = ["KernelEntry", "LayoutSpec"]


@dataclass(frozen=True)
class KernelEntry:
    """A kernel ID and the device type it runs on (`cpu`, `cuda`, `npu`).

    `by_view`: it wants a weight the other way round than the layout stores it, and reads it through a view.
    """

    kernel_id: str
    device: str
    by_view: bool = False


@dataclass(frozen=True)
class LayoutSpec:
    """A built-in layout.

    Attributes:
        name: the layout's name, e.g. `gated_mlp`.
        version: raised when rules or part order change; written in the manifest and checked at load.
        members: a word per module that an entry must match, in pair order; one is a replacement.
        rules: how the layout's tensors come from the members' tensors.
        kernels: the kernels that implement it, best first.
        module: where its `{Name}Layout` class lives, as `package.module:Class`.
        summary: one line for people.
        takes: the children of the one member that the layout takes, those that it makes included; empty where it
            takes the whole subtree, and `NOTHING` where it takes none of it.  What it does not take stays as it is, or
            belongs to another entry.
        is_proposed: whether it is offered where it fits; not one that stands in the place of others, which it holds or stores
            in another form: that is for people to choose.
    """

    name: str
    version: int
    members: tuple[str, ...]
    rules: tuple[Rule, ...]
    kernels: tuple[KernelEntry, ...]
    module: str
    summary: str
    takes: frozenset[str] = frozenset()
    is_proposed: bool = True

    def __post_init__(self) -> None:
        targets = [rule.target for rule in self.rules]
        if len(set(targets)) != len(targets):
            raise ValueError(f"layout {self.name!r} makes a tensor twice: {targets}")
        stray = {source.member for rule in self.rules for source in rule.sources} - set(range(len(self.members)))
        if stray:
            raise ValueError(f"layout {self.name!r} has {len(self.members)} members, its rules name member {stray}")
        named = {source.name for rule in self.rules for source in rule.sources}
        outside = {name for name in {*named, *targets} if name.partition(".")[0] not in self.takes}
        if self.takes and (self.is_fusion or outside):
            raise ValueError(f"layout {self.name!r} takes {sorted(self.takes)}, its rules name {sorted(outside)}")

    @property
    def is_fusion(self) -> bool:
        """Whether the layout takes several sibling modules."""
        return len(self.members) > 1

    @property
    def view_devices(self) -> frozenset[str]:
        """The device types whose kernels read a weight the other way round than it is stored."""
        return frozenset(kernel.device for kernel in self.kernels if kernel.by_view)

    @property
    def changes_parameters(self) -> bool:
        """Whether the stored tensors differ from the source's in name, shape or place."""
        return self.is_fusion or any(
            rule.op is not Op.RENAME or rule.target != rule.sources[0].name for rule in self.rules
        )
