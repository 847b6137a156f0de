"""Rotation, random rounding, norms and layouts on a GPU, bit for bit against the reference."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from torch import nn

import lowprec
from lowprec.backends import reference, triton_kernels
from lowprec.formats import ALL, FORMATS, Cast, Rounding
from lowprec.nn import gates
from lowprec.nn.gates import ACTIVATIONS
from lowprec.rng import RandomStream
from lowprec.rotation import Rotation, rotate
from lowprec.tensor import QuantizedTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
]
STREAM = RandomStream(7, layer="layer", role="wgrad.dy", step=3, first_row=5)
OTHER = RandomStream(2**40 + 9, role="dgrad.dy", first_row=16)
BLOCKS = [f for f in FORMATS.values() if not f.outer and ALL not in f.block]
RANDOM = [
    str(Cast(fmt, rule, Rounding.STOCHASTIC))
    for fmt in BLOCKS
    for rule in fmt.scale_rules
    if not rule.clips
]
ONE_ROW = [fmt for fmt in BLOCKS if fmt.block[0] == 1]
ROTATED = [str(Cast(fmt, rule)) for fmt in ONE_ROW for rule in fmt.scale_rules]
ROTATED += [text for text in RANDOM if Cast.parse(text).format.block[0] == 1]
NORMED = [text for text in ROTATED if not text.endswith(":sr")]
SHAPES = [(0, 64), (1, 39), (63, 100), (300, 1000), (256, 512)]


def is_default(cast: Cast) -> bool:
    """Whether a cast has its format's first scale rule: other rules get one shape and bf16."""
    return cast.scale_rule is cast.format.scale_rules[0]


