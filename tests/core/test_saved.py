"""saved_activations: what is quantized and what never is, values, layouts, memory, contexts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowprec
from lowprec.errors import LowprecError, UnsupportedError
from lowprec.formats import FORMATS, Cast
from lowprec.saved import saved_activations
from tests.core.accountant import kept_bytes, quantized_kept

Function = Callable[..., torch.Tensor]


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return gaussian(*shape, dtype=dtype, seed=seed).requires_grad_()


def sqnr(exact: torch.Tensor, got: torch.Tensor) -> float:
    exact, got = exact.detach().double(), got.detach().double()
    return float(10 * torch.log10((exact**2).sum() / ((exact - got) ** 2).sum()))


def context(text: str | None) -> Any:
    return nullcontext() if text is None else saved_activations(text)


def gradients(text: str | None, function: Function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of `inputs` when function(*inputs) runs under the context."""
    with context(text):
        y = function(*inputs)
    dy = gaussian(*y.shape, seed=9).to(y.dtype)
    return list(torch.autograd.grad(y, inputs, dy))


def back(x: torch.Tensor, text: str) -> torch.Tensor:
    """What silu gets back in its backward pass after saving `x`."""
    with saved_activations(text):
        y = F.silu(x)
    result: torch.Tensor = y.grad_fn._saved_self  # type: ignore[union-attr]
    return result.detach()


def mlp(width: int, layers: int, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(layers)]
    return nn.Sequential(*[module for block in blocks for module in block]).to(dtype)


# Values and layouts


@pytest.mark.parametrize("shape", [(64, 64), (33, 70), (4, 16, 40), (2000,), (1, 1100), (130, 8)])
@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_cast_along_the_last_axis(
    name: str, shape: tuple[int, ...]
) -> None:
    x = leaf(*shape)
    rows = x.detach().reshape(-1, shape[-1])
    expected = lowprec.dequantize(lowprec.quantize(rows, name)).reshape(shape)
    assert torch.equal(back(x, name), expected)


