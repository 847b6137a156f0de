# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""norm.norm_rows on pairs of bf16, in plain Triton: where norm_stream cannot run."""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.pairs import (
    affine,
    cast_pairs,
    centered,
    halves,
    joined,
    over_deviation,
    parameters,
)
from lowprec.backends.triton_kernels.places import offsets, start, within
from lowprec.backends.triton_kernels.tiles import store_scales


@triton.jit(do_not_specialize=["rows", "x_unit", "residual_unit"])
def norm_rows_of_pairs(
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
    x_unit,
    residual_unit,
    eps,
    share,
    UNIT: tl.constexpr,
    COLS: tl.constexpr,
    CENTERED: tl.constexpr,
    SPEC: tl.constexpr,
    TILE_R: tl.constexpr,
    P: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """A tile of TILE_R rows a program; see norm_stream.norm_rows_streamed."""
    PAIRS: tl.constexpr = COLS // 2
    first = tl.program_id(0) * TILE_R
    r, p = first + tl.arange(0, TILE_R), tl.arange(0, P)
    inside = within(first, 0, rows, PAIRS, TILE_R, P)
    flat = start(0, 0, first, PAIRS, 0) + offsets(PAIRS, TILE_R, P, False)
    at = x + start(0, 0, first, x_unit * UNIT, 0) + offsets(x_unit * UNIT, TILE_R, P, False)
    one, two = halves(tl.load(at, mask=inside, other=0))
    if residual is not None:
        at = residual + start(0, 0, first, residual_unit * UNIT, 0)
        at += offsets(residual_unit * UNIT, TILE_R, P, False)
        other_one, other_two = halves(tl.load(at, mask=inside, other=0))
        pairs = joined(one + other_one, two + other_two, INTEGER)
        tl.store(summed + flat, pairs, mask=inside)
        one, two = halves(pairs)
    if CENTERED:
        one, two, middle = centered(one, two, share, inside)
        tl.store(mean + r, middle, mask=r < rows)
    factor = over_deviation(one, two, share, eps)
    tl.store(rstd + r, factor, mask=r < rows)
    w_one, w_two, b_one, b_two = None, None, None, None
    if weight is not None:
        w_one, w_two = parameters(weight, p, PAIRS)
    if bias is not None:
        b_one, b_two = parameters(bias, p, PAIRS)
    one, two = affine(one, two, factor, w_one, w_two, b_one, b_two)
    pairs = joined(one, two, INTEGER)
    if y is not None:
        tl.store(y + flat, pairs, mask=inside)
    if SPEC is not None:
        found, biased = cast_pairs(pairs, SPEC, INTEGER)
        tl.store(codes + flat, found, mask=inside)
        store_scales(scales, biased, 0, first, 0, rows, tl.cdiv(COLS, SPEC[3]), False, SPEC[4])
