# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""RMSNorm and LayerNorm with the cast of their result, and their backward.

Given the statistics of a row, every step is one float32 operation, rounded by itself (the launcher
turns fusion of products and sums off), and the result is rounded to the dtype of x before the cast:
a norm followed by a cast has the same codes.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.codec import (
    as_float32,
    round_through,
    round_to,
    stored_scale,
)
from lowprec.backends.triton_kernels.tiles import cast_blocks


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
    INTEGER: tl.constexpr,
):
    """Normalize TILE_R rows of units * UNIT columns; what is None is not read or not written.

    v = x + residual, rounded to DTYPE; y = (v - mean) * rstd * weight + bias, rounded to DTYPE;
    codes and scales of y by row. CENTERED takes the mean off (LayerNorm). share is 1 / columns;
    FULL says that TILE_C is the number of columns.
    """
    cols = units * UNIT
    r = (tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    c = tl.arange(0, TILE_C)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    flat = r[:, None] * cols + c[None, :]
    v = as_float32(tl.load(x + r[:, None] * x_unit * UNIT + c[None, :], mask=inside, other=0))
    if residual is not None:
        at = r[:, None] * residual_unit * UNIT + c[None, :]
        v = v + as_float32(tl.load(residual + at, mask=inside, other=0))
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
    v = v * factor[:, None]
    if weight is not None:
        v = v * as_float32(tl.load(weight + c, mask=c < cols, other=0))[None, :]
    if bias is not None:
        v = v + as_float32(tl.load(bias + c, mask=c < cols, other=0))[None, :]
    if y is not None:
        tl.store(y + flat, round_to(v, DTYPE, INTEGER), mask=inside)
    if SPEC is not None:
        v = round_through(v, DTYPE, INTEGER)
        if not FULL and bias is not None:
            v = tl.where(inside, v, 0.0)
        q, biased = cast_blocks(v, SPEC, INTEGER)
        tl.store(codes + flat, q, mask=inside)
        blocks = tl.cdiv(cols, SPEC[3])
        j = tl.arange(0, TILE_C // SPEC[3])
        where = r[:, None] * blocks + j[None, :]
        within = (r < rows)[:, None] & (j < blocks)[None, :]
        tl.store(scales + where, stored_scale(biased, SPEC[4]), mask=within)


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
        r = (first + tl.arange(0, TILE_R)).to(tl.int64)
        inside = (r < rows)[:, None] & (c < cols)[None, :]
        at = r[:, None] * dy_unit * UNIT + c[None, :]
        g = as_float32(tl.load(dy + at, mask=inside, other=0))
        at = r[:, None] * x_unit * UNIT + c[None, :]
        n = as_float32(tl.load(x + at, mask=inside, other=0))
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
            at = r[:, None] * passed_unit * UNIT + c[None, :]
            result += as_float32(tl.load(passed + at, mask=inside, other=0))
        to = r[:, None] * cols + c[None, :]
        tl.store(dx + to, round_to(result, DTYPE, INTEGER), mask=inside)
        first += tl.num_programs(0) * TILE_R
    own = tl.program_id(0).to(tl.int64) * cols + c
    if weight is not None:
        tl.store(dweight + own, tl.sum(of_weight, 0), mask=c < cols)
    if dbias is not None:
        tl.store(dbias + own, tl.sum(of_bias, 0), mask=c < cols)
