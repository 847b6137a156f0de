# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Forward attention over jagged sequences: a tile of queries a program, keys streamed past it.

Tensors are [tokens, heads, head dim] with unit stride along the head dim; scores are float32, P and
the operands bf16, sums float32. Exponentials are powers of two: `unit` turns scores into their
exponents. WIDTH is the head dim, D the power of two that holds it.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.attention_parts import (
    LN2,
    LOG2E,
    LOWEST,
    activated,
    key_range,
    load_rows,
    loop_end,
    narrow,
    place_of,
    product,
    seen_by,
    store_rows,
    stretch,
)


@triton.jit
def scores(s, scale, bias, rows, first, queries, keys, width, KIND: tl.constexpr):
    """Scores of a tile as the activation takes them: exponents of two for a softmax.

    Without a bias and with a positive scale a softmax takes s itself and `unit` does the rest, in
    one instruction with the subtraction of the maximum. bias points at this head's plane.
    """
    x = s
    if KIND == "softmax, scaled":
        x = s * (scale * LOG2E)
    elif KIND != "softmax":
        x = s * scale
    if bias is not None:
        key = first + tl.arange(0, s.shape[1])
        inside = (rows < queries)[:, None] & (key < keys)[None, :]
        at = bias + rows.to(tl.int64)[:, None] * width + key[None, :]
        added = tl.load(at, mask=inside, other=0).to(tl.float32)
        x += added * LOG2E if KIND == "softmax, scaled" else added
    return x


@triton.jit
def finish(acc, peak, total, lse, inside):
    """Divide by the sum and store lse, from the highest exponent and the sum below it."""
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    found = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * LN2)
    tl.store(lse, found, mask=inside)
    return acc * (1.0 / total)[:, None]


@triton.jit
def slot_of(first_k, chunk, CHUNK: tl.constexpr):
    """The place in `parts` of a chunk of the keys from `first_k` on, see attention_schedule."""
    return 2 * first_k.to(tl.int64) // CHUNK + chunk


