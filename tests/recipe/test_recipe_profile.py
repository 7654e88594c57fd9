"""Entries for some devices: what `for` may say, and which entries are used for a device or for none."""

from __future__ import annotations

import pytest

from kconvert.errors import RecipeError, UsageError
from kconvert.kernels.base import DeviceType
from kconvert.kernels.specs import kernel_specs
from kconvert.names import DEVICES
from kconvert.recipe import Profile, Recipe, parse_recipe, profile_of

HEAD = "recipe: 1\nname: made\nmodel_type: qwen3\n"
ENTRIES = {
    "all": "",
    "listed": "    for: [npu, cpu, cuda]\n",
    "two": "    for: [cuda, cpu]\n",
    "npu": "    for: npu\n",
}


def recipe_of(*names: str, head: str = HEAD) -> Recipe:
    entries = [
        f'  - kernel: cpu_fused_swiglu\n{ENTRIES[name]}    replace: {{class: A, path: "{name}"}}\n' for name in names
    ]
    return parse_recipe(head + "patches:\n" + "".join(entries), "r.yaml")


def used(profile: Profile) -> list[str]:
    return [patch.targets[0].path.text for patch in profile.recipe.patches]


@pytest.mark.parametrize(
    ("device", "names", "devices"),
    [
        (None, ["all", "listed"], DEVICES),
        ("npu", ["all", "listed", "npu"], ("npu",)),
        ("cpu", ["all", "listed", "two"], ("cpu", "cuda")),
        ("cuda", ["all", "listed", "two"], ("cpu", "cuda")),
    ],
)
def test_entries_of_a_device(device: str | None, names: list[str], devices: tuple[str, ...]) -> None:
    recipe = recipe_of(*ENTRIES)
    profile = profile_of(recipe, device)
    assert (used(profile), profile.device, profile.devices) == (names, device, devices)
    assert {patch.targets[0].path.text for patch in profile.left_out} == ENTRIES.keys() - {*names}
    assert (profile.recipe.text, profile.recipe.where) == (recipe.text, recipe.where)
    assert [patch.line for patch in profile.recipe.patches] == [
        patch.line for patch in recipe.patches if patch.is_for(device)
    ]


@pytest.mark.parametrize("device", [None, *DEVICES])
def test_a_recipe_without_devices_is_the_same_for_all(device: str | None) -> None:
    profile = profile_of(recipe_of("all"), device)
    assert (used(profile), profile.devices, profile.left_out) == (["all"], DEVICES, ())


def test_no_entry_is_left() -> None:
    with pytest.raises(RecipeError) as caught:
        profile_of(recipe_of("npu"), None)
    assert str(caught.value).startswith("r.yaml:1: no entry of recipe 'made' is for all devices")
    assert caught.value.fix == "give --device npu"
    with pytest.raises(RecipeError, match="no entry of recipe 'made' is for cpu"):
        profile_of(recipe_of("npu"), "cpu")
    assert used(profile_of(recipe_of("npu", head=f"{HEAD}bake: true\n"), None)) == []


def test_an_unknown_device_is_a_usage_error() -> None:
    with pytest.raises(UsageError) as caught:
        profile_of(recipe_of("all"), "cudaa")
    assert caught.value.what == "unknown device 'cudaa'"
    assert caught.value.fix == "did you mean cuda? known devices: cpu, cuda, npu"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("tpu", "unknown device 'tpu'"),
        ("[]", "'for' is an empty list"),
        ("[npu, npu]", "'for' lists 'npu' twice"),
        ("3", "'for' must be a string or a list of strings, not"),
        ("[cpu, [npu]]", "'for' must be a string or a list of strings, not"),
    ],
)
def test_what_for_may_not_say(value: str, what: str) -> None:
    text = f"{HEAD}patches:\n  - kernel: a\n    for: {value}\n    replace: {{class: A, path: a}}\n"
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "r.yaml")
    assert caught.value.what.startswith(what)
    assert caught.value.where == "r.yaml:6"


def test_devices_are_those_of_the_kernels() -> None:
    assert {entry.device for _, entry in kernel_specs().values()} == {*DEVICES}
    assert {*DEVICES} <= {device.value for device in DeviceType}
