"""Launches of the pipelined kernels: which casts they take, tiles, rings and grids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from lowprec.backends.triton_kernels import norm_pipeline, pipeline
from lowprec.backends.triton_kernels.launch import Spec, spec_of
from lowprec.backends.triton_kernels.starting import Tiled, start
from lowprec.formats import ALL, ELEMENTS


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
COLUMN: Final = Shape(128, 128, 2, 2, 8, 4, 2)
TENSOR: Final = Shape(128, 128, 2, 1, 8, 8, 1)
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
    batch, *extents = x.shape
    return (
        batch == 1
        and has_elements(row, column)
        and (_engine_takes(x, extents) or _threads_take(x, extents))
    )


def takes_new(x: torch.Tensor, row: str, column: str) -> bool:
    """`takes` of a new matrix of the extents [R, C] and the dtype of x."""
    rows, cols = x.shape
    device = x.device.index
    engine = takes_matrix((rows, cols), (cols, 1), x.dtype, device)
    return has_elements(row, column) and (
        engine or _threads_take_dense((rows, cols), x.dtype, device)
    )


def _engine_takes(x: torch.Tensor, extents: Sequence[int]) -> bool:
    """Whether the copy engine brings the tiles of x [1, R, C]."""
    aligned = x.data_ptr() % 16 == 0
    return aligned and takes_matrix(extents, x.stride()[1:], x.dtype, x.device.index)


def _threads_take(x: torch.Tensor, extents: Sequence[int]) -> bool:
    """Whether threads can bring the tiles of x [1, R, C], 8 bytes each: dense, of 16 bits.

    From 16 bytes on, although 8 would do: the compiler asks for no other power of two, and takes
    what starts elsewhere for bytes that it cannot copy.
    """
    return (
        x.data_ptr() % 16 == 0
        and x.stride(1) == extents[1]
        and _threads_take_dense(extents, x.dtype, x.device.index)
    )


def _threads_take_dense(extents: Sequence[int], dtype: torch.dtype, device: int) -> bool:
    return (
        dtype.itemsize == 2 and extents[1] % 4 == 0 and max(extents) < 2**31 and _major(device) >= 9
    )


def has_elements(row: str, column: str) -> bool:
    """Whether the kernel encodes these casts: FP8 alone."""
    found = _specs(row, column)
    return all(one is None or ELEMENTS[one.element].torch_dtype is not None for one in found)


def takes_matrix(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: int
) -> bool:
    """Whether the copy engine moves tiles of such a matrix [R, C], if it starts at 16 bytes."""
    size = dtype.itemsize
    return (
        strides[0] * size % 16 == 0
        and strides[0] >= shape[1]
        and strides[1] == 1
        and size in (2, 4)
        and max(shape) < 2**31
        and _major(device) >= 9
    )


def _specs(row: str, column: str) -> tuple[Spec | None, Spec]:
    return spec_of(row, by_column=False) if row else None, spec_of(column, by_column=True)


def shape_for(specs: tuple[Spec | None, Spec], itemsize: int, major: int) -> Shape:
    """Launch shape of a cast on a GPU of this major capability.

    Blocks of 128 need tiles of 128, and where they would spill registers more warps as well.
    """
    found = [one for one in specs if one is not None]
    widest = max(max(one.block_r, one.block_c) for one in found)
    if itemsize == 2 and specs[1] is not None and specs[1].block_r == ALL:
        return TENSOR
    if itemsize == 4:
        return TALL_FLOAT32 if widest > 32 else BOTH_FLOAT32
    square = all(one.block_r == one.block_c for one in found)
    narrow = any(max(one.block_r, one.block_c) == 32 for one in found)
    if widest > 32 and specs[0] is not None and not square and (major != 9 or narrow):
        return TALL
    return BOTH if specs[0] is not None else COLUMN


@cache
def layout(size: int, tile_c: int) -> Any:
    """How a tile with rows of `tile_c` elements of `size` bytes lies in shared memory."""
    width = min(tile_c * size, 128)
    return NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * size, rank=2)


def tiled(t: torch.Tensor, tile_r: int, tile_c: int) -> Tiled:
    """A matrix as the copy engine moves it in tiles, swizzled as widely as they are."""
    found = layout(t.element_size(), tile_c)
    return Tiled(t, list(t.shape), list(t.stride()), [tile_r, tile_c], found)


class Affine(NamedTuple):
    """What normalizes the source first: parameters of columns, statistics of rows."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor | None


PLAIN: Final = Affine(None, None, None, None)


def cast(
    x: torch.Tensor,
    row: str,
    column: str,
    out: list[torch.Tensor],
    *,
    norm: Affine = PLAIN,
    amax: torch.Tensor | None = None,
    shape: Shape | None = None,
) -> None:
    """Fill `out` (codes and scales by row if asked for, then by column); see launch.outputs.

    amax: the bits of the largest magnitude, for casts with one scale for the whole tensor.
    """
    _, rows, cols = x.shape
    found = decided((rows, cols), x.element_size(), row, column, x.device.index, shape)
    codes_t, scales_t = out[-2:]
    start(
        pipeline.cast_tiles_pipelined,
        found.programs,
        tiled(x[0], found.tile_r, found.tile_c) if _engine_takes(x, (rows, cols)) else x,
        tiled(out[0][0], found.tile_r, found.tile_c) if row else None,
        tiled(codes_t[0], found.tile_c, found.tile_r),
        out[1] if row else None,
        scales_t,
        *norm,
        amax,
        *found.numbers,
        **found.constants,
    )


