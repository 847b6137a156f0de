"""Ring 2: every op, backend, format and shape against the reference and against float64."""

import pytest
import torch

from lowprec import ops
from lowprec.backends import MODULES, ORDER, Facts, choose, choose_gemm
from lowprec.backends import reference as law
from lowprec.errors import UnsupportedError
from lowprec.formats import FORMATS, Cast
from lowprec.hardware import NAMED

SHAPES = [(0, 64), (1, 39), (63, 100), (100, 63), (256, 1000), (96, 32 * 5 + 96)]
CASES = [(f"{name}:{rule}") for name, fmt in FORMATS.items() for rule in fmt.scale_rules]


def data(*shape: int, seed: int) -> torch.Tensor:
    """Gaussian values with channels that differ by 12 octaves."""
    generator = torch.Generator().manual_seed(seed)
    octaves = torch.linspace(-6, 6, max(shape[-1], 1))[: shape[-1]]
    return torch.randn(*shape, generator=generator) * torch.exp2(octaves)


def refusal(backend: str, op: str, cast: Cast) -> str | None:
    return MODULES[backend].refuse(op, Facts(NAMED["cpu"], cast, cast))  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", [name for name in ORDER if name != "reference"])
@pytest.mark.parametrize("text", CASES)
def test_casts_are_bitwise_equal(text: str, backend: str) -> None:
    cast = Cast.parse(text)
    if reason := refusal(backend, "quantize", cast):
        pytest.skip(f"{backend} refuses: {reason}")
    for shape in SHAPES:
        x = data(*shape, seed=1)
        for view in (x, x.mT, x.bfloat16(), x[:, ::2], x[:1].expand(5 * min(shape[0], 1), -1)):
            for axis in (-1, -2):
                want = ops.quantize(view, cast, axis=axis, backend="reference")
                got = ops.quantize(view, cast, axis=axis, backend=backend)
                assert torch.equal(got.codes, want.codes), (shape, axis)
                assert torch.equal(got.scales, want.scales), (shape, axis)
                assert got.axis == want.axis


@pytest.mark.parametrize("backend", ORDER)
@pytest.mark.parametrize("name", FORMATS)
def test_products_stay_within_twice_the_references_error(name: str, backend: str) -> None:
    cast = Cast.parse(name)
    for m, k in SHAPES:
        a, b = data(m, k, seed=2), data(48, k, seed=3)
        left, right = ops.quantize(a, cast), ops.quantize(b, cast)
        bias = data(48, seed=4)
        exact = (
            law.dequantize(left, dtype=torch.float64)
            @ law.dequantize(right, dtype=torch.float64).mT
            + bias.double()
        )
        error = {
            which: (ops.matmul(left, right, bias=bias, backend=which).double() - exact).norm()
            for which in {backend, "reference"}
        }
        assert error[backend] <= 2 * error["reference"] + 1e-30, (m, k)


@pytest.mark.parametrize("backend", ORDER)
def test_operands_may_be_transposed_views_and_of_different_formats(backend: str) -> None:
    x, w = data(40, 64, seed=5), data(32, 64, seed=6)
    tile = ops.quantize(w.mT.contiguous(), "mxfp8_32x32", axis=-2).mT
    direct = ops.quantize(w, "mxfp8_32x32")
    for left_format in ("mxfp8", "fp8_rowwise", "nvfp4", "fp8_tensorwise"):
        left = ops.quantize(x, left_format)
        a, b = (ops.matmul(left, right, backend=backend) for right in (tile, direct))
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_tensorwise", "nvfp4"])
def test_huge_times_tiny_does_not_overflow(name: str) -> None:
    a, b = torch.full((4, 32), 3e38), torch.full((4, 32), 1e-30)
    left, right = ops.quantize(a, name), ops.quantize(b, name)
    want, got = (ops.matmul(left, right, backend=which) for which in ("reference", "emulated"))
    assert want.isfinite().all()
    assert torch.allclose(got.float(), want.float(), rtol=2**-6)


def test_mx_emulation_is_exact_in_its_operands() -> None:
    """Integers small enough that every sum is exact: the emulated product is the exact one."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (64, 96), generator=generator).float() for _ in range(2))
    got = ops.matmul(ops.quantize(a, "mxfp8"), ops.quantize(b, "mxfp8"), out_dtype=torch.float32)
    assert torch.equal(got, a @ b.mT)


def test_choice_keeps_every_refusal() -> None:
    choice = choose("quantize", Facts(NAMED["h200"], Cast.parse("nvfp4"), None))
    assert choice.backend == "reference"
    assert choice.refusals == (("emulated", "no fast cast to nvfp4"),)
    assert not choice.native
    cast = Cast.parse("mxfp8")
    assert choose_gemm(cast, cast, NAMED["cpu"]).product == "emulated"


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (torch.zeros(2, 32), torch.zeros(3, 64), "differ in K"),
        (torch.zeros(32), torch.zeros(3, 32), "a has shape"),
        (torch.zeros(2, 32), "rows", "b was cast along axis -2"),
    ],
)
def test_bad_products(a: torch.Tensor, b: torch.Tensor | str, says: str) -> None:
    right = ops.quantize(torch.ones(32, 32), "mxfp8", axis=0) if isinstance(b, str) else b
    with pytest.raises(UnsupportedError, match=says):
        ops.matmul(a, right)


def test_a_cast_that_a_backend_refuses_is_an_error() -> None:
    for name in ("mxfp4", "nvfp4"):
        with pytest.raises(UnsupportedError, match="emulated: no fast cast"):
            ops.quantize(torch.ones(2, 32), name, backend="emulated")


@pytest.mark.parametrize("cast", [None, FORMATS["mxfp8"], ["mxfp8"]])
def test_what_is_no_cast_is_refused(cast: object) -> None:
    with pytest.raises(UnsupportedError, match="a Cast or its text"):
        ops.quantize(torch.ones(2, 32), cast)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="takes a QuantizedTensor"):
        ops.dequantize(torch.ones(2))  # type: ignore[arg-type]


def test_unknown_backend() -> None:
    with pytest.raises(UnsupportedError, match="known: emulated, reference"):
        ops.quantize(torch.ones(2, 32), "mxfp8", backend="cuda")
