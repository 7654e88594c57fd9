"""Rules and ops on names, shapes and bytes: what a layout is, without torch."""

from kconvert.transforms.bind import MappingRule, bind_mapping, bind_spec
from kconvert.transforms.claims import claims_overlap, is_taken
from kconvert.transforms.rules import (
    BoundRule,
    MemberTensor,
    Op,
    Rule,
    ShapeError,
    concatenate,
    nested,
    rename,
    target_shape,
)
from kconvert.transforms.spec import KernelEntry, LayoutSpec

__all__ = [
    "BoundRule",
    "KernelEntry",
    "LayoutSpec",
    "MappingRule",
    "MemberTensor",
    "Op",
    "Rule",
    "ShapeError",
    "bind_mapping",
    "bind_spec",
    "claims_overlap",
    "concatenate",
    "is_taken",
    "nested",
    "rename",
    "target_shape",
]
