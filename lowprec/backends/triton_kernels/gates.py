# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Activations with the cast of their result: SiLU, GELU, alone or times a second input.

Computed in float32; the result is rounded to the dtype of the input before the cast, so that an
activation followed by a cast has the same codes.
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

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)
_TANH = tl.constexpr(0.7978845608028654)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activation(x, KIND: tl.constexpr):
    """Value and derivative of "silu", "gelu" (by erf) or "gelu_tanh" in float32."""
    if KIND == "silu":
        s = _sigmoid(x)
        value = x * s
        slope = s * (1.0 + x * (1.0 - s))
    elif KIND == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))
        value = x * share
        slope = share + x * _DENSITY * tl.exp(-0.5 * x * x)
    else:
        # Past 50 the share is 0 or 1, and the square of a larger x could overflow.
        z = tl.minimum(tl.maximum(x, -50.0), 50.0)
        share = _sigmoid(2.0 * _TANH * (z + _CUBIC * z * z * z))
        value = x * share
        slope = share + z * share * (1.0 - share) * 2.0 * _TANH * (1.0 + 3.0 * _CUBIC * z * z)
    return value, slope


@triton.jit(do_not_specialize=["rows", "units", "gate_unit", "up_unit"])
def gate_tiles(
    gate,
    up,
    y,
    codes,
    scales,
    rows,
    units,
    gate_unit,
    up_unit,
    UNIT: tl.constexpr,
    KIND: tl.constexpr,
    SPEC: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """activation(gate) * up of one tile, and its codes by row; up, y and codes may be None."""
    cols = units * UNIT
    col_tiles = tl.cdiv(cols, TILE_C)
    pr, pc = tl.program_id(0) // col_tiles, tl.program_id(0) % col_tiles
    r = (pr * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    c = pc * TILE_C + tl.arange(0, TILE_C)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    at = r[:, None] * gate_unit * UNIT + c[None, :]
    value, _ = activation(as_float32(tl.load(gate + at, mask=inside, other=0)), KIND)
    if up is not None:
        at = r[:, None] * up_unit * UNIT + c[None, :]
        value = value * as_float32(tl.load(up + at, mask=inside, other=0))
    flat = r[:, None] * cols + c[None, :]
    if y is not None:
        tl.store(y + flat, round_to(value, DTYPE, INTEGER), mask=inside)
    if SPEC is not None:
        q, biased = cast_blocks(round_through(value, DTYPE, INTEGER), SPEC, INTEGER)
        tl.store(codes + flat, q, mask=inside)
        blocks = tl.cdiv(cols, SPEC[3])
        j = pc * (TILE_C // SPEC[3]) + tl.arange(0, TILE_C // SPEC[3])
        where = r[:, None] * blocks + j[None, :]
        within = (r < rows)[:, None] & (j < blocks)[None, :]
        tl.store(scales + where, stored_scale(biased, SPEC[4]), mask=within)


@triton.jit(do_not_specialize=["rows", "units", "dy_unit", "gate_unit", "up_unit"])
def gate_backward_tiles(
    dy,
    gate,
    up,
    dgate,
    dup,
    rows,
    units,
    dy_unit,
    gate_unit,
    up_unit,
    UNIT: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """dgate = dy up activation'(gate) and dup = dy activation(gate) of one tile."""
    cols = units * UNIT
    col_tiles = tl.cdiv(cols, TILE_C)
    pr, pc = tl.program_id(0) // col_tiles, tl.program_id(0) % col_tiles
    r = (pr * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    c = pc * TILE_C + tl.arange(0, TILE_C)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    flat = r[:, None] * cols + c[None, :]
    at = r[:, None] * gate_unit * UNIT + c[None, :]
    value, slope = activation(as_float32(tl.load(gate + at, mask=inside, other=0)), KIND)
    d = as_float32(tl.load(dy + r[:, None] * dy_unit * UNIT + c[None, :], mask=inside, other=0))
    if up is not None:
        tl.store(dup + flat, round_to(d * value, DTYPE, INTEGER), mask=inside)
        at = r[:, None] * up_unit * UNIT + c[None, :]
        d = d * as_float32(tl.load(up + at, mask=inside, other=0))
    tl.store(dgate + flat, round_to(d * slope, DTYPE, INTEGER), mask=inside)
