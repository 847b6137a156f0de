"""The kernels on a GPU, bit for bit against the reference, compiled and integer encoding both."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from lowprec.backends import reference, triton_kernels
from lowprec.formats import ALL, FORMATS, Cast
from lowprec.tensor import QuantizedTensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
]
SERVED = [name for name, fmt in FORMATS.items() if not fmt.outer]
RULES = [f"{name}:{rule}" for name in SERVED for rule in FORMATS[name].scale_rules]
BLOCKS = [text for text in RULES if ALL not in Cast.parse(text).format.block]
SHAPES = [(0, 64), (1, 39), (63, 100), (100, 63), (256, 1000), (32 * 5 + 96, 512), (1000, 272)]
BIG = (32768 + 96, 1024)


def data(*shape: int, seed: int = 1) -> torch.Tensor:
    """Channels 12 octaves apart, blocks of zeros, of subnormals, of the largest, of NaN and Inf."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device="cuda")
    x = x * torch.exp2(torch.linspace(-6, 6, max(shape[-1], 1), device="cuda")[: shape[-1]])
    if x.shape[0] > 40:
        x[3] = 0
        x[4] *= 2.0**-126
        x[5] *= 2.0**-133
        x[6, ::2] = torch.finfo(torch.bfloat16).max
        x[7, ::3] = -0.0
        x[0, 0], x[-1, -1], x[40, 3] = torch.nan, torch.inf, -torch.inf
    return x


def law(x: torch.Tensor, cast: Cast, axis: int) -> QuantizedTensor:
    """What the reference gives; NaN and Inf poison a block alike."""
    finite = x.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return reference.quantize(finite, cast, axis=axis)


def assert_same(got: QuantizedTensor, want: QuantizedTensor, *where: object) -> None:
    assert got.codes.shape == want.codes.shape, where
    assert got.scales.dtype == want.scales.dtype, where
    assert torch.equal(got.codes, want.codes), where
    assert torch.equal(*(t.scales.nan_to_num(nan=-1.0) for t in (got, want))), where


