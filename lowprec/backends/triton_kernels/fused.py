"""Norms and activations whose result leaves as codes, so that it is never written in bf16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from lowprec.errors import UnsupportedError
from lowprec.formats import ALL, Cast
from lowprec.tensor import QuantizedTensor

WIDEST = 16384
KINDS = ("silu", "gelu", "gelu_tanh")


class Normalized(NamedTuple):
    """The result of a norm, and what its backward needs.

    result: the codes along the last axis, or the values in the dtype of x without a cast. source:
    what was normalized, x or x + residual. mean (LayerNorm only) and rstd: float32, one a row.
    """

    result: QuantizedTensor | torch.Tensor
    source: torch.Tensor
    mean: torch.Tensor | None
    rstd: torch.Tensor

    @property
    def statistics(self) -> list[torch.Tensor]:
        """rstd, and mean where there is one."""
        return [self.rstd] if self.mean is None else [self.rstd, self.mean]


def normalized(source: torch.Tensor, statistics: Sequence[torch.Tensor]) -> Normalized:
    """What `normalize` found, from its source and `Normalized.statistics`, without the result."""
    mean = statistics[1] if len(statistics) > 1 else None
    return Normalized(source, source, mean, statistics[0])


def normalize(
    x: torch.Tensor,
    cast: Cast | None,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    centered: bool = False,
    residual: torch.Tensor | None = None,
) -> Normalized:
    """RMSNorm, or LayerNorm if `centered`, over the last axis of x (+ residual), and its cast.

    The result is rounded to the dtype of x before the cast: the codes are those of a norm that is
    followed by a cast. Raises UnsupportedError for more than 16384 columns, for a cast whose scales
    span more than one row or a whole one, and for float64.
    """
    check(x, cast, "norm")
    if x.shape[-1] > WIDEST:
        raise UnsupportedError(f"norm over {x.shape[-1]} columns: at most {WIDEST} are supported")
    flat, other = _flat(x), None if residual is None else _flat(residual)
    text = "" if cast is None else cast.text
    out = list(_ops(flat).norm_cast(flat, other, weight, bias, eps, centered, text))
    source, mean, rstd = _found(out, x, residual, centered=centered)
    return Normalized(_result(out, x, cast), source, mean, rstd)


def normalize_both(
    x: torch.Tensor,
    casts: tuple[Cast, Cast],
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    centered: bool = False,
    residual: torch.Tensor | None = None,
) -> tuple[Normalized, QuantizedTensor]:
    """`normalize` with casts along the last axis of x and along its rows, all leading axes joined.

    The second result is cast along axis -2 of [rows, columns]. Raises UnsupportedError as
    `normalize` does, except that blocks of several rows are taken.
    """
    check(x, None, "norm")
    for cast in casts:
        _check_blocks(cast, "norm")
    flat, other = _flat(x), None if residual is None else _flat(residual)
    texts = casts[0].text, casts[1].text
    out = list(_ops(flat).norm_both(flat, other, weight, bias, eps, centered, *texts))
    source, mean, rstd = _found(out, x, residual, centered=centered)
    rows, cols = flat.shape
    codes, scales, codes_t, scales_t = out
    row = QuantizedTensor(
        codes[:, :cols].reshape(x.shape),
        _per_row(scales.mT, x) if casts[0].format.block[0] == 1 else scales.mT,
        casts[0].format,
        -1,
    )
    column = QuantizedTensor(codes_t[:, :rows].mT, scales_t, casts[1].format, -2)
    return Normalized(row, source, mean, rstd), column


def normalize_whole(
    x: torch.Tensor,
    cast: Cast,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    centered: bool = False,
    residual: torch.Tensor | None = None,
) -> tuple[Normalized, QuantizedTensor]:
    """`normalize_both` of a cast with one scale for the whole tensor (fp8_tensorwise).

    Raises UnsupportedError for another cast, for more than 16384 columns and for float64.
    """
    check(x, None, "norm")
    if cast.format.block != (ALL, ALL) or cast.stochastic:
        raise UnsupportedError(f"norm: {cast} has no one scale for the whole tensor, nearest")
    if x.shape[-1] > WIDEST:
        raise UnsupportedError(f"norm over {x.shape[-1]} columns: at most {WIDEST} are supported")
    flat, other = _flat(x), None if residual is None else _flat(residual)
    out = list(_ops(flat).norm_whole(flat, other, weight, bias, eps, centered, cast.text))
    source, mean, rstd = _found(out, x, residual, centered=centered)
    (rows, cols), (codes, codes_t, scale) = flat.shape, out
    of_x = scale if x.ndim == 2 else scale.reshape((1,) * x.ndim)
    row = QuantizedTensor(codes[:, :cols].reshape(x.shape), of_x, cast.format, -1)
    column = QuantizedTensor(codes_t[:, :rows].mT, scale, cast.format, -2)
    return Normalized(row, source, mean, rstd), column


def normalize_again(
    done: Normalized,
    cast: Cast | None,
    *,
    axis: int = -1,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> QuantizedTensor | torch.Tensor:
    """What `normalize` found, from its source and statistics, cast along `axis` (-1 or -2).

    The bits are those of the first time. All leading axes are joined: [rows, columns].
    """
    flat = _flat(done.source)
    rows = flat.shape[0]
    if cast is not None:
        _check_blocks(cast, "norm")
    text = "" if cast is None else cast.text
    row, column = (text, "") if axis == -1 else ("", text)
    out = _ops(flat).norm_again(flat, weight, bias, done.mean, done.rstd, row, column)
    if cast is None:
        values: torch.Tensor = out[0]
        return values
    codes, scales = out
    if axis == -1:
        return QuantizedTensor(codes, scales, cast.format, -1)
    codes = codes if codes.shape[1] == rows else codes[:, :rows]
    return QuantizedTensor(codes.mT, scales, cast.format, -2)


def normalize_backward(
    dy: torch.Tensor,
    done: Normalized,
    *,
    weight: torch.Tensor | None = None,
    has_bias: bool = False,
    passed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x (with `passed`, the gradient that skips the norm, added), weight and bias.

    The gradient of a residual is that of x. Those of weight and bias are float32 sums.
    """
    skipped = None if passed is None else _flat(passed)
    flat = _flat(done.source)
    out = list(
        _ops(flat).norm_backward(_flat(dy), flat, weight, done.mean, done.rstd, skipped, has_bias)
    )
    dx = _like(out.pop(0), done.source)
    return dx, None if weight is None else out.pop(0), out.pop(0) if has_bias else None


