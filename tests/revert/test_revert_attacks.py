"""S1, S2, S3: a converted directory that was damaged, or put together to do harm.  Nothing of it is written."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from kconvert.convert import prepare_revert, revert
from kconvert.errors import KconvertError
from kconvert.manifest import Manifest, OmittedRecord, SourceFileRecord, sha256_digest
from kconvert.names import MANIFEST_NAME, SINGLE_NAME, SOURCE_HEADERS_NAME
from tests.runtime.pairs import edit_manifest
from tests.support import (
    RawTensor,
    convert,
    qwen3_config,
    qwen3_tensors,
    raw,
    read_raw,
    write_checkpoint,
    write_recipe,
    write_safetensors,
)

Headers: TypeAlias = dict[str, Any]
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
GATE, NORM = "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"
PACKED = "model.layers.0.mlp.gate_up_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted directory of two source files and some sidecars; only read."""
    folder = tmp_path_factory.mktemp("made")
    names = list(qwen3_tensors())
    source = write_checkpoint(folder / "source", qwen3_tensors(), qwen3_config(), [names[::2], names[1::2]])
    (source / "tokenizer.json").write_text('{"a": 1}')
    (source / "sub").mkdir()
    (source / "sub" / "x.txt").write_text("x")
    return convert("qwen3", source, folder / "converted", model_check=False).output


@pytest.fixture
def converted(made: Path, tmp_path: Path) -> Path:
    """The same, to be damaged; its headers of the source are kept beside it."""
    copied = Path(shutil.copytree(made, tmp_path / "in" / "converted"))
    shutil.copy(made / SOURCE_HEADERS_NAME, copied.parent)
    return copied


def refused(converted: Path, code: int, *words: str) -> KconvertError:
    """A revert that must fail with this exit code and one line that holds `words`, and leave nothing behind."""
    before = sorted(converted.parent.parent.rglob("*"))
    with pytest.raises(KconvertError) as caught:
        revert(converted, converted.parent.parent / "back")
    assert (caught.value.exit_code, [word for word in words if word not in str(caught.value)]) == (code, []), str(
        caught.value
    )
    assert sorted(converted.parent.parent.rglob("*")) == before
    return caught.value


def read_headers(converted: Path) -> Headers:
    found: Headers = json.loads(gzip.decompress((converted / SOURCE_HEADERS_NAME).read_bytes()))
    return found


def put_bytes(converted: Path, data: bytes) -> None:
    """Other headers of the source, under a digest that fits."""
    (converted / SOURCE_HEADERS_NAME).write_bytes(data)
    edit_manifest(converted, lambda manifest: replace(manifest, source_headers_digest=sha256_digest(data)))


def put_text(converted: Path, text: str | bytes) -> None:
    put_bytes(converted, gzip.compress(text.encode() if isinstance(text, str) else text))


def put(converted: Path, change: Callable[[Headers], object]) -> None:
    value = read_headers(converted)
    change(value)
    put_text(converted, json.dumps(value))


def put_header(converted: Path, name: str, change: Callable[[str], str], *, size_bytes: int | None = None) -> None:
    """Another header for one file, with every digest remade, and the size where the file gets another."""
    text = change(read_headers(converted)["files"][name])
    put(converted, lambda value: value["files"].update({name: text}))

    def record(old: SourceFileRecord) -> SourceFileRecord:
        if old.name != name:
            return old
        grown = len(text.encode()) - len(json_of(converted, name).encode())
        return SourceFileRecord(name, old.size_bytes + grown if size_bytes is None else size_bytes, digest)

    digest = sha256_digest(text.encode())
    edit_manifest(converted, lambda manifest: replace(manifest, source_files=tuple(map(record, manifest.source_files))))


def json_of(converted: Path, name: str) -> str:
    """The header of a source's file as it was, whatever was put in its place."""
    text: str = read_headers(converted.parent)["files"][name]
    return text


