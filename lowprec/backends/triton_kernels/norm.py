# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""RMSNorm and LayerNorm with the cast of their result, and their backward.

Given the statistics of a row, every step is one float32 operation, rounded by itself (the launcher
turns fusion of products and sums off), and the result is rounded to the dtype of x before the cast:
a norm followed by a cast has the same codes, and a backward pass that normalizes again from the
statistics on record finds the codes of the forward pass.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.codec import (
    as_float32,
    round_through,
    round_to,
)
from lowprec.backends.triton_kernels.places import offsets, place, start, within
from lowprec.backends.triton_kernels.tiles import cast_blocks, store_column, store_row, store_scales


@triton.jit
def _weighted(v, factor, weight, bias, c, cols):
    """v times a factor a row, times the weights and plus the biases of columns c."""
    v = v * factor[:, None]
    if weight is not None:
        v = v * as_float32(tl.load(weight + c, mask=c < cols, other=0))[None, :]
    if bias is not None:
        v = v + as_float32(tl.load(bias + c, mask=c < cols, other=0))[None, :]
    return v


@triton.jit(do_not_specialize=["rows", "units", "x_unit", "residual_unit"])
def norm_rows(
    x,
    residual,
    weight,
    bias,
    summed,
    y,
    codes,
    scales,
    mean,
    rstd,
    rows,
    units,
    x_unit,
    residual_unit,
    eps,
    share,
    UNIT: tl.constexpr,
    FULL: tl.constexpr,
    CENTERED: tl.constexpr,
    SPEC: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Normalize TILE_R rows of units * UNIT columns; what is None is not read or not written.

    v = x + residual, rounded to DTYPE; y = (v - mean) * rstd * weight + bias, rounded to DTYPE;
    codes and scales of y by row. CENTERED takes the mean off (LayerNorm). share is 1 / columns;
    FULL says that TILE_C is the number of columns.
    """
    cols = units * UNIT
    first = tl.program_id(0) * TILE_R
    r, c = first + tl.arange(0, TILE_R), tl.arange(0, TILE_C)
    inside = within(first, 0, rows, cols, TILE_R, TILE_C)
    flat = start(0, 0, first, cols, 0) + offsets(cols, TILE_R, TILE_C, WIDE)
    at = x + start(0, 0, first, x_unit * UNIT, 0)
    at += offsets(x_unit * UNIT, TILE_R, TILE_C, WIDE)
    v = as_float32(tl.load(at, mask=inside, other=0))
    if residual is not None:
        at = residual + start(0, 0, first, residual_unit * UNIT, 0)
        at += offsets(residual_unit * UNIT, TILE_R, TILE_C, WIDE)
        v = v + as_float32(tl.load(at, mask=inside, other=0))
        tl.store(summed + flat, round_to(v, DTYPE, INTEGER), mask=inside)
        v = round_through(v, DTYPE, INTEGER)
    if CENTERED:
        middle = tl.sum(v, 1) * share
        tl.store(mean + r, middle, mask=r < rows)
        v = v - middle[:, None]
        if not FULL:
            v = tl.where(inside, v, 0.0)
    factor = tl.rsqrt(tl.sum(v * v, 1) * share + eps)
    tl.store(rstd + r, factor, mask=r < rows)
    v = _weighted(v, factor, weight, bias, c, cols)
    if y is not None:
        tl.store(y + flat, round_to(v, DTYPE, INTEGER), mask=inside)
    if SPEC is not None:
        v = round_through(v, DTYPE, INTEGER)
        if not FULL and bias is not None:
            v = tl.where(inside, v, 0.0)
        q, biased = cast_blocks(v, None, SPEC, INTEGER)
        tl.store(codes + flat, q, mask=inside)
        blocks = tl.cdiv(cols, SPEC[3])
        store_scales(scales, biased, 0, first, 0, rows, blocks, False, SPEC[4])


@triton.jit
def _store_both(
    v, codes, scales, codes_t, scales_t, first_r, first_c, rows, cols, pitch, pitch_t,
    ROW: tl.constexpr, COLUMN: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):  # fmt: skip
    """Cast normalized values of a tile by row and by column, rounded to DTYPE before."""
    batch = tl.full([], 0, tl.int64)
    if ROW is not None:
        store_row(
            round_through(v, DTYPE, INTEGER), None, codes, scales, batch, first_r, first_c, rows,
            cols, pitch, ROW, COLUMN is not None, WIDE, INTEGER,
        )  # fmt: skip
    if COLUMN is not None:
        store_column(
            round_to(v, DTYPE, INTEGER), None, codes_t, scales_t, batch, first_r, first_c, rows,
            cols, pitch_t, COLUMN, WIDE, INTEGER,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "units", "x_unit", "pitch", "pitch_t"])
def norm_tiles(
    x,
    weight,
    bias,
    mean,
    rstd,
    y,
    codes,
    scales,
    codes_t,
    scales_t,
    rows,
    units,
    x_unit,
    pitch,
    pitch_t,
    UNIT: tl.constexpr,
    PITCH_UNIT: tl.constexpr,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Normalize a tile by statistics that are known, and write y or its casts.

    See norm_rows for the formula, tiles.cast_tiles for ROW, COLUMN and pitches.
    """
    cols = units * UNIT
    _, first_r, first_c = place(rows, cols, TILE_R, TILE_C)
    r, c = first_r + tl.arange(0, TILE_R), first_c + tl.arange(0, TILE_C)
    inside = within(first_r, first_c, rows, cols, TILE_R, TILE_C)
    at = x + start(0, 0, first_r, x_unit * UNIT, first_c)
    at += offsets(x_unit * UNIT, TILE_R, TILE_C, WIDE)
    v = as_float32(tl.load(at, mask=inside, other=0))
    if mean is not None:
        v = v - tl.load(mean + r, mask=r < rows, other=0.0)[:, None]
    factor = tl.load(rstd + r, mask=r < rows, other=0.0)
    v = tl.where(inside, _weighted(v, factor, weight, bias, c, cols), 0.0)
    if y is not None:
        to = y + start(0, 0, first_r, cols, first_c) + offsets(cols, TILE_R, TILE_C, WIDE)
        tl.store(to, round_to(v, DTYPE, INTEGER), mask=inside)
    _store_both(
        v, codes, scales, codes_t, scales_t, first_r, first_c, rows, cols,
        pitch * PITCH_UNIT, pitch_t * PITCH_UNIT, ROW, COLUMN, DTYPE, WIDE, INTEGER,
    )  # fmt: skip


@triton.jit
def _band_tile(
    x, residual, summed, first, first_c, rows, cols, x_stride, residual_stride,
    DTYPE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):  # fmt: skip
    """x of a tile or, with a residual, the sum of both, which is written as well."""
    inside = within(first, first_c, rows, cols, TILE_R, TILE_C)
    at = x + start(0, 0, first, x_stride, first_c) + offsets(x_stride, TILE_R, TILE_C, WIDE)
    v = as_float32(tl.load(at, mask=inside, other=0))
    if residual is not None:
        at = residual + start(0, 0, first, residual_stride, first_c)
        at += offsets(residual_stride, TILE_R, TILE_C, WIDE)
        v = v + as_float32(tl.load(at, mask=inside, other=0))
        to = summed + start(0, 0, first, cols, first_c) + offsets(cols, TILE_R, TILE_C, WIDE)
        tl.store(to, round_to(v, DTYPE, INTEGER), mask=inside)
        v = round_through(v, DTYPE, INTEGER)
    return v


@triton.jit(do_not_specialize=["rows", "units", "x_unit", "residual_unit", "pitch", "pitch_t"])
def norm_bands(
    x,
    residual,
    weight,
    bias,
    summed,
    codes,
    scales,
    codes_t,
    scales_t,
    mean,
    rstd,
    rows,
    units,
    x_unit,
    residual_unit,
    pitch,
    pitch_t,
    eps,
    share,
    UNIT: tl.constexpr,
    PITCH_UNIT: tl.constexpr,
    HELD: tl.constexpr,
    CENTERED: tl.constexpr,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Normalize a band of TILE_R rows and cast it by row and by column; see norm_rows.

    HELD: a tile is as wide as the matrix, and x is read once. Otherwise the tiles of a band are
    read again for the cast, out of the cache that they are still in.
    """
    cols = units * UNIT
    first = tl.program_id(0) * TILE_R
    r, c = first + tl.arange(0, TILE_R), tl.arange(0, TILE_C)
    total = tl.zeros([TILE_R, TILE_C], tl.float32)
    stride, other = x_unit * UNIT, residual_unit * UNIT
    if HELD:
        held = _band_tile(
            x, residual, summed, first, 0, rows, cols, stride, other,
            DTYPE, TILE_R, TILE_C, WIDE, INTEGER,
        )  # fmt: skip
        middle = tl.sum(held, 1) * share if CENTERED else tl.zeros([TILE_R], tl.float32)
        inside = within(first, 0, rows, cols, TILE_R, TILE_C)
        apart = tl.where(inside, held - middle[:, None], 0.0)
        total += apart * apart
    else:
        first_c = tl.full([], 0, tl.int32)
        while first_c < cols:
            v = _band_tile(
                x, residual, summed, first, first_c, rows, cols, stride, other,
                DTYPE, TILE_R, TILE_C, WIDE, INTEGER,
            )  # fmt: skip
            total += v if CENTERED else v * v
            first_c += TILE_C
        if residual is not None:
            tl.debug_barrier()
            x, stride = summed, cols
        middle = tl.sum(total, 1) * share if CENTERED else tl.zeros([TILE_R], tl.float32)
        if CENTERED:
            total = tl.zeros([TILE_R, TILE_C], tl.float32)
            first_c = tl.full([], 0, tl.int32)
            while first_c < cols:
                v = _band_tile(
                    x, None, None, first, first_c, rows, cols, stride, 0,
                    DTYPE, TILE_R, TILE_C, WIDE, INTEGER,
                )  # fmt: skip
                inside = within(first, first_c, rows, cols, TILE_R, TILE_C)
                apart = tl.where(inside, v - middle[:, None], 0.0)
                total += apart * apart
                first_c += TILE_C
    if CENTERED:
        tl.store(mean + r, middle, mask=r < rows)
    factor = tl.rsqrt(tl.sum(total, 1) * share + eps)
    tl.store(rstd + r, factor, mask=r < rows)
    first_c = tl.full([], 0, tl.int32)
    while first_c < cols:
        if HELD:
            v = held
        else:
            v = _band_tile(
                x, None, None, first, first_c, rows, cols, stride, 0,
                DTYPE, TILE_R, TILE_C, WIDE, INTEGER,
            )  # fmt: skip
        if CENTERED:
            v = v - middle[:, None]
        inside = within(first, first_c, rows, cols, TILE_R, TILE_C)
        v = tl.where(inside, _weighted(v, factor, weight, bias, first_c + c, cols), 0.0)
        _store_both(
            v, codes, scales, codes_t, scales_t, first, first_c, rows, cols,
            pitch * PITCH_UNIT, pitch_t * PITCH_UNIT, ROW, COLUMN, DTYPE, WIDE, INTEGER,
        )  # fmt: skip
        first_c += TILE_C


@triton.jit(do_not_specialize=["rows", "units", "dy_unit", "x_unit", "passed_unit"])
def norm_backward_rows(
    dy,
    x,
    weight,
    mean,
    rstd,
    passed,
    dx,
    dweight,
    dbias,
    rows,
    units,
    dy_unit,
    x_unit,
    passed_unit,
    UNIT: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """dx of rows, and each program's own sums of dweight and dbias, [programs, columns].

    With n = (x - mean) rstd and g = dy weight:
    dx = rstd (g - avg(g) - n avg(g n)) + passed, dweight = sum(dy n), dbias = sum(dy);
    avg(g) only where there is a mean. passed is the gradient that skips the norm.
    """
    cols = units * UNIT
    c = tl.arange(0, TILE_C)
    count = cols.to(tl.float32)
    if weight is not None:
        w = as_float32(tl.load(weight + c, mask=c < cols, other=0))[None, :]
        of_weight = tl.zeros([TILE_R, TILE_C], tl.float32)
    if dbias is not None:
        of_bias = tl.zeros([TILE_R, TILE_C], tl.float32)
    first = tl.program_id(0) * TILE_R
    while first < rows:
        r = first + tl.arange(0, TILE_R)
        inside = within(first, 0, rows, cols, TILE_R, TILE_C)
        at = dy + start(0, 0, first, dy_unit * UNIT, 0)
        at += offsets(dy_unit * UNIT, TILE_R, TILE_C, WIDE)
        g = as_float32(tl.load(at, mask=inside, other=0))
        at = x + start(0, 0, first, x_unit * UNIT, 0)
        at += offsets(x_unit * UNIT, TILE_R, TILE_C, WIDE)
        n = as_float32(tl.load(at, mask=inside, other=0))
        factor = tl.load(rstd + r, mask=r < rows, other=0.0)[:, None]
        if mean is not None:
            n = n - tl.load(mean + r, mask=r < rows, other=0.0)[:, None]
        n = tl.where(inside, n * factor, 0.0)
        if dbias is not None:
            of_bias += g
        if weight is not None:
            of_weight += g * n
            g = g * w
        along = tl.sum(g * n, 1) / count
        result = g - n * along[:, None]
        if mean is not None:
            result = result - (tl.sum(g, 1) / count)[:, None]
        result = result * factor
        if passed is not None:
            at = passed + start(0, 0, first, passed_unit * UNIT, 0)
            at += offsets(passed_unit * UNIT, TILE_R, TILE_C, WIDE)
            result += as_float32(tl.load(at, mask=inside, other=0))
        to = dx + start(0, 0, first, cols, 0) + offsets(cols, TILE_R, TILE_C, WIDE)
        tl.store(to, round_to(result, DTYPE, INTEGER), mask=inside)
        first += tl.num_programs(0) * TILE_R
    own = tl.program_id(0).to(tl.int64) * cols + c
    if weight is not None:
        tl.store(dweight + own, tl.sum(of_weight, 0), mask=c < cols)
    if dbias is not None:
        tl.store(dbias + own, tl.sum(of_bias, 0), mask=c < cols)


@triton.jit(do_not_specialize=["programs", "cols"])
def sum_programs(parts, total, programs, cols, TILE_P: tl.constexpr, TILE_C: tl.constexpr):
    """Add up float32 parts [programs, cols], such as norm_backward_rows leaves, in one order."""
    c = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    found = tl.zeros([TILE_P, TILE_C], tl.float32)
    first = 0
    while first < programs:
        p = first + tl.arange(0, TILE_P)
        inside = (p < programs)[:, None] & (c < cols)[None, :]
        found += tl.load(parts + p[:, None] * cols + c[None, :], mask=inside, other=0.0)
        first += TILE_P
    tl.store(total + c, tl.sum(found, 0), mask=c < cols)
