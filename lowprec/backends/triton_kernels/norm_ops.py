"""Norms with the casts of their result, as torch.library ops on [R, C] matrices; see norm."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final

import torch
import triton

from lowprec.backends.triton_kernels import launch, norm, streamed
from lowprec.backends.triton_kernels.launch import (
    LIBRARY,
    Spec,
    constant,
    parted,
    pitches,
    spec_of,
    specs_of,
    stored_as,
    tile_shape,
    warps_for,
)
from lowprec.backends.triton_kernels.starting import repeated, start


def shared_unit(*matrices: torch.Tensor | None) -> int:
    """Elements that every row starts and ends at a multiple of, at most 16."""
    shared = 16
    for one in matrices:
        if one is not None:
            shared = math.gcd(shared, one.shape[1], one.stride(0))
    return shared


def _summing_unit(x: torch.Tensor, residual: torch.Tensor | None) -> int:
    """At most 16 bytes of a source.

    More would widen the stores of codes, and with them the layout of the whole tile: sums would be
    added in another order with a cast than without.
    """
    return math.gcd(shared_unit(x, residual), 16 // x.element_size())


def units_of(t: torch.Tensor | None, unit: int) -> int:
    """Row stride of a matrix in units; 0 where there is none."""
    return 0 if t is None else t.stride(0) // unit


def too_wide(tile_r: int, *matrices: torch.Tensor | None) -> bool:
    """Whether offsets inside a tile of `tile_r` rows need 64 bits."""
    reach = [tile_r * max(t.stride(0), t.shape[1]) for t in matrices if t is not None]
    return max(reach) >= 2**31 - 2**15


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def _raw(t: torch.Tensor | None) -> torch.Tensor | None:
    return stored_as(t, integer=launch.INTEGER)


def coded(x: torch.Tensor, cast: str) -> list[torch.Tensor]:
    """Empty codes and scales of x [R, C] by row, or an empty result in x's dtype without a cast."""
    if not cast:
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device)]
    codes, scales = launch.outputs(x[None], cast, "")
    return [codes[0], scales[0]]


def parts(cast: str, found: list[torch.Tensor]) -> tuple[Any, Any, Any, Spec | None]:
    """y, codes, scales and spec of a launch."""
    if not cast:
        return found[0], None, None, None
    return None, found[0], found[1], spec_of(cast, by_column=False)


LIBRARY.define(
    "norm_cast(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centered,"
    " str cast) -> Tensor[]"
)


def norm_outputs(
    x: torch.Tensor, residual: torch.Tensor | None, centered: bool, cast: str
) -> list[torch.Tensor]:
    """rstd, mean if centered, x + residual if there is one, then codes and scales or y."""
    rows = x.shape[0]
    statistics = [
        torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(1 + centered)
    ]
    summed = [] if residual is None else coded(x, "")
    return [*statistics, *summed, *coded(x, cast)]


def _norm_cast_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    cast: str,
) -> list[torch.Tensor]:
    return norm_outputs(x, residual, centered, cast)


