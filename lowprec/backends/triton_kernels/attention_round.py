# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Operands of the backward pass as their codes say them, in bf16, as codes, or as both.

The same casts as in attention_fp8, in tiles of BLOCK tokens that start with their sequence. A code
of E4M3 times its power of two is exact in bf16. Codes lie in the places of their values.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.attention_codes import encode_tile, first_tile
from lowprec.backends.triton_kernels.attention_parts import (
    exponents_of,
    load_rows,
    run_of,
    store_rows,
)
from lowprec.backends.triton_kernels.codec import decode


@triton.jit
def _decoded(codes, INTEGER: tl.constexpr):
    """float32 values of E4M3 codes, without their scale."""
    if INTEGER:
        values = decode(codes, "e4m3")
    else:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return values


@triton.jit
def _store_codes(at, codes, first, rows, row, WIDTH: tl.constexpr):
    """Store codes [BLOCK, D] of the rows from `first` on that exist, `row` bytes apart."""
    r, c = tl.arange(0, codes.shape[0]), tl.arange(0, codes.shape[1])
    inside = (first + r < rows)[:, None] & (c < WIDTH)[None, :]
    at += tl.cast(first, tl.int64) * row
    tl.store(at + (r[:, None] * row + c[None, :]), codes, mask=inside)


@triton.jit
def _round_to(
    x,
    out,
    codes_of_x,
    offset,
    first,
    rows,
    x_row,
    out_row,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Write the tile of x [rows, WIDTH] from row `first` on as its codes say it; NaN is kept.

    As values and as codes, where there is room for them. Results start at `offset`; returns the
    scale.
    """
    tile = load_rows(x, first, rows, x_row, BLOCK, D, WIDTH)
    codes, scale = encode_tile(tile, RULE, INTEGER)
    if out is not None:
        values = _decoded(codes, INTEGER) * scale
        store_rows(out + offset, first, rows, out_row, values, WIDTH, INTEGER)
    if codes_of_x is not None:
        _store_codes(codes_of_x + offset, codes, first, rows, out_row, WIDTH)
    return scale


@triton.jit(do_not_specialize=["batch", "tiles"])
def round_pair(
    k,
    v,
    rounded_k,
    rounded_v,
    codes_k,
    codes_v,
    scales_k,
    scales_v,
    cu,
    starts,
    owners,
    batch,
    tiles,
    heads,
    k_row,
    k_head,
    v_row,
    v_head,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Round one tile of two tensors, such as k and v, a program; or of `k` alone.

    k and v bf16 [tokens, heads, WIDTH]; rounded_* the same, contiguous, or None; codes_*, or None:
    uint8 likewise, with scales_* float32 [heads, tiles]: `tiles` counts all that there is room for.
    starts, owners: of the list of tiles of BLOCK tokens; see attention_schedule.
    """
    live, sequence, head, tile = run_of(starts, owners, batch, heads)
    if not live:
        return
    begin = tl.load(cu + sequence)
    rows = tl.load(cu + sequence + 1) - begin
    first, wide, near = tile * BLOCK, begin.to(tl.int64), head.to(tl.int64)
    offset = (wide * heads + near) * WIDTH
    place = near * tiles + first_tile(cu, sequence, BLOCK) + tile
    at = k + wide * k_row + near * k_head
    scale = _round_to(
        at, rounded_k, codes_k, offset, first, rows, k_row, heads * WIDTH,
        RULE, BLOCK, WIDTH, D, INTEGER,
    )  # fmt: skip
    if codes_k is not None:
        tl.store(scales_k + place, scale)
    if v is not None:
        at = v + wide * v_row + near * v_head
        scale = _round_to(
            at, rounded_v, codes_v, offset, first, rows, v_row, heads * WIDTH,
            RULE, BLOCK, WIDTH, D, INTEGER,
        )  # fmt: skip
        if codes_v is not None:
            tl.store(scales_v + place, scale)


@triton.jit(do_not_specialize=["batch", "tokens", "tiles", "places"])
def prepare_codes(
    do,
    o,
    lse,
    codes_of_do,
    scales,
    rows_of,
    cu_q,
    starts,
    owners,
    batch,
    tokens,
    tiles,
    places,
    heads,
    do_row,
    do_head,
    o_row,
    o_head,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """attention_gradients.prepare_tiles where dP reads dO through its cast, and these codes.

    codes_of_do uint8 [tokens, heads, WIDTH], scales float32 [heads, tiles] of BLOCK tokens; rows_of
    [heads, places, 2, TILE], two places a tile. delta = rowsum(dO * O) of dO as its codes say it.
    """
    live, sequence, head, tile = run_of(starts, owners, batch, heads)
    if not live:
        return
    begin = tl.load(cu_q + sequence)
    queries = tl.load(cu_q + sequence + 1) - begin
    first, wide, near = tile * BLOCK, begin.to(tl.int64), head.to(tl.int64)
    do_tile = load_rows(
        do + wide * do_row + near * do_head, first, queries, do_row, BLOCK, D, WIDTH
    )
    o_tile = load_rows(o + wide * o_row + near * o_head, first, queries, o_row, BLOCK, D, WIDTH)
    codes, scale = encode_tile(do_tile, RULE, INTEGER)
    to = codes_of_do + (wide * heads + near) * WIDTH
    _store_codes(to, codes, first, queries, heads * WIDTH, WIDTH)
    tl.store(scales + near * tiles + first_tile(cu_q, sequence, BLOCK) + tile, scale)
    found = tl.sum(_decoded(codes, INTEGER) * o_tile.to(tl.float32), 1) * scale
    r = tl.arange(0, BLOCK)
    rows = first + r
    line = lse + near * tokens + begin + rows
    place = near * places + first_tile(cu_q, sequence, TILE) + tile * (BLOCK // TILE) + r // TILE
    to = rows_of + place * (2 * TILE) + r % TILE
    # Places past the sequence are the next one's.
    there = rows < tl.cdiv(queries, TILE) * TILE
    tl.store(to, exponents_of(line, rows < queries), mask=there)
    tl.store(to + TILE, found, mask=there)