def data(*shape: int, seed: int = 1) -> torch.Tensor:
    """Channels 12 octaves apart; rows of zeros, of subnormal numbers and of large ones."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device="cuda")
    x = x * torch.exp2(torch.linspace(-6, 6, max(shape[-1], 1), device="cuda")[: shape[-1]])
    if x.shape[0] > 9:
        x[3] = 0
        x[4] *= 2.0**-126
        x[5] *= 2.0**-133
        x[6, ::2] = torch.finfo(torch.bfloat16).max
        x[7, ::3] = -0.0
    return x


def poisoned(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 9:
        x = x.clone()
        x[0, 0], x[-1, -1], x[8, 3] = torch.nan, torch.inf, -torch.inf
    return x


def law(
    x: torch.Tensor, cast: Cast, axis: int, stream: RandomStream | None = None
) -> QuantizedTensor:
    """What the reference gives; NaN and Inf poison a block alike."""
    finite = x.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return reference.quantize(finite, cast, axis=axis, stream=stream)


def assert_same(got: QuantizedTensor, want: QuantizedTensor, *where: object) -> None:
    assert got.codes.shape == want.codes.shape, where
    assert torch.equal(*(t.scales.nan_to_num(nan=-1.0) for t in (got, want))), where
    assert torch.equal(got.codes, want.codes), where


@pytest.mark.parametrize("text", RANDOM)
def test_random_rounding(text: str) -> None:
    cast = Cast.parse(text)
    for shape in SHAPES if is_default(cast) else SHAPES[3:4]:
        x = poisoned(data(*shape))
        views = (x, x.bfloat16(), x.bfloat16().mT, x[:, ::2])
        for view in views if is_default(cast) else views[1:2]:
            laws = [law(view, cast, axis, s) for axis, s in ((-1, STREAM), (-2, OTHER))]
            for axis, stream, want in ((-1, STREAM, laws[0]), (-2, OTHER, laws[1])):
                got = triton_kernels.quantize(view, cast, axis=axis, stream=stream)
                assert_same(got, want, shape, view.stride(), axis)
            both = triton_kernels.quantize_both(view, cast, cast, streams=(STREAM, OTHER))
            for got, want in zip(both, laws, strict=True):
                assert_same(got, want, shape, view.stride(), "both")


@pytest.mark.parametrize("text", ROTATED)
def test_rotation_and_cast(text: str) -> None:
    cast = Cast.parse(text)
    stream = STREAM if cast.stochastic else None
    for size in (16, 32, 64, 128) if is_default(cast) else (32,):
        turn = Rotation.parse(f"rht{size}:{('none', 'fixed', 'seeded')[size % 3]}")
        for shape in SHAPES if is_default(cast) else SHAPES[3:4]:
            x = poisoned(data(*shape))
            views = (x, x.bfloat16(), x.bfloat16().mT)
            for view in views if is_default(cast) else views[1:2]:
                for axis, side in ((-1, "left"), (-2, "right")):
                    rotated = rotate(view, turn, axis=axis, side=side, stream=OTHER)
                    got = triton_kernels.rotate_quantize(
                        view, turn, cast, axis=axis, side=side, streams=(OTHER, stream)
                    )
                    assert_same(got, law(rotated, cast, axis, stream), size, shape, axis)


@pytest.mark.parametrize("text", NORMED)
def test_norms_and_casts(text: str) -> None:
    cast = Cast.parse(text)
    shapes = [(0, 64), (1, 39), (63, 100), (300, 1000), (129, 2048), (9000, 512)]
    for rows, cols in shapes if is_default(cast) else shapes[3:4]:
        for centered in (False, True):
            x, other = (torch.randn(rows, cols, device="cuda").bfloat16() for _ in "ab")
            affine = {"weight": torch.randn(cols, device="cuda").bfloat16(), "bias": None}
            if centered:
                affine["bias"] = torch.randn(cols, device="cuda").bfloat16()
            for residual in (None, other):
                options = {**affine, "centered": centered, "residual": residual}
                row = triton_kernels.normalize(x, cast, **options)
                both, column = triton_kernels.normalize_both(x, (cast, cast), **options)
                where = (rows, cols, centered)
                for done in (row, both):
                    values = triton_kernels.normalize_again(done, None, **affine)
                    wide = done.source.float() - (done.mean[:, None] if centered else 0)
                    wide = wide * done.rstd[:, None] * affine["weight"].float()
                    wide = wide + affine["bias"].float() if centered else wide
                    assert torch.equal(values, wide.bfloat16()), where
                    assert_same(done.result, law(values, cast, -1), *where)
                    again = triton_kernels.normalize_again(done, cast, axis=-2, **affine)
                    assert_same(again, law(values, cast, -2), *where)
                assert_same(column, law(values, cast, -2), *where)
                assert torch.allclose(row.rstd, both.rstd, rtol=1e-5)


@pytest.mark.parametrize("text", ["fp8_tensorwise"])
def test_norms_and_casts_with_one_scale(text: str) -> None:
    """A norm that is made twice has the bits of one that is written, and then cast."""
    cast = Cast.parse(text)
    for rows, cols in [(0, 64), (1, 39), (63, 100), (300, 1000), (129, 2048), (9000, 512)]:
        for poison in (False, True):
            for centered in (False, True):
                x, other = (torch.randn(rows, cols, device="cuda").bfloat16() for _ in "ab")
                if poison and rows:
                    x[-1, -1] = torch.nan if centered else torch.inf
                weight, bias = (torch.randn(cols, device="cuda").bfloat16() for _ in "wb")
                affine = {"weight": weight, "bias": bias if centered else None}
                for residual in (None, other, laid(other, 6, 0)):
                    options = {**affine, "centered": centered, "residual": residual}
                    done, column = triton_kernels.normalize_whole(x, cast, **options)
                    plain = triton_kernels.normalize(x, None, **options)
                    where = (rows, cols, centered, poison)
                    for got, want in zip(done.statistics, plain.statistics, strict=True):
                        assert torch.equal(got.nan_to_num(), want.nan_to_num()), where
                    assert_same(done.result, law(plain.result, cast, -1), *where)
                    assert_same(column, law(plain.result, cast, -2), *where)


@pytest.mark.parametrize("text", NORMED)
def test_gates_and_casts(text: str) -> None:
    cast = Cast.parse(text)
    shapes = [(0, 64), (1, 39), (63, 100), (300, 1000), (129, 4096), (9000, 512)]
    cases = list(zip(shapes, [*ACTIVATIONS] * 2, strict=True))
    for (rows, cols), kind in cases if is_default(cast) else cases[3:4]:
        both = torch.randn(rows, 2 * cols, device="cuda")
        poison = poisoned(data(rows, 2 * cols)).bfloat16()
        for x in (both.bfloat16(), poison, *([both] if rows == 300 else [])):
            for gate, up in ((x[:, :cols], x[:, cols:]), (x[:, cols:], None)):
                values = triton_kernels.activate(gate, up, None, kind=kind)
                coded = triton_kernels.activate(gate, up, cast, kind=kind)
                assert_same(coded, law(values, cast, -1), rows, cols, kind, x.dtype, up is None)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gates_and_their_gradients(kind: str) -> None:
    """Against float64, within the rounding of the result."""
    activation = gates.Activation(kind, gated=True)
    for rows, cols in ((0, 64), (1, 39), (300, 1000), (9000, 512)):
        both, dy = (torch.randn(rows, n, device="cuda").bfloat16() for n in (2 * cols, cols))
        leaf = both.double().requires_grad_()
        exact = gates.values(leaf, activation)
        exact.backward(dy.double())
        halves = both.chunk(2, 1)
        apart = triton_kernels.activate_backward(dy, *halves, kind=kind)
        for got, want in (
            (triton_kernels.activate(*halves, None, kind=kind), exact),
            (triton_kernels.activate_halves_backward(dy, both, kind=kind), leaf.grad),
            (torch.cat(apart, 1), leaf.grad),
        ):
            assert (got - want).norm() <= 2**-8 * want.norm(), (rows, cols)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-portable"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_gated_layers_by_the_kernels(
    recipe: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GatedLinear eager and compiled; its codes are those of the kernels' activation and a cast."""
    known = triton_kernels.PROVEN
    more = {f"gate + {text}" for text in known if "+" not in text}
    torch.manual_seed(0)
    x, dy = (torch.randn(96, n, device="cuda").bfloat16() for n in (1024 if gated else 512, 256))
    for proven in (known | more, known - more):
        monkeypatch.setattr(triton_kernels, "PROVEN", frozenset(proven))
        module = lowprec.GatedLinear(nn.Linear(512, 256), gated=gated).bfloat16().cuda()
        lowprec.apply(module, lowprec.plan(module, lowprec.load_recipe(recipe)))
        assert module.linear.lowprec_products.inside[0].gate_keeps == (proven == known - more)
        results = []
        torch.compiler.reset()
        for run in (module, torch.compile(module, fullgraph=True)):
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            found = torch.autograd.grad(y, [leaf, *module.parameters()], dy)
            results.append([y, *found])
        for eager, compiled in zip(*results, strict=True):
            assert torch.equal(eager, compiled)
        gate, up = x.chunk(2, 1) if gated else (x, None)
        values = triton_kernels.activate(gate, up, None).requires_grad_()
        want = module.linear(values)
        da, *others = torch.autograd.grad(want, [values, *module.parameters()], dy)
        assert torch.equal(results[0][0], want)
        for got, other in zip(results[0][2:], others, strict=True):
            assert torch.equal(got, other)
        halves = triton_kernels.activate_backward(da, gate, up)
        dx = torch.cat([one for one in halves if one is not None], 1)
        assert (results[0][1].float() - dx).norm() <= 2**-8 * dx.float().norm()