def rename_file(manifest: Manifest, old: str, new: str) -> Manifest:
    def renamed(name: str) -> str:
        return new if name == old else name

    tensors = tuple(
        replace(
            record,
            parts=tuple(
                replace(part, origins=tuple(replace(origin, file=renamed(origin.file)) for origin in part.origins))
                for part in record.parts
            ),
        )
        for record in manifest.tensors
    )
    files = tuple(replace(file, name=renamed(file.name)) for file in manifest.source_files)
    return replace(manifest, tensors=tensors, source_files=files)


# --- names ------------------------------------------------------------------------------------------------

BAD_NAMES = [
    "../x.safetensors",
    "/tmp/x.safetensors",
    "a/../../x.safetensors",
    "a\0.safetensors",
    "a\\b.safetensors",
    "",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_file_name_that_leaves_the_directory(converted: Path, name: str) -> None:
    """In the headers, where the manifest has another; and in both, with every digest remade."""
    put(converted, lambda value: value["files"].update({name: value["files"].pop(ONE)}))
    refused(converted, 4, "holds headers of other files than the manifest")
    edit_manifest(converted, lambda manifest: rename_file(manifest, ONE, name))
    refused(converted, 4, MANIFEST_NAME, "file name")


@pytest.mark.parametrize("name", [*BAD_NAMES, "config.json", "kconvert_manifest.json", "x.index.json", 7, None])
def test_an_index_name_that_is_none(converted: Path, name: object) -> None:
    put(converted, lambda value: value["index"].update(name=name))
    refused(converted, 4, SOURCE_HEADERS_NAME, "file name", "is refused")


def test_a_weight_file_under_the_name_of_something_else(converted: Path) -> None:
    """What is written as weights is called so; nothing can be smuggled in as code or config."""
    put(converted, lambda value: value["files"].update({"run.py": value["files"].pop(ONE)}))
    edit_manifest(converted, lambda manifest: rename_file(manifest, ONE, "run.py"))
    refused(converted, 4, "file name 'run.py' is refused: no name of a .safetensors file")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v["files"].pop(ONE), "other files than the manifest"),
        (lambda v: v["files"].update({"x.safetensors": "{}"}), "other files than the manifest"),
        (lambda v: v.update(files={}), "other files than the manifest"),
        (lambda v: v.update(files=[]), "does not hold just files and an index"),
        (lambda v: v.update(more=1), "does not hold just files and an index"),
        (lambda v: v.pop("index"), "does not hold just files and an index"),
        (lambda v: v.update(index=None), "holds no index, and 2 headers"),
        (lambda v: v.update(index="{}"), "its index is no name and text"),
        (lambda v: v["index"].update(more=""), "its index is no name and text"),
        (lambda v: v["index"].pop("text"), "its index is no name and text"),
        (lambda v: v["index"].update(text=None), "a header or the index is no text"),
        (lambda v: v["files"].update({ONE: 1}), "a header or the index is no text"),
        (lambda v: v["files"].update({ONE: None}), "a header or the index is no text"),
        (lambda v: v["files"].update({ONE: "\ud800"}), "a header or the index is no text"),
        (lambda v: v["files"].update({ONE: "{}"}), f"the header of {ONE} is not that of the source"),
        (lambda v: v["files"].update({ONE: v["files"][TWO], TWO: v["files"][ONE]}), "its digest is another one"),
        (lambda v: v["index"].update(text="{"), "index is not valid JSON"),
        (lambda v: v["index"].update(text='{"weight_map": {"a": "x.safetensors"}}'), "its index names other files"),
        (lambda v: v["index"].update(text='{"weight_map": {"a": "../x.safetensors"}}'), "is refused"),
        (lambda v: v["index"].update(text='{"weight_map": {}, "weight_map": {}}'), "duplicate key 'weight_map'"),
        (
            lambda v: v["index"].update(text=v["index"]["text"].replace(f'"{NORM}"', '"x"')),
            "maps 'x' to model-0000",
        ),
    ],
)
def test_headers_of_another_form(converted: Path, change: Callable[[Headers], object], words: str) -> None:
    put(converted, change)
    refused(converted, 4, SOURCE_HEADERS_NAME, words, "get the directory again")


