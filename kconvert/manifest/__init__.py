"""The manifest: its schema, canonical form and digest."""

from kconvert.manifest.canonical import canonical_json, sha256_digest, unique_pairs
from kconvert.manifest.schema import (
    SCHEMA_VERSION,
    LayoutRecord,
    Manifest,
    OmittedRecord,
    OriginRecord,
    PackageRecord,
    PartRecord,
    PatchRecord,
    SourceFileRecord,
    TensorRecord,
    load_manifest,
)

__all__ = [
    "SCHEMA_VERSION",
    "LayoutRecord",
    "Manifest",
    "OmittedRecord",
    "OriginRecord",
    "PackageRecord",
    "PartRecord",
    "PatchRecord",
    "SourceFileRecord",
    "TensorRecord",
    "canonical_json",
    "load_manifest",
    "sha256_digest",
    "unique_pairs",
]