@pytest.mark.parametrize("text", ["mxfp8:floor", "mxfp4:even"])
def test_the_scale_rule_is_that_of_the_cast(text: str) -> None:
    x = leaf(64, 64)
    expected = lowprec.dequantize(lowprec.quantize(x.detach(), text))
    assert torch.equal(back(x, text), expected)
    with saved_activations(Cast.parse(text)):
        y = F.silu(x)
    assert torch.equal(y.grad_fn._saved_self, expected)  # type: ignore[union-attr]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.view(64, 96).mT,
    "permuted": lambda x: x.view(8, 12, 64).permute(2, 0, 1),
    "channels last": lambda x: x.view(4, 8, 16, 12).permute(0, 3, 1, 2),
    "columns": lambda x: x.view(32, 192)[:, 64:128],
    "every other row": lambda x: x.view(128, 48)[::2],
    "one of three": lambda x: x.view(4, 16, 96).chunk(3, -1)[1],
    "with dimensions of one": lambda x: x.view(1, 64, 1, 96),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_come_back_with_shape_dtype_and_order_in_memory(view: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = VIEWS[view](leaf(64 * 96, dtype=dtype) * 1)
        got = back(x, "mxfp8")
        assert (got.shape, got.dtype, got.device) == (x.shape, x.dtype, x.device)
        assert 30 < sqnr(x.detach(), got) < 34
        if x.is_contiguous() or view in ("transposed", "permuted", "channels last"):
            assert got.stride() == x.stride()


@pytest.mark.parametrize("text", ["mxfp8", "mxfp4", "nvfp4", "mxfp8_32x32", "fp8_rowwise"])
def test_an_expanded_tensor_is_not_made_larger(text: str) -> None:
    row = leaf(1, 256)
    with saved_activations(text):
        y = F.silu((row + 0).expand(64, 256))
    assert kept_bytes(y) <= 4 * 256
    assert torch.equal(y.grad_fn._saved_self, row.detach().expand(64, 256))  # type: ignore[union-attr]


def test_saving_does_not_change_the_tensor_nor_the_output() -> None:
    x, plain = leaf(64, 64), mlp(64, 2, torch.float32)
    h = x * 1
    before = h.detach().clone()
    with saved_activations("mxfp4"):
        y = plain(h)
    assert torch.equal(h, before)
    assert torch.equal(y, plain(h))


@pytest.mark.parametrize("text", ["mxfp8", "mxfp8:ceil", "mxfp4:even", "fp8_tensorwise", "nvfp4"])
def test_the_range_of_float16_is_covered(text: str) -> None:
    x = gaussian(64, 64).half()
    x[0], x[1], x[2] = 65504.0, -65504.0, 6e-8
    got = back(x.requires_grad_(), text)
    assert got.dtype == torch.float16
    assert got.isfinite().all()
    assert (got[0] >= 50000).all()
    assert (got[1] <= -50000).all()


def test_a_block_with_inf_or_nan_comes_back_nan_and_the_others_do_not() -> None:
    x = gaussian(32, 64)
    x[3, 5], x[7, 40] = torch.inf, torch.nan
    got = back(x.requires_grad_(), "mxfp8")
    bad = torch.zeros(32, 64, dtype=torch.bool)
    bad[3, :32] = bad[7, 32:] = True
    assert torch.equal(got.isnan(), bad)


# What is never quantized


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


WEIGHT_USES: dict[str, Function] = {
    "linear": linear,
    "linear on three dimensions": lambda x, w: F.linear(x.view(2, 32, 64), w),
    "with a bias": lambda x, w: F.linear(x, w, w[0]),
    "transposed by hand": lambda x, w: x @ w.mT,
    "part of it": lambda x, w: F.linear(x, w[:48]),
    "a copy in another layout": lambda x, w: x @ w.mT.contiguous(),
    "cast by hand": lambda x, w: F.linear(x.bfloat16(), w.bfloat16()),
    "convolution": lambda x, w: F.conv1d(x.mT[None], w[..., None]),
    "elementwise": lambda x, w: x * w,
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("use", WEIGHT_USES)
def test_weights_are_never_quantized(use: str, frozen: bool, autocast: bool) -> None:
    """dx of a product needs nothing but the weight, so it stays the same bits."""
    w = nn.Parameter(gaussian(64, 64, seed=1), requires_grad=not frozen)
    x = leaf(64, 64)

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return WEIGHT_USES[use](x, w)

    assert torch.equal(gradients("mxfp4", run, x)[0], gradients(None, run, x)[0])
    with saved_activations("mxfp4"):
        y = run(x)
    # The activation, which a product needs for the weight's gradient only; convolution asks anyway.
    assert len(quantized_kept(y)) == (not frozen or use == "convolution")


@pytest.mark.parametrize("inside", [False, True])
def test_the_copies_that_autocast_caches_are_weights(inside: bool) -> None:
    layer, x = nn.Linear(64, 64), leaf(64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        if not inside:
            layer(x)
        with saved_activations("mxfp4"):
            y = layer(x) + layer(x)
    exact = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    with torch.autocast("cpu", torch.bfloat16):
        plain = layer(x) + layer(x)
    assert torch.equal(exact, torch.autograd.grad(plain, x, torch.ones_like(plain))[0])


def test_weights_computed_from_weights() -> None:
    layer, x = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), leaf(64, 64)
    assert torch.equal(gradients("mxfp4", layer, x)[0], gradients(None, layer, x)[0])


def test_what_a_lookup_returns_is_an_activation() -> None:
    table, ids = nn.Embedding(500, 64), torch.arange(64)
    for lookup in (table, lambda i: table.weight[i], lambda i: table.weight.index_select(0, i)):
        with saved_activations("mxfp8"):
            y = F.silu(lookup(ids))
        assert len(quantized_kept(y)) == 1


def test_a_kept_weight_is_the_weight_itself() -> None:
    layer = nn.Linear(64, 64)
    with saved_activations("mxfp8"):
        y = layer(leaf(64, 64))
    saved = y.grad_fn._saved_mat2  # type: ignore[union-attr]
    assert saved.data_ptr() == layer.weight.data_ptr()


UNTOUCHED: dict[str, Function] = {
    "a buffer": lambda x: x * gaussian(64, 64, seed=2),
    "the batch": lambda x: F.linear(gaussian(64, 64, seed=2), x),
    "a mask": lambda x: x.masked_fill(gaussian(64, 64, seed=2) > 0, 0.0),
    "float64": lambda x: F.silu(x.double()),
    "few elements": lambda x: F.silu(x[:15] * 1),
    "short rows": lambda x: F.silu(x.reshape(-1, 4) * 1),
    "a scalar": lambda x: F.silu(x.sum()),
    "an empty tensor": lambda x: F.silu(x[:0] * 1),
    "log-probabilities": lambda x: F.cross_entropy(x, torch.arange(64)),
    "logsumexp": lambda x: x.expand(64, 64).logsumexp(-1),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(64, 32, 2)).exp()),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_untouched(case: str) -> None:
    x = leaf(64, 64)
    assert torch.equal(
        gradients("mxfp4", UNTOUCHED[case], x)[0], gradients(None, UNTOUCHED[case], x)[0]
    )
    with saved_activations("mxfp4"):
        y = UNTOUCHED[case](x)
    assert len(quantized_kept(y)) == 0


def test_statistics_of_norms_are_exact() -> None:
    x = leaf(64, 64, 16)
    scale = nn.Parameter(torch.ones(64))
    for norm in (
        lambda x: F.group_norm(x, 32, scale),
        lambda x: F.batch_norm(x, None, None, scale, training=True),
        lambda x: F.layer_norm(x, (16,)),
        lambda x: F.rms_norm(x, (16,)),
        lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
    ):
        with saved_activations("mxfp8"):
            y = norm(x)
        assert 1 <= len(quantized_kept(y)) <= 2
        assert sqnr(gradients(None, norm, x)[0], gradients("mxfp8", norm, x)[0]) > 30


# Fused attention: exp(q k^T - lse) is recomputed, so errors in q and k would grow exponentially


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q * 4, k * 4, v * 1)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("queries", [128, 2])
def test_inputs_of_fused_attention_are_exact(queries: int, autocast: bool) -> None:
    q, k, v = leaf(2, 4, queries, 32), leaf(2, 4, 128, 32, seed=1), leaf(2, 4, 128, 32, seed=2)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return attention(q, k, v)

    exact, got = gradients(None, run, q, k, v), gradients("mxfp8", run, q, k, v)
    assert torch.equal(exact[2], got[2])
    assert min(sqnr(e, g) for e, g in zip(exact[:2], got[:2], strict=True)) > 12
    with saved_activations("mxfp8"):
        y = run(q, k, v)
    assert len(quantized_kept(y)) == (queries > 2), "the output alone"


