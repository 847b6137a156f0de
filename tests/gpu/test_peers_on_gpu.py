"""torchao and Transformer Engine beside ours on a GPU: y, dx, dw of a layer, products, block codes.

Each test that needs a library skips with the library's own refusal where it is absent.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import lowprec
from lowprec import ops
from lowprec.backends import ao, te
from lowprec.backends.facts import Facts
from lowprec.formats import Cast
from lowprec.hardware import current
from lowprec.policy import LinearPolicy

pytestmark = pytest.mark.gpu
PORTABLE = "mxfp8_1x128 x mxfp8_128x128 / mxfp8_1x128 x mxfp8_128x128 / mxfp8_1x128"
BLOCKS = PORTABLE.replace("mxfp8", "fp8")
# Norm of the difference over the norm of ours, bf16 layers. One rounding to bf16 is 1.7e-3; a scale
# that differs in its last bit moves some codes by one step; torchao rounds rowwise products twice.
LAYERS = [
    (ao, "fp8_tensorwise", 6e-3),
    (ao, "fp8_rowwise", 8e-3),
    (ao, "mxfp8", 3e-3),
    (ao, "mxfp8 / mxfp8 / bf16", 3e-3),
    (te, "fp8_tensorwise", 6e-3),
    (te, "fp8_tensorwise / bf16 / bf16", 6e-3),
    (te, PORTABLE, 3e-3),
    (te, BLOCKS, 3e-3),
    (te, "mxfp8_1x128", 3e-3),
]
PRODUCTS = [
    (ao, "fp8_tensorwise", "fp8_tensorwise"),
    (ao, "mxfp8", "mxfp8"),
    (te, "fp8_tensorwise", "fp8_tensorwise"),
    (te, "mxfp8_1x128", "mxfp8_128x128"),
    (te, "fp8_128x128", "fp8_1x128"),
    (te, "fp8_1x128", "fp8_1x128"),
]


def skip_without(peer: ModuleType) -> None:
    module = "torchao.float8" if peer is ao else "transformer_engine.pytorch"
    if reason := peer.LIBRARY.unusable(module):
        pytest.skip(reason)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def passes(layer: nn.Module, weight: nn.Parameter, x: torch.Tensor, dy: torch.Tensor) -> list[Any]:
    x, weight.grad = x.detach().requires_grad_(), None
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize(("peer", "text", "bound"), LAYERS)
@pytest.mark.parametrize("shape", [(512, 384, 256), (1024, 512, 2048)])
def test_a_peer_layer_agrees_with_ours(
    peer: ModuleType, text: str, bound: float, shape: tuple[int, int, int]
) -> None:
    skip_without(peer)
    policy = LinearPolicy.parse(text)
    if peer is te and (reason := te.unfit(te.FORMS[policy], current())):
        pytest.skip(f"{te.FORMS[policy].recipe} {reason}")
    m, n, k = shape
    torch.manual_seed(0)
    plain = nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device="cuda")
    ours = lowprec.Linear(k, n, bias=False, dtype=torch.bfloat16, device="cuda", policy=policy)
    ours.weight = plain.weight
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn(m, n, dtype=torch.bfloat16, device="cuda")
    w64, x64, dy64 = plain.weight.detach().double(), x.double(), dy.double()
    exact = (x64 @ w64.T, dy64 @ w64, dy64.T @ x64)
    mine = passes(ours, plain.weight, x, dy)
    layer = peer.layer(plain, policy)
    assert any(one is plain.weight for one in layer.parameters())
    theirs = passes(layer, plain.weight, x, dy)
    found = {}
    for name, a, b, c in zip(("y", "dx", "dw"), theirs, mine, exact, strict=True):
        found[name] = (relative(a, b), relative(b, c), relative(a, c))
    print(text, shape, found)
    for difference, our_error, their_error in found.values():
        assert difference <= bound, found
        assert abs(their_error / our_error - 1) <= 0.02, found


@pytest.mark.parametrize("peer", [ao, te])
def test_a_peer_layer_keeps_the_bias(peer: ModuleType) -> None:
    skip_without(peer)
    policy = LinearPolicy.parse("fp8_tensorwise")
    plain = nn.Linear(256, 128, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        plain.bias.fill_(100.0)
    layer = peer.layer(plain, policy)
    y = layer(torch.randn(64, 256, dtype=torch.bfloat16, device="cuda"))
    assert (y.float().mean() - 100).abs() < 1
    y.sum().backward()
    assert plain.bias.grad is not None
    assert torch.equal(plain.bias.grad, torch.full_like(plain.bias, 64.0))


@pytest.mark.parametrize(("peer", "left", "right"), PRODUCTS)
@pytest.mark.parametrize("shape", [(0, 16, 128), (3, 5, 100), (300, 70, 1000), (512, 256, 4096)])
def test_a_peer_multiplies_our_codes(
    peer: ModuleType, left: str, right: str, shape: tuple[int, int, int]
) -> None:
    """Error against float64 at most twice the reference's own."""
    skip_without(peer)
    facts = Facts(current(), Cast.parse(left), Cast.parse(right))
    if reason := peer.refuse("matmul", facts):
        pytest.skip(reason)
    m, n, k = shape
    torch.manual_seed(1)
    spread = torch.exp2(torch.linspace(-6, 6, k, device="cuda"))
    a = ops.quantize(torch.randn(m, k, device="cuda") * spread, left)
    b = ops.quantize(torch.randn(n, k, device="cuda"), right)
    bias = torch.randn(n, device="cuda")
    exact = lowprec.dequantize(a).double() @ lowprec.dequantize(b).double().T + bias
    got = peer.matmul(a, b, bias=bias, out_dtype=torch.bfloat16)
    want = ops.matmul(a, b, bias=bias, out_dtype=torch.bfloat16, backend="reference")
    assert got.shape == want.shape
    if m:
        assert relative(got, exact) <= 2 * relative(want, exact)


@pytest.mark.parametrize(("text", "dimensions"), [("fp8_1x128", 1), ("fp8_128x128", 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_transformer_engine_block_casts_have_our_bits(
    text: str, dimensions: int, dtype: torch.dtype
) -> None:
    """Blocks of ordinary size: neither zero, nor poisoned, nor near the ends of float32."""
    skip_without(te)
    theirs = te.LIBRARY.load("transformer_engine.pytorch")
    if reason := te.unfit(te.Form("Float8BlockScaling"), current()):
        pytest.skip(reason)
    quantizer = theirs.Float8BlockQuantizer(
        theirs.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=False,
        force_pow_2_scales=True,
        block_scaling_dim=dimensions,
    )
    torch.manual_seed(2)
    x = (
        torch.randn(512, 1024, device="cuda")
        * torch.exp2(torch.arange(512) % 41 - 20).cuda()[:, None]
    )
    x = x.to(dtype)
    found, ours = quantizer(x), ops.quantize(x, text)
    scales = found._rowwise_scale_inv
    scales = scales.T if dimensions == 1 else scales
    assert torch.equal(scales[: ours.scales.shape[0], : ours.scales.shape[1]], ours.scales)
    assert torch.equal(found._rowwise_data.view(torch.uint8), ours.codes)
