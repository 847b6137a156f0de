"""Rotary position embedding of jagged queries and keys, to the same bits on every machine.

The angle of a pair is a whole number of 2^-64 turns for each position, so position x angle is exact
modulo a turn; sine and cosine of it are polynomials in float32, every operation rounded by itself.
Kernels compute the same (backends.triton_kernels.attention_rotary). float64 inputs are turned by
PyTorch's own sine and cosine.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Final

import torch

from lowprec.errors import UnsupportedError

_TURN: Final = Decimal("6.283185307179586476925286766559005768394338798750")
# Of sin and cos of z eighths of a turn (cos less 1, all over powers of z^2) on [-1, 1], fitted to
# 3e-9; written so that float32 holds them exactly.
SINE: Final = (0.7853981852531433, -0.08074543625116348, 0.00249000103212893, -3.59504520019982e-05)
COSINE: Final = (
    -0.3084251284599304,
    0.015854327008128166,
    -0.00032594200456514955,
    3.5313341868459247e-06,
)


@dataclass(frozen=True)
class Rotary:
    """Rotate pairs of channels by position x base^(-2i / dims), in float32 (arXiv 2104.09864).

    dims: the first channels that turn, even; None for all. Channel i turns with channel
    i + dims / 2, or with its neighbour where `interleaved`.
    """

    base: float = 10000.0
    dims: int | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.base < float("inf"):
            raise UnsupportedError(f"rotary: base must be positive, not {self.base!r}")
        if self.dims is not None and (self.dims < 2 or self.dims % 2):
            raise UnsupportedError(f"rotary: dims must be even and at least 2, not {self.dims!r}")

    def turning(self, head_dim: int) -> int:
        """Channels that turn; raises UnsupportedError where the head has fewer."""
        dims = head_dim if self.dims is None else self.dims
        if dims > head_dim:
            raise UnsupportedError(f"rotary: {dims} dims do not fit head dim {head_dim}")
        return dims

    def rotate(
        self, x: torch.Tensor, positions: torch.Tensor, *, back: bool = False
    ) -> torch.Tensor:
        """`x` [T, H, D] turned by `positions` [T], rounded once, to the dtype of x.

        back: the other way round, which is also the gradient.
        """
        dims = self.turning(x.shape[2])
        wide = torch.promote_types(x.dtype, torch.float32)
        sine, cosine = self._waves(positions, dims, wide)
        sine = -sine if back else sine
        turning = x[..., :dims].to(wide)
        if self.interleaved:
            a, b = turning[..., 0::2], turning[..., 1::2]
        else:
            a, b = turning.chunk(2, -1)
        pair = (a * cosine - b * sine, b * cosine + a * sine)
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat((turned.to(x.dtype), x[..., dims:]), -1)

    def _waves(
        self, positions: torch.Tensor, dims: int, wide: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sine and cosine [T, 1, dims / 2]."""
        if wide == torch.float64:
            powers = torch.arange(0, dims, 2, device=positions.device, dtype=wide) / -dims
            angles = positions.to(wide)[:, None, None] * self.base**powers
            return angles.sin(), angles.cos()
        steps = torch.tensor(_constants(self.base, dims), device=positions.device)
        return waves(positions.long()[:, None, None] * steps)


@lru_cache(maxsize=64)
def steps_of(base: float, dims: int) -> list[int]:
    """Turns a position in units of 2^-64, modulo a turn, as int64: base^(-2i / dims) / 2 pi."""
    with localcontext(prec=50):
        turns = [Decimal(base) ** (Decimal(-2 * i) / dims) / _TURN for i in range(dims // 2)]
        whole = [int((one * 2**64).to_integral_value()) % 2**64 for one in turns]
    return [one - 2**64 if one >= 2**63 else one for one in whole]


def _constants(base: float, dims: int) -> list[int]:
    return steps_of(base, dims)


# What torch.compiler.assume_constant_result says, without the import of the compiler.
_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]


def waves(phase: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sine and cosine, float32, of turns in units of 2^-64, int64."""
    turns = phase >> 32
    quarter = (turns + 2**29) >> 30
    z = (turns - (quarter << 30)).float() * 2.0**-29
    y = z * z
    s = z * (SINE[0] + y * (SINE[1] + y * (SINE[2] + y * SINE[3])))
    c = 1 + y * (COSINE[0] + y * (COSINE[1] + y * (COSINE[2] + y * COSINE[3])))
    odd = (quarter & 1).bool()
    sine, cosine = torch.where(odd, c, s), torch.where(odd, s, c)
    sine = torch.where((quarter & 2).bool(), -sine, sine)
    return sine, torch.where(((quarter + 1) & 2).bool(), -cosine, cosine)


def positions(cu_q: torch.Tensor, cu_k: torch.Tensor, rows: int) -> torch.Tensor:
    """Position [rows] of each query among the keys: i + (Lk - Lq), as masks count; no host sync.

    Keys are their own queries: positions(cu_k, cu_k, Tk).
    """
    row = torch.arange(rows, device=cu_q.device, dtype=torch.int32)
    if len(cu_q) < 2:
        return row
    # Clamped: rows behind the last offset are an error that is said elsewhere, in words.
    sequence = torch.bucketize(row, cu_q[1:], right=True).clamp(max=len(cu_q) - 2)
    ends = (cu_k[1:] - cu_k[:-1]) - cu_q[1:]
    return row + ends[sequence]
