"""Rotation and cast as a torch.library op on matrices [B, R, C]; see launch."""

from __future__ import annotations

from typing import Final

import torch
import triton

from lowprec.backends.triton_kernels import butterfly, launch
from lowprec.backends.triton_kernels.launch import LIBRARY, Source, spec_of, stored_as
from lowprec.backends.triton_kernels.starting import start
from lowprec.backends.triton_kernels.views import Draws

_VALUES: Final = 1024
"""Values of a tile: 32 a thread. Programs of one warp wait for no other."""
_WARPS: Final = 1
_TALL: Final = 4096

LIBRARY.define(
    "rotate_cast(Tensor x, Tensor? signs, int size, float factor, str cast, bool by_column,"
    " Tensor? words, int[] numbers, str groups) -> Tensor[]"
)


def _outputs(x: torch.Tensor, size: int, cast: str, by_column: bool) -> list[torch.Tensor]:
    batch, rows, cols = x.shape
    spec = spec_of(cast, by_column=False)
    lines, minors = (cols, rows) if by_column else (rows, cols)
    length = minors + -minors % size
    blocks = -(-length // spec.block_c)
    shape = (batch, blocks, lines) if by_column else (batch, lines, blocks)
    scale_type = torch.uint8 if spec.e8m0 else torch.float32
    return [
        torch.empty((batch, lines, length), dtype=torch.uint8, device=x.device),
        torch.empty(shape, dtype=scale_type, device=x.device),
    ]


def _rotate_cast_fake(
    x: torch.Tensor,
    signs: torch.Tensor | None,
    size: int,
    factor: float,
    cast: str,
    by_column: bool,
    words: torch.Tensor | None,
    numbers: list[int],
    groups: str,
) -> list[torch.Tensor]:
    return _outputs(x, size, cast, by_column)


def tile_of(lines: int, length: int, block: int, size: int, *, tall: bool) -> tuple[int, int]:
    """Lines of a tile and groups of 32 along the contraction."""
    if tall:  # by column, or words in groups across lines: 64 bytes of each row of the source
        return 32, max(_TALL // 32, block, size) // 32
    wide = min(triton.next_power_of_2(max(length, 1)), _VALUES)
    wide = max(wide, block, size, 32)
    return max(_VALUES // wide, 1), wide // 32


def _rotate_cast(
    x: torch.Tensor,
    signs: torch.Tensor | None,
    size: int,
    factor: float,
    cast: str,
    by_column: bool,
    words: torch.Tensor | None,
    numbers: list[int],
    groups: str,
) -> list[torch.Tensor]:
    out = _outputs(x, size, cast, by_column)
    if out[0].numel():
        options = (size, factor, cast, by_column)
        rotate_cast(
            x, signs, options, Draws.read(words, numbers, groups), out, integer=launch.INTEGER
        )
    return out


def rotate_cast(
    x: torch.Tensor,
    signs: torch.Tensor | None,
    options: tuple[int, float, str, bool],
    drawn: Draws,
    out: list[torch.Tensor],
    *,
    integer: bool,
) -> None:
    """Fill codes and scales; options: size, factor, cast, by column. See butterfly.rotate_tiles."""
    size, factor, cast, by_column = options
    source, spec = Source.of(x), spec_of(cast, by_column=False)
    batch, lines, length = out[0].shape
    tall = by_column or drawn.groups == "outer"
    tile_m, groups = tile_of(lines, length, spec.block_c, size, tall=tall)
    programs = batch * -(-lines // tile_m) * -(-length // (groups * 32))
    reach = groups * 32 if by_column else tile_m
    start(
        butterfly.rotate_tiles,
        programs,
        stored_as(x, integer=integer),
        signs,
        *out,
        drawn.words,
        *source.extents,
        length // 16,
        drawn.first_call,
        drawn.key_0,
        drawn.key_1,
        UNIT=source.unit,
        BY_COLUMN=by_column,
        SIZE=size,
        FACTOR=factor,
        SPEC=(spec.element, spec.rule, spec.block_c, spec.e8m0),
        GROUPS=drawn.groups,
        TILE_M=tile_m,
        NB=groups,
        ACROSS=-(-length // (groups * 32)) if batch == 1 and not by_column else 0,
        WIDE=source.wide(reach, 1),
        INTEGER=integer,
        num_warps=4 if tall or tile_m * groups > 32 else _WARPS,
    )


launch.register({"rotate_cast": (_rotate_cast, _rotate_cast_fake)})
