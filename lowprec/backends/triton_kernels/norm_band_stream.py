# mypy: ignore-errors
# Bodies of @gluon.jit functions are Triton's language, not typed Python.
"""A norm of bf16 rows and both casts of its result to blocks of 32, in one read, in Gluon.

A program walks over bands of 32 rows, whose tiles wait in a ring of shared memory until the
statistics are known. A tile is then read down its columns, where a thread has the parameters of its
two columns once for all rows, normalized, cast, and left in its slot as bf16 for the cast by row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from lowprec.backends.triton_kernels.barriers import thread_barrier
from lowprec.backends.triton_kernels.pairs import (
    affine,
    cast_pairs,
    column_scales,
    encode_columns,
    halves,
    joined,
    parameters,
)


@gluon.jit
def _fetch(source, ring, ready, tile, limit, TILES: gl.constexpr, SLOTS: gl.constexpr):
    """Start the copy of this program's tile-th tile into its slot, if there is such a tile."""
    TILE_P: gl.constexpr = source.block_type.shape[1]
    band = gl.program_id(0) + (tile // TILES) * gl.num_programs(0)
    wanted = band < limit
    slot = tile % SLOTS
    barrier = ready.index(slot)
    mbarrier.expect(barrier, source.block_type.nbytes, pred=wanted)
    at = [band * 32, (tile % TILES) * TILE_P]
    tma.async_copy_global_to_shared(source, at, barrier, ring.index(slot), pred=wanted)


@gluon.jit
def _sums(values):
    """Sums [32, P / 16] over runs of 16 pairs that a thread has."""
    return gl.sum(gl.reshape(values, (32, values.shape[1] // 16, 16)), 2)


@gluon.jit
def _squares(one, two):
    return gl.fma(one, one, two * two)


@gluon.jit(do_not_specialize=["row_units", "bands"])
def norm_bands_streamed(
    source,
    codes,
    codes_t,
    scales,
    scales_t,
    weight,
    bias,
    mean,
    rstd,
    row_units,
    bands,
    eps,
    share,
    ROW_UNIT: gl.constexpr,
    COLS: gl.constexpr,
    CENTERED: gl.constexpr,
    ROW: gl.constexpr,
    COLUMN: gl.constexpr,
    SLOTS: gl.constexpr,
    OUTS: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Normalize [rows, COLS] and cast it by row and by column; see norm.norm_bands.

    source: descriptor of [32, TILE_P] tiles of pairs, which divide a row; codes (int16, two each)
    and codes_t (bytes) of what a tile becomes. Scales are E8M0, scales_t two to an int16.
    SPLIT: threads that share a column.
    """
    TILE_P: gl.constexpr = source.block_type.shape[1]
    TILES: gl.constexpr = COLS // 2 // TILE_P
    WARPS: gl.constexpr = gl.num_warps()
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [1, WARPS], [1, 0])
    BY_COLUMN: gl.constexpr = gl.BlockedLayout(
        [32 // SPLIT, 1], [SPLIT, 32 // SPLIT], [1, WARPS], [1, 0]
    )
    ROWS_R: gl.constexpr = gl.SliceLayout(1, BY_ROW)
    ROWS_C: gl.constexpr = gl.SliceLayout(1, BY_COLUMN)
    COLS_C: gl.constexpr = gl.SliceLayout(0, BY_COLUMN)
    ELEMENT: gl.constexpr = COLUMN[0]
    RULE: gl.constexpr = COLUMN[1]
    rows = row_units * ROW_UNIT
    ring = gl.allocate_shared_memory(gl.int32, [SLOTS, 32, TILE_P], source.layout)
    out = gl.allocate_shared_memory(gl.int16, [OUTS, 32, TILE_P], codes.layout)
    out_t = gl.allocate_shared_memory(gl.int8, [OUTS, 2 * TILE_P, 32], codes_t.layout)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    thread_barrier()
    for s in gl.static_range(SLOTS):
        _fetch(source, ring, ready, s, bands, TILES, SLOTS)
    first = 0
    for band in range(gl.program_id(0), bands, gl.num_programs(0)):
        first_r = band * 32
        total = 0.0
        for t in gl.static_range(TILES):
            tile = first + t
            mbarrier.wait(ready.index(tile % SLOTS), (tile // SLOTS) & 1)
            one, two = halves(ring.index(tile % SLOTS).load(BY_ROW))
            total += _sums(one + two) if CENTERED else _sums(_squares(one, two))
        if CENTERED:
            middle = gl.sum(total, 1) * share
            middle_r = gl.convert_layout(middle, ROWS_R)
            middle_c = gl.convert_layout(middle, ROWS_C)
            total = 0.0
            for t in gl.static_range(TILES):
                one, two = halves(ring.index((first + t) % SLOTS).load(BY_ROW))
                one = one - gl.expand_dims(middle_r, 1)
                two = two - gl.expand_dims(middle_r, 1)
                total += _sums(_squares(one, two))
        factor = gl.rsqrt(gl.sum(total, 1) * share + eps)
        r = first_r + gl.arange(0, 32, factor.type.layout)
        gl.store(rstd + r, factor, mask=r < rows)
        if CENTERED:
            gl.store(mean + r, middle, mask=r < rows)
        factor_c = gl.convert_layout(factor, ROWS_C)
        for t in range(TILES):
            tile = first + t
            slot = ring.index(tile % SLOTS)
            side = tile % OUTS
            first_p = t * TILE_P
            p = first_p + gl.arange(0, TILE_P, COLS_C)
            w_1, w_2, b_1, b_2 = None, None, None, None
            if weight is not None:
                w_1, w_2 = parameters(weight, p, COLS // 2)
            if bias is not None:
                b_1, b_2 = parameters(bias, p, COLS // 2)
            left, right = halves(slot.load(BY_COLUMN))
            if CENTERED:
                left = left - gl.expand_dims(middle_c, 1)
                right = right - gl.expand_dims(middle_c, 1)
            left, right = affine(left, right, factor_c, w_1, w_2, b_1, b_2)
            pairs = joined(left, right, False)
            if bias is not None and first_r + 32 > rows:
                inside = first_r + gl.arange(0, 32, ROWS_C) < rows
                pairs = gl.where(gl.expand_dims(inside, 1), pairs, 0)
            slot.store(pairs)
            # Whatever leaves out[side] was started before the last tile's codes.
            tma.store_wait(2 * (OUTS - 1))
            thread_barrier()
            by_row = slot.load(BY_ROW)
            byte_1, byte_2, multipliers, keep_1, keep_2 = column_scales(pairs, ELEMENT, RULE)
            spread, _ = gl.broadcast(gl.expand_dims(multipliers, 0), pairs)
            kept_1, _ = gl.broadcast(gl.expand_dims(keep_1, 0), pairs)
            kept_2, _ = gl.broadcast(gl.expand_dims(keep_2, 0), pairs)
            down_1, down_2 = encode_columns(pairs, spread, kept_1, kept_2, ELEMENT)
            turned = gl.permute(gl.join(down_1, down_2), (1, 2, 0))
            out_t.index(side).store(gl.reshape(turned, (2 * TILE_P, 32)))
            both = (byte_1 | (byte_2 << 8)).to(gl.int16)
            gl.store(scales_t + band.to(gl.int64) * (COLS // 2) + p, both)
            straight, biased = cast_pairs(by_row, ROW, False)
            out.index(side).store(straight)
            SCALES: gl.constexpr = biased.type.layout
            b = first_p // 16 + gl.arange(0, TILE_P // 16, gl.SliceLayout(0, SCALES))
            own = first_r + gl.arange(0, 32, gl.SliceLayout(1, SCALES))
            to = scales + gl.expand_dims(b.to(gl.int64) * rows, 0) + gl.expand_dims(own, 1)
            gl.store(to, biased.to(gl.uint8), mask=gl.expand_dims(own < rows, 1))
            fence_async_shared()
            thread_barrier()
            tma.async_copy_shared_to_global(codes_t, [2 * first_p, first_r], out_t.index(side))
            tma.async_copy_shared_to_global(codes, [first_r, first_p], out.index(side))
            _fetch(source, ring, ready, tile + SLOTS, bands, TILES, SLOTS)
        first += TILES
    tma.store_wait(0)