# --- the file itself --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "ends early"),
        (lambda data: data[: len(data) // 2], "ends early"),
        (lambda data: b"", "ends early"),
        (lambda data: data + b"\0", "holds something after its end"),
        (lambda data: data + data, "holds something after its end"),
        (lambda data: data + b"x" * (2 << 20), "holds something after its end"),
        (lambda data: b"x" + data, "is no gzip file"),
        (lambda data: zlib.compress(gzip.decompress(data)), "is no gzip file"),
        (lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:], "is no gzip file, or a damaged one"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "is no gzip file, or a damaged one"),
        (lambda data: gzip.compress(b"\xff\xfe"), "not valid JSON"),
        (lambda data: gzip.compress(b"[]"), "not a JSON object"),
        (lambda data: gzip.compress(b'{"files": {}, "files": {}}'), "duplicate key 'files'"),
        (lambda data: gzip.compress(b'{"files": ' + b"[" * 90 + b"}"), "not valid JSON"),
        (lambda data: gzip.compress(b'{"files": ' + b"[" * 10_000), "holds more than headers and an index"),
        (lambda data: gzip.compress(gzip.decompress(data) + b" " * 1000), "holds more than headers and an index"),
        (lambda data: gzip.compress(b'{"files": [' + b"{}," * 5000 + b"0]}"), "holds more than headers and an index"),
    ],
)
def test_no_gzip_of_headers(converted: Path, change: Callable[[bytes], bytes], words: str) -> None:
    """Also where the manifest was remade for it."""
    data = change((converted / SOURCE_HEADERS_NAME).read_bytes())
    put_bytes(converted, data)
    refused(converted, 4, SOURCE_HEADERS_NAME, words)


def test_something_behind_the_gzip_file_that_is_read_for_itself(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (converted / SOURCE_HEADERS_NAME).read_bytes()
    monkeypatch.setattr("kconvert.convert.source_headers._BLOCK_BYTES", len(data))
    prepare_revert(converted)
    put_bytes(converted, data + b"x")
    refused(converted, 4, "holds something after its end")


def test_headers_that_the_manifest_does_not_name(converted: Path) -> None:
    path = converted / SOURCE_HEADERS_NAME
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=1))
    refused(converted, 4, "its digest is another one")
    path.unlink()
    refused(converted, 4, SOURCE_HEADERS_NAME, "is missing")
    os.mkfifo(path)
    refused(converted, 4, SOURCE_HEADERS_NAME, "is not a regular file")
    edit_manifest(converted, lambda manifest: replace(manifest, source_headers=None, source_headers_digest=None))
    refused(converted, 4, "the source's headers were not kept")


def bomb(num_bytes: int, text: bytes) -> bytes:
    """A gzip file that unpacks to so many bytes, out of one block again and again."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    head = packer.compress(b'{"files": "') + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(text * ((1 << 20) // len(text))) + packer.flush(zlib.Z_FULL_FLUSH)
    return head + block * (num_bytes >> 20)


PROBE = """
import sys
from pathlib import Path
from kconvert.convert import prepare_revert
from kconvert.convert.memory import peak_rss_bytes
before = peak_rss_bytes()
try:
    prepare_revert(Path(sys.argv[1]))
except Exception as error:
    print(type(error).__name__, error)
