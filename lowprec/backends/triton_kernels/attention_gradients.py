# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Backward attention over jagged sequences, in two kernels that add nothing atomically.

One keeps a tile of keys and streams queries past it for dK and dV, the other a tile of queries and
streams keys for dQ: two of seven products are computed twice, and in return every sum has one
order, whatever else is in the batch. Names and shapes are those of the forward kernel.

A policy in 8 bits may have S and dP read what codes say, and the other products what was given:
*_read are then that, laid out as what they stand for.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.attention import scores
from lowprec.backends.triton_kernels.attention_codes import first_tile
from lowprec.backends.triton_kernels.attention_parts import (
    LOG2E,
    activated_slope,
    exponents_of,
    key_range,
    load_rows,
    loop_end,
    narrow,
    place_of,
    product,
    row_range,
    seen_by,
    store_rows,
    stretch,
)


@triton.jit(do_not_specialize=["tokens"])
def prepare(
    do,
    o,
    lse,
    delta,
    exponents,
    tokens,
    do_row,
    do_head,
    o_row,
    o_head,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """delta = rowsum(dO * O) and lse as the exponent of two that P is divided by.

    A row without keys gets +inf, by which its P is zero.
    """
    first, head = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64)
    rows = first + tl.arange(0, TILE)
    do_tile = load_rows(do + head * do_head, first, tokens, do_row, TILE, D, WIDTH)
    o_tile = load_rows(o + head * o_head, first, tokens, o_row, TILE, D, WIDTH)
    found = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    at, there = head * tokens + rows, rows < tokens
    tl.store(delta + at, found, mask=there)
    tl.store(exponents + at, exponents_of(lse + at, there), mask=there)


