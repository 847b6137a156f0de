# mypy: ignore-errors
# Bodies of @gluon.jit functions are Triton's language, not typed Python.
"""Casts with a transposed output at memory speed on Hopper and later, in Gluon.

A program walks over tiles: the copy engine brings the next tiles while this one is cast. A tile is
read from shared memory twice. By row a thread owns a block of a row, lanes lie along the rows; by
column it owns a block of two columns. Each maximum is then found inside a thread, each thread
writes 16 codes at once, and the 128-byte swizzle keeps both ways free of bank conflicts. The codes
leave through shared memory and the copy engine as well, so that a row of a tile is one burst.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from lowprec.backends.triton_kernels.barriers import thread_barrier
from lowprec.backends.triton_kernels.codec import carry_of, emax_of, max_of


@triton.constexpr_function
def _powers(first, end):
    powers = []
    while first < end:
        powers.append(first)
        first *= 2
    return powers


@triton.constexpr_function
def row_layout(tile_r, tile_c, itemsize, warps):
    """A thread owns 32 values of a row, a warp 32 rows."""
    down = min(warps, tile_r // 32)
    return gl.BlockedLayout([1, 32], [32, 1], [down, warps // down], [1, 0])


@triton.constexpr_function
def column_layout(tile_r, tile_c, itemsize, warps):
    """A thread owns 32 values of each of the columns that share a 4-byte bank."""
    wide = 4 // itemsize
    across = min(warps, tile_c // (32 * wide))
    return gl.BlockedLayout([32, wide], [1, 32], [warps // across, across], [1, 0])


@triton.constexpr_function
def turned_layout(tile_r, tile_c, itemsize, warps):
    """The threads of column_layout seen from the transposed tile; codes of a column in order."""
    wide = 4 // itemsize
    across = min(warps, tile_c // (32 * wide))
    down = warps // across

    def doublings(first, end, along_rows):
        return [[0, n] if along_rows else [n, 0] for n in _powers(first, end)]

    registers = doublings(1, 32, True) + doublings(1, wide, False)
    registers += doublings(32 * wide * across, tile_c, False) + doublings(32 * down, tile_r, True)
    lanes = doublings(wide, 32 * wide, False)
    of_warps = doublings(32 * wide, 32 * wide * across, False) + doublings(32, 32 * down, True)
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [tile_c, tile_r])


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def scaled_values(
    values,
    BLOCK_R: gl.constexpr,
    BLOCK_C: gl.constexpr,
    SPEC: gl.constexpr,
    ROWS_FIRST: gl.constexpr,
):
    """Values over their block scale, float32 [R, C]; the scale bytes; which codes to keep.

    The axis that lies within a thread is reduced first. A poisoned block keeps no code.
    """
    R: gl.constexpr = values.shape[0]
    C: gl.constexpr = values.shape[1]
    EMAX: gl.constexpr = emax_of(SPEC[0])
    CARRY: gl.constexpr = carry_of(SPEC[0], SPEC[1])
    blocks = gl.reshape(values, (R // BLOCK_R, BLOCK_R, C // BLOCK_C, BLOCK_C))
    if ROWS_FIRST:
        amax = gl.reduce(gl.reduce(gl.abs(blocks), 1, _larger), 2, _larger)
    else:
        amax = gl.reduce(gl.reduce(gl.abs(blocks), 3, _larger), 1, _larger)
    bits = amax.to(gl.int32, bitcast=True)
    biased = gl.minimum(gl.maximum(((bits + CARRY) >> 23) - EMAX, 0), 254)
    biased = gl.where(bits >= 0x7F800000, 255, biased)
    exponent = (254 - gl.minimum(biased, 254)) << 23
    multiplier = gl.where(biased >= 254, 0x400000, exponent).to(gl.float32, bitcast=True)
    keep = gl.where(biased == 255, 0, 255).to(gl.uint8)
    if ROWS_FIRST:
        multiplier = gl.expand_dims(gl.expand_dims(multiplier, 2), 1)
        keep = gl.expand_dims(gl.expand_dims(keep, 2), 1)
    else:
        multiplier = gl.expand_dims(gl.expand_dims(multiplier, 1), 3)
        keep = gl.expand_dims(gl.expand_dims(keep, 1), 3)
    kept, _ = gl.broadcast(keep, blocks)
    return gl.reshape(blocks * multiplier, (R, C)), biased, gl.reshape(kept, (R, C))


@gluon.jit
def encode_kept(scaled, keep, LAYOUT: gl.constexpr, SPEC: gl.constexpr):
    """Codes of values (saturating), cleared where their block is poisoned, four at a time."""
    values = gl.convert_layout(scaled, LAYOUT)
    if SPEC[0] == "e4m3":
        codes = values.to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    else:
        codes = values.to(gl.float8e5).to(gl.uint8, bitcast=True)
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;",
        "=r,r,r",
        [codes, gl.convert_layout(keep, LAYOUT)],
        dtype=gl.uint8,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def store_scales(
    scales, biased, first, second, limit_1, limit_2, TURN: gl.constexpr, E8M0: gl.constexpr
):
    """As tiles.store_scales, each thread the scales that it has."""
    LAYOUT: gl.constexpr = biased.type.layout
    i = first + gl.arange(0, biased.shape[0], gl.SliceLayout(1, LAYOUT))
    j = second + gl.arange(0, biased.shape[1], gl.SliceLayout(0, LAYOUT))
    inside = gl.expand_dims(i < limit_1, 1) & gl.expand_dims(j < limit_2, 0)
    i, j = gl.expand_dims(i.to(gl.int64), 1), gl.expand_dims(j.to(gl.int64), 0)
    where = i + j * limit_1 if TURN else i * limit_2 + j
    if E8M0:
        gl.store(scales + where, biased.to(gl.uint8), mask=inside)
    else:
        bits = gl.where(biased == 0, 0x400000, biased << 23)
        value = gl.where(biased == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)
        gl.store(scales + where, value, mask=inside)


@gluon.jit
def normalized(held, weight, bias, mean, rstd, first_r, first_c, rows, cols, SOURCE: gl.constexpr):
    """float32 (v - mean) * rstd * weight + bias of a tile, rounded to SOURCE, 0 past the rows.

    mean and rstd are of every row of the tile, weight and bias pointers; see norm.norm_rows.
    """
    LAYOUT: gl.constexpr = held.type.layout
    r = first_r + gl.arange(0, held.shape[0], gl.SliceLayout(1, LAYOUT))
    c = first_c + gl.arange(0, held.shape[1], gl.SliceLayout(0, LAYOUT))
    v = held.to(gl.float32)
    if mean is not None:
        v = v - gl.expand_dims(mean, 1)
    v = v * gl.expand_dims(rstd, 1)
    if weight is not None:
        v = v * gl.expand_dims(gl.load(weight + c, mask=c < cols, other=0).to(gl.float32), 0)
    if bias is not None:
        v = v + gl.expand_dims(gl.load(bias + c, mask=c < cols, other=0).to(gl.float32), 0)
        inside, _ = gl.broadcast(gl.expand_dims(r < rows, 1), v)
        v = gl.where(inside, v, 0.0)
    return v.to(SOURCE).to(gl.float32)


@gluon.jit
def _of_rows(known, first_r, rows, TILE_R: gl.constexpr, LAYOUT: gl.constexpr):
    """A statistic of the rows of a tile, 0 past the last row."""
    r = first_r + gl.arange(0, TILE_R, gl.SliceLayout(1, LAYOUT))
    return gl.load(known + r, mask=r < rows, other=0.0)


@gluon.jit
def _values(held, weight, bias, mean, rstd, first_r, first_c, rows, cols, SOURCE: gl.constexpr):
    """float32 values of a tile, normalized where rstd is given."""
    if rstd is None:
        v = held.to(gl.float32)
    else:
        LAYOUT: gl.constexpr = held.type.layout
        TILE_R: gl.constexpr = held.shape[0]
        middle = None
        if mean is not None:
            middle = _of_rows(mean, first_r, rows, TILE_R, LAYOUT)
        factor = _of_rows(rstd, first_r, rows, TILE_R, LAYOUT)
        v = normalized(held, weight, bias, middle, factor, first_r, first_c, rows, cols, SOURCE)
    return v


@gluon.jit
def _tensor_scale(amax, MAX: gl.constexpr):
    """Free float32 scale of a tensor from the bits of its amax; NaN if it is poisoned."""
    bits = gl.load(amax)
    top = gl.to_tensor(MAX).to(gl.float32)
    scale = gl.div_rn(bits.to(gl.float32, bitcast=True), top)
    scale = gl.maximum(scale, 1.1754943508222875e-38)
    nan = gl.to_tensor(0x7FC00000).to(gl.int32).to(gl.float32, bitcast=True)
    return gl.where(bits >= 0x7F800000, nan, scale)


@gluon.jit
def _inverse(scale):
    """The scale of a tensor, raised by a power of two if it is tiny, that power and 1 / scale."""
    raised = gl.where(scale < 2.0**-60, 2.0**64, 1.0)
    scale = scale * raised
    return scale, raised, gl.div_rn(gl.to_tensor(1.0), scale)


@gluon.jit
def _over_tensor_scale(values, scale, raised, inverse):
    """Values over the scale of the tensor, true division, and which codes to keep.

    See spans._quotients, which this is for one scale.
    """
    wide = gl.zeros_like(values)
    keep = gl.where(wide + scale == wide + scale, 255, 0).to(gl.uint8)
    values = values * raised
    less, inverse = wide - scale, wide + inverse
    found = values * inverse
    found = gl.fma(gl.fma(found, less, values), inverse, found)
    found = gl.fma(gl.fma(found, less, values), inverse, found)
    # A zero lost its sign.
    sign = values.to(gl.int32, bitcast=True) & -0x80000000
    found = (found.to(gl.int32, bitcast=True) | sign).to(gl.float32, bitcast=True)
    return found, keep


@gluon.jit
def _place(tile, row_tiles, col_tiles, GROUP: gl.constexpr):
    """Row and column of a tile: GROUP rows of tiles are walked down, then across."""
    group = tile // (GROUP * col_tiles)
    inside = tile - group * (GROUP * col_tiles)
    height = gl.minimum(GROUP, row_tiles - group * GROUP)
    across = inside // height
    return group * GROUP + (inside - across * height), across


@triton.constexpr_function
def _copy_layout(tile_c, unit, warps):
    """Threads that copy `unit` neighbours each, whole rows of a tile at a time if they can."""
    across = min(32, tile_c // unit)
    return gl.BlockedLayout([1, unit], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def _fetch(
    source, ring, ready, tile, slot, row_tiles, col_tiles, limit, rows, cols,
    GROUP: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Start the copy of a tile into a slot of the ring, if there is such a tile.

    By the copy engine, or by threads if source is a pointer: to rows at other than 16 bytes.
    """
    TILE_R: gl.constexpr = ring.shape[1]
    TILE_C: gl.constexpr = ring.shape[2]
    wanted = tile < limit
    pr, pc = _place(tile, row_tiles, col_tiles, GROUP)
    if not source.dtype.is_ptr():
        barrier = ready.index(slot)
        mbarrier.expect(barrier, source.block_type.nbytes, pred=wanted)
        tma.async_copy_global_to_shared(
            source, [pr * TILE_R, pc * TILE_C], barrier, ring.index(slot), pred=wanted
        )
    else:
        r = gl.arange(0, TILE_R, gl.SliceLayout(1, COPY))
        c = gl.arange(0, TILE_C, gl.SliceLayout(0, COPY))
        inside = wanted & (pr * TILE_R + r < rows)
        inside = gl.expand_dims(inside, 1) & gl.expand_dims(pc * TILE_C + c < cols, 0)
        here = source + ((pr * TILE_R).to(gl.int64) * cols + pc * TILE_C)
        here += gl.expand_dims(r * cols, 1) + gl.expand_dims(c, 0)
        async_copy.async_copy_global_to_shared(ring.index(slot), here, mask=inside)
        async_copy.commit_group()


