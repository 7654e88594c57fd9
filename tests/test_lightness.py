"""What a fresh interpreter may do without loading torch or transformers.

Each costs seconds to import; a command that only reads headers must not make its user wait for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent

# argv[1] is null for `import kconvert` alone, or the arguments of a command.  The last line of stdout is the result.
PROBE = """
import json, sys
import kconvert
argv = json.loads(sys.argv[1])
code = 0
if argv is not None:
    from kconvert.cli import main
    code = main(argv)
print()
print(json.dumps({"code": code, "heavy": sorted({"torch", "transformers"} & set(sys.modules))}))
"""


def run_fresh(argv: list[str] | None) -> None:
    """Run one command (None: only the import) in a fresh interpreter, and check its exit code and its imports."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(argv)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {"code": 0, "heavy": []}, done.stdout + done.stderr


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Qwen3 checkpoint of one layer, written without torch: hidden size 8, MLP 16, two heads of 4."""
    shapes = {
        "model.embed_tokens.weight": (32, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (32, 8),
        "model.layers.0.input_layernorm.weight": (8,),
        "model.layers.0.post_attention_layernorm.weight": (8,),
        "model.layers.0.mlp.gate_proj.weight": (16, 8),
        "model.layers.0.mlp.up_proj.weight": (16, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 16),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.k_proj.weight": (8, 8),
        "model.layers.0.self_attn.v_proj.weight": (8, 8),
        "model.layers.0.self_attn.o_proj.weight": (8, 8),
        "model.layers.0.self_attn.q_norm.weight": (4,),
        "model.layers.0.self_attn.k_norm.weight": (4,),
    }
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: np.ones(shape, dtype=np.float32) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_import_is_light() -> None:
    run_fresh(None)


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["apply", "--help"],
        ["list-kernels", "--no-probe"],
        ["check-kernel", "--help"],
        ["new-kernel", "--help"],
        ["revert", "--help"],
    ],
    ids=" ".join,
)
def test_command_is_light(argv: list[str]) -> None:
    run_fresh(argv)


def test_new_kernel_is_light(tmp_path: Path) -> None:
    run_fresh(["new-kernel", "FastMLP", "-o", str(tmp_path / "new")])


def test_plan_without_model_check_is_light(checkpoint: Path) -> None:
    run_fresh(["plan", "qwen3", str(checkpoint), "--no-model-check"])


def test_apply_without_model_check_is_light(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "converted"
    run_fresh(["apply", "qwen3", str(checkpoint), "-o", str(output), "--no-model-check"])
    assert (output / "kconvert_manifest.json").is_file()


def test_revert_is_light(checkpoint: Path, tmp_path: Path) -> None:
    converted, output = tmp_path / "converted", tmp_path / "again"
    run_fresh(["apply", "qwen3", str(checkpoint), "-o", str(converted), "--no-model-check"])
    run_fresh(["revert", str(converted), "-o", str(output)])
    assert (output / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
