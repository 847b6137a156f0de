"""The Triton kernels in Triton's interpreter: integer encoding, bit for bit against the reference.

The interpreter is chosen when Triton is imported, so a process of its own runs these tests.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowprec.backends import reference, triton_kernels
from lowprec.backends.facts import Facts
from lowprec.errors import UnsupportedError
from lowprec.formats import ALL, FORMATS, Cast
from lowprec.hardware import NAMED
from lowprec.tensor import QuantizedTensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).parents[2]
inside = pytest.mark.skipif(not INTERPRETED, reason="run by the test of the subprocess")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
# numpy, in which the interpreter computes, warns of the very NaN and Inf that are tested.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SERVED = [name for name, fmt in FORMATS.items() if not fmt.outer]
QUICK = ("mxfp8", "mxfp8_32x32", "mxfp4")
RULES = [
    pytest.param(f"{name}:{rule}", marks=[] if name in QUICK or not index else [pytest.mark.slow])
    for name in SERVED
    for index, rule in enumerate(FORMATS[name].scale_rules)
]
SHAPES = [(0, 64), (1, 39), (63, 100), (32, 32 + 96)]


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


def law(x: torch.Tensor, cast: Cast, axis: int) -> QuantizedTensor:
    """What the reference gives; NaN and Inf poison a block alike."""
    finite = x.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return reference.quantize(finite, cast, axis=axis)


def assert_same(got: QuantizedTensor, want: QuantizedTensor) -> None:
    assert got.codes.shape == want.codes.shape
    assert got.scales.shape == want.scales.shape
    assert got.scales.dtype == want.scales.dtype
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(*(t.scales.nan_to_num(nan=-1.0) for t in (got, want)))
    assert got.axis == want.axis


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the subprocess")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_tests_below_pass_in_the_interpreter(which: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", which]
    done = subprocess.run(
        [*command, __file__],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@inside
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("text", RULES)
def test_casts_equal_the_reference(text: str, axis: int) -> None:
    cast, x = Cast.parse(text), data(40, 70)
    views = [x, poison(x), x.mT] if ":rceil" in text or ":exact" in text else [poison(x)]
    for view in views:
        got, want = triton_kernels.quantize(view, cast, axis=axis), law(view, cast, axis)
        assert_same(got, want)
        along = got.codes if axis == -1 else got.codes.mT
        assert along.stride(-1) == 1 or cast.format.block == (ALL, ALL)


@inside
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_32x32", "fp8_1x128", "mxfp4", "fp8_rowwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_and_ragged_shape(name: str, dtype: torch.dtype) -> None:
    cast = Cast.parse(name)
    for shape in SHAPES:
        x = data(*shape).to(dtype)
        for axis in (-1, -2):
            assert_same(triton_kernels.quantize(x, cast, axis=axis), law(x, cast, axis))


@inside
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_32x32", "fp8_rowwise", "fp8_tensorwise"])
def test_views_and_ranks(name: str) -> None:
    cast, base = Cast.parse(name), data(48, 96)
    views = [base[::2, ::3], base[:1].expand(34, 96), base[5:40, 3:], base.view(3, 16, 96)]
    for view in [*views, base.view(2, 3, 8, 96)[:, 1:], base.view(3, 16, 96).mT, base[0]]:
        for axis in (-1, -2)[: view.ndim]:
            assert_same(triton_kernels.quantize(view, cast, axis=axis), law(view, cast, axis))


@inside
@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0), (0,), (1,), (2, 0, 5)])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_32x32", "fp8_rowwise", "fp8_tensorwise"])
def test_empty_shapes(name: str, shape: tuple[int, ...]) -> None:
    cast, x = Cast.parse(name), torch.ones(shape)
    for axis in (-1, -2)[: x.ndim]:
        assert_same(triton_kernels.quantize(x, cast, axis=axis), law(x, cast, axis))


@inside
@pytest.mark.parametrize(
    ("row", "column"),
    [
        ("mxfp8", "mxfp8"),
        ("mxfp8_32x32", "mxfp8_32x32"),
        ("mxfp8_1x128:even", "mxfp8_1x128:floor"),
        ("mxfp8", "mxfp4"),
        ("mxfp8_e5m2", "fp8_rowwise"),
    ],
)
def test_both_directions_at_once(row: str, column: str) -> None:
    casts = Cast.parse(row), Cast.parse(column)
    base = poison(data(40, 70))
    for x in (base, base.mT, base.bfloat16().view(2, 20, 70)):
        for got, cast, axis in zip(
            triton_kernels.quantize_both(x, *casts), casts, (-1, -2), strict=True
        ):
            assert_same(got, law(x, cast, axis))


@inside
@pytest.mark.parametrize("text", SERVED)
def test_values_equal_the_reference(text: str) -> None:
    cast = Cast.parse(text)
    x = poison(data(40, 70))
    for axis in (-1, -2):
        for q in (law(x, cast, axis), triton_kernels.quantize(x.mT, cast, axis=axis)):
            for dtype in (torch.bfloat16, torch.float32):
                got = triton_kernels.dequantize(q, dtype=dtype)
                want = reference.dequantize(q, dtype=dtype)
                assert torch.equal(got.nan_to_num(nan=7e9), want.nan_to_num(nan=7e9))
        if ALL not in cast.format.block:
            got = triton_kernels.round_trip(x, cast, axis=axis)
            want = reference.dequantize(law(x, cast, axis), dtype=torch.bfloat16)
            assert torch.equal(got.nan_to_num(nan=7e9), want.nan_to_num(nan=7e9))


@inside
def test_every_code_decodes() -> None:
    for name in ("mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"):
        fmt = FORMATS[name]
        finite = [c for c in range(1 << fmt.element.bits) if abs(fmt.element.values[c]) < 1e9]
        codes = torch.tensor(finite, dtype=torch.uint8)[:, None].expand(-1, 32).contiguous()
        scales = (torch.arange(len(finite)) % 255).to(torch.uint8)[:, None]
        q = QuantizedTensor(codes, scales, fmt, -1)
        got = triton_kernels.dequantize(q, dtype=torch.float32)
        assert torch.equal(got, reference.dequantize(q, dtype=torch.float32))


@needs_triton
def test_what_is_refused() -> None:
    def refusal(text: str, hardware: str, op: str = "quantize") -> str | None:
        return triton_kernels.refuse(op, Facts(NAMED[hardware], Cast.parse(text), None))

    assert refusal("mxfp8", "h200") is None
    assert refusal("mxfp4_32x32:even", "b200") is None
    assert refusal("mxfp8", "cpu") == "needs a CUDA device, this is cpu"
    assert refusal("mxfp8", "a100") == "needs sm89, this is a100 (sm80)"
    assert refusal("mxfp4", "a100") is None
    assert "outer" not in (refusal("nvfp4", "h200") or "outer")
    assert "stochastic" in (refusal("mxfp8:sr", "h200") or "")
    assert "no products" in (refusal("mxfp8", "h200", "matmul") or "")
    with pytest.raises(UnsupportedError, match="no cast to nvfp4"):
        triton_kernels.quantize(torch.ones(2, 32), Cast.parse("nvfp4"), axis=-1)


@pytest.mark.parametrize(
    ("version", "says"),
    [(None, "Triton is not installed"), ("3.5.1", "Triton 3.5.1 is too old; needs 3.6")],
)
def test_a_missing_or_old_triton_is_a_refusal(
    version: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", look_up)
    triton_kernels.missing.cache_clear()
    facts = Facts(NAMED["h200"], Cast.parse("mxfp8"), None)
    assert triton_kernels.refuse("quantize", facts) == says
    triton_kernels.missing.cache_clear()


@inside
def test_the_ops_have_fakes_and_schemas_that_fit() -> None:
    from lowprec.backends.triton_kernels import launch

    del launch
    x = data(1, 40, 70)[None][0].view(1, 40, 70).bfloat16()
    codes, scales = torch.ops.lowprec.cast_tiles(x, "mxfp8", "")
    for op, arguments in {
        "cast_tiles": (x, "mxfp8", "mxfp8_32x32"),
        "cast_spans": (x, "fp8_rowwise", True),
        "decode_tiles": (codes, scales, "mxfp8", False, torch.bfloat16),
        "round_trip": (x, "mxfp8", True, torch.bfloat16),
    }.items():
        torch.library.opcheck(
            getattr(torch.ops.lowprec, op).default,
            arguments,
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
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
        assert_same(coded.result, law(plain.result, Cast.parse("mxfp8"), -1))
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
