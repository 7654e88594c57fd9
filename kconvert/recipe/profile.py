"""A recipe as it is used for one device: the entries that are for it.

An entry without `for:`, or with every device in it, is for all.  Without a device only those are used: what is written
then serves every device, and none at its best where the recipe has entries for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kconvert.errors import RecipeError, UsageError
from kconvert.names import DEVICES
from kconvert.recipe.fields import check_device
from kconvert.recipe.schema import Patch, Recipe

__all__ = ["Profile", "profile_of"]


@dataclass(frozen=True)
class Profile:
    """The part of a recipe that is used.

    Attributes:
        recipe: the recipe with the entries that are used, and no others.
        device: the device that was asked for, or None.
        devices: the devices that get just these entries; all of them where none was asked for.
        left_out: the entries that are for other devices.
    """

    recipe: Recipe
    device: str | None
    devices: tuple[str, ...]
    left_out: tuple[Patch, ...]


def profile_of(recipe: Recipe, device: str | None) -> Profile:
    """What a recipe says for a device, or for none in particular.

    Raises:
        UsageError: no device that recipes know.
        RecipeError: every entry is for others.
    """
    if device is not None:
        try:
            check_device(device)
        except RecipeError as error:
            raise UsageError(error.what, fix=error.fix) from None
    used = _used(recipe, device)
    if not used and not recipe.bake:
        others = dict.fromkeys(name for patch in recipe.patches for name in patch.devices or ())
        raise RecipeError(
            f"no entry of recipe {recipe.name!r} is for {'all devices' if device is None else device}",
            where=recipe.where,
            fix=f"give --device {' or '.join(others)}",
        )
    return Profile(
        recipe.model_copy(update={"patches": used}),
        device,
        tuple(name for name in DEVICES if device is None or _used(recipe, name) == used),
        tuple(patch for patch in recipe.patches if not patch.is_for(device)),
    )


def _used(recipe: Recipe, device: str | None) -> tuple[Patch, ...]:
    return tuple(patch for patch in recipe.patches if patch.is_for(device))
