# mypy: ignore-errors
# Bodies of @gluon.jit functions are Triton's language, not typed Python.
"""Forward attention on Hopper's asynchronous products, in Gluon: bf16 operands, or E4M3.

One program a processor walks over tiles of 128 queries. One warp copies: q once, then tiles of
keys and values into two rings of shared memory, also those of the next tile of queries while the
last is finished. Two groups of four warps take 64 queries each; in each the scores of the next
tile are computed while the exponentials of this one are taken and its values are added up. Keys go
from the last tile to the first, so that only what comes first needs a mask.

E4M3 operands are those of attention_fp8.encode_pair with TURN "for registers": in that order of
tokens the codes of P are already where the product reads them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lowprec.backends.triton_kernels.attention_weights import LOG2E, operand, packed, weights

LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1.0e30)
ROWS = gl.constexpr(64)


@gluon.jit
def ring(source, SLOTS: gl.constexpr):
    """Shared memory for SLOTS tiles of a descriptor."""
    ROWS_OF_IT: gl.constexpr = source.block_type.shape[0]
    COLUMNS: gl.constexpr = source.block_type.shape[1]
    return gl.allocate_shared_memory(source.dtype, [SLOTS, ROWS_OF_IT, COLUMNS], source.layout)


@gluon.jit
def signals(SLOTS: gl.constexpr, COUNT: gl.constexpr):
    """A barrier for each slot, each waiting for COUNT arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(found.index(i), count=COUNT)
    return found


