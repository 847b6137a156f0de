"""saved_activations on a GPU: allocated memory, every attention backend, weights, statistics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowprec.saved import saved_activations
from tests.core.accountant import quantized_kept
from tests.core.test_saved import mlp, sqnr

pytestmark = pytest.mark.gpu


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_()


def gradients(
    text: str | None, run: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> list[torch.Tensor]:
    with saved_activations(text) if text else nullcontext():
        y = run(*inputs)
    return list(torch.autograd.grad(y, inputs, torch.ones_like(y)))


@pytest.mark.parametrize(("text", "ratio"), [("mxfp8", 0.56), ("mxfp4", 0.30)])
def test_allocated_memory_falls(text: str, ratio: float) -> None:
    model, x = mlp(1024, 6, torch.bfloat16).cuda(), leaf(16384, 1024)

    def held(context: str | None) -> int:
        before = torch.cuda.memory_allocated()
        with saved_activations(context) if context else nullcontext():
            y = model(x)
        return torch.cuda.memory_allocated() - before - y.nbytes

    for context in (None, text):  # workspaces of the libraries
        held(context)
    # x is there in any case, so its codes come on top.
    assert held(text) / held(None) < ratio


@pytest.mark.parametrize("text", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("columns", [64, 100])
@pytest.mark.parametrize(
    "backend",
    [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
    ids=str,
)
def test_inputs_of_every_fused_attention_are_exact(
    backend: SDPBackend, columns: int, text: str
) -> None:
    if backend is not SDPBackend.FLASH_ATTENTION:
        columns -= columns % 8  # flash attention alone pads, and then saves copies
    inputs = [leaf(2, 4, 128, columns, seed=seed) for seed in range(3)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q * 3, k * 3, v * 1, is_causal=True)

    with saved_activations(text):
        y = run(*inputs)
    assert len(quantized_kept(y)) == 1, "the output alone"
    exact, got = gradients(None, run, *inputs), gradients(text, run, *inputs)
    assert torch.equal(exact[2], got[2])
    floor = 15 if text == "mxfp8" else 3
    assert min(sqnr(e, g) for e, g in zip(exact[:2], got[:2], strict=True)) > floor


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_under_autocast_are_exact(frozen: bool) -> None:
    layer = nn.Linear(256, 256).cuda().requires_grad_(not frozen)
    x = leaf(256, 256, dtype=torch.float32)

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return layer(x)  # type: ignore[no-any-return]

    assert torch.equal(gradients("mxfp4", run, x)[0], gradients(None, run, x)[0])
    with saved_activations("mxfp4"):
        y = run(x)
    assert len(quantized_kept(y)) == (not frozen)


def test_statistics_of_norms_are_exact() -> None:
    x = leaf(64, 64, 64, dtype=torch.float32)
    for norm in (
        lambda x: F.group_norm(x, 32),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.layer_norm(x, (64,)),
        lambda x: F.rms_norm(x, (64,)),
    ):
        with saved_activations("mxfp8"):
            y = norm(x)
        assert len(quantized_kept(y)) == 1
        dy = leaf(64, 64, 64, dtype=torch.float32, seed=1)
        got = torch.autograd.grad(y, x, dy)[0]
        assert sqnr(torch.autograd.grad(norm(x), x, dy)[0], got) > 30


def test_gradients_equal_those_of_the_cpu() -> None:
    model, x = mlp(128, 3, torch.float32), leaf(256, 128, dtype=torch.float32)
    here = gradients("mxfp8", model, x.detach().cpu().requires_grad_())[0]
    there = gradients("mxfp8", model.cuda(), x)[0]
    assert sqnr(here, there.cpu()) > 40