def test_an_additive_mask_with_infinities_does_no_harm() -> None:
    q, k, v = (leaf(1, 2, 64, 32, seed=seed) for seed in range(3))
    mask = torch.full((64, 64), -torch.inf).triu(1)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    assert all(g.isfinite().all() for g in gradients("mxfp8", run, q, k, v))


@pytest.mark.parametrize("output_first", [False, True])
def test_custom_attention_functions_are_recognised_by_name(output_first: bool) -> None:
    class MyAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            out = q * k
            ctx.save_for_backward(*((out, q, k) if output_first else (q, k, out)))
            return out

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return dy, dy

    q, k = leaf(64, 64), leaf(64, 64, seed=1)
    with saved_activations("mxfp8"):
        y = MyAttention.apply(q * 1, k)
    assert len(quantized_kept(y)) == 1
    saved = [one.data.unpack() for one in y.grad_fn._raw_saved_tensors]
    assert sum(torch.equal(one, q) or torch.equal(one, k) for one in saved) == 2


# Memory: one pack a storage, nothing kept longer than the graph


def test_a_tensor_saved_by_several_ops_is_packed_once() -> None:
    x = leaf(64, 64)
    with saved_activations("mxfp8"):
        h = x * 1
        y = F.silu(h) + h.square() + h.exp() * 0 + F.gelu(h.view(16, 256))[0, 0]
        views = F.silu(h.mT) + F.silu(h.view(4, 16, 64)).view(64, 64)
    kept = quantized_kept(y, views)
    assert sorted(q.codes.numel() for q in kept) == [4096, 4096, 4096], "h, h as 16 x 256, exp(h)"


