# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Operands of attention as their codes say them, in bf16: for a backward pass in BF16 products.

The same casts as in attention_fp8, in tiles of BLOCK tokens that start with their sequence. A code
of E4M3 times its power of two is exact in bf16. The codes themselves are written too where a
product of the backward pass reads them.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.attention_codes import encode_tile, first_tile
from lowprec.backends.triton_kernels.attention_parts import load_rows, run_of, store_rows
from lowprec.backends.triton_kernels.codec import decode


@triton.jit
def _round_to(
    x,
    out,
    codes_of_x,
    offset,
    first,
    rows,
    x_row,
    out_row,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Write the tile of x [rows, WIDTH] from row `first` on as its codes say it; NaN is kept.

    Also the codes, where there is room for them. Results start at `offset`; returns the scale.
    """
    tile = load_rows(x, first, rows, x_row, BLOCK, D, WIDTH)
    codes, scale = encode_tile(tile, RULE, INTEGER)
    if INTEGER:
        values = decode(codes, "e4m3")
    else:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    store_rows(out + offset, first, rows, out_row, values * scale, WIDTH, INTEGER)
    if codes_of_x is not None:
        r, c = tl.arange(0, BLOCK), tl.arange(0, D)
        at = codes_of_x + offset + tl.cast(first, tl.int64) * out_row
        inside = (first + r < rows)[:, None] & (c < WIDTH)[None, :]
        tl.store(at + (r[:, None] * out_row + c[None, :]), codes, mask=inside)
    return scale


@triton.jit(do_not_specialize=["batch", "tiles"])
def round_pair(
    k,
    v,
    rounded_k,
    rounded_v,
    codes_k,
    scales_k,
    cu,
    starts,
    owners,
    batch,
    tiles,
    heads,
    k_row,
    k_head,
    v_row,
    v_head,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Round one tile of two tensors, such as k and v, a program; or of `k` alone.

    k and v bf16 [tokens, heads, WIDTH], results the same, contiguous. codes_k, or None: uint8 as
    `rounded_k`, with scales_k float32 [heads, tiles]. starts, owners: of the list of tiles of BLOCK
    tokens; see attention_schedule.
    """
    live, sequence, head, tile = run_of(starts, owners, batch, heads)
    if not live:
        return
    begin = tl.load(cu + sequence)
    rows = tl.load(cu + sequence + 1) - begin
    first, wide, near = tile * BLOCK, begin.to(tl.int64), head.to(tl.int64)
    offset = (wide * heads + near) * WIDTH
    at = k + wide * k_row + near * k_head
    scale = _round_to(
        at, rounded_k, codes_k, offset, first, rows, k_row, heads * WIDTH,
        RULE, BLOCK, WIDTH, D, INTEGER,
    )  # fmt: skip
    if codes_k is not None:
        tl.store(scales_k + near * tiles + first_tile(cu, sequence, BLOCK) + tile, scale)
    if v is not None:
        at = v + wide * v_row + near * v_head
        _round_to(
            at, rounded_v, None, offset, first, rows, v_row, heads * WIDTH,
            RULE, BLOCK, WIDTH, D, INTEGER,
        )  # fmt: skip
