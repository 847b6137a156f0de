# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Forward attention in E4M3: one power-of-two scale for each 128 tokens of a head, P by 256.

k and v are cast once, into tiles of 128 tokens that start with their sequence and are filled up
with zeros, v transposed: then every operand of an 8-bit product lies along its contraction, and no
load of keys needs a mask. q is cast where it is used. Codes and scales are those of the cast to
mxfp8_128x128 (head dims up to 128), scales kept within 2^-40 .. 2^40. P is cast against the
highest score so far, not against the row's highest of all: the one difference to the reference.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.attention import finish
from lowprec.backends.triton_kernels.attention_codes import encode_tile, first_tile, operand
from lowprec.backends.triton_kernels.attention_parts import (
    LOG2E,
    LOWEST,
    key_range,
    load_rows,
    loop_end,
    place_of,
    product,
    seen_by,
    store_rows,
    stretch,
)
from lowprec.backends.triton_kernels.codec import as_float32, encode


@triton.jit
def _encode_to(
    x,
    codes_of_x,
    scales_of_x,
    first,
    rows,
    stride,
    place,
    TURN: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Cast the tile of x [rows, WIDTH] from row `first` on into the place-th tile of codes.

    TURN: "" for [BLOCK, D], "tile" for [D, BLOCK], "for registers" for the latter with tokens
    0..15 of every 16 in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, by which a thread that
    holds scores of two keys in every eight has those of four neighbours.
    """
    r, c = tl.arange(0, BLOCK), tl.arange(0, D)
    if TURN == "":
        codes, scale = encode_tile(
            load_rows(x, first, rows, stride, BLOCK, D, WIDTH), RULE, INTEGER
        )
        tl.store(codes_of_x + place * (BLOCK * D) + (r[:, None] * D + c[None, :]), codes)
    else:
        token = r
        if TURN == "for registers":
            token = (r & -15) | ((r & 2) << 2) | ((r & 12) >> 1)
        at = x + tl.cast(first, tl.int64) * stride + (token[:, None] * stride + c[None, :])
        inside = (first + token < rows)[:, None] & (c < WIDTH)[None, :]
        # Turned as 16 bits: the bytes of a row are then codes of neighbours in one thread.
        tile = tl.trans(tl.load(at, mask=inside, other=0))
        tile = as_float32(tile) if tile.dtype == tl.int16 else tile
        codes, scale = encode_tile(tile, RULE, INTEGER)
        tl.store(codes_of_x + place * (BLOCK * D) + (c[:, None] * BLOCK + r[None, :]), codes)
    tl.store(scales_of_x + place, scale)


@triton.jit(do_not_specialize=["batch", "tiles"])
def encode_pair(
    k,
    v,
    codes_k,
    codes_v,
    scales_k,
    scales_v,
    cu_k,
    starts,
    owners,
    batch,
    tiles,
    heads,
    k_row,
    k_head,
    v_row,
    v_head,
    TURN: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Cast one tile of two tensors, such as k and v, a program; or of `k` alone.

    codes_k [heads, tiles, 128, D], codes_v the same or turned, see _encode_to, zeros past the
    sequence and the width; scales float32 [heads, tiles]. `tiles` counts all that the layout has
    room for. TURN is that of the last tensor.
    """
    live, sequence, head, tile = place_of(starts, owners, cu_k, batch, heads, BLOCK)
    if not live:
        return
    first_k = tl.load(cu_k + sequence)
    keys = tl.load(cu_k + sequence + 1) - first_k
    wide, first = head.to(tl.int64), tile * BLOCK
    place = wide * tiles + first_tile(cu_k, sequence, BLOCK) + tile
    at = k + first_k.to(tl.int64) * k_row + wide * k_head
    FIRST: tl.constexpr = TURN if v is None else ""
    _encode_to(
        at, codes_k, scales_k, first, keys, k_row, place,
        FIRST, RULE, BLOCK, WIDTH, D, INTEGER,
    )  # fmt: skip
    if v is not None:
        at = v + first_k.to(tl.int64) * v_row + wide * v_head
        _encode_to(
            at, codes_v, scales_v, first, keys, v_row, place,
            TURN, RULE, BLOCK, WIDTH, D, INTEGER,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "tokens", "tiles_q", "tiles", "left", "right", "size"])