print(peak_rss_bytes() - before)
"""


def test_a_gzip_bomb_is_never_in_memory(converted: Path) -> None:
    """Three gigabytes out of three megabytes."""
    put_bytes(converted, bomb(3 << 30, b" "))
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(converted)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    text, grown = done.stdout.splitlines()
    assert "unpacks to more than the 536870912 bytes allowed" in text
    assert int(grown) < 64 << 20


def test_other_json_is_not_even_parsed(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and lists take many times the memory of their text."""
    put_bytes(converted, gzip.compress(b'{"files": {"a": [' + b"0," * 200_000 + b"0]}}", compresslevel=1))
    parsed: list[bytes] = []
    monkeypatch.setattr("kconvert.convert.source_headers.parse_json_object", lambda raw, **more: parsed.append(raw))
    refused(converted, 4, "holds more than headers and an index")
    assert parsed == []


# --- headers of the source --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace('"F32"', '"F33"', 1), "unknown dtype 'F33'"),
        (lambda text: text.replace("[0, ", "[1, ", 1), "needs"),
        (lambda text: text.replace('"shape"', '"dtype"', 1), "duplicate key 'dtype'"),
        (lambda text: text.replace('"shape"', '"shape", "x": 1, "y"', 1), "not valid JSON"),
        (lambda text: " " + text, "does not begin with '{'"),
        (lambda text: text + "x", "not valid JSON"),
        (lambda text: "{}", "longer than its header says"),
        (lambda text: text.replace('{"format": "pt"}', '{"format": 1}'), "__metadata__ is not an object of strings"),
        (lambda text: text.replace('"__metadata__"', f'"{NORM}"'), "duplicate key"),
        (lambda text: text.replace(NORM, "model.norm.other"), "which does not hold it"),
    ],
)
def test_a_header_that_safetensors_would_refuse(converted: Path, change: Callable[[str], str], words: str) -> None:
    """With every digest remade; the size grows with the header."""
    name = ONE if NORM in read_headers(converted)["files"][ONE] else TWO
    put_header(converted, name, change)
    refused(converted, 4, name, words)


def test_a_header_for_a_file_of_another_size(converted: Path) -> None:
    size = len(json_of(converted, ONE)) + 8
    for size_bytes, words in ((0, "shorter"), (size, "shorter"), (2**62, "longer")):
        put_header(converted, ONE, lambda text: text, size_bytes=size_bytes)
        refused(converted, 4, ONE, words)


def test_a_header_that_is_another_tensors(converted: Path) -> None:
    """A good header, and an index that agrees: the manifest tells other shapes, dtypes, files and names."""
    for old, new in (('"F32", "shape": [8]', '"I32", "shape": [8]'), ('"shape": [12, 8]', '"shape": [8, 12]')):
        put_header(converted, ONE, lambda text, old=old, new=new: text.replace(old, new))  # type: ignore[misc]
        refused(converted, 4, "the source's headers do not")
        put_header(converted, ONE, lambda text: json_of(converted, ONE))
    prepare_revert(converted)
    names = json_of(converted, ONE)
    first = next(name for name in json.loads(names) if name != "__metadata__")
    put_header(converted, ONE, lambda text: text.replace(f'"{first}"', '"another"'))
    put(converted, lambda v: v["index"].update(text=v["index"]["text"].replace(f'"{first}"', '"another"')))
    refused(converted, 4, f"says that {first!r} was")


def test_a_tensor_that_the_manifest_does_not_place(converted: Path) -> None:
    data_bytes = max(v["data_offsets"][1] for k, v in json.loads(json_of(converted, ONE)).items() if k[0] != "_")
    extra = f', "more": {{"dtype": "U8", "shape": [0], "data_offsets": [{data_bytes}, {data_bytes}]}}}}'
    put_header(converted, ONE, lambda text: text.rstrip(" ")[:-1] + extra)
    refused(converted, 4, "does not say where 'more' went")


# --- manifest, weights and sidecars ------------------------------------------------------------------------


