"""Which model classes of the installed transformers a conversion mapping could apply to.

A model type stands for the class that a published checkpoint of it names in `architectures`: transformers' own table
of classes for pretraining comes first, then those for generation, then the other heads, the bare model last.  Some
mappings belong to a class and not to a type (`Dinov2Backbone`); each of these classes is a subject of its own.  Whether
a mapping really applies is seen on the built model alone, since nested sub-models bring mappings of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Subject", "has_mapping", "mapped_keys", "may_have_mapping", "subjects", "unnamed_types"]

_FIRST = (
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
)
"""Tables of transformers, the first that names a type counts; then the others as they stand; `_LAST` at the end."""
_LAST = (
    "MODEL_FOR_BACKBONE_MAPPING_NAMES",
    "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)


@dataclass(frozen=True, order=True)
class Subject:
    """A class to try.

    Attributes:
        model_type: as its config names it.
        class_name: of transformers.
    """

    model_type: str
    class_name: str

    @property
    def label(self) -> str:
        """Both names in one word, as the command line takes it."""
        return f"{self.model_type}:{self.class_name}"

    @classmethod
    def from_label(cls, label: str) -> Subject:
        """The subject of a `label`."""
        model_type, _, class_name = label.partition(":")
        return cls(model_type, class_name)


def mapped_keys() -> frozenset[str]:
    """The model types and class names for which transformers has a mapping, `legacy` left out."""
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("legacy")  # fills the table
    return frozenset(conversion_mapping._checkpoint_conversion_mapping_cache or ()) - {"legacy"}


def has_mapping(model: Any) -> bool:
    """Whether more than transformers' legacy rules apply to a built model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))


def may_have_mapping(subject: Subject) -> bool:
    """Whether transformers has a mapping for the class, its type or that of a sub-config: for what cannot be built."""
    import transformers

    names = {subject.model_type, subject.class_name}
    try:
        pending = [getattr(transformers, subject.class_name).config_class]
    except (AttributeError, ImportError):
        pending = []
    while pending:
        config_class = pending.pop()
        names.add(config_class.model_type)
        subs = (getattr(config_class, "sub_configs", None) or {}).values()
        pending += [sub for sub in subs if getattr(sub, "model_type", None) not in {None, *names}]
    return bool(names & mapped_keys())


def subjects() -> tuple[Subject, ...]:
    """The class of every model type that has one, and the further classes that have a mapping of their own."""
    found = {Subject(model_type, name) for model_type, name in _published().items()}
    named = {subject.class_name for subject in found}
    for name in mapped_keys() - named:
        model_type = _model_type(name)
        if model_type is not None:
            found.add(Subject(model_type, name))
    return tuple(sorted(found))


def unnamed_types() -> tuple[str, ...]:
    """What transformers has a mapping for and names no model class for: a part of other models, or nothing."""
    known = {name for subject in subjects() for name in (subject.model_type, subject.class_name)}
    return tuple(sorted(mapped_keys() - known))


def _published() -> dict[str, str]:
    """Model type to the class that a published checkpoint names."""
    from transformers.models.auto import modeling_auto

    tables = [name for name in vars(modeling_auto) if name.startswith("MODEL_") and name.endswith("_NAMES")]
    middle = [name for name in tables if name not in _FIRST and name not in _LAST]
    chosen: dict[str, str] = {}
    for table in (*_FIRST, *middle, *_LAST):
        for model_type, names in getattr(modeling_auto, table, {}).items():
            name = names if isinstance(names, str) else names[0]
            if model_type not in chosen or (not _is_own(model_type, chosen[model_type]) and _is_own(model_type, name)):
                chosen[model_type] = name
    return chosen


def _is_own(model_type: str, class_name: str) -> bool:
    """Whether a class is defined for the model type, and not for another that the type borrows it from."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    module = transformers._class_to_module.get(class_name, "")  # type: ignore[attr-defined]
    return str(module).split(".")[1:2] == [model_type_to_module_name(model_type)]


def _model_type(name: str) -> str | None:
    """The model type of a class of transformers; None where there is no such class, or it lacks a package."""
    import transformers

    try:
        cls = getattr(transformers, name, None)
        return getattr(getattr(cls, "config_class", None), "model_type", None)
    except ImportError:
        return None
