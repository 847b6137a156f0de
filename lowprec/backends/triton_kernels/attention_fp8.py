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
from lowprec.backends.triton_kernels.codec import decode, encode


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
    """Cast one tile of two tensors, such as k and v, a program.

    codes_k [heads, tiles, 128, D], codes_v the same or with TURN [heads, tiles, D, 128], zeros past
    the sequence and the width; scales float32 [heads, tiles]. `tiles` counts all that the layout
    has room for.
    """
    live, sequence, head, tile = place_of(starts, owners, cu_k, batch, heads, BLOCK)
    if not live:
        return
    first_k = tl.load(cu_k + sequence)
    keys = tl.load(cu_k + sequence + 1) - first_k
    wide, first = head.to(tl.int64), tile * BLOCK
    key_at = k + first_k.to(tl.int64) * k_row + wide * k_head
    value_at = v + first_k.to(tl.int64) * v_row + wide * v_head
    place = wide * tiles + first_tile(cu_k, sequence, BLOCK) + tile
    r, c = tl.arange(0, BLOCK), tl.arange(0, D)
    key = load_rows(key_at, first, keys, k_row, BLOCK, D, WIDTH)
    codes, scale = encode_tile(key, RULE, INTEGER)
    tl.store(codes_k + place * (BLOCK * D) + (r[:, None] * D + c[None, :]), codes)
    tl.store(scales_k + place, scale)
    value = load_rows(value_at, first, keys, v_row, BLOCK, D, WIDTH)
    codes, scale = encode_tile(value, RULE, INTEGER)
    if TURN:
        at = codes_v + place * (BLOCK * D) + (c[:, None] * BLOCK + r[None, :])
        tl.store(at, tl.trans(codes))
    else:
        tl.store(codes_v + place * (BLOCK * D) + (r[:, None] * D + c[None, :]), codes)
    tl.store(scales_v + place, scale)


@triton.jit(do_not_specialize=["batch", "tokens"])
def delta_of_codes(
    do,
    o,
    delta,
    cu_q,
    starts,
    owners,
    batch,
    tokens,
    heads,
    do_row,
    do_head,
    o_row,
    o_head,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """delta [heads, tokens] = rowsum(dO * O), dO as its codes say it, of one tile a program."""
    live, sequence, head, tile = place_of(starts, owners, cu_q, batch, heads, BLOCK)
    if not live:
        return
    first_q = tl.load(cu_q + sequence)
    queries = tl.load(cu_q + sequence + 1) - first_q
    wide, first = head.to(tl.int64), tile * BLOCK
    do_at = do + first_q.to(tl.int64) * do_row + wide * do_head
    o_at = o + first_q.to(tl.int64) * o_row + wide * o_head
    codes, scale = encode_tile(
        load_rows(do_at, first, queries, do_row, BLOCK, D, WIDTH), RULE, INTEGER
    )
    o_tile = load_rows(o_at, first, queries, o_row, BLOCK, D, WIDTH).to(tl.float32)
    found = tl.sum(decode(codes, "e4m3") * o_tile, 1) * scale
    rows = first + tl.arange(0, BLOCK)
    tl.store(delta + wide * tokens + first_q + rows, found, mask=rows < queries)


@triton.jit(do_not_specialize=["batch", "tokens", "tiles", "left", "right", "size"])
def attend_fp8(
    q,
    codes_k,
    codes_v,
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
    tiles,
    heads,
    group,
    q_row,
    q_head,
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
    by which acc shrinks anyway, so that acc is always in units of the last tile's scale.
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
    key_at = codes_k + place * (BLOCK * D)
    value_at = codes_v + place * (BLOCK * D)
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
        offset = tl.cast(n, tl.int64) * D
        key = operand(tl.load(key_at + offset + (r[:, None] * D + d[None, :])), INTEGER)
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
