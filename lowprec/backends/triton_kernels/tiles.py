# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Casts of a matrix in plain Triton: by row, by column, by tile, or two of them in one read.

A matrix lies in memory as [R, C] with unit stride along C. The row output has codes [R, C]; the
column output has codes [C, R], transposed so that its contraction axis is contiguous as well. Of
two outputs each has its scales the other way round than its codes: a tile then writes whole runs of
them, and scattered bytes cost more than all codes.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.codec import (
    amax_bits,
    as_float32,
    encode,
    encode_multiplier,
    scale_bytes,
    stored_scale,
)


@triton.jit
def cast_blocks(
    values,
    SPEC: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Codes [R, C] and scale bytes [R / block rows, C / block columns] of float32 values [R, C]."""
    ELEMENT: tl.constexpr = SPEC[0]
    RULE: tl.constexpr = SPEC[1]
    BLOCK_R: tl.constexpr = SPEC[2]
    BLOCK_C: tl.constexpr = SPEC[3]
    R: tl.constexpr = values.shape[0]
    C: tl.constexpr = values.shape[1]
    if BLOCK_R == 1:
        blocks = values.reshape(R, C // BLOCK_C, BLOCK_C)
        biased = scale_bytes(amax_bits(blocks, 2, INTEGER), ELEMENT, RULE)
        spread = biased[:, :, None]
    elif BLOCK_C == 1:
        blocks = values.reshape(R // BLOCK_R, BLOCK_R, C)
        biased = scale_bytes(amax_bits(blocks, 1, INTEGER), ELEMENT, RULE)
        spread = biased[:, None, :]
    else:
        blocks = values.reshape(R // BLOCK_R, BLOCK_R, C // BLOCK_C, BLOCK_C)
        within = amax_bits(blocks, 3, INTEGER).to(tl.float32, bitcast=True)
        biased = scale_bytes(amax_bits(within, 1, INTEGER), ELEMENT, RULE)
        spread = biased[:, None, :, None]
    scaled = tl.where(spread == 255, 0.0, blocks * encode_multiplier(spread))
    return encode(scaled, ELEMENT, INTEGER).reshape(R, C), biased


@triton.jit
def _store_scales(
    scales, biased, first, second, limit_1, limit_2, TURN: tl.constexpr, E8M0: tl.constexpr
):
    """Store [n1, n2] scales at row first + i, column second + j of [limit_1, limit_2].

    TURN stores into the transposed matrix.
    """
    i = first + tl.arange(0, biased.shape[0])
    j = second + tl.arange(0, biased.shape[1])
    inside = (i < limit_1)[:, None] & (j < limit_2)[None, :]
    i, j = i.to(tl.int64), j.to(tl.int64)
    i, j = i[:, None], j[None, :]
    where = i + j * limit_1 if TURN else i * limit_2 + j
    tl.store(scales + where, stored_scale(biased, E8M0), mask=inside)


# Integers are not specialized: UNIT says what the compiler needs of them.
@triton.jit(do_not_specialize=["rows", "units", "source_batch", "source_unit", "pitch", "pitch_t"])
def cast_tiles(
    source,
    codes,
    scales,
    codes_t,
    scales_t,
    rows,
    units,
    source_batch,
    source_unit,
    pitch,
    pitch_t,
    UNIT: tl.constexpr,
    PITCH_UNIT: tl.constexpr,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Cast one [TILE_R, TILE_C] tile of a [batch, rows, units * UNIT] source a program.

    ROW and COLUMN say each output: (element, rule, block rows, block columns, is E8M0), or None.
    UNIT divides the columns and the strides: known at compile time, it widens the accesses.
    The row stride is source_unit * UNIT, the batch stride source_batch * UNIT, the row strides of
    codes and codes_t are pitch and pitch_t times PITCH_UNIT.
    """
    cols = units * UNIT
    row_tiles = tl.cdiv(rows, TILE_R)
    col_tiles = tl.cdiv(cols, TILE_C)
    tile = tl.program_id(0)
    batch = (tile // (row_tiles * col_tiles)).to(tl.int64)
    tile = tile % (row_tiles * col_tiles)
    first_r = (tile // col_tiles) * TILE_R
    first_c = (tile % col_tiles) * TILE_C
    r = first_r + tl.arange(0, TILE_R)
    c = first_c + tl.arange(0, TILE_C)
    r64, c64 = r.to(tl.int64), c.to(tl.int64)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    where = batch * source_batch * UNIT + r64[:, None] * source_unit * UNIT + c64[None, :]
    values = as_float32(tl.load(source + where, mask=inside, other=0))
    if ROW is not None:
        q, biased = cast_blocks(values, ROW, INTEGER)
        to = (batch * rows + r64)[:, None] * (pitch * PITCH_UNIT) + c64[None, :]
        tl.store(codes + to, q, mask=inside)
        blocks_r = tl.cdiv(rows, ROW[2])
        blocks_c = tl.cdiv(cols, ROW[3])
        _store_scales(
            scales + batch * blocks_r * blocks_c,
            biased,
            first_r // ROW[2],
            first_c // ROW[3],
            blocks_r,
            blocks_c,
            COLUMN is not None,
            ROW[4],
        )
    if COLUMN is not None:
        q, biased = cast_blocks(values, COLUMN, INTEGER)
        to = (batch * cols + c64)[:, None] * (pitch_t * PITCH_UNIT) + r64[None, :]
        tl.store(codes_t + to, tl.trans(q), mask=tl.trans(inside))
        blocks_r = tl.cdiv(rows, COLUMN[2])
        blocks_c = tl.cdiv(cols, COLUMN[3])
        _store_scales(
            scales_t + batch * blocks_r * blocks_c,
            biased,
            first_r // COLUMN[2],
            first_c // COLUMN[3],
            blocks_r,
            blocks_c,
            False,
            COLUMN[4],
        )
