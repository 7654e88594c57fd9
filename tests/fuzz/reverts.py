"""Fuzz target: a whole converted directory, as `revert` takes it.

The input is the manifest and the headers of the source in one JSON object; digests are made to fit, so that nothing ends
there.  Whatever comes in, either nothing is written and one line says why, or just the files that the manifest and the
index name, each a whole safetensors file, and never anything outside of the output.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from safetensors import safe_open

from kconvert.convert import apply_recipe
from kconvert.convert.revert import revert
from kconvert.errors import KconvertError
from kconvert.manifest import canonical_json, sha256_digest
from kconvert.names import MANIFEST_NAME, SOURCE_HEADERS_NAME
from tests.fuzz.checkpoints import write_model
from tests.fuzz.documents import damage, mutate, parse, write
from tests.fuzz.manifests import TOKENS, other_pieces, pieces_of
from tests.fuzz.target import Fault, Outcome, check_refusal

__all__ = ["RevertTarget"]


class RevertTarget:
    """Inputs are JSON: `{"manifest": ..., "headers": ...}`."""

    name = "revert"

    def __init__(self) -> None:
        base = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(dir=base if base.is_dir() else None)
        root = Path(self._folder.name)
        source = write_model(root / "source", num_shards=2)
        (source / "README.md").write_text("# model")
        self._converted = apply_recipe("qwen3", source, root / "converted", model_check=False).output
        self._output = root / "output"
        self._known = sorted(str(path) for path in root.rglob("*"))
        manifest = json.loads((self._converted / MANIFEST_NAME).read_bytes())
        headers = json.loads(gzip.decompress((self._converted / SOURCE_HEADERS_NAME).read_bytes()))
        self._seed = json.dumps({"manifest": manifest, "headers": headers}).encode()

    def make(self, rng: Random) -> bytes:
        """What a conversion wrote."""
        return self._seed

    def mutate(self, data: bytes, rng: Random) -> bytes:
        """Another structure, other pieces, another letter in a header, or other bytes."""
        tree = parse(data)
        if tree is None:
            return damage(data, rng)
        pieces = pieces_of(tree) if rng.random() < 0.4 else []
        if pieces:
            other_pieces(rng.choice(pieces), rng)
        elif rng.random() < 0.3:
            return _other_header(data, rng)
        else:
            tree = mutate(tree, rng, TOKENS)
        return write(tree, rng, may_break=False)

    def check(self, data: bytes) -> Outcome:
        """By `revert`."""
        value = _sealed(data)
        if value is None:
            return "refused"
        manifest, headers = value
        (self._converted / MANIFEST_NAME).write_bytes(manifest)
        (self._converted / SOURCE_HEADERS_NAME).write_bytes(headers)
        try:
            result = revert(self._converted, self._output)
        except KconvertError as error:
            check_refusal(error, error.exit_code)
            if error.exit_code not in (4, 5, 6):
                raise Fault(f"exit code {error.exit_code}: {str(error)[:300]}") from error
            self._check_nothing_else()
            return "refused"
        prepared = result.prepared
        expected = {*prepared.files, *prepared.sidecars, *([prepared.index] if prepared.index else [])}
        found = {str(path.relative_to(self._output)) for path in self._output.rglob("*") if not path.is_dir()}
        if found != expected or any(path.is_symlink() for path in self._output.rglob("*")):
            raise Fault(f"{sorted(found ^ expected)} differ")
        for name in prepared.files:
            with safe_open(str(self._output / name), framework="np"):
                pass
        shutil.rmtree(self._output)
        self._check_nothing_else()
        return "accepted"

    def _check_nothing_else(self) -> None:
        found = sorted(str(path) for path in Path(self._folder.name).rglob("*"))
        if found != self._known:
            raise Fault(f"{sorted({*found} ^ {*self._known})} in the file system")


def _other_header(data: bytes, rng: Random) -> bytes:
    """The text of one header of the source, or of its index, as the other targets change theirs."""
    try:
        value = json.loads(data)
        files = value["headers"]["files"]
        name = rng.choice(sorted(files))
        index = value["headers"]["index"]
        where, key = (index, "text") if index and rng.random() < 0.3 else (files, name)
        text = str(where[key]).encode("utf-8", "surrogatepass")
        tree = parse(text)
        made = damage(text, rng) if tree is None or rng.random() < 0.3 else write(mutate(tree, rng), rng)
        where[key] = made.decode("utf-8", "replace")
        return json.dumps(value).encode()
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return damage(data, rng)


def _sealed(data: bytes) -> tuple[bytes, bytes] | None:
    """Manifest and compressed headers, with digests that fit as far as there is a place for them."""
    try:
        value: Any = json.loads(data)
        manifest, headers = value["manifest"], value["headers"]
        packed = gzip.compress(json.dumps(headers, ensure_ascii=False).encode(), mtime=0, compresslevel=1)
        manifest["source_headers_digest"] = sha256_digest(packed)
        for record in manifest["source_files"]:
            text = headers["files"].get(record["name"])
            if isinstance(text, str):
                record["header_digest"] = sha256_digest(text.encode())
        manifest.pop("digest", None)
        return canonical_json({**manifest, "digest": sha256_digest(canonical_json(manifest))}), packed
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None