@pytest.mark.parametrize("text", ["mxfp8_128x128", "fp8_128x128", "mxfp8_32x32"])
def test_norms_cast_again_in_tiles(text: str) -> None:
    cast = Cast.parse(text)
    for rows, cols in ((1, 39), (300, 1000), (200, 512)):
        for centered in (False, True):
            x = torch.randn(rows, cols, device="cuda").bfloat16()
            weight, bias = (torch.randn(cols, device="cuda").bfloat16() for _ in "ab")
            affine = {"weight": weight, "bias": bias if centered else None}
            done = triton_kernels.normalize(x, None, centered=centered, **affine)
            again = triton_kernels.normalize_again(done, cast, axis=-2, **affine)
            assert_same(again, law(done.result, cast, -2), rows, cols, centered)


def test_random_words_and_layouts() -> None:
    from lowprec.backends.triton_kernels import launch, views

    del launch
    for shape in ((0, 16), (5, 16), (1000, 1001)):
        got = views.random_words(STREAM, torch.Size(shape), torch.device("cuda"))
        assert torch.equal(got, STREAM.words_like(torch.empty(shape, device="cuda")))
    for rows, blocks in ((1, 1), (130, 5), (4096, 64)):
        scales = torch.randint(0, 256, (2, rows, blocks), dtype=torch.uint8, device="cuda")
        got = triton_kernels.to_swizzled(scales)
        r, c = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
        tile = r // 128 * -(-blocks // 4) + c // 4
        place = (tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4).flatten().cuda()
        want = torch.zeros_like(got)
        want[:, place] = scales.flatten(1)
        assert torch.equal(got, want)
        assert torch.equal(triton_kernels.from_swizzled(got, rows, blocks), scales)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-rotated-wgrad", "fp8-tensorwise"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_layers_by_the_kernels_equal_layers_by_the_emulation(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NormLinear eager and compiled; its codes are those of the kernels' norm and a cast."""
    chosen = {"mxfp8", "mxfp8_32x32", "fp8_tensorwise"}
    chosen |= {f"{before} + {text}" for before in ("norm", "rotation") for text in chosen}
    monkeypatch.setattr(triton_kernels, "PROVEN", frozenset(chosen))
    torch.manual_seed(0)
    module = lowprec.NormLinear(nn.RMSNorm(512, eps=1e-6), nn.Linear(512, 256)).bfloat16().cuda()
    # Further rules spare the last layer.
    whole = lowprec.load_recipe(recipe)
    short = dataclasses.replace(whole, rules=whole.rules[:1])
    lowprec.apply(module, lowprec.plan(module, short))
    products = module.linear.lowprec_products
    assert products.inside[0].by_kernel
    assert (products.inside[0].norm_whole is not None) == (recipe == "fp8-tensorwise")
    x, residual, dy = (torch.randn(96, n, device="cuda").bfloat16() for n in (512, 512, 256))
    results = []
    for run in (module, torch.compile(module, fullgraph=True)):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y, summed = run(leaf, residual)
        torch.autograd.backward([y, summed], [dy, x])
        weights = (module.norm.weight, module.linear.weight)
        results.append([y, leaf.grad, *(weight.grad.clone() for weight in weights)])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    weight = module.norm.weight.detach()
    done = triton_kernels.normalize(x + residual, None, weight=weight, eps=1e-6)
    values = done.result.requires_grad_()
    module.zero_grad()
    monkeypatch.setattr(triton_kernels, "PROVEN", frozenset())
    lowprec.apply(module, lowprec.plan(lowprec.restore(module), short))
    want = module.linear(values)
    want.backward(dy)
    assert torch.equal(results[0][0], want)
    assert torch.equal(results[0][3], module.linear.weight.grad)