def test_projections_of_one_input_share_it() -> None:
    torch.manual_seed(0)
    query, key = nn.Linear(64, 64), nn.Linear(64, 64)
    with saved_activations("mxfp8"):
        h = leaf(4, 16, 64) * 1
        y = query(h) + key(h)
    assert len(quantized_kept(y)) == 1


def test_a_freed_storage_that_is_used_again_is_another_tensor() -> None:
    x = leaf(64, 64)
    outputs, addresses = [], []
    with saved_activations("mxfp8"):
        for step in range(200):
            h = x * (step + 1.0)
            addresses.append(h.data_ptr())
            outputs.append(F.silu(h))
            del h
    assert len(set(addresses)) < len(addresses), "the allocator gave an address out twice"
    for step, y in enumerate(outputs):
        h = (x * (step + 1.0)).detach()
        assert sqnr(h, y.grad_fn._saved_self) > 30  # type: ignore[union-attr]


def test_the_source_is_freed_at_once_and_the_codes_with_the_graph() -> None:
    x, manager = leaf(64, 64), saved_activations("mxfp8")
    with manager:
        h = x * 1
        y = F.silu(h)
        source = weakref.ref(h)
        del h
        assert source() is None
        codes = weakref.ref(quantized_kept(y)[0])
        assert codes() is not None
        gc.disable()
        try:
            del y
            assert codes() is None
        finally:
            gc.enable()
    assert not manager._packed


