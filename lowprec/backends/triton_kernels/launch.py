"""The casts as torch.library ops: launch shapes, outputs, and what the compiler may assume.

Ops take a matrix [B, R, C] with unit stride along C. A cast "by row" has codes [B, R, C] and scales
in the order of blocks; one "by column" has both transposed, codes [B, C, R], so that codes are
contiguous along their contraction in either case. Rows of codes may be padded to 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton

from lowprec.backends.triton_kernels import spans, tiles, values
from lowprec.blocks import float_scales
from lowprec.formats import ALL, FORMATS, Cast, Format

LIBRARY: Final = torch.library.Library("lowprec", "FRAGMENT")
INTEGER: Final[bool] = bool(triton.knobs.runtime.interpret)
"""Whether casts use integer arithmetic; see codec."""

_DTYPES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_WHOLE_ROW: Final = 16384


class Spec(NamedTuple):
    """A cast as the kernels read it: block extents are those of memory."""

    element: str
    rule: str
    block_r: int
    block_c: int
    e8m0: bool


@lru_cache(maxsize=256)
def spec_of(text: str, *, by_column: bool) -> Spec:
    """The cast written as `text`, along rows of memory or down its columns."""
    cast = Cast.parse(text)
    across, along = cast.format.block
    block = (along, across) if by_column else (across, along)
    return Spec(cast.format.element.name, str(cast.scale_rule), *block, cast.format.scale == "e8m0")


def _unit(x: torch.Tensor) -> int:
    """Elements that every row of [B, R, C] starts and ends at a multiple of, at most 16."""
    batch_stride, row_stride, _ = x.stride()
    return math.gcd(x.shape[2], row_stride, batch_stride if x.shape[0] > 1 else 0, 16)


def padded(count: int) -> int:
    """`count` bytes rounded up to whole rows of 16."""
    return count + -count % 16


def _outputs(x: torch.Tensor, row: str, column: str) -> list[torch.Tensor]:
    """Codes and scales by row, then by column; in company those by row are transposed."""
    batch, rows, cols = x.shape
    found = []
    for text, by_column in ((row, False), (column, True)):
        if not text:
            continue
        spec = spec_of(text, by_column=by_column)
        shape = (cols, padded(rows)) if by_column else (rows, padded(cols) if column else cols)
        counts = [-(-rows // spec.block_r), -(-cols // spec.block_c)]
        if column and not by_column:
            counts.reverse()
        scale_type = torch.uint8 if spec.e8m0 else torch.float32
        found += [
            torch.empty((batch, *shape), dtype=torch.uint8, device=x.device),
            torch.empty((batch, *counts), dtype=scale_type, device=x.device),
        ]
    return found


def tile_shape(rows: int, cols: int, row: Spec | None, column: Spec | None) -> tuple[int, int]:
    """Rows and columns of the tile of one program of the plain kernels."""
    specs = [one for one in (row, column) if one is not None]
    tall = max(one.block_r for one in specs)
    wide = max(one.block_c for one in specs)
    if tall > 1:
        return max(tall, 64 if column else 32), max(wide, 64 if column else 128)
    whole = triton.next_power_of_2(max(cols, 1))
    across = max(2048 if whole > 4096 or cols % 2048 == 0 else whole, wide)
    # Where a tile reaches past the columns, more rows in flight make up for its idle threads.
    values = 2048 if cols % across == 0 else 8192 if across == 1024 else 4096
    down = min(max(values // across, 1), triton.next_power_of_2(max(rows, 1)))
    return down, across


def cast_plain(
    x: torch.Tensor, row: str, column: str, out: list[torch.Tensor], *, integer: bool
) -> None:
    """Fill `out` by the plain kernel; `integer` selects integer encoding."""
    batch, rows, cols = x.shape
    specs = [
        spec_of(text, by_column=by_column) if text else None
        for text, by_column in ((row, False), (column, True))
    ]
    tile_r, tile_c = tile_shape(rows, cols, *specs)
    both = ([*out[:2]] if row else [None, None]) + (out[-2:] if column else [None, None])
    codes, scales, codes_t, scales_t = both
    pitches = [1 if one is None else one.shape[2] for one in (codes, codes_t)]
    unit, pitch_unit = (
        _unit(x),
        math.gcd(16, *(p for p in pitches if p > 1)) if max(pitches) > 1 else 1,
    )
    grid = (batch * -(-rows // tile_r) * -(-cols // tile_c),)
    tiles.cast_tiles[grid](
        stored_as(x, integer=integer),
        codes,
        scales,
        codes_t,
        scales_t,
        rows,
        cols // unit,
        x.stride(0) // unit if batch > 1 else 0,
        x.stride(1) // unit,
        pitches[0] // pitch_unit,
        pitches[1] // pitch_unit,
        UNIT=unit,
        PITCH_UNIT=pitch_unit,
        ROW=None if specs[0] is None else tuple(specs[0]),
        COLUMN=None if specs[1] is None else tuple(specs[1]),
        TILE_R=tile_r,
        TILE_C=tile_c,
        INTEGER=integer,
        num_warps=8 if tile_r * tile_c >= 16384 else 4,
    )


LIBRARY.define("cast_tiles(Tensor x, str row, str column) -> Tensor[]")


def _cast_tiles_fake(x: torch.Tensor, row: str, column: str) -> list[torch.Tensor]:
    return _outputs(x, row, column)


def _cast_tiles(x: torch.Tensor, row: str, column: str) -> list[torch.Tensor]:
    out = _outputs(x, row, column)
    if x.numel() == 0:
        return out
    if column and x.is_cuda and not INTEGER:
        from lowprec.backends.triton_kernels import pipelined

        if pipelined.takes(x, row, column):
            pipelined.cast(x, row, column, out)
            return out
    cast_plain(x, row, column, out, integer=INTEGER)
    return out


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
    unit = _unit(x)
    spans.partial_maxima[(batch * -(-rows // tile_r) * -(-cols // tile_c),)](
        stored_as(x, integer=integer),
        bits,
        rows,
        cols // unit,
        x.stride(0) // unit if batch > 1 else 0,
        x.stride(1) // unit,
        UNIT=unit,
        BY_COLUMN=by_column,
        TILE_R=tile_r,
        TILE_C=tile_c,
        INTEGER=integer,
    )
    dims = (-2, -1) if whole else (-2,) if by_column else (-1,)
    amax = bits.amax(dims, keepdim=True).view(torch.float32)
    return float_scales(amax, cast.format.element)


def cast_whole_rows(x: torch.Tensor, cast: Cast, out: list[torch.Tensor], *, integer: bool) -> None:
    """Fill codes and scales of [1, R, C] with one scale a row, C at most 16384, in one read."""
    _, rows, cols = x.shape
    unit, across = _unit(x), triton.next_power_of_2(cols)
    down = max(2048 // across, 1)
    spans.cast_whole_rows[(-(-rows // down),)](
        stored_as(x, integer=integer),
        out[0],
        out[1],
        rows,
        cols // unit,
        x.stride(1) // unit,
        UNIT=unit,
        ELEMENT=cast.format.element.name,
        MAX=cast.format.element.max,
        TILE_R=down,
        TILE_C=across,
        INTEGER=integer,
        num_warps=4 if across <= 4096 else 8,
    )


def cast_spans(
    x: torch.Tensor, cast: Cast, *, by_column: bool, integer: bool
) -> list[torch.Tensor]:
    """Codes and scales of a cast whose scale spans a whole extent."""
    batch, rows, cols = x.shape
    whole = cast.format.block == (ALL, ALL)
    turn = by_column and not whole
    codes, scales = _span_outputs(x, cast, by_column=by_column)
    one_read = batch == 1 and 0 < cols <= _WHOLE_ROW and not whole and not by_column
    if one_read and rows:
        cast_whole_rows(x, cast, [codes, scales], integer=integer)
        return [codes, scales]
    found = free_scales(x, cast, by_column=by_column, integer=integer)
    scales.copy_(found)
    if x.numel():
        unit = _unit(x)
        tile_r, tile_c = (64, 64) if turn else (4, 1024)
        spans.encode_spans[(batch * -(-rows // tile_r) * -(-cols // tile_c),)](
            stored_as(x, integer=integer),
            found.contiguous(),
            codes,
            rows,
            cols // unit,
            x.stride(0) // unit if batch > 1 else 0,
            x.stride(1) // unit,
            codes.shape[2],
            UNIT=unit,
            ELEMENT=cast.format.element.name,
            SCALE="tensor" if whole else "column" if by_column else "row",
            TURN=turn,
            TILE_R=tile_r,
            TILE_C=tile_c,
            INTEGER=integer,
        )
    return [codes, scales]


def _span_outputs(x: torch.Tensor, cast: Cast, *, by_column: bool) -> list[torch.Tensor]:
    batch, rows, cols = x.shape
    if cast.format.block == (ALL, ALL):
        shapes = ((batch, rows, cols), (batch, 1, 1))
    elif by_column:
        shapes = ((batch, cols, padded(rows)), (batch, 1, cols))
    else:
        shapes = ((batch, rows, cols), (batch, rows, 1))
    types = (torch.uint8, torch.float32)
    return [torch.empty(s, dtype=t, device=x.device) for s, t in zip(shapes, types, strict=True)]


LIBRARY.define("cast_spans(Tensor x, str cast, bool by_column) -> Tensor[]")


def _cast_spans_fake(x: torch.Tensor, cast: str, by_column: bool) -> list[torch.Tensor]:
    return _span_outputs(x, Cast.parse(cast), by_column=by_column)


def _cast_spans(x: torch.Tensor, cast: str, by_column: bool) -> list[torch.Tensor]:
    return cast_spans(x, Cast.parse(cast), by_column=by_column, integer=INTEGER)


def stored_as(t: torch.Tensor, *, integer: bool) -> torch.Tensor:
    """`t` as the kernels write it: bf16 by its bits where encoding is by integers."""
    return t.view(torch.int16) if integer and t.dtype == torch.bfloat16 else t


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
    integer = INTEGER if integer is None else integer
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if codes.numel() == 0:
        return out
    batch, rows, cols = codes.shape
    across, along = (0 if extent == ALL else extent for extent in fmt.block)
    block_r, block_c = (along, across) if by_column else (across, along)
    tile_r, tile_c = max(8, block_r), max(256 if block_r < 128 else 128, block_c)
    unit = _unit(codes)
    values.decode_tiles[(batch * -(-rows // tile_r) * -(-cols // tile_c),)](
        codes,
        scales,
        stored_as(out, integer=integer),
        rows,
        cols // unit,
        codes.stride(0) // unit if batch > 1 else 0,
        codes.stride(1) // unit,
        UNIT=unit,
        ELEMENT=fmt.element.name,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        E8M0=fmt.scale == "e8m0",
        TILE_R=tile_r,
        TILE_C=tile_c,
        DTYPE=_DTYPES[dtype],
        INTEGER=integer,
        num_warps=8 if tile_r * tile_c >= 16384 else 4,
    )
    return out


LIBRARY.define("round_trip(Tensor x, str cast, bool by_column, ScalarType dtype) -> Tensor")


def _round_trip_fake(
    x: torch.Tensor, cast: str, by_column: bool, dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _round_trip(x: torch.Tensor, cast: str, by_column: bool, dtype: torch.dtype) -> torch.Tensor:
    return round_trip(x, cast, by_column=by_column, dtype=dtype, integer=INTEGER)


def round_trip(
    x: torch.Tensor, cast: str, *, by_column: bool, dtype: torch.dtype, integer: bool
) -> torch.Tensor:
    """Values of [B, R, C] after a cast, in the order of memory."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return out
    batch, rows, cols = x.shape
    spec = spec_of(cast, by_column=by_column)
    tile_r, tile_c = max(8, spec.block_r), max(256 if spec.block_r < 128 else 128, spec.block_c)
    unit = _unit(x)
    values.round_trip_tiles[(batch * -(-rows // tile_r) * -(-cols // tile_c),)](
        stored_as(x, integer=integer),
        stored_as(out, integer=integer),
        rows,
        cols // unit,
        x.stride(0) // unit if batch > 1 else 0,
        x.stride(1) // unit,
        UNIT=unit,
        SPEC=tuple(spec),
        TILE_R=tile_r,
        TILE_C=tile_c,
        DTYPE=_DTYPES[dtype],
        INTEGER=integer,
        num_warps=8 if tile_r * tile_c >= 16384 else 4,
    )
    return out


def _register() -> None:
    """Bind each op to its kernel and to what the compiler may assume of it."""
    bound: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "cast_tiles": (_cast_tiles, _cast_tiles_fake),
        "cast_spans": (_cast_spans, _cast_spans_fake),
        "decode_tiles": (_decode_tiles, _decode_tiles_fake),
        "round_trip": (_round_trip, _round_trip_fake),
    }
    for name, (kernel, fake) in bound.items():
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lowprec::{name}", fake, lib=LIBRARY)


_register()
