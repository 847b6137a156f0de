# mypy: ignore-errors
# Bodies of @gluon.jit functions are Triton's language, not typed Python.
"""RMSNorm and LayerNorm of bf16 rows with the cast of their result, in Gluon.

A program walks over tiles of rows and has the next tile under way while it works on one. A thread
holds neighbouring pairs of a row, so that a block's maximum asks few others. Weights and biases
stay in registers or, as float32, in shared memory for all rows of a program.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowprec.backends.triton_kernels.barriers import thread_barrier
from lowprec.backends.triton_kernels.codec import stored_scale
from lowprec.backends.triton_kernels.pairs import (
    affine,
    cast_pairs,
    centered,
    halves,
    joined,
    over_deviation,
    pair_amax,
    parameters,
)


@triton.constexpr_function
def _layout(per_thread, down, across, warps, pairs):
    """Of [rows, pairs]: `per_thread` pairs of `down` rows a thread, `across` warps along a row."""
    lanes = min(32, pairs // per_thread)
    return gl.BlockedLayout(
        [down, per_thread], [32 // lanes, lanes], [warps // across, across], [1, 0]
    )


@triton.constexpr_function
def _spread(count, per_thread):
    """Of `count` numbers in shared memory: lanes that read 4 each read 16 bytes side by side."""
    bases, step = [[1], [2]], per_thread
    while step < count:
        bases.append([step])
        step *= 2
    step = 4
    while step < per_thread:
        bases.append([step])
        step *= 2
    return gl.SharedLinearLayout(bases)


@gluon.jit
def _kept(values, P: gl.constexpr, PER: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [P], _spread(P, PER), values)


@gluon.jit
def _tile(source, first, rows, pairs, stride, TILE_R: gl.constexpr, P: gl.constexpr,
          FULL: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Pairs of TILE_R rows from row `first` on, 0 past the matrix."""
    r = gl.arange(0, TILE_R, gl.SliceLayout(1, LAYOUT))
    p = gl.arange(0, P, gl.SliceLayout(0, LAYOUT))
    inside = gl.expand_dims(first + r < rows, 1)
    if not FULL:
        inside = inside & gl.expand_dims(p < pairs, 0)
    at = source + first.to(gl.int64) * stride
    at += gl.expand_dims(r, 1) * stride + gl.expand_dims(p, 0)
    return gl.load(at, mask=inside, other=0)


@gluon.jit
def _store(target, values, first, rows, pairs, P: gl.constexpr, FULL: gl.constexpr,
           LAYOUT: gl.constexpr):  # fmt: skip
    """Store [TILE_R, P] at row `first` of rows of `pairs`."""
    r = gl.arange(0, values.shape[0], gl.SliceLayout(1, LAYOUT))
    p = gl.arange(0, P, gl.SliceLayout(0, LAYOUT))
    inside = gl.expand_dims(first + r < rows, 1)
    if not FULL:
        inside = inside & gl.expand_dims(p < pairs, 0)
    to = target + first.to(gl.int64) * pairs
    gl.store(to + gl.expand_dims(r, 1) * pairs + gl.expand_dims(p, 0), values, mask=inside)


@gluon.jit
def _store_scales(scales, biased, first, rows, blocks, E8M0: gl.constexpr):
    LAYOUT: gl.constexpr = biased.type.layout
    r = gl.arange(0, biased.shape[0], gl.SliceLayout(1, LAYOUT))
    b = gl.arange(0, biased.shape[1], gl.SliceLayout(0, LAYOUT))
    inside = gl.expand_dims(first + r < rows, 1) & gl.expand_dims(b < blocks, 0)
    to = scales + first.to(gl.int64) * blocks
    to += gl.expand_dims(r, 1) * blocks + gl.expand_dims(b, 0)
    gl.store(to, stored_scale(biased, E8M0), mask=inside)