def test_small_shapes_for_the_sanitizer() -> None:
    """Every kernel once, at shapes that end inside a tile; run under compute-sanitizer."""
    mx, random = Cast.parse("mxfp8"), Cast.parse("mxfp8:sr")
    x = data(70, 144).bfloat16()
    weight = torch.ones(144, device="cuda").bfloat16()
    for text in ("mxfp8", "mxfp8_32x32", "mxfp8_128x128", "mxfp4"):
        for axis in (-1, -2):
            q = triton_kernels.quantize(x, Cast.parse(text), axis=axis)
            triton_kernels.dequantize(q, dtype=torch.bfloat16)
        triton_kernels.quantize_both(x, Cast.parse(text), Cast.parse(text))
        triton_kernels.round_trip(x, Cast.parse(text), axis=-1)
    for text in ("fp8_rowwise", "fp8_tensorwise"):
        for axis in (-1, -2):
            triton_kernels.quantize(x, Cast.parse(text), axis=axis)
    tensor = Cast.parse("fp8_tensorwise")
    for other in (None, x):
        triton_kernels.normalize_whole(x, tensor, weight=weight, residual=other)
    triton_kernels.quantize_both(x[:, :70], random, random, streams=(STREAM, OTHER))
    for axis in (-1, -2):
        triton_kernels.rotate_quantize(
            x[:, :70], Rotation(32), random, axis=axis, side="left", streams=(None, STREAM)
        )
    for centered in (False, True):
        options = {"weight": weight, "bias": weight if centered else None}
        done = triton_kernels.normalize(x, mx, centered=centered, residual=x, **options)
        triton_kernels.normalize_both(x, (mx, mx), centered=centered, **options)
        triton_kernels.normalize_both(
            data(40, 1000).bfloat16(),
            (mx, mx),
            centered=centered,
            residual=data(40, 1000).bfloat16(),
        )
        triton_kernels.normalize_both(data(40, 1024).bfloat16(), (mx, mx), centered=centered)
        triton_kernels.normalize_again(done, mx, axis=-2, **options)
        triton_kernels.normalize_backward(x, done, weight=weight, has_bias=centered, passed=x)
    from lowprec.backends.triton_kernels import fused

    fused.activate(x, x, mx)
    fused.activate_backward(x, x, x)
    fused.activate_halves_backward(x[:, :72], x)
    triton_kernels.to_swizzled(triton_kernels.quantize(x, mx, axis=-1).scales)
    torch.cuda.synchronize()


