"""Launches of the streamed norm: which rows it takes, and the shape of its programs."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import triton

from lowprec.backends.triton_kernels import launch, norm_pairs
from lowprec.backends.triton_kernels.launch import Spec, constant
from lowprec.backends.triton_kernels.starting import start

if TYPE_CHECKING:
    from lowprec.backends.triton_kernels.pipelined import Affine


class Rows(NamedTuple):
    """Launch shape: pairs and rows of a thread, warps along a row and of a program, programs a
    multiprocessor; whether weights stay in registers rather than in shared memory."""

    per_thread: int
    down: int
    across: int
    warps: int
    held: bool
    per_processor: int

    def tile_r(self, pairs: int) -> int:
        """Rows of a tile of `pairs` pairs."""
        return self.down * (self.warps // self.across) * (32 // min(32, pairs // self.per_thread))


WIDEST: Final = 16384
_TALLEST: Final = 64
"""Rows that no tile exceeds."""


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _major(device: int) -> int:
    return torch.cuda.get_device_capability(device)[0]


def paired(
    x: torch.Tensor, residual: torch.Tensor | None, *parameters: torch.Tensor | None
) -> bool:
    """Whether these are read as whole pairs of bf16 numbers, parameters as float32 as well."""
    rows = [one for one in (x, residual) if one is not None]
    pairs = rows + [one for one in parameters if one is not None and one.dtype != torch.float32]
    return (
        all(one.dtype == torch.bfloat16 and one.data_ptr() % 4 == 0 for one in pairs)
        and all(one.stride(0) % 2 == 0 and _TALLEST * one.stride(0) < 2**31 for one in rows)
        and x.shape[1] % 2 == 0
        and x.shape[1] <= WIDEST
    )


def shape_for(cols: int, *, summing: bool = False) -> Rows:
    """Launch shape of rows of `cols`; with a residual fewer programs fit a multiprocessor.

    The rest is the same for both: the order of sums must not depend on what else is done.
    """
    if cols <= 512:
        return Rows(4, 1, 1, 4, True, 4)
    if cols <= 1024:
        return Rows(8, 1, 1, 2, False, 6 if summing else 10)
    if cols <= 2048:
        return Rows(8, 4, 4, 4, True, 2 if summing else 3)
    across = max(triton.next_power_of_2(cols) // 2048, 1)
    fitting = 3 if across == 4 or not summing else 2
    return Rows(8, 1, across, max(across, 4), False, fitting if across <= 4 else 12 // across)


def as_pairs(t: torch.Tensor | None) -> torch.Tensor | None:
    """bf16 numbers [..., C] as int32 [..., C / 2], or codes as int16."""
    if t is None or t.dtype == torch.float32:
        return t
    return t.view(torch.int16 if t.dtype == torch.uint8 else torch.int32)


def units(t: torch.Tensor | None, unit: int) -> int:
    """Row stride of a matrix of pairs in units; 0 where there is none."""
    return 0 if t is None else t.stride(0) // unit


def normalize(
    sources: list[torch.Tensor | None],
    targets: list[torch.Tensor | None],
    eps: float,
    spec: Spec | None,
    *,
    amax: torch.Tensor | None = None,
    shape: Rows | None = None,
) -> None:
    """Normalize what `paired` allows.

    sources: x, residual, weight, bias; targets: summed, y, codes, scales, mean, rstd. amax: see
    takes_whole.
    """
    x = sources[0]
    assert x is not None
    rows, cols = x.shape
    pairs = max(triton.next_power_of_2(cols) // 2, 64)
    flat = [as_pairs(one) for one in sources]
    unit = math.gcd(8, *(one.stride(0) for one in flat[:2] if one is not None))
    arguments = [
        *flat,
        *map(as_pairs, targets[:3]),
        *targets[3:],
        rows,
        units(flat[0], unit),
        units(flat[1], unit),
        eps,
        1 / cols,
    ]
    constants = {
        "UNIT": unit,
        "COLS": cols,
        "CENTERED": targets[4] is not None,
        "SPEC": constant(spec),
        "P": pairs,
        # Each step is rounded by itself.
        "enable_fp_fusion": False,
    }
    if shape is None and not _streams(x):
        assert amax is None
        _plain(arguments, constants)
        return
    chosen = shape or shape_for(cols, summing=sources[1] is not None)
    tile_r = chosen.tile_r(pairs)
    from lowprec.backends.triton_kernels import norm_stream

    start(
        norm_stream.norm_rows_streamed,
        min(-(-rows // tile_r), _processors(x.device.index) * chosen.per_processor),
        *arguments[:10],
        amax,
        *arguments[10:],
        **constants,
        TILE_R=tile_r,
        PER=chosen.per_thread,
        DOWN=chosen.down,
        ACROSS=chosen.across,
        HELD=chosen.held,
        num_warps=chosen.warps,
    )


def _streams(x: torch.Tensor) -> bool:
    return launch.may_pipeline(x) and _major(x.device.index) >= 9


def takes_whole(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    parameters: tuple[torch.Tensor | None, torch.Tensor | None],
    text: str,
) -> bool:
    """Whether `normalize` can find the largest magnitude of the result, and pipelined.cast then
    normalize once more inside a cast with one scale for the whole tensor."""
    if not (paired(x, residual, *parameters) and _streams(x) and x.numel()):
        return False
    if residual is None:
        return launch.pipelines(x[None], text, text)
    from lowprec.backends.triton_kernels import pipelined

    return pipelined.takes_new(x, text, text)  # the sum


class Bands(NamedTuple):
    """Launch shape of the norm with both casts: columns of a tile, warps, threads that share a
    column, slots for what leaves, programs a multiprocessor."""

    tile_c: int
    warps: int
    split: int
    outs: int
    per_processor: int


_SHARED_BYTES: Final = 228 * 1024
"""Shared memory of a multiprocessor; each program has 1024 bytes of it for the system."""


def slots_of(bands: Bands) -> int:
    """Slots of the ring of a program: what shared memory holds besides what leaves.

    Sums that warps exchange, and barriers, take at most 128 bytes a warp and 64 more.
    """
    own = _SHARED_BYTES // bands.per_processor - 1024 - 128 * bands.warps - 64
    tile = 32 * bands.tile_c
    return (own - 2 * bands.outs * tile) // (2 * tile)


def bands_for(cols: int, *, centered: bool = False) -> Bands | None:
    """Launch shape for rows of `cols`, None for rows that shared memory cannot hold.

    The fastest on an H200 of those tried; a mean takes registers.
    """
    narrow, wide = Bands(256, 4, 1, 2, 2), Bands(512, 8, 1, 1, 1)
    for bands in (narrow, wide) if centered and cols <= 1024 else (wide, narrow):
        # Fewer slots than a band has tiles would wait for ever.
        if cols % bands.tile_c == 0 and slots_of(bands) > cols // bands.tile_c:
            return bands
    return None


def takes_both(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, row: str, column: str
) -> bool:
    """Whether the streamed norm can cast x [R, C] both ways."""
    specs = launch.specs_of(row, column)
    return (
        launch.may_pipeline(x)
        and paired(x, None, weight, bias)
        and x.data_ptr() % 16 == 0
        and x.stride(0) % 8 == 0
        and x.stride(0) >= x.shape[1]
        and _major(x.device.index) >= 9
        and bands_for(x.shape[1]) is not None
        and all(
            one is not None
            and one.element in ("e4m3", "e5m2")
            and one.e8m0
            and (one.block_r, one.block_c) == block
            for one, block in zip(specs, ((1, 32), (32, 1)), strict=True)
        )
    )


def normalize_both(
    x: torch.Tensor,
    casts: tuple[str, str],
    out: list[torch.Tensor],
    affine: Affine,
    eps: float,
    *,
    shape: Bands | None = None,
) -> None:
    """Fill the statistics of `affine`, and `out` as pipelined.normalize does; x is [R, C]."""
    rows, cols = x.shape
    chosen = shape or bands_for(cols, centered=affine.mean is not None)
    assert chosen is not None
    row_unit, bands = math.gcd(rows, 16), -(-rows // 32)
    codes, scales, codes_t, scales_t = out
    row, column = launch.specs_of(*casts)
    pairs = chosen.tile_c // 2
    from lowprec.backends.triton_kernels import norm_band_stream, pipelined

    start(
        norm_band_stream.norm_bands_streamed,
        min(bands, _processors(x.device.index) * chosen.per_processor),
        pipelined.tiled(x.view(torch.int32), 32, pairs),
        pipelined.tiled(codes.view(torch.int16), 32, pairs),
        pipelined.tiled(codes_t.view(torch.int8), chosen.tile_c, 32),
        scales,
        scales_t.view(torch.int16),
        as_pairs(affine.weight),
        as_pairs(affine.bias),
        affine.mean,
        affine.rstd,
        rows // row_unit,
        bands,
        eps,
        1 / cols,
        ROW_UNIT=row_unit,
        COLS=cols,
        CENTERED=affine.mean is not None,
        ROW=constant(row),
        COLUMN=constant(column),
        SLOTS=slots_of(chosen),
        OUTS=chosen.outs,
        SPLIT=chosen.split,
        num_warps=chosen.warps,
        enable_fp_fusion=False,
    )


def _plain(arguments: list[Any], constants: dict[str, Any]) -> None:
    rows, pairs = arguments[10], constants["P"]
    tile_r = max(min(2048 // pairs, 16), 1)
    start(
        norm_pairs.norm_rows_of_pairs,
        -(-rows // tile_r),
        *arguments,
        **constants,
        TILE_R=tile_r,
        INTEGER=launch.INTEGER,
        num_warps=4 if pairs <= 2048 else 16,
    )