def activate(
    gate: torch.Tensor, up: torch.Tensor | None, cast: Cast | None, *, kind: str = "silu"
) -> QuantizedTensor | torch.Tensor:
    """activation(gate), times `up` if given, rounded to gate's dtype and cast along the last axis.

    kind: "silu", "gelu" (by erf) or "gelu_tanh". Raises UnsupportedError for another kind, for a
    cast whose scales span more than one row or a whole one, and for float64.
    """
    check(gate, cast, "activation")
    if kind not in KINDS:
        raise UnsupportedError(f"activation {kind!r} is not one of {', '.join(KINDS)}")
    other = None if up is None else _flat(up)
    text = "" if cast is None else cast.text
    return _result(list(_ops(gate).gate_cast(_flat(gate), other, kind, text)), gate, cast)


def activate_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, *, kind: str = "silu"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of gate and up."""
    other = None if up is None else _flat(up)
    out = _ops(gate).gate_backward(_flat(dy), _flat(gate), other, kind)
    return _like(out[0], gate), None if up is None else _like(out[1], gate)


def activate_halves_backward(
    dy: torch.Tensor, both: torch.Tensor, *, kind: str = "silu"
) -> torch.Tensor:
    """Gradient of gate and up side by side, [..., 2C], as one tensor; dy is [..., C]."""
    out: torch.Tensor = _ops(both).gate_backward_halves(_flat(dy), _flat(both), kind)
    return _like(out, both)


def check(x: torch.Tensor, cast: Cast | None, what: str) -> None:
    """Raise UnsupportedError for a source or cast that the fused kernels cannot take."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedError(f"{what}: x is {x.dtype}; use float32, bfloat16 or float16")
    if cast is None:
        return
    if cast.format.block[0] != 1:
        raise UnsupportedError(f"{what}: no fused cast to {cast}; use blocks of one row, nearest")
    _check_blocks(cast, what)


def _check_blocks(cast: Cast, what: str) -> None:
    if ALL in cast.format.block or cast.stochastic or not cast.format.power_of_two:
        raise UnsupportedError(f"{what}: no fused cast to {cast}; use blocks of one row, nearest")


def _found(
    out: list[torch.Tensor], x: torch.Tensor, residual: torch.Tensor | None, *, centered: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Source, mean and rstd, taken off what an op of a norm gave."""
    rstd, mean = out.pop(0), out.pop(0) if centered else None
    return x if residual is None else _like(out.pop(0), x), mean, rstd


def _flat(x: torch.Tensor) -> torch.Tensor:
    """x as [R, C] with unit stride along C."""
    x = x.detach() if x.requires_grad else x
    if x.ndim != 2:
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _like(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`out` [rows, C] with the shape of x, whose leading axes are joined in it."""
    return out if x.ndim == 2 else out.view(x.shape)


def _result(
    out: list[torch.Tensor], x: torch.Tensor, cast: Cast | None
) -> QuantizedTensor | torch.Tensor:
    if cast is None:
        return _like(out[0], x)
    codes, scales = out
    return QuantizedTensor(_like(codes, x), _per_row(scales, x), cast.format, -1)


def _per_row(scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Scales [rows, blocks] with the leading axes of x."""
    return scales if x.ndim == 2 else scales.reshape(*x.shape[:-1], scales.shape[-1])


def _ops(x: torch.Tensor) -> Any:
    return _launch().ops_for(x)


@cache
def _launch() -> Any:
    from lowprec.backends.triton_kernels import (  # register the ops
        gate_ops,
        launch,
        norm_ops,
        norm_whole_ops,
    )

    del gate_ops, norm_ops, norm_whole_ops
    return launch
