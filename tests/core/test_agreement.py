"""Ring 2: every op, backend, format and shape against the reference and against float64."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowprec import RandomStream, ops, rng, rotation
from lowprec.backends import MODULES, ORDER, Facts, choose, choose_gemm, chunks
from lowprec.backends import reference as law
from lowprec.errors import UnsupportedError
from lowprec.formats import ALL, FORMATS, Cast, Rounding
from lowprec.hardware import NAMED
from lowprec.rotation import Rotation, Signs, rotate
from lowprec.tensor import QuantizedTensor

SHAPES = [(0, 64), (1, 39), (63, 100), (100, 63), (256, 1000), (96, 32 * 5 + 96)]
RULES = [(fmt, rule) for fmt in FORMATS.values() for rule in fmt.scale_rules]
CASES = [str(Cast(fmt, rule)) for fmt, rule in RULES] + [
    str(Cast(fmt, rule, Rounding.STOCHASTIC)) for fmt, rule in RULES if not rule.clips
]
# What casts, and what multiplies on a CPU; for native products see test_scaled_mm.py.
BACKENDS = [name for name in ORDER if name not in ("reference", "scaled_mm")]
PRODUCTS = [name for name in ORDER if name not in ("triton", "scaled_mm")]
STREAM = RandomStream(7, layer="layer", role="wgrad.dy", step=3, first_row=5)
Variant = Callable[[torch.Tensor], torch.Tensor]


def data(*shape: int, seed: int) -> torch.Tensor:
    """Gaussian values with channels that differ by 12 octaves."""
    generator = torch.Generator().manual_seed(seed)
    octaves = torch.linspace(-6, 6, max(shape[-1], 1))[: shape[-1]]
    return torch.randn(*shape, generator=generator) * torch.exp2(octaves)


def refusal(backend: str, op: str, cast: Cast) -> str | None:
    return MODULES[backend].refuse(op, Facts(NAMED["cpu"], cast, cast))  # type: ignore[no-any-return]


def bits(t: torch.Tensor | None) -> torch.Tensor:
    """What torch.equal compares bit for bit, NaN included."""
    t = torch.zeros(0) if t is None else t
    return t.view(torch.int32) if t.dtype == torch.float32 else t


def assert_agrees(x: torch.Tensor, cast: Cast, backend: str, *, axis: int) -> None:
    """The backend's codes, scales and outer scale are the reference's."""
    want, got = (
        ops.quantize(x, cast, axis=axis, generator=STREAM, backend=which)
        for which in ("reference", backend)
    )
    where = (backend, str(cast), tuple(x.shape), x.stride(), x.dtype, axis)
    assert torch.equal(got.codes, want.codes), where
    assert torch.equal(bits(got.scales), bits(want.scales)), where
    assert torch.equal(bits(got.outer), bits(want.outer)), where
    assert (got.axis, got.shape, got.outer is None) == (want.axis, want.shape, want.outer is None)


def cast_for(text: str, backend: str) -> Cast:
    cast = Cast.parse(text)
    if reason := refusal(backend, "quantize", cast):
        pytest.skip(f"{backend} refuses: {reason}")
    return cast


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", CASES)
def test_casts_are_bitwise_equal(text: str, backend: str) -> None:
    cast = cast_for(text, backend)
    for shape in SHAPES:
        x = data(*shape, seed=1)
        for view in (x, x.mT, x.bfloat16(), x[:, ::2], x[:1].expand(5 * min(shape[0], 1), -1)):
            for axis in (-1, -2):
                assert_agrees(view, cast, backend, axis=axis)


def halfway(x: torch.Tensor) -> torch.Tensor:
    """Few significant bits, so that many values lie halfway between two codes, and both zeros."""
    return (x * 4).round() * 0.25


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """A NaN of either sign in the first column block and an Inf in the last."""
    x = x.clone()
    x[..., 0, 3], x[..., -1, 2], x[..., -1, -1] = torch.nan, -torch.nan, -torch.inf
    return x


def spread(x: torch.Tensor) -> torch.Tensor:
    """Magnitudes from subnormal to the largest, so that many lie far below their scale."""
    return x * torch.exp2(torch.linspace(-140, 110, x.numel()).view(x.shape))


SPECIAL: list[Variant] = [
    halfway,
    poisoned,
    spread,
    lambda x: x * 2.0**-130,
    lambda x: x * 2.0**121,
    lambda x: x.double() * 1e36,
    lambda x: torch.full_like(x, -0.0),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", CASES)
def test_special_values_are_bitwise_equal(text: str, backend: str) -> None:
    cast = cast_for(text, backend)
    for change in SPECIAL:
        x = change(data(66, 136, seed=8))
        for view in (x, x.mT):
            for axis in (-1, -2):
                assert_agrees(view, cast, backend, axis=axis)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", CASES)
def test_any_rank_and_any_axis(text: str, backend: str) -> None:
    cast = cast_for(text, backend)
    square = cast.format.block[0] not in (1, ALL)
    for shape in ((2, 2, 40, 50), (2, 64, 32), (2, 0, 5), (0, 3, 5), (7,), (4, 0)):
        x = data(*shape, seed=9)
        for axis in range(-2 if square else -3, 0):
            if axis >= -x.ndim:
                assert_agrees(x, cast, backend, axis=axis)
                assert_agrees(x.movedim(0, -1), cast, backend, axis=axis)


@pytest.mark.parametrize("elements", [1, 4500])
def test_the_size_of_a_chunk_changes_no_bit(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one row, of parts of blocks and of several blocks."""
    tensors = [poisoned(data(70, 39, seed=10)), data(2, 40, 50, seed=11)]
    whole = [rotate(t, Rotation(16), axis=a, side="left") for t in tensors for a in (-1, -2)]
    words = STREAM.words(70, 39, device=torch.device("cpu"))
    operand = ops.quantize(tensors[1][0], "mxfp8_32x32")
    product = ops.matmul(operand, operand)
    monkeypatch.setattr(chunks, "CHUNK", elements)
    monkeypatch.setattr(rotation, "_CPU_CHUNK", elements)
    cut = [rotate(t, Rotation(16), axis=a, side="left") for t in tensors for a in (-1, -2)]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(whole, cut, strict=True))
    with monkeypatch.context() as patch:
        patch.setattr(rng, "_CALLS_AT_ONCE", 1 + elements // 16)
        assert torch.equal(STREAM.words(70, 39, device=torch.device("cpu")), words)
    assert torch.equal(ops.matmul(operand, operand), product)
    for name in FORMATS:
        for suffix in ("", ":sr"):
            for t in tensors:
                for axis in (-1, -2):
                    assert_agrees(t, Cast.parse(name + suffix), "emulated", axis=axis)


@pytest.mark.parametrize("text", CASES)
def test_tensors_without_data_have_the_same_shapes(text: str) -> None:
    cast = Cast.parse(text)
    for shape in ((70, 100), (2, 40, 50), (0, 32)):
        x = data(*shape, seed=12)
        want = ops.quantize(x, cast, axis=-2, generator=STREAM, backend="emulated")
        got = [ops.quantize(x.to("meta"), cast, axis=-2, generator=STREAM, backend="emulated")]
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x)
            got.append(ops.quantize(fake, cast, axis=-2, generator=STREAM, backend="emulated"))
        for q in got:
            assert layout(q) == layout(want)


