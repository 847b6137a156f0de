"""Data and comparisons for the tests of kernels, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from lowprec.backends import reference
from lowprec.formats import Cast
from lowprec.rng import RandomStream
from lowprec.tensor import QuantizedTensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="run by test_triton_kernels in a subprocess")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def data(*shape: int, seed: int = 1) -> torch.Tensor:
    """Channels 12 octaves apart, blocks of zeros, of subnormals, of the largest numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    x = x * torch.exp2(torch.linspace(-6, 6, max(shape[-1], 1))[: shape[-1]])
    if x.shape[0] > 9:
        x[3] = 0
        x[4] *= 2.0**-126
        x[5] *= 2.0**-133
        x[6, ::2] = torch.finfo(torch.bfloat16).max
        x[7, ::3] = -0.0
    return x


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def poison(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0, 0], x[-1, -1], x[x.shape[0] // 2, 3] = torch.nan, torch.inf, -torch.inf
    return x


def law(
    x: torch.Tensor, cast: Cast, axis: int, stream: RandomStream | None = None
) -> QuantizedTensor:
    """What the reference gives; NaN and Inf poison a block alike."""
    finite = x.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return reference.quantize(finite, cast, axis=axis, stream=stream)


def assert_same(got: QuantizedTensor, want: QuantizedTensor) -> None:
    assert got.codes.shape == want.codes.shape
    assert got.scales.shape == want.scales.shape
    assert got.scales.dtype == want.scales.dtype
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(*(t.scales.nan_to_num(nan=-1.0) for t in (got, want)))
    assert got.axis == want.axis
