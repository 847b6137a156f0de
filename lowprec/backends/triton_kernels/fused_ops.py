"""Norms and activations with the cast of their result, as torch.library ops on [R, C] matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton

from lowprec.backends.triton_kernels import gates, launch, norm
from lowprec.backends.triton_kernels.launch import LIBRARY, Spec, spec_of, stored_as

WIDEST = 16384


def _unit(*matrices: torch.Tensor | None) -> int:
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
    return math.gcd(_unit(x, residual), 16 // x.element_size())


def _units(t: torch.Tensor | None, unit: int) -> int:
    return 0 if t is None else t.stride(0) // unit


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def _coded(x: torch.Tensor, cast: str) -> list[torch.Tensor]:
    """Empty codes and scales of x [R, C] by row, or an empty result in x's dtype without a cast."""
    if not cast:
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device)]
    codes, scales = launch._outputs(x[None], cast, "")
    return [codes[0], scales[0]]


def _parts(cast: str, found: list[torch.Tensor]) -> tuple[Any, Any, Any, Spec | None]:
    """y, codes, scales and spec of a launch."""
    if not cast:
        return found[0], None, None, None
    return None, found[0], found[1], spec_of(cast, by_column=False)


LIBRARY.define(
    "norm_cast(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centered,"
    " str cast) -> Tensor[]"
)


def _norm_outputs(
    x: torch.Tensor, residual: torch.Tensor | None, centered: bool, cast: str
) -> list[torch.Tensor]:
    """rstd, mean if centered, x + residual if there is one, then codes and scales or y."""
    rows = x.shape[0]
    statistics = [
        torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(1 + centered)
    ]
    summed = [] if residual is None else _coded(x, "")
    return [*statistics, *summed, *_coded(x, cast)]


def _norm_cast_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    cast: str,
) -> list[torch.Tensor]:
    return _norm_outputs(x, residual, centered, cast)


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
    out = _norm_outputs(x, residual, centered, cast)
    if x.numel() == 0:
        return out
    integer, (rows, cols) = launch.INTEGER, x.shape
    y, codes, scales, spec = _parts(cast, out[-2:] if cast else out[-1:])
    summed = None if residual is None else out[1 + centered]
    # With and without a cast the same tile: sums are then added in the same order.
    unit, tile_c = _summing_unit(x, residual), max(triton.next_power_of_2(cols), 128)
    tile_r = max(min(4096 // tile_c, 16), 1)

    def raw(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else stored_as(t, integer=integer)

    norm.norm_rows[(-(-rows // tile_r),)](
        raw(x),
        raw(residual),
        raw(weight),
        raw(bias),
        raw(summed),
        raw(y),
        codes,
        scales,
        out[1] if centered else None,
        out[0],
        rows,
        cols // unit,
        _units(x, unit),
        _units(residual, unit),
        eps,
        1 / cols,
        UNIT=unit,
        FULL=tile_c == cols,
        CENTERED=centered,
        SPEC=None if spec is None else tuple(spec),
        DTYPE=launch._DTYPES[x.dtype],
        TILE_R=tile_r,
        TILE_C=tile_c,
        INTEGER=integer,
        num_warps=warps_for(tile_r * tile_c),
        enable_fp_fusion=False,
    )
    return out


def warps_for(elements: int) -> int:
    """Warps of a program that holds so many float32 values in registers."""
    return 4 if elements <= 4096 else 8 if elements <= 8192 else 16


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
    out = _norm_gradients(x, weight, has_bias)
    integer, (rows, cols) = launch.INTEGER, x.shape
    if x.numel() == 0:
        return [out[0], *(t.zero_() for t in out[1:])]
    tile_c = triton.next_power_of_2(cols)
    tile_r = max(min(2048 // tile_c, 16), 1)
    programs = min(-(-rows // tile_r), 4 * _processors(x.device))
    shape = (programs, cols)
    partial = [torch.empty(shape, dtype=torch.float32, device=x.device) for _ in out[1:]]
    unit = _unit(dy, x, passed)

    def raw(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else stored_as(t, integer=integer)

    norm.norm_backward_rows[(programs,)](
        raw(dy),
        raw(x),
        raw(weight),
        mean,
        rstd,
        raw(passed),
        raw(out[0]),
        partial[0] if weight is not None else None,
        partial[-1] if has_bias else None,
        rows,
        cols // unit,
        _units(dy, unit),
        _units(x, unit),
        _units(passed, unit),
        UNIT=unit,
        DTYPE=launch._DTYPES[x.dtype],
        TILE_R=tile_r,
        TILE_C=tile_c,
        INTEGER=integer,
        num_warps=warps_for(2 * tile_r * tile_c),
    )
    return [out[0], *(one.sum(0) for one in partial)]


LIBRARY.define("gate_cast(Tensor gate, Tensor? up, str kind, str cast) -> Tensor[]")


def _gate_cast_fake(
    gate: torch.Tensor, up: torch.Tensor | None, kind: str, cast: str
) -> list[torch.Tensor]:
    return _coded(gate, cast)


def gate_cast(
    gate: torch.Tensor, up: torch.Tensor | None, kind: str, cast: str
) -> list[torch.Tensor]:
    """See gates.gate_tiles."""
    out = _coded(gate, cast)
    if gate.numel() == 0:
        return out
    integer, (rows, cols) = launch.INTEGER, gate.shape
    y, codes, scales, spec = _parts(cast, out)
    tile_r, tile_c = launch.tile_shape(rows, cols, spec or Spec("e4m3", "rceil", 1, 1, True), None)
    tile_r *= 2 if rows > 1 else 1
    unit = _unit(gate, up)
    gates.gate_tiles[(-(-rows // tile_r) * -(-cols // tile_c),)](
        stored_as(gate, integer=integer),
        None if up is None else stored_as(up, integer=integer),
        None if y is None else stored_as(y, integer=integer),
        codes,
        scales,
        rows,
        cols // unit,
        _units(gate, unit),
        _units(up, unit),
        UNIT=unit,
        KIND=kind,
        SPEC=None if spec is None else tuple(spec),
        DTYPE=launch._DTYPES[gate.dtype],
        TILE_R=tile_r,
        TILE_C=tile_c,
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
    tile_r, tile_c = launch.tile_shape(rows, cols, Spec("e4m3", "rceil", 1, 1, True), None)
    unit = _unit(dy, gate, up)
    gates.gate_backward_tiles[(-(-rows // tile_r) * -(-cols // tile_c),)](
        stored_as(dy, integer=integer),
        stored_as(gate, integer=integer),
        None if up is None else stored_as(up, integer=integer),
        stored_as(out[0], integer=integer),
        None if up is None else stored_as(out[1], integer=integer),
        rows,
        cols // unit,
        _units(dy, unit),
        _units(gate, unit),
        _units(up, unit),
        UNIT=unit,
        KIND=kind,
        DTYPE=launch._DTYPES[gate.dtype],
        TILE_R=tile_r,
        TILE_C=tile_c,
        INTEGER=integer,
    )
    return out


def _register() -> None:
    """Bind each op to its kernel and to what the compiler may assume of it."""
    bound: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "norm_cast": (norm_cast, _norm_cast_fake),
        "norm_backward": (norm_backward, _norm_backward_fake),
        "gate_cast": (gate_cast, _gate_cast_fake),
        "gate_backward": (gate_backward, _gate_backward_fake),
    }
    for name, (kernel, fake) in bound.items():
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lowprec::{name}", fake, lib=LIBRARY)


_register()