def layout(q: QuantizedTensor) -> list[object]:
    parts = [part for part in (q.codes, q.scales, q.outer) if part is not None]
    return [q.axis, *((part.shape, part.is_contiguous(), part.dtype) for part in parts)]


@pytest.mark.parametrize("signs", Signs)
@pytest.mark.parametrize("size", rotation.SIZES)
def test_a_rotation_adds_in_the_fixed_order(size: int, signs: Signs) -> None:
    """Against the definition, pair by pair in Python, where float32 addition is rounded too."""
    x, turn = data(2, size, seed=13), Rotation(size, signs)
    values = turn.sign_values(STREAM) or (1,) * size
    rows = [list(row * torch.tensor(values)) for row in x]
    step = 1
    while step < size:
        for row in rows:
            for i in range(size):
                if not i & step:
                    row[i], row[i + step] = row[i] + row[i + step], row[i] - row[i + step]
        step *= 2
    want = torch.stack([torch.stack(row) for row in rows])
    power = size.bit_length() - 1
    left = rotate(x, turn, axis=-1, side="left", stream=STREAM)
    right = rotate(x.mT, turn, axis=-2, side="right", stream=STREAM)
    assert torch.equal(left, want * 2.0 ** -(power // 2))
    assert torch.equal(right.mT, want * 2.0 ** -(power - power // 2))


@pytest.mark.parametrize("backend", PRODUCTS)
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


@pytest.mark.parametrize("backend", PRODUCTS)
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


def test_choice_keeps_every_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = Cast.parse("mxfp8")
    assert choose_gemm(cast, cast, NAMED["cpu"]).product == "emulated"
    monkeypatch.setattr(MODULES["emulated"], "refuse", lambda op, facts: f"no {op} today")
    choice = choose("quantize", Facts(NAMED["cpu"], Cast.parse("nvfp4"), None))
    assert choice.backend == "reference"
    assert choice.refusals[-1] == ("emulated", "no quantize today")
    assert not choice.native


@pytest.mark.parametrize("text", CASES)
def test_every_cast_has_a_fast_path_on_a_cpu(text: str) -> None:
    cast = Cast.parse(text)
    assert choose("quantize", Facts(NAMED["cpu"], cast, None)).backend != "reference"


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


@pytest.mark.parametrize("cast", [None, FORMATS["mxfp8"], ["mxfp8"]])
def test_what_is_no_cast_is_refused(cast: object) -> None:
    with pytest.raises(UnsupportedError, match="a Cast or its text"):
        ops.quantize(torch.ones(2, 32), cast)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="takes a QuantizedTensor"):
        ops.dequantize(torch.ones(2))  # type: ignore[arg-type]


def test_unknown_backend() -> None:
    with pytest.raises(UnsupportedError, match="known: triton, scaled_mm, emulated, reference"):
        ops.quantize(torch.ones(2, 32), "mxfp8", backend="cuda")
