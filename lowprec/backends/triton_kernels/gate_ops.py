"""Activations with the cast of their result, as torch.library ops on [R, C] matrices."""

from __future__ import annotations

from typing import Final

import torch
import triton

from lowprec.backends.triton_kernels import gates, launch
from lowprec.backends.triton_kernels.launch import LIBRARY, stored_as
from lowprec.backends.triton_kernels.norm_ops import coded, parts, shared_unit, too_wide, units_of
from lowprec.backends.triton_kernels.starting import repeated, start

_VALUES: Final = 4096
"""Values of a tile: 32 a thread of four warps."""


def tile_of(rows: int, cols: int, block: int) -> tuple[int, int]:
    """Rows and columns of a tile, which holds whole blocks of a row."""
    across = max(min(triton.next_power_of_2(cols), 2048), block)
    return min(max(_VALUES // across, 1), triton.next_power_of_2(rows)), across


LIBRARY.define("gate_cast(Tensor gate, Tensor? up, str kind, str cast) -> Tensor[]")


def _gate_cast_fake(
    gate: torch.Tensor, up: torch.Tensor | None, kind: str, cast: str
) -> list[torch.Tensor]:
    return coded(gate, cast)


@repeated
def gate_cast(
    gate: torch.Tensor, up: torch.Tensor | None, kind: str, cast: str
) -> list[torch.Tensor]:
    """See gates.gate_tiles."""
    out = coded(gate, cast)
    if gate.numel() == 0:
        return out
    integer, (rows, cols) = launch.INTEGER, gate.shape
    y, codes, scales, spec = parts(cast, out)
    tile_r, tile_c = tile_of(rows, cols, spec.block_c if spec else 1)
    matrices = (gate, up)
    unit = shared_unit(*matrices)
    start(
        gates.gate_tiles,
        -(-rows // tile_r) * -(-cols // tile_c),
        stored_as(gate, integer=integer),
        stored_as(up, integer=integer),
        stored_as(y, integer=integer),
        codes,
        scales,
        rows,
        cols // unit,
        units_of(gate, unit),
        units_of(up, unit),
        UNIT=unit,
        KIND=kind,
        SPEC=launch.constant(spec),
        DTYPE=launch.DTYPES[gate.dtype],
        TILE_R=tile_r,
        TILE_C=tile_c,
        WIDE=too_wide(tile_r, *matrices),
        INTEGER=integer,
        enable_fp_fusion=False,
    )
    return out


LIBRARY.define("gate_backward(Tensor dy, Tensor gate, Tensor? up, str kind) -> Tensor[]")


def _gate_backward_fake(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, kind: str
) -> list[torch.Tensor]:
    count = 1 if up is None else 2
    return [torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(count)]


@repeated
def gate_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, kind: str
) -> list[torch.Tensor]:
    """See gates.gate_backward_tiles: dgate, and dup where there is an up."""
    out = _gate_backward_fake(dy, gate, up, kind)
    _backward(dy, (gate, up), (out[0], None if up is None else out[1]), kind)
    return out


LIBRARY.define("gate_backward_halves(Tensor dy, Tensor both, str kind) -> Tensor")


def _gate_backward_halves_fake(dy: torch.Tensor, both: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.empty(both.shape, dtype=both.dtype, device=both.device)


def gate_backward_halves(dy: torch.Tensor, both: torch.Tensor, kind: str) -> torch.Tensor:
    """`gate_backward` of gate and up side by side, [R, 2C], into one matrix like them."""
    return _gate_backward_halves(dy, both, kind)[0]


@repeated
def _gate_backward_halves(dy: torch.Tensor, both: torch.Tensor, kind: str) -> list[torch.Tensor]:
    out = _gate_backward_halves_fake(dy, both, kind)
    (gate, up), (dgate, dup) = both.chunk(2, 1), out.chunk(2, 1)
    _backward(dy, (gate, up), (dgate, dup), kind)
    return [out]


def _backward(
    dy: torch.Tensor,
    sources: tuple[torch.Tensor, torch.Tensor | None],
    results: tuple[torch.Tensor, torch.Tensor | None],
    kind: str,
) -> None:
    gate, up = sources
    if gate.numel() == 0:
        return
    integer, (rows, cols) = launch.INTEGER, gate.shape
    tile_r, tile_c = tile_of(rows, cols, 1)
    matrices = (dy, *sources, results[0])
    unit = shared_unit(*matrices)
    start(
        gates.gate_backward_tiles,
        -(-rows // tile_r) * -(-cols // tile_c),
        stored_as(dy, integer=integer),
        *(stored_as(one, integer=integer) for one in (*sources, *results)),
        rows,
        cols // unit,
        units_of(dy, unit),
        units_of(gate, unit),
        units_of(up, unit),
        units_of(results[0], unit),
        UNIT=unit,
        KIND=kind,
        DTYPE=launch.DTYPES[gate.dtype],
        TILE_R=tile_r,
        TILE_C=tile_c,
        WIDE=too_wide(tile_r, *matrices),
        INTEGER=integer,
    )


launch.register(
    {
        "gate_cast": (gate_cast, _gate_cast_fake),
        "gate_backward": (gate_backward, _gate_backward_fake),
        "gate_backward_halves": (gate_backward_halves, _gate_backward_halves_fake),
    }
)