def laid(t: torch.Tensor, pad: int, offset: int) -> torch.Tensor:
    """The values of [R, C] in new memory, rows `pad` numbers apart, the first `offset` in."""
    rows, cols = t.shape
    held = torch.full((rows, cols + pad), 7.0, dtype=t.dtype, device=t.device)
    return held[:, offset : offset + cols].copy_(t)


# Whole rows; as far apart; from 16, 4 and 2 bytes in, if numbers have two.
@pytest.mark.parametrize(("pad", "offset"), [(0, 0), (16, 0), (16, 8), (16, 2), (15, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_repeated_launches_give_the_bits_of_tritons_own(
    dtype: torch.dtype, pad: int, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, activations and casts, as they are decided and as they are repeated elsewhere."""
    from lowprec.backends.triton_kernels import (
        gate_ops,
        matrices,
        norm_ops,
        norm_whole_ops,
        starting,
    )

    mx, tile = "mxfp8", "fp8_128x128"
    if not starting._direct:
        pytest.skip("another version of Triton: every launch is its own")
    for rows, cols in ((1, 512), (63, 100), (300, 1000), (256, 512), (129, 2048)):
        for seed in (1, 2):
            generator = torch.Generator("cuda").manual_seed(seed)

            def drawn(n: int, width: int, source: torch.Generator = generator) -> torch.Tensor:
                t = torch.randn(n, width, generator=source, device="cuda").to(dtype)
                return laid(t, pad, offset)

            x, other, dy = (drawn(rows, cols) for _ in range(3))
            weight, bias = (drawn(1, cols)[0].contiguous() for _ in "wb")
            gate, up = both = drawn(rows, 2 * cols).chunk(2, 1)
            halves = laid(torch.cat(both, 1), pad, offset)
            mean, rstd = (torch.rand(rows, generator=generator, device="cuda") for _ in "mr")
            calls = [
                (norm_ops.norm_cast, (x, None, weight, None, 1e-6, False, mx)),
                (norm_ops.norm_cast, (x, other, weight, bias, 1e-6, True, "")),
                (norm_ops.norm_both, (x, None, weight, None, 1e-6, False, mx, mx)),
                (norm_ops.norm_both, (x, other, None, None, 1e-6, False, mx, mx)),
                (norm_whole_ops.norm_whole, (x, None, weight, bias, 1e-6, True, "fp8_tensorwise")),
                (norm_ops.norm_again, (x, weight, bias, mean, rstd, "", tile)),
                (norm_ops.norm_again, (x, weight, None, None, rstd, "", "")),
                (norm_ops.norm_backward, (dy, x, weight, mean, rstd, other, True)),
                (norm_ops.norm_backward, (dy, x, weight, None, rstd, None, False)),
                (gate_ops.gate_cast, (gate, up, "silu", mx)),
                (gate_ops.gate_backward, (dy, gate, up, "gelu")),
                (gate_ops._gate_backward_halves, (dy, halves, "silu")),
            ]
            if x.data_ptr() % 16 == 0:  # others are not handed to it
                calls.append((matrices._cast, (x, None, mx, tile)))
            for number, (function, arguments) in enumerate(calls):
                where = number, rows, cols, seed
                starting._known.clear()
                for _ in range(2):  # what comes a second time is remembered
                    function(*arguments)
                assert len(starting._known) == 1, where
                got = function(*arguments)
                with monkeypatch.context() as patch:
                    patch.setattr(starting, "_direct", False)
                    want = function(*arguments)
                for ours, theirs in zip(got, want, strict=True):
                    assert ours.stride() == theirs.stride(), where
                    assert torch.equal(_valid(ours, rows, cols), _valid(theirs, rows, cols)), where


def _valid(t: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Without the padding of codes, which nobody writes; NaN as a number."""
    from lowprec.backends.triton_kernels.launch import padded

    if t.is_floating_point():
        return t.nan_to_num(nan=-1.0)
    if t.shape == (rows, padded(cols)):
        return t[:, :cols]
    if t.shape == (cols, padded(rows)):
        return t[:, :rows]
    return t[:rows] if t.shape == (padded(rows), cols) else t