class Decided(NamedTuple):
    """What the extents of a matrix and its casts decide of a launch of `cast`."""

    programs: int
    tile_r: int
    tile_c: int
    numbers: tuple[int, ...]
    constants: Mapping[str, Any]


@lru_cache(maxsize=1024)
def decided(
    extents: tuple[int, int],
    itemsize: int,
    row: str,
    column: str,
    device: int,
    shape: Shape | None = None,
) -> Decided:
    """The launch of `cast` for a matrix [rows, columns] of elements of `itemsize` bytes."""
    (rows, cols), specs = extents, _specs(row, column)
    row_unit, col_unit = math.gcd(rows, 16), math.gcd(cols, 16)
    chosen = shape or shape_for(specs, itemsize, _major(device))
    row_tiles, col_tiles = -(-rows // chosen.tile_r), -(-cols // chosen.tile_c)
    programs = min(row_tiles * col_tiles, processors(device) * chosen.per_processor)
    constants = {
        "ROW_UNIT": row_unit,
        "COL_UNIT": col_unit,
        "ROW": None if specs[0] is None else tuple(specs[0]),
        "COLUMN": tuple(specs[1]),
        "ITEMSIZE": itemsize,
        "STAGES": chosen.stages,
        "OUTS": chosen.outs,
        "GROUP": chosen.group,
        "num_warps": chosen.warps,
        # A norm rounds each step by itself; without one there is nothing to fuse.
        "enable_fp_fusion": False,
    }
    numbers = (rows // row_unit, cols // col_unit, row_tiles, col_tiles)
    return Decided(programs, chosen.tile_r, chosen.tile_c, numbers, constants)


class Bands(NamedTuple):
    """Tile of the pipelined norm and warps of a program; a ring holds a band and what fits."""

    tile_c: int
    warps: int
    per_processor: int


_BAND_ROWS: Final = 32
_SHARED_BYTES: Final = 225 * 1024


def bands_for(cols: int, itemsize: int, *, centered: bool) -> Bands | None:
    """Launch shape of the pipelined norm of rows of `cols`, None for rows that it cannot hold."""
    for bands in (Bands(512, 8, 1),) if centered else (Bands(256, 4, 2), Bands(512, 8, 1)):
        if cols % bands.tile_c == 0 and _slots(bands, itemsize) >= cols // bands.tile_c + 1:
            return bands
    return None


def _slots(bands: Bands, itemsize: int) -> int:
    tile = _BAND_ROWS * bands.tile_c
    return (_SHARED_BYTES // bands.per_processor - 2 * tile) // (tile * itemsize)


def takes_norm(x: torch.Tensor, row: str, column: str, *, centered: bool) -> bool:
    """Whether the pipelined norm can normalize x [R, C] and cast it both ways."""
    if not takes(x[None], row, column):
        return False
    specs = _specs(row, column)
    tall = max(one.block_r for one in specs if one is not None)
    wide = max(one.block_c for one in specs if one is not None)
    return (
        tall <= _BAND_ROWS
        and wide <= 256
        and bands_for(x.shape[1], x.element_size(), centered=centered) is not None
    )


def normalize(
    x: torch.Tensor,
    row: str,
    column: str,
    out: list[torch.Tensor],
    *,
    norm: Affine,
    eps: float,
    shape: Bands | None = None,
) -> None:
    """Fill the statistics of `norm`, and `out` as `cast` does; x is [R, C]."""
    specs = _specs(row, column)
    rows, cols = x.shape
    chosen = shape or bands_for(cols, x.element_size(), centered=norm.mean is not None)
    assert chosen is not None
    assert specs[0] is not None
    # Fewer slots than a band has tiles would wait for ever.
    assert _slots(chosen, x.element_size()) > cols // chosen.tile_c
    row_unit, bands = math.gcd(rows, 16), -(-rows // _BAND_ROWS)
    codes, scales, codes_t, scales_t = out
    start(
        norm_pipeline.norm_bands_pipelined,
        min(bands, processors(x.device.index) * chosen.per_processor),
        tiled(x, _BAND_ROWS, chosen.tile_c),
        tiled(codes, _BAND_ROWS, chosen.tile_c),
        tiled(codes_t, chosen.tile_c, _BAND_ROWS),
        scales,
        scales_t,
        *norm,
        rows // row_unit,
        bands,
        eps,
        1 / cols,
        ROW_UNIT=row_unit,
        COLS=cols,
        CENTERED=norm.mean is not None,
        ROW=tuple(specs[0]),
        COLUMN=tuple(specs[1]),
        ITEMSIZE=x.element_size(),
        SLOTS=_slots(chosen, x.element_size()),
        num_warps=chosen.warps,
        enable_fp_fusion=False,
    )
