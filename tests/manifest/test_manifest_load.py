"""Reading a manifest: everything that an edited, damaged or hostile one may hold is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kconvert.errors import ManifestError
from kconvert.manifest import (
    LayoutRecord,
    Manifest,
    OmittedRecord,
    OriginRecord,
    PackageRecord,
    PartRecord,
    PatchRecord,
    SourceFileRecord,
    TensorRecord,
    canonical_json,
    load_manifest,
    sha256_digest,
)
from kconvert.names import MANIFEST_NAME
from kconvert.transforms import runs_of, whole

GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
GATE_UP = "model.layers.0.mlp.gate_up_proj.weight"


def part(name: str, file: str, piece: tuple[int, ...], *, shape: tuple[int, ...] = (12, 8)) -> PartRecord:
    """A part that is a tensor of the same name in a file, whole; `piece` says where it stands in the target."""
    return PartRecord(name, shape, (piece,), (OriginRecord(name, file, "F32", shape, (whole_piece(shape),)),))


def whole_piece(shape: tuple[int, ...]) -> tuple[int, ...]:
    return whole("any", shape).pieces[0].numbers()


MANIFEST = Manifest(
    kconvert_version="0.1.0",
    transformers_version="5.22.2",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config_digest=sha256_digest(b"{}"),
    recipe_name="qwen3",
    recipe_text="recipe: 1\nname: qwen3  # größer\n",
    device=None,
    devices=("cpu", "cuda", "npu"),
    view_devices=(),
    model_checked=True,
    patches=(
        PatchRecord(
            "replace",
            ("Qwen3MLP",),
            ("model.layers.*.mlp",),
            (("model.layers.0.mlp",),),
            LayoutRecord("MineLayout", 1, PackageRecord("./mine:Mine", None, "sha256:" + 64 * "0", "Mine")),
            ("./mine:Mine",),
            {"Qwen3RMSNorm": {"offset": 0.0, "cast_first": True}},
        ),
    ),
    tensors=(
        TensorRecord(
            GATE_UP,
            "F32",
            (24, 8),
            "concatenate(0)",
            0,
            (part(GATE, "sub/a.safetensors", (0, 0, 96, 1, 1)), part(UP, "model.safetensors", (0, 96, 96, 1, 1))),
        ),
        TensorRecord("scale", "F32", (), "copy", None, (part("scale", "model.safetensors", (0, 0), shape=()),)),
        TensorRecord(
            "none", "F32", (0, 3), "copy", None, (part("none", "model.safetensors", (0, 0, 0, 0, 0), shape=(0, 3)),)
        ),
    ),
    carried=("scale", "none"),
    omitted=(OmittedRecord("pytorch_model.bin", "pickle"),),
    sidecars=("config.json",),
    sidecar_digests={"config.json": "sha256:" + 64 * "0"},
    weight_files=("model.kconvert.safetensors",),
    source_files=(SourceFileRecord("sub/a.safetensors", 100, sha256_digest(b"a")),),
    source_headers="kconvert_source_headers.json.gz",
    written_by="apply",
    digests=None,
    source_headers_digest=sha256_digest(b"h"),
)


def write(directory: Path, value: Any, *, seal: bool = True) -> None:
    """`value` as a manifest, with a digest that fits unless `seal` is off."""
    if seal:
        value.pop("digest", None)
        value["digest"] = sha256_digest(canonical_json(value))
    (directory / MANIFEST_NAME).write_bytes(canonical_json(value))


def body() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MANIFEST.to_bytes())
    return found


def expect_refused(directory: Path, *words: str) -> None:
    with pytest.raises(ManifestError) as caught:
        load_manifest(directory)
    text = str(caught.value)
    assert [word for word in words if word not in text] == [], text
    assert caught.value.exit_code == 4
    assert str(directory) in text


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(MANIFEST.to_bytes())
    assert load_manifest(tmp_path) == MANIFEST
    assert load_manifest(tmp_path).to_bytes() == MANIFEST.to_bytes()


def test_the_digest_covers_everything_else() -> None:
    value = body()
    digest = value.pop("digest")
    assert digest == sha256_digest(canonical_json(value))


def test_no_manifest(tmp_path: Path) -> None:
    expect_refused(tmp_path, f"no {MANIFEST_NAME} here", "`kconvert apply`")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"schema": 2} {}', b'{"schema": NaN}'],
    ids=lambda content: repr(content[:12]),
)
def test_no_json_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    expect_refused(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        '{"schema": 2, "x": NaN}',
        '{"schema": 2, "model_type": "\\ud800"}',
        '{"schema": 2, "x": %s1%s}' % ("[" * 900, "]" * 900),
    ],
    ids=["nan", "surrogate", "deep"],
)
def test_json_that_has_no_canonical_form(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(content)
    expect_refused(tmp_path)


def test_a_manifest_beyond_all_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = MANIFEST.to_bytes()
    (tmp_path / MANIFEST_NAME).write_bytes(data)
    monkeypatch.setattr("kconvert.manifest.schema._LIMIT_BYTES", len(data) - 1)
    with pytest.raises(ManifestError) as caught:
        load_manifest(tmp_path)
    assert f"larger than the {len(data) - 1} bytes allowed" in caught.value.what


def test_a_directory_in_its_place(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).mkdir()
    expect_refused(tmp_path, "cannot be read")


def test_an_edit_shows(tmp_path: Path) -> None:
    content = MANIFEST.to_bytes()
    edited = content.replace(b'"model_checked": true', b'"model_checked": false')
    assert edited != content
    (tmp_path / MANIFEST_NAME).write_bytes(edited)
    expect_refused(tmp_path, "its digest does not fit its content")


@pytest.mark.parametrize("digest", [None, "", "sha256:", 7, ["x"]])
def test_another_digest(tmp_path: Path, digest: object) -> None:
    write(tmp_path, {**body(), "digest": digest}, seal=False)
    expect_refused(tmp_path, "its digest does not fit its content")


def test_a_missing_digest(tmp_path: Path) -> None:
    value = body()
    del value["digest"]
    write(tmp_path, value, seal=False)
    expect_refused(tmp_path, "its digest does not fit its content")


@pytest.mark.parametrize("schema", [0, 3, 5, "4", None])
def test_an_unknown_schema(tmp_path: Path, schema: object) -> None:
    write(tmp_path, {**body(), "schema": schema})
    expect_refused(tmp_path, f"has schema {schema!r}, this version reads 4")


@pytest.mark.parametrize("schema", [4.0])
def test_a_schema_that_only_equals_three(tmp_path: Path, schema: object) -> None:
    write(tmp_path, {**body(), "schema": schema})
    expect_refused(tmp_path, "schema")


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    content = MANIFEST.to_bytes().replace(b'"schema": 4', b'"schema": 4,\n "schema": 4')
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    expect_refused(tmp_path, "key 'schema' stands twice")


def _set(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """A change of one value; `path` is dotted, with numbers for items of lists."""

    def change(manifest: dict[str, Any]) -> None:
        *above, last = path.split(".")
        found: Any = manifest
        for part in above:
            found = found[int(part)] if isinstance(found, list) else found[part]
        found[int(last) if isinstance(found, list) else last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        ("surprise", 1, "manifest has unknown keys ['surprise']"),
        ("patches.0.import", "os", "manifest.patches[0] has unknown keys ['import']"),
        ("tensors.0.parts.1.offset", 3, "manifest.tensors[0].parts[1] has unknown keys ['offset']"),
        ("tensors.0.parts.1.origins.0.x", 3, "manifest.tensors[0].parts[1].origins[0] has unknown keys ['x']"),
        ("patches.0.layout.package.path", "/x", "layout.package has unknown keys ['path']"),
        ("model_type", None, "manifest.model_type is None, not str"),
        ("model_checked", 1, "manifest.model_checked is 1, not bool"),
        ("tensors.0.parts.0.shape.0", True, "manifest.tensors[0].parts[0].shape[0] is True, not int"),
        ("tensors.0.parts.0.pieces.0.2", 96.0, "manifest.tensors[0].parts[0].pieces[0][2] is 96.0, not int"),
        ("tensors.0.parts.0.pieces.0", 0, "manifest.tensors[0].parts[0].pieces[0] is no list"),
        ("tensors.0.shape.0", 24.0, "manifest.tensors[0].shape[0] is 24.0, not int"),
        ("tensors.0.parts", {}, "manifest.tensors[0].parts is no list"),
        ("tensors.0.parts.0", "x", "manifest.tensors[0].parts[0] is no object"),
        ("patches.0.layout", None, "manifest.patches[0].layout is no object"),
        ("patches.0.facts", [], "manifest.patches[0].facts is no object"),
        ("carried.0", 4, "manifest.carried[0] is 4, not str"),
        ("devices", "cpu", "manifest.devices is no list"),
        ("tensors.0.patch", "0", "manifest.tensors[0].patch is '0', not int"),
    ],
)
def test_other_keys_and_types(tmp_path: Path, path: str, value: object, what: str) -> None:
    changed = body()
    _set(path, value)(changed)
    write(tmp_path, changed)
    expect_refused(tmp_path, "malformed", what)


@pytest.mark.parametrize("key", ["tensors", "facts_of_patch", "schema_free"])
def test_a_missing_key(tmp_path: Path, key: str) -> None:
    value = body()
    if key == "tensors":
        del value["tensors"]
    elif key == "facts_of_patch":
        key = "facts"
        del value["patches"][0]["facts"]
    else:
        key = "omitted"
        del value["omitted"]
    write(tmp_path, value)
    expect_refused(tmp_path, "malformed", f"lacks ['{key}']")


@pytest.mark.parametrize("name", ["tpu", "cuda:0", "\x1b[2J"])
@pytest.mark.parametrize("place", ["device", "devices.0", "view_devices"])
def test_unknown_devices(tmp_path: Path, name: str, place: str) -> None:
    value = body()
    _set(place, [name] if place == "view_devices" else name)(value)
    write(tmp_path, value)
    expect_refused(tmp_path, f"unknown device {name!r}", "convert again")


@pytest.mark.parametrize("name", ["../evil.safetensors", "/abs/x", "a/../../x", "a\\x", "a\0b", "", "a//b", " a"])
@pytest.mark.parametrize("place", ["weight_files.0", "sidecars.0", "source_files.0.name"])
def test_unsafe_file_names(tmp_path: Path, name: str, place: str) -> None:
    value = body()
    _set(place, name)(value)
    write(tmp_path, value)
    expect_refused(tmp_path, f"file name {name!r} is".replace("\n", " "), "do not use this checkpoint")


@pytest.mark.parametrize("name", ["../evil.safetensors", "/abs/x", "a\\x"])
@pytest.mark.parametrize("place", ["source_headers", "tensors.0.parts.0.origins.0.file", "omitted.0.name"])
def test_unsafe_file_names_in_every_place_that_names_a_file(tmp_path: Path, name: str, place: str) -> None:
    value = body()
    _set(place, name)(value)
    write(tmp_path, value)
    if place == "omitted.0.name":  # a source may hold such a name; it is only shown, never opened
        assert load_manifest(tmp_path).omitted[0].name == name
    else:
        expect_refused(tmp_path, f"file name {name!r} is")


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        ("tensors.0.parts.0.pieces.0.2", 95, f"the parts of {GATE_UP!r} do not add up: the pieces do not fill it"),
        ("tensors.0.parts.0.pieces.0.0", 1, f"the parts of {GATE_UP!r} do not add up: [1, 0, 96, 1, 1] lies outside"),
        ("tensors.0.parts.1.pieces.0.1", 97, f"the parts of {GATE_UP!r} do not add up: [0, 97, 96, 1, 1] lies outside"),
        ("tensors.0.parts.0.pieces", [], f"the parts of {GATE_UP!r} do not add up"),
        ("tensors.0.parts.0.shape", [8, 11], f"the parts of {GATE_UP!r} do not add up"),
        ("tensors.0.parts.0.shape", [13, 8], f"the parts of {GATE_UP!r} do not add up"),
        ("tensors.0.shape", [23, 8], f"the parts of {GATE_UP!r} do not add up"),
        ("tensors.0.shape", [-24, -8], f"the parts of {GATE_UP!r} do not add up: a shape is negative"),
        ("tensors.0.parts.0.shape", [-12, -8], f"the parts of {GATE_UP!r} do not add up: a shape is negative"),
        (
            "tensors.0.parts.0.origins.0.shape",
            [-12, -8],
            f"the parts of {GATE_UP!r} do not add up: a shape is negative",
        ),
        ("tensors.0.parts", [], f"the parts of {GATE_UP!r} do not add up"),
        ("tensors.2.parts", [], "the parts of 'none' do not add up"),
        ("tensors.1.parts.0.pieces.0", [0, 0, 0, 0, 0], "the parts of 'scale' do not add up"),
        ("tensors.2.parts.0.pieces.0", [0, 0, 3, 1, 1], "the parts of 'none' do not add up"),
        ("tensors.0.parts.0.origins", [], f"the parts of {GATE_UP!r} do not add up"),
        ("tensors.0.parts.0.origins.0.pieces.0.2", 95, f"the parts of {GATE_UP!r} do not add up"),
        ("tensors.0.parts.0.origins.0.shape", [11, 8], f"the parts of {GATE_UP!r} do not add up"),
        ("tensors.0.parts.0.origins.0.shape", [13, 8], f"96 elements of {GATE!r} are used, of 104"),
        ("tensors.0.parts.0.pieces", [[0, 0, 48, 1, 1], [0, 48, 48, 1, 1]], f"an element of {GATE!r} is used twice"),
        ("tensors.0.parts.0.pieces.0", [0, 0, 48, 1, 2, 2, 0, 1], f"an element of {GATE!r} is used twice"),
        (
            "tensors.0.parts.0.origins.0.pieces",
            [[0, 0, 50, 1, 1], [48, 50, 46, 1, 1]],
            f"an element of {GATE!r} is used twice",
        ),
        ("tensors.0.patch", 1, "names patch 1"),
        ("tensors.0.patch", -1, "names patch -1"),
        ("patches.0.kind", "import", "is malformed"),
        ("patches.0.classes", ["Qwen3MLP", "Qwen3RMSNorm"], "is malformed"),
    ],
)
def test_contents_that_contradict_each_other(tmp_path: Path, path: str, value: object, what: str) -> None:
    changed = body()
    _set(path, value)(changed)
    write(tmp_path, changed)
    expect_refused(tmp_path, what)


@pytest.mark.parametrize(
    "piece",
    [
        [],
        [0],
        [0, 0, 96],
        [0, 0, 96, 1],
        [0, 0, 96, 1, -1],
        [0, 0, -96, 1, 1],
        [-1, 0, 96, 1, 1],
        [0, -1, 96, 1, 1],
        [0, 0, 12, 8, 8, 8, 1, 1],  # two dims that are one
        [0, 0, 8, 1, 1, 12, 8, 8],  # the smaller stride first
        [0, 0, 96, 1, 1, 1, 7, 7],  # a dim of a single step
        [0, 0, 96, 10**20, 1],
        [0, 0, 96, 1, 10**20],
    ],
)
def test_numbers_that_are_no_piece(tmp_path: Path, piece: list[int]) -> None:
    value = body()
    value["tensors"][0]["parts"][0]["pieces"][0] = piece
    write(tmp_path, value)
    expect_refused(tmp_path, f"the parts of {GATE_UP!r} do not add up")


def test_pieces_of_another_order_are_read(tmp_path: Path) -> None:
    """Gate and up row by row in turn: valid data, though no layout of ours."""
    value = body()
    for number, each in enumerate(value["tensors"][0]["parts"]):
        each["pieces"] = [[0, 8 * number, 12, 8, 16, 8, 1, 1]]
    write(tmp_path, value)
    made = load_manifest(tmp_path).tensors[0].arrangement()
    assert [run[:3] for run in runs_of(made.pieces)][:3] == [(0, 0, 8), (8, 0, 8), (16, 8, 8)]


def test_a_target_that_stands_twice(tmp_path: Path) -> None:
    value = body()
    value["tensors"].append(value["tensors"][0])
    write(tmp_path, value)
    expect_refused(tmp_path, "model.layers.0.mlp.gate_up_proj.weight", "twice")


def test_a_source_that_is_used_twice(tmp_path: Path) -> None:
    value = body()
    twice = value["tensors"][0]["parts"][0]
    value["tensors"][0]["parts"][1] = {**twice, "pieces": [[0, 96, 96, 1, 1]]}
    write(tmp_path, value)
    expect_refused(tmp_path, GATE, "192 elements", "of 96")


def test_a_source_whose_elements_are_not_all_used(tmp_path: Path) -> None:
    value = body()
    value["tensors"][0]["parts"][0]["pieces"] = [[0, 0, 48, 1, 1]]
    value["tensors"][0]["shape"] = [18, 8]
    value["tensors"][0]["parts"][1]["pieces"] = [[0, 48, 96, 1, 1]]
    write(tmp_path, value)
    expect_refused(tmp_path, GATE, "48 elements", "of 96")


def test_a_tensor_of_a_file_that_two_parts_are_made_of(tmp_path: Path) -> None:
    value = body()
    origin = value["tensors"][0]["parts"][0]["origins"][0]
    value["tensors"][0]["parts"][1]["origins"] = [origin]
    write(tmp_path, value)
    expect_refused(tmp_path, GATE, "192 elements", "of 96")


def test_a_part_in_several_targets_has_the_same_origins_in_all_of_them(tmp_path: Path) -> None:
    value = body()
    gate = value["tensors"][0]["parts"][0]
    for number, target in enumerate("ab"):
        half = {**gate, "pieces": [[48 * number, 0, 48, 1, 1]]}
        value["tensors"].append({**value["tensors"][0], "target": target, "shape": [6, 8], "parts": [half]})
    value["tensors"][0] = {**value["tensors"][0], "shape": [12, 8], "parts": value["tensors"][0]["parts"][1:]}
    value["tensors"][0]["parts"][0]["pieces"] = [[0, 0, 96, 1, 1]]
    write(tmp_path, value)
    assert [each.target for each in load_manifest(tmp_path).tensors] == [GATE_UP, "scale", "none", "a", "b"]
    value["tensors"][4]["parts"][0]["origins"] = [{**gate["origins"][0], "pieces": [[90, 0, 96, 1, 1]]}]
    write(tmp_path, value)
    expect_refused(tmp_path, f"{GATE!r} has other origins elsewhere")


def test_a_tensor_of_a_file_that_has_two_shapes(tmp_path: Path) -> None:
    value = body()
    origin = value["tensors"][0]["parts"][0]["origins"][0]
    value["tensors"][0]["parts"][1]["origins"] = [{**origin, "shape": [96]}]
    write(tmp_path, value)
    expect_refused(tmp_path, f"{GATE!r} has two shapes")