@pytest.fixture(params=["compiled", "integer"])
def encoding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both encodings of the plain kernels; the integer one also keeps to the plain kernels."""
    from lowprec.backends.triton_kernels import launch

    monkeypatch.setattr(launch, "INTEGER", request.param == "integer")
    return str(request.param)


@pytest.mark.parametrize("text", RULES)
def test_casts_equal_the_reference(text: str, encoding: str) -> None:
    cast = Cast.parse(text)
    default = cast.scale_rule is cast.format.scale_rules[0]
    for shape in SHAPES if default else SHAPES[4:5]:
        x = data(*shape)
        views = (x, x.bfloat16(), x.half(), x.bfloat16().mT, x[:, ::2])
        for source in views if default else views[1:2]:
            for axis in (-1, -2):
                got = triton_kernels.quantize(source, cast, axis=axis)
                assert_same(got, law(source, cast, axis), shape, source.dtype, axis)


@pytest.mark.parametrize("text", [*BLOCKS, "fp8_tensorwise"])
def test_both_directions_in_one_read(text: str, encoding: str) -> None:
    cast = Cast.parse(text)
    default = cast.scale_rule is cast.format.scale_rules[0]
    for shape in SHAPES if default else SHAPES[4:5]:
        x = data(*shape)
        views = (x, x.bfloat16(), x.half(), x.bfloat16().mT, x[:, 16:])
        for source in views if default else views[1:2]:
            for got, axis in zip(
                triton_kernels.quantize_both(source, cast, cast), (-1, -2), strict=True
            ):
                assert_same(got, law(source, cast, axis), shape, source.dtype, axis)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_32x32", "mxfp8_1x128", "mxfp8_128x128", "mxfp4"])
def test_many_rows(name: str) -> None:
    cast = Cast.parse(name)
    x = data(*BIG).bfloat16()
    for got, axis in zip(triton_kernels.quantize_both(x, cast, cast), (-1, -2), strict=True):
        assert_same(got, law(x, cast, axis), axis)
        assert_same(triton_kernels.quantize(x, cast, axis=axis), law(x, cast, axis), axis)


@pytest.mark.parametrize("name", ["mxfp8", "fp8_128x128", "fp8_tensorwise"])
@pytest.mark.parametrize("first", [1, 2])
def test_dense_rows_from_8_bytes_on(name: str, first: int) -> None:
    cast, x = Cast.parse(name), data(129, 100).bfloat16()[first:]
    assert x.data_ptr() % 16 == (8 if first == 1 else 0)
    for got, axis in zip(triton_kernels.quantize_both(x, cast, cast), (-1, -2), strict=True):
        assert_same(got, law(x, cast, axis), axis)


def test_offsets_past_32_bits() -> None:
    x = torch.zeros(2**16 + 64, 2**15, dtype=torch.bfloat16, device="cuda")
    x[-64:] = data(64, 2**15).bfloat16()
    cast = Cast.parse("mxfp8")
    row, column = triton_kernels.quantize_both(x, cast, cast)
    want = law(x[-64:], cast, -1)
    assert torch.equal(row.codes[-64:], want.codes)
    assert torch.equal(triton_kernels.quantize(x, cast, axis=-1).codes[-64:], want.codes)
    assert torch.equal(column.codes[-64:], law(x[-64:], cast, -2).codes)


@pytest.mark.parametrize("name", SERVED)
def test_values_equal_the_reference(name: str, encoding: str) -> None:
    cast = Cast.parse(name)
    for shape in SHAPES:
        x = data(*shape)
        for axis in (-1, -2):
            q = law(x, cast, axis)
            ours = triton_kernels.quantize(x, cast, axis=axis)
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                want = reference.dequantize(q, dtype=dtype)
                for one in (q, ours):
                    got = triton_kernels.dequantize(one, dtype=dtype)
                    assert torch.equal(got.nan_to_num(nan=3e4), want.nan_to_num(nan=3e4))
            if ALL not in cast.format.block:
                got = triton_kernels.round_trip(x, cast, axis=axis)
                want = reference.dequantize(q, dtype=torch.bfloat16)
                assert torch.equal(got.nan_to_num(nan=7e9), want.nan_to_num(nan=7e9))


def test_compiled_without_graph_breaks() -> None:
    cast = Cast.parse("mxfp8")

    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        row, column = triton_kernels.quantize_both(x * 2, cast, cast)
        one = triton_kernels.quantize(x * 2, Cast.parse("fp8_rowwise"), axis=-1)
        return row.codes, row.scales, column.codes, column.scales, one.codes, one.scales

    x = data(96, 256).bfloat16()
    for got, want in zip(torch.compile(both, fullgraph=True)(x), both(x), strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("shape", [(0, 64), (1, 39), (63, 100), (300, 1000), (129, 2048)])
def test_norms_and_their_casts(shape: tuple[int, int], centered: bool) -> None:
    from lowprec.backends.triton_kernels import fused

    torch.manual_seed(0)
    cast = Cast.parse("mxfp8")
    rows, cols = shape
    x, other, dy = (torch.randn(rows, 2 * cols, device="cuda")[:, :cols].bfloat16() for _ in "abc")
    weight, bias = (torch.randn(cols, device="cuda").bfloat16() for _ in "ab")
    options = {"weight": weight, "bias": bias if centered else None, "centered": centered}
    for residual in (None, other):
        plain = fused.normalize(x, None, residual=residual, **options)
        coded = fused.normalize(x, cast, residual=residual, **options)
        source = x if residual is None else x + residual
        assert torch.equal(plain.source, source)
        assert torch.equal(plain.rstd, coded.rstd)
        wide = source.float() - (plain.mean[:, None] if centered else 0)
        wide = wide * plain.rstd[:, None] * weight.float()
        wide = wide + bias.float() if centered else wide
        assert torch.equal(plain.result, wide.bfloat16())
        assert_same(coded.result, law(plain.result, cast, -1), shape, centered)
    if rows == 0:
        return
    leaves = [t.double().requires_grad_() for t in (source, weight, bias)]
    functional = torch.nn.functional
    if centered:
        y = functional.layer_norm(leaves[0], (cols,), *leaves[1:], eps=1e-6)
    else:
        y = functional.rms_norm(leaves[0], (cols,), leaves[1], eps=1e-6)
    (y * dy.double()).sum().backward()
    got = fused.normalize_backward(dy, coded, weight=weight, has_bias=centered, passed=other)
    leaves[0].grad += other.double()
    for one, leaf in zip(got, leaves, strict=True):
        if one is not None:
            assert (one.double() - leaf.grad).norm() <= 3e-3 * leaf.grad.norm()


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(0, 64), (63, 100), (300, 1000)])
def test_activations_and_their_casts(shape: tuple[int, int], kind: str) -> None:
    from lowprec.backends.triton_kernels import fused

    torch.manual_seed(0)
    cast = Cast.parse("mxfp8")
    both = 3 * torch.randn(shape[0], 2 * shape[1], device="cuda")
    dy = torch.randn(shape, device="cuda")
    gate, up = both.chunk(2, dim=1)
    low = [t.bfloat16() for t in (gate, up)]
    plain, coded = (fused.activate(*low, one, kind=kind) for one in (None, cast))
    assert_same(coded, law(plain, cast, -1), shape, kind)
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    functional = torch.nn.functional
    inner = (
        functional.silu(leaves[0])
        if kind == "silu"
        else functional.gelu(leaves[0], approximate=approximate)
    )
    y = inner * leaves[1]
    assert (fused.activate(gate, up, None, kind=kind).double() - y).norm() <= 2e-6 * y.norm() + 1e-9
    (y * dy.double()).sum().backward()
    for one, leaf in zip(fused.activate_backward(dy, gate, up, kind=kind), leaves, strict=True):
        assert (one.double() - leaf.grad).norm() <= 2e-6 * leaf.grad.norm() + 1e-9
