"""Packing in memory: state dicts from stock names to packed ones and back, by arrangements of any kind."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from kconvert.errors import UsageError
from kconvert.kernels.packing import Packing, pack_on_load, pack_state, packings_of_targets, unpack_state
from kconvert.kernels.rearrange import copy_pieces, rearrange
from kconvert.transforms import Arrangement, whole
from kconvert.transforms import arrangement as ops

GATE, UP = torch.arange(12.0).reshape(3, 4), 100 + torch.arange(12.0).reshape(3, 4)
STOCK = {"mlp.gate": GATE, "mlp.up": UP, "norm": torch.ones(4)}


def gate_up() -> Arrangement:
    return ops.concatenate([whole("mlp.gate", (3, 4)), whole("mlp.up", (3, 4))])


def packings(made: Mapping[str, Arrangement]) -> tuple[Packing, ...]:
    return packings_of_targets(made, {name: tuple(tensor.shape) for name, tensor in STOCK.items()})


MADE: Mapping[str, tuple[dict[str, Arrangement], dict[str, torch.Tensor]]] = {
    "joined": ({"mlp.both": gate_up()}, {"mlp.both": torch.cat([GATE, UP])}),
    "joined and turned": ({"mlp.both": ops.transpose(gate_up(), 0, 1)}, {"mlp.both": torch.cat([GATE, UP]).T}),
    "dealt out": (
        {"mlp.both": ops.interleave(gate_up(), 3, 0)},
        {"mlp.both": torch.stack([GATE, UP], 1).reshape(6, 4)},
    ),
    "cut across": (  # each of the two holds a half of both
        {f"mlp.{n}": part for n, part in enumerate(ops.chunk(gate_up(), 2, 1))},
        {f"mlp.{n}": part for n, part in enumerate(torch.cat([GATE, UP]).chunk(2, 1))},
    ),
    "renamed": (
        {"mlp.g": whole("mlp.gate", (3, 4)), "mlp.u": whole("mlp.up", (3, 4))},
        {"mlp.g": GATE, "mlp.u": UP},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("name", list(MADE))
def test_there_and_back(name: str, dtype: torch.dtype) -> None:
    made, expected = MADE[name]
    found = packings(made)
    stock = {key: tensor.to(dtype) for key, tensor in STOCK.items()}
    packed = pack_state(found, stock)
    assert packed.keys() == {"norm", *made}
    for key, tensor in expected.items():
        assert packed[key].dtype is dtype
        assert packed[key].float().tolist() == tensor.to(dtype).float().tolist()
    again = unpack_state(found, packed)
    assert all(tensor.is_contiguous() for tensor in (*packed.values(), *again.values()))
    assert {key: tensor.float().tolist() for key, tensor in again.items()} == {
        key: tensor.float().tolist() for key, tensor in stock.items()
    }
    assert len({tensor.untyped_storage().data_ptr() for tensor in again.values()}) == 3


def test_groups_are_the_least_that_can_be_told_apart() -> None:
    assert [sorted(each.targets) for each in packings(MADE["renamed"][0])] == [["mlp.g"], ["mlp.u"]]
    assert [sorted(each.targets) for each in packings(MADE["cut across"][0])] == [["mlp.0", "mlp.1"]]
    (one,) = packings(MADE["joined"][0])
    assert (list(one.sources), one.is_rename, one.is_identity) == (["mlp.gate", "mlp.up"], False, False)


def test_a_rename_is_no_identity() -> None:
    (renamed,) = packings({"mlp.g": whole("mlp.gate", (3, 4))})
    (kept,) = packings({"mlp.gate": whole("mlp.gate", (3, 4))})
    (turned,) = packings({"mlp.gate": ops.transpose(whole("mlp.gate", (3, 4)), 0, 1)})
    assert [(each.is_rename, each.is_identity) for each in (renamed, kept, turned)] == [
        (True, False),
        (True, True),
        (False, False),
    ]


@pytest.mark.parametrize(
    "made",
    [
        {"half": ops.narrow(whole("mlp.gate", (3, 4)), 0, 0, 2)},
        {"twice": ops.concatenate([whole("mlp.gate", (3, 4))] * 2)},
        {"one": whole("mlp.gate", (3, 4)), "two": whole("mlp.gate", (3, 4))},
        {"computed": Arrangement((3, 4), ())},
    ],
)
def test_what_cannot_be_undone(made: dict[str, Arrangement]) -> None:
    with pytest.raises(ValueError, match="do not hold each element of their sources once"):
        packings(made)


def test_names_seen_from_inside_and_from_outside() -> None:
    (one,) = packings(MADE["joined"][0])
    inside = one.below("mlp.")
    assert (list(inside.targets), list(inside.sources)) == (["both"], ["gate", "up"])
    assert inside.targets["both"].sources == ("gate", "up")
    assert inside.sources["up"].sources == ("both",)
    assert inside.above("mlp.") == one
    outside = one.above("model.")
    assert (list(outside.targets), outside.targets["model.mlp.both"].sources[0]) == (
        ["model.mlp.both"],
        "model.mlp.gate",
    )


def test_a_group_in_part_is_refused_for_a_whole_state() -> None:
    found = packings(MADE["joined"][0])
    with pytest.raises(UsageError, match=r"has 'mlp\.gate' and not all of"):
        pack_state(found, {"mlp.gate": GATE})
    assert pack_state(found, {"norm": GATE}).keys() == {"norm"}
    assert unpack_state(packings(MADE["cut across"][0]), {"mlp.0": GATE}).keys() == {"mlp.0"}


class Packed(nn.Module):
    """A model that holds the tensors of one of `MADE`, zeros at first."""

    kconvert_file_packings: tuple[Packing, ...] = ()

    def __init__(self, name: str) -> None:
        super().__init__()
        self.mlp = nn.ParameterDict({key[4:]: nn.Parameter(torch.zeros_like(t)) for key, t in MADE[name][1].items()})
        self.kconvert_packings = packings(MADE[name][0])
        self.register_load_state_dict_pre_hook(pack_on_load)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", list(MADE))
def test_stock_names_are_loaded_into_their_places(name: str) -> None:
    whole_model, by_parts = Packed(name), Packed(name)
    state = {key: tensor.clone() for key, tensor in STOCK.items() if key != "norm"}
    whole_model.load_state_dict(state)
    for key, tensor in state.items():  # as the shards of a checkpoint come, one after another
        by_parts.load_state_dict({key: tensor}, strict=False)
    for model in (whole_model, by_parts):
        found = {f"mlp.{key}": parameter.tolist() for key, parameter in model.mlp.items()}
        assert found == {key: tensor.tolist() for key, tensor in MADE[name][1].items()}


def test_another_shape_is_said() -> None:
    with pytest.raises(UsageError, match=r"'mlp.gate' is \[4, 3\], the model has \[3, 4\]"):
        Packed("joined").load_state_dict({"mlp.gate": GATE.T, "mlp.up": UP})
    found = packings(MADE["joined"][0])
    with pytest.raises(UsageError, match=r"'mlp.both' is \[8, 4\], the model has \[6, 4\]"):
        unpack_state(found, {"mlp.both": torch.zeros(8, 4)})
    with pytest.raises(UsageError, match=r"'mlp.up' is \[4, 4\], the model has \[3, 4\]"):
        pack_state(found, {"mlp.gate": GATE, "mlp.up": torch.zeros(4, 4), "norm": torch.zeros(1)})


# --- tensors ----------------------------------------------------------------------------------------


def test_what_strides_can_tell_is_a_view() -> None:
    packed = torch.cat([GATE, UP])
    for part, start in zip(ops.chunk(whole("p", (6, 4)), 2), (0, 12), strict=True):
        view = rearrange(part, {"p": packed})
        assert view.data_ptr() == packed.data_ptr() + 4 * start
    turned = rearrange(ops.transpose(whole("p", (6, 4)), 0, 1), {"p": packed})
    assert torch.equal(turned, packed.T)
    assert turned.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


def test_gradients_flow_back_to_every_element() -> None:
    gate, up = (tensor.clone().requires_grad_() for tensor in (GATE, UP))
    made = rearrange(ops.interleave(gate_up(), 3, 0), {"mlp.gate": gate, "mlp.up": up})
    (made * torch.arange(24.0).reshape(6, 4)).sum().backward()
    assert gate.grad is not None
    assert up.grad is not None
    assert gate.grad[:, 0].tolist() == [0, 8, 16]
    assert up.grad[:, 0].tolist() == [4, 12, 20]


def test_a_tensor_that_is_not_contiguous_or_part_of_another_storage() -> None:
    base = torch.arange(60.0).reshape(5, 12)
    source = base.T[2:8]  # [6, 5], strides (1, 12), with an offset
    made = ops.transpose(whole("a", (6, 5)), 0, 1)
    assert torch.equal(rearrange(made, {"a": source}), source.T)
    inner = base[1:4]
    assert torch.equal(rearrange(ops.narrow(whole("a", (3, 12)), 1, 2, 5), {"a": inner}), inner[:, 2:7])


def test_on_meta_there_are_only_shapes() -> None:
    made = rearrange(gate_up(), {name: torch.empty(3, 4, device="meta") for name in ("mlp.gate", "mlp.up")})
    assert (made.device.type, tuple(made.shape)) == ("meta", (6, 4))


def test_values_are_converted_where_they_are_copied() -> None:
    target = torch.zeros(6, 4, dtype=torch.float64)
    copy_pieces(gate_up().pieces, {"mlp.gate": GATE.half(), "mlp.up": UP.bfloat16()}, target)
    assert torch.equal(target, torch.cat([GATE, UP]).double())
    turned = torch.zeros(4, 6).T  # not contiguous: what is written must not land in a copy
    copy_pieces(gate_up().pieces, {"mlp.gate": GATE, "mlp.up": UP}, turned)
    assert torch.equal(turned, torch.cat([GATE, UP]))


def test_scalars_and_tensors_of_no_elements() -> None:
    assert rearrange(whole("a", ()), {"a": torch.tensor(3.0)}).item() == 3.0
    empty = ops.concatenate([whole("a", (0, 4)), whole("b", (3, 4))])
    assert torch.equal(rearrange(empty, {"a": torch.empty(0, 4), "b": GATE}), GATE)
