"""Rotary position embedding of jagged queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowprec.errors import UnsupportedError


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
        if not self.base > 0:
            raise UnsupportedError(f"rotary: base must be positive, not {self.base!r}")
        if self.dims is not None and (self.dims < 2 or self.dims % 2):
            raise UnsupportedError(f"rotary: dims must be even and at least 2, not {self.dims!r}")

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`x` [T, H, D] turned by `positions` [T], in the dtype of x."""
        dims = x.shape[2] if self.dims is None else self.dims
        if dims > x.shape[2]:
            raise UnsupportedError(f"rotary: {dims} dims do not fit head dim {x.shape[2]}")
        wide = torch.promote_types(x.dtype, torch.float32)
        powers = torch.arange(0, dims, 2, device=x.device, dtype=wide) / -dims
        angles = positions.to(wide)[:, None, None] * self.base**powers
        cos, sin = angles.cos(), angles.sin()
        turning = x[..., :dims].to(wide)
        if self.interleaved:
            a, b = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = turning.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.cat((turned.to(x.dtype), x[..., dims:]), -1)


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