@triton.jit(do_not_specialize=["batch", "tokens", "left", "right", "size"])
def attend(
    q,
    k,
    v,
    o,
    lse,
    cu_q,
    cu_k,
    starts,
    owners,
    parts,
    sums,
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
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """o [tokens, heads, WIDTH] and lse [heads, tokens] of one tile of queries a program.

    `group` query heads share a key head. KIND: "softmax" (no bias, positive scale), "softmax,
    scaled" (any), "gelu" or "silu", which write no lse. left, right and size are those of the mask.
    With CHUNK the sequences of at most FEW queries and more than CHUNK keys have a program for each
    CHUNK keys, which leaves its sums to `combine`: parts [slots, heads, FEW, WIDTH] and sums
    [slots, heads, 2, FEW], the highest exponent and the sum below it.
    """
    IS_SOFTMAX: tl.constexpr = KIND == "softmax" or KIND == "softmax, scaled"
    live, sequence, head, tile = place_of(
        starts, owners, cu_q, batch, heads, TILE_Q, cu_k, FEW, CHUNK
    )
    if not live:
        return
    first_q = tl.load(cu_q + sequence)
    queries = tl.load(cu_q + sequence + 1) - first_q
    first_k = tl.load(cu_k + sequence)
    keys = tl.load(cu_k + sequence + 1) - first_k
    chunk = tile
    if CHUNK:
        split = (queries <= FEW) & (keys > CHUNK)
        tile = tl.where(split, 0, tile)
    if MASK == "causal":  # The last tiles see the most keys.
        tile = tl.cdiv(queries, TILE_Q) - 1 - tile
    first = tile * TILE_Q
    rows = first + tl.arange(0, TILE_Q)
    shared = (head // group).to(tl.int64)
    query_at = q + first_q.to(tl.int64) * q_row + head.to(tl.int64) * q_head
    key_at = k + first_k.to(tl.int64) * k_row + shared * k_head
    value_at = v + first_k.to(tl.int64) * v_row + shared * v_head
    plane = None if bias is None else bias + head.to(tl.int64) * bias_head
    query = load_rows(query_at, first, queries, q_row, TILE_Q, D, WIDTH)
    acc = tl.zeros((TILE_Q, D), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    peak = tl.full((TILE_Q,), LOWEST, tl.float32)
    unit = scale * LOG2E if KIND == "softmax" else 1.0

    last_row = tl.minimum(first + TILE_Q, queries) - 1
    low, high = key_range(rows, queries, keys, left, right, size, MASK)
    low_first, high_first = key_range(first, queries, keys, left, right, size, MASK)
    low_last, high_last = key_range(last_row, queries, keys, left, right, size, MASK)
    start, clear, unclear, end = stretch(low_first, high_first, low_last, high_last, TILE_K)
    if CHUNK:
        start = tl.where(split, tl.maximum(start, chunk * CHUNK), start)
        end = tl.where(split, tl.minimum(end, (chunk + 1) * CHUNK), end)
    start, end = loop_end(start, INTEGER), loop_end(end, INTEGER)
    for n in tl.range(start, end, TILE_K, num_stages=STAGES):
        key = load_rows(key_at, n, keys, k_row, TILE_K, D, WIDTH)
        s = product(query, tl.trans(key))
        x = scores(s, scale, plane, rows, n, queries, keys, bias_row, KIND)
        if (n < clear) | (n >= unclear):
            # Zero is hidden from gelu and silu: it is their own zero.
            hidden = float("-inf") if IS_SOFTMAX else 0.0
            x = tl.where(seen_by(low, high, n, TILE_K), x, hidden)
        if IS_SOFTMAX:
            higher = tl.maximum(peak, tl.max(x, 1))
            p = tl.exp2(x * unit - (higher * unit)[:, None])
            shrink = tl.exp2((peak - higher) * unit)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None]
            peak = higher
        else:
            p = activated(x, KIND, INTEGER)
        value = load_rows(value_at, n, keys, v_row, TILE_K, D, WIDTH)
        acc = product(narrow(p, INTEGER), value, acc)

    if CHUNK:  # noqa: SIM102 (a constant, without which `split` is not there)
        if split:
            at = slot_of(first_k, chunk, CHUNK) * heads + head
            row, column = tl.arange(0, TILE_Q), tl.arange(0, D)
            if IS_SOFTMAX:
                tl.store(sums + at * 2 * FEW + row, peak * unit, mask=row < queries)
                tl.store(sums + (at * 2 + 1) * FEW + row, total, mask=row < queries)
            inside = (row < queries)[:, None] & (column < WIDTH)[None, :]
            here = parts + at * FEW * WIDTH + row[:, None] * WIDTH + column[None, :]
            tl.store(here, acc, mask=inside)
            return
    line = head.to(tl.int64) * tokens + first_q + rows
    if IS_SOFTMAX:
        acc = finish(acc, peak * unit, total, lse + line, rows < queries)
    out_at = o + (first_q.to(tl.int64) * heads + head) * WIDTH
    store_rows(out_at, first, queries, heads * WIDTH, acc, WIDTH, INTEGER)


@triton.jit(do_not_specialize=["batch", "tokens", "left", "right", "size"])
def combine(
    parts,
    sums,
    o,
    lse,
    cu_q,
    cu_k,
    starts,
    owners,
    batch,
    tokens,
    heads,
    left,
    right,
    size,
    MASK: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    FEW: tl.constexpr,
    TILE_K: tl.constexpr,
    CHUNK: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """o and lse of one head of one sequence a program, from what the chunks of `attend` left.

    starts, owners: the list of the sequences that are split, for a program a place; or None.
    """
    IS_SOFTMAX: tl.constexpr = KIND == "softmax" or KIND == "softmax, scaled"
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    if owners is not None:
        entry = sequence
        if entry >= tl.load(starts + batch):
            return
        sequence = tl.load(owners + entry)
        if entry != tl.load(starts + sequence):
            return
    first_q = tl.load(cu_q + sequence)
    queries = tl.load(cu_q + sequence + 1) - first_q
    first_k = tl.load(cu_k + sequence)
    keys = tl.load(cu_k + sequence + 1) - first_k
    if (queries == 0) | (queries > FEW) | (keys <= CHUNK):
        return
    rows, column = tl.arange(0, FEW), tl.arange(0, D)
    low_first, high_first = key_range(0, queries, keys, left, right, size, MASK)
    low_last, high_last = key_range(queries - 1, queries, keys, left, right, size, MASK)
    start, _, _, end = stretch(low_first, high_first, low_last, high_last, TILE_K)
    inside = (rows < queries)[:, None] & (column < WIDTH)[None, :]
    acc = tl.zeros((FEW, D), tl.float32)
    total = tl.zeros((FEW,), tl.float32)
    peak = tl.full((FEW,), LOWEST, tl.float32)
    chunk = start // CHUNK
    while chunk * CHUNK < end:
        at = slot_of(first_k, chunk, CHUNK) * heads + head
        here = parts + at * FEW * WIDTH + rows[:, None] * WIDTH + column[None, :]
        part = tl.load(here, mask=inside, other=0.0)
        if IS_SOFTMAX:
            one = tl.load(sums + at * 2 * FEW + rows, mask=rows < queries, other=LOWEST)
            below = tl.load(sums + (at * 2 + 1) * FEW + rows, mask=rows < queries, other=0.0)
            higher = tl.maximum(peak, one)
            shrink, weight = tl.exp2(peak - higher), tl.exp2(one - higher)
            total = total * shrink + below * weight
            acc = acc * shrink[:, None] + part * weight[:, None]
            peak = higher
        else:
            acc += part
        chunk += 1
    line = head.to(tl.int64) * tokens + first_q + rows
    if IS_SOFTMAX:
        acc = finish(acc, peak, total, lse + line, rows < queries)
    out_at = o + (first_q.to(tl.int64) * heads + head) * WIDTH
    store_rows(out_at, 0, queries, heads * WIDTH, acc, WIDTH, INTEGER)
