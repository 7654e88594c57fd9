"""The call that a module is tried with: the model's own, with random hidden states in the right place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from kconvert.kernels.probe import Call, capture_calls, sample_ids
from kconvert.parity.inputs import ModuleInput, cast_module, run_chain
from tests.support import tiny_model


class Attention(nn.Module):
    """Takes what attention modules take."""

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, mask: Any = None, cache: Any = None
    ) -> Any:
        return hidden_states, None


HIDDEN = torch.full((4, 3, 8), 7.0)
POSITIONS = (torch.ones(1, 3, 8), torch.zeros(1, 3, 8))


def made(call: Call, *, seed: int = 0) -> ModuleInput:
    return ModuleInput.from_call(Attention(), call, seed=seed)


def test_hidden_states_are_replaced_and_the_rest_is_kept() -> None:
    mask = torch.zeros(4, 1, 3, 3, dtype=torch.bool)
    built = made(Call((HIDDEN, POSITIONS), {"mask": mask, "cache": None}, None)).build("cpu", None)
    assert built.args[0].shape == HIDDEN.shape
    assert not (built.args[0] == 7.0).any()
    assert torch.equal(built.args[1][0], POSITIONS[0])
    assert built.kwargs["mask"].dtype == torch.bool
    assert built.kwargs["cache"] is None


@pytest.mark.parametrize("order", [("hidden_states", "position_embeddings", "mask"), ("mask", "hidden_states")])
def test_hidden_states_are_found_by_name_whatever_the_order(order: tuple[str, ...]) -> None:
    values: dict[str, Any] = {
        "hidden_states": HIDDEN,
        "position_embeddings": POSITIONS,
        "mask": torch.zeros(4, 1, 3, 3),
    }
    made_input = made(Call((), {name: values[name] for name in order}, None))
    assert made_input.place == "hidden_states"
    built = made_input.build("cpu", None)
    assert built.kwargs["hidden_states"].std() > 0.1
    assert torch.equal(built.kwargs["mask"], values["mask"])


def test_values_are_random_normal_and_half_of_the_sequences_small() -> None:
    call = Call((torch.zeros(4, 50, 60, dtype=torch.bfloat16), POSITIONS), {}, None)
    one, two = (made(call, seed=seed).build("cpu", None).args[0] for seed in (1, 1))
    assert torch.equal(one, two)
    assert one.dtype == torch.bfloat16
    assert one[:2].float().std() == pytest.approx(1.0, abs=0.05)
    assert one[2:].float().std() == pytest.approx(2.0**-10, rel=0.05)
    assert not torch.equal(one, made(call, seed=2).build("cpu", None).args[0])


def test_masks_stay_finite_in_a_shorter_dtype() -> None:
    lowest = torch.finfo(torch.float32).min
    mask = torch.tensor([[0.0, lowest, -float("inf")]])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        built = made(Call((HIDDEN, POSITIONS), {"mask": mask}, None)).build("cpu", dtype)
        assert built.kwargs["mask"].dtype == built.args[0].dtype == built.args[1][0].dtype == dtype
        assert built.kwargs["mask"].isfinite().tolist() == [[True, True, False]]


def test_each_run_has_a_cache_of_its_own() -> None:
    cache = DynamicCache()
    given = made(Call((HIDDEN, POSITIONS), {"cache": cache}, None))
    first = given.build("cpu", None).kwargs["cache"]
    first.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    assert given.build("cpu", None).kwargs["cache"].get_seq_length() == 0
    assert cache.get_seq_length() == 0


def test_a_module_without_hidden_states_is_called_as_it_was() -> None:
    ids = torch.tensor([[1, 2]])
    given = ModuleInput.from_call(nn.Embedding(4, 4), Call((ids,), {}, None), seed=0)
    assert given.place is None
    assert torch.equal(given.build("cpu", torch.float64).args[0], ids)


def test_a_cast_copy_leaves_the_module_as_it_is_and_keeps_ties() -> None:
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    module.register_buffer("count", torch.tensor(3))
    copied: Any = cast_module(module, torch.float64)
    assert {weight.dtype for weight in copied.parameters()} == {torch.float64}
    assert copied[0].weight is copied[1].weight
    assert copied.count.dtype == torch.int64
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}
    assert torch.equal(copied[0].weight.float(), module[0].weight)


def test_attention_of_a_real_model_runs_on_its_own_call() -> None:
    model = tiny_model("llama")
    path = "model.layers.0.self_attn"
    calls, failure = capture_calls(model, [path])
    assert failure is None
    module = model.get_submodule(path)
    given = ModuleInput.from_call(module, calls[path], seed=0)
    assert given.place == "hidden_states"
    for dtype in (torch.float32, torch.float64):
        output = run_chain((cast_module(module, dtype),), given.build("cpu", dtype), "cpu")
        assert output[0].shape == (2, 7, 32)
        assert output[0].dtype == dtype


def test_sample_ids_leave_out_what_the_config_gives_a_meaning() -> None:
    model = tiny_model("qwen3", vocab_size=8)
    model.config.image_token_id, model.config.pad_token_id = 5, 6  # beside 0 and 1, which open and end a text
    ids = sample_ids(model, batch=4, tokens=50)
    assert set(ids.flatten().tolist()) == {2, 3, 4, 7}
    assert torch.equal(ids, sample_ids(model, batch=4, tokens=50))
