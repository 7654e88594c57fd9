"""`verify --level bytes` on directories with one thing wrong: each is found, with the source and, where it can be, without."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kconvert.checkpoint import TensorEntry, read_header
from kconvert.cli import verify as cli_verify
from kconvert.cli.progress import Meter, Progress, bar_line
from kconvert.errors import CheckpointError, ManifestError
from kconvert.manifest import Manifest, PartRecord, TensorRecord, load_manifest
from kconvert.names import CONFIG_NAME, INDEX_NAME, MANIFEST_NAME, PARITY_NAME, SINGLE_NAME, SOURCE_HEADERS_NAME
from kconvert.parity import (
    BytesLevel,
    How,
    LogitsLevel,
    LogitsResult,
    ModuleResult,
    ModulesLevel,
    ParityReport,
    Result,
    Verdict,
    verify,
)
from kconvert.parity.threads import run_in_threads
from tests.parity.running import Capture, failing, run
from tests.runtime.pairs import edit_manifest
from tests.support import (
    RawTensor,
    bake_recipe,
    convert,
    qwen3_config,
    qwen3_tensors,
    raw,
    read_raw,
    save_tiny,
    write_checkpoint,
    write_recipe,
    write_safetensors,
)

LAYER = "model.layers.0"
GATE_UP, GATE, UP = (f"{LAYER}.mlp.{name}_proj.weight" for name in ("gate_up", "gate", "up"))
EXPERTS = "model.layers.0.mlp.experts"
SIDECARS = {"tokenizer.json": "{}", "notes/read me.txt": "hello"}

MODES = ("source", "digests", "both")
"""What the bytes are compared with."""


@dataclass(frozen=True)
class Case:
    """A source, and what was made of it with and without digests."""

    source: Path
    plain: Path
    digested: Path

    def copy(self, directory: Path, *, digests: bool = True) -> Path:
        return shutil.copytree(self.digested if digests else self.plain, directory)


def _make(source: Path, recipe: str | Path, **kw: Any) -> Case:
    for name, text in SIDECARS.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    plain = convert(recipe, source, source.with_name("plain"), **kw).output
    digested = convert(recipe, source, source.with_name("digested"), digests=True, **kw).output
    return Case(source, plain, digested)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Qwen3 in two shards; gate and up of layer 0 are in different ones."""
    tensors = qwen3_tensors()
    second = [name for name in tensors if "layers.1" in name or name in (UP, "lm_head.weight")]
    shards = [[name for name in tensors if name not in second], second]
    source = write_checkpoint(tmp_path_factory.mktemp("dense") / "source", tensors, qwen3_config(), shards)
    return _make(source, "qwen3", model_check=False)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Qwen3 MoE, twelve experts of one layer joined."""
    folder = tmp_path_factory.mktemp("experts")
    source = save_tiny(folder / "source", "qwen3_moe", mlp_only_layers=[], num_hidden_layers=1)
    return _make(source, bake_recipe(folder))


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """gpt-oss, whose experts are stored as one tensor, gate and up in turn."""
    source = save_tiny(tmp_path_factory.mktemp("stacked") / "source", "gpt_oss", num_hidden_layers=1)
    return _make(source, "gpt-oss")


def look(case: Case, converted: Path, mode: str) -> ParityReport:
    """The report on a converted directory, compared as `mode` says."""
    if mode == "source":
        edit_manifest(converted, lambda old: replace(old, digests=None))
    return verify(converted, source=None if mode == "digests" else case.source, levels=["bytes"])


def lines(report: ParityReport) -> list[str]:
    assert not report.proved
    return [f"{failure.where}: {failure.what}" for failure in report.failures]


def level_of(report: ParityReport) -> BytesLevel:
    level = report.levels["bytes"]
    assert isinstance(level, BytesLevel)
    return level


def place(directory: Path, tensor: str) -> tuple[Path, TensorEntry]:
    """The file that holds a tensor, and where."""
    for path in sorted(directory.glob("*.safetensors")):
        for entry in read_header(path).tensors:
            if entry.name == tensor:
                return path, entry
    raise KeyError(tensor)


def change(directory: Path, tensor: str, edit: Callable[[bytearray], None]) -> None:
    """Edit the bytes of a stored tensor."""
    path, entry = place(directory, tensor)
    data = bytearray(path.read_bytes())
    part = data[entry.offset : entry.offset + entry.size_bytes]
    edit(part)
    data[entry.offset : entry.offset + entry.size_bytes] = part
    path.write_bytes(data)


def flip(path: Path, number: int) -> None:
    data = bytearray(path.read_bytes())
    data[number] ^= 1
    path.write_bytes(data)


def exchange(one: slice, two: slice) -> Callable[[bytearray], None]:
    """Exchange two runs of bytes."""

    def edit(part: bytearray) -> None:
        part[one], part[two] = part[two], part[one]

    return edit


def without(directory: Path, tensor: str) -> None:
    """Write the weight file anew without a tensor."""
    path, _ = place(directory, tensor)
    tensors = read_raw(directory, path.name)
    del tensors[tensor]
    write_safetensors(path, tensors)


# --- nothing is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [*MODES, "structure"])
def test_a_directory_as_it_was_written(mode: str, dense: Case, tmp_path: Path) -> None:
    converted = dense.copy(tmp_path / "out", digests=mode != "structure")
    report = look(dense, converted, mode) if mode in MODES else verify(converted, levels=["bytes"])
    level = level_of(report)
    assert report.failures == ()
    assert report.proved is (mode != "structure")
    size = sum(len(tensor.data) for tensor in read_raw(dense.source).values())
    assert level.num_compared_bytes == (0 if mode == "structure" else size)
    assert level.how is {"source": How.SOURCE, "digests": How.DIGESTS, "both": How.BOTH}.get(mode, How.STRUCTURE)
    assert level.num_files == len(SIDECARS) + 2  # config.json and the source's headers
    joined = 2 * 2  # gate and up, and q, k and v, of each layer
    compared = mode != "structure"
    found = {group.kind: (group.num_tensors, group.num_compared) for group in level.groups}
    assert found == {"copied": (19 - joined, (19 - joined) * compared), "joined": (joined, joined * compared)}
    assert len(level.not_compared) == (19 if mode == "structure" else 0)


# --- one byte ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tensor", [GATE_UP, "lm_head.weight", f"{LAYER}.self_attn.q_norm.weight"])
def test_the_first_and_the_last_byte_of_a_tensor(mode: str, tensor: str, dense: Case, tmp_path: Path) -> None:
    for number in (0, -1):
        converted = dense.copy(tmp_path / f"out{number}")
        path, entry = place(converted, tensor)
        flip(path, entry.offset if number == 0 else entry.offset + entry.size_bytes - 1)
        (line,) = lines(look(dense, converted, mode))
        assert line.startswith(f"{tensor}: ")
        if mode == "digests":
            assert line.endswith("their sha256 is not the one in the manifest")
            continue
        where = {
            (GATE_UP, 0): f"row 0 of {GATE}",
            (GATE_UP, -1): f"row 11 of {UP}",
            ("lm_head.weight", 0): "row 0 of lm_head.weight",
            ("lm_head.weight", -1): "row 9 of lm_head.weight",
        }.get((tensor, number), f"element {0 if number == 0 else 3} of {tensor}")
        assert line.endswith(f": 1 of {entry.size_bytes} bytes differ, first in {where}")


def test_any_byte_of_any_file_is_found(dense: Case, tmp_path: Path) -> None:
    """Also in headers, in the index, in sidecars and in the manifest, with nothing but what the directory holds."""
    converted = dense.copy(tmp_path / "out")
    chosen = random.Random(0)
    files = sorted(path for path in converted.rglob("*") if path.is_file())
    assert {path.name for path in files} >= {INDEX_NAME, MANIFEST_NAME, SOURCE_HEADERS_NAME, CONFIG_NAME, "read me.txt"}
    for path in files:
        whole = path.read_bytes()
        inside = (chosen.randrange(len(whole)) for _ in range(12))
        for number in {0, 7, 9, len(whole) - 1, *inside}:
            if number >= len(whole):
                continue
            flip(path, number)
            try:
                report = verify(converted, levels=["bytes"])
            except ManifestError:
                assert path.name == MANIFEST_NAME
            else:
                assert report.failures, f"{path.name}, byte {number}"
                assert path.name != MANIFEST_NAME
            path.write_bytes(whole)
    assert verify(converted, levels=["bytes"]).proved


@pytest.mark.parametrize("name", [*SIDECARS, CONFIG_NAME, SOURCE_HEADERS_NAME])
def test_a_file_beside_the_weights(name: str, dense: Case, tmp_path: Path) -> None:
    converted = dense.copy(tmp_path / "out", digests=False)
    flip(converted / name, 1)
    for source in (None, dense.source):
        (line,) = lines(verify(converted, source=source, levels=["bytes"]))
        assert line.startswith(f"{name}: ")
        assert "changed after the conversion" in line
    (converted / name).unlink()
    (line,) = lines(verify(converted, levels=["bytes"]))
    assert line == f"{name}: is missing"
    os.mkfifo(converted / name)  # which nobody will ever write into
    (line,) = lines(verify(converted, levels=["bytes"]))
    assert line == f"{name}: is not a regular file"


def test_a_sidecar_that_leads_out_of_the_directory(dense: Case, tmp_path: Path) -> None:
    converted = dense.copy(tmp_path / "out")
    (converted / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    (converted / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    (line,) = lines(verify(converted, levels=["bytes"]))
    assert line.startswith("tokenizer.json: lies outside")


def test_a_header_that_says_the_same_in_other_words(dense: Case, tmp_path: Path) -> None:
    converted = dense.copy(tmp_path / "out")
    path, _ = place(converted, GATE_UP)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"format":"pt"', b'"format":"tf"', 1))
    assert lines(verify(converted, levels=["bytes"])) == [f"{path.name}: its header is not the one that was written"]


# --- the source -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["source", "both"])
def test_a_source_that_was_changed_by_one_byte(mode: str, dense: Case, tmp_path: Path) -> None:
    converted, source = dense.copy(tmp_path / "out"), shutil.copytree(dense.source, tmp_path / "source")
    path, entry = place(source, UP)
    flip(path, entry.offset + 5 * 8 * 4)  # row 5 of 8 columns
    report = look(replace(dense, source=source), converted, mode)
    (line,) = lines(report)
    assert f"{GATE_UP}: 1 of 768 bytes differ, first in row 5 of {UP}" in line
    assert ("so the source has changed" in line) is (mode == "both")
    if mode == "both":
        assert report.fix == "the converted directory is as it was written: get the source again"
    else:
        assert report.fix.startswith("make sure that --source is the checkpoint that was converted")
    assert verify(converted, levels=["bytes"]).failures == (), "which does not look at the source"


def test_a_sidecar_of_the_source(dense: Case, tmp_path: Path) -> None:
    source = shutil.copytree(dense.source, tmp_path / "source")
    flip(source / "tokenizer.json", 0)
    (line,) = lines(verify(dense.plain, source=source, levels=["bytes"]))
    assert line.startswith("tokenizer.json: in the source it has another digest")
    (source / "tokenizer.json").unlink()
    assert lines(verify(dense.plain, source=source, levels=["bytes"])) == [
        "tokenizer.json: in the source it is missing"
    ]


def test_a_tensor_of_the_source_that_has_no_place(dense: Case, tmp_path: Path) -> None:
    """As if the whole conversion had left it out: files, index and manifest agree with each other."""
    converted = dense.copy(tmp_path / "out", digests=False)
    without(converted, "lm_head.weight")
    edit_manifest(
        converted, lambda old: replace(old, tensors=tuple(it for it in old.tensors if it.target != "lm_head.weight"))
    )
    found = lines(verify(converted, source=dense.source, levels=["bytes"]))
    assert "lm_head.weight: is in the source, and the manifest has no place for it" in found


# --- what is out of place ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_gate_and_up_exchanged(mode: str, dense: Case, tmp_path: Path) -> None:
    converted = dense.copy(tmp_path / "out")
    half = 12 * 8 * 4
    change(converted, GATE_UP, exchange(slice(0, half), slice(half, 2 * half)))
    (line,) = lines(look(dense, converted, mode))
    assert line.startswith(f"{GATE_UP}: ")
    assert (f"first in row 0 of {GATE}; {GATE} and {UP} are exchanged" in line) is (mode != "digests")


def test_one_part_twice(dense: Case, tmp_path: Path) -> None:
    converted = dense.copy(tmp_path / "out")
    half = 12 * 8 * 4

    def twice(part: bytearray) -> None:
        part[half:] = part[:half]

    change(converted, GATE_UP, twice)
    (line,) = lines(verify(converted, source=dense.source, levels=["bytes"]))
    assert f"first in row 0 of {UP}; {GATE} stands in the place of {UP}" in line


@pytest.mark.parametrize("mode", MODES)
def test_experts_exchanged(mode: str, experts: Case, tmp_path: Path) -> None:
    converted = experts.copy(tmp_path / "out")
    name, size = f"{EXPERTS}.gate_up_proj", 2 * 24 * 32 * 4
    change(converted, name, exchange(slice(3 * size, 4 * size), slice(7 * size, 8 * size)))
    (line,) = lines(look(experts, converted, mode))
    assert line.startswith(f"{name}: ")
    if mode != "digests":
        three, seven = f"{EXPERTS}.3.gate_proj.weight", f"{EXPERTS}.7.gate_proj.weight"
        assert f"first in row 0 of {three}; {three} and {seven} are exchanged, and 2 more are out of place" in line


def test_experts_of_one_tensor_exchanged(stacked: Case, tmp_path: Path) -> None:
    converted = stacked.copy(tmp_path / "out")
    name = f"{EXPERTS}.down_proj"
    _, entry = place(converted, name)
    size = entry.size_bytes // entry.shape[0]
    change(converted, name, exchange(slice(2 * size, 3 * size), slice(5 * size, 6 * size)))
    (line,) = lines(verify(converted, source=stacked.source, levels=["bytes"]))
    assert f"first in element [2, 0, 0] of {name}; [2] and [5] are exchanged" in line


def test_tensors_exchanged_are_told_by_their_digests(dense: Case, tmp_path: Path) -> None:
    converted = dense.copy(tmp_path / "out")
    names = [f"{LAYER}.{name}_layernorm.weight" for name in ("input", "post_attention")]
    one, two = (read_raw(converted)[name].data for name in names)
    for name, data in zip(names, (two, one), strict=True):
        change(converted, name, lambda part, data=data: part.__setitem__(slice(None), data))  # type: ignore[misc]
    found = lines(verify(converted, levels=["bytes"]))
    assert [
        line.endswith(f"is not the one in the manifest, but that of {other}")
        for line, other in zip(found, names[::-1], strict=True)
    ] == [True, True]


# --- files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_source", [True, False])
def test_a_truncated_shard(with_source: bool, dense: Case, tmp_path: Path, capsys: Capture) -> None:
    for cut in (1, 100, 10_000):
        converted = dense.copy(tmp_path / f"out{cut}", digests=False)
        path, _ = place(converted, GATE_UP)
        path.write_bytes(path.read_bytes()[:-cut])
        options = ("--source", dense.source) if with_source else ()
        line = failing(capsys, converted, *options, "--level", "bytes")
        assert line.startswith(f"{path.name}: ")
        assert line.endswith("copy the directory again, or convert the checkpoint again")
        assert " (and " not in line, "what the file should hold is not listed tensor by tensor"


def test_a_shard_that_is_missing_or_too_long_or_of_another_conversion(dense: Case, tmp_path: Path) -> None:
    converted = dense.copy(tmp_path / "out", digests=False)
    path, _ = place(converted, GATE_UP)
    data = path.read_bytes()
    path.unlink()
    assert lines(verify(converted, levels=["bytes"])) == [f"{path.name}: is missing"]
    path.write_bytes(data + b"\0")
    (line,) = lines(verify(converted, levels=["bytes"]))
    assert line.startswith(f"{path.name}: safetensors refuses the file")
    path.write_bytes(data)
    shutil.copy(path, converted / SINGLE_NAME)
    (line,) = lines(verify(converted, levels=["bytes"]))
    assert line == f"{SINGLE_NAME}: is not of this conversion: the manifest does not name it"
    (converted / SINGLE_NAME).unlink()
    (converted / "adapter_config.json").write_text("{}")
    (line,) = lines(verify(converted, levels=["bytes"]))
    assert line == "adapter_config.json: is here, and kconvert did not write it"


def test_a_tied_tensor_that_is_missing(tmp_path: Path) -> None:
    """The embedding of a tied model stands for the head too."""
    tensors = qwen3_tensors()
    del tensors["lm_head.weight"]
    source = write_checkpoint(tmp_path / "tied" / "source", tensors, qwen3_config(tie_word_embeddings=True))
    case = _make(source, "qwen3", model_check=False)
    for mode in (*MODES, "structure"):
        converted = case.copy(tmp_path / mode, digests=mode != "structure")
        without(converted, "model.embed_tokens.weight")
        report = verify(converted, levels=["bytes"]) if mode == "structure" else look(case, converted, mode)
        assert "model.embed_tokens.weight: is in the manifest, and in no weight file" in lines(report)


def test_a_tensor_more_or_another_one(dense: Case, tmp_path: Path) -> None:
    converted = dense.copy(tmp_path / "out", digests=False)
    path, entry = place(converted, "model.norm.weight")
    tensors = read_raw(converted, path.name)
    half = RawTensor("F16", entry.shape, bytes(2 * 8))
    write_safetensors(path, {**tensors, "model.norm.weight": half, "more": half})
    found = lines(verify(converted, source=dense.source, levels=["bytes"]))
    assert [line.partition(":")[0] for line in found].count("model.norm.weight") == 1, "its bytes are not looked at"
    assert f"model.norm.weight: is F16 [8] in {path.name}, and F32 [8] in the manifest" in found
    assert f"more: is in {path.name}, and not in the manifest" in found
    tensors["model.norm.weight"] = RawTensor("F32", (2, 4), tensors["model.norm.weight"].data)
    write_safetensors(path, tensors)
    found = lines(verify(converted, source=dense.source, levels=["bytes"]))
    assert f"model.norm.weight: is F32 [2, 4] in {path.name}, and F32 [8] in the manifest" in found


def test_a_tensor_in_two_files(dense: Case, tmp_path: Path) -> None:
    converted = dense.copy(tmp_path / "out", digests=False)
    first, second = load_manifest(converted).weight_files
    norm = read_raw(converted, first)["model.norm.weight"]
    write_safetensors(converted / second, {**read_raw(converted, second), "model.norm.weight": norm})
    found = lines(verify(converted, levels=["bytes"]))
    assert f"model.norm.weight: is in two files, {first} and {second}" in found


def test_an_index_that_says_something_else(dense: Case, tmp_path: Path) -> None:
    converted = dense.copy(tmp_path / "out", digests=False)
    index = converted / INDEX_NAME
    text = index.read_text()
    first, second = load_manifest(converted).weight_files
    for old, new, words in (
        (f'"model.norm.weight": "{first}"', f'"model.norm.weight": "{second}"', "has 'model.norm.weight' in"),
        ('"total_size": ', '"total_size": 1', "its total_size is 1"),
        ('"model.norm.weight"', '"model.norm.other"', "(2 tensors are wrong)"),
        (f'"lm_head.weight": "{second}"', f'"lm_head.weight": "{first}"', f"in {first}, and it is in {second}"),
        ("{", "[", "index is not valid JSON"),
        ("  ", "\t", "is not the one that was written"),
    ):
        assert old in text
        index.write_text(text.replace(old, new, 1))
        (line,) = lines(verify(converted, levels=["bytes"]))
        assert line.startswith(f"{INDEX_NAME}: ")
        assert words in line
    index.unlink()
    assert lines(verify(converted, levels=["bytes"])) == [f"{INDEX_NAME}: is missing"]


def test_a_file_that_changes_while_it_is_compared(dense: Case, tmp_path: Path) -> None:
    for number, when in enumerate(("on_start", "on_progress")):
        converted = dense.copy(tmp_path / f"out{number}")
        path, _ = place(converted, "lm_head.weight")

        def touch(size_bytes: int, path: Path = path) -> None:
            os.utime(path)

        seen: list[int] = []
        watch: dict[str, Any] = {"on_progress": seen.append, when: touch}
        with pytest.raises(CheckpointError, match="has changed since its header was read"):
            verify(converted, source=dense.source, levels=["bytes"], **watch)
        assert seen == [], "a change that is seen at the start costs no reading"


def test_a_file_that_ends_early(dense: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = dense.copy(tmp_path / "out")
    path, entry = place(converted, "lm_head.weight")
    monkeypatch.setattr("kconvert.parity.bytes.check_stamp", lambda stamp, fd, path: None)
    with pytest.raises(CheckpointError, match=f"ends early: no data at byte {entry.offset + 8}, "):
        verify(converted, source=dense.source, levels=["bytes"], on_start=lambda _: os.truncate(path, entry.offset + 8))


def test_an_interrupt_ends_the_threads_at_once(dense: Case) -> None:
    def interrupt(size_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(dense.plain, source=dense.source, levels=["bytes"], on_progress=interrupt)
    done: list[int] = []

    def work(item: int, advance: Callable[[int], None]) -> None:
        for step in range(100):
            time.sleep(0.02)
            advance(1)
            done.append(step)

    with pytest.raises(KeyboardInterrupt):
        run_in_threads(lambda: work, range(4), num_threads=3, on_progress=interrupt)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kconvert-verify")]
    assert len(done) < 20


def test_the_first_error_of_a_thread_is_raised() -> None:
    def work(item: int, advance: Callable[[int], None]) -> int:
        if item == 2:
            raise CheckpointError("no")
        return item * item

    with pytest.raises(CheckpointError, match="no"):
        run_in_threads(lambda: work, range(4), num_threads=2, on_progress=lambda _: None)
    assert run_in_threads(lambda: work, (5, 3, 4), num_threads=2, on_progress=lambda _: None) == [25, 9, 16]
    assert run_in_threads(lambda: work, (), num_threads=2, on_progress=lambda _: None) == []


# --- manifests that were edited ---------------------------------------------------------------------


def edit_record(converted: Path, target: str, edit: Callable[[TensorRecord], TensorRecord]) -> None:
    """Change what the manifest says of a tensor; its digest is made again."""

    def changed(manifest: Manifest) -> Manifest:
        tensors = (edit(record) if record.target == target else record for record in manifest.tensors)
        return replace(manifest, tensors=tuple(tensors))

    edit_manifest(converted, changed)


def exchange_pieces(record: TensorRecord) -> TensorRecord:
    """Each part stands where the other one was; both have one shape."""
    one, two = record.parts
    return replace(record, parts=(replace(one, pieces=two.pieces), replace(two, pieces=one.pieces)))


def test_a_manifest_that_was_edited(dense: Case, tmp_path: Path, capsys: Capture) -> None:
    converted = dense.copy(tmp_path / "out")
    path = converted / MANIFEST_NAME
    path.write_text(path.read_text().replace('"model_checked": false', '"model_checked": true'))
    for options in ((), ("--source", dense.source)):
        assert "was edited or damaged" in failing(capsys, converted, *options, "--level", "bytes", code=4)
    text = (dense.digested / MANIFEST_NAME).read_text()
    path.write_text(text.replace('"schema": 4', '"schema":  4'))
    assert lines(verify(converted, levels=["bytes"])) == [
        f"{MANIFEST_NAME}: is not in the form in which it was written: it was edited"
    ]
    path.write_text("{")
    assert "cannot be read" in failing(capsys, converted, "--level", "bytes", code=4)


@pytest.mark.parametrize("mode", MODES)
def test_pieces_of_a_layout_exchanged_in_the_manifest(mode: str, dense: Case, tmp_path: Path) -> None:
    converted = dense.copy(tmp_path / "out")
    edit_record(converted, GATE_UP, exchange_pieces)
    found = lines(look(dense, converted, mode))
    assert found[0] == (
        f"{LAYER}.mlp: the parts of {GATE_UP!r} in the manifest are not those of layout 'gated_mlp': "
        f"they are {LAYER}.mlp.up_proj.weight, {LAYER}.mlp.gate_proj.weight, "
        f"and have to be {LAYER}.mlp.gate_proj.weight, {LAYER}.mlp.up_proj.weight"
    )
    assert len(found) == (1 if mode == "digests" else 2), "with the source the bytes differ too"


def test_pieces_and_bytes_exchanged_alike(dense: Case, tmp_path: Path) -> None:
    """Everything agrees but the layout, which has gate before up."""
    converted = dense.copy(tmp_path / "out", digests=False)
    half = 12 * 8 * 4
    change(converted, GATE_UP, exchange(slice(0, half), slice(half, 2 * half)))
    edit_record(converted, GATE_UP, exchange_pieces)
    for source in (None, dense.source):
        (line,) = lines(verify(converted, source=source, levels=["bytes"]))
        assert line.startswith(f"{LAYER}.mlp: the parts of {GATE_UP!r}")


def test_parts_exchanged_outside_the_patches(dense: Case, tmp_path: Path) -> None:
    converted = dense.copy(tmp_path / "out", digests=False)
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    parts = {record.target: record.parts for record in load_manifest(converted).tensors}

    def crossed(manifest: Manifest) -> Manifest:
        other = {names[0]: parts[names[1]], names[1]: parts[names[0]]}
        changed = (replace(it, parts=other.get(it.target, it.parts)) for it in manifest.tensors)
        return replace(manifest, tensors=tuple(changed))

    edit_manifest(converted, crossed)
    found = lines(verify(converted, levels=["bytes"]))
    for name in names:
        assert f"{name}: the manifest gives it other parts, and no patch that would take them" in found


def test_a_part_of_a_layout_that_stands_outside_of_it(tmp_path: Path) -> None:
    """Biases that need not be there, and are there: they would be left over when the model is loaded."""
    biases = {f"{LAYER}.self_attn.{name}_proj.bias": torch.ones(size) for name, size in (("q", 16), ("k", 8), ("v", 8))}
    source = write_checkpoint(tmp_path / "source", {**qwen3_tensors(1), **biases}, qwen3_config(1))
    converted = convert("qwen3", source, tmp_path / "out", model_check=False).output
    joined = f"{LAYER}.self_attn.qkv_proj.bias"
    tensors = read_raw(converted)
    del tensors[joined]
    write_safetensors(converted / SINGLE_NAME, {**tensors, **{name: raw(tensor) for name, tensor in biases.items()}})

    def apart(manifest: Manifest) -> Manifest:
        record = next(it for it in manifest.tensors if it.target == joined)
        alone = (
            replace(record, target=part.source, shape=part.shape, op="copy", patch=None, parts=(part,))
            for part in (replace(part, pieces=part.origins[0].pieces) for part in record.parts)
        )
        return replace(manifest, tensors=(*(it for it in manifest.tensors if it is not record), *alone))

    edit_manifest(converted, apart)
    found = lines(verify(converted, source=source, levels=["bytes"]))
    assert f"{LAYER}.self_attn: the parts of {joined!r} in the manifest are not those of layout 'qkv_proj'" in found


def test_experts_exchanged_in_the_manifest(experts: Case, tmp_path: Path) -> None:
    """Nothing but transformers knows their order: only the source tells."""
    converted = experts.copy(tmp_path / "out", digests=False)
    name = f"{EXPERTS}.gate_up_proj"

    def crossed(record: TensorRecord) -> TensorRecord:
        (part,) = record.parts
        origins = {origin.file_name: origin for origin in part.origins}
        one, two = (origins[f"{EXPERTS}.{number}.gate_proj.weight"] for number in (3, 7))
        pieces = {one.file_name: two.pieces, two.file_name: one.pieces}
        crossed = (replace(it, pieces=pieces.get(it.file_name, it.pieces)) for it in part.origins)
        return replace(record, parts=(replace(part, origins=tuple(crossed)),))

    edit_record(converted, name, crossed)
    (line,) = lines(verify(converted, source=experts.source, levels=["bytes"]))
    assert line.startswith(f"{name}: ")
    report = verify(converted, levels=["bytes"])
    assert (report.failures, report.proved) == ((), False)


@pytest.mark.parametrize("mode", ["digests", "both"])
def test_digests_exchanged_in_the_manifest(mode: str, dense: Case, tmp_path: Path) -> None:
    converted = dense.copy(tmp_path / "out")
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)]

    def crossed(manifest: Manifest) -> Manifest:
        digests = dict(manifest.digests or {})
        digests[names[0]], digests[names[1]] = digests[names[1]], digests[names[0]]
        return replace(manifest, digests=digests)

    edit_manifest(converted, crossed)
    found = lines(look(dense, converted, mode))
    assert [line.partition(":")[0] for line in found] == names
    assert ("is as in the source, and the manifest has another digest for it" in found[0]) is (mode == "both")


EDITS: dict[str, tuple[Callable[[Manifest], Manifest], str]] = {
    "model type": (lambda old: replace(old, model_type="llama"), "its model_type is 'qwen3', and 'llama' in"),
    "architecture": (lambda old: replace(old, architecture="Other"), "and 'Other' in the manifest"),
    "config": (lambda old: replace(old, config_digest="sha256:0"), "config.json was changed after the conversion"),
    "carried": (lambda old: replace(old, carried=("none",)), "the manifest has carried it along"),
    "patch": (lambda old: _first_patch(old, modules=()), "none of whose modules holds it"),
    "layout": (
        lambda old: _first_patch(old, layout=replace(old.patches[0].layout, name="none")),
        "names layout 'none', which is not installed",
    ),
    "version": (
        lambda old: _first_patch(old, layout=replace(old.patches[0].layout, version=9)),
        "was written in version 9, this kconvert has 1",
    ),
    "kernel": (lambda old: _first_patch(old, kernels=("cpu_fused_qkv",)), "'cpu_fused_qkv' is for another layout"),
    "kind": (lambda old: _first_patch(old, kind="fuse"), "layout 'rms_norm' takes norm"),
    "source headers": (
        lambda old: replace(old, source_headers_digest="sha256:0"),
        f"{SOURCE_HEADERS_NAME}: has another digest",
    ),
    "sidecar": (
        lambda old: replace(old, sidecar_digests={**old.sidecar_digests, "tokenizer.json": "sha256:0"}),
        "tokenizer.json: has another digest",
    ),
    "sidecar name": (
        lambda old: replace(old, sidecars=(*old.sidecars, "x"), sidecar_digests={**old.sidecar_digests, "x": ""}),
        "x: is missing",
    ),
}


def _first_patch(manifest: Manifest, **changes: Any) -> Manifest:
    return replace(manifest, patches=(replace(manifest.patches[0], **changes), *manifest.patches[1:]))


@pytest.mark.parametrize("name", list(EDITS))
def test_other_edits_of_the_manifest(name: str, dense: Case, tmp_path: Path) -> None:
    edit, words = EDITS[name]
    converted = dense.copy(tmp_path / "out")
    edit_manifest(converted, edit)
    assert words in "\n".join(lines(verify(converted, levels=["bytes"])))


ORIGINS: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"file_name": "none"}, "is made of 'none', which the source does not have"),
    "file": (
        {"file": "model-00002-of-00002.safetensors"},
        "the source has F32 [8] in model-00001-of-00002.safetensors",
    ),
    "dtype": ({"dtype": "F16"}, "is made of 'model.norm.weight', F16 [8] in"),
    "integer": ({"dtype": "I32"}, "is made of 'model.norm.weight', I32 [8] in"),
}


@pytest.mark.parametrize("name", list(ORIGINS))
def test_origins_that_the_source_does_not_have(name: str, dense: Case, tmp_path: Path) -> None:
    changes, words = ORIGINS[name]
    converted = dense.copy(tmp_path / "out", digests=False)

    def edit(record: TensorRecord) -> TensorRecord:
        (part,) = record.parts
        changed: PartRecord = replace(part, origins=(replace(part.origins[0], **changes),))
        return replace(record, parts=(changed,))

    edit_record(converted, "model.norm.weight", edit)
    found = lines(verify(converted, source=dense.source, levels=["bytes"]))
    assert [line for line in found if line.startswith("model.norm.weight: ") and words in line], found


def test_a_dtype_that_nothing_is_converted_to(dense: Case, tmp_path: Path) -> None:
    """Both the file and the manifest say integers, where the source has floats."""
    converted = dense.copy(tmp_path / "out", digests=False)
    path, entry = place(converted, "model.norm.weight")
    tensors = read_raw(converted, path.name)
    write_safetensors(path, {**tensors, "model.norm.weight": RawTensor("I32", entry.shape, bytes(4 * 8))})
    edit_record(converted, "model.norm.weight", lambda record: replace(record, dtype="I32"))
    found = lines(verify(converted, source=dense.source, levels=["bytes"]))
    assert "model.norm.weight: cannot be made of what the manifest says (no cast from F32 to I32)" in found


# --- the command ------------------------------------------------------------------------------------


def test_the_command_with_a_source(
    dense: Case, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(cli_verify, "prepare_torch", lambda: pytest.fail("torch is not needed"))
    converted = dense.copy(tmp_path / "out", digests=False)
    code, out, err = run(capsys, converted, "--source", dense.source, "--level", "bytes", "--require-proof")
    assert code == 0, out + err
    assert out.splitlines()[-1] == "OK: the bytes of 19 tensors (6.2 kB) are those of the source."
    assert "Bytes, beside the source" in out
    assert err.splitlines() == [f"kconvert: the report is in {converted / PARITY_NAME}"]


def test_the_command_without_a_proof(dense: Case, tmp_path: Path, capsys: Capture) -> None:
    converted = dense.copy(tmp_path / "out", digests=False)
    code, out, err = run(capsys, converted, "--level", "bytes")
    assert code == 0, out + err
    assert "kconvert: not proved: the values of the tensors were compared with nothing; give the source with" in err
    assert out.splitlines()[-1] == "OK: 19 tensors have the names, dtypes and shapes that the manifest says."
    line = failing(capsys, converted, "--level", "bytes", "--require-proof")
    assert line.startswith(f"{converted}: nothing is wrong, but not everything is proved: ")
    assert line.endswith("; give the source with --source DIR, or convert with `apply --digests`")


def test_the_command_as_json(dense: Case, tmp_path: Path, capsys: Capture) -> None:
    converted = dense.copy(tmp_path / "out", digests=False)
    code, out, _ = run(capsys, converted, "--level", "bytes", "--json")
    value = json.loads(out)
    assert (code, value["holds"], value["proved"]) == (0, True, False)
    assert value["levels"]["bytes"]["how"] == "structure"
    assert (value["device"], value["stock_weights"], [*value["versions"]]) == (None, None, ["kconvert"])
    assert json.loads((converted / PARITY_NAME).read_bytes()) == value
    code, out, _ = run(capsys, converted, "--level", "bytes", "--require-proof", "--json")
    assert (code, json.loads(out)["exit_code"], json.loads(out)["proved"]) == (5, 5, False)
    half = 12 * 8 * 4
    change(converted, GATE_UP, exchange(slice(0, half), slice(half, 2 * half)))
    code, out, _ = run(capsys, converted, "--source", dense.source, "--level", "bytes", "--json")
    (found,) = json.loads(out)["levels"]["bytes"]["differences"]
    assert code == 5
    assert found["exchanged"] == [[GATE, UP], [UP, GATE]]
    assert (found["source"], found["index"], found["size_bytes"]) == (GATE, [0, 0], 2 * half)
    assert str(tmp_path) not in (converted / PARITY_NAME).read_text()


def test_the_worst_comes_first_and_all_are_shown(
    dense: Case, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    converted = dense.copy(tmp_path / "out", digests=False)
    change(converted, "lm_head.weight", lambda part: part.__setitem__(0, part[0] ^ 1))
    change(converted, GATE_UP, exchange(slice(0, 384), slice(384, 768)))
    flip(converted / "tokenizer.json", 0)
    code, out, err = run(capsys, converted, "--source", dense.source, "--level", "bytes")
    assert code == 5
    assert max(map(len, out.splitlines())) <= 80
    shown = [line[2:].partition(":")[0] for line in out.splitlines() if line.startswith("- ")]
    assert shown == [GATE_UP, "lm_head.weight", "tokenizer.json"]
    assert "1 WRONG" in out
    assert "(and 2 more)" in err


def test_beside_another_level(dense: Case, tmp_path: Path, capsys: Capture) -> None:
    """The files are looked at first; where they are not whole, no model is loaded."""
    source = save_tiny(tmp_path / "my-model", "qwen3")
    patches = '  - kernel: cpu_fused_swiglu\n    replace: {class: Qwen3MLP, path: "model.layers.*.mlp"}\n'
    converted = convert(write_recipe(tmp_path / "my.yaml", patches), source, tmp_path / "out").output
    both = ("--source", source, "--level", "modules", "--level", "bytes")
    code, out, err = run(capsys, converted, *both, "--require-proof", "--json")
    value = json.loads(out)
    assert (code, value["proved"], [*value["levels"]]) == (0, True, ["bytes", "modules"])
    assert value["stock_weights"] == "source"
    code, out, err = run(capsys, converted, "--level", "modules", "--require-proof", "--json")
    assert (code, json.loads(out)["holds"], json.loads(out)["proved"]) == (5, True, False)
    assert "the stock weights were taken out of the converted file" in err
    change(converted, GATE_UP, lambda part: part.__setitem__(slice(None), bytes(len(part))))
    code, out, err = run(capsys, converted, *both, "--json")
    assert code == 5
    assert {failure["where"] for failure in json.loads(out)["failures"]} == {GATE_UP, f"{LAYER}.mlp"}
    path = converted / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:-1])
    code, out, err = run(capsys, converted, *both, "--json")
    assert (code, [*json.loads(out)["levels"]], json.loads(out)["not_run"]) == (5, ["bytes"], ["modules"])
    assert "kconvert: level modules did not run: the files are not those of the manifest" in err


def test_progress_goes_back_to_the_status_when_the_bytes_are_done() -> None:
    """Nothing is waited for after them, and another level may follow."""
    meter = Meter(100, None, label="comparing")
    meter.add(60)
    assert bar_line(meter.read(), 80).plain.startswith("comparing  ")
    assert not meter.is_over
    meter.add(40)
    assert meter.is_over
    assert meter.read().sync_seconds is None
    progress = Progress("verifying it", quiet=True)
    progress.comparing(0)
    progress.comparing(100)
    progress.advance(99)
    assert str(progress._plain_line()).startswith("99 of 100 B")
    progress.advance(1)
    assert progress._plain_line() is None


def test_what_the_other_levels_could_not_show_is_no_proof() -> None:
    def result(dtype: str, verdict: Verdict) -> Result:
        return Result(dtype, "reference", "reference", verdict, 0.0, 0.0)

    def modules(*results: Result) -> ModulesLevel:
        shown = ModuleResult(("a",), ("A",), "rms_norm", (result("float32", Verdict.EQUAL),))
        return ModulesLevel((shown, ModuleResult(("b",), ("A",), "rms_norm", results)), "float32", True, None, {})

    equal = result("float32", Verdict.EQUAL)
    assert modules(equal).unproved is None
    assert modules(equal, result("float16", Verdict.NOT_RUN)).unproved is None, "only its own dtype counts"
    for results in ((), (result("float32", Verdict.NOT_RUN),), (equal, result("float16", Verdict.NO_PROOF))):
        assert modules(*results).unproved == "1 of 2 patched modules could not be shown, e.g. b"
    left_out = LogitsResult("float32", "auto", "auto", Verdict.NOT_RUN, None, 0.0, "it is too large")
    level = LogitsLevel((replace(left_out, verdict=Verdict.EQUAL), left_out), None, {})
    assert level.unproved == "float32, auto was not run: it is too large"
    report = ParityReport({"logits": level}, True, "", None, {})
    assert (report.proved, report.failures, report.proof) == (False, (), None)


def test_a_wrong_source_is_refused_as_at_the_other_levels(dense: Case, tmp_path: Path, capsys: Capture) -> None:
    other = write_checkpoint(tmp_path / "other", qwen3_tensors(3), qwen3_config(3))
    line = failing(capsys, dense.plain, "--source", other, "--level", "bytes", code=4)
    assert "not the source" in line


def test_a_difference_late_in_a_large_tensor(tmp_path: Path) -> None:
    """Beyond the first block that is read, in a run and in what is gathered."""
    shapes = {"wide": (1 << 10, 1 << 11), "model.embed_tokens.weight": (10, 8)}
    tensors = {
        name: torch.arange(torch.tensor(shape).prod().item()).reshape(shape).float() for name, shape in shapes.items()
    }
    source = write_checkpoint(tmp_path / "source", {**qwen3_tensors(), **tensors}, qwen3_config())
    case = _make(source, "qwen3", model_check=False)
    _, entry = place(case.plain, "wide")
    assert entry.size_bytes == 8 << 20
    at = 4 * (700 * 2048 + 3)
    change(case.plain, "wide", lambda part: part.__setitem__(slice(at, at + 4), b"\xff\xff\xff\xff"))
    seen: list[int] = []
    report = verify(case.plain, source=source, levels=["bytes"], on_start=seen.append, on_progress=seen.append)
    (difference,) = level_of(report).differences
    assert (difference.source, difference.index) == ("wide", (700, 3))
    assert difference.num_bytes == 4
    assert seen[0] == sum(seen[1:]) > 8 << 20