def test_an_output_that_is_kept_as_it_is_does_not_hold_itself() -> None:
    x = leaf(64, 64).double()
    with saved_activations("mxfp8"):
        y = x.softmax(-1)
    gone = weakref.ref(y)
    gc.disable()
    try:
        del y
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("columns", [12, 39, 70])
def test_the_padding_of_ragged_rows_is_not_kept(columns: int) -> None:
    with saved_activations("mxfp8_32x32"):
        y = F.silu(leaf(100, columns) + 0)
    assert kept_bytes(y) <= 100 * columns + 4 * -(-columns // 32)


# bytes kept by the graph, over those of the same model without the context
RATIOS = {"mxfp8": 0.516, "mxfp6_e2m3": 0.391, "mxfp4": 0.267, "nvfp4": 0.282}


@pytest.mark.parametrize("text", RATIOS)
def test_bytes_kept_by_an_mlp(text: str) -> None:
    model, x = mlp(512, 6, torch.bfloat16), leaf(256, 512, dtype=torch.bfloat16)
    plain = kept_bytes(model(x))
    with saved_activations(text):
        kept = kept_bytes(model(x))
    assert kept / plain == pytest.approx(RATIOS[text], abs=6e-4)


def test_a_batch_without_gradient_is_left_to_its_owner() -> None:
    model, x = mlp(512, 6, torch.bfloat16), gaussian(256, 512, dtype=torch.bfloat16)
    plain = kept_bytes(model(x), without=[x])
    with saved_activations("mxfp8"):
        y = model(x)
    assert kept_bytes(y, without=[x]) / plain == pytest.approx(0.516, abs=6e-4)
    assert kept_bytes(y) == kept_bytes(y, without=[x]) + x.nbytes


# Gradients


FLOORS = {"mxfp8": 28, "mxfp6_e2m3": 27, "mxfp4:even": 15, "nvfp4": 17, "mxfp8_e5m2": 22}


@pytest.mark.parametrize("text", FLOORS)
def test_gradients_of_an_mlp_are_close(text: str) -> None:
    model, x = mlp(128, 4, torch.float32), leaf(256, 128)
    inputs = (x, *model.parameters())

    def run(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return model(x)  # type: ignore[no-any-return]

    exact, got = gradients(None, run, *inputs), gradients(text, run, *inputs)
    quality = [sqnr(e, g) for e, g in zip(exact, got, strict=True) if not torch.equal(e, g)]
    assert len(quality) >= len(exact) - 2, "all but those that need no activation"
    assert min(quality) >= FLOORS[text], quality


# op: SQNR in dB of the gradient of x, Gaussian 256 x 256, for mxfp8 and mxfp4:even
BY_OP: dict[str, tuple[Function, float, float]] = {
    "layer_norm": (lambda x: F.layer_norm(x, (256,)), 52, 40),
    "silu": (F.silu, 41, 26),
    "gelu": (F.gelu, 41, 25),
    "silu(x) * x": (lambda x: F.silu(x) * x, 33, 21),
    "product": (lambda x: x * x.flip(0), 32, 19),
    "softmax": (lambda x: x.softmax(-1), 32, 17),
    "sigmoid": (torch.sigmoid, 32, 19),
    "tanh": (torch.tanh, 30, 18),
    "relu": (torch.relu, 100, 11),
}


@pytest.mark.parametrize("op", BY_OP)
def test_gradient_of_one_op(op: str) -> None:
    function, *expected = BY_OP[op]
    x = leaf(256, 256)
    (exact,) = gradients(None, lambda x: function(x + 0), x)
    for text, db in zip(("mxfp8", "mxfp4:even"), expected, strict=True):
        (got,) = gradients(text, lambda x: function(x + 0), x)
        assert min(sqnr(exact, got), 100) == pytest.approx(db, abs=1)


def test_gradients_are_equal_when_nothing_is_quantized() -> None:
    model = mlp(32, 3, torch.float64)
    x = leaf(16, 32, dtype=torch.float64)
    inputs = (x, *model.parameters())
    exact = gradients(None, lambda x, *_: model(x), *inputs)
    got = gradients("mxfp4", lambda x, *_: model(x), *inputs)
    assert all(torch.equal(e, g) for e, g in zip(exact, got, strict=True))
    with saved_activations("mxfp4"):
        assert torch.autograd.gradcheck(model, (x[:2],))


def test_autocast_does_not_change_what_is_packed() -> None:
    x = leaf(64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        under = back(x, "mxfp8")
    assert torch.equal(under, back(x, "mxfp8"))


def test_second_derivatives_flow_through_what_was_saved() -> None:
    x = leaf(64, 64)
    with saved_activations("mxfp8"):
        (first,) = torch.autograd.grad(F.silu(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    (plain,) = torch.autograd.grad(F.silu(x).sum(), x, create_graph=True)
    assert sqnr(torch.autograd.grad(plain.sum(), x)[0], second) > 20


# Changes in place


def test_an_activation_changed_after_saving_counts_as_it_was_when_saved() -> None:
    x = leaf(64, 64)
    with saved_activations("mxfp8"):
        h = x * 1
        y = F.silu(h)
        h.add_(1)
        z = F.silu(h)
    assert sqnr(x, y.grad_fn._saved_self) > 30  # type: ignore[union-attr]
    assert sqnr(x + 1, z.grad_fn._saved_self) > 30  # type: ignore[union-attr]


@pytest.mark.parametrize("error", [RuntimeError, UnsupportedError, LowprecError])
def test_a_kept_tensor_changed_after_saving_raises_as_without_the_context(
    error: type[Exception],
) -> None:
    layer, x = nn.Linear(64, 64), leaf(64, 64)
    with saved_activations("mxfp8"):
        y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(error, match=r"inplace operation: torch\.float32 of shape \(64, 64\)"):
        y.sum().backward()