def row_tile(cols: int) -> tuple[int, int, int]:
    """Rows and columns of a tile of whole rows, and warps that share it."""
    tile_c = max(triton.next_power_of_2(cols), 128)
    values = 4096 if tile_c >= 2048 else 2048
    tile_r = max(min(values // tile_c, 16), 1)
    return tile_r, tile_c, max(tile_r * tile_c // 1024, 1) if tile_c < 8192 else 16


def backward_tile(cols: int, *, centered: bool) -> tuple[int, int, int, int]:
    """Rows and columns of a tile of the backward pass, warps, programs a multiprocessor."""
    tile_c = triton.next_power_of_2(cols)
    if tile_c <= 1024:
        return max(min(1024 // tile_c, 16), 1), tile_c, 2, 8
    return 1, tile_c, warps_for(2 * tile_c), 4 if centered or tile_c > 2048 else 6


_SUMMED: Final = (256, 16)
"""Programs and columns of a tile of their sums: many loads in flight, whole sectors of memory."""


@repeated
def norm_cast(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    cast: str,
) -> list[torch.Tensor]:
    """See norm.norm_rows."""
    out = norm_outputs(x, residual, centered, cast)
    if x.numel() == 0:
        return out
    integer, (rows, cols) = launch.INTEGER, x.shape
    y, codes, scales, spec = parts(cast, out[-2:] if cast else out[-1:])
    summed = None if residual is None else out[1 + centered]
    if streamed.paired(x, residual, weight, bias):
        targets = [summed, y, codes, scales, out[1] if centered else None, out[0]]
        streamed.normalize([x, residual, weight, bias], targets, eps, spec)
        return out
    # With and without a cast the same tile: sums are then added in the same order.
    unit = _summing_unit(x, residual)
    tile_r, tile_c, warps = row_tile(cols)

    start(
        norm.norm_rows,
        -(-rows // tile_r),
        _raw(x),
        _raw(residual),
        _raw(weight),
        _raw(bias),
        _raw(summed),
        _raw(y),
        codes,
        scales,
        out[1] if centered else None,
        out[0],
        rows,
        cols // unit,
        units_of(x, unit),
        units_of(residual, unit),
        eps,
        1 / cols,
        UNIT=unit,
        FULL=tile_c == cols,
        CENTERED=centered,
        SPEC=constant(spec),
        DTYPE=launch.DTYPES[x.dtype],
        TILE_R=tile_r,
        TILE_C=tile_c,
        WIDE=too_wide(tile_r, x, residual),
        INTEGER=integer,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return out


LIBRARY.define(
    "norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? mean, Tensor rstd, Tensor? passed,"
    " bool has_bias) -> Tensor[]"
)


def _norm_gradients(
    x: torch.Tensor, weight: torch.Tensor | None, has_bias: bool
) -> list[torch.Tensor]:
    """dx, then dweight and dbias in float32 where there are any."""
    sums = [
        torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
        for _ in range((weight is not None) + has_bias)
    ]
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device), *sums]


def _norm_backward_fake(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    passed: torch.Tensor | None,
    has_bias: bool,
) -> list[torch.Tensor]:
    return _norm_gradients(x, weight, has_bias)


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    passed: torch.Tensor | None,
    has_bias: bool,
) -> list[torch.Tensor]:
    """See norm.norm_backward_rows."""
    if x.numel() == 0:
        dx, *sums = _norm_gradients(x, weight, has_bias)
        return [dx, *(one.zero_() for one in sums)]
    count = 1 + (weight is not None) + has_bias
    return _norm_backward_parts(dy, x, weight, mean, rstd, passed, has_bias)[:count]


@repeated
def _norm_backward_parts(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    passed: torch.Tensor | None,
    has_bias: bool,
) -> list[torch.Tensor]:
    """dx, dweight, dbias, and what each program summed for these, float32 [programs, C]."""
    integer, (rows, cols) = launch.INTEGER, x.shape
    tile_r, tile_c, warps, each = backward_tile(cols, centered=mean is not None)
    programs = min(-(-rows // tile_r), each * _processors(x.device))
    dx, *sums = _norm_gradients(x, weight, has_bias)
    partial = [torch.empty((programs, cols), dtype=torch.float32, device=x.device) for _ in sums]
    unit = shared_unit(dy, x, passed)

    start(
        norm.norm_backward_rows,
        programs,
        _raw(dy),
        _raw(x),
        _raw(weight),
        mean,
        rstd,
        _raw(passed),
        _raw(dx),
        partial[0] if weight is not None else None,
        partial[-1] if has_bias else None,
        rows,
        cols // unit,
        units_of(dy, unit),
        units_of(x, unit),
        units_of(passed, unit),
        UNIT=unit,
        DTYPE=launch.DTYPES[x.dtype],
        TILE_R=tile_r,
        TILE_C=tile_c,
        WIDE=too_wide(tile_r, dy, x, passed),
        INTEGER=integer,
        num_warps=warps,
    )
    for total, parts_of_it in zip(sums, partial, strict=True):
        start(
            norm.sum_programs,
            -(-cols // _SUMMED[1]),
            parts_of_it,
            total,
            programs,
            cols,
            TILE_P=_SUMMED[0],
            TILE_C=_SUMMED[1],
            num_warps=8,
        )
    return [dx, *sums, *partial]


LIBRARY.define(
    "norm_both(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centered,"
    " str row, str column) -> Tensor[]"
)


def _norm_both_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    row: str,
    column: str,
) -> list[torch.Tensor]:
    """rstd, mean if centered, x + residual if there is one; codes and scales as cast_tiles'."""
    kept = norm_outputs(x, residual, centered, "")[:-1]
    return kept + [one[0] for one in launch.outputs(x[None], row, column)]


def band_shape(cols: int, row: Spec | None, column: Spec) -> tuple[int, int, bool]:
    """Rows and columns of a tile, and whether one tile holds a whole row."""
    tall = max(32, column.block_r)
    whole = max(triton.next_power_of_2(cols), 128)
    if tall * whole <= 16384:
        return tall, whole, True
    return tall, 256 if tall == 32 else 128, False


@repeated
def norm_both(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    row: str,
    column: str,
) -> list[torch.Tensor]:
    """See norm.norm_bands."""
    out = _norm_both_fake(x, residual, weight, bias, eps, centered, row, column)
    if x.numel() == 0:
        return out
    if residual is None and streamed.takes_both(x, weight, bias, row, column):
        from lowprec.backends.triton_kernels import pipelined

        affine = pipelined.Affine(weight, bias, out[1] if centered else None, out[0])
        streamed.normalize_both(x, (row, column), out[-4:], affine, eps)
        return out
    if residual is None and launch.pipelines(x[None], row, column):
        from lowprec.backends.triton_kernels import pipelined

        affine = pipelined.Affine(weight, bias, out[1] if centered else None, out[0])
        if pipelined.takes_norm(x, row, column, centered=centered):
            pipelined.normalize(x, row, column, out[-4:], norm=affine, eps=eps)
            return out
    rows, cols = x.shape
    row_spec, column_spec = specs_of(row, column)
    assert column_spec is not None
    tile_r, tile_c, held = band_shape(cols, row_spec, column_spec)
    codes, scales, codes_t, scales_t = parted(row, column, out[-4:])
    pitch, pitch_t, pitch_unit = pitches(codes, codes_t)
    unit = shared_unit(x, residual)
    start(
        norm.norm_bands,
        -(-rows // tile_r),
        _raw(x),
        _raw(residual),
        _raw(weight),
        _raw(bias),
        None if residual is None else _raw(out[1 + centered]),
        codes,
        scales,
        codes_t,
        scales_t,
        out[1] if centered else None,
        out[0],
        rows,
        cols // unit,
        units_of(x, unit),
        units_of(residual, unit),
        pitch,
        pitch_t,
        eps,
        1 / cols,
        UNIT=unit,
        PITCH_UNIT=pitch_unit,
        HELD=held,
        CENTERED=centered,
        ROW=constant(row_spec),
        COLUMN=constant(column_spec, turned=True),
        DTYPE=launch.DTYPES[x.dtype],
        TILE_R=tile_r,
        TILE_C=tile_c,
        WIDE=too_wide(max(tile_r, tile_c), x, residual, codes_t),
        INTEGER=launch.INTEGER,
        num_warps=warps_for(tile_r * tile_c // 2),
        enable_fp_fusion=False,
    )
    return out


LIBRARY.define(
    "norm_again(Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, str row,"
    " str column) -> Tensor[]"
)


def _norm_again_fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    row: str,
    column: str,
) -> list[torch.Tensor]:
    """Codes and scales as cast_tiles', or y where no cast is asked for."""
    if not row and not column:
        return coded(x, "")
    return [one[0] for one in launch.outputs(x[None], row, column)]


@repeated
def norm_again(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    row: str,
    column: str,
) -> list[torch.Tensor]:
    """See norm.norm_tiles."""
    out = _norm_again_fake(x, weight, bias, mean, rstd, row, column)
    if x.numel() == 0:
        return out
    if column and launch.pipelines(x[None], row, column):
        from lowprec.backends.triton_kernels import pipelined

        pipelined.cast(
            x[None],
            row,
            column,
            [t[None] for t in out],
            norm=pipelined.Affine(weight, bias, mean, rstd),
        )
        return out
    rows, cols = x.shape
    row_spec, column_spec = specs_of(row, column)
    plain = not row and not column
    shape_spec = row_spec or (None if column_spec else Spec("e4m3", "rceil", 1, 1, True))
    tile_r, tile_c = tile_shape(rows, cols, shape_spec, column_spec)
    codes, scales, codes_t, scales_t = [None] * 4 if plain else parted(row, column, out)
    pitch, pitch_t, pitch_unit = pitches(codes, codes_t)
    unit = shared_unit(x)
    programs = -(-rows // tile_r) * -(-cols // tile_c)
    start(
        norm.norm_tiles,
        programs,
        _raw(x),
        _raw(weight),
        _raw(bias),
        mean,
        rstd,
        _raw(out[0]) if plain else None,
        codes,
        scales,
        codes_t,
        scales_t,
        rows,
        cols // unit,
        units_of(x, unit),
        pitch,
        pitch_t,
        UNIT=unit,
        PITCH_UNIT=pitch_unit,
        ROW=constant(row_spec),
        COLUMN=constant(column_spec, turned=True),
        DTYPE=launch.DTYPES[x.dtype],
        TILE_R=tile_r,
        TILE_C=tile_c,
        WIDE=too_wide(max(tile_r, tile_c), x, codes_t),
        INTEGER=launch.INTEGER,
        num_warps=8 if tile_r * tile_c >= 8192 else 4,
        enable_fp_fusion=False,
    )
    return out


launch.register(
    {
        "norm_cast": (norm_cast, _norm_cast_fake),
        "norm_backward": (norm_backward, _norm_backward_fake),
        "norm_both": (norm_both, _norm_both_fake),
        "norm_again": (norm_again, _norm_again_fake),
    }
)
