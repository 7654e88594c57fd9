"""`--device`: one recipe, what it writes for each device, and experts that are stored transposed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kconvert import load_converted
from kconvert.cli.app import run
from kconvert.errors import CheckpointError, RecipeError
from kconvert.manifest import load_manifest
from kconvert.names import DEVICES
from kconvert.rewrite import OtherRunError
from kconvert.rewrite.output import Partial
from tests.support import Kind, check_refused, convert, read_raw, save_tiny, tiny_model, write_recipe

RECIPE = "qwen3-moe-devices"
IDS = torch.tensor([[3, 9, 27, 17, 51, 25, 11], [2, 4, 8, 16, 32, 5, 6]])
STORED = ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("source") / "model", "qwen3_moe")


@pytest.fixture(scope="module")
def outputs(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """What is written for each device, and for none."""
    folder = tmp_path_factory.mktemp("outputs")
    return {
        device: convert(RECIPE, source, folder / str(device), device=device, digests=True).output
        for device in (None, *DEVICES)
    }


@pytest.mark.parametrize(
    ("device", "layout", "devices", "views"),
    [
        (None, None, DEVICES, ()),
        ("cpu", "experts", ("cpu", "cuda"), ("npu",)),
        ("cuda", "experts", ("cpu", "cuda"), ("npu",)),
        ("npu", "experts_transposed", ("npu",), ("cpu", "cuda")),
    ],
)
def test_what_the_manifest_says(
    outputs: dict[str | None, Path], device: str | None, layout: str | None, devices: tuple[str, ...], views: Any
) -> None:
    manifest = load_manifest(outputs[device])
    assert (manifest.device, manifest.devices, manifest.view_devices) == (device, devices, views)
    layouts = {patch.layout.name for patch in manifest.patches}
    assert layouts & {"experts", "experts_transposed"} == {layout} - {None}
    assert {"rms_norm", "qkv_proj"} <= layouts


def test_the_weights_are_those_of_the_model_transposed(outputs: dict[str | None, Path]) -> None:
    stored, others = read_raw(outputs["npu"]), read_raw(outputs["cpu"])
    model = load_converted(outputs["cpu"])
    for stock in STORED:
        weight = model.get_parameter(stock).detach().numpy()
        assert stock not in stored
        assert others[stock].data == weight.tobytes()
        turned = stored[f"{stock}_transposed"]
        assert turned.shape == (weight.shape[0], weight.shape[2], weight.shape[1])
        assert turned.data == weight.transpose(0, 2, 1).tobytes()


@pytest.mark.parametrize("device", [None, "npu", "cuda"])
def test_every_variant_computes_what_stock_does(outputs: dict[str | None, Path], device: str | None) -> None:
    stock, model = tiny_model("qwen3_moe"), load_converted(outputs[device])
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, rtol=0, atol=2e-5)
    report = model.kconvert_report
    views = {module["kernel"] for module in report.to_dict()["modules"] if module["by_view"]}
    assert views == ({"cpu_fused_moe_transposed"} if device == "npu" else set())
    assert ("through views of weights that are stored for another device:" in str(report)) is (device == "npu")


def test_the_source_comes_back_and_both_levels_of_bytes_pass(
    outputs: dict[str | None, Path], source: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert run(["revert", str(outputs["npu"]), "-o", str(tmp_path / "back")]) == 0
    name = "model.safetensors"
    assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert run(["verify", str(outputs["npu"]), "--level", "bytes"]) == 0
    assert run(["verify", str(outputs["npu"]), "--level", "bytes", "--source", str(source)]) == 0


def test_a_saved_model_is_the_stock_one(outputs: dict[str | None, Path], source: Path, tmp_path: Path) -> None:
    load_converted(outputs["npu"]).save_pretrained(tmp_path)
    found, expected = (type(tiny_model("qwen3_moe")).from_pretrained(path) for path in (tmp_path, source))
    assert found.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(one, two) for one, two in zip(found.parameters(), expected.parameters(), strict=True))


def test_a_run_for_another_device_does_not_go_on_with_what_is_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices with the same entries: only the manifest tells them apart."""

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Partial, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(RECIPE, source, tmp_path / "out", device="cpu")
    with pytest.raises(OtherRunError, match="--device changed"):
        convert(RECIPE, source, tmp_path / "out", device="cuda")
    assert convert(RECIPE, source, tmp_path / "out", device="cpu").bytes_resumed


