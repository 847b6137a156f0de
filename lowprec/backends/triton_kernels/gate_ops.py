"""Activations with the cast of their result, as torch.library ops on [R, C] matrices."""

from __future__ import annotations

import torch

from lowprec.backends.triton_kernels import gates, launch
from lowprec.backends.triton_kernels.launch import LIBRARY, Spec, stored_as
from lowprec.backends.triton_kernels.norm_ops import coded, parts, shared_unit, too_wide, units_of

_ONE = Spec("e4m3", "rceil", 1, 1, True)
LIBRARY.define("gate_cast(Tensor gate, Tensor? up, str kind, str cast) -> Tensor[]")


def _gate_cast_fake(
    gate: torch.Tensor, up: torch.Tensor | None, kind: str, cast: str
) -> list[torch.Tensor]:
    return coded(gate, cast)


def gate_cast(
    gate: torch.Tensor, up: torch.Tensor | None, kind: str, cast: str
) -> list[torch.Tensor]:
    """See gates.gate_tiles."""
    out = coded(gate, cast)
    if gate.numel() == 0:
        return out
    integer, (rows, cols) = launch.INTEGER, gate.shape
    y, codes, scales, spec = parts(cast, out)
    tile_r, tile_c = launch.tile_shape(rows, cols, spec or _ONE, None)
    tile_r *= 2 if rows > 1 else 1
    matrices = (gate, up)
    unit = shared_unit(*matrices)
    gates.gate_tiles[(-(-rows // tile_r) * -(-cols // tile_c),)](
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


def gate_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, kind: str
) -> list[torch.Tensor]:
    """See gates.gate_backward_tiles: dgate, and dup where there is an up."""
    out = _gate_backward_fake(dy, gate, up, kind)
    if gate.numel() == 0:
        return out
    integer, (rows, cols) = launch.INTEGER, gate.shape
    tile_r, tile_c = launch.tile_shape(rows, cols, _ONE, None)
    matrices = (dy, gate, up)
    unit = shared_unit(*matrices)
    gates.gate_backward_tiles[(-(-rows // tile_r) * -(-cols // tile_c),)](
        stored_as(dy, integer=integer),
        stored_as(gate, integer=integer),
        stored_as(up, integer=integer),
        stored_as(out[0], integer=integer),
        None if up is None else stored_as(out[1], integer=integer),
        rows,
        cols // unit,
        units_of(dy, unit),
        units_of(gate, unit),
        units_of(up, unit),
        UNIT=unit,
        KIND=kind,
        DTYPE=launch.DTYPES[gate.dtype],
        TILE_R=tile_r,
        TILE_C=tile_c,
        WIDE=too_wide(tile_r, *matrices),
        INTEGER=integer,
    )
    return out


launch.register(
    {
        "gate_cast": (gate_cast, _gate_cast_fake),
        "gate_backward": (gate_backward, _gate_backward_fake),
    }
)