@gluon.jit
def place(item, lists, cu_rows, heads):
    """Sequence, head and tile of 128 rows of an item, the sequence's first row and its rows.

    Of an item below 0, which is none, the first sequence.
    """
    starts, owners, _cu_q, _cu_k = lists
    sequence = gl.load(owners + item // heads, mask=item >= 0, other=0)
    first = gl.load(cu_rows + sequence)
    rows = gl.load(cu_rows + sequence + 1) - first
    tiles = gl.maximum(gl.cdiv(rows, 2 * ROWS), 1)
    inside = gl.maximum(item, 0) - gl.load(starts + sequence) * heads
    return sequence, inside // tiles, inside % tiles, first, rows


@gluon.jit
def _place(item, lists, heads, CAUSAL: gl.constexpr, TILE_K: gl.constexpr):
    """(sequence, head, tile, first query, queries, first key, keys, end, clear) of an item.

    `end` tiles of keys are looped over, the first `clear` of them are seen whole by every row.
    """
    _starts, _owners, cu_q, cu_k = lists
    sequence, head, tile, first_q, queries = place(item, lists, cu_q, heads)
    first_k = gl.load(cu_k + sequence)
    keys = gl.load(cu_k + sequence + 1) - first_k
    high, low = keys, keys
    if CAUSAL:
        # The last tiles see the most keys.
        tile = gl.maximum(gl.cdiv(queries, 2 * ROWS), 1) - 1 - tile
        low = gl.minimum(gl.maximum(tile * 2 * ROWS + 1 + keys - queries, 0), keys)
        last = gl.minimum((tile + 1) * 2 * ROWS, queries)
        high = gl.minimum(gl.maximum(last + keys - queries, 0), keys)
    end, clear = gl.cdiv(high, TILE_K), low // TILE_K
    return sequence, head, tile, first_q, queries, first_k, keys, end, clear


@gluon.jit
def _copy(
    sources,
    buffers,
    barriers,
    lists,
    sizes,
    columns,
    CAUSAL: gl.constexpr,
    EIGHT: gl.constexpr,
    TOKENS: gl.constexpr,
    TILE_K: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The warp that copies."""
    q, k, v = sources
    q_at, k_at, v_at = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _turns = barriers
    batch, heads, group, q_tiles, k_tiles = sizes
    q_head, k_head, v_head = columns
    starts, _owners, _cu_q, _cu_k = lists
    total = gl.load(starts + batch) * heads
    turn, slot, phase = 0, 0, 0
    step = gl.num_programs(0)
    coming = _place(gl.minimum(gl.program_id(0), total - 1), lists, heads, CAUSAL, TILE_K)
    for item in range(gl.program_id(0), total, step):
        sequence, head, tile, first_q, _queries, first_k, _keys, end, _clear = coming
        coming = _place(gl.minimum(item + step, total - 1), lists, heads, CAUSAL, TILE_K)
        shared = head // group
        if EIGHT:
            row_v = (shared * k_tiles + first_k // TILE_K + sequence) * D
            STEP_V: gl.constexpr = D
            column_v = 0
        else:
            row_v = first_k
            STEP_V: gl.constexpr = TILE_K
            column_v = shared * v_head
        if TOKENS:
            row_q = first_q + tile * (2 * ROWS)
            row_k = first_k
            column_q, column_k = head * q_head, shared * k_head
        else:
            row_q = (head * q_tiles + first_q // (2 * ROWS) + sequence + tile) * (2 * ROWS)
            row_k = (shared * k_tiles + first_k // TILE_K + sequence) * TILE_K
            column_q, column_k = 0, 0
        if end > 0:
            mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(0), 2 * q.block_type.nbytes)
            tma.async_copy_global_to_shared(q, [row_q, column_q], q_full.index(0), q_at.index(0))
            tma.async_copy_global_to_shared(
                q, [row_q + ROWS, column_q], q_full.index(0), q_at.index(1)
            )
            turn += 1
        for j in range(end):
            n = end - 1 - j
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), k.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k, [row_k + n * TILE_K, column_k], k_full.index(slot), k_at.index(slot)
            )
            mbarrier.wait(v_empty.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), v.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v, [row_v + n * STEP_V, column_v], v_full.index(slot), v_at.index(slot)
            )
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def _scores(query, k_at, k_full, k_empty, slot, phase, zero):
    """Scores of the next tile of keys, waited for."""
    mbarrier.wait(k_full.index(slot), phase)
    s = warpgroup_mma(query, k_at.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(slot), count=1)
    return s


@gluon.jit
def _masked(s, n, rows, keys, queries, column, CAUSAL: gl.constexpr, KIND: gl.constexpr):
    """Scores of the n-th tile of keys with those hidden that a row does not see."""
    key = gl.expand_dims(n * s.shape[1] + column, 0)
    seen = key < keys
    if CAUSAL:
        seen &= key <= gl.expand_dims(rows + (keys - queries), 1)
    return gl.where(seen, s, float("-inf") if KIND == "softmax" else 0.0)


@gluon.jit
def _hide(values, valid, D: gl.constexpr):
    """Make zeros of values of the next sequence: they may not even add 0 times Inf."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    if valid < values.shape[0]:
        row = gl.arange(0, values.shape[0], gl.SliceLayout(1, LAYOUT))
        tile = gl.where(gl.expand_dims(row < valid, 1), values.load(LAYOUT), 0.0)
        values.store(tile)
        fence_async_shared()


@gluon.jit
def _summed(codes, values, acc, EIGHT: gl.constexpr, layout: gl.constexpr):
    """Start adding P V to acc; values turned where they are codes."""
    if EIGHT:
        values = values.permute((1, 0))
    return warpgroup_mma(operand(codes, EIGHT, layout), values, acc, is_async=True)


@gluon.jit
def _attend(
    buffers,
    barriers,
    outputs,
    scales,
    lists,
    sizes,
    scale,
    HALF: gl.constexpr,
    CAUSAL: gl.constexpr,
    KIND: gl.constexpr,
    EIGHT: gl.constexpr,
    FACTOR: gl.constexpr,
    WIDTH: gl.constexpr,
    TILE_K: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A group of four warps: rows HALF * 64 .. HALF * 64 + 63 of each tile of queries."""
    INNER: gl.constexpr = 32 if EIGHT else 16
    OF_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_K, INNER])
    OF_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, INNER])
    OF_P: gl.constexpr = gl.DotOperandLayout(0, OF_O, 4 if EIGHT else 2)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    # bf16 products of wide heads fill the tensor cores alone: they are then the other group's while
    # this one takes exponentials. Shorter products are better waited for after these. Scores that
    # no row adds up take so little time that the groups must be told to take turns.
    APART: gl.constexpr = D == 128 and not EIGHT
    TURNS: gl.constexpr = APART and KIND != "softmax"
    gl.static_assert(KIND == "softmax" or not EIGHT, "weights that lack one factor")
    row_layout: gl.constexpr = gl.SliceLayout(1, OF_S)
    q_at, k_at, v_at = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns = barriers
    batch, heads, group, q_tiles, k_tiles = sizes
    o, lse, tokens = outputs
    scales_q, scales_k, scales_v = scales
    starts, _owners, _cu_q, _cu_k = lists
    total_items = gl.load(starts + batch) * heads
    own = gl.arange(0, ROWS, row_layout)
    column = gl.arange(0, TILE_K, gl.SliceLayout(0, OF_S))
    zero = gl.zeros((ROWS, TILE_K), gl.float32, OF_S)
    turn, slot, phase, mine = 0, 0, 0, 0
    if TURNS and HALF == 0:
        mbarrier.arrive(turns.index(0), count=1)
    step = gl.num_programs(0)
    coming = _place(gl.minimum(gl.program_id(0), total_items - 1), lists, heads, CAUSAL, TILE_K)
    for item in range(gl.program_id(0), total_items, step):
        sequence, head, tile, first_q, queries, first_k, keys, end, clear = coming
        coming = _place(gl.minimum(item + step, total_items - 1), lists, heads, CAUSAL, TILE_K)
        rows = tile * (2 * ROWS) + HALF * ROWS + own
        acc = gl.zeros((ROWS, D), gl.float32, OF_O)
        peak = gl.full((ROWS,), LOWEST, gl.float32, row_layout)
        total = gl.zeros((ROWS,), gl.float32, row_layout)
        query_unit = scale * LOG2E if KIND == "softmax" else scale * 0.5
        value_unit = 1.0
        if EIGHT:
            at_k = scales_k + (head // group) * k_tiles + first_k // TILE_K + sequence
            at_v = scales_v + (head // group) * k_tiles + first_k // TILE_K + sequence
            at_q = scales_q + head * q_tiles + first_q // (2 * ROWS) + sequence + tile
            query_unit *= gl.load(at_q, mask=end > 0, other=1.0)
            value_unit = gl.load(at_v + end - 1, mask=end > 0, other=1.0)
        if end > 0:
            mbarrier.wait(q_full.index(0), turn & 1)
            turn += 1
            # One that is masked, or the last of all, is where the loop of pairs starts.
            begin = gl.minimum(end - 1, clear)
            for j in range(end - 1 - begin if CAUSAL else 0):
                n = end - 1 - j
                s = _scores(q_at.index(HALF), k_at, k_full, k_empty, slot, phase, zero)
                s = _masked(s, n, rows, keys, queries, column, CAUSAL, KIND)
                unit = query_unit
                if EIGHT:
                    unit *= gl.load(at_k + n)
                p, shrink, peak, total = weights(s, unit, peak, total, FACTOR, KIND)
                if EIGHT:
                    new_unit = gl.load(at_v + n)
                    shrink = shrink * (value_unit / new_unit)
                    value_unit = new_unit
                if KIND == "softmax":
                    acc *= gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, OF_O)), 1)
                codes = packed(p, EIGHT)
                mbarrier.wait(v_full.index(slot), phase)
                if not EIGHT:
                    _hide(v_at.index(slot), keys - n * TILE_K, D)
                acc = _summed(codes, v_at.index(slot), acc, EIGHT, OF_P)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_empty.index(slot), count=1)
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
            s = _scores(q_at.index(HALF), k_at, k_full, k_empty, slot, phase, zero)
            s = _masked(s, begin, rows, keys, queries, column, CAUSAL, KIND)
            unit = query_unit
            if EIGHT:
                unit *= gl.load(at_k + begin)
            p, shrink, peak, total = weights(s, unit, peak, total, FACTOR, KIND)
            if EIGHT:
                new_unit = gl.load(at_v + begin)
                shrink = shrink * (value_unit / new_unit)
                value_unit = new_unit
            if CAUSAL and KIND == "softmax":
                acc *= gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, OF_O)), 1)
            codes = packed(p, EIGHT)
            if not EIGHT:  # noqa: SIM102 (a constant, and what lengths decide)
                if (begin + 1) * TILE_K > keys:
                    mbarrier.wait(v_full.index(slot), phase)
                    _hide(v_at.index(slot), keys - begin * TILE_K, D)
            for j in range(1, begin + 1):
                unit = query_unit
                if EIGHT:
                    unit *= gl.load(at_k + begin - j)
                    new_unit = gl.load(at_v + begin - j)
                after, after_phase = slot + 1, phase
                if after == STAGES:
                    after = 0
                    after_phase ^= 1
                mbarrier.wait(k_full.index(after), after_phase)
                if TURNS:
                    mbarrier.wait(turns.index(HALF), mine)
                    mine ^= 1
                s = warpgroup_mma(
                    q_at.index(HALF), k_at.index(after).permute((1, 0)), zero,
                    use_acc=False, is_async=True,
                )  # fmt: skip
                mbarrier.wait(v_full.index(slot), phase)
                later = _summed(codes, v_at.index(slot), acc, EIGHT, OF_P)
                if TURNS:
                    mbarrier.arrive(turns.index(1 - HALF), count=1)
                s = warpgroup_mma_wait(1, deps=[s])
                mbarrier.arrive(k_empty.index(after), count=1)
                if APART:
                    acc = warpgroup_mma_wait(0, deps=[later])
                    mbarrier.arrive(v_empty.index(slot), count=1)
                p, shrink, peak, total = weights(s, unit, peak, total, FACTOR, KIND)
                if EIGHT:
                    shrink = shrink * (value_unit / new_unit)
                    value_unit = new_unit
                if not APART:
                    acc = warpgroup_mma_wait(0, deps=[later])
                    mbarrier.arrive(v_empty.index(slot), count=1)
                if KIND == "softmax":
                    acc *= gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, OF_O)), 1)
                codes = packed(p, EIGHT)
                slot, phase = after, after_phase
            mbarrier.wait(v_full.index(slot), phase)
            acc = _summed(codes, v_at.index(slot), acc, EIGHT, OF_P)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(slot), count=1)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
            mbarrier.arrive(q_empty.index(0), count=1)
        if KIND == "softmax":
            empty = total == 0
            total = gl.where(empty, 1.0, total)
            found = gl.where(empty, float("-inf"), (peak - FACTOR + gl.log2(total)) * LN2)
            gl.store(lse + head.to(gl.int64) * tokens + first_q + rows, found, mask=rows < queries)
            inverse = value_unit / total
            acc *= gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, OF_O)), 1)
        else:
            acc *= query_unit
        r = tile * (2 * ROWS) + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
        c = gl.arange(0, D, gl.SliceLayout(0, OUT))
        at = o + (first_q.to(gl.int64) * heads + head) * WIDTH
        at += gl.expand_dims(r.to(gl.int64) * (heads * WIDTH), 1) + gl.expand_dims(c, 0)
        inside = gl.expand_dims(r < queries, 1) & gl.expand_dims(c < WIDTH, 0)
        gl.store(at, gl.convert_layout(acc.to(gl.bfloat16), OUT), mask=inside)


@gluon.jit(do_not_specialize=["batch", "tokens", "q_tiles", "k_tiles"])
def attend_stream(
    q,
    k,
    v,
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
    heads,
    group,
    q_tiles,
    k_tiles,
    q_head,
    k_head,
    v_head,
    scale,
    CAUSAL: gl.constexpr,
    KIND: gl.constexpr,
    EIGHT: gl.constexpr,
    TOKENS: gl.constexpr,
    FACTOR: gl.constexpr,
    WIDTH: gl.constexpr,
    TILE_K: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """o [tokens, heads, WIDTH] bf16 and lse [heads, tokens] of tiles of 128 queries.

    q, k, v: descriptors of [tokens, columns] bf16, whose heads start at multiples of the *_head
    columns; with EIGHT of codes in whole tiles, and float32 scales [heads, tiles]. TOKENS: q and k
    are [tokens, columns], as bf16 always is. FACTOR: the logarithm to base 2 of what P is
    multiplied by.
    """
    q_at, k_at, v_at = ring(q, 2), ring(k, STAGES), ring(v, STAGES)
    q_full, q_empty = signals(1, 1), signals(1, 2)
    k_full, k_empty = signals(STAGES, 1), signals(STAGES, 2)
    v_full, v_empty = signals(STAGES, 1), signals(STAGES, 2)
    turns = signals(2, 1)
    fence_async_shared()
    buffers = (q_at, k_at, v_at)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turns)
    lists = (starts, owners, cu_q, cu_k)
    sizes = (batch, heads, group, q_tiles, k_tiles)
    outputs, scales = (o, lse, tokens), (scales_q, scales_k, scales_v)
    columns = (q_head, k_head, v_head)
    gl.warp_specialize(
        [
            (_attend, (buffers, barriers, outputs, scales, lists, sizes, scale, 0, CAUSAL, KIND,
                       EIGHT, FACTOR, WIDTH, TILE_K, D, STAGES)),
            (_attend, (buffers, barriers, outputs, scales, lists, sizes, scale, 1, CAUSAL, KIND,
                       EIGHT, FACTOR, WIDTH, TILE_K, D, STAGES)),
            (_copy, ((q, k, v), buffers, barriers, lists, sizes, columns, CAUSAL, EIGHT, TOKENS,
                     TILE_K, D, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
