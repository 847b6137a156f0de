"""Ring 1: casts of the reference against byte-exact vectors, and every code of every format."""

import hashlib
import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from lowprec.backends import reference
from lowprec.formats import E2M1, E4M3, ELEMENTS, FORMATS, Cast
from lowprec.ops import dequantize, quantize
from lowprec.tensor import QuantizedTensor

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "vectors.json").read_text())
ROUNDING = json.loads((Path(__file__).parents[1] / "golden" / "rounding.json").read_text())
FORMAT_OF = {"e4m3": "mxfp8", "e5m2": "mxfp8_e5m2", "e2m1": "mxfp4"}
TILE_OF = {"e4m3": "mxfp8_32x32", "e5m2": "mxfp8_e5m2_32x32", "e2m1": "mxfp4_32x32"}
SPECIAL = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan, "-nan": math.nan}


def block_input(block: dict) -> torch.Tensor:
    values = [SPECIAL[v.lower()] if isinstance(v, str) else v for v in block["input"]]
    return torch.tensor(values, dtype=torch.float64).float()


def codes_of(text: str, element: str) -> list[int]:
    width = 1 if element == "e2m1" else 2
    return [int(text[i : i + width], 16) for i in range(0, len(text), width)]


@pytest.mark.parametrize("backend", ["reference", "emulated"])
@pytest.mark.parametrize("rule", ["floor", "rceil", "ceil", "even"])
@pytest.mark.parametrize("element", FORMAT_OF)
def test_golden_blocks(element: str, rule: str, backend: str) -> None:
    cast = Cast.parse(f"{FORMAT_OF[element]}:{rule}")
    wrong, compared = [], 0
    for block in VECTORS["blocks"]:
        expected = block["expect"][element][rule]
        q = quantize(block_input(block), cast, backend=backend)
        if q.scales.tolist() != [expected["e8m0"]]:
            wrong.append(f"{block['id']}: scale {q.scales.tolist()} not {expected['e8m0']}")
        if expected["codes"] is None:
            assert q.codes.count_nonzero() == 0, block["id"]
            assert dequantize(q).isnan().all(), block["id"]
        elif q.codes.tolist() != codes_of(expected["codes"], element):
            wrong.append(f"{block['id']}: codes {bytes(q.codes.tolist()).hex()}")
        compared += 1
    assert not wrong, "\n".join(wrong)
    assert compared == 63


def tile_input() -> torch.Tensor:
    i, j = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    return ((i * 37 + j * 101) % 255 - 127) / 8 * 2.0 ** (i % 5 - 2)


@pytest.mark.parametrize("case", VECTORS["tile32"]["expect"])
def test_golden_tile(case: str) -> None:
    element, rule = case.split("/")
    expected, x = VECTORS["tile32"]["expect"][case], tile_input()

    def digest(codes: torch.Tensor) -> str:
        return hashlib.sha256(bytes(codes.flatten().tolist())).hexdigest()

    for axis in (-1, -2):
        tile = quantize(x, f"{TILE_OF[element]}:{rule}", axis=axis, backend="reference")
        assert tile.scales.tolist() == [[expected["tile_e8m0"]]]
        assert digest(tile.codes) == expected["tile_codes_sha256"]
    rows = quantize(x, f"{FORMAT_OF[element]}:{rule}", axis=-1, backend="reference")
    assert rows.scales.flatten().tolist() == expected["row_e8m0"]
    assert digest(rows.codes) == expected["rowwise_codes_sha256"]
    cols = quantize(x, f"{FORMAT_OF[element]}:{rule}", axis=0, backend="reference")
    assert cols.scales.flatten().tolist() == expected["col_e8m0"]
    assert digest(cols.codes) == expected["colwise_codes_sha256"]


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_code_times_every_scale(element: str) -> None:
    """All codes x all 256 E8M0 codes decode to the float64 product, 255 to NaN."""
    fmt = next(f for f in FORMATS.values() if f.element.name == element and f.scale == "e8m0")
    codes = torch.arange(1 << fmt.element.bits, dtype=torch.uint8)
    values = torch.tensor(fmt.element.values, dtype=torch.float64)
    for scale in range(256):
        q = QuantizedTensor(
            codes.repeat(32, 1).T.contiguous(),
            torch.full((len(codes), 1), scale, dtype=torch.uint8),
            fmt,
            -1,
        )
        expected = values * (math.nan if scale == 255 else 2.0 ** (scale - 127))
        expected = expected.float()[:, None].expand(-1, 32)
        got = dequantize(q)
        assert torch.equal(got.nan_to_num(1.25e-3), expected.nan_to_num(1.25e-3)), scale
        assert torch.equal(got.isnan(), expected.isnan()), scale


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
def test_encode_rounds_to_nearest_even_by_brute_force(element) -> None:
    """Midpoints, their float32 neighbours and random values against a search over all codes."""
    positive = element.values[: element.max_code + 1]
    mid = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(positive)])
    generator = torch.Generator().manual_seed(7)
    noise = torch.rand(4000, generator=generator) * element.max
    x = torch.cat([mid, torch.nextafter(mid, mid + 1), torch.nextafter(mid, mid * 0), noise])
    x = torch.cat([x, torch.tensor(positive), torch.tensor([element.max * 1.5, math.inf])])
    grid = torch.tensor(positive, dtype=torch.float64)
    distance = (x.double()[:, None].clamp(max=element.max) - grid).abs()
    best = distance.min(dim=1, keepdim=True).values
    parity = torch.arange(len(grid)) % 2
    # Of two equally near codes the even one wins.
    expected = ((distance == best) * (2 - parity)).argmax(dim=1)
    assert torch.equal(reference.encode(x, element).long(), expected)
    sign = 1 << (element.bits - 1)
    assert torch.equal(reference.encode(-x, element).long(), expected + sign)


