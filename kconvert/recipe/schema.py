"""What a recipe may say: the models and the rules between keys.

Decided here: which keys exist at which level, and which combinations make sense without looking at a model;
`fields` decides what a single value may be.  Unknown keys, values of another type (nothing is converted), contradictions
between keys and empty values are refused.  Not decided here: whether a kernel exists, whether a pattern
matches anything, and whether claims overlap; the planner does that and points to the lines kept here.

Rules raise `RuleError`, which says what, the way out, and which key below the model it is about; `faults`
adds the line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PrivateAttr,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler  # `pydantic` has it from 2.8 on

from kconvert.names import DEVICES
from kconvert.patterns import PathPattern
from kconvert.recipe.fields import (
    RuleError,
    check_name,
    check_revision,
    check_version,
    parse_devices,
    parse_dtype,
    parse_kernels,
    parse_model_types,
    parse_path,
)
from kconvert.recipe.reference import KernelRef, check_class_name
from kconvert.recipe.values import PlacedDict

__all__ = ["Patch", "Recipe", "Target"]


class _Placed(BaseModel):
    """Base of the models: strict, frozen, no unknown keys, and aware of its place in the file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    _line: int = PrivateAttr(default=0)
    _where: str = PrivateAttr(default="recipe")

    @model_validator(mode="wrap")
    @classmethod
    def _keep_place(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(data)
        if isinstance(data, PlacedDict):
            made._line, made._where = data.line, data.where
        return made

    @property
    def line(self) -> int:
        """The line where this part of the recipe starts; 0 where it was not read from a file."""
        return self._line

    @property
    def where(self) -> str:
        """`file:line`, for error messages."""
        return self._where


class Target(_Placed):
    """Modules of one class that a patch entry takes: `{class: Qwen3MLP, path: "model.layers.*.mlp"}`."""

    class_name: Annotated[str, AfterValidator(check_class_name)] = Field(
        alias="class", description="The modules' class name, e.g. `Qwen3MLP`. A module of another class is an error."
    )
    path: Annotated[InstanceOf[PathPattern], BeforeValidator(parse_path)] = Field(
        description="A path pattern: dotted, each segment a literal name, `*` for exactly one segment, or a set of "
        "numbers such as `{0-3,7}`. A pattern that matches no module is an error."
    )


class Patch(_Placed):
    """One item of `patches`: kernels of one layout, best first, and the modules that get the layout.

    Refused: both or neither of `replace` and `fuse`; a package beside other kernels; `version` or
    `revision` without exactly one Hub kernel, or both; `trust_remote_code` where no package is named;
    fused paths that are not siblings.

    `dtype`, as safetensors names it, is what the tensors that the entry joins are stored in.  Whether it joins any is
    not known here.
    """

    kernels: Annotated[tuple[KernelRef, ...], BeforeValidator(parse_kernels)] = Field(
        alias="kernel",
        description="One kernel or a list, best first, all of one layout: IDs as in `kconvert list-kernels`, or a single "
        "kernel package, `./folder:ClassName` or `owner/repo:ClassName`.",
    )
    devices: Annotated[tuple[str, ...], BeforeValidator(parse_devices)] | None = Field(
        None,
        alias="for",
        description="`cpu`, `cuda` or `npu`, one or a list: the entry is used with `--device` and one of these only. Without it, "
        "or with all of them, it is always used.",
    )
    replace: Target | None = Field(
        None, description="The modules that get the layout, one by one. An entry has either `replace` or `fuse`."
    )
    fuse: tuple[Target, ...] | None = Field(
        None,
        description="Two or more sibling modules, in the order in which they run, that become one module at the first "
        "path. Their paths differ in the last segment only.",
    )
    version: Annotated[int, Field(ge=1)] | None = Field(
        None, description="For one Hub package: its version, the branch `vN`; 1 without this key. Excludes `revision`."
    )
    revision: Annotated[str, AfterValidator(check_revision)] | None = Field(
        None, description="For one Hub package: a branch, tag or commit. Excludes `version`."
    )
    dtype: Annotated[str, AfterValidator(parse_dtype)] | None = Field(
        None,
        description="`bfloat16`, `float16` or `float32`: what the tensors that this entry joins are stored in. Without "
        "it, parts of different dtypes are an error.",
    )
    optional: bool = Field(
        False,
        description="`true` to take the modules of the class at the path where there are any, and to pass over others: "
        "for the dense layers that some mixtures of experts have. Without it, both are errors.",
    )
    trust_remote_code: bool = Field(
        False,
        description="`true` where the recipe's author trusts the code of the package. The machine has to agree: "
        "`--trust-kernel` or `--trust-remote-code`. Packages of `kernels-community` on the Hub need neither.",
    )

    @property
    def targets(self) -> tuple[Target, ...]:
        """The fused targets in pair order, or the single replaced one."""
        return self.fuse if self.fuse is not None else (self.replace,) if self.replace is not None else ()

    def is_for(self, device: str | None) -> bool:
        """Whether the entry is used for a device, or for none in particular."""
        return self.devices is None or set(self.devices) == set(DEVICES) or device in self.devices

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        self._check_kind()
        self._check_packages()
        self._check_pins()
        self._check_fusion()
        return self

    def _check_kind(self) -> None:
        if self.replace is not None and self.fuse is not None:
            raise RuleError("'replace' and 'fuse' exclude each other", fix="make two patch entries of it", at=("fuse",))
        if self.replace is None and self.fuse is None:
            raise RuleError("the patch entry names no modules", fix="add 'replace' (one module) or 'fuse' (siblings)")

    def _check_packages(self) -> None:
        packages = [ref for ref in self.kernels if ref.is_package]
        if packages and len(self.kernels) > 1:
            raise RuleError(
                f"package {packages[0].text!r} stands in a list with other kernels",
                fix="give the package a patch entry of its own; only built-in IDs can share one",
                at=("kernel", self.kernels.index(packages[0])),
            )
        if not packages and "trust_remote_code" in self.model_fields_set:
            raise RuleError(
                "'trust_remote_code' on an entry that names only built-in kernels",
                fix="remove it; it is for kernel packages",
                at=("trust_remote_code",),
            )

    def _check_pins(self) -> None:
        if self.version is not None and self.revision is not None:
            raise RuleError("'version' and 'revision' exclude each other", fix="keep one", at=("revision",))
        pinned = "version" if self.version is not None else "revision" if self.revision is not None else None
        if pinned and not (len(self.kernels) == 1 and self.kernels[0].kind == "hub"):
            raise RuleError(
                f"{pinned!r} beside {self._kernel_words()}",
                fix="remove it; it pins a single owner/repo:ClassName of the Hub",
                at=(pinned,),
            )

    def _kernel_words(self) -> str:
        if len(self.kernels) > 1:
            return "a list of kernels"
        only = self.kernels[0]
        return f"the {'local package' if only.kind == 'local' else 'built-in kernel'} {only.text!r}"

    def _check_fusion(self) -> None:
        if self.fuse is None:
            return
        if len(self.fuse) < 2:
            what = f"'fuse' needs two targets or more, not {len(self.fuse)}"
            raise RuleError(what, fix="use 'replace' for one module", at=("fuse",))
        first, seen = self.fuse[0].path, set[str]()
        for number, target in enumerate(self.fuse):
            path, at = target.path, ("fuse", number, "path")
            if path.last is None:
                raise RuleError(
                    f"fused path {path.text!r} does not end in a literal name", fix="name the child module", at=at
                )
            if path.parent != first.parent:
                raise RuleError(
                    f"fused path {path.text!r} has another parent than {first.text!r}",
                    fix="fuse only siblings: the same path up to the last segment",
                    at=at,
                )
            if path.last in seen:
                raise RuleError(f"fused path {path.text!r} appears twice", fix="name each sibling once", at=at)
            seen.add(path.last)


class Recipe(_Placed):
    """A whole recipe, with the text that it was read from."""

    recipe: Annotated[Literal[1], BeforeValidator(check_version)] = Field(
        description="The version of the recipe format: `1`."
    )
    name: Annotated[str, AfterValidator(check_name)] = Field(
        description="A name of letters, digits, `.`, `_` and `-`; it is written into the manifest."
    )
    model_type: Annotated[tuple[str, ...], BeforeValidator(parse_model_types)] = Field(
        description="One or a list: the `model_type` values of config.json that the recipe may be applied to."
    )
    bake: bool = Field(
        False,
        description="`true` to store the tensors as the model holds them, whatever is patched: under module names, and "
        "joined as transformers joins them while loading. It is done in any case for types that need it; alone, with "
        "`patches: []`, it is all that is done.",
    )
    patches: tuple[Patch, ...] = Field(description="The patch entries; at least one, or none beside `bake: true`.")

    @model_validator(mode="after")
    def _check_patches(self) -> Self:
        if not self.patches and not self.bake:
            raise RuleError(
                "'patches' is an empty list",
                fix="add an entry that starts with '- kernel:', or bake: true",
                at=("patches",),
            )
        return self

    _text: str = PrivateAttr(default="")
    _path: Path | None = PrivateAttr(default=None)

    @property
    def text(self) -> str:
        """The file's text, verbatim."""
        return self._text

    @property
    def path(self) -> Path | None:
        """The file, or None where the recipe was parsed from text."""
        return self._path

    def keep_source(self, text: str, path: Path | None) -> None:
        """Remember where this recipe came from; the loader calls it once."""
        self._text, self._path = text, path
