# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""From codes back to values, and through a format in one pass, for the emulated products."""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.codec import as_float32, decode, decode_multiplier, round_to
from lowprec.backends.triton_kernels.places import offsets, place, start, within
from lowprec.backends.triton_kernels.tiles import cast_blocks


@triton.jit
def _times_scale(
    values,
    scale,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """float32 values [R, C] times scales [R / BLOCK_R, C / BLOCK_C]."""
    R: tl.constexpr = values.shape[0]
    C: tl.constexpr = values.shape[1]
    blocks = values.reshape(R // BLOCK_R, BLOCK_R, C // BLOCK_C, BLOCK_C)
    return (blocks * scale[:, None, :, None]).reshape(R, C)


@triton.jit(do_not_specialize=["rows", "units", "codes_batch", "codes_unit"])
def decode_tiles(
    codes,
    scales,
    out,
    rows,
    units,
    codes_batch,
    codes_unit,
    UNIT: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    E8M0: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Values of one tile of [batch, rows, units * UNIT] codes a program; see tiles.cast_tiles.

    Scales are dense, [batch, rows / BLOCK_R, columns / BLOCK_C]; a block of 0 is a whole extent.
    """
    cols = units * UNIT
    batch, first_r, first_c = place(rows, cols, TILE_R, TILE_C)
    at = codes + start(batch * codes_batch, UNIT, first_r, codes_unit * UNIT, first_c)
    at += offsets(codes_unit * UNIT, TILE_R, TILE_C, WIDE)
    inside = within(first_r, first_c, rows, cols, TILE_R, TILE_C)
    values = decode(tl.load(at, mask=inside, other=0), ELEMENT)
    SPAN_R: tl.constexpr = BLOCK_R if BLOCK_R > 0 else TILE_R
    SPAN_C: tl.constexpr = BLOCK_C if BLOCK_C > 0 else TILE_C
    blocks_r = tl.cdiv(rows, SPAN_R) if BLOCK_R > 0 else 1
    blocks_c = tl.cdiv(cols, SPAN_C) if BLOCK_C > 0 else 1
    i = (first_r // SPAN_R if BLOCK_R > 0 else 0) + tl.arange(0, TILE_R // SPAN_R)
    j = (first_c // SPAN_C if BLOCK_C > 0 else 0) + tl.arange(0, TILE_C // SPAN_C)
    at = batch * blocks_r * blocks_c + i.to(tl.int64)[:, None] * blocks_c + j[None, :]
    scale = tl.load(scales + at, mask=(i < blocks_r)[:, None] & (j < blocks_c)[None, :], other=0)
    if E8M0:
        scale = decode_multiplier(scale.to(tl.int32))
    result = _times_scale(values, scale, SPAN_R, SPAN_C)
    to = out + start(batch, rows.to(tl.int64) * cols, first_r, cols, first_c)
    to += offsets(cols, TILE_R, TILE_C, WIDE)
    tl.store(to, round_to(result, DTYPE, INTEGER), mask=inside)


@triton.jit(do_not_specialize=["rows", "units", "source_batch", "source_unit"])
def round_trip_tiles(
    source,
    out,
    rows,
    units,
    source_batch,
    source_unit,
    UNIT: tl.constexpr,
    SPEC: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """The values that a source has after a cast: one tile a program; see tiles.cast_tiles."""
    cols = units * UNIT
    batch, first_r, first_c = place(rows, cols, TILE_R, TILE_C)
    at = source + start(batch * source_batch, UNIT, first_r, source_unit * UNIT, first_c)
    at += offsets(source_unit * UNIT, TILE_R, TILE_C, WIDE)
    inside = within(first_r, first_c, rows, cols, TILE_R, TILE_C)
    values = as_float32(tl.load(at, mask=inside, other=0))
    ELEMENT: tl.constexpr = SPEC[0]
    codes, biased = cast_blocks(values, None, SPEC, INTEGER)
    result = _times_scale(decode(codes, ELEMENT), decode_multiplier(biased), SPEC[2], SPEC[3])
    to = out + start(batch, rows.to(tl.int64) * cols, first_r, cols, first_c)
    to += offsets(cols, TILE_R, TILE_C, WIDE)
    tl.store(to, round_to(result, DTYPE, INTEGER), mask=inside)