@triton.jit(do_not_specialize=["batch", "tiles"])
def prepare_tiles(
    do,
    o,
    lse,
    rows_of,
    cu_q,
    starts,
    owners,
    batch,
    tokens,
    tiles,
    heads,
    do_row,
    do_head,
    o_row,
    o_head,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """The same in tiles of TILE rows that start with their sequence, [heads, tiles, 2, TILE].

    Exponents, then delta; +inf and 0 past the sequence.
    """
    live, sequence, head, tile = place_of(starts, owners, cu_q, batch, heads, TILE)
    if not live:
        return
    first_q = tl.load(cu_q + sequence)
    queries = tl.load(cu_q + sequence + 1) - first_q
    wide, first = head.to(tl.int64), tile * TILE
    do_at = do + first_q.to(tl.int64) * do_row + wide * do_head
    o_at = o + first_q.to(tl.int64) * o_row + wide * o_head
    do_tile = load_rows(do_at, first, queries, do_row, TILE, D, WIDTH)
    o_tile = load_rows(o_at, first, queries, o_row, TILE, D, WIDTH)
    found = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    rows = first + tl.arange(0, TILE)
    line = lse + wide * tokens + first_q + rows
    place = wide * tiles + first_tile(cu_q, sequence, TILE) + tile
    to = rows_of + place * (2 * TILE) + tl.arange(0, TILE)
    tl.store(to, exponents_of(line, rows < queries))
    tl.store(to + TILE, found)


@triton.jit
def scores_of_keys(s, scale, bias, rows, first, queries, keys, width, KIND: tl.constexpr):
    """The scores of a tile that is transposed, [keys, queries]."""
    if bias is None:
        x = scores(s, scale, None, rows, first, queries, keys, width, KIND)
    else:
        x = tl.trans(scores(tl.trans(s), scale, bias, rows, first, queries, keys, width, KIND))
    return x


@triton.jit
def slopes(dp, x, exponents, delta, scale, KIND: tl.constexpr, INTEGER: tl.constexpr):
    """P and dS of a tile of scores x, from dP; exponents and delta already broadcast to it."""
    if KIND == "softmax":
        p = tl.exp2(x * (scale * LOG2E) - exponents)
        ds = p * (dp - delta)
    elif KIND == "softmax, scaled":
        p = tl.exp2(x - exponents)
        ds = p * (dp - delta)
    else:
        p, slope = activated_slope(x, KIND, INTEGER)
        ds = dp * slope
    return p, ds


@triton.jit(do_not_specialize=["batch", "tokens", "left", "right", "size"])
def keys_backward(
    q,
    k,
    v,
    do,
    q_read,
    do_read,
    dk,
    dv,
    exponents,
    delta,
    cu_q,
    cu_k,
    starts,
    owners,
    bias,
    batch,
    tokens,
    shared_heads,
    group,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    do_row,
    do_head,
    bias_head,
    bias_row,
    scale,
    left,
    right,
    size,
    MASK: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """dk and dv [tokens, shared_heads, WIDTH] of one tile of keys a program, over its group.

    k and v are as S and dP read them; q_read and do_read likewise, or None where dK and dV read the
    same. Scores are transposed here, [keys, queries], so that P and dS are left operands at once.
    Rows past the last query need no mask: their dO is zero, and by its exponent their P.
    """
    IS_SOFTMAX: tl.constexpr = KIND == "softmax" or KIND == "softmax, scaled"
    live, sequence, shared, tile = place_of(starts, owners, cu_k, batch, shared_heads, TILE_K)
    if not live:
        return
    first_q = tl.load(cu_q + sequence)
    queries = tl.load(cu_q + sequence + 1) - first_q
    first_k = tl.load(cu_k + sequence)
    keys = tl.load(cu_k + sequence + 1) - first_k
    first = tile * TILE_K
    wide_q, wide_k = first_q.to(tl.int64), first_k.to(tl.int64)
    key_at = k + wide_k * k_row + shared.to(tl.int64) * k_head
    value_at = v + wide_k * v_row + shared.to(tl.int64) * v_head
    key = load_rows(key_at, first, keys, k_row, TILE_K, D, WIDTH)
    value = load_rows(value_at, first, keys, v_row, TILE_K, D, WIDTH)
    acc_k = tl.zeros((TILE_K, D), tl.float32)
    acc_v = tl.zeros((TILE_K, D), tl.float32)

    last_key = tl.minimum(first + TILE_K, keys) - 1
    low_first, high_first = row_range(first, queries, keys, left, right, size, MASK)
    low_last, high_last = row_range(last_key, queries, keys, left, right, size, MASK)
    high_first = tl.where(high_first == queries, tl.cdiv(queries, TILE_Q) * TILE_Q, high_first)
    start, clear, unclear, end = stretch(low_first, high_first, low_last, high_last, TILE_Q)
    start, end = loop_end(start, INTEGER), loop_end(end, INTEGER)
    for one in range(loop_end(group, INTEGER)):
        head = (shared * group + one).to(tl.int64)
        plane = None if bias is None else bias + head * bias_head
        query_at = q + wide_q * q_row + head * q_head
        do_at = do + wide_q * do_row + head * do_head
        line = head * tokens + first_q
        for m in tl.range(start, end, TILE_Q, num_stages=STAGES):
            rows = m + tl.arange(0, TILE_Q)
            query = load_rows(query_at, m, queries, q_row, TILE_Q, D, WIDTH)
            if q_read is not None:
                read_at = q_read + wide_q * q_row + head * q_head
                read_tile = load_rows(read_at, m, queries, q_row, TILE_Q, D, WIDTH)
                s = product(key, tl.trans(read_tile))
            else:
                s = product(key, tl.trans(query))
            x = scores_of_keys(s, scale, plane, rows, first, queries, keys, bias_row, KIND)
            do_tile = load_rows(do_at, m, queries, do_row, TILE_Q, D, WIDTH)
            if do_read is not None:
                read_at = do_read + wide_q * do_row + head * do_head
                read_tile = load_rows(read_at, m, queries, do_row, TILE_Q, D, WIDTH)
                dp = product(value, tl.trans(read_tile))
            else:
                dp = product(value, tl.trans(do_tile))
            if MASK != "none" and ((m < clear) | (m >= unclear)):
                low, high = key_range(rows, queries, keys, left, right, size, MASK)
                seen = tl.trans(seen_by(low, high, first, TILE_K))
                x = tl.where(seen, x, float("-inf") if IS_SOFTMAX else 0.0)
                dp = tl.where(seen, dp, 0.0)
            power, mean = 0.0, 0.0
            if IS_SOFTMAX:
                there = rows < queries
                power = tl.load(exponents + line + rows, mask=there, other=float("inf"))[None, :]
                mean = tl.load(delta + line + rows, mask=there, other=0.0)[None, :]
            p, ds = slopes(dp, x, power, mean, scale, KIND, INTEGER)
            acc_v = product(narrow(p, INTEGER), do_tile, acc_v)
            acc_k = product(narrow(ds, INTEGER), query, acc_k)
    stride = shared_heads * WIDTH
    out = (wide_k * shared_heads + shared) * WIDTH
    store_rows(dv + out, first, keys, stride, acc_v, WIDTH, INTEGER)
    store_rows(dk + out, first, keys, stride, acc_k * scale, WIDTH, INTEGER)


@triton.jit(do_not_specialize=["batch", "tokens", "left", "right", "size"])
def queries_backward(
    q,
    k,
    v,
    do,
    k_read,
    dq,
    exponents,
    delta,
    cu_q,
    cu_k,
    starts,
    owners,
    bias,
    batch,
    tokens,
    heads,
    group,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    do_row,
    do_head,
    bias_head,
    bias_row,
    scale,
    left,
    right,
    size,
    MASK: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """dq [tokens, heads, WIDTH] of one tile of queries a program.

    q, v and do are as S and dP read them; k_read likewise, or None where dQ reads the same.
    """
    IS_SOFTMAX: tl.constexpr = KIND == "softmax" or KIND == "softmax, scaled"
    live, sequence, head, tile = place_of(starts, owners, cu_q, batch, heads, TILE_Q)
    if not live:
        return
    first_q = tl.load(cu_q + sequence)
    queries = tl.load(cu_q + sequence + 1) - first_q
    first_k = tl.load(cu_k + sequence)
    keys = tl.load(cu_k + sequence + 1) - first_k
    if MASK == "causal":  # The last tiles see the most keys.
        tile = tl.cdiv(queries, TILE_Q) - 1 - tile
    first = tile * TILE_Q
    rows = first + tl.arange(0, TILE_Q)
    wide, shared = head.to(tl.int64), (head // group).to(tl.int64)
    query_at = q + first_q.to(tl.int64) * q_row + wide * q_head
    do_at = do + first_q.to(tl.int64) * do_row + wide * do_head
    key_at = k + first_k.to(tl.int64) * k_row + shared * k_head
    value_at = v + first_k.to(tl.int64) * v_row + shared * v_head
    plane = None if bias is None else bias + wide * bias_head
    query = load_rows(query_at, first, queries, q_row, TILE_Q, D, WIDTH)
    do_tile = load_rows(do_at, first, queries, do_row, TILE_Q, D, WIDTH)
    power, mean = 0.0, 0.0
    if IS_SOFTMAX:
        at, there = wide * tokens + first_q + rows, rows < queries
        power = tl.load(exponents + at, mask=there, other=float("inf"))[:, None]
        mean = tl.load(delta + at, mask=there, other=0.0)[:, None]
    acc = tl.zeros((TILE_Q, D), tl.float32)

    last_row = tl.minimum(first + TILE_Q, queries) - 1
    low, high = key_range(rows, queries, keys, left, right, size, MASK)
    low_first, high_first = key_range(first, queries, keys, left, right, size, MASK)
    low_last, high_last = key_range(last_row, queries, keys, left, right, size, MASK)
    start, clear, unclear, end = stretch(low_first, high_first, low_last, high_last, TILE_K)
    start, end = loop_end(start, INTEGER), loop_end(end, INTEGER)
    for n in tl.range(start, end, TILE_K, num_stages=STAGES):
        key = load_rows(key_at, n, keys, k_row, TILE_K, D, WIDTH)
        if k_read is not None:
            read_at = k_read + first_k.to(tl.int64) * k_row + shared * k_head
            s = product(query, tl.trans(load_rows(read_at, n, keys, k_row, TILE_K, D, WIDTH)))
        else:
            s = product(query, tl.trans(key))
        x = scores(s, scale, plane, rows, n, queries, keys, bias_row, KIND)
        value = load_rows(value_at, n, keys, v_row, TILE_K, D, WIDTH)
        dp = product(do_tile, tl.trans(value))
        if (n < clear) | (n >= unclear):
            seen = seen_by(low, high, n, TILE_K)
            x = tl.where(seen, x, float("-inf") if IS_SOFTMAX else 0.0)
            dp = tl.where(seen, dp, 0.0)
        _, ds = slopes(dp, x, power, mean, scale, KIND, INTEGER)
        acc = product(narrow(ds, INTEGER), key, acc)
    out = (first_q.to(tl.int64) * heads + head) * WIDTH
    store_rows(dq + out, first, queries, heads * WIDTH, acc * scale, WIDTH, INTEGER)
