"""Stochastic rounding: golden codes, exact probabilities by enumeration, and a powered test."""

import json
import math
from pathlib import Path

import pytest
import torch

import lowprec
from lowprec.backends import reference
from lowprec.errors import UnsupportedError
from lowprec.formats import E2M1, ELEMENTS, FORMATS, Cast, Element
from lowprec.ops import dequantize, quantize
from lowprec.rng import RandomStream

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rounding.json").read_text())
Z_LIMIT = 4.89  # two-sided p = 1e-6: 30 points stay below 3e-5 together


def encoded(x: torch.Tensor, words: torch.Tensor, element: Element) -> torch.Tensor:
    return reference.encode_stochastic(x, words.to(torch.int32), element)


def test_golden_codes() -> None:
    cases = GOLDEN["stochastic_rounding"]["cases"]
    assert len(cases) == 99
    for name, x, word, code in cases:
        got = encoded(torch.tensor([x]), torch.tensor([int(word, 16)]), ELEMENTS[name])
        assert got.tolist() == [code], (name, x, word)


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
def test_probability_is_the_fraction_by_enumeration(element: Element) -> None:
    """Every word of the window: the count that rounds up is the fraction of the step, exactly."""
    window = 1 << (23 - element.mantissa_bits)
    words = torch.arange(window, dtype=torch.int64)
    for x in (1.0, 1.0 + 3 / 256, 1.3, 1.9999, element.max * 0.99, element.max):
        value = torch.tensor(x)
        codes = encoded(value.expand(window), words, element)
        low = int(value.view(torch.int32)) & (window - 1)
        down = int(codes.min())
        assert int((codes != down).sum()) == (low if codes.max() != down else 0), x
        assert low == 0 or int(codes.max()) == down + 1, x


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
def test_subnormals_are_unbiased_to_two_to_the_minus_28(element: Element) -> None:
    steps = 2**20
    words = (torch.arange(steps, dtype=torch.int64) << 12) + 2**11
    for share in (0.0, 0.25, 0.3, 0.999):
        x = torch.tensor((1 + share) * element.quantum)
        if x >= 2.0**element.emin:
            continue
        mean = encoded(x.expand(steps), words, element).double().mean()
        assert abs(mean - (1 + share)) <= 2 / steps, share


def test_the_largest_subnormal_may_become_the_first_normal() -> None:
    x, word = torch.tensor([0.99, -0.99]), torch.tensor([0xFFFFFFFF])
    assert encoded(x, word.expand(2), E2M1).tolist() == [2, 10]
    assert encoded(x, torch.zeros(2, dtype=torch.int64), E2M1).tolist() == [1, 9]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"])
def test_unbiased_with_power(name: str) -> None:
    """2^18 draws a point; |z| < 4.89 for every point; a bias of 0.007 steps would be seen."""
    element, draws = FORMATS[name].element, 2**18
    generator = torch.Generator().manual_seed(11)
    points = torch.rand(6, generator=generator) * element.max * 0.9
    points[0] = 0.4 * element.quantum
    for number, point in enumerate(points):
        x = point.expand(draws // 64, 64).contiguous()
        x = torch.cat([x, torch.full((len(x), 32), element.max)], dim=1)  # fixes the scale at 1
        q = quantize(x[:, 32:], f"{name}:sr", generator=RandomStream(number))
        values = dequantize(q)[:, :32].double().flatten()
        down, up = values.min(), values.max()
        share = (float(point) - down) / (up - down)
        assert 0 < share < 1
        n = values.numel()
        z = (values.mean() - float(point)) / ((up - down) * math.sqrt(share * (1 - share) / n))
        assert abs(z) < Z_LIMIT, (float(point), float(z))


def test_casts_repeat_and_shards_agree() -> None:
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(2))
    for text in ("mxfp4:sr", "mxfp8:ceil:sr", "nvfp4:sr", "fp8_rowwise:sr", "mxfp4_32x32:sr"):
        for axis in (-1, -2):
            a, b = (quantize(x, text, axis=axis, generator=RandomStream(1, "l")) for _ in range(2))
            assert torch.equal(a.codes, b.codes)
            other = quantize(x, text, axis=axis, generator=RandomStream(1, "l", step=1))
            assert not torch.equal(a.codes, other.codes)
            if text.startswith("nvfp4") or (text.startswith("fp8") and axis == -2):
                continue  # a scale over the whole tensor or column differs between shards
            halves = [
                quantize(
                    x[at : at + 32], text, axis=axis, generator=RandomStream(1, "l", first_row=at)
                )
                for at in (0, 32, 64)
            ]
            assert torch.equal(torch.cat([h.codes for h in halves]), a.codes)


def test_codes_are_the_two_neighbours() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    exact = quantize(x, "mxfp4")
    scale = torch.exp2(exact.scales.float() - 127).repeat_interleave(32, dim=1)
    values = (x / scale).abs().clamp(max=6)
    grid = torch.tensor(E2M1.values[:8])
    down = torch.bucketize(values, grid, right=True) - 1
    codes = quantize(x, "mxfp4:sr", generator=RandomStream(0)).codes & 7
    assert ((codes == down) | (codes == down + 1)).all()
    assert (codes == down).any()
    assert (codes == down + 1).any()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "mxfp4:floor:sr",
            "needs a scale rule that clips nothing.*floor clips, allowed: rceil, ceil",
        ),
        ("mxfp8:even:sr", "even clips"),
        ("mxfp4:sr:floor", "unknown scale rule 'sr:floor'"),
        ("mxfp4:ssr", "did you mean sr"),
    ],
)
def test_bad_casts(text: str, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        Cast.parse(text)


def test_text_round_trip() -> None:
    for text in ("mxfp4:sr", "mxfp8:ceil:sr", "nvfp4_16x16:sr"):
        assert str(Cast.parse(text)) == text
    assert str(Cast.parse("mxfp4:rceil:sr")) == "mxfp4:sr"


def test_a_stochastic_cast_needs_its_bits_and_never_torchs() -> None:
    x = torch.ones(2, 32)
    for wrong in (None, torch.Generator()):
        with pytest.raises(UnsupportedError, match=r"needs generator=lowprec\.RandomStream"):
            lowprec.quantize(x, "mxfp4:sr", generator=wrong)  # type: ignore[arg-type]
    before = torch.get_rng_state()
    lowprec.quantize(x, "mxfp4:sr", generator=lowprec.RandomStream(0))
    assert torch.equal(before, torch.get_rng_state())


def test_double_quantization_is_refused() -> None:
    q = quantize(torch.ones(2, 32), "mxfp4")
    with pytest.raises(UnsupportedError, match=r"is mxfp4 already.*cast the high-precision source"):
        quantize(q, "mxfp4", axis=0)  # type: ignore[arg-type]