def attend_fp8(
    q,
    codes_k,
    codes_v,
    scales_q,
    scales_k,
    scales_v,
    o,
    lse,
    cu_q,
    cu_k,
    starts,
    owners,
    batch,
    tokens,
    tiles_q,
    tiles,
    heads,
    group,
    q_row,
    q_head,
    k_row,
    k_head,
    scale,
    left,
    right,
    size,
    MASK: tl.constexpr,
    RULE: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """o [tokens, heads, WIDTH] and lse [heads, tokens] of one tile of 128 queries a program.

    FACTOR: the logarithm to base 2 of what P is multiplied by. The scale of v goes into the factor
    by which acc shrinks anyway, so that acc is always in units of the last tile's scale. With
    scales_q, q and codes_k are codes at the places of the tokens; see attention_project.project.
    """
    live, sequence, head, tile = place_of(starts, owners, cu_q, batch, heads, BLOCK)
    if not live:
        return
    first_q = tl.load(cu_q + sequence)
    queries = tl.load(cu_q + sequence + 1) - first_q
    keys = tl.load(cu_k + sequence + 1) - tl.load(cu_k + sequence)
    if MASK == "causal":  # The last tiles see the most keys.
        tile = tl.cdiv(queries, BLOCK) - 1 - tile
    first = tile * BLOCK
    rows = first + tl.arange(0, BLOCK)
    shared = (head // group).to(tl.int64)
    query_at = q + first_q.to(tl.int64) * q_row + head.to(tl.int64) * q_head
    place = shared * tiles + first_tile(cu_k, sequence, BLOCK)
    value_at = codes_v + place * (BLOCK * D)
    if scales_q is not None:
        key_at = codes_k + tl.load(cu_k + sequence).to(tl.int64) * k_row + shared * k_head
        codes = load_rows(query_at, first, queries, q_row, BLOCK, D, D)
        query_place = head.to(tl.int64) * tiles_q + first_tile(cu_q, sequence, BLOCK) + tile
        query_scale = tl.load(scales_q + query_place)
    else:
        key_at = codes_k + place * (BLOCK * D)
        k_row = D
        codes, query_scale = encode_tile(
            load_rows(query_at, first, queries, q_row, BLOCK, D, WIDTH), RULE, INTEGER
        )
    query = operand(codes, INTEGER)
    query_unit = scale * LOG2E * query_scale
    acc = tl.zeros((BLOCK, D), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    peak = tl.full((BLOCK,), LOWEST, tl.float32)
    value_unit = tl.load(scales_v + place, mask=keys > 0, other=1.0)
    r, c, d = tl.arange(0, TILE_K), tl.arange(0, TILE_K), tl.arange(0, D)

    last_row = tl.minimum(first + BLOCK, queries) - 1
    low, high = key_range(rows, queries, keys, left, right, size, MASK)
    low_first, high_first = key_range(first, queries, keys, left, right, size, MASK)
    low_last, high_last = key_range(last_row, queries, keys, left, right, size, MASK)
    start, clear, unclear, end = stretch(low_first, high_first, low_last, high_last, TILE_K)
    start, end = loop_end(start, INTEGER), loop_end(end, INTEGER)
    for n in tl.range(start, end, TILE_K, num_stages=STAGES):
        one, inner = n // BLOCK, 0
        if TILE_K != BLOCK:
            inner = n % BLOCK
            if not INTEGER:
                inner = tl.multiple_of(inner, TILE_K)
        offset = tl.cast(n, tl.int64) * k_row
        key = operand(tl.load(key_at + offset + (r[:, None] * k_row + d[None, :])), INTEGER)
        x = product(query, tl.trans(key))
        unit = query_unit * tl.load(scales_k + place + one)
        if (n < clear) | (n >= unclear):
            x = tl.where(seen_by(low, high, n, TILE_K), x, float("-inf"))
        higher = tl.maximum(peak, tl.max(x, 1) * unit)
        p = tl.exp2(x * unit - (higher - FACTOR)[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(p, 1)
        new_unit = tl.load(scales_v + place + one)
        acc = acc * (shrink * (value_unit / new_unit))[:, None]
        peak, value_unit = higher, new_unit
        offset = tl.cast(one, tl.int64) * (BLOCK * D) + inner
        value = tl.load(value_at + offset + (d[:, None] * BLOCK + c[None, :]))
        p_codes = operand(encode(p, "e4m3", INTEGER), INTEGER)
        acc = product(p_codes, tl.trans(operand(value, INTEGER)), acc)

    line = head.to(tl.int64) * tokens + first_q + rows
    acc = finish(acc * value_unit, peak - FACTOR, total, lse + line, rows < queries)
    out_at = o + (first_q.to(tl.int64) * heads + head) * WIDTH
    store_rows(out_at, first, queries, heads * WIDTH, acc, WIDTH, INTEGER)