ENTRY = """\
  - kernel: npu_fused_moe_transposed
    replace: {{class: {cls}, path: "model.layers.*.mlp.experts"}}
"""


@pytest.mark.parametrize(("kind", "cls"), [("gpt_oss", "GptOssExperts"), ("qwen3_moe", "Qwen3MoeExperts")])
def test_weights_that_lie_so_already(kind: Kind, cls: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", kind)
    recipe = write_recipe(tmp_path / "r.yaml", ENTRY.format(cls=cls), model_type=kind)
    if kind == "gpt_oss":
        words = ["layout 'experts_transposed' does not fit", "transposed already: the layout for it is 'experts'"]
        check_refused(RecipeError, 3, words, recipe, source, tmp_path / "out")
        recipe = write_recipe(
            tmp_path / "r.yaml",
            ENTRY.format(cls=cls).replace("npu_fused_moe_transposed", "npu_fused_moe"),
            model_type=kind,
        )
        manifest = load_manifest(convert(recipe, source, tmp_path / "out").output)
        assert (manifest.devices, manifest.view_devices) == (DEVICES, ())
        return
    manifest = load_manifest(convert(recipe, source, tmp_path / "out").output)
    assert (manifest.devices, manifest.view_devices) == (DEVICES, ("cpu", "cuda"))


def test_nothing_is_joined_so_a_dtype_is_refused(source: Path, tmp_path: Path) -> None:
    text = ENTRY.format(cls="Qwen3MoeExperts") + "    dtype: float32\n"
    recipe = write_recipe(tmp_path / "r.yaml", text, model_type="qwen3_moe")
    words = ["'dtype' beside layout 'experts_transposed', which joins no tensors"]
    check_refused(RecipeError, 3, words, recipe, source, tmp_path / "out")


def test_two_entries_for_one_device_that_take_the_same_modules(source: Path, tmp_path: Path) -> None:
    twice = ENTRY.format(cls="Qwen3MoeExperts") + ENTRY.format(cls="Qwen3MoeExperts") + "    for: npu\n"
    recipe = write_recipe(tmp_path / "r.yaml", twice, model_type="qwen3_moe")
    assert convert(recipe, source, tmp_path / "one").output.is_dir()
    with pytest.raises(RecipeError, match="is already taken by the entry at"):
        convert(recipe, source, tmp_path / "two", device="npu")


def test_the_command_line(source: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["apply", RECIPE, str(source), "-o", str(tmp_path / "none")]) == 0
    shown = capsys.readouterr().err
    assert "1 entry for cuda and cpu only: see --device" in shown
    assert "1 entry for npu only: see --device" in shown
    assert max(map(len, shown.splitlines())) <= max(80, len(str(tmp_path)) + 60)
    assert run(["apply", RECIPE, str(source), "-o", str(tmp_path / "npu"), "--device", "npu", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["device"], value["devices"], value["view_devices"]) == ("npu", ["npu"], ["cpu", "cuda"])
    assert [entry["devices"] for entry in value["entries_left_out"]] == [["cuda", "cpu"]]
    assert run(["inspect", str(tmp_path / "npu")]) == 0
    assert "npu; cpu and cuda read some weights through a view" in capsys.readouterr().out
    assert run(["plan", RECIPE, str(source), "--device", "cuda"]) == 0
    shown = capsys.readouterr().out
    assert "left out: 1 entry for npu only\n" in shown
    assert "for cpu, cuda; npu reads some weights through a view" in shown
    assert "--device cuda" in shown.partition("Convert it")[2]
    assert (
        run(["apply", RECIPE, str(source), "-o", str(tmp_path / "dry"), "--device", "npu", "--dry-run", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["device"] == "npu"
    for command in ("apply", "plan"):
        assert run([command, RECIPE, str(source), "--device", "tpu"]) == 2
        assert "unknown device 'tpu'" in capsys.readouterr().err
    assert not (tmp_path / "dry").exists()


def test_without_the_model_the_names_of_these_experts_are_not_known(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        convert(RECIPE, source, tmp_path / "out", device="npu", model_check=False)
