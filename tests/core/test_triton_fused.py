"""Kernels that do more than a cast, in Triton's interpreter: norms, gates, rotation, layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import lowprec
from lowprec.backends import scaled_mm, triton_kernels
from lowprec.errors import UnsupportedError
from lowprec.formats import Cast
from lowprec.hardware import NAMED
from lowprec.rng import RandomStream
from lowprec.rotation import Rotation, rotate
from tests.core.kernel_cases import assert_same, data, gaussian, inside, law, needs_triton, poison

# numpy, in which the interpreter computes, warns of the very NaN and Inf that are tested.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), needs_triton]
STREAM = RandomStream(7, layer="layer", role="wgrad.dy", step=3, first_row=5)
MX = Cast.parse("mxfp8")


@inside
@pytest.mark.parametrize("shape", [(0, 16), (5, 16), (3, 7), (2, 3, 40)])
def test_random_words_are_those_of_the_stream(shape: tuple[int, ...]) -> None:
    from lowprec.backends.triton_kernels import launch, views

    del launch
    got = views.random_words(STREAM, torch.Size(shape), torch.device("cpu"))
    assert torch.equal(got, STREAM.words_like(torch.empty(shape)))


@inside
def test_nothing_at_all_is_cast_as_often_as_one_likes() -> None:
    """Calls that start no kernel are not repeated as if they ran on a GPU."""
    from lowprec.backends.triton_kernels import gate_ops, norm_ops

    empty = torch.empty(0, 64).bfloat16()
    weight = torch.ones(64).bfloat16()
    for _ in range(3):
        assert triton_kernels.quantize(empty, MX, axis=-1).codes.shape == (0, 64)
        out = norm_ops.norm_cast(empty, None, weight, None, 1e-6, False, "mxfp8")
        assert [len(one) for one in out] == [0, 0, 0]
        dx, dweight = norm_ops.norm_backward(empty, empty, weight, None, out[0], None, False)
        assert dx.shape == (0, 64)
        assert torch.equal(dweight, torch.zeros(64))
        assert gate_ops.gate_cast(empty, None, "silu", "")[0].shape == (0, 64)


ROTATED = [
    *[("rht32", text) for text in ("mxfp8", "mxfp8:sr")],
    *[("rht16:none", "mxfp4:sr"), ("rht64:seeded", "mxfp8:sr"), ("rht128", "mxfp8_1x128")],
]
MORE = [
    pytest.param(rotation, text, marks=pytest.mark.slow)
    for rotation in ("rht16", "rht32:seeded", "rht64:none", "rht128")
    for text in ("mxfp8", "mxfp8_1x128:ceil:sr", "mxfp6_e2m3", "mxfp4:even")
]


@inside
@pytest.mark.parametrize(("rotation", "text"), [*ROTATED, *MORE])
def test_rotation_and_cast_in_one_read(rotation: str, text: str) -> None:
    turn, cast = Rotation.parse(rotation), Cast.parse(text)
    stream = STREAM if cast.stochastic else None
    x = poison(data(40, 70))
    x[20] *= 2.0**-120
    # The words of "wgrad" lie in groups across lines, or 70 columns store them.
    views = [x, x.bfloat16()[:, :64].mT, x[:, :64]] if rotation == "rht32" else [x]
    for view in views:
        for axis, side in ((-1, "left"), (-2, "right")):
            rotated = rotate(view, turn, axis=axis, side=side, stream=STREAM)
            streams = (STREAM, stream)
            got = triton_kernels.rotate_quantize(
                view, turn, cast, axis=axis, side=side, streams=streams
            )
            assert_same(got, law(rotated, cast, axis, stream))


@inside
def test_rotation_of_batches_vectors_and_nothing() -> None:
    turn = Rotation(32)
    for shape in ((2, 33, 48), (0, 32), (40,), (3, 0)):
        x = data(3, 1056).flatten()[: torch.Size(shape).numel()].view(shape)
        for axis in (-1, -2)[: x.ndim]:
            got = triton_kernels.rotate_quantize(x, turn, MX, axis=axis, side="left")
            assert_same(got, law(rotate(x, turn, axis=axis, side="left"), MX, axis))
    with pytest.raises(UnsupportedError, match="no rotation fused with a cast to mxfp8_32x32"):
        triton_kernels.rotate_quantize(
            torch.ones(32, 32), turn, Cast.parse("mxfp8_32x32"), axis=-1, side="left"
        )
    with pytest.raises(UnsupportedError, match=r"no fused rotation along axis -1 of 2-D .*float64"):
        triton_kernels.rotate_quantize(torch.ones(32, 32).double(), turn, MX, axis=-1, side="left")


@inside
@pytest.mark.parametrize(
    ("dtype", "columns", "centered"),
    [
        (torch.bfloat16, 70, False),
        (torch.bfloat16, 70, True),
        (torch.float32, 600, True),  # too wide to be held: the band is read again
        pytest.param(torch.float32, 600, False, marks=pytest.mark.slow),
    ],
)
def test_norms_and_both_casts_in_one_read(dtype: torch.dtype, columns: int, centered: bool) -> None:
    x, residual = (gaussian(40, columns, seed=s).to(dtype) for s in (2, 3))
    weight, bias = (gaussian(columns, seed=s).to(dtype) for s in (4, 5))
    affine = {"weight": weight, "bias": bias if centered else None}
    options = {**affine, "centered": centered}
    for other in (None, residual) if columns == 70 else (residual,):
        done, column = triton_kernels.normalize_both(x, (MX, MX), residual=other, **options)
        source = x if other is None else x + other
        assert torch.equal(done.source, source)
        wide = source.float() - (done.mean[:, None] if centered else 0)
        wide = wide * done.rstd[:, None] * weight.float()
        values = (wide + bias.float() if centered else wide).to(dtype)
        assert_same(done.result, law(values, MX, -1))
        assert_same(column, law(values, MX, -2))
        exact = source.double()
        mean = exact.mean(-1) if centered else torch.zeros(40, dtype=torch.float64)
        rstd = 1 / ((exact - mean[:, None]).square().mean(-1) + 1e-6).sqrt()
        assert torch.allclose(done.rstd.double(), rstd, rtol=3e-6)
        # Again, from the statistics: the same bits.
        assert torch.equal(triton_kernels.normalize_again(done, None, **affine), values)
        again = triton_kernels.normalize_again(done, MX, axis=-2, **affine)
        assert_same(again, column)
        tile = Cast.parse("mxfp8_32x32")
        assert_same(triton_kernels.normalize_again(done, tile, **affine), law(values, tile, -1))


@inside
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_and_its_cast_with_one_scale(dtype: torch.dtype, centered: bool) -> None:
    cast = Cast.parse("fp8_tensorwise")
    x, residual = (gaussian(2, 9, 70, seed=s).to(dtype) for s in (2, 3))
    bias = gaussian(70, seed=5).to(dtype) if centered else None
    how: dict[str, Any] = {"weight": 1 + gaussian(70, seed=4).to(dtype), "bias": bias}
    for other in (None, residual):
        how |= {"centered": centered, "residual": other}
        done, column = triton_kernels.normalize_whole(x, cast, **how)
        plain = triton_kernels.normalize(x, None, **how)
        assert torch.equal(done.source, plain.source)
        for got, want in zip(done.statistics, plain.statistics, strict=True):
            assert torch.equal(got, want)
        values = plain.result
        assert_same(done.result, law(values, cast, -1))
        assert_same(column, law(values.reshape(18, 70), cast, -2))


def test_a_norm_refuses_what_has_no_one_scale() -> None:
    x = gaussian(6, 5, seed=1)
    with pytest.raises(UnsupportedError, match="mxfp8 has no one scale for the whole tensor"):
        triton_kernels.normalize_whole(x, MX)
    with pytest.raises(UnsupportedError, match="at most 16384"):
        triton_kernels.normalize_whole(gaussian(1, 16385, seed=1), Cast.parse("fp8_tensorwise"))


@inside
@pytest.mark.parametrize("rows_and_blocks", [(1, 1), (32, 4), (130, 5), (256, 9), (3, 0)])
def test_swizzled_scales(rows_and_blocks: tuple[int, int]) -> None:
    """The layout of torch's SWIZZLE_32_4_4, written out."""
    rows, blocks = rows_and_blocks
    generator = torch.Generator().manual_seed(0)
    scales = torch.randint(0, 256, (2, rows, blocks), dtype=torch.uint8, generator=generator)
    got = triton_kernels.to_swizzled(scales)
    assert got.shape == (2, -(-rows // 128) * 128 * -(-blocks // 4) * 4)
    want = torch.zeros_like(got)
    for r in range(rows):
        for c in range(blocks):
            tile = r // 128 * -(-blocks // 4) + c // 4
            want[:, tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales[:, r, c]
    assert torch.equal(got, want)
    assert torch.equal(triton_kernels.from_swizzled(got, rows, blocks), scales)


def test_what_cannot_be_swizzled_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="swizzle takes E8M0 scales"):
        triton_kernels.to_swizzled(gaussian(6, 5, seed=1))
    with pytest.raises(UnsupportedError, match="6 rows by 5 blocks: those are 1024 bytes"):
        triton_kernels.from_swizzled(torch.zeros(512, dtype=torch.uint8), 6, 5)


@inside
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-rotated-wgrad", "fp8-tensorwise"])
@pytest.mark.parametrize("inside_the_norm", [True, False])
def test_norm_linear_by_the_kernels(
    recipe: str, inside_the_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward use the codes of the kernels' norm followed by a cast, bit for bit."""
    chosen = {"mxfp8", "mxfp8_32x32", "rotation + mxfp8", "fp8_tensorwise"}
    chosen |= {"norm + mxfp8", "norm + fp8_tensorwise"} if inside_the_norm else set()
    monkeypatch.setattr(triton_kernels, "PROVEN", frozenset(chosen))
    # Products run on the CPU: none is native.
    monkeypatch.setattr(scaled_mm, "refuse", lambda op, facts: "not here")
    torch.manual_seed(0)
    module = lowprec.NormLinear(nn.RMSNorm(64, eps=1e-6), nn.Linear(64, 32)).bfloat16()
    nn.init.normal_(module.norm.weight)
    rules = lowprec.load_recipe(recipe).rules[:1]  # another spares the last layer
    short = dataclasses.replace(lowprec.load_recipe(recipe), rules=rules)
    plan = lowprec.plan(module, short, hardware=NAMED["h200"])
    assert "casts by triton" in str(plan)
    lowprec.apply(module, plan)
    products = module.linear.lowprec_products
    assert products.inside[0].by_kernel
    by_row = inside_the_norm and recipe != "fp8-tensorwise"
    assert products.inside[0].norm_keeps == (not by_row)
    assert (products.inside[0].norm_whole is not None) == (inside_the_norm and not by_row)
    x, residual, passed = (gaussian(40, 64, seed=s).bfloat16() for s in (1, 2, 3))
    x.requires_grad_()
    y, summed = module(x, residual)
    dy = gaussian(40, 32, seed=4).bfloat16()
    torch.autograd.backward([y, summed], [dy, passed])
    weight = module.norm.weight.detach()
    done = triton_kernels.normalize((x + residual).detach(), None, weight=weight, eps=1e-6)
    values = done.result.requires_grad_()
    want = module.linear(values)
    assert torch.equal(y, want)
    gradient, bias = module.linear.weight.grad.clone(), module.linear.bias.grad.clone()
    module.linear.zero_grad()
    want.backward(dy)
    assert torch.equal(gradient, module.linear.weight.grad)
    assert torch.equal(bias, module.linear.bias.grad)
    dx, dweight, _ = triton_kernels.normalize_backward(
        values.grad, done, weight=weight, passed=passed
    )
    assert torch.equal(x.grad, dx)
    assert torch.equal(module.norm.weight.grad, dweight.bfloat16())
    assert products.counts[0] == {str(products.stage.policy.fprop): 2}
    kept = []
    for trains in (True, False):
        module.linear.weight.requires_grad_(trains)
        packed: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, p=packed: p.append(t), lambda t: t):
            module(x, residual)
        kept.append(len(packed))
    # Codes and scales are kept for wgrad alone.
    assert kept[0] - kept[1] == (0 if by_row else 2)


@inside
def test_casts_compile_without_graph_breaks() -> None:
    def cast(x: torch.Tensor) -> list[torch.Tensor]:
        row, column = triton_kernels.quantize_both(x * 2, MX, MX)
        free = triton_kernels.quantize(x * 2, Cast.parse("fp8_rowwise"), axis=-1)
        turned = triton_kernels.rotate_quantize(x * 2, Rotation(32), MX, axis=-1, side="left")
        return [t for q in (row, column, free, turned) for t in (q.codes, q.scales)]

    x = gaussian(48, 64, seed=1)
    compiled = torch.compile(cast, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x), cast(x), strict=True):
        assert torch.equal(got, want)


@inside
def test_the_ops_have_fakes_and_schemas_that_fit() -> None:
    from lowprec.backends.triton_kernels import (
        gate_ops,
        launch,
        norm_ops,
        norm_whole_ops,
        rotate_ops,
        scale_layouts,
        span_ops,
    )

    del gate_ops, launch, norm_ops, norm_whole_ops, rotate_ops, scale_layouts, span_ops
    x, rstd = gaussian(33, 48, seed=1).bfloat16(), torch.ones(33)
    weight, numbers = torch.ones(48).bfloat16(), [0, 1, 2]
    draws = (None, numbers, "across")
    for op, arguments in {
        "cast_tiles_random": (x[None], "mxfp8:sr", "mxfp8:sr", *draws, *draws),
        "rotate_cast": (x[None], None, 16, 0.25, "mxfp8:sr", False, None, numbers, "inner"),
        "cast_tensor_both": (x[None], "fp8_tensorwise"),
        "norm_both": (x, None, weight, None, 1e-6, True, "mxfp8", "mxfp8"),
        "norm_whole": (x, x, weight, None, 1e-6, True, "fp8_tensorwise"),
        "norm_again": (x, weight, None, None, rstd, "", "mxfp8"),
        "gate_backward_halves": (x[:, :24], x, "silu"),
        "swizzle_scales": (torch.zeros(1, 3, 5, dtype=torch.uint8),),
        "unswizzle_scales": (torch.zeros(1, 1024, dtype=torch.uint8), 3, 5),
    }.items():
        torch.library.opcheck(
            getattr(torch.ops.lowprec, op).default,
            arguments,
            test_utils=("test_schema", "test_faketensor"),
        )


@inside
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_their_casts(dtype: torch.dtype, centered: bool) -> None:
    from lowprec.backends.triton_kernels import fused

    x, residual = gaussian(9, 70, seed=2).to(dtype), gaussian(9, 70, seed=3).to(dtype)
    weight, bias = 1 + gaussian(70, seed=4).to(dtype), gaussian(70, seed=5).to(dtype)
    options = {"weight": weight, "bias": bias if centered else None, "centered": centered}
    for other in (None, residual):
        plain = fused.normalize(x, None, residual=other, **options)
        coded = fused.normalize(x, Cast.parse("mxfp8"), residual=other, **options)
        source = x if other is None else x + other
        assert torch.equal(plain.source, source)
        # From the statistics on, every operation is float32 and rounded by itself.
        wide = source.float() - (plain.mean[:, None] if centered else 0)
        wide = wide * plain.rstd[:, None] * weight.float()
        wide = wide + bias.float() if centered else wide
        assert torch.equal(plain.result, wide.to(dtype))
        assert_same(coded.result, law(plain.result, MX, -1))
        exact = source.double()
        mean = exact.mean(-1) if centered else torch.zeros(9, dtype=torch.float64)
        rstd = 1 / ((exact - mean[:, None]).square().mean(-1) + 1e-6).sqrt()
        assert torch.allclose(plain.rstd.double(), rstd, rtol=2e-6)
        assert not centered or torch.allclose(plain.mean.double(), mean, atol=1e-5)


@inside
@pytest.mark.parametrize("centered", [False, True])
def test_gradients_of_norms(centered: bool) -> None:
    from lowprec.backends.triton_kernels import fused

    x, dy, passed = (gaussian(33, 70, seed=seed) for seed in (2, 3, 4))
    weight, bias = 1 + gaussian(70, seed=5), gaussian(70, seed=6)
    options = {"weight": weight, "bias": bias if centered else None, "centered": centered}
    done = fused.normalize(x, Cast.parse("mxfp8"), **options)
    got = fused.normalize_backward(dy, done, weight=weight, has_bias=centered, passed=passed)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    if centered:
        y = torch.nn.functional.layer_norm(leaves[0], (70,), *leaves[1:], eps=1e-6)
    else:
        y = torch.nn.functional.rms_norm(leaves[0], (70,), leaves[1], eps=1e-6)
    (y * dy.double()).sum().backward()
    leaves[0].grad += passed.double()
    for one, leaf in zip(got, leaves, strict=True):
        if one is not None:
            assert (one.double() - leaf.grad).norm() <= 1e-5 * leaf.grad.norm()


@inside
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("gated", [False, True])
def test_activations_and_their_casts(kind: str, gated: bool) -> None:
    from lowprec.backends.triton_kernels import fused

    both = gaussian(40, 140, seed=2)
    gate, up = (both[:, :70], both[:, 70:] if gated else None)
    leaves = [gate.double().requires_grad_(), both[:, 70:].double().requires_grad_()]
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
    }
    y = functions[kind](leaves[0]) * (leaves[1] if gated else 1.0)
    got = fused.activate(gate, up, None, kind=kind)
    assert (got.double() - y).norm() <= 1e-6 * y.norm()
    cast = Cast.parse("mxfp8")
    low = [None if t is None else t.bfloat16() for t in (gate, up)]
    coded, plain = (fused.activate(*low, one, kind=kind) for one in (cast, None))
    assert plain.dtype == torch.bfloat16
    assert_same(coded, law(plain, cast, -1))
    dy = gaussian(40, 70, seed=3)
    (y * dy.double()).sum().backward()
    for one, leaf in zip(fused.activate_backward(dy, gate, up, kind=kind), leaves, strict=True):
        if one is not None:
            assert (one.double() - leaf.grad).norm() <= 2e-6 * leaf.grad.norm()


