"""The Triton kernels in Triton's interpreter: integer encoding, bit for bit against the reference.

The interpreter is chosen when Triton is imported, so a process of its own runs these tests.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowprec.attention_policy import AttentionPolicy
from lowprec.backends import choose, choose_gemm, reference, triton_kernels
from lowprec.backends.facts import Facts
from lowprec.backends.triton_kernels.proven import PROVEN
from lowprec.errors import UnsupportedError
from lowprec.formats import ALL, FORMATS, Cast
from lowprec.hardware import NAMED
from lowprec.rng import RandomStream
from lowprec.tensor import QuantizedTensor
from tests.core.kernel_cases import (
    INTERPRETED,
    assert_same,
    data,
    inside,
    law,
    needs_triton,
    poison,
)

ROOT = Path(__file__).parents[2]
INTERPRETED_FILES = (
    __file__,
    *(
        str(Path(__file__).with_name(f"test_{one}.py"))
        for one in ("triton_fused", "emulated_values", "calibration")
    ),
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
CASTS = [str(Cast(FORMATS[n], rule)) for n in SERVED for rule in FORMATS[n].scale_rules]
CASTS += [f"{c}:sr" for c in CASTS if c.partition(":")[2] not in ("floor", "even")]
SHAPES = [(0, 64), (1, 39), (63, 100), (32, 32 + 96)]
STREAM = RandomStream(7, layer="layer", role="wgrad.dy", step=3, first_row=5)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the subprocess")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_tests_below_pass_in_the_interpreter(which: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", which]
    done = subprocess.run(
        [*command, *INTERPRETED_FILES],
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
        ("fp8_tensorwise", "fp8_tensorwise"),
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
@pytest.mark.parametrize("text", ["mxfp8:sr", "mxfp8_32x32:sr", "mxfp4:ceil:sr", "mxfp8_e5m2:sr"])
def test_stochastic_rounding_draws_the_bits_of_the_reference(text: str) -> None:
    cast, x = Cast.parse(text), poison(data(40, 80))
    other = RandomStream(9, role="dgrad.dy", first_row=16)
    # Words in groups across, down (memory is transposed) and stored (70 is no multiple of 16).
    for view in (x, x.mT, x[:, :70].bfloat16(), x[:, ::3], x.view(5, 8, 80)):
        laws = [law(view, cast, axis, s) for axis, s in ((-1, STREAM), (-2, other))]
        for axis, stream, want in ((-1, STREAM, laws[0]), (-2, other, laws[1])):
            assert_same(triton_kernels.quantize(view, cast, axis=axis, stream=stream), want)
        both = triton_kernels.quantize_both(view, cast, cast, streams=(STREAM, other))
        for got, want in zip(both, laws, strict=True):
            assert_same(got, want)
    cube = data(10, 48).view(2, 5, 48)
    if cast.format.block[0] == 1:
        got = triton_kernels.quantize(cube, cast, axis=0, stream=STREAM)
        assert_same(got, law(cube, cast, 0, STREAM))


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
        return triton_kernels.cannot(op, Facts(NAMED[hardware], Cast.parse(text), None))

    assert refusal("mxfp8", "h200") is None
    assert refusal("mxfp8:sr", "h200") is None
    assert refusal("mxfp4_32x32:even", "b200") is None
    assert refusal("mxfp8", "cpu") == "needs a CUDA device, this is cpu"
    assert refusal("mxfp8", "a100") == "needs sm89, this is a100 (sm80)"
    assert refusal("mxfp4", "a100") is None
    assert "outer" not in (refusal("nvfp4", "h200") or "outer")
    assert "stochastic" in (refusal("fp8_rowwise:sr", "h200") or "")
    assert "no products" in (refusal("mxfp8", "h200", "matmul") or "")
    with pytest.raises(UnsupportedError, match="no cast to nvfp4"):
        triton_kernels.quantize(torch.ones(2, 32), Cast.parse("nvfp4"), axis=-1)


@needs_triton
def test_plans_take_what_is_proven_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts(NAMED["h200"], Cast.parse("mxfp8"), None)
    monkeypatch.setattr(triton_kernels, "PROVEN", frozenset({"mxfp8:floor"}))
    says = "the kernel that casts to mxfp8 is not proven on a GPU yet"
    assert triton_kernels.refuse("quantize", facts) == says
    assert choose("quantize", facts).refusals[0] == ("triton", says)
    monkeypatch.setattr(triton_kernels, "PROVEN", frozenset({"mxfp8"}))
    assert choose("quantize", facts).backend == "triton"
    assert choose_gemm(facts.left, facts.left, NAMED["h200"]).product == "emulated"
    assert choose("quantize", Facts(NAMED["cpu"], facts.left, None)).backend == "emulated"
    casts = {text for text in PROVEN if "attention " not in text}
    assert set(CASTS) >= {text.rpartition(" + ")[2] for text in casts}
    for text in PROVEN - casts:
        name = text.removeprefix("front + ").removesuffix(", short keys")
        policy = AttentionPolicy.parse(name.removeprefix("attention "))
        assert name == f"attention {policy if policy.quantizes else 'bf16'}"


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes tensors of the CPU")
def test_a_tensor_on_the_cpu_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match=r"on cpu, its kernels run on CUDA.*plan again"):
        triton_kernels.quantize(torch.ones(2, 32), Cast.parse("mxfp8"), axis=-1)


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
