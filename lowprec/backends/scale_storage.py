"""Scales in the orders that vendor products read, made from compact scales, in plain PyTorch.

Casts write scales compact, [rows, blocks]: those can be sliced, gathered and transposed. What is
made here is for one product alone. On a CUDA device each layout is one small kernel, or none where
the scales lie right already.
Sources: torch.nn.functional.scaled_mm; cuBLAS, "1D Block Scaling Factors Layout".
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

TILE: Final = 128
_UNIT: Final = 4


def block_scales(scales: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales [R, B] of 1x128 blocks (E8M0 or float32) as float32 [rows, B] with stride (1, rows).

    Rows past R, whose codes are the padding's zeros, get 0. E8M0 255 becomes NaN, 0 becomes 2^-127.
    """
    if _lies_right(scales, (1, rows)) and scales.shape[0] == rows:
        return scales
    return _lines(scales.mT, rows).mT


def tile_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales [R, B] of 128x128 tiles as float32 [B rounded up to 4, R], contiguous along B.

    Without the padding cuBLASLt's products over more than about 1000 blocks are wrong
    (pytorch/ao pull requests 4209 and 4229).
    """
    blocks = scales.shape[1]
    if blocks % _UNIT == 0 and _lies_right(scales, (blocks, 1)):
        return scales.mT
    return _lines(scales, blocks + -blocks % _UNIT).mT


def tile_scales_by_row(scales: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales [R, B] of 128x128 tiles as those of 1x128 blocks of `rows` rows: see block_scales."""
    return block_scales(scales.repeat_interleave(TILE, 0)[:rows], rows)


def _lies_right(scales: torch.Tensor, strides: tuple[int, int]) -> bool:
    """Whether the very tensor will do: what a cast for these products wrote."""
    fits = scales.dtype == torch.float32 and scales.stride() == strides
    return fits and scales.data_ptr() % 16 == 0


def _lines(lines: torch.Tensor, width: int) -> torch.Tensor:
    """[L, n] as contiguous float32 [L, width] with zeros after n; the very tensor if it is that."""
    count = lines.shape[1]
    if lines.dtype == torch.uint8:
        lines = lines.view(torch.float8_e8m0fnu)
    if count != width:
        out = torch.zeros((lines.shape[0], width), dtype=torch.float32, device=lines.device)
        out[:, :count] = lines
        return out
    if lines.dtype != torch.float32:
        return lines.to(torch.float32, memory_format=torch.contiguous_format)
    # Through one dimension: what is contiguous may have any stride where it has one line.
    return aligned(lines.reshape(-1)).view(lines.shape)


def swizzled_scales(
    scales: torch.Tensor, rows: int, blocks: int, spread: tuple[int, int]
) -> torch.Tensor:
    """Scale bytes [R, B], each for `spread` (rows, blocks), in the order SWIZZLE_32_4_4, flat.

    They are those of a matrix of `rows` by `blocks` scales. The scale of row r, block c is byte
    ((r // 128) ceil(blocks / 4) + c // 4) 512 + (r % 32) 16 + (r % 128) // 32 4 + c % 4; bytes of
    rows and blocks that do not exist are 0.
    """
    if spread != (1, 1):
        across, along = spread
        r, c = scales.shape
        scales = scales[:, None, :, None].expand(r, across, c, along)
        scales = scales.reshape(r * across, c * along)[:rows, :blocks]
    scales = functional.pad(scales, (0, -blocks % _UNIT, 0, -rows % TILE))
    tiles = scales.reshape(-1, _UNIT, TILE // _UNIT, scales.shape[1] // _UNIT, _UNIT)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1)


def e8m0_of(scales: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes of power-of-two scales, stored as E8M0 or as float32."""
    if scales.dtype == torch.uint8:
        return scales
    return scales.to(torch.float8_e8m0fnu).view(torch.uint8)


def aligned(t: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor whose first byte is at a multiple of 16, as vendor products need it."""
    return t.clone() if t.data_ptr() % 16 else t
