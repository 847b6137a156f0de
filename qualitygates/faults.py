"""Planted differences of known size: the null control's ulp, and noise on the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from torch import nn

Floats = NDArray[np.floating[Any]]
# 24 Gauss-Hermite nodes integrate softplus under Gaussian noise of sd 4 to better than 1e-6.
_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(24)
_NODE_WEIGHTS = _NODE_WEIGHTS / _NODE_WEIGHTS.sum()


def perturb_one_ulp(model: nn.Module, *, seed: int) -> None:
    """Move every parameter to one of its two neighbouring floats, the side drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            side = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            away = (side.to(parameter.dtype) * torch.inf).to(parameter.device)
            parameter.copy_(torch.nextafter(parameter, away))


def noisy(logits: Floats, sd: float, *, seed: int) -> Floats:
    """Logits plus Gaussian noise of standard deviation `sd`; the same object when sd is 0."""
    if sd == 0:
        return logits
    return np.asarray(logits, np.float64) + sd * np.random.default_rng(seed).standard_normal(
        len(logits)
    )


def expected_harm(logits: Floats, labels: Floats, weights: Floats, *, sd: float) -> float:
    """Expected relative NE change under Gaussian logit noise: noise adds E softplus(z + e) only."""
    z, w = np.asarray(logits, np.float64), np.asarray(weights, np.float64)
    loss = np.average(np.logaddexp(0, z) - np.asarray(labels, np.float64) * z, weights=w)
    raised = sum(
        share * np.average(np.logaddexp(0, z + sd * node), weights=w)
        for node, share in zip(_NODES, _NODE_WEIGHTS, strict=True)
    )
    return float((raised - np.average(np.logaddexp(0, z), weights=w)) / loss)


def known_bad_noise(
    logits: Floats, labels: Floats, weights: Floats, *, relative_ne: float
) -> float:
    """The noise sd whose expected relative NE change is `relative_ne` on these predictions.

    NaN or infinite logits give 0: the run is a failure whatever is added to it.
    """
    if not np.isfinite(logits).all():
        return 0.0
    high = 0.1
    while expected_harm(logits, labels, weights, sd=high) < relative_ne:
        high *= 2
    return float(
        brentq(
            lambda sd: expected_harm(logits, labels, weights, sd=sd) - relative_ne,
            0.0,
            high,
            xtol=1e-6,
        )
    )
