# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""The gradient of a bias that all sequences share: dS summed over them, in the order of the batch.

One tile of the bias a program, which visits every sequence that reaches so far: no atomic sums, so
the same batch gives the same bits. S and dP are computed again. Names and shapes as in the others.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.attention import scores
from lowprec.backends.triton_kernels.attention_gradients import slopes
from lowprec.backends.triton_kernels.attention_parts import (
    key_range,
    load_rows,
    loop_end,
    product,
    seen_by,
)


@triton.jit(
    do_not_specialize=["batch", "tokens", "left", "right", "size", "longest_q", "longest_k"]
)
def bias_backward(
    q,
    k,
    v,
    do,
    dbias,
    exponents,
    delta,
    cu_q,
    cu_k,
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
    longest_q,
    longest_k,
    MASK: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """dbias [planes, longest_q, longest_k] float32, planes = programs along the third axis."""
    IS_SOFTMAX: tl.constexpr = KIND == "softmax" or KIND == "softmax, scaled"
    first, first_key, plane = tl.program_id(0) * TILE_Q, tl.program_id(1) * TILE_K, tl.program_id(2)
    rows = first + tl.arange(0, TILE_Q)
    served = heads // tl.num_programs(2)
    acc = tl.zeros((TILE_Q, TILE_K), tl.float32)
    for sequence in range(loop_end(batch, INTEGER)):
        first_q, first_k = tl.load(cu_q + sequence), tl.load(cu_k + sequence)
        queries = tl.load(cu_q + sequence + 1) - first_q
        keys = tl.load(cu_k + sequence + 1) - first_k
        wide_q, wide_k = first_q.to(tl.int64), first_k.to(tl.int64)
        low, high = key_range(rows, queries, keys, left, right, size, MASK)
        seen = seen_by(low, high, first_key, TILE_K) & (rows < queries)[:, None]
        # Heads of sequences that end before this tile are not visited.
        count = tl.where((first < queries) & (first_key < keys), served, 0)
        for one in range(loop_end(count, INTEGER)):
            head = (plane * served + one).to(tl.int64)
            shared = head // group
            query_at = q + wide_q * q_row + head * q_head
            key_at = k + wide_k * k_row + shared * k_head
            query = load_rows(query_at, first, queries, q_row, TILE_Q, D, WIDTH)
            key = load_rows(key_at, first_key, keys, k_row, TILE_K, D, WIDTH)
            s = product(query, tl.trans(key))
            at = bias + head * bias_head
            x = scores(s, scale, at, rows, first_key, queries, keys, bias_row, KIND)
            do_at = do + wide_q * do_row + head * do_head
            value_at = v + wide_k * v_row + shared * v_head
            do_tile = load_rows(do_at, first, queries, do_row, TILE_Q, D, WIDTH)
            value = load_rows(value_at, first_key, keys, v_row, TILE_K, D, WIDTH)
            dp = product(do_tile, tl.trans(value))
            power, mean = 0.0, 0.0
            if IS_SOFTMAX:
                line, there = head * tokens + first_q + rows, rows < queries
                power = tl.load(exponents + line, mask=there, other=float("inf"))[:, None]
                mean = tl.load(delta + line, mask=there, other=0.0)[:, None]
            x = tl.where(seen, x, float("-inf") if IS_SOFTMAX else 0.0)
            _, ds = slopes(tl.where(seen, dp, 0.0), x, power, mean, scale, KIND, INTEGER)
            acc += ds
    columns = first_key + tl.arange(0, TILE_K)
    at = (plane.to(tl.int64) * longest_q + rows)[:, None] * longest_k + columns[None, :]
    inside = (rows < longest_q)[:, None] & (columns < longest_k)[None, :]
    tl.store(dbias + at, acc, mask=inside)