@inside
@pytest.mark.parametrize("columns", [70, 64])
def test_gradients_of_a_gate_in_the_halves_of_one_tensor(columns: int) -> None:
    wide = gaussian(2, 20, 2 * columns + 8, seed=2).bfloat16()
    dy = gaussian(2, 20, columns + 1, seed=3).bfloat16()[..., :columns]
    for both in (wide[..., : 2 * columns], wide[..., : 2 * columns].contiguous(), wide[:0, :, 8:]):
        out = dy[: len(both)]
        got = triton_kernels.activate_halves_backward(out, both, kind="gelu")
        assert got.is_contiguous()
        alone = [one.contiguous() for one in both.chunk(2, -1)]
        want = triton_kernels.activate_backward(out.contiguous(), *alone, kind="gelu")
        assert torch.equal(got, torch.cat(want, -1))


@inside
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("proven", ["gate + mxfp8", "nothing"])
def test_gated_linear_by_the_kernels(
    proven: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward use the codes of the kernels' activation followed by a cast."""
    chosen = frozenset({"mxfp8", "mxfp8_32x32", proven})
    monkeypatch.setattr(triton_kernels, "PROVEN", chosen)
    torch.manual_seed(0)
    module = lowprec.GatedLinear(nn.Linear(64, 32), gated=gated).bfloat16()
    plan = lowprec.plan(module, lowprec.load_recipe("mxfp8"), hardware=NAMED["h200"])
    lowprec.apply(module, plan)
    products = module.linear.lowprec_products
    assert products.inside[0].by_kernel
    assert products.inside[0].gate_keeps == (proven == "nothing")
    x = gaussian(40, 128 if gated else 64, seed=1).bfloat16().requires_grad_()
    dy = gaussian(40, 32, seed=4).bfloat16()
    y = module(x)
    y.backward(dy)
    gate, up = x.detach().chunk(2, -1) if gated else (x.detach(), None)
    values = triton_kernels.activate(gate, up, None).requires_grad_()
    want = module.linear(values)
    assert torch.equal(y, want)
    found = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    want.backward(dy)
    for got, parameter in zip(found, module.parameters(), strict=True):
        assert torch.equal(got, parameter.grad)
    halves = triton_kernels.activate_backward(values.grad, gate, up)
    assert torch.equal(x.grad, torch.cat([one for one in halves if one is not None], -1))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for one, other in zip(grads(compiled, x, dy), grads(module, x, dy), strict=True):
        assert torch.equal(one, other)


def grads(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    y = module(x)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]


def test_what_the_fused_kernels_refuse() -> None:
    from lowprec.backends.triton_kernels import fused

    x = torch.ones(2, 64)
    for cast in ("mxfp8_32x32", "fp8_rowwise", "nvfp4", "mxfp8:sr"):
        with pytest.raises(UnsupportedError, match="norm: no fused cast"):
            fused.normalize(x, Cast.parse(cast))
    with pytest.raises(UnsupportedError, match="at most 16384"):
        fused.normalize(torch.ones(1, 16385), None)
    with pytest.raises(UnsupportedError, match="float64"):
        fused.activate(x.double(), None, None)
    with pytest.raises(UnsupportedError, match="not one of silu"):
        fused.activate(x, None, None, kind="relu")
