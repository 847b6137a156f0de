"""Emulated MXFP8 on a GPU: by the kernels' values and one bf16 product, exact up to summation."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

import lowprec
from lowprec.backends import triton_kernels
from lowprec.formats import Cast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
]
SHAPES = [(0, 64, 96), (63, 96, 128), (1000, 272, 200), (4096, 512, 4096)]


def layer(columns: int, features: int, *, bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(columns, features, bias=bias, device="cuda", dtype=torch.bfloat16)
    plan = lowprec.plan(model, lowprec.load_recipe("mxfp8"))
    backends = plan.layers[0].stages[0].backends
    assert {one.product for one in backends.values()} == {"emulated"}
    assert {one.left for one in backends.values()} == {"triton"}
    lowprec.apply(model, plan)
    return model


def exact(cast: str, t: torch.Tensor, axis: int) -> torch.Tensor:
    """Values of the cast operand, by the reference, float64."""
    q = lowprec.quantize(t.cpu().float(), cast, axis=axis)
    return lowprec.dequantize(q, torch.float64).cuda()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_quantized_operands(
    shape: tuple[int, int, int], *, bias: bool
) -> None:
    rows, columns, features = shape
    model = layer(columns, features, bias=bias)
    x = torch.randn(rows, columns, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(rows, features, device="cuda").bfloat16()
    y = model(x)
    dx, dw = torch.autograd.grad(y, [x, model.weight], dy)
    w = exact("mxfp8_32x32", model.weight.detach(), -1)
    want_y = exact("mxfp8", x.detach(), -1) @ w.mT
    if bias:
        want_y += model.bias.detach().double()
    want_dx = exact("mxfp8", dy, -1) @ w
    want_dw = exact("mxfp8", dy, -2).mT @ exact("mxfp8", x.detach(), -2)
    for got, want in ((y, want_y), (dx, want_dx), (dw, want_dw)):
        assert got.dtype == torch.bfloat16
        rounded = (want.bfloat16().double() - want).norm()
        assert (got.double() - want).norm() <= 1.05 * rounded + 1e-12 * want.norm()


def test_values_enter_and_not_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layer(256, 512, bias=False)
    x = torch.randn(64, 256, device="cuda").bfloat16().requires_grad_()
    taken = []
    round_trip = triton_kernels.round_trip
    monkeypatch.setattr(
        triton_kernels,
        "round_trip",
        lambda t, cast, **options: (taken.append(tuple(t.shape)), round_trip(t, cast, **options))[
            1
        ],
    )
    model(x).sum().backward()
    # w once for fprop and dgrad: by tiles it has the same values both ways.
    assert sorted(taken) == sorted([(512, 256)] + [(64, 512)] * 2)


def test_codes_decode_by_the_kernel_in_a_product() -> None:
    a, b = (torch.randn(n, 192, device="cuda") for n in (64, 96))
    q = [lowprec.quantize(t, Cast.parse("mxfp8")) for t in (a, b)]
    got = lowprec.ops.matmul(*q, out_dtype=torch.float32)
    left, right = (lowprec.dequantize(one, torch.float64) for one in q)
    want = left @ right.mT
    assert (got.double() - want).norm() <= 1e-6 * want.norm()
