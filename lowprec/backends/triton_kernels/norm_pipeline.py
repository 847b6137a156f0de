# mypy: ignore-errors
# Bodies of @gluon.jit functions are Triton's language, not typed Python.
"""A norm and both casts of its result in one read of memory, in Gluon.

A program walks over bands of 32 rows. The tiles of a band stay in a ring of shared memory until the
statistics of its rows are known, and are cast from there; each slot that is cast takes in a tile of
the next band, so that memory is never waited for by all programs at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from lowprec.backends.triton_kernels.barriers import thread_barrier
from lowprec.backends.triton_kernels.pipeline import (
    column_layout,
    encode_kept,
    normalized,
    row_layout,
    scaled_values,
    store_scales,
    turned_layout,
)


@gluon.jit
def _fetch(source, ring, ready, tile, limit, TILES: gl.constexpr, SLOTS: gl.constexpr):
    """Start the copy of this program's tile-th tile into its slot, if there is such a tile."""
    TILE_R: gl.constexpr = source.block_type.shape[0]
    TILE_C: gl.constexpr = source.block_type.shape[1]
    band = gl.program_id(0) + (tile // TILES) * gl.num_programs(0)
    wanted = band < limit
    slot = tile % SLOTS
    barrier = ready.index(slot)
    mbarrier.expect(barrier, source.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(
        source,
        [band * TILE_R, (tile % TILES) * TILE_C],
        barrier,
        ring.index(slot),
        pred=wanted,
    )


@gluon.jit
def _row_sums(values, per_thread):
    """Sums over runs of 32 columns, [R, C / 32], added to those of the tiles before."""
    R: gl.constexpr = values.shape[0]
    C: gl.constexpr = values.shape[1]
    return per_thread + gl.sum(gl.reshape(values, (R, C // 32, 32)), 2)


@gluon.jit(do_not_specialize=["row_units", "bands"])
def norm_bands_pipelined(
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
    ITEMSIZE: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Normalize [rows, COLS] and cast it by row and by column; see norm.norm_bands.

    source, codes and codes_t are descriptors of tiles, whose columns divide COLS.
    """
    TILE_R: gl.constexpr = source.block_type.shape[0]
    TILE_C: gl.constexpr = source.block_type.shape[1]
    TILES: gl.constexpr = COLS // TILE_C
    WARPS: gl.constexpr = gl.num_warps()
    BY_ROW: gl.constexpr = row_layout(TILE_R, TILE_C, ITEMSIZE, WARPS)
    BY_COLUMN: gl.constexpr = column_layout(TILE_R, TILE_C, ITEMSIZE, WARPS)
    TURNED: gl.constexpr = turned_layout(TILE_R, TILE_C, ITEMSIZE, WARPS)
    rows = row_units * ROW_UNIT
    ring = gl.allocate_shared_memory(source.dtype, [SLOTS, TILE_R, TILE_C], source.layout)
    out = gl.allocate_shared_memory(gl.uint8, [TILE_R, TILE_C], codes.layout)
    out_t = gl.allocate_shared_memory(gl.uint8, [TILE_C, TILE_R], codes_t.layout)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(SLOTS):
        _fetch(source, ring, ready, s, bands, TILES, SLOTS)
    first = 0
    for band in range(gl.program_id(0), bands, gl.num_programs(0)):
        first_r = band * TILE_R
        for t in gl.static_range(TILES):
            tile = first + t
            slot = tile % SLOTS
            mbarrier.wait(ready.index(slot), (tile // SLOTS) & 1)
            v = ring.index(slot).load(BY_ROW).to(gl.float32)
            if t == 0:
                total = gl.sum(gl.reshape(v * 0.0, (TILE_R, TILE_C // 32, 32)), 2)
            total = _row_sums(v, total) if CENTERED else _row_sums(v * v, total)
        middle = gl.sum(total, 1) * share
        if CENTERED:
            middle_r = gl.convert_layout(middle, gl.SliceLayout(1, BY_ROW))
            for t in gl.static_range(TILES):
                v = ring.index((first + t) % SLOTS).load(BY_ROW).to(gl.float32)
                apart = v - gl.expand_dims(middle_r, 1)
                if t == 0:
                    total = gl.sum(gl.reshape(v * 0.0, (TILE_R, TILE_C // 32, 32)), 2)
                total = _row_sums(apart * apart, total)
            factor = gl.rsqrt(gl.sum(total, 1) * share + eps)
        else:
            factor = gl.rsqrt(middle + eps)
        r = first_r + gl.arange(0, TILE_R, factor.type.layout)
        gl.store(rstd + r, factor, mask=r < rows)
        factor_r = gl.convert_layout(factor, gl.SliceLayout(1, BY_ROW))
        factor_c = gl.convert_layout(factor, gl.SliceLayout(1, BY_COLUMN))
        middle_r = None
        middle_c = None
        if CENTERED:
            gl.store(mean + r, middle, mask=r < rows)
            middle_r = gl.convert_layout(middle, gl.SliceLayout(1, BY_ROW))
            middle_c = gl.convert_layout(middle, gl.SliceLayout(1, BY_COLUMN))
        for t in range(TILES):
            tile = first + t
            slot = tile % SLOTS
            first_c = t * TILE_C
            by_column = ring.index(slot).load(BY_COLUMN)
            by_row = ring.index(slot).load(BY_ROW)
            thread_barrier()
            _fetch(source, ring, ready, tile + SLOTS, bands, TILES, SLOTS)
            v = normalized(
                by_column, weight, bias, middle_c, factor_c, first_r, first_c, rows, COLS,
                source.dtype,
            )  # fmt: skip
            scaled, biased, keep = scaled_values(v, COLUMN[2], COLUMN[3], COLUMN, True)
            turned = encode_kept(
                gl.permute(scaled, (1, 0)), gl.permute(keep, (1, 0)), TURNED, COLUMN
            )
            store_scales(
                scales_t, biased, band * (TILE_R // COLUMN[2]), first_c // COLUMN[3],
                gl.cdiv(rows, COLUMN[2]), COLS // COLUMN[3], False, COLUMN[4],
            )  # fmt: skip
            v = normalized(
                by_row, weight, bias, middle_r, factor_r, first_r, first_c, rows, COLS,
                source.dtype,
            )  # fmt: skip
            scaled, biased, keep = scaled_values(v, ROW[2], ROW[3], ROW, False)
            straight = encode_kept(scaled, keep, BY_ROW, ROW)
            store_scales(
                scales, biased, first_r // ROW[2], first_c // ROW[3],
                gl.cdiv(rows, ROW[2]), COLS // ROW[3], True, ROW[4],
            )  # fmt: skip
            tma.store_wait(0)
            thread_barrier()
            out_t.store(turned)
            out.store(straight)
            fence_async_shared()
            thread_barrier()
            tma.async_copy_shared_to_global(codes_t, [first_c, first_r], out_t)
            tma.async_copy_shared_to_global(codes, [first_r, first_c], out)
        first += TILES
    tma.store_wait(0)
