"""Launches of the pipelined kernels: which casts they take, tiles, rings and grids."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lowprec.backends.triton_kernels import pipeline
from lowprec.backends.triton_kernels.launch import Spec, spec_of
from lowprec.formats import ELEMENTS


class Shape(NamedTuple):
    """Tile, slots of the input ring and of the output ring, order of tiles, warps, programs."""

    tile_r: int
    tile_c: int
    stages: int
    outs: int
    group: int
    warps: int
    per_processor: int


# The fastest on an H200 of those tried: benchmarks/casts.py times what is chosen here.
BOTH: Final = Shape(128, 128, 2, 1, 8, 4, 2)
COLUMN: Final = Shape(128, 64, 2, 2, 8, 4, 3)
BOTH_FLOAT32: Final = Shape(128, 64, 2, 1, 8, 4, 2)
TALL: Final = Shape(128, 128, 3, 2, 8, 8, 1)
TALL_FLOAT32: Final = Shape(128, 128, 2, 1, 8, 8, 1)


@cache
def processors(device: int) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _major(device: int) -> int:
    return torch.cuda.get_device_capability(device)[0]


def takes(x: torch.Tensor, row: str, column: str) -> bool:
    """Whether the pipelined kernel can compute this cast of [B, R, C]."""
    specs = _specs(row, column)
    elements = all(one is None or ELEMENTS[one.element].torch_dtype is not None for one in specs)
    size = x.element_size()
    pitch = x.stride(1) * size
    placed = x.data_ptr() % 16 == 0 and pitch % 16 == 0 and x.stride(1) >= x.shape[2]
    return (
        elements
        and placed
        and x.shape[0] == 1
        and size in (2, 4)
        and max(x.shape) < 2**31
        and _major(x.device.index) >= 9
    )


def _specs(row: str, column: str) -> tuple[Spec | None, Spec]:
    return spec_of(row, by_column=False) if row else None, spec_of(column, by_column=True)


def shape_for(specs: tuple[Spec | None, Spec], itemsize: int) -> Shape:
    """Launch shape of a cast; blocks of 128 need tiles of 128 and more warps to hold them."""
    largest = max(max(one.block_r, one.block_c) for one in specs if one is not None)
    if largest > 32:
        return TALL if itemsize == 2 else TALL_FLOAT32
    if itemsize == 4:
        return BOTH_FLOAT32
    return BOTH if specs[0] is not None else COLUMN


def _descriptor(t: torch.Tensor, tile_r: int, tile_c: int) -> Any:
    size = t.element_size()
    width = min(tile_c * size, 128)
    layout = NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * size, rank=2)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [tile_r, tile_c], layout)


def cast(
    x: torch.Tensor, row: str, column: str, out: list[torch.Tensor], shape: Shape | None = None
) -> None:
    """Fill `out` (codes and scales by row if asked for, then by column); see launch.outputs."""
    specs = _specs(row, column)
    _, rows, cols = x.shape
    chosen = shape or shape_for(specs, x.element_size())
    row_tiles, col_tiles = -(-rows // chosen.tile_r), -(-cols // chosen.tile_c)
    programs = min(row_tiles * col_tiles, processors(x.device.index) * chosen.per_processor)
    codes_t, scales_t = out[-2:]
    pipeline.cast_tiles_pipelined[(programs,)](
        _descriptor(x[0], chosen.tile_r, chosen.tile_c),
        _descriptor(out[0][0], chosen.tile_r, chosen.tile_c) if row else None,
        _descriptor(codes_t[0], chosen.tile_c, chosen.tile_r),
        out[1] if row else None,
        scales_t,
        rows,
        cols,
        row_tiles,
        col_tiles,
        ROW=None if specs[0] is None else tuple(specs[0]),
        COLUMN=tuple(specs[1]),
        ITEMSIZE=x.element_size(),
        STAGES=chosen.stages,
        OUTS=chosen.outs,
        GROUP=chosen.group,
        num_warps=chosen.warps,
    )