@pytest.mark.parametrize("case", ROUNDING["nvfp4"]["cases"], ids=lambda case: case["id"])
def test_golden_nvfp4(case: dict) -> None:
    """Every step one float32 rounding, as Transformer Engine orders them."""
    bits = torch.tensor([int(word, 16) for word in case["input_bits"]], dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    q = quantize(x[None], "nvfp4")
    assert q.outer is not None
    assert f"{int(q.outer.view(torch.int32)):08x}" == case["outer_bits"]
    assert q.scales.flatten().tolist() == case["scales"]
    assert q.codes.flatten().tolist() == [int(c, 16) for c in "".join(case["codes"])]
    rows = quantize(x.view(4, 16).repeat_interleave(16, 0), "nvfp4_16x16")
    assert torch.equal(rows.codes[::16].flatten(), q.codes.flatten())
    assert torch.equal(rows.scales.flatten(), q.scales.flatten())


def test_nvfp4_two_level_scales() -> None:
    """One block worked out by hand: amax 6 in the tensor, so the outer scale is 6 / (448 x 6)."""
    x = torch.zeros(2, 32)
    x[0, :3] = torch.tensor([6.0, -3.0, 0.5])
    x[1, 16] = 0.75
    q = quantize(x, "nvfp4")
    assert q.outer is not None
    assert q.outer.item() == pytest.approx(1 / 448, rel=1e-6)
    scales = reference.decode(q.scales, E4M3)
    assert scales[0].tolist() == [448.0, 0.0]
    assert scales[1].tolist() == [0.0, 56.0]
    assert reference.decode(q.codes, E2M1)[0, :3].tolist() == [6.0, -3.0, 0.5]
    assert dequantize(q)[1, 16].item() == pytest.approx(0.75, rel=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_zero_blocks_and_signed_zero(name: str) -> None:
    x = torch.zeros(64, 256)
    x[0, 0] = -0.0
    q = quantize(x, name)
    assert q.codes[0, 0].item() == 1 << (q.format.element.bits - 1)
    assert q.codes.flatten()[1:].count_nonzero() == 0
    y = dequantize(q)
    assert torch.equal(y, x)
    assert torch.signbit(y[0, 0])
    if q.format.scale == "e8m0":
        assert q.scales.count_nonzero() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_a_poisoned_block_decodes_to_nan_and_no_other_does(name: str, bad: float) -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    x[130, 140] = bad
    q = quantize(x, name)
    nan = dequantize(q).isnan()
    fmt = FORMATS[name]
    rows, cols = (256 if e == -1 else e for e in fmt.block)
    if fmt.outer:
        rows = cols = 256
    block = torch.zeros(256, 256, dtype=torch.bool)
    r, c = 130 // rows * rows, 140 // cols * cols
    block[r : r + rows, c : c + cols] = True
    assert torch.equal(nan, block)
    assert q.codes[block].count_nonzero() == 0


@pytest.mark.parametrize("exponent", [-149, -140, -127, -126, 0, 100, 127])
def test_subnormal_and_huge_blocks_keep_their_value(exponent: int) -> None:
    x = torch.full((1, 32), 2.0**exponent)
    for name in ("mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp4"):
        y = dequantize(quantize(x, name))
        # The smallest scale is 2^-127, so nothing below quantum x 2^-127 can be kept.
        representable = 2.0**exponent >= FORMATS[name].element.quantum * 2.0**-127
        assert torch.equal(y, x) or not representable, name


def test_nvfp4_outer_scale_is_one_true_division() -> None:
    """fp32(2688 / amax) for many amax; the reciprocal times 2688 differs for a quarter of them."""
    generator = torch.Generator().manual_seed(3)
    amax = torch.rand(500, generator=generator) * 100 + 1e-3
    exact = (2688.0 / amax.double()).float()
    assert (exact != amax.reciprocal() * 2688).any()
    for value, encode_scale in zip(amax, exact, strict=True):
        q = quantize(value.reshape(1, 1), "nvfp4")
        assert q.outer is not None
        assert q.outer.item() == (1.0 / encode_scale).item()