@gluon.jit(do_not_specialize=["rows", "x_unit", "residual_unit"])
def norm_rows_streamed(
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
    amax,
    rows,
    x_unit,
    residual_unit,
    eps,
    share,
    UNIT: gl.constexpr,
    COLS: gl.constexpr,
    CENTERED: gl.constexpr,
    SPEC: gl.constexpr,
    TILE_R: gl.constexpr,
    P: gl.constexpr,
    PER: gl.constexpr,
    DOWN: gl.constexpr,
    ACROSS: gl.constexpr,
    HELD: gl.constexpr,
):
    """As norm.norm_rows, on pairs of bf16: pointers are to int32, row strides in UNIT pairs.

    codes are two to an int16. amax, or None: one int32, raised to the float32 bits of the largest
    magnitude of the result. A tile is TILE_R rows of P pairs. PER pairs of DOWN rows are neighbours
    in a thread, ACROSS warps share a row. HELD: parameters stay in registers.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = _layout(PER, DOWN, ACROSS, WARPS, P)
    PAIRS: gl.constexpr = COLS // 2
    FULL: gl.constexpr = PAIRS == P
    stride, residual_stride = x_unit * UNIT, residual_unit * UNIT
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    p = gl.arange(0, P, OF_COLUMNS)
    w_first, w_second, b_first, b_second = None, None, None, None
    if weight is not None:
        w_first, w_second = parameters(weight, p, PAIRS)
        if not HELD:
            w_1, w_2 = _kept(w_first, P, PER), _kept(w_second, P, PER)
    if bias is not None:
        b_first, b_second = parameters(bias, p, PAIRS)
        if not HELD:
            b_1, b_2 = _kept(b_first, P, PER), _kept(b_second, P, PER)
    if not HELD:
        thread_barrier()
    inside = None
    if not FULL:
        inside = gl.expand_dims(p < PAIRS, 0)
    first = gl.program_id(0) * TILE_R
    step = gl.num_programs(0) * TILE_R
    coming = _tile(x, first, rows, PAIRS, stride, TILE_R, P, FULL, LAYOUT)
    if residual is not None:
        other = _tile(residual, first, rows, PAIRS, residual_stride, TILE_R, P, FULL, LAYOUT)
    tops = gl.zeros([TILE_R], gl.int32, gl.SliceLayout(1, LAYOUT))
    while first < rows:
        one, two = halves(coming)
        if residual is not None:
            o_first, o_second = halves(other)
            pairs = joined(one + o_first, two + o_second, False)
            _store(summed, pairs, first, rows, PAIRS, P, FULL, LAYOUT)
            one, two = halves(pairs)
            other = _tile(
                residual, first + step, rows, PAIRS, residual_stride, TILE_R, P, FULL, LAYOUT
            )
        coming = _tile(x, first + step, rows, PAIRS, stride, TILE_R, P, FULL, LAYOUT)
        r = first + gl.arange(0, TILE_R, gl.SliceLayout(1, LAYOUT))
        if CENTERED:
            one, two, middle = centered(one, two, share, inside)
            gl.store(mean + r, middle, mask=r < rows)
        factor = over_deviation(one, two, share, eps)
        gl.store(rstd + r, factor, mask=r < rows)
        if not HELD:
            if weight is not None:
                w_first, w_second = w_1.load(OF_COLUMNS), w_2.load(OF_COLUMNS)
            if bias is not None:
                b_first, b_second = b_1.load(OF_COLUMNS), b_2.load(OF_COLUMNS)
        one, two = affine(one, two, factor, w_first, w_second, b_first, b_second)
        pairs = joined(one, two, False)
        if amax is not None:
            tops = gl.maximum(tops, gl.where(r < rows, pair_amax(pairs, 1, False), 0))
        if y is not None:
            _store(y, pairs, first, rows, PAIRS, P, FULL, LAYOUT)
        if SPEC is not None:
            found, biased = cast_pairs(pairs, SPEC, False)
            _store(codes, found, first, rows, PAIRS, P, FULL, LAYOUT)
            _store_scales(scales, biased, first, rows, gl.cdiv(COLS, SPEC[3]), SPEC[4])
        first += step
    if amax is not None:
        gl.atomic_max(amax, gl.max(tops, 0) << 16, sem="relaxed")
