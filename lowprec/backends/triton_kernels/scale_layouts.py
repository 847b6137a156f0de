"""Scales in the orders that the vendor's products read: an exact step apart from the cast.

Casts write scales compact, [..., rows, blocks]: those can be sliced, gathered and transposed. The
layouts here are for the product alone and are made from compact scales.
Sources: torch.nn.functional.SwizzleType.SWIZZLE_32_4_4; cuBLAS, 1-D block scaling factors layout.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton

from lowprec.backends.triton_kernels import launch, swizzle
from lowprec.backends.triton_kernels.launch import LIBRARY
from lowprec.backends.triton_kernels.starting import start
from lowprec.errors import UnsupportedError

_ROWS: Final = 128
_BLOCKS: Final = 4
_TILES: Final = 4


def swizzled_bytes(rows: int, blocks: int) -> int:
    """Bytes of the swizzled scales of a matrix: whole tiles of 128 rows by 4 blocks."""
    return (rows + -rows % _ROWS) * (blocks + -blocks % _BLOCKS)


def to_swizzled(scales: torch.Tensor) -> torch.Tensor:
    """E8M0 scales uint8 [..., rows, blocks] swizzled, uint8 [..., swizzled_bytes(rows, blocks)].

    Byte ((r // 128) ceil(blocks / 4) + c // 4) 512 + (r % 32) 16 + (r % 128) // 32 4 + c % 4 is the
    scale of row r, block c; bytes of rows and blocks that do not exist are 0. Raises
    UnsupportedError for scales that are not uint8 or have less than two dimensions.
    """
    if scales.dtype != torch.uint8 or scales.ndim < 2:
        raise UnsupportedError(
            f"swizzle takes E8M0 scales, uint8 [..., rows, blocks], not {scales.dtype} of shape "
            f"{tuple(scales.shape)}"
        )
    *lead, rows, blocks = scales.shape
    batches = scales.reshape(math.prod(lead), rows, blocks)
    flat: torch.Tensor = torch.ops.lowprec.swizzle_scales(batches)
    return flat.view(*lead, flat.shape[-1])


def from_swizzled(swizzled: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Undo `to_swizzled`; raises UnsupportedError when the size does not fit."""
    if swizzled.shape[-1] != swizzled_bytes(rows, blocks) or swizzled.dtype != torch.uint8:
        raise UnsupportedError(
            f"{swizzled.shape[-1]} values of {swizzled.dtype} are not the swizzled scales of "
            f"{rows} rows by {blocks} blocks: those are {swizzled_bytes(rows, blocks)} bytes"
        )
    lead = swizzled.shape[:-1]
    flat = swizzled.reshape(lead.numel(), swizzled.shape[-1])
    found: torch.Tensor = torch.ops.lowprec.unswizzle_scales(flat, rows, blocks)
    return found.view(*lead, rows, blocks)


LIBRARY.define("swizzle_scales(Tensor scales) -> Tensor")
LIBRARY.define("unswizzle_scales(Tensor swizzled, int rows, int blocks) -> Tensor")


def _swizzle_fake(scales: torch.Tensor) -> torch.Tensor:
    batch, rows, blocks = scales.shape
    return scales.new_empty((batch, swizzled_bytes(rows, blocks)))


def _unswizzle_fake(swizzled: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    return swizzled.new_empty((swizzled.shape[0], rows, blocks))


def _swizzle(scales: torch.Tensor) -> torch.Tensor:
    out = _swizzle_fake(scales)
    if out.numel():
        _launch(scales.contiguous(), out, back=False)
    return out


def _unswizzle(swizzled: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    out = _unswizzle_fake(swizzled, rows, blocks)
    if out.numel():
        _launch(out, swizzled.contiguous(), back=True)
    return out


def _launch(scales: torch.Tensor, swizzled: torch.Tensor, *, back: bool) -> None:
    batch, rows, blocks = scales.shape
    col_tiles = -(-blocks // _BLOCKS)
    tiles = -(-rows // _ROWS) * col_tiles
    start(
        swizzle.swizzle_tiles,
        (triton.cdiv(tiles, _TILES), batch),
        scales,
        swizzled,
        rows,
        blocks,
        col_tiles,
        BACK=back,
        TILES=_TILES,
        num_warps=4,
    )


launch.register(
    {
        "swizzle_scales": (_swizzle, _swizzle_fake),
        "unswizzle_scales": (_unswizzle, _unswizzle_fake),
    }
)
