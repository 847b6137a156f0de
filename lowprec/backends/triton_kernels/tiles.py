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
    any_hard,
    as_float32,
    encode,
    encode_multiplier,
    encode_normal,
    encode_random,
    hardware_cast,
    scale_bytes,
    smallest,
    stored_scale,
)
from lowprec.backends.triton_kernels.draws import tile_words
from lowprec.backends.triton_kernels.places import offsets, place, start, within


@triton.jit
def _spread(biased, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """What blocks have, in the rank of the tile by blocks."""
    if BLOCK_R == 1:
        spread = biased[:, :, None]
    elif BLOCK_C == 1:
        spread = biased[:, None, :]
    else:
        spread = biased[:, None, :, None]
    return spread


@triton.jit
def _least(blocks, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """codec.smallest of each block; of square blocks it may be 0 without all values being it."""
    if BLOCK_R == 1:
        least = smallest(blocks, 2)
    elif BLOCK_C == 1:
        least = smallest(blocks, 1)
    else:
        least = tl.min(smallest(blocks, 3), 1)
    return least


@triton.jit
def cast_blocks(values, words, SPEC: tl.constexpr, INTEGER: tl.constexpr):
    """Codes [R, C] and scale bytes [R / block rows, C / block columns] of float32 values [R, C].

    words: int32 [R, C] for stochastic rounding, or None.
    """
    ELEMENT: tl.constexpr = SPEC[0]
    RULE: tl.constexpr = SPEC[1]
    BLOCK_R: tl.constexpr = SPEC[2]
    BLOCK_C: tl.constexpr = SPEC[3]
    R: tl.constexpr = values.shape[0]
    C: tl.constexpr = values.shape[1]
    if BLOCK_R == 1:
        blocks = values.reshape(R, C // BLOCK_C, BLOCK_C)
        bits = amax_bits(blocks, 2, INTEGER)
    elif BLOCK_C == 1:
        blocks = values.reshape(R // BLOCK_R, BLOCK_R, C)
        bits = amax_bits(blocks, 1, INTEGER)
    else:
        blocks = values.reshape(R // BLOCK_R, BLOCK_R, C // BLOCK_C, BLOCK_C)
        bits = amax_bits(amax_bits(blocks, 3, INTEGER).to(tl.float32, bitcast=True), 1, INTEGER)
    biased = scale_bytes(bits, ELEMENT, RULE)
    spread = _spread(biased, BLOCK_R, BLOCK_C)
    scaled = blocks * encode_multiplier(spread)
    if words is None:
        codes = encode(tl.where(spread == 255, 0.0, scaled), ELEMENT, INTEGER).reshape(R, C)
    else:
        HARDWARE: tl.constexpr = hardware_cast(ELEMENT)
        if not HARDWARE or any_hard(
            _least(blocks, BLOCK_R, BLOCK_C), bits, encode_multiplier(biased), ELEMENT
        ):
            scaled = tl.where(spread == 255, 0.0, scaled)
            codes = encode_random(scaled.reshape(R, C), words, ELEMENT)
        else:
            codes = encode_normal(scaled.reshape(R, C), words, ELEMENT, INTEGER)
    return codes, biased


@triton.jit
def store_scales(
    scales, biased, batch, first, second, limit_1, limit_2, TURN: tl.constexpr, E8M0: tl.constexpr
):
    """Store [n1, n2] scales at row first + i, column second + j of [batch, limit_1, limit_2].

    TURN stores into the transposed matrix.
    """
    i = first + tl.arange(0, biased.shape[0])
    j = second + tl.arange(0, biased.shape[1])
    inside = (i < limit_1)[:, None] & (j < limit_2)[None, :]
    i, j = i.to(tl.int64)[:, None], j.to(tl.int64)[None, :]
    where = i + j * limit_1 if TURN else i * limit_2 + j
    to = scales + batch * limit_1 * limit_2 + where
    tl.store(to, stored_scale(biased, E8M0), mask=inside)


@triton.jit
def store_row(
    values,
    words,
    codes,
    scales,
    batch,
    first_r,
    first_c,
    rows,
    cols,
    pitch,
    SPEC: tl.constexpr,
    TURN_SCALES: tl.constexpr,
    WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Cast float32 values of a tile by row; rows of codes are `pitch` bytes apart."""
    R: tl.constexpr = values.shape[0]
    C: tl.constexpr = values.shape[1]
    q, biased = cast_blocks(values, words, SPEC, INTEGER)
    to = codes + start(batch, rows.to(tl.int64) * pitch, first_r, pitch, first_c)
    tl.store(to + offsets(pitch, R, C, WIDE), q, mask=within(first_r, first_c, rows, cols, R, C))
    store_scales(
        scales,
        biased,
        batch,
        first_r // SPEC[2],
        first_c // SPEC[3],
        tl.cdiv(rows, SPEC[2]),
        tl.cdiv(cols, SPEC[3]),
        TURN_SCALES,
        SPEC[4],
    )


@triton.jit
def store_column(
    stored,
    words,
    codes,
    scales,
    batch,
    first_r,
    first_c,
    rows,
    cols,
    pitch,
    SPEC: tl.constexpr,
    WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Cast a tile by column into transposed codes, whose rows are `pitch` bytes apart.

    stored: the values as memory has them. What has 16 bits is turned before the cast: bytes are
    moved one by one, pairs of bytes by the eight. SPEC has the blocks of the transposed tile.
    """
    R: tl.constexpr = stored.shape[0]
    C: tl.constexpr = stored.shape[1]
    turned = None if words is None else tl.trans(words)
    q, biased = cast_blocks(as_float32(tl.trans(stored)), turned, SPEC, INTEGER)
    to = codes + start(batch, cols.to(tl.int64) * pitch, first_c, pitch, first_r)
    # Up to the pitch, not to `rows`: of that the compiler knows that 16 divides it.
    tl.store(to + offsets(pitch, C, R, WIDE), q, mask=within(first_c, first_r, cols, pitch, C, R))
    store_scales(
        scales,
        biased,
        batch,
        first_c // SPEC[2],
        first_r // SPEC[3],
        tl.cdiv(cols, SPEC[2]),
        tl.cdiv(rows, SPEC[3]),
        True,
        SPEC[4],
    )


# Integers are not specialized: UNIT says what the compiler needs of them.
@triton.jit(
    do_not_specialize=[
        "rows",
        "units",
        "source_batch",
        "source_unit",
        "pitch",
        "pitch_t",
        "first_call",
        "key_0",
        "key_1",
        "first_call_t",
        "key_2",
        "key_3",
    ]
)
def cast_tiles(
    source,
    codes,
    scales,
    codes_t,
    scales_t,
    words,
    words_t,
    rows,
    units,
    source_batch,
    source_unit,
    pitch,
    pitch_t,
    first_call,
    key_0,
    key_1,
    first_call_t,
    key_2,
    key_3,
    UNIT: tl.constexpr,
    PITCH_UNIT: tl.constexpr,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_T: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Cast one [TILE_R, TILE_C] tile of a [batch, rows, units * UNIT] source a program.

    ROW and COLUMN say each output: (element, rule, block rows, block columns, is E8M0), or None;
    COLUMN in the coordinates of the transposed output.
    UNIT divides the columns and the strides: known at compile time, it widens the accesses.
    The row stride is source_unit * UNIT, the batch stride source_batch * UNIT, the row strides of
    codes and codes_t are pitch and pitch_t times PITCH_UNIT. GROUPS, words, a call and its key say
    the random words by row, the second ones those by column, see draws.tile_words;
    no groups rounds to nearest.
    """
    cols = units * UNIT
    batch, first_r, first_c = place(rows, cols, TILE_R, TILE_C)
    at = source + start(batch * source_batch, UNIT, first_r, source_unit * UNIT, first_c)
    inside = within(first_r, first_c, rows, cols, TILE_R, TILE_C)
    stored = tl.load(at + offsets(source_unit * UNIT, TILE_R, TILE_C, WIDE), mask=inside, other=0)
    if ROW is not None:
        drawn = None
        if GROUPS != "":
            drawn = tile_words(
                words,
                first_call,
                key_0,
                key_1,
                batch,
                first_r,
                first_c,
                rows,
                cols,
                GROUPS,
                TILE_R,
                TILE_C,
                WIDE,
            )
        store_row(
            as_float32(stored),
            drawn,
            codes,
            scales,
            batch,
            first_r,
            first_c,
            rows,
            cols,
            pitch * PITCH_UNIT,
            ROW,
            COLUMN is not None,
            WIDE,
            INTEGER,
        )
    if COLUMN is not None:
        drawn = None
        if GROUPS_T != "":
            drawn = tile_words(
                words_t,
                first_call_t,
                key_2,
                key_3,
                batch,
                first_r,
                first_c,
                rows,
                cols,
                GROUPS_T,
                TILE_R,
                TILE_C,
                WIDE,
            )
        store_column(
            stored,
            drawn,
            codes_t,
            scales_t,
            batch,
            first_r,
            first_c,
            rows,
            cols,
            pitch_t * PITCH_UNIT,
            COLUMN,
            WIDE,
            INTEGER,
        )
