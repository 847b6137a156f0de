# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Activations with the cast of their result: SiLU, GELU, alone or times a second input.

Computed in float32; the result is rounded to the dtype of the input before the cast, so that an
activation followed by a cast has the same codes.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.codec import as_float32, round_through, round_to
from lowprec.backends.triton_kernels.places import offsets, place, start, within
from lowprec.backends.triton_kernels.tiles import store_row

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


@triton.jit
def _load(source, first_r, first_c, stride, inside, WIDE: tl.constexpr):
    """float32 values of a tile of a matrix with rows `stride` elements apart."""
    at = source + start(0, 0, first_r, stride, first_c)
    at += offsets(stride, inside.shape[0], inside.shape[1], WIDE)
    return as_float32(tl.load(at, mask=inside, other=0))


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
    WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """activation(gate) * up of one tile, and its codes by row; up, y and codes may be None."""
    cols = units * UNIT
    _, first_r, first_c = place(rows, cols, TILE_R, TILE_C)
    inside = within(first_r, first_c, rows, cols, TILE_R, TILE_C)
    value, _ = activation(_load(gate, first_r, first_c, gate_unit * UNIT, inside, WIDE), KIND)
    if up is not None:
        value = value * _load(up, first_r, first_c, up_unit * UNIT, inside, WIDE)
    if y is not None:
        to = y + start(0, 0, first_r, cols, first_c) + offsets(cols, TILE_R, TILE_C, WIDE)
        tl.store(to, round_to(value, DTYPE, INTEGER), mask=inside)
    if SPEC is not None:
        batch = tl.full([], 0, tl.int64)
        store_row(
            round_through(value, DTYPE, INTEGER), None, codes, scales, batch, first_r, first_c,
            rows, cols, cols, SPEC, False, WIDE, INTEGER,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "units", "dy_unit", "gate_unit", "up_unit", "to_unit"])
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
    to_unit,
    UNIT: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """dgate = dy up activation'(gate) and dup = dy activation(gate) of one tile.

    Rows of both lie to_unit * UNIT elements apart: they may be the halves of one matrix.
    """
    cols = units * UNIT
    _, first_r, first_c = place(rows, cols, TILE_R, TILE_C)
    inside = within(first_r, first_c, rows, cols, TILE_R, TILE_C)
    to_stride = to_unit * UNIT
    to = start(0, 0, first_r, to_stride, first_c) + offsets(to_stride, TILE_R, TILE_C, WIDE)
    value, slope = activation(_load(gate, first_r, first_c, gate_unit * UNIT, inside, WIDE), KIND)
    d = _load(dy, first_r, first_c, dy_unit * UNIT, inside, WIDE)
    if up is not None:
        tl.store(dup + to, round_to(d * value, DTYPE, INTEGER), mask=inside)
        d = d * _load(up, first_r, first_c, up_unit * UNIT, inside, WIDE)
    tl.store(dgate + to, round_to(d * slope, DTYPE, INTEGER), mask=inside)
