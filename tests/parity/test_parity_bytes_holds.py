"""`verify --level bytes` on directories in which nothing is wrong: every recipe, every op, and what was saved again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from kconvert import load_converted
from kconvert.manifest import load_manifest
from kconvert.names import KERNELS_DIR, PARITY_NAME
from kconvert.parity import BytesLevel, How, ParityReport, verify
from kconvert.parity.locate import index_of, source_element
from kconvert.recipe import load_recipe, shipped_recipes
from kconvert.transforms import compose
from tests.bake.forms import Form, save_source
from tests.bake.mapped import Subject
from tests.bake.outcome import bake
from tests.bake.tiny import build_tiny_subject
from tests.convert.test_convert_target_dtype import mixed_tensors, mlp_recipe
from tests.packages.helpers import CUSTOM, copy_example, run_recipe, write_package
from tests.packages.helpers import replace as replace_patch
from tests.packages.test_packages_ops import COMPUTED, PRESENT, convert_case
from tests.parity.running import Capture, failing, run
from tests.runtime.pairs import edit_manifest
from tests.support import Kind, RawTensor, convert, indices_of, qwen3_config, raw, save_tiny, write_checkpoint
from tests.test_lightness import PROBE, ROOT

RECIPES = shipped_recipes()
SUBJECTS: dict[str, Form] = {
    "inkling_mm_model:InklingForConditionalGeneration": "saved",
    "ernie4_5_vl_moe:Ernie4_5_VLMoeForConditionalGeneration": "saved",
    "kimi_k25:Kimi_K25ForConditionalGeneration": "saved",
    "clip_text_model:CLIPTextModel": "prefixed",
    "molmo2_text:Molmo2TextModel": "saved",
}
"""Types whose tensors are interleaved, cut, transposed, permuted and renamed while baking, and the form of the source."""


def proved(report: ParityReport, how: How) -> BytesLevel:
    level = report.levels["bytes"]
    assert isinstance(level, BytesLevel)
    assert [f"{failure.where}: {failure.what}" for failure in report.failures] == []
    assert report.proved is (how is not How.STRUCTURE)
    assert level.how is how
    assert level.not_compared == () or how is How.STRUCTURE
    return level


def check_proved(converted: Path, source: Path) -> None:
    """Nothing is found in a directory with digests, whatever it is compared with."""
    proved(verify(converted, source=source, levels=["bytes"]), How.BOTH)
    proved(verify(converted, levels=["bytes"]), How.DIGESTS)
    edit_manifest(converted, lambda old: replace(old, digests=None))
    proved(verify(converted, source=source, levels=["bytes"]), How.SOURCE)
    proved(verify(converted, levels=["bytes"]), How.STRUCTURE)


@pytest.mark.parametrize("number", range(len(RECIPES)), ids=[*RECIPES])
def test_every_recipe(number: int, tmp_path: Path) -> None:
    """In turn in one file or several, tied or not, in float32 or bfloat16."""
    name = [*RECIPES][number]
    kinds: tuple[Kind, ...] = load_recipe(RECIPES[name]).model_type  # type: ignore[assignment]
    source = save_tiny(
        tmp_path / "source",
        kinds[0],
        dtype=(torch.float32, torch.bfloat16)[number % 2],
        max_shard_size=("1GB", 10_000)[number // 2 % 2],
        tie=number % 3 == 0,
    )
    check_proved(convert(name, source, tmp_path / "out", digests=True).output, source)


@pytest.mark.parametrize("subject", list(SUBJECTS))
def test_types_that_are_baked(subject: str, tmp_path: Path) -> None:
    model = build_tiny_subject(Subject(*subject.split(":")))
    save_source(model, tmp_path / "source", SUBJECTS[subject], max_shard_size="100KB")
    bake(tmp_path / "source", tmp_path / "out", tmp_path)
    level = proved(verify(tmp_path / "out", source=tmp_path / "source", levels=["bytes"]), How.SOURCE)
    assert level.num_tensors == len(load_manifest(tmp_path / "out").tensors)


@pytest.fixture(scope="module")
def qwen3_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("bytes") / "source", "qwen3")


@pytest.mark.parametrize("name", PRESENT)
def test_every_op_of_a_package_and_where_each_element_comes_from(name: str, qwen3_source: Path, tmp_path: Path) -> None:
    converted = convert_case(name, qwen3_source, tmp_path)
    proved(verify(converted, source=qwen3_source, levels=["bytes"]), How.SOURCE)
    for record in load_manifest(converted).tensors:
        if record.op == "copy" or prod(record.shape) > 4096:
            continue
        made = compose(record.arrangement(), {part.source: part.stored() for part in record.parts})
        expected = {}
        for piece in made.pieces:
            sources, targets = indices_of(piece.numbers())
            pairs = zip(targets.tolist(), sources.tolist(), strict=True)
            expected.update({target: (piece.source, source) for target, source in pairs})
        assert len(expected) == prod(record.shape)
        assert {element: source_element(made, element) for element in expected} == expected
        with pytest.raises(ValueError, match="comes from nowhere"):
            source_element(made, prod(record.shape))


def test_the_index_of_an_element() -> None:
    found = [index_of(element, (2, 3, 2)) for element in range(12)]
    assert found == [(i, j, k) for i in range(2) for j in range(3) for k in range(2)]
    assert index_of(0, ()) == ()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_dtype_that_the_recipe_names(dtype: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", mixed_tensors("BF16", "F64"), qwen3_config())
    converted = convert(mlp_recipe(tmp_path, dtype), source, tmp_path / "out", digests=True, model_check=False).output
    check_proved(converted, source)


def test_empty_tensors_scalars_and_parts_of_bytes(tmp_path: Path) -> None:
    tensors = {
        "extra.empty": raw(torch.empty(0, 4)),
        "extra.scalar": raw(torch.tensor(3.0)),
        "extra.bytes": raw(torch.arange(7).byte()),
        "extra.halves": RawTensor("F4", (4, 2), b"1234"),
    }
    source = write_checkpoint(tmp_path / "source", {**mixed_tensors("F32", "F32"), **tensors}, qwen3_config())
    converted = convert("qwen3", source, tmp_path / "out", digests=True, model_check=False).output
    check_proved(converted, source)


def test_a_source_and_a_conversion_in_a_hub_cache(tmp_path: Path) -> None:
    """Every file is a link into `blobs`."""
    source = write_checkpoint(tmp_path / "source", mixed_tensors("F32", "F32"), qwen3_config())
    (source / "tokenizer.json").write_text("{}")
    converted = convert("qwen3", source, tmp_path / "out", digests=True, model_check=False).output
    cached = []
    for directory in (source, converted):
        repo = tmp_path / f"models--me--{directory.name}"
        snapshot = repo / "snapshots" / "main"
        snapshot.mkdir(parents=True)
        (repo / "blobs").mkdir()
        for number, path in enumerate(sorted(directory.iterdir())):
            path.rename(repo / "blobs" / str(number))
            (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
        cached.append(snapshot)
    proved(verify(cached[1], source=cached[0], levels=["bytes"]), How.BOTH)


def test_what_was_computed_is_proved_by_digests_alone(qwen3_source: Path, tmp_path: Path, capsys: Capture) -> None:
    write_package(tmp_path, COMPUTED)
    converted = run_recipe(tmp_path, replace_patch("./package:Norm", name="Qwen3RMSNorm"), qwen3_source)
    with_source = (converted, "--source", qwen3_source, "--level", "bytes")
    code, out, err = run(capsys, *with_source, "--json")
    value = json.loads(out)
    assert (code, value["holds"], value["proved"]) == (0, True, False)
    names = [f"model.layers.{layer}.input_layernorm.scale" for layer in (0, 1)]
    assert value["levels"]["bytes"]["not_compared"] == names
    assert f"not proved: 2 tensors were compared with nothing, e.g. {names[0]}; convert with `apply --dig" in err
    assert "2 tensors were compared with nothing" in failing(capsys, *with_source, "--require-proof")
    recipe = tmp_path / "recipe.yaml"
    digested = convert(recipe, qwen3_source, tmp_path / "digested", digests=True, trust_remote_code=True).output
    assert verify(digested, source=qwen3_source, levels=["bytes"]).proved
    assert verify(digested, levels=["bytes"]).proved


def test_a_kernel_package_is_looked_at_and_not_imported(qwen3_source: Path, tmp_path: Path) -> None:
    copy_example("custom_rms_norm", tmp_path)
    converted = run_recipe(tmp_path, replace_patch(CUSTOM), qwen3_source)
    assert verify(converted, source=qwen3_source, levels=["bytes"]).proved, "without trust"
    (folder,) = (converted / KERNELS_DIR).iterdir()
    layers = folder / "layers.py"
    layers.write_text(layers.read_text() + "#")
    for what in (
        f"kernel package {CUSTOM!r} was changed after the conversion",
        f"kernel package {CUSTOM!r} is missing",
    ):
        (failure,) = verify(converted, source=qwen3_source, levels=["bytes"]).failures
        assert (failure.where, failure.what) == (f"{KERNELS_DIR}/{folder.name}", what)
        layers.unlink(missing_ok=True)
    layers.symlink_to(tmp_path / "custom_rms_norm" / "layers.py")
    (failure,) = verify(converted, source=qwen3_source, levels=["bytes"]).failures
    assert "holds a link, layers.py" in failure.what
    folder.rename(folder.with_name("other"))
    (failure,) = verify(converted, source=qwen3_source, levels=["bytes"]).failures
    assert failure.what == f"kernel package {CUSTOM!r} is missing"
    package = load_manifest(converted).patches[0].layout.package
    assert package is not None
    for digest in ("sha256:../..", "sha256:", ""):
        wrong = replace(package, digest=digest)
        edit_manifest(
            converted,
            lambda old, wrong=wrong: replace(  # type: ignore[misc]
                old, patches=(replace(old.patches[0], layout=replace(old.patches[0].layout, package=wrong)),)
            ),
        )
        (failure,) = verify(converted, source=qwen3_source, levels=["bytes"]).failures
        assert failure.what == f"digest {digest!r} of {CUSTOM!r} is malformed"


def test_what_was_saved_from_a_model_has_no_source(qwen3_source: Path, tmp_path: Path, capsys: Capture) -> None:
    converted = convert("qwen3", qwen3_source, tmp_path / "out", digests=True).output
    model = load_converted(converted)
    model.resize_token_embeddings(70)
    saved = {}
    for name, size in (("single", "1GB"), ("shards", 20_000)):
        model.save_pretrained(tmp_path / name, variant="kconvert", max_shard_size=size)
        saved[name] = tmp_path / name
    assert len(load_manifest(saved["shards"]).weight_files) > 1
    for directory in saved.values():
        proved(verify(directory, levels=["bytes"]), How.STRUCTURE)
        line = failing(capsys, directory, "--level", "bytes", "--require-proof")
        assert line.endswith("the values of the tensors were compared with nothing"), "there is no way out"
        assert "save_pretrained" in failing(capsys, directory, "--source", qwen3_source, "--level", "bytes", code=2)


PEAK = "import resource" + PROBE.replace(
    '"heavy"', '"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "heavy"'
)


def _peak_mb(*argv: str | Path) -> int:
    """The most memory of a fresh process that runs a command, which has to load no torch."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, json.dumps(list(map(str, argv)))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["code"], result["heavy"]) == (0, []), done.stdout + done.stderr
    return int(result["peak_mb"])


def test_memory_does_not_grow_with_the_tensors_and_torch_is_not_loaded(tmp_path: Path) -> None:
    large = {"wide": torch.zeros(1 << 12, 1 << 12, dtype=torch.float32), **mixed_tensors("F32", "F32")}
    source = write_checkpoint(tmp_path / "source", large, qwen3_config())
    converted = convert("qwen3", source, tmp_path / "out", digests=True, model_check=False).output
    options = ("--source", source, "--level", "bytes", "--require-proof")
    assert _peak_mb("verify", converted, *options) < _peak_mb("verify", "--help") + 48
    assert (converted / PARITY_NAME).is_file()
