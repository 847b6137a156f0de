"""Statistics of an operand against hand-made tensors with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import lowprec
from lowprec.formats import Cast
from lowprec.operand_stats import GROUP, SAMPLE, OperandStats, Taken, Where, measure, take
from lowprec.rng import RandomStream

WHERE = Where(step=7, call=3, stream=RandomStream(0, "layer", "watch", 7))


def stats(x: torch.Tensor, cast: str | None, *what_if: str, axis: int = -1) -> OperandStats:
    own = None if cast is None else Cast.parse(cast)
    return measure(take(x), own, [Cast.parse(one) for one in what_if], axis=axis, where=WHERE)


def test_one_value_of_a_block_underflows() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 2], x[0, 3] = 448.0, 1.0, 2.0**-11, 2.0**-9
    got = stats(x, "mxfp8")
    # The scale is 1; half of the smallest code is 2^-10, so 2^-11 is lost and 2^-9 is not.
    assert got.underflow == 1 / 4
    assert got.saturation == 0
    assert got.sqnr_db == pytest.approx(
        10 * math.log10((448.0**2 + 1 + 2.0**-22 + 2.0**-18) / 2.0**-22)
    )
    assert (got.step, got.call, got.cast, got.elements) == (7, 3, "mxfp8", 32)
    assert got.amax == 448.0
    assert got.mean_square == (448.0**2 + 1 + 2.0**-22 + 2.0**-18) / 32
    assert got.rms == math.sqrt(got.mean_square)
    assert (got.nonfinite, got.nonfinite_blocks) == (0, 0)


@pytest.mark.parametrize("axis", [-1, -2])
def test_sqnr_is_the_formula_in_float64(axis: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 96) * torch.logspace(-3, 3, 96)
    blocks = (x if axis == -1 else x.T).contiguous().view(-1, 32)
    amax = blocks.abs().amax(1, keepdim=True).double()
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    decoded = (blocks.double() / scale).float().to(torch.float8_e4m3fn).double() * scale
    value, error = blocks.double().numpy(), (blocks.double() - decoded).numpy()
    expected = 10 * np.log10((value**2).sum() / (error**2).sum())
    got = stats(x, "mxfp8", axis=axis)
    assert got.sqnr_db == pytest.approx(expected, abs=1e-9)
    assert got.underflow == ((blocks != 0) & (decoded == 0)).sum().item() / x.numel()


def test_tiny_values_keep_their_sqnr() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    plain, tiny = stats(x, "mxfp8"), stats(x * 2.0**-90, "mxfp8")
    assert tiny.sqnr_db == pytest.approx(plain.sqnr_db, abs=1e-9)
    assert tiny.rms == plain.rms * 2.0**-90


def test_floor_clips_the_largest_value_of_17_percent_of_gaussian_blocks() -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 1024)
    size = x.view(-1, 32).abs().double().numpy()
    holds = 448 * 2.0 ** (np.floor(np.log2(size.max(1, keepdims=True))) - 8)
    clipped = size > holds
    assert 0.15 < clipped.any(1).mean() < 0.19
    got = stats(x, "mxfp8:floor", "mxfp8")
    assert got.saturation == clipped.sum() / x.numel()
    assert got.what_if["mxfp8"].saturation == 0
    assert got.sqnr_db < got.what_if["mxfp8"].sqnr_db - 0.5


def test_nvfp4_clips_where_its_block_scale_rounds_down() -> None:
    x = torch.zeros(1, 32)
    # Outer scale 1. The second block wants 17, a tie between the E4M3 neighbours 16 and 18.
    x[0, 0], x[0, 16] = 448 * 6.0, 17 * 6.0
    got = stats(x, "nvfp4")
    assert got.saturation == 1 / 32
    assert (got.scale_min, got.scale_max, got.scales_distinct) == (4, 8, 2)


@pytest.mark.parametrize("cast", ["fp8_rowwise", "fp8_tensorwise"])
def test_the_rounding_of_a_free_scale_is_not_clipping(cast: str) -> None:
    torch.manual_seed(0)
    got = stats(torch.randn(256, 33), cast)
    assert got.saturation == 0


def test_range_of_the_block_scales() -> None:
    x = torch.zeros(5, 32)
    for row, power in enumerate((-3, 0, 0, 5)):
        x[row, row] = 448 * 2.0**power
    got = stats(x, "mxfp8")
    # The fifth block is zeros and has no say.
    assert (got.scale_min, got.scale_max, got.scales_distinct) == (-3, 5, 3)


def test_nan_and_infinity_poison_their_own_block() -> None:
    x = torch.ones(1, 128)
    x[0, 0], x[0, 40], x[0, 70] = math.nan, math.inf, 1.03
    got = stats(x, "mxfp8", "nvfp4")
    assert got.nonfinite == 2 / 128
    assert got.nonfinite_blocks == 2 / 4
    assert got.amax is None
    assert got.mean_square == pytest.approx((125 + 1.03**2) / 126)
    # 1.03 becomes 1; the values beside NaN and Inf are left out.
    error = float(np.float32(1.03)) - 1
    assert got.sqnr_db == pytest.approx(10 * math.log10((63 + (1 + error) ** 2) / error**2))
    # One such value takes the whole tensor in NVFP4.
    assert got.what_if["nvfp4"].sqnr_db is None
    assert stats(x, "nvfp4").nonfinite_blocks == 1


def test_exact_and_empty_and_zero() -> None:
    assert stats(torch.ones(4, 32), "mxfp8").sqnr_db == math.inf
    zeros = stats(torch.zeros(4, 32), "mxfp8", "nvfp4")
    assert (zeros.sqnr_db, zeros.underflow, zeros.saturation) == (None, None, 0)
    assert (zeros.amax, zeros.rms) == (0, 0)
    assert (zeros.scale_min, zeros.scale_max, zeros.scales_distinct) == (None, None, 0)
    empty = stats(torch.zeros(0, 32), "mxfp8", "nvfp4")
    assert (empty.elements, empty.amax, empty.rms, empty.sqnr_db) == (0, None, None, None)
    assert empty.what_if["nvfp4"].underflow is None


def test_unquantized_operands() -> None:
    x = torch.tensor([[3.4e38, 1e-45, 1.0, 1 + 2.0**-9]])
    got = stats(x, None)
    # The largest float32 is Inf in bf16, the smallest is zero; the last loses 2^-9.
    assert (got.cast, got.saturation, got.underflow) == ("bf16", 1 / 4, 1 / 3)
    assert (got.scale_min, got.scales_distinct, got.nonfinite_blocks) == (None, None, None)
    assert stats(x.bfloat16()[:, 2:], None).sqnr_db == math.inf
    wide = stats(torch.full((1, 32), 1 / 3, dtype=torch.float64), None)
    assert (wide.cast, wide.sqnr_db, wide.rms) == ("float64", math.inf, pytest.approx(1 / 3))


def test_what_if_is_what_the_cast_itself_would_report() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    names = ("mxfp8", "mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp8_32x32", "fp8_rowwise", "mxfp4:sr")
    got = stats(x, None, *names)
    assert tuple(got.what_if) == names
    for name in names:
        assert got.what_if[name] == stats(x, name, "mxfp8").loss
    assert got.what_if["mxfp8"].sqnr_db > got.what_if["mxfp4"].sqnr_db + 10


def test_a_stochastic_cast_is_measured_with_the_bits_of_its_stream() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    q = lowprec.quantize(x, "mxfp4:sr", generator=WHERE.stream)
    error = (x - lowprec.dequantize(q)).double()
    expected = 10 * torch.log10(x.double().square().sum() / error.square().sum())
    assert stats(x, "mxfp4:sr").sqnr_db == pytest.approx(float(expected), abs=1e-9)
    assert stats(x, "mxfp4:sr").sqnr_db < stats(x, "mxfp4").sqnr_db


def place(rows: int, columns: int) -> torch.Tensor:
    """Each element is its own index, exact in float64."""
    return torch.arange(rows * columns, dtype=torch.float64).view(rows, columns)


def rectangles(taken: Taken, columns: int) -> list[tuple[int, int]]:
    """Top left corners of the tiles; fails unless each is a true rectangle of the source."""
    corners = []
    _, height, width = taken.tiles.shape
    for tile in taken.tiles:
        first = int(tile[0, 0])
        rows = torch.arange(height)[:, None] * columns
        assert torch.equal(tile, (first + rows + torch.arange(width)).double())
        corners.append(divmod(first, columns))
    return corners


def test_few_elements_are_all_taken() -> None:
    for shape in ((7, 33), (1, SAMPLE), (SAMPLE, 1), (128, 1024)):
        taken = take(place(*shape))
        assert torch.equal(taken.tiles[0], place(*shape))


@pytest.mark.parametrize(
    ("shape", "tile", "corners"),
    [
        ((2048, 512), (128, 512), [(512, 0), (1536, 0)]),
        ((1024, 1024), (128, 1024), [(512, 0)]),
        ((700, 1000), (128, 1000), [(256, 0)]),
        ((2048, 2048), (128, 128), [((2 * i + 1) * 128, (2 * i + 1) * 128) for i in range(8)]),
        ((128, 8192), (128, 128), [(0, (8 * i + 4) * 128) for i in range(8)]),
        ((16, 65536), (16, 1024), [(0, (8 * i + 4) * 1024) for i in range(8)]),
    ],
)
def test_large_operands_are_sampled_in_whole_blocks(
    shape: tuple[int, int], tile: tuple[int, int], corners: list[tuple[int, int]]
) -> None:
    taken = take(place(*shape))
    assert tuple(taken.tiles.shape[1:]) == tile
    assert taken.tiles.numel() <= SAMPLE
    found = rectangles(taken, shape[1])
    assert found == corners
    assert all(row % GROUP == 0 and column % GROUP == 0 for row, column in found)
    assert float(taken.amax) == shape[0] * shape[1] - 1


def test_amax_is_of_the_whole_operand() -> None:
    x = torch.ones(4096, 256)
    x[-1, -1] = -1000.0
    assert stats(x, "mxfp8").amax == 1000
    x[-1, -1] = math.nan
    got = stats(x, "mxfp8")
    assert got.amax is None
    assert got.nonfinite == 0


def test_the_sample_is_a_copy_of_any_layout() -> None:
    x = place(64, 32)
    taken = take(x.T)
    assert torch.equal(taken.tiles[0], place(64, 32).T)
    x.zero_()
    assert float(taken.tiles.sum()) == 64 * 32 * (64 * 32 - 1) / 2
