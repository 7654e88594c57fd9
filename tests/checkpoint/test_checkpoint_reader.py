"""What makes a directory a checkpoint: A7, A8, A9, A11, S1, S2, S4 on real files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kconvert.checkpoint import is_inside_hub_cache, open_checkpoint
from kconvert.errors import CheckpointError
from kconvert.names import natural_key
from tests.checkpoint.conftest import ModelDir, write_tensors

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _refused(model: ModelDir, *words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model.path)
    message = str(caught.value)
    assert str(model.path) in message
    for word in words:
        assert word in message
    return message


def test_a_single_file_is_read(model: ModelDir) -> None:
    model.weights("model.safetensors", "layers.10.w", "layers.2.w")
    result = open_checkpoint(model.path)
    assert [file.name for file in result.files] == ["model.safetensors"]
    assert list(result.tensors) == ["layers.2.w", "layers.10.w"]
    assert result.index is None
    assert result.warnings == ()
    assert (result.model_type, result.architectures, result.quantization) == ("llama", ("LlamaForCausalLM",), None)
    assert result.config_bytes == (model.path / "config.json").read_bytes()
    assert result.files[0].size_bytes == (model.path / "model.safetensors").stat().st_size


def test_offsets_point_at_the_bytes(model: ModelDir) -> None:
    model.weights("model.safetensors", "x", "y")
    result = open_checkpoint(model.path)
    data = (model.path / "model.safetensors").read_bytes()
    values = {t.name: data[t.offset : t.offset + t.size_bytes] for t in result.tensors.values()}
    assert values == {"x": bytes(range(8)), "y": bytes(range(8, 16))}


def test_an_index_is_followed_exactly(model: ModelDir) -> None:
    model.sharded()
    model.weights("consolidated.safetensors", "a")
    model.weights("model-00003-of-00003.safetensors", "z")
    result = open_checkpoint(model.path)
    assert [file.name for file in result.files] == [ONE, TWO]
    assert {name: tensor.file for name, tensor in result.tensors.items()} == {"a": ONE, "b": ONE, "c": TWO}
    assert result.index_name == "model.safetensors.index.json"
    assert result.index is not None
    assert result.index.raw == (model.path / "model.safetensors.index.json").read_text()


def test_shards_in_subfolders_work(model: ModelDir) -> None:
    model.weights("model.layers.0/layer.safetensors", "a")
    model.index({"a": "model.layers.0/layer.safetensors"})
    assert open_checkpoint(model.path).tensors["a"].file == "model.layers.0/layer.safetensors"


@pytest.mark.parametrize("damage", ["missing", "broken link", "folder", "link to itself"])
def test_a_missing_shard_is_named_with_the_index(model: ModelDir, damage: str) -> None:
    model.sharded()
    (model.path / TWO).unlink()
    if damage == "broken link":
        (model.path / TWO).symlink_to("../../blobs/gone")
    elif damage == "folder":
        (model.path / TWO).mkdir()
    elif damage == "link to itself":
        (model.path / TWO).symlink_to(TWO)
    _refused(model, "model.safetensors.index.json", TWO, "'c'")


def test_an_indexed_tensor_that_its_shard_lacks_is_refused(model: ModelDir) -> None:
    model.sharded()
    model.index({"a": ONE, "b": ONE, "c": TWO, "mtp.fc.weight": TWO})
    _refused(model, "model.safetensors.index.json", "'mtp.fc.weight'", TWO)


def test_a_tensor_in_another_shard_than_indexed_is_refused(model: ModelDir) -> None:
    model.sharded()
    model.index({"a": ONE, "b": TWO, "c": TWO})
    _refused(model, "'b'", TWO, f"{ONE} holds it")


def test_a_tensor_in_two_shards_is_refused_with_both_names(model: ModelDir) -> None:
    model.weights(ONE, "a", "b")
    model.weights(TWO, "a", "c")
    model.index({"a": TWO, "b": ONE, "c": TWO})
    _refused(model, "'a'", ONE, TWO)


def test_a_tensor_that_the_index_omits_is_kept_with_a_warning(model: ModelDir) -> None:
    model.sharded()
    model.index({"a": ONE, "c": TWO})
    result = open_checkpoint(model.path)
    assert result.tensors["b"].file == ONE
    (warning,) = result.warnings
    assert ONE in warning
    assert "(b)" in warning


def test_a_damaged_shard_is_named(model: ModelDir) -> None:
    model.sharded()
    with (model.path / TWO).open("ab") as file:
        file.write(b"x")
    _refused(model, TWO)


def test_a_traversal_is_refused_before_anything_is_opened(model: ModelDir) -> None:
    os.mkfifo(model.path.parent / "evil.safetensors")  # opening it would block
    model.weights(ONE, "a")
    model.index({"a": ONE, "b": "../evil.safetensors"})
    _refused(model, "'../evil.safetensors'", "'b'")


def test_a_single_file_beside_another_index_is_refused(model: ModelDir) -> None:
    model.sharded()
    model.weights("model.safetensors", "a")
    _refused(model, "stock transformers would read model.safetensors", "remove")


def test_a_single_file_with_its_own_index_is_read(model: ModelDir) -> None:
    model.weights("model.safetensors", "a")
    model.index({"a": "model.safetensors"})
    result = open_checkpoint(model.path)
    assert [file.name for file in result.files] == ["model.safetensors"]
    assert result.index is not None


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl", "pytorch_model.bin.index.json"])
def test_pickle_is_refused_and_never_opened(model: ModelDir, name: str) -> None:
    os.mkfifo(model.path / name)  # opening it would block
    _refused(model, name, "pickle", "save_pretrained")


def test_other_weight_formats_are_called_so(model: ModelDir) -> None:
    (model.path / "model.gguf").write_bytes(b"GGUF")
    message = _refused(model, "model.gguf", "does not read")
    assert "pickle" not in message


def test_safetensors_without_index_are_not_guessed_at(model: ModelDir) -> None:
    model.weights(ONE, "a")
    model.weights("consolidated.safetensors", "a")
    _refused(model, ONE, "consolidated.safetensors", "model.safetensors.index.json")


def test_no_weights_at_all(model: ModelDir) -> None:
    _refused(model, "holds no weights")


@pytest.mark.parametrize(("kind", "word"), [("missing", "no such directory"), ("file", "is not a directory")])
def test_what_is_no_directory_is_refused(tmp_path: Path, kind: str, word: str) -> None:
    path = tmp_path / "model"
    if kind == "file":
        path.write_text("")
    with pytest.raises(CheckpointError, match=word):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "text",
    [None, "", "{", "[]", "null", '{"a": 1, "a": 2}', '{"x": {"a": 1, "a": 2}}', '{"quantization_config": "fp8"}'],
)
def test_a_missing_or_damaged_config_is_refused(model: ModelDir, text: str | None) -> None:
    model.weights("model.safetensors", "a")
    if text is None:
        (model.path / "config.json").unlink()
    else:
        (model.path / "config.json").write_text(text)
    _refused(model, "config")


def test_infinity_in_a_config_is_read_as_transformers_writes_it(model: ModelDir) -> None:
    model.weights("model.safetensors", "a")
    (model.path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    result = open_checkpoint(model.path)
    assert result.config["time_step_limit"] == [0.0, float("inf")]
    assert (result.model_type, result.architectures) == (None, ())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {"quant_method": "fp8"}),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, {"quant_method": "awq"}),
        ({"quantization_config": None, "text_config": None}, None),
    ],
)
def test_quantization_is_found_in_the_text_config_too(
    model: ModelDir, config: dict[str, object], expected: object
) -> None:
    model.weights("model.safetensors", "a")
    model.config(config)
    assert open_checkpoint(model.path).quantization == expected


def test_a_converted_directory_is_refused(model: ModelDir) -> None:
    model.weights("model.kconvert.safetensors", "a")
    (model.path / "kconvert_manifest.json").write_text("{}")
    _refused(model, "already converted", "kconvert_manifest.json")


@pytest.mark.parametrize("name", ["model.kconvert-00001-of-00002.safetensors", "model.safetensors.index.kconvert.json"])
def test_a_left_over_of_a_conversion_is_refused(model: ModelDir, name: str) -> None:
    model.weights("model.safetensors", "a")
    model.weights(name, "a")
    _refused(model, name, "left over")


def test_a_kernels_folder_alone_is_not_a_left_over(model: ModelDir) -> None:
    model.weights("model.safetensors", "a")
    (model.path / "kconvert_kernels").mkdir()
    assert list(open_checkpoint(model.path).tensors) == ["a"]


def test_an_adapter_beside_the_weights_is_warned_of(model: ModelDir) -> None:
    model.weights("model.safetensors", "a")
    (model.path / "adapter_config.json").write_text("{}")
    assert "merge the adapter" in open_checkpoint(model.path).warnings[0]


def test_transformers_weights_chooses_a_file(model: ModelDir) -> None:
    model.weights("model.safetensors", "a")
    model.weights("sub/other.safetensors", "b")
    model.config({"transformers_weights": "sub/other.safetensors"})
    assert list(open_checkpoint(model.path).tensors) == ["b"]


def test_transformers_weights_chooses_an_index(model: ModelDir) -> None:
    model.weights("x.safetensors", "b")
    model.index({"b": "x.safetensors"}, "my.safetensors.index.json")
    model.config({"transformers_weights": "my.safetensors.index.json"})
    result = open_checkpoint(model.path)
    assert (list(result.tensors), result.index_name) == (["b"], "my.safetensors.index.json")


@pytest.mark.parametrize("chosen", ["../x.safetensors", "/x.safetensors", "x.bin", 3, "", "gone.safetensors"])
def test_a_bad_transformers_weights_is_refused(model: ModelDir, chosen: object) -> None:
    model.weights("model.safetensors", "a")
    model.config({"transformers_weights": chosen})
    _refused(model, "gone.safetensors" if chosen == "gone.safetensors" else "transformers_weights")


def _snapshot(tmp_path: Path) -> Path:
    """A Hub cache with two shards, all files links into `blobs`, which have no extension."""
    repo = tmp_path / "hub" / "models--me--tiny"
    built = ModelDir(tmp_path / "built")
    built.sharded()
    snapshot = repo / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for number, path in enumerate(sorted(built.path.iterdir())):
        path.rename(repo / "blobs" / f"sha{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/sha{number}")
    return snapshot


@pytest.mark.parametrize("through_link", [False, True])
def test_a_hub_snapshot_is_read_under_the_names_of_its_links(tmp_path: Path, through_link: bool) -> None:
    model_dir = _snapshot(tmp_path)
    if through_link:
        (tmp_path / "link").symlink_to(model_dir)
        model_dir = tmp_path / "link"
    result = open_checkpoint(model_dir)
    assert [file.path for file in result.files] == [model_dir / ONE, model_dir / TWO]
    assert list(result.tensors) == ["a", "b", "c"]
    assert is_inside_hub_cache(model_dir)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("hub/models--a--b/snapshots/0123", True),
        ("hub/models--a--b/snapshots/0123/sub", True),
        ("hub/models--a--b/snapshots", False),
        ("hub/models--a--b", False),
        ("hub/datasets--a--b/snapshots/0123", False),
        ("snapshots/0123", False),
    ],
)
def test_what_lies_in_a_hub_cache(tmp_path: Path, path: str, expected: bool) -> None:
    assert is_inside_hub_cache(tmp_path / path) is expected


_names = st.lists(st.from_regex(r"[a-c]\.[0-9]{1,2}\.w", fullmatch=True), unique=True, min_size=1, max_size=12)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=_names, seed=st.integers(0, 1000))
def test_the_order_of_shards_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], seed: int
) -> None:
    orders = []
    for shuffle in (False, True):
        order = list(names)
        if shuffle:
            Random(seed).shuffle(order)
        model = ModelDir(tmp_path_factory.mktemp("order") / "model")
        half = (len(order) + 1) // 2
        shards = {name: chunk for name, chunk in ((ONE, order[:half]), (TWO, order[half:])) if chunk}
        for shard, chunk in shards.items():
            write_tensors(model.path / shard, dict.fromkeys(chunk, ("U8", (3,))))
        model.index({name: shard for shard, chunk in shards.items() for name in chunk})
        orders.append(list(open_checkpoint(model.path).tensors))
    assert orders[0] == orders[1] == sorted(set(names), key=natural_key)


def test_numbers_that_are_equal_but_written_apart_have_one_order(make_model: Callable[[str], ModelDir]) -> None:
    found = []
    for number, names in enumerate((("layers.02", "layers.2"), ("layers.2", "layers.02"))):
        model = make_model(f"m{number}")
        model.weights("model.safetensors", *names, "x." + "9" * 5000)
        found.append(list(open_checkpoint(model.path).tensors))
    assert found[0] == found[1]


def test_reading_imports_no_torch_and_runs_no_model_code(model: ModelDir) -> None:
    model.weights("model.safetensors", "a")
    model.config({"auto_map": {"AutoModel": "modeling_x.X"}})
    (model.path / "modeling_x.py").write_text("raise SystemExit('was run')")
    code = (
        "import sys; from pathlib import Path; from kconvert.checkpoint import open_checkpoint, list_sidecars;"
        "early = 'safetensors' in sys.modules;"
        "list_sidecars(open_checkpoint(Path(sys.argv[1])));"
        "import json; print(json.dumps([early, [m for m in ('torch', 'transformers', 'pydantic', 'yaml')"
        " if m in sys.modules]]))"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code, str(model.path)], capture_output=True, text=True, check=True, cwd=root
    )
    assert json.loads(result.stdout) == [False, []]