def test_a_manifest_edited_by_hand(converted: Path) -> None:
    path = converted / MANIFEST_NAME
    path.write_text(path.read_text().replace('"concatenate(0)"', '"concatenate(1)"', 1))
    refused(converted, 4, MANIFEST_NAME, "it was edited or damaged")
    path.unlink()
    refused(converted, 4, f"no {MANIFEST_NAME} here")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(PACKED), f"tensor {PACKED!r} is absent in the files"),
        (lambda t: t.update(more=raw(torch.zeros(3))), "tensor 'more' is F32 [3] in the files and absent"),
        (lambda t: t.update({PACKED: raw(torch.zeros(8, 24))}), "is F32 [8, 24] in the files and F32 [24, 8] in the"),
        (
            lambda t: t.update({PACKED: replace(t[PACKED], dtype="I32")}),
            "is I32 [24, 8] in the files and F32 [24, 8] in the manifest (1 differ)",
        ),
    ],
)
def test_weights_that_are_not_the_manifests(
    converted: Path, change: Callable[[dict[str, RawTensor]], object], words: str
) -> None:
    path = next(path for path in sorted(converted.glob("*.safetensors")) if PACKED in read_raw(converted, path.name))
    tensors = read_raw(converted, path.name)
    change(tensors)
    write_safetensors(path, tensors)
    refused(converted, 4, words)


def test_a_shard_that_is_missing_or_cut(converted: Path) -> None:
    path = sorted(converted.glob("*.safetensors"))[0]
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    refused(converted, 4, path.name, "convert the checkpoint again")
    path.unlink()
    refused(converted, 4, path.name, "is missing")
    path.symlink_to("nowhere")
    refused(converted, 4, path.name, "is a broken link")


@pytest.mark.parametrize("name", ["model.kconvert-00001-of-00002.safetensors", "tokenizer.json"])
def test_a_file_that_changes_before_it_is_copied(converted: Path, tmp_path: Path, name: str) -> None:
    path = converted / name

    def touch(prepared: object) -> None:
        os.utime(path, ns=(1, 1))

    with pytest.raises(KconvertError, match="has changed since its header was read"):
        revert(converted, tmp_path / "back", on_prepared=touch)
    assert [item.name for item in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "sub/x.txt"])
def test_a_sidecar_that_was_changed(converted: Path, name: str) -> None:
    path = converted / name
    path.write_bytes(path.read_bytes().replace(b"1", b"2").replace(b"x", b"y"))
    refused(converted, 5, name, "is not what it was when kconvert wrote it; put the original file there")
    path.unlink()
    refused(converted, 4, name, "No such file")
    os.mkfifo(path)
    refused(converted, 4, name, "is not a regular file")


def test_a_sidecar_that_is_a_link(converted: Path, tmp_path: Path) -> None:
    """S2: out of the directory is refused, even where the content is right; into it, as in a cache, is followed."""
    path = converted / "tokenizer.json"
    (tmp_path / "in" / "elsewhere.json").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to("../elsewhere.json")
    refused(converted, 4, "tokenizer.json", "lies outside")
    path.unlink()
    (converted / "blob").write_text('{"a": 1}')
    path.symlink_to("blob")
    revert(converted, tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"a": 1}'
    assert not (tmp_path / "back" / "tokenizer.json").is_symlink()


def test_a_directory_in_a_hub_cache(converted: Path, tmp_path: Path) -> None:
    """S2: every file is a link to a blob."""
    repo = tmp_path / "models--a--b"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "abc"
    for number, path in enumerate(path for path in sorted(converted.rglob("*")) if path.is_file()):
        link = snapshot / path.relative_to(converted)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, repo / "blobs" / str(number))
        link.symlink_to(repo / "blobs" / str(number))
    revert(converted, tmp_path / "one")
    revert(snapshot, tmp_path / "two")
    for path in (tmp_path / "one").rglob("*"):
        other = tmp_path / "two" / path.relative_to(tmp_path / "one")
        assert path.is_dir() or (other.read_bytes() == path.read_bytes() and not other.is_symlink())


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "sub/model.safetensors",
        "kconvert_manifest.json",
        "model.kconvert.safetensors",
        "a.index.json",
    ],
)
def test_a_sidecar_that_apply_never_copies(converted: Path, name: str) -> None:
    """Else a directory could bring pickles, or a manifest of its own, into the output."""
    if not (converted / name).exists():
        (converted / name).write_bytes(b"evil")
    digest = sha256_digest((converted / name).read_bytes())
    edit_manifest(
        converted,
        lambda manifest: replace(
            manifest, sidecars=(*manifest.sidecars, name), sidecar_digests={**manifest.sidecar_digests, name: digest}
        ),
    )
    refused(converted, 4, f"names {name!r} as a sidecar")


