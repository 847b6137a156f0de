"""From codes back to values, and through a format in one pass, as torch.library ops; see launch."""

from __future__ import annotations

import torch
import triton

from lowprec.backends.triton_kernels import launch, values
from lowprec.backends.triton_kernels.launch import DTYPES, LIBRARY, Source, spec_of, stored_as
from lowprec.backends.triton_kernels.starting import start
from lowprec.formats import ALL, FORMATS, Format


def _tile(cols: int, block_r: int, block_c: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and its warps."""
    tall = block_r == 128
    wide = min(64 if tall else 256, triton.next_power_of_2(max(cols, 32)))
    tile_r, tile_c = max((512 if tall else 2048) // wide, block_r), max(wide, block_c)
    # Blocks of 128 rows hold more addresses a thread.
    return tile_r, tile_c, max(tile_r * tile_c // (1024 if tall else 2048), 4)


LIBRARY.define(
    "decode_tiles(Tensor codes, Tensor scales, str format, bool by_column, ScalarType dtype)"
    " -> Tensor"
)


def _decode_tiles_fake(
    codes: torch.Tensor, scales: torch.Tensor, format: str, by_column: bool, dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


def _decode_tiles(
    codes: torch.Tensor, scales: torch.Tensor, format: str, by_column: bool, dtype: torch.dtype
) -> torch.Tensor:
    return decode(codes, scales, FORMATS[format], by_column=by_column, dtype=dtype)


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    fmt: Format,
    *,
    by_column: bool,
    dtype: torch.dtype,
    integer: bool | None = None,
) -> torch.Tensor:
    """Values of codes [B, R, C] with dense scales in the order of memory."""
    integer = launch.INTEGER if integer is None else integer
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if codes.numel() == 0:
        return out
    across, along = (0 if extent == ALL else extent for extent in fmt.block)
    block_r, block_c = (along, across) if by_column else (across, along)
    tile_r, tile_c, warps = _tile(codes.shape[2], block_r, block_c)
    source = Source.of(codes)
    start(
        values.decode_tiles,
        source.programs(tile_r, tile_c),
        codes,
        scales,
        stored_as(out, integer=integer),
        *source.extents,
        UNIT=source.unit,
        ELEMENT=fmt.element.name,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        E8M0=fmt.scale == "e8m0",
        TILE_R=tile_r,
        TILE_C=tile_c,
        WIDE=source.wide(tile_r, tile_c),
        DTYPE=DTYPES[dtype],
        INTEGER=integer,
        num_warps=warps,
    )
    return out


LIBRARY.define("round_trip(Tensor x, str cast, bool by_column, ScalarType dtype) -> Tensor")


def _round_trip_fake(
    x: torch.Tensor, cast: str, by_column: bool, dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _round_trip(x: torch.Tensor, cast: str, by_column: bool, dtype: torch.dtype) -> torch.Tensor:
    return round_trip(x, cast, by_column=by_column, dtype=dtype, integer=launch.INTEGER)


def round_trip(
    x: torch.Tensor, cast: str, *, by_column: bool, dtype: torch.dtype, integer: bool
) -> torch.Tensor:
    """Values of [B, R, C] after a cast, in the order of memory."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return out
    spec = spec_of(cast, by_column=by_column)
    tile_r, tile_c, warps = _tile(x.shape[2], spec.block_r, spec.block_c)
    source = Source.of(x)
    start(
        values.round_trip_tiles,
        source.programs(tile_r, tile_c),
        stored_as(x, integer=integer),
        stored_as(out, integer=integer),
        *source.extents,
        UNIT=source.unit,
        SPEC=tuple(spec),
        TILE_R=tile_r,
        TILE_C=tile_c,
        WIDE=source.wide(tile_r, tile_c),
        DTYPE=DTYPES[dtype],
        INTEGER=integer,
        num_warps=warps,
    )
    return out


launch.register(
    {
        "decode_tiles": (_decode_tiles, _decode_tiles_fake),
        "round_trip": (_round_trip, _round_trip_fake),
    }
)
