# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Where a program's tile lies in a matrix [batch, rows, columns]: one way for every kernel.

The tile's own offset is a 64-bit number; offsets inside it are 32-bit ones unless WIDE, which the
launcher sets for rows so long that a tile spans 2^31 elements.
"""

import triton
import triton.language as tl


@triton.jit
def place(rows, cols, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Batch (int64), first row and first column of this program's tile, tiles in row order."""
    col_tiles = tl.cdiv(cols, TILE_C)
    tiles = tl.cdiv(rows, TILE_R) * col_tiles
    tile = tl.program_id(0)
    batch = (tile // tiles).to(tl.int64)
    tile = tile % tiles
    return batch, (tile // col_tiles) * TILE_R, (tile % col_tiles) * TILE_C


@triton.jit
def start(batch, batch_stride, first_r, stride, first_c):
    """Offset of a tile's first element, int64; strides in elements."""
    return batch * batch_stride + tl.cast(first_r, tl.int64) * stride + first_c


@triton.jit
def offsets(stride, TILE_R: tl.constexpr, TILE_C: tl.constexpr, WIDE: tl.constexpr):
    """Offsets [TILE_R, TILE_C] inside a tile whose rows are `stride` elements apart."""
    r, c = tl.arange(0, TILE_R), tl.arange(0, TILE_C)
    if WIDE:
        r = r.to(tl.int64)
    return r[:, None] * stride + c[None, :]


@triton.jit
def within(first_r, first_c, rows, cols, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Which elements [TILE_R, TILE_C] of a tile lie inside the matrix."""
    r, c = first_r + tl.arange(0, TILE_R), first_c + tl.arange(0, TILE_C)
    return (r < rows)[:, None] & (c < cols)[None, :]
