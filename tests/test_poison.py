"""The poison itself: without it, a kernel that leaves a hole could pass."""

from __future__ import annotations

import pytest
import torch

ALLOCATIONS = {
    "empty": "torch.empty(3, 5, dtype=dtype)",
    "empty_like": "torch.empty_like(torch.zeros(3, 5, dtype=dtype))",
    "empty_strided": "torch.empty_strided((3, 5), (5, 1), dtype=dtype)",
    "new_empty": "torch.zeros(2, dtype=dtype).new_empty(3, 5)",
}


def allocate(expression: str, dtype: torch.dtype, *, caller: str) -> torch.Tensor:
    scope = {"__name__": caller, "torch": torch, "dtype": dtype}
    exec(f"tensor = {expression}", scope)
    tensor = scope["tensor"]
    assert isinstance(tensor, torch.Tensor)
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ALLOCATIONS)
def test_memory_that_lowprec_allocates_is_nan(name: str, dtype: torch.dtype) -> None:
    tensor = allocate(ALLOCATIONS[name], dtype, caller="lowprec.backends.reference")
    assert tensor.shape == (3, 5)
    assert tensor.float().isnan().all()


def test_integers_are_poisoned_with_their_extreme() -> None:
    tensor = allocate(ALLOCATIONS["empty"], torch.uint8, caller="lowprec.ops")
    assert (tensor == 255).all()


def test_memory_of_others_is_left_alone() -> None:
    out = torch.zeros(3, 5)
    for caller in ("numpy", "lowprecision", "tests.core"):
        exec("torch.empty(3, 5, out=out)", {"__name__": caller, "torch": torch, "out": out})
        assert (out == 0).all()
    exec("torch.empty(3, 5, out=out)", {"__name__": "lowprec.ops", "torch": torch, "out": out})
    assert out.isnan().all()
