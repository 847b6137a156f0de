# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Operands of attention as their codes say them, in bf16: for a backward pass in BF16 products.

The same casts as in attention_fp8, in tiles of BLOCK tokens that start with their sequence. A code
of E4M3 times its power of two is exact in bf16.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.attention_codes import encode_tile
from lowprec.backends.triton_kernels.attention_parts import load_rows, run_of, store_rows
from lowprec.backends.triton_kernels.codec import decode


@triton.jit
def _round_to(
    x,
    out,
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
    """Write the tile of x [rows, WIDTH] from row `first` on as its codes say it; NaN is kept."""
    tile = load_rows(x, first, rows, x_row, BLOCK, D, WIDTH)
    codes, scale = encode_tile(tile, RULE, INTEGER)
    if INTEGER:
        values = decode(codes, "e4m3")
    else:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    store_rows(out, first, rows, out_row, values * scale, WIDTH, INTEGER)


@triton.jit(do_not_specialize=["batch"])
def round_pair(
    k,
    v,
    rounded_k,
    rounded_v,
    cu,
    starts,
    owners,
    batch,
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

    k and v bf16 [tokens, heads, WIDTH], results the same, contiguous. starts, owners: of the list
    of tiles of BLOCK tokens; see attention_schedule.
    """
    live, sequence, head, tile = run_of(starts, owners, batch, heads)
    if not live:
        return
    begin = tl.load(cu + sequence)
    rows = tl.load(cu + sequence + 1) - begin
    first, wide, near = tile * BLOCK, begin.to(tl.int64), head.to(tl.int64)
    out = (wide * heads + near) * WIDTH
    at = k + wide * k_row + near * k_head
    _round_to(
        at, rounded_k + out, first, rows, k_row, heads * WIDTH, RULE, BLOCK, WIDTH, D, INTEGER
    )
    if v is not None:
        at = v + wide * v_row + near * v_head
        _round_to(
            at, rounded_v + out, first, rows, v_row, heads * WIDTH, RULE, BLOCK, WIDTH, D, INTEGER
        )
