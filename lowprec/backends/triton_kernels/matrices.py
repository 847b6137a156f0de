"""Both casts of a matrix as a layer makes them in every step: what its shape decides, decided once.

Finding launch shapes, outputs and the compiled kernel anew takes the host longer than many of these
casts take the GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from lowprec.backends.triton_kernels import launch, pipeline, pipelined, spans
from lowprec.backends.triton_kernels.span_ops import MAXIMUM_TILE
from lowprec.backends.triton_kernels.starting import Launch, Tiled
from lowprec.formats import ALL, Cast
from lowprec.tensor import QuantizedTensor


class _Room(NamedTuple):
    """An output: what is allocated, and the shape of what of it is used, in the same strides."""

    held: tuple[int, int]
    strides: tuple[int, int]
    dtype: torch.dtype
    used: tuple[int, int]

    def make(self, device: torch.device) -> torch.Tensor:
        out = torch.empty_strided(self.held, self.strides, dtype=self.dtype, device=device)
        return out if self.used == self.held else out[: self.used[0], : self.used[1]]


class _Ready(NamedTuple):
    launch: Launch
    maximum: Launch | None
    """Of the kernel before it, where one scale is the whole tensor's."""
    rooms: tuple[_Room, ...]
    """Codes by row and by column, scales by row and, unless they are the tensor's, by column."""
    tiles: tuple[tuple[Any, ...], ...]
    """What follows the tensor in a Tiled of the source, of the codes, of the transposed codes."""
    square: bool
    """Whether both casts have the same square blocks, and so the same scales."""


def cast_both(
    x: torch.Tensor, row: Cast, column: Cast
) -> tuple[QuantizedTensor, QuantizedTensor] | None:
    """x [R, C] cast to nearest along C and along R by the pipelined kernel; None if it cannot."""
    if x.data_ptr() % 16:
        return None
    device = x.device
    ready = _ready(x.shape, x.stride(), x.dtype, device.index, row.text, column.text)
    if ready is None:
        return None
    codes, codes_t, *scales = [room.make(device) for room in ready.rooms]
    amax = None
    if ready.maximum is not None:
        amax = torch.zeros(1, dtype=torch.int32, device=device)
        ready.maximum.start(x, amax)
    source, across, down = ready.tiles
    ready.launch.start(
        Tiled(x, *source),
        Tiled(codes, *across),
        Tiled(codes_t, *down),
        scales[0],
        scales[-1],
        *pipelined.PLAIN,
        amax,
    )
    if ready.square:  # either holds the numbers; products read them along the contraction
        scales.reverse()
    return (
        QuantizedTensor(codes, scales[0], row.format, -1),
        QuantizedTensor(codes_t, scales[-1], column.format, -2),
    )


@lru_cache(maxsize=1024)
def _ready(
    shape: torch.Size,
    strides: tuple[int, int],
    dtype: torch.dtype,
    device: int | None,
    row: str,
    column: str,
) -> _Ready | None:
    casts = Cast.parse(row), Cast.parse(column)
    whole = row == column and casts[0].format.block == (ALL, ALL)
    if device is None or 0 in shape or not pipelined.takes_matrix(shape, strides, dtype, device):
        return None
    if not whole and any(ALL in cast.format.block or cast.format.outer for cast in casts):
        return None
    if not pipelined.has_elements(row, column) or any(cast.stochastic for cast in casts):
        return None
    (rows, cols), pitch, pitch_t = shape, launch.padded(shape[1]), launch.padded(shape[0])
    found = pipelined.decided((rows, cols), dtype.itemsize, row, column, device)
    tile, turned = [found.tile_r, found.tile_c], [found.tile_c, found.tile_r]
    tiles = (
        ([rows, cols], list(strides), tile, pipelined.layout(dtype.itemsize, tile[1])),
        ([rows, pitch], [pitch, 1], tile, pipelined.layout(1, tile[1])),
        ([cols, pitch_t], [pitch_t, 1], turned, pipelined.layout(1, turned[1])),
    )
    rooms = (
        _Room((rows, pitch), (pitch, 1), torch.uint8, (rows, cols)),
        _Room((pitch_t, cols), (1, pitch_t), torch.uint8, (rows, cols)),
        *(_scale_rooms(rows, cols, row, column) if not whole else [_ONE]),
    )
    kernel = pipeline.cast_tiles_pipelined
    start = Launch(kernel, found.programs, found.numbers, found.constants, device)
    maximum = _maximum(rows, cols, strides[0], device) if whole else None
    square = row == column and casts[0].format.transposable
    return _Ready(start, maximum, rooms, tiles, square)


_ONE: Final = _Room((1, 1), (1, 1), torch.float32, (1, 1))


def _scale_rooms(rows: int, cols: int, row: str, column: str) -> list[_Room]:
    """In the order of blocks by column, transposed by row; see launch.outputs."""
    rooms = []
    for by_column, spec in enumerate(launch.specs_of(row, column)):
        assert spec is not None
        count = -(-rows // spec.block_r), -(-cols // spec.block_c)
        along = (count[1], 1) if by_column else (1, count[0])
        rooms.append(_Room(count, along, torch.uint8 if spec.e8m0 else torch.float32, count))
    return rooms


def _maximum(rows: int, cols: int, pitch: int, device: int) -> Launch:
    meta = torch.empty_strided((1, rows, cols), (0, pitch, 1), device="meta")
    source, (tile_r, tile_c) = launch.Source.of(meta), MAXIMUM_TILE
    constants = {
        "UNIT": source.unit,
        "TILE_R": tile_r,
        "TILE_C": tile_c,
        "WIDE": source.wide(tile_r, tile_c),
        "INTEGER": False,
    }
    programs = source.programs(tile_r, tile_c)
    return Launch(spans.whole_maximum, programs, source.extents, constants, device)
