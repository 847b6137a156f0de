# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Scale bytes into the order in which sm100's block-scaled products read them, and back.

Tiles of 128 rows by 4 blocks, in row order; byte 16 (r % 32) + 4 (r // 32) + c of a tile of 512 is
row r, block c.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "cols", "col_tiles"])
def swizzle_tiles(
    scales,
    swizzled,
    rows,
    cols,
    col_tiles,
    BACK: tl.constexpr,
    TILES: tl.constexpr,
):
    """TILES tiles a program; what lies past the scales is 0. BACK reads `swizzled`."""
    batch = tl.program_id(1).to(tl.int64)
    row_tiles = tl.cdiv(rows, 128)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    byte = tl.arange(0, 512)
    r = (tile // col_tiles * 128)[:, None] + (byte % 16 // 4 * 32 + byte // 16)[None, :]
    c = (tile % col_tiles * 4)[:, None] + (byte % 4)[None, :]
    inside = (r < rows) & (c < cols)
    plain = scales + batch * rows * cols + r.to(tl.int64) * cols + c
    turned = (batch * row_tiles * col_tiles + tile)[:, None] * 512 + byte[None, :]
    known = (tile < row_tiles * col_tiles)[:, None]
    if BACK:
        found = tl.load(swizzled + turned, mask=inside, other=0)
        tl.store(plain, found, mask=inside)
    else:
        found = tl.load(plain, mask=inside, other=0)
        tl.store(swizzled + turned, found, mask=known & (byte < 512)[None, :])
