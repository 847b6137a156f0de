# mypy: ignore-errors
# Bodies of @gluon.jit functions are Triton's language, not typed Python.
"""Backward attention on Hopper's asynchronous products, in Gluon; S and dP also of E4M3 operands.

As in attention_gradients one kernel keeps a tile of 128 keys and sees queries go by, the other
keeps 128 queries and sees keys go by, so that every sum has one order. As in attention_stream one
warp copies, and two groups of four warps take 64 rows each.

With codes of the operands of S or dP, in E4M3 with one scale for each 128 tokens of a head, as
attention_round writes them, dense, S or dP is a product of codes. What no other product reads, its
own side of S and dP and all of v, a kernel has as codes alone; of the rest it copies both. Codes of
the next sequence are finite: p hides them, where values have to be made zero.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lowprec.backends.triton_kernels.attention_stream import ROWS, ring, signals
from lowprec.backends.triton_kernels.attention_stream_parts import (
    expect,
    fetch,
    next_slot,
    place_of,
    product_layout,
    scales_of,
    store_rows,
    zero_rows,
)
from lowprec.backends.triton_kernels.attention_weights import LOG2E, exp2

STEP_Q = gl.constexpr(64)


@gluon.jit
def _first_query(first, keys, queries, CAUSAL: gl.constexpr):
    """The first tile of STEP_Q queries that sees the key at `first` or a later one."""
    start = 0
    if CAUSAL:
        start = gl.minimum(gl.maximum(first - (keys - queries), 0), queries) // STEP_Q
    return start


@gluon.jit
def _copy_queries(
    sources,
    buffers,
    barriers,
    rows_of,
    lists,
    sizes,
    columns,
    CAUSAL: gl.constexpr,
    TILE_K: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The copying warp of keys_stream: one tile of keys and values, then all queries and dO."""
    BOTH: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    kept, passing = sources
    q_at, k_at, v_at, do_at, q_codes_at, do_codes_at, rows_at = buffers
    kept_full, kept_empty, full, empty = barriers
    values, tiles = rows_of
    batch, shared_heads, group = sizes
    q_head, k_head, v_head, do_head = columns
    starts, _owners, cu_q, cu_k = lists
    total = gl.load(starts + batch) * shared_heads
    turn, slot, phase = 0, 0, 0
    step = gl.num_programs(0)
    coming = place_of(gl.program_id(0), total, lists, cu_k, cu_q, shared_heads)
    for item in range(gl.program_id(0), total, step):
        sequence, shared, tile, first_k, keys, first_q, queries = coming
        coming = place_of(item + step, total, lists, cu_k, cu_q, shared_heads)
        mbarrier.wait(kept_empty.index(0), (turn & 1) ^ 1)
        expect(kept_full.index(0), kept, 2)
        for half in gl.static_range(2):
            row = first_k + tile * TILE_K + half * ROWS
            kept_columns = (shared * k_head, shared * v_head)
            fetch(kept, kept_columns, row, kept_full.index(0), (k_at, v_at), half)
        turn += 1  # noqa: SIM113 (Triton has no enumerate)
        start = _first_query(tile * TILE_K, keys, queries, CAUSAL)
        steps = gl.cdiv(queries, STEP_Q) - start
        for one in range(group * steps):
            head = shared * group + one // steps
            m = start + steps - 1 - one % steps
            mbarrier.wait(empty.index(slot), phase ^ 1)
            columns_here = (head * q_head, head * do_head, head * D, head * D)
            at = (head * tiles + first_q // STEP_Q + sequence + m) * (2 * STEP_Q)
            async_copy.async_copy_global_to_shared(
                rows_at.index(slot), values + at + gl.arange(0, 2 * STEP_Q, BOTH)
            )
            async_copy.mbarrier_arrive(full.index(slot))
            expect(full.index(slot), passing, 1)
            row, places = first_q + m * STEP_Q, (q_at, do_at, q_codes_at, do_codes_at)
            fetch(passing, columns_here, row, full.index(slot), places, slot)
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _keys(
    buffers,
    barriers,
    outputs,
    lists,
    sizes,
    scales,
    HALF: gl.constexpr,
    CAUSAL: gl.constexpr,
    TILE_K: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A group of four warps: keys HALF * 64 .. HALF * 64 + 63 of each tile."""
    q_at, k_at, v_at, do_at, q_codes_at, do_codes_at, rows_at = buffers
    S_OF_CODES: gl.constexpr = q_codes_at is not None
    DP_OF_CODES: gl.constexpr = do_codes_at is not None
    OF_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_Q, 16])
    OF_QK: gl.constexpr = product_layout(STEP_Q, S_OF_CODES)
    OF_OV: gl.constexpr = product_layout(STEP_Q, DP_OF_CODES)
    OF_D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OF_P: gl.constexpr = gl.DotOperandLayout(0, OF_D, 2)
    s_queries_at = q_codes_at if S_OF_CODES else q_at
    dp_queries_at = do_codes_at if DP_OF_CODES else do_at
    kept_full, kept_empty, full, empty = barriers
    dk, dv = outputs
    scale, scales_q, scales_k, scales_v, scales_do, q_tiles, k_tiles = scales
    batch, shared_heads, group = sizes
    starts, _owners, cu_q, cu_k = lists
    total = gl.load(starts + batch) * shared_heads
    of_row = gl.arange(0, STEP_Q, gl.SliceLayout(0, OF_S))
    own = gl.arange(0, ROWS, gl.SliceLayout(1, OF_S))
    zero_s = gl.zeros((ROWS, STEP_Q), gl.float32, OF_QK)
    zero_dp = gl.zeros((ROWS, STEP_Q), gl.float32, OF_OV)
    unit = scale * LOG2E
    turn, slot, phase = 0, 0, 0
    step = gl.num_programs(0)
    coming = place_of(gl.program_id(0), total, lists, cu_k, cu_q, shared_heads)
    for item in range(gl.program_id(0), total, step):
        sequence, shared, tile, first_k, keys, first_q, queries = coming
        coming = place_of(item + step, total, lists, cu_k, cu_q, shared_heads)
        first = tile * TILE_K + HALF * ROWS
        acc_k = gl.zeros((ROWS, D), gl.float32, OF_D)
        acc_v = gl.zeros((ROWS, D), gl.float32, OF_D)
        start = _first_query(tile * TILE_K, keys, queries, CAUSAL)
        steps = gl.cdiv(queries, STEP_Q) - start
        mbarrier.wait(kept_full.index(0), turn & 1)
        turn += 1  # noqa: SIM113 (Triton has no enumerate)
        key_unit = unit
        if S_OF_CODES:
            key_unit *= gl.load(scales_of(scales_k, k_tiles, shared, first_k, sequence) + tile)
        if DP_OF_CODES:
            value_unit = gl.load(scales_of(scales_v, k_tiles, shared, first_k, sequence) + tile)
        for one in range(group):
            head = shared * group + one
            if S_OF_CODES:
                at_q = scales_of(scales_q, q_tiles, head, first_q, sequence)
            if DP_OF_CODES:
                at_do = scales_of(scales_do, q_tiles, head, first_q, sequence)
            if steps > 0 and queries % STEP_Q != 0:
                # Rows of the next sequence: they may not even add 0 times Inf.
                mbarrier.wait(full.index(slot), phase)
                zero_rows(q_at.index(slot), queries % STEP_Q, D)
                zero_rows(do_at.index(slot), queries % STEP_Q, D)
                fence_async_shared()
            for j in range(steps):
                mbarrier.wait(full.index(slot), phase)
                s = warpgroup_mma(
                    k_at.index(HALF), s_queries_at.index(slot).permute((1, 0)), zero_s,
                    use_acc=False, is_async=True,
                )  # fmt: skip
                dp = warpgroup_mma(
                    v_at.index(HALF), dp_queries_at.index(slot).permute((1, 0)), zero_dp,
                    use_acc=False, is_async=True,
                )  # fmt: skip
                step_unit = key_unit
                here = (start + steps - 1 - j) * STEP_Q // (2 * ROWS)
                if S_OF_CODES:
                    step_unit *= gl.load(at_q + here)
                if DP_OF_CODES:
                    dp_unit = value_unit * gl.load(at_do + here)
                s = gl.convert_layout(warpgroup_mma_wait(1, deps=[s]), OF_S, assert_trivial=True)
                if CAUSAL:
                    rows = (start + steps - 1 - j) * STEP_Q + of_row
                    seen = gl.expand_dims(first + own, 1) <= gl.expand_dims(
                        rows + (keys - queries), 0
                    )
                    s = gl.where(seen, s, float("-inf"))
                power = rows_at.index(slot).slice(0, STEP_Q).load(gl.SliceLayout(0, OF_S))
                p = exp2(s * step_unit - gl.expand_dims(power, 0))
                left = gl.convert_layout(p.to(gl.bfloat16), OF_P)
                later = warpgroup_mma(left, do_at.index(slot), acc_v, is_async=True)
                dp = gl.convert_layout(warpgroup_mma_wait(1, deps=[dp]), OF_S, assert_trivial=True)
                if DP_OF_CODES:
                    dp *= dp_unit
                mean = rows_at.index(slot).slice(STEP_Q, STEP_Q).load(gl.SliceLayout(0, OF_S))
                ds = p * (dp - gl.expand_dims(mean, 0))
                left = gl.convert_layout(ds.to(gl.bfloat16), OF_P)
                last = warpgroup_mma(left, q_at.index(slot), acc_k, is_async=True)
                acc_v, acc_k = warpgroup_mma_wait(0, deps=[later, last])
                mbarrier.arrive(empty.index(slot), count=1)
                slot, phase = next_slot(slot, phase, STAGES)
        mbarrier.arrive(kept_empty.index(0), count=1)
        at = (first_k.to(gl.int64) * shared_heads + shared) * D
        store_rows(dv + at, shared_heads * D, first, keys, acc_v, D)
        store_rows(dk + at, shared_heads * D, first, keys, acc_k * scale, D)


@gluon.jit(do_not_specialize=["batch", "tiles", "q_tiles", "k_tiles"])
def keys_stream(
    q, k, v, do, codes_q, codes_do, scales_q, scales_k, scales_v, scales_do, q_tiles, k_tiles,
    dk, dv, rows_of, cu_q, cu_k, starts, owners,
    batch, tiles, shared_heads, group, q_head, k_head, v_head, do_head, scale,
    CAUSAL: gl.constexpr, TILE_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv [tokens, shared_heads, D] bf16 of tiles of 128 keys, over the heads of a group.

    q, k, v, do: descriptors of [tokens, columns] bf16; rows_of as prepare_tiles leaves it, `tiles`
    a head. codes_q, or None: a descriptor of the codes of q; k is of codes then too, and scales are
    float32 [heads, tiles]. codes_do and v likewise.
    """
    q_at, do_at = ring(q, STAGES), ring(do, STAGES)
    k_at, v_at = ring(k, 2), ring(v, 2)
    rows_at = gl.allocate_shared_memory(
        gl.float32, [STAGES, 2 * STEP_Q], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    kept_full, kept_empty = signals(1, 1), signals(1, 2)
    full, empty = signals(STAGES, 1), signals(STAGES, 2)
    fence_async_shared()
    q_codes_at, do_codes_at = codes_q, codes_do
    if codes_q is not None:
        q_codes_at = ring(codes_q, STAGES)
    if codes_do is not None:
        do_codes_at = ring(codes_do, STAGES)
    buffers = (q_at, k_at, v_at, do_at, q_codes_at, do_codes_at, rows_at)
    barriers = (kept_full, kept_empty, full, empty)
    scales = (scale, scales_q, scales_k, scales_v, scales_do, q_tiles, k_tiles)
    lists, sizes = (starts, owners, cu_q, cu_k), (batch, shared_heads, group)
    outputs, rows = (dk, dv), (rows_of, tiles)
    columns = (q_head, k_head, v_head, do_head)
    gl.warp_specialize(
        [
            (_keys, (buffers, barriers, outputs, lists, sizes, scales, 0, CAUSAL, TILE_K,
                     D, STAGES)),
            (_keys, (buffers, barriers, outputs, lists, sizes, scales, 1, CAUSAL, TILE_K,
                     D, STAGES)),
            (_copy_queries, (((k, v, None, None), (q, do, codes_q, codes_do)), buffers, barriers,
                             rows, lists, sizes, columns, CAUSAL, TILE_K, D, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _last_key(first, keys, queries, CAUSAL: gl.constexpr, TILE_Q: gl.constexpr):
    """How many keys the tile of queries at `first` sees."""
    high = keys
    if CAUSAL:
        last = gl.minimum(first + TILE_Q, queries)
        high = gl.minimum(gl.maximum(last + keys - queries, 0), keys)
    return high


@gluon.jit
def _copy_keys(
    sources,
    buffers,
    barriers,
    lists,
    sizes,
    columns,
    CAUSAL: gl.constexpr,
    STEP_K: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The copying warp of queries_stream: one tile of queries and dO, then all keys and values."""
    kept, passing = sources
    q_at, k_at, v_at, do_at, k_codes_at = buffers
    kept_full, kept_empty, full, empty = barriers
    batch, heads, group = sizes
    q_head, k_head, v_head, do_head = columns
    starts, _owners, cu_q, cu_k = lists
    total = gl.load(starts + batch) * heads
    turn, slot, phase = 0, 0, 0
    step = gl.num_programs(0)
    coming = place_of(gl.program_id(0), total, lists, cu_q, cu_k, heads)
    for item in range(gl.program_id(0), total, step):
        _sequence, head, tile, first_q, queries, first_k, keys = coming
        coming = place_of(item + step, total, lists, cu_q, cu_k, heads)
        mbarrier.wait(kept_empty.index(0), (turn & 1) ^ 1)
        expect(kept_full.index(0), kept, 2)
        for half in gl.static_range(2):
            row = first_q + tile * (2 * ROWS) + half * ROWS
            kept_columns = (head * q_head, head * do_head)
            fetch(kept, kept_columns, row, kept_full.index(0), (q_at, do_at), half)
        turn += 1  # noqa: SIM113 (Triton has no enumerate)
        steps = gl.cdiv(_last_key(tile * 2 * ROWS, keys, queries, CAUSAL, 2 * ROWS), STEP_K)
        shared = head // group
        for j in range(steps):
            n = steps - 1 - j
            mbarrier.wait(empty.index(slot), phase ^ 1)
            columns_here = (shared * k_head, shared * v_head, shared * D, 0)
            expect(full.index(slot), passing, 1)
            row, places = first_k + n * STEP_K, (k_at, v_at, k_codes_at)
            fetch(passing, columns_here, row, full.index(slot), places, slot)
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _queries(
    buffers,
    barriers,
    dq,
    rows_of,
    lists,
    sizes,
    scales,
    HALF: gl.constexpr,
    CAUSAL: gl.constexpr,
    STEP_K: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A group of four warps: queries HALF * 64 .. HALF * 64 + 63 of each tile."""
    q_at, k_at, v_at, do_at, k_codes_at = buffers
    kept_full, kept_empty, full, empty = barriers
    values, tiles = rows_of
    scale, scales_q, scales_k, scales_v, scales_do, q_tiles, k_tiles = scales
    S_OF_CODES: gl.constexpr = k_codes_at is not None
    DP_OF_CODES: gl.constexpr = scales_do is not None
    OF_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP_K, 16])
    OF_QK: gl.constexpr = product_layout(STEP_K, S_OF_CODES)
    OF_OV: gl.constexpr = product_layout(STEP_K, DP_OF_CODES)
    OF_D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OF_P: gl.constexpr = gl.DotOperandLayout(0, OF_D, 2)
    s_keys_at = k_codes_at if S_OF_CODES else k_at
    batch, heads, group = sizes
    starts, _owners, cu_q, cu_k = lists
    total = gl.load(starts + batch) * heads
    own = gl.arange(0, ROWS, gl.SliceLayout(1, OF_S))
    column = gl.arange(0, STEP_K, gl.SliceLayout(0, OF_S))
    zero_s = gl.zeros((ROWS, STEP_K), gl.float32, OF_QK)
    zero_dp = gl.zeros((ROWS, STEP_K), gl.float32, OF_OV)
    unit = scale * LOG2E
    turn, slot, phase = 0, 0, 0
    step = gl.num_programs(0)
    coming = place_of(gl.program_id(0), total, lists, cu_q, cu_k, heads)
    for item in range(gl.program_id(0), total, step):
        sequence, head, tile, first_q, queries, first_k, keys = coming
        coming = place_of(item + step, total, lists, cu_q, cu_k, heads)
        first = tile * (2 * ROWS) + HALF * ROWS
        rows = first + own
        place_of_rows = head * tiles + first_q // ROWS + sequence + tile * 2 + HALF
        at = values + place_of_rows * (2 * ROWS) + own
        power, mean = gl.load(at), gl.load(at + ROWS)
        acc = gl.zeros((ROWS, D), gl.float32, OF_D)
        high = _last_key(tile * 2 * ROWS, keys, queries, CAUSAL, 2 * ROWS)
        steps = gl.cdiv(high, STEP_K)
        query_unit = unit
        if S_OF_CODES:
            query_unit *= gl.load(scales_of(scales_q, q_tiles, head, first_q, sequence) + tile)
            at_k = scales_of(scales_k, k_tiles, head // group, first_k, sequence)
        if DP_OF_CODES:
            do_unit = gl.load(scales_of(scales_do, q_tiles, head, first_q, sequence) + tile)
            at_v = scales_of(scales_v, k_tiles, head // group, first_k, sequence)
        mbarrier.wait(kept_full.index(0), turn & 1)
        turn += 1  # noqa: SIM113 (Triton has no enumerate)
        if steps * STEP_K > keys:
            # Keys of the next sequence: as zeros their dP is zero, and what they add is too.
            mbarrier.wait(full.index(slot), phase)
            zero_rows(k_at.index(slot), keys % STEP_K, D)
            if not DP_OF_CODES:
                zero_rows(v_at.index(slot), keys % STEP_K, D)
            fence_async_shared()
        for j in range(steps):
            n = (steps - 1 - j) * STEP_K
            mbarrier.wait(full.index(slot), phase)
            s = warpgroup_mma(
                q_at.index(HALF), s_keys_at.index(slot).permute((1, 0)), zero_s,
                use_acc=False, is_async=True,
            )  # fmt: skip
            dp = warpgroup_mma(
                do_at.index(HALF), v_at.index(slot).permute((1, 0)), zero_dp,
                use_acc=False, is_async=True,
            )  # fmt: skip
            step_unit = query_unit
            if S_OF_CODES:
                step_unit *= gl.load(at_k + n // (2 * ROWS))
            if DP_OF_CODES:
                dp_unit = do_unit * gl.load(at_v + n // (2 * ROWS))
            s = gl.convert_layout(warpgroup_mma_wait(1, deps=[s]), OF_S, assert_trivial=True)
            seen = gl.expand_dims(n + column, 0) < keys
            if CAUSAL:
                seen &= gl.expand_dims(n + column, 0) <= gl.expand_dims(rows + (keys - queries), 1)
            s = gl.where(seen, s, float("-inf"))
            p = exp2(s * step_unit - gl.expand_dims(power, 1))
            dp = gl.convert_layout(warpgroup_mma_wait(0, deps=[dp]), OF_S, assert_trivial=True)
            if DP_OF_CODES:
                dp *= dp_unit
            ds = p * (dp - gl.expand_dims(mean, 1))
            left = gl.convert_layout(ds.to(gl.bfloat16), OF_P)
            acc = warpgroup_mma(left, k_at.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(slot), count=1)
            slot, phase = next_slot(slot, phase, STAGES)
        mbarrier.arrive(kept_empty.index(0), count=1)
        at = (first_q.to(gl.int64) * heads + head) * D
        store_rows(dq + at, heads * D, first, queries, acc * scale, D)


@gluon.jit(do_not_specialize=["batch", "tiles", "q_tiles", "k_tiles"])
def queries_stream(
    q, k, v, do, codes_k, scales_q, scales_k, scales_v, scales_do, q_tiles, k_tiles,
    dq, rows_of, cu_q, cu_k, starts, owners,
    batch, tiles, heads, group, q_head, k_head, v_head, do_head, scale,
    CAUSAL: gl.constexpr, STEP_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dq [tokens, heads, D] bf16 of tiles of 128 queries; arguments as of keys_stream.

    codes_k, or None: those of k, and q is of codes then too. With scales_v and scales_do v and do
    are of codes.
    """
    q_at, do_at = ring(q, 2), ring(do, 2)
    k_at, v_at = ring(k, STAGES), ring(v, STAGES)
    kept_full, kept_empty = signals(1, 1), signals(1, 2)
    full, empty = signals(STAGES, 1), signals(STAGES, 2)
    fence_async_shared()
    buffers = (q_at, k_at, v_at, do_at, codes_k)
    if codes_k is not None:
        buffers = (q_at, k_at, v_at, do_at, ring(codes_k, STAGES))
    barriers = (kept_full, kept_empty, full, empty)
    scales = (scale, scales_q, scales_k, scales_v, scales_do, q_tiles, k_tiles)
    lists, sizes = (starts, owners, cu_q, cu_k), (batch, heads, group)
    columns = (q_head, k_head, v_head, do_head)
    rows = (rows_of, tiles)
    gl.warp_specialize(
        [
            (_queries, (buffers, barriers, dq, rows, lists, sizes, scales, 0, CAUSAL, STEP_K, D,
                        STAGES)),
            (_queries, (buffers, barriers, dq, rows, lists, sizes, scales, 1, CAUSAL, STEP_K, D,
                        STAGES)),
            (_copy_keys, (((q, do, None, None), (k, v, codes_k, None)), buffers, barriers, lists,
                          sizes, columns, CAUSAL, STEP_K, D, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
