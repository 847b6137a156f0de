"""What comes between a projection and its attention: RMSNorm of q and k, and rotary embedding.

    x' = round(turn(x rstd w)),  rstd = 1 / sqrt(mean(x^2) + eps) over the head dim

in float32 (float64 of float64), rounded once, to the dtype of x; what is cast to 8 bits is x'. The
turn is exact to the bit everywhere (lowprec.rotary), the norm up to the order of its sum. The
functions here are the law, of x [T, H, D] in plain PyTorch; gradients by hand, because backends
compute x' again in the backward pass instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from lowprec.rotary import Rotary, positions


@dataclass(frozen=True)
class Front:
    """eps of the norm, where there are weights for it, and the rotary embedding, if any."""

    eps: float
    rotary: Rotary | None

    @property
    def numbers(self) -> list[float]:
        """The same as an op takes it."""
        if self.rotary is None:
            return [self.eps]
        one = self.rotary
        return [self.eps, one.base, float(one.dims or 0), float(one.interleaved)]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Front | None:
        """The front that `numbers` say; None of none."""
        if not numbers:
            return None
        if len(numbers) == 1:
            return cls(numbers[0], None)
        eps, base, dims, interleaved = numbers
        return cls(eps, Rotary(base, int(dims) or None, bool(interleaved)))


def places(cu_q: torch.Tensor, cu_k: torch.Tensor, rows: tuple[int, int]) -> list[torch.Tensor]:
    """Positions of the queries and of the keys."""
    return [positions(cu_q, cu_k, rows[0]), positions(cu_k, cu_k, rows[1])]


def apply_front(
    front: Front, x: torch.Tensor, weight: torch.Tensor | None, at: torch.Tensor
) -> torch.Tensor:
    """x' of x [T, H, D], weight [D] of the norm or None, positions `at` [T]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    found = x
    if weight is not None:
        shape = (x.shape[2],)
        found = functional.rms_norm(x.to(wide), shape, weight.to(wide), front.eps)
    if front.rotary is not None:
        found = front.rotary.rotate(found, at)
    return found.to(x.dtype)


def front_backward(
    front: Front,
    d: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    at: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dx and dweight from d, the gradient of x'.

    With n = x rstd and g = d turned back: dx = rstd (g w - n avg(g w n)), dweight = sum(g n).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    g = d.to(wide)
    if front.rotary is not None:
        g = front.rotary.rotate(g, at, back=True)
    if weight is None:
        return g.to(x.dtype), None
    source = x.to(wide)
    rstd = (source.square().mean(-1, keepdim=True) + front.eps).rsqrt()
    n, gw = source * rstd, g * weight.to(wide)
    dx = rstd * (gw - n * (gw * n).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g * n).sum((0, 1)).to(weight.dtype)
