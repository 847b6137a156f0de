"""What every test runs under: uninitialised memory is poison, and GPU tests say why they skip."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

_POISON = 0xFF  # NaN in every float format, -1 or the maximum in integers


def poisoned(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An allocator whose result is filled with 0xFF bytes when lowprec is the caller."""

    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor:
            return tensor
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "lowprec" and tensor.device.type != "meta":
            tensor.untyped_storage().fill_(_POISON)
        return tensor

    return allocate


@pytest.fixture(autouse=True)
def _nan_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that reads memory nobody wrote must not pass by luck."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: make test-gpu on one"))