def test_a_sidecar_in_the_place_of_a_folder(converted: Path) -> None:
    edit_manifest(
        converted,
        lambda manifest: replace(
            manifest,
            sidecars=(*manifest.sidecars, "sub"),
            sidecar_digests={**manifest.sidecar_digests, "sub": sha256_digest(b"")},
        ),
    )
    refused(converted, 4, "converted/sub: ")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a\0b"])
def test_a_sidecar_name_that_leaves_the_directory(converted: Path, name: str) -> None:
    edit_manifest(
        converted,
        lambda manifest: replace(
            manifest,
            sidecars=(*manifest.sidecars, name),
            sidecar_digests={**manifest.sidecar_digests, name: sha256_digest(b"")},
        ),
    )
    refused(converted, 4, "file name")


def test_names_of_what_was_omitted_are_only_shown(converted: Path, tmp_path: Path) -> None:
    edit_manifest(converted, lambda manifest: replace(manifest, omitted=(OmittedRecord("../../x", "\x1b[2J"),)))
    result = revert(converted, tmp_path / "back")
    assert [(item.name, item.reason) for item in result.prepared.not_restored] == [
        ("../../x", "was not brought over: \x1b[2J")
    ]


# --- what cannot be undone --------------------------------------------------------------------------------


def test_a_computed_tensor(converted: Path) -> None:
    def computed(manifest: Manifest) -> Manifest:
        tensors = [
            replace(
                record, exact=False, op="compute(Dequantise)", parts=tuple(replace(p, pieces=()) for p in record.parts)
            )
            if record.target == PACKED
            else record
            for record in manifest.tensors
        ]
        return replace(manifest, tensors=tuple(tensors))

    edit_manifest(converted, computed)
    refused(converted, 5, f"{PACKED!r} was made by compute(Dequantise), which has no exact inverse")


@pytest.mark.parametrize(
    ("dtype", "stored", "source"),
    [("bfloat16", "BF16", torch.float32), ("float16", "F16", torch.bfloat16), ("float32", "F32", torch.float64)],
)
def test_a_rounded_tensor(tmp_path: Path, dtype: str, stored: str, source: torch.dtype) -> None:
    tensors = {**qwen3_tensors(), GATE: qwen3_tensors()[GATE].to(source)}
    entry = '    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}\n'
    recipe = write_recipe(tmp_path / "r.yaml", f"  - kernel: cpu_fused_swiglu\n    dtype: {dtype}\n{entry}")
    checkpoint = write_checkpoint(tmp_path / "source", tensors, qwen3_config())
    output = convert(recipe, checkpoint, tmp_path / "in" / "converted", model_check=False).output
    refused(output, 5, f"to {stored} for 'model.layers.", "concatenate(0)", "which has no exact inverse")


def test_a_single_file_has_no_index(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", qwen3_tensors(), qwen3_config())
    output = convert("qwen3", source, tmp_path / "in" / "converted", model_check=False).output
    assert (output / SINGLE_NAME).is_file()
    assert read_headers(output)["index"] is None
    put(output, lambda v: v.update(index={"name": INDEX, "text": '{"weight_map": {"a": "b.safetensors"}}'}))
    refused(output, 4, "its index names other files")
