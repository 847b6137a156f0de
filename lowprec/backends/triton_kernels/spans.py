# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Casts whose scale spans a whole row, column or tensor: free float32 scales, amax / max."""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.codec import amax_bits, as_float32, encode


@triton.jit
def _divided(values, scale, ELEMENT: tl.constexpr, INTEGER: tl.constexpr):
    """Codes of values / scale, true division; 0 where the scale is NaN."""
    wide = tl.broadcast_to(scale, values.shape)
    return encode(tl.where(wide == wide, tl.div_rn(values, wide), 0.0), ELEMENT, INTEGER)


@triton.jit(do_not_specialize=["rows", "units", "source_batch", "source_unit"])
def partial_maxima(
    source,
    maxima,
    rows,
    units,
    source_batch,
    source_unit,
    UNIT: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Bits of the largest magnitudes of one tile: [batch, rows, tiles] or [batch, tiles, columns].

    See tiles.cast_tiles for the source.
    """
    cols = units * UNIT
    row_tiles = tl.cdiv(rows, TILE_R)
    col_tiles = tl.cdiv(cols, TILE_C)
    tile = tl.program_id(0)
    batch = (tile // (row_tiles * col_tiles)).to(tl.int64)
    tile = tile % (row_tiles * col_tiles)
    pr, pc = tile // col_tiles, tile % col_tiles
    r = (pr * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    c = (pc * TILE_C + tl.arange(0, TILE_C)).to(tl.int64)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    where = batch * source_batch * UNIT + r[:, None] * source_unit * UNIT + c[None, :]
    values = as_float32(tl.load(source + where, mask=inside, other=0))
    if BY_COLUMN:
        found = amax_bits(values, 0, INTEGER)
        tl.store(maxima + (batch * row_tiles + pr) * cols + c, found, mask=c < cols)
    else:
        found = amax_bits(values, 1, INTEGER)
        tl.store(maxima + (batch * rows + r) * col_tiles + pc, found, mask=r < rows)


@triton.jit(do_not_specialize=["rows", "units", "source_batch", "source_unit"])
def encode_spans(
    source,
    scales,
    codes,
    rows,
    units,
    source_batch,
    source_unit,
    pitch,
    UNIT: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    TURN: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Codes of one tile under scales that are known: SCALE says one by "row", "column", "tensor".

    TURN writes them transposed, with rows of `pitch` bytes. See tiles.cast_tiles for the source.
    """
    cols = units * UNIT
    row_tiles = tl.cdiv(rows, TILE_R)
    col_tiles = tl.cdiv(cols, TILE_C)
    tile = tl.program_id(0)
    batch = (tile // (row_tiles * col_tiles)).to(tl.int64)
    tile = tile % (row_tiles * col_tiles)
    r = ((tile // col_tiles) * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    c = ((tile % col_tiles) * TILE_C + tl.arange(0, TILE_C)).to(tl.int64)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    where = batch * source_batch * UNIT + r[:, None] * source_unit * UNIT + c[None, :]
    values = as_float32(tl.load(source + where, mask=inside, other=0))
    if SCALE == "row":
        scale = tl.load(scales + batch * rows + r, mask=r < rows, other=1.0)[:, None]
    elif SCALE == "column":
        scale = tl.load(scales + batch * cols + c, mask=c < cols, other=1.0)[None, :]
    else:
        scale = tl.load(scales + batch + tl.zeros([1], tl.int64))[:, None]
    q = _divided(values, scale, ELEMENT, INTEGER)
    if TURN:
        to = (batch * cols + c)[:, None] * pitch + r[None, :]
        tl.store(codes + to, tl.trans(q), mask=tl.trans(inside))
    else:
        tl.store(codes + (batch * rows + r)[:, None] * pitch + c[None, :], q, mask=inside)


@triton.jit(do_not_specialize=["rows", "units", "source_unit"])
def cast_whole_rows(
    source,
    codes,
    scales,
    rows,
    units,
    source_unit,
    UNIT: tl.constexpr,
    ELEMENT: tl.constexpr,
    MAX: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Cast TILE_R rows of at most TILE_C columns with one scale a row, in one read."""
    cols = units * UNIT
    r = (tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    c = tl.arange(0, TILE_C)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    where = r[:, None] * source_unit * UNIT + c[None, :]
    values = as_float32(tl.load(source + where, mask=inside, other=0))
    bits = amax_bits(values, 1, INTEGER)
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full([TILE_R], MAX, tl.float32))
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    nan = tl.full([TILE_R], 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    scale = tl.where(bits >= 0x7F800000, nan, scale)
    tl.store(scales + r, scale, mask=r < rows)
    q = _divided(values, scale[:, None], ELEMENT, INTEGER)
    tl.store(codes + r[:, None] * cols + c[None, :], q, mask=inside)
