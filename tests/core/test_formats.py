"""Elements, formats and casts: derived facts against the standard's tables, errors by name."""

import itertools
import math

import pytest
import torch

from lowprec.errors import UnsupportedError
from lowprec.formats import ELEMENTS, FORMATS, Cast, ScaleRule
from lowprec.policy import BF16, Gemm, parse_product

# name: bias, emin, emax, quantum, smallest normal, max code (OCP MX v1.0, tables 1 to 5)
TABLE = {
    "e4m3": (7, -6, 8, 2.0**-9, 2.0**-6, 0x7E),
    "e5m2": (15, -14, 15, 2.0**-16, 2.0**-14, 0x7B),
    "e2m3": (1, 0, 2, 0.125, 1.0, 0x1F),
    "e3m2": (3, -2, 4, 0.0625, 0.25, 0x1F),
    "e2m1": (1, 0, 2, 0.5, 1.0, 0x07),
}


@pytest.mark.parametrize("name", TABLE)
def test_element_facts(name: str) -> None:
    e = ELEMENTS[name]
    assert (e.bias, e.emin, e.emax, e.quantum, 2.0**e.emin, e.max_code) == TABLE[name]
    assert e.values[e.max_code] == e.max


def test_values_of_e2m1_and_of_torch_float8() -> None:
    assert ELEMENTS["e2m1"].values[:8] == (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    assert math.copysign(1, ELEMENTS["e2m1"].values[8]) == -1
    for name in ("e4m3", "e5m2"):
        element = ELEMENTS[name]
        assert element.torch_dtype is not None
        codes = torch.arange(256, dtype=torch.uint8).view(element.torch_dtype).float()
        ours = torch.tensor(element.values, dtype=torch.float32)
        assert torch.equal(codes.nan_to_num(777.0), ours.nan_to_num(777.0)), name
    assert sum(math.isnan(v) for v in ELEMENTS["e4m3"].values) == 2
    assert sum(math.isinf(v) for v in ELEMENTS["e5m2"].values) == 2


def test_six_bit_elements_have_no_specials_and_are_monotone() -> None:
    for name in ("e2m3", "e3m2", "e2m1"):
        values = ELEMENTS[name].values
        positive = values[: len(values) // 2]
        assert all(math.isfinite(v) for v in values)
        assert all(a < b for a, b in itertools.pairwise(positive)), name
        assert [-v for v in positive] == list(values[len(values) // 2 :])


def test_bits_per_value() -> None:
    assert FORMATS["mxfp8"].bits_per_value == 8.25
    assert FORMATS["mxfp8_32x32"].bits_per_value == 8 + 8 / 1024
    assert FORMATS["nvfp4"].bits_per_value == 4.5
    assert FORMATS["fp8_1x128"].bits_per_value == 8.25


def test_transposable_formats_are_the_square_ones() -> None:
    square = {name for name, fmt in FORMATS.items() if fmt.transposable}
    assert "mxfp8_32x32" in square
    assert "fp8_tensorwise" in square
    assert "mxfp8" not in square
    assert "fp8_rowwise" not in square


def test_cast_text_round_trip_and_default_rule() -> None:
    assert Cast.parse("mxfp8").scale_rule is ScaleRule.RCEIL
    assert Cast.parse("fp8_rowwise").scale_rule is ScaleRule.EXACT
    for fmt in FORMATS.values():
        for rule in fmt.scale_rules:
            cast = Cast(fmt, rule)
            assert Cast.parse(str(cast)) == cast


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mxfp9", "did you mean mxfp8"),
        ("mxfp8:florr", "did you mean floor"),
        ("mxfp8:exact", "allowed: rceil, floor, ceil, even"),
        ("fp8_rowwise:rceil", "allowed: exact"),
        ("", "unknown format"),
    ],
)
def test_bad_casts_name_the_way_out(text: str, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        Cast.parse(text)


def test_products_parse_and_print() -> None:
    assert parse_product("bf16") is BF16
    tiles = parse_product("mxfp8 x mxfp8_32x32")
    assert isinstance(tiles, Gemm)
    assert tiles.right.format.block == (32, 32)
    for text in ("mxfp8", "mxfp8:floor", "mxfp8 x mxfp8_32x32", "bf16"):
        assert str(parse_product(text)) == text
    assert str(parse_product("mxfp8 x mxfp8")) == "mxfp8"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bf16 x mxfp8", "one operand only"),
        ("mxfp8 x bf16", "one operand only"),
        ("a x b x c", "cannot read the product"),
        ("mxfp8 x ", "unknown format|cannot read"),
        ("skipp", "unknown format 'skipp'; known: bf16, mxfp8,"),
        ("BF16", "unknown format 'BF16'; did you mean bf16"),
        ("bfloat16", "did you mean bf16"),
        ("torch.bfloat16", "did you mean bf16"),
        ("bf61", "did you mean bf16"),
        ("bf16:floor", "bf16 is not quantized and takes no scale rule"),
        ("skip:floor", "skip stands alone, and only for wgrad"),
        ("fp32", "bf16 is the one product that is not quantized"),
        ("Float32", "bf16 is the one product that is not quantized"),
        ("mxfp8 x fp32", "bf16 is the one product that is not quantized"),
        ("MXFP8", "did you mean mxfp8"),
        ("mxfp9:floor", "unknown format 'mxfp9:floor'; did you mean mxfp8"),
        ("mxfp8:", "unknown scale rule ''"),
        ("mxfp8:flor", "did you mean floor"),
    ],
)
def test_bad_products(text: str, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        parse_product(text)
