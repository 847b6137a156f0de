# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Attention within blocks of SIZE tokens, forward and backward in one pass over memory each.

A block's queries and keys are the same tokens, so one program has all of a block at once: nothing
is computed twice, nothing is summed across programs, and delta needs no pass of its own. A program
takes a run of blocks, whose loads overlap the products of the blocks before.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.attention import finish, scores
from lowprec.backends.triton_kernels.attention_gradients import slopes
from lowprec.backends.triton_kernels.attention_parts import (
    LOG2E,
    LOWEST,
    activated,
    exponents_of,
    load_rows,
    loop_end,
    narrow,
    product,
    run_of,
    store_rows,
)


@triton.jit(do_not_specialize=["batch", "tokens"])
def attend_blocks(
    q,
    k,
    v,
    o,
    lse,
    cu,
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
    SIZE: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """o [tokens, heads, WIDTH] and lse [heads, tokens] of one run of blocks a program."""
    IS_SOFTMAX: tl.constexpr = KIND == "softmax" or KIND == "softmax, scaled"
    live, sequence, head, tile = run_of(starts, owners, batch, heads)
    if not live:
        return
    base = tl.load(cu + sequence)
    length = tl.load(cu + sequence + 1) - base
    wide, shared = base.to(tl.int64), (head // group).to(tl.int64)
    query_at = q + wide * q_row + head.to(tl.int64) * q_head
    key_at = k + wide * k_row + shared * k_head
    value_at = v + wide * v_row + shared * v_head
    out_at = o + (wide * heads + head) * WIDTH
    unit = scale * LOG2E if KIND == "softmax" else 1.0
    start = tile * (SIZE * RUN)
    end = tl.minimum(start + SIZE * RUN, length)
    start, end = loop_end(start, INTEGER), loop_end(end, INTEGER)
    for first in tl.range(start, end, SIZE, num_stages=STAGES):
        rows = first + tl.arange(0, SIZE)
        query = load_rows(query_at, first, length, q_row, SIZE, D, WIDTH)
        key = load_rows(key_at, first, length, k_row, SIZE, D, WIDTH)
        s = product(query, tl.trans(key))
        x = scores(s, scale, None, rows, first, length, length, 0, KIND)
        x = tl.where((rows < length)[None, :], x, float("-inf") if IS_SOFTMAX else 0.0)
        if IS_SOFTMAX:
            peak = tl.maximum(tl.max(x, 1), LOWEST)
            p = tl.exp2(x * unit - (peak * unit)[:, None])
            total = tl.sum(p, 1)
        else:
            p = activated(x, KIND, INTEGER)
        value = load_rows(value_at, first, length, v_row, SIZE, D, WIDTH)
        acc = product(narrow(p, INTEGER), value)
        if IS_SOFTMAX:
            line = lse + head.to(tl.int64) * tokens + base + rows
            acc = finish(acc, peak * unit, total, line, rows < length)
        store_rows(out_at, first, length, heads * WIDTH, acc, WIDTH, INTEGER)


@triton.jit(do_not_specialize=["batch", "tokens"])
def blocks_backward(
    q,
    k,
    v,
    do,
    q_read,
    k_read,
    do_read,
    o,
    dq,
    dk,
    dv,
    lse,
    cu,
    starts,
    owners,
    batch,
    tokens,
    heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    do_row,
    do_head,
    o_row,
    o_head,
    scale,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """dq, dk, dv [tokens, heads, WIDTH] of one run of blocks a program; as many key heads.

    *_read: as in attention_gradients.
    """
    IS_SOFTMAX: tl.constexpr = KIND == "softmax" or KIND == "softmax, scaled"
    live, sequence, head, tile = run_of(starts, owners, batch, heads)
    if not live:
        return
    base = tl.load(cu + sequence)
    length = tl.load(cu + sequence + 1) - base
    wide, high = base.to(tl.int64), head.to(tl.int64)
    query_at = q + wide * q_row + high * q_head
    key_at = k + wide * k_row + high * k_head
    value_at = v + wide * v_row + high * v_head
    do_at = do + wide * do_row + high * do_head
    o_at = o + wide * o_row + high * o_head
    out = (wide * heads + head) * WIDTH
    stride = heads * WIDTH
    start = tile * (SIZE * RUN)
    end = tl.minimum(start + SIZE * RUN, length)
    start, end = loop_end(start, INTEGER), loop_end(end, INTEGER)
    for first in tl.range(start, end, SIZE, num_stages=STAGES):
        rows = first + tl.arange(0, SIZE)
        there = rows < length
        query = load_rows(query_at, first, length, q_row, SIZE, D, WIDTH)
        key = load_rows(key_at, first, length, k_row, SIZE, D, WIDTH)
        do_tile = load_rows(do_at, first, length, do_row, SIZE, D, WIDTH)
        s_query, s_key, dp_tile = query, key, do_tile
        if q_read is not None:
            read_at = q_read + wide * q_row + high * q_head
            s_query = load_rows(read_at, first, length, q_row, SIZE, D, WIDTH)
            read_at = k_read + wide * k_row + high * k_head
            s_key = load_rows(read_at, first, length, k_row, SIZE, D, WIDTH)
        if do_read is not None:
            read_at = do_read + wide * do_row + high * do_head
            dp_tile = load_rows(read_at, first, length, do_row, SIZE, D, WIDTH)
        value = load_rows(value_at, first, length, v_row, SIZE, D, WIDTH)
        power, mean = 0.0, 0.0
        if IS_SOFTMAX:
            power = exponents_of(lse + high * tokens + base + rows, there)[:, None]
            o_tile = load_rows(o_at, first, length, o_row, SIZE, D, WIDTH)
            mean = tl.sum(dp_tile.to(tl.float32) * o_tile.to(tl.float32), 1)[:, None]
        s = product(s_query, tl.trans(s_key))
        x = scores(s, scale, None, rows, first, length, length, 0, KIND)
        dp = product(dp_tile, tl.trans(value))
        if first + SIZE > length:
            seen = there[:, None] & there[None, :]
            x = tl.where(seen, x, float("-inf") if IS_SOFTMAX else 0.0)
            dp = tl.where(seen, dp, 0.0)
        p, ds = slopes(dp, x, power, mean, scale, KIND, INTEGER)
        p, ds = narrow(p, INTEGER), narrow(ds, INTEGER)
        store_rows(dv + out, first, length, stride, product(tl.trans(p), do_tile), WIDTH, INTEGER)
        dq_tile = product(ds, key) * scale
        store_rows(dq + out, first, length, stride, dq_tile, WIDTH, INTEGER)
        dk_tile = product(tl.trans(ds), query) * scale
        store_rows(dk + out, first, length, stride, dk_tile, WIDTH, INTEGER)
