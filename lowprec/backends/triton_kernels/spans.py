# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Casts whose scale spans a whole row, column or tensor: free float32 scales, amax / max."""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.codec import amax_bits, as_float32, encode, encode_kept
from lowprec.backends.triton_kernels.places import offsets, place, start, within


@triton.jit
def _quotients(values, scale):
    """values / scale, true division where it is normal, by one reciprocal a scale.

    The compiler's own division calls a subroutine for every warp with a zero in it. Here the
    quotient is corrected twice by its exact remainder, which rounds as division does (Markstein,
    IA-64 and Elementary Functions, 2000). Scales so small that a remainder could not be exact are
    raised first, with their values.
    """
    raised = tl.where(scale < 2.0**-60, 2.0**64, 1.0)
    scale = scale * raised
    values = values * raised
    one = tl.full(scale.shape, 1.0, tl.float32)
    inverse, _ = tl.broadcast(tl.div_rn(one, scale), values)
    less, _ = tl.broadcast(-scale, values)
    found = values * inverse
    found = tl.fma(tl.fma(found, less, values), inverse, found)
    found = tl.fma(tl.fma(found, less, values), inverse, found)
    # A zero lost its sign.
    sign = values.to(tl.int32, bitcast=True) & -0x80000000
    return (found.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _divided(values, scale, ELEMENT: tl.constexpr, INTEGER: tl.constexpr):
    """Codes of values / scale; 0 where the scale is NaN."""
    if INTEGER:
        wide = tl.broadcast_to(scale, values.shape)
        codes = encode(tl.where(wide == wide, tl.div_rn(values, wide), 0.0), ELEMENT, INTEGER)
    else:
        keep = tl.broadcast_to(tl.where(scale == scale, -1, 0), values.shape)
        codes = encode_kept(_quotients(values, scale), keep, ELEMENT, INTEGER)
    return codes


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
    WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Bits of the largest magnitudes of one tile: [batch, rows, tiles] or [batch, tiles, columns].

    See tiles.cast_tiles for the source.
    """
    cols = units * UNIT
    batch, first_r, first_c = place(rows, cols, TILE_R, TILE_C)
    at = source + start(batch * source_batch, UNIT, first_r, source_unit * UNIT, first_c)
    inside = within(first_r, first_c, rows, cols, TILE_R, TILE_C)
    at += offsets(source_unit * UNIT, TILE_R, TILE_C, WIDE)
    values = as_float32(tl.load(at, mask=inside, other=0))
    r, c = first_r + tl.arange(0, TILE_R), first_c + tl.arange(0, TILE_C)
    if BY_COLUMN:
        found = amax_bits(values, 0, INTEGER)
        line = batch * tl.cdiv(rows, TILE_R) + first_r // TILE_R
        tl.store(maxima + line * cols + c, found, mask=c < cols)
    else:
        found = amax_bits(values, 1, INTEGER)
        to = (batch * rows + r) * tl.cdiv(cols, TILE_C) + first_c // TILE_C
        tl.store(maxima + to, found, mask=r < rows)


@triton.jit(do_not_specialize=["rows", "units", "source_batch", "source_unit"])
def whole_maximum(
    source,
    maximum,
    rows,
    units,
    source_batch,
    source_unit,
    UNIT: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Raise `maximum`, one int32, to the bits of the largest magnitude of every tile.

    Bits of magnitudes are ordered like them, NaN and Inf on top, and a maximum has no order.
    """
    cols = units * UNIT
    batch, first_r, first_c = place(rows, cols, TILE_R, TILE_C)
    at = source + start(batch * source_batch, UNIT, first_r, source_unit * UNIT, first_c)
    inside = within(first_r, first_c, rows, cols, TILE_R, TILE_C)
    at += offsets(source_unit * UNIT, TILE_R, TILE_C, WIDE)
    values = as_float32(tl.load(at, mask=inside, other=0))
    by_row = amax_bits(values, 1, INTEGER)
    tl.atomic_max(maximum, tl.max(by_row, 0), sem="relaxed")


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
    WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Codes of one tile under scales that are known: SCALE says one by "row", "column", "tensor".

    TURN writes them transposed, with rows of `pitch` bytes. See tiles.cast_tiles for the source.
    """
    cols = units * UNIT
    batch, first_r, first_c = place(rows, cols, TILE_R, TILE_C)
    at = source + start(batch * source_batch, UNIT, first_r, source_unit * UNIT, first_c)
    inside = within(first_r, first_c, rows, cols, TILE_R, TILE_C)
    at += offsets(source_unit * UNIT, TILE_R, TILE_C, WIDE)
    values = as_float32(tl.load(at, mask=inside, other=0))
    r, c = first_r + tl.arange(0, TILE_R), first_c + tl.arange(0, TILE_C)
    if SCALE == "row":
        scale = tl.load(scales + batch * rows + r, mask=r < rows, other=1.0)[:, None]
    elif SCALE == "column":
        scale = tl.load(scales + batch * cols + c, mask=c < cols, other=1.0)[None, :]
    else:
        scale = tl.load(scales + batch + tl.zeros([1], tl.int64))[:, None]
    q = _divided(values, scale, ELEMENT, INTEGER)
    if TURN:
        to = codes + start(batch, cols.to(tl.int64) * pitch, first_c, pitch, first_r)
        turned = within(first_c, first_r, cols, pitch, TILE_C, TILE_R)
        tl.store(to + offsets(pitch, TILE_C, TILE_R, WIDE), tl.trans(q), mask=turned)
    else:
        to = codes + start(batch, rows.to(tl.int64) * pitch, first_r, pitch, first_c)
        tl.store(to + offsets(pitch, TILE_R, TILE_C, WIDE), q, mask=inside)


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
    WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Cast TILE_R rows of at most TILE_C columns with one scale a row, in one read."""
    cols = units * UNIT
    first_r = tl.program_id(0) * TILE_R
    inside = within(first_r, 0, rows, cols, TILE_R, TILE_C)
    at = source + first_r.to(tl.int64) * source_unit * UNIT
    at += offsets(source_unit * UNIT, TILE_R, TILE_C, WIDE)
    values = as_float32(tl.load(at, mask=inside, other=0))
    bits = amax_bits(values, 1, INTEGER)
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full([TILE_R], MAX, tl.float32))
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    nan = tl.full([TILE_R], 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    scale = tl.where(bits >= 0x7F800000, nan, scale)
    r = first_r + tl.arange(0, TILE_R)
    tl.store(scales + r, scale, mask=r < rows)
    q = _divided(values, scale[:, None], ELEMENT, INTEGER)
    to = codes + first_r.to(tl.int64) * cols + offsets(cols, TILE_R, TILE_C, WIDE)
    tl.store(to, q, mask=inside)
