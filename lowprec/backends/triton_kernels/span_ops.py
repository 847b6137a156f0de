"""Casts whose scale spans a whole row, column or tensor, as torch.library ops; see launch."""

from __future__ import annotations

import torch
import triton

from lowprec.backends.triton_kernels import launch, spans
from lowprec.backends.triton_kernels.launch import LIBRARY, Source, padded, stored_as
from lowprec.backends.triton_kernels.starting import start
from lowprec.blocks import float_scales
from lowprec.formats import ALL, Cast

_WHOLE_ROW = 16384
_MAXIMUM_TILE = (8, 1024)


def free_scales(x: torch.Tensor, cast: Cast, *, by_column: bool, integer: bool) -> torch.Tensor:
    """Free scales of [B, R, C], in the shape of memory: [B, R, 1], [B, 1, C] or [B, 1, 1]."""
    batch, rows, cols = x.shape
    whole = cast.format.block == (ALL, ALL)
    if x.numel() == 0:
        shape = (batch, 1, 1) if whole else (batch, 1, cols) if by_column else (batch, rows, 1)
        amax = torch.zeros(shape, dtype=torch.float32, device=x.device)
        return float_scales(amax, cast.format.element)
    tile_r, tile_c = (64, 64) if by_column else (4, 1024)
    counts = (-(-rows // tile_r), cols) if by_column else (rows, -(-cols // tile_c))
    bits = torch.empty((batch, *counts), dtype=torch.int32, device=x.device)
    source = Source.of(x)
    start(
        spans.partial_maxima,
        source.programs(tile_r, tile_c),
        stored_as(x, integer=integer),
        bits,
        *source.extents,
        UNIT=source.unit,
        BY_COLUMN=by_column,
        TILE_R=tile_r,
        TILE_C=tile_c,
        WIDE=source.wide(tile_r, tile_c),
        INTEGER=integer,
    )
    dims = (-2, -1) if whole else (-2,) if by_column else (-1,)
    amax = bits.amax(dims, keepdim=True).view(torch.float32)
    return float_scales(amax, cast.format.element)


def cast_whole_rows(x: torch.Tensor, cast: Cast, out: list[torch.Tensor], *, integer: bool) -> None:
    """Fill codes and scales of [1, R, C] with one scale a row, C at most 16384, in one read."""
    _, rows, cols = x.shape
    source, across = Source.of(x), triton.next_power_of_2(cols)
    down = max(1024 // across, 1)
    start(
        spans.cast_whole_rows,
        -(-rows // down),
        stored_as(x, integer=integer),
        *out,
        rows,
        cols // source.unit,
        x.stride(1) // source.unit,
        UNIT=source.unit,
        ELEMENT=cast.format.element.name,
        MAX=cast.format.element.max,
        TILE_R=down,
        TILE_C=across,
        WIDE=source.wide(down, across),
        INTEGER=integer,
        # 32 values a thread, 64 of the longest rows: what a row needs is then shared by many.
        num_warps=max(across // (1024 if across <= 4096 else 2048), 1),
    )


def cast_spans(
    x: torch.Tensor, cast: Cast, *, by_column: bool, integer: bool
) -> list[torch.Tensor]:
    """Codes and scales of a cast whose scale spans a whole extent."""
    batch, rows, cols = x.shape
    whole = cast.format.block == (ALL, ALL)
    turn = by_column and not whole
    codes, scales = outputs(x, cast, by_column=by_column)
    one_read = batch == 1 and 0 < cols <= _WHOLE_ROW and not whole and not by_column
    if one_read and rows:
        cast_whole_rows(x, cast, [codes, scales], integer=integer)
        return [codes, scales]
    found = free_scales(x, cast, by_column=by_column, integer=integer)
    scales.copy_(found)
    if x.numel():
        scale_of = "tensor" if whole else "column" if by_column else "row"
        _encode(x, cast, found, codes, scale_of=scale_of, turn=turn, integer=integer)
    return [codes, scales]


def _encode(
    x: torch.Tensor,
    cast: Cast,
    scales: torch.Tensor,
    codes: torch.Tensor,
    *,
    scale_of: str,
    turn: bool,
    integer: bool,
) -> None:
    """Fill the codes of [B, R, C] under known scales; `turn` writes them transposed."""
    source = Source.of(x)
    tile_r, tile_c = (64, 64) if turn else (4, 1024)
    start(
        spans.encode_spans,
        source.programs(tile_r, tile_c),
        stored_as(x, integer=integer),
        scales.contiguous(),
        codes,
        *source.extents,
        codes.shape[2],
        UNIT=source.unit,
        ELEMENT=cast.format.element.name,
        SCALE=scale_of,
        TURN=turn,
        TILE_R=tile_r,
        TILE_C=tile_c,
        WIDE=source.wide(tile_r, tile_c, codes if turn else None),
        INTEGER=integer,
    )


def outputs(x: torch.Tensor, cast: Cast, *, by_column: bool) -> list[torch.Tensor]:
    """Empty codes and scales of [B, R, C]."""
    batch, rows, cols = x.shape
    if cast.format.block == (ALL, ALL):
        shapes = ((batch, rows, cols), (batch, 1, 1))
    elif by_column:
        shapes = ((batch, cols, padded(rows)), (batch, 1, cols))
    else:
        shapes = ((batch, rows, cols), (batch, rows, 1))
    types = (torch.uint8, torch.float32)
    return [torch.empty(s, dtype=t, device=x.device) for s, t in zip(shapes, types, strict=True)]


def raise_to_maximum(x: torch.Tensor, amax: torch.Tensor) -> None:
    """Raise amax, int32 [1], to the bits of the largest magnitude of x [B, R, C]."""
    source, tile = Source.of(x), _MAXIMUM_TILE
    start(
        spans.whole_maximum,
        source.programs(*tile),
        x,
        amax,
        *source.extents,
        UNIT=source.unit,
        TILE_R=tile[0],
        TILE_C=tile[1],
        WIDE=source.wide(*tile),
        INTEGER=False,
    )


LIBRARY.define("cast_tensor_both(Tensor x, str cast) -> Tensor[]")


def both_outputs(x: torch.Tensor, cast: str) -> list[torch.Tensor]:
    """Codes [B, R, C], transposed codes [B, C, R] and the one scale of x [B, R, C]."""
    batch, rows, cols = x.shape
    shapes = ((batch, rows, padded(cols)), (batch, cols, padded(rows)))
    found = [torch.empty(s, dtype=torch.uint8, device=x.device) for s in shapes]
    return [*found, torch.empty((1, 1, 1), dtype=torch.float32, device=x.device)]


def cast_tensor_both(x: torch.Tensor, text: str) -> list[torch.Tensor]:
    codes, codes_t, scale = both_outputs(x, text)
    if launch.pipelines(x, text, text) and x.numel():
        from lowprec.backends.triton_kernels import pipelined

        amax = torch.zeros(1, dtype=torch.int32, device=x.device)
        raise_to_maximum(x, amax)
        pipelined.cast(x, text, text, [codes, scale, codes_t, scale], amax=amax)
        return [codes, codes_t, scale]
    cast = Cast.parse(text)
    scale = free_scales(x, cast, by_column=False, integer=launch.INTEGER)
    for out, turn in ((codes, False), (codes_t, True)):
        if x.numel():
            _encode(x, cast, scale, out, scale_of="tensor", turn=turn, integer=launch.INTEGER)
    return [codes, codes_t, scale]


LIBRARY.define("cast_spans(Tensor x, str cast, bool by_column) -> Tensor[]")


def _cast_spans_fake(x: torch.Tensor, cast: str, by_column: bool) -> list[torch.Tensor]:
    return outputs(x, Cast.parse(cast), by_column=by_column)


def _cast_spans(x: torch.Tensor, cast: str, by_column: bool) -> list[torch.Tensor]:
    return cast_spans(x, Cast.parse(cast), by_column=by_column, integer=launch.INTEGER)


launch.register(
    {
        "cast_spans": (_cast_spans, _cast_spans_fake),
        "cast_tensor_both": (cast_tensor_both, both_outputs),
    }
)
