# mypy: ignore-errors
# Bodies of @gluon.jit functions are Triton's language, not typed Python.
"""What the two backward kernels on asynchronous products share: places, copies, rings, stores."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from lowprec.backends.triton_kernels.attention_stream import ROWS, place


@triton.constexpr_function
def product_layout(columns, of_codes):
    """Where a product of 64 rows leaves its values; the same places whatever its operands are."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32 if of_codes else 16])


@gluon.jit
def place_of(item, total, lists, cu_rows, cu_other, heads):
    """`place` of an item, or of the last, with the sequence's first and number of the others."""
    sequence, head, tile, first, rows = place(gl.minimum(item, total - 1), lists, cu_rows, heads)
    first_other = gl.load(cu_other + sequence)
    others = gl.load(cu_other + sequence + 1) - first_other
    return sequence, head, tile, first, rows, first_other, others


@gluon.jit
def zero_rows(buffer, valid, D: gl.constexpr):
    """Make the rows of a tile in shared memory from `valid` on zero."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    TILE: gl.constexpr = buffer.shape[0]
    tile = buffer.load(LAYOUT)
    row = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    buffer.store(gl.where(gl.expand_dims(row < valid, 1), tile, 0.0))


@gluon.jit
def store_rows(to, stride, first, rows, values, D: gl.constexpr):
    """Round [64, D] to bf16 and store the rows from `first` on that exist."""
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    r = first + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    c = gl.arange(0, D, gl.SliceLayout(0, OUT))
    at = to + gl.expand_dims(r.to(gl.int64) * stride, 1) + gl.expand_dims(c, 0)
    inside = gl.expand_dims(r < rows, 1) & gl.expand_dims(c < D, 0)
    gl.store(at, gl.convert_layout(values.to(gl.bfloat16), OUT), mask=inside)


@gluon.jit
def fetch(sources, columns, row, full, places, number):
    """Copy a tile of each of two tensors, and of their codes where they are, from four columns."""
    one, two, codes_one, codes_two = sources
    if codes_one is not None:
        tma.async_copy_global_to_shared(codes_one, [row, columns[2]], full, places[2].index(number))
    if codes_two is not None:
        tma.async_copy_global_to_shared(codes_two, [row, columns[3]], full, places[3].index(number))
    tma.async_copy_global_to_shared(one, [row, columns[0]], full, places[0].index(number))
    tma.async_copy_global_to_shared(two, [row, columns[1]], full, places[1].index(number))


@gluon.jit
def expect(full, sources, TILES: gl.constexpr):
    """Announce what TILES calls of `fetch` copy to the barrier `full`."""
    one, two, codes_one, codes_two = sources
    BYTES: gl.constexpr = one.block_type.nbytes + two.block_type.nbytes
    FIRST: gl.constexpr = 0 if codes_one is None else codes_one.block_type.nbytes
    SECOND: gl.constexpr = 0 if codes_two is None else codes_two.block_type.nbytes
    mbarrier.expect(full, TILES * (BYTES + FIRST + SECOND))


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """The next slot of a ring, and its phase."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def scales_of(scales, tiles, head, first, sequence):
    """Where the scales of a head of a sequence start."""
    return scales + head * tiles + first // (2 * ROWS) + sequence
