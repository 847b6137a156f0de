# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Forward attention to short keys: they stay where they are, and queries stream past them.

Time is that of reading q and writing o. Keys and values of one tile are loaded once for a run of
tiles of queries, whose loads the pipeline keeps in flight; programs of all heads of the same tokens
follow each other. A sequence of more keys is computed as `attention.attend` does it. Sums and their
order are those of `attend` in either case: so are the bits.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.attention import finish, scores
from lowprec.backends.triton_kernels.attention_parts import (
    LOG2E,
    LOWEST,
    activated,
    load_rows,
    loop_end,
    narrow,
    product,
    run_of,
    store_rows,
)


@triton.jit
def absorb(
    query,
    key,
    value,
    seen,
    acc,
    total,
    peak,
    scale,
    KIND: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """acc, total and peak of a tile of queries after one more tile of keys."""
    IS_SOFTMAX: tl.constexpr = KIND == "softmax" or KIND == "softmax, scaled"
    unit = scale * LOG2E if KIND == "softmax" else 1.0
    s = product(query, tl.trans(key))
    x = scores(s, scale, None, 0, 0, 0, 0, 0, KIND)
    x = tl.where(seen, x, float("-inf") if IS_SOFTMAX else 0.0)
    if IS_SOFTMAX:
        higher = tl.maximum(peak, tl.max(x, 1))
        p = tl.exp2(x * unit - (higher * unit)[:, None])
        shrink = tl.exp2((peak - higher) * unit)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        peak = higher
    else:
        p = activated(x, KIND, INTEGER)
    return product(narrow(p, INTEGER), value, acc), total, peak


@triton.jit
def write(
    o,
    lse,
    first,
    queries,
    stride,
    acc,
    total,
    peak,
    scale,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Store a tile of o and of lse, at the first token of their sequence."""
    if KIND == "softmax" or KIND == "softmax, scaled":
        unit = scale * LOG2E if KIND == "softmax" else 1.0
        rows = first + tl.arange(0, acc.shape[0])
        acc = finish(acc, peak * unit, total, lse + rows, rows < queries)
    store_rows(o, first, queries, stride, acc, WIDTH, INTEGER)


@triton.jit(do_not_specialize=["batch", "tokens"])
def attend_cross(
    q,
    k,
    v,
    o,
    lse,
    cu_q,
    cu_k,
    starts,
    owners,
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
    scale,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """o [tokens, heads, WIDTH] and lse [heads, tokens] of RUN tiles of queries a program."""
    live, sequence, head, run = run_of(starts, owners, batch, heads)
    if not live:
        return
    first_q = tl.load(cu_q + sequence)
    queries = tl.load(cu_q + sequence + 1) - first_q
    first_k = tl.load(cu_k + sequence)
    keys = tl.load(cu_k + sequence + 1) - first_k
    shared = (head // group).to(tl.int64)
    query_at = q + first_q.to(tl.int64) * q_row + head.to(tl.int64) * q_head
    key_at = k + first_k.to(tl.int64) * k_row + shared * k_head
    value_at = v + first_k.to(tl.int64) * v_row + shared * v_head
    out_at = o + (first_q.to(tl.int64) * heads + head) * WIDTH
    line = lse + head.to(tl.int64) * tokens + first_q
    stride = heads * WIDTH
    acc = tl.zeros((TILE_Q, D), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    peak = tl.full((TILE_Q,), LOWEST, tl.float32)
    column = tl.arange(0, TILE_K)
    start = run * (TILE_Q * RUN)
    end = tl.minimum(start + TILE_Q * RUN, queries)
    start, end, last = loop_end(start, INTEGER), loop_end(end, INTEGER), loop_end(keys, INTEGER)
    key = load_rows(key_at, 0, keys, k_row, TILE_K, D, WIDTH)
    value = load_rows(value_at, 0, keys, v_row, TILE_K, D, WIDTH)
    if keys <= TILE_K:
        seen = (column < keys)[None, :]
        for first in tl.range(start, end, TILE_Q, num_stages=STAGES):
            query = load_rows(query_at, first, queries, q_row, TILE_Q, D, WIDTH)
            a, t, m = absorb(query, key, value, seen, acc, total, peak, scale, KIND, INTEGER)
            write(out_at, line, first, queries, stride, a, t, m, scale, KIND, WIDTH, INTEGER)
    else:
        for first in tl.range(start, end, TILE_Q, num_stages=1):
            query = load_rows(query_at, first, queries, q_row, TILE_Q, D, WIDTH)
            a, t, m = acc, total, peak
            for n in tl.range(0, last, TILE_K, num_stages=1):
                key = load_rows(key_at, n, keys, k_row, TILE_K, D, WIDTH)
                value = load_rows(value_at, n, keys, v_row, TILE_K, D, WIDTH)
                seen = (n + column < keys)[None, :]
                a, t, m = absorb(query, key, value, seen, a, t, m, scale, KIND, INTEGER)
            write(out_at, line, first, queries, stride, a, t, m, scale, KIND, WIDTH, INTEGER)
