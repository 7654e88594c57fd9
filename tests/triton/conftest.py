"""Device code on a GPU where there is one, and else in Triton's interpreter, which `tests/conftest.py` has chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kconvert.kernels.triton.launch import Kernel, Launch


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors go that a kernel is given."""
    return "cuda" if torch.cuda.is_available() else "cpu"


_LAUNCHED: dict[Kernel, tuple[Any, ...]] = {}


@pytest.fixture(autouse=True)
def _kernels_are_launched_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test launches: no kernel ever gets tensors of other dtypes, None elsewhere, or numbers of other types."""
    call = Launch.__call__

    def checked(self: Launch, *tensors: torch.Tensor | None) -> None:
        kinds = [None if tensor is None else tensor.dtype for tensor in tensors]
        given = (kinds, [type(value) for value in self._values])
        assert _LAUNCHED.setdefault(self._kernel, given) == given
        call(self, *tensors)

    monkeypatch.setattr(Launch, "__call__", checked)