@gluon.jit(do_not_specialize=["row_units", "col_units", "row_tiles", "col_tiles"])
def cast_tiles_pipelined(
    source,
    codes,
    codes_t,
    scales,
    scales_t,
    weight,
    bias,
    mean,
    rstd,
    amax,
    row_units,
    col_units,
    row_tiles,
    col_tiles,
    ROW_UNIT: gl.constexpr,
    COL_UNIT: gl.constexpr,
    ROW: gl.constexpr,
    COLUMN: gl.constexpr,
    ITEMSIZE: gl.constexpr,
    STAGES: gl.constexpr,
    OUTS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Cast [rows, cols] by column, and by row where ROW is given; see tiles.cast_tiles.

    source, codes and codes_t are descriptors of tiles; each program takes every
    num_programs-th tile. source may also point to a dense matrix. With rstd the values are
    normalized first, see norm.norm_tiles. With amax, the bits of the largest magnitude, one free
    scale serves the tensor, its only entry in scales. Rows and columns come in units, which tells
    the compiler how wide it may load what is theirs.
    """
    rows = row_units * ROW_UNIT
    cols = col_units * COL_UNIT
    TILE_R: gl.constexpr = codes_t.block_type.shape[1]
    TILE_C: gl.constexpr = codes_t.block_type.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    BY_ROW: gl.constexpr = row_layout(TILE_R, TILE_C, ITEMSIZE, WARPS)
    BY_COLUMN: gl.constexpr = column_layout(TILE_R, TILE_C, ITEMSIZE, WARPS)
    TURNED: gl.constexpr = turned_layout(TILE_R, TILE_C, ITEMSIZE, WARPS)
    STORES: gl.constexpr = 1 if ROW is None else 2
    # Square blocks have one scale, and so one code a value, whichever way they are read.
    SQUARE: gl.constexpr = ROW is not None and ROW == COLUMN and COLUMN[2] == COLUMN[3]
    SOURCE: gl.constexpr = source.dtype.element_ty if source.dtype.is_ptr() else source.dtype
    SLOT: gl.constexpr = (
        gl.NVMMASharedLayout(128, 16, 2) if source.dtype.is_ptr() else source.layout
    )
    COPY: gl.constexpr = _copy_layout(TILE_C, min(COL_UNIT, 4), WARPS)
    ring = gl.allocate_shared_memory(SOURCE, [STAGES, TILE_R, TILE_C], SLOT)
    out_t = gl.allocate_shared_memory(gl.uint8, [OUTS, TILE_C, TILE_R], codes_t.layout)
    if ROW is not None:
        out = gl.allocate_shared_memory(gl.uint8, [OUTS, TILE_R, TILE_C], codes.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    if amax is not None:
        scale = _tensor_scale(amax, max_of(COLUMN[0]))
        if gl.program_id(0) == 0:
            gl.store(scales_t, scale)
        scale, raised, inverse = _inverse(scale)
    tiles = row_tiles * col_tiles
    step = gl.num_programs(0)
    first = gl.program_id(0)
    for s in gl.static_range(STAGES):
        _fetch(
            source, ring, ready, first + s * step, s, row_tiles, col_tiles, tiles, rows, cols,
            GROUP, COPY,
        )  # fmt: skip
    k = 0
    for tile in range(first, tiles, step):
        slot = k % STAGES
        side = k % OUTS
        pr, pc = _place(tile, row_tiles, col_tiles, GROUP)
        if not source.dtype.is_ptr():
            mbarrier.wait(ready.index(slot), (k // STAGES) & 1)
        else:
            async_copy.wait_group(STAGES - 1)
            thread_barrier()
        held = ring.index(slot)
        by_column = held.load(BY_COLUMN)
        if ROW is not None and amax is None and not SQUARE:
            by_row = held.load(BY_ROW)
        thread_barrier()
        _fetch(
            source, ring, ready, tile + STAGES * step, slot, row_tiles, col_tiles, tiles, rows,
            cols, GROUP, COPY,
        )  # fmt: skip
        tma.store_wait((OUTS - 1) * STORES)
        thread_barrier()
        v = _values(
            by_column, weight, bias, mean, rstd, pr * TILE_R, pc * TILE_C, rows, cols, SOURCE
        )
        if amax is not None:
            scaled, keep = _over_tensor_scale(v, scale, raised, inverse)
            turned = encode_kept(
                gl.permute(scaled, (1, 0)), gl.permute(keep, (1, 0)), TURNED, COLUMN
            )
            out_t.index(side).store(turned)
            if ROW is not None:
                out.index(side).store(gl.permute(turned, (1, 0)))
        else:
            scaled, biased, keep = scaled_values(v, COLUMN[2], COLUMN[3], COLUMN, True)
            turned = encode_kept(
                gl.permute(scaled, (1, 0)), gl.permute(keep, (1, 0)), TURNED, COLUMN
            )
            out_t.index(side).store(turned)
            blocks_r = gl.cdiv(rows, COLUMN[2])
            blocks_c = gl.cdiv(cols, COLUMN[3])
            store_scales(
                scales_t,
                biased,
                pr * (TILE_R // COLUMN[2]),
                pc * (TILE_C // COLUMN[3]),
                blocks_r,
                blocks_c,
                False,
                COLUMN[4],
            )
            if SQUARE:
                out.index(side).store(gl.permute(turned, (1, 0)))
                store_scales(
                    scales,
                    biased,
                    pr * (TILE_R // ROW[2]),
                    pc * (TILE_C // ROW[3]),
                    blocks_r,
                    blocks_c,
                    True,
                    ROW[4],
                )
            elif ROW is not None:
                v_r = _values(
                    by_row,
                    weight,
                    bias,
                    mean,
                    rstd,
                    pr * TILE_R,
                    pc * TILE_C,
                    rows,
                    cols,
                    SOURCE,
                )
                scaled_r, biased_r, keep_r = scaled_values(v_r, ROW[2], ROW[3], ROW, False)
                out.index(side).store(encode_kept(scaled_r, keep_r, BY_ROW, ROW))
                store_scales(
                    scales,
                    biased_r,
                    pr * (TILE_R // ROW[2]),
                    pc * (TILE_C // ROW[3]),
                    gl.cdiv(rows, ROW[2]),
                    gl.cdiv(cols, ROW[3]),
                    True,
                    ROW[4],
                )
        fence_async_shared()
        thread_barrier()
        tma.async_copy_shared_to_global(codes_t, [pc * TILE_C, pr * TILE_R], out_t.index(side))
        if ROW is not None:
            tma.async_copy_shared_to_global(codes, [pr * TILE_R, pc * TILE_C], out.index(side))
        k += 1  # noqa: SIM113 - the device language has no enumerate
    tma.store_wait(0)
