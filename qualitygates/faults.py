"""Planted differences of known size: the null control's ulp, and noise on the logits."""

from __future__ import annotations

import torch
from torch import nn

from .noise import expected_harm, known_bad_noise, noisy

__all__ = ["expected_harm", "known_bad_noise", "noisy", "perturb_one_ulp"]


def perturb_one_ulp(model: nn.Module, *, seed: int) -> None:
    """Move every parameter to one of its two neighbouring floats, the side drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            side = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            away = (side.to(parameter.dtype) * torch.inf).to(parameter.device)
            parameter.copy_(torch.nextafter(parameter, away))
