"""Noise of a known size on logits: what the known-bad control is made of, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

Floats = NDArray[np.floating[Any]]
# 24 Gauss-Hermite nodes integrate softplus under Gaussian noise of sd 4 to better than 1e-6.
_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(24)
_NODE_WEIGHTS = _NODE_WEIGHTS / _NODE_WEIGHTS.sum()
# More rows than this are summarised by their mean in bins of at most 1/1000 of a logit.
_ROWS, _BIN, _MOST_BINS = 1 << 17, 1e-3, 1 << 17


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
    return _added_loss(z, w, sd) / float(loss)


def known_bad_noise(
    logits: Floats, labels: Floats, weights: Floats, *, relative_ne: float
) -> float:
    """The noise sd whose expected relative NE change is `relative_ne` on these predictions.

    NaN or infinite logits give 0: the run is a failure whatever is added to it.
    """
    if not np.isfinite(logits).all():
        return 0.0
    z, w = np.asarray(logits, np.float64), np.asarray(weights, np.float64)
    loss = np.average(np.logaddexp(0, z) - np.asarray(labels, np.float64) * z, weights=w)
    wanted = relative_ne * float(loss)
    mean, weight = _summarised(z, w)
    high = 0.1
    while _added_loss(mean, weight, high) < wanted:
        high *= 2
    return float(brentq(lambda sd: _added_loss(mean, weight, sd) - wanted, 0.0, high, xtol=1e-6))


def _added_loss(z: Floats, w: Floats, sd: float) -> float:
    raised = sum(
        share * np.average(np.logaddexp(0, z + sd * node), weights=w)
        for node, share in zip(_NODES, _NODE_WEIGHTS, strict=True)
    )
    return float(raised - np.average(np.logaddexp(0, z), weights=w))


def _summarised(z: Floats, w: Floats) -> tuple[Floats, Floats]:
    """Mean logit and weight of each bin; inside a bin softplus is a line to (1e-3)^2 / 32."""
    low, span = float(z.min()), float(np.ptp(z))
    bins = int(span / _BIN) + 1
    if len(z) <= _ROWS or bins > _MOST_BINS:
        return z, w
    which = ((z - low) * (bins / (span or 1.0))).astype(np.int64)
    weight, total = (np.bincount(which, one).astype(np.float64) for one in (w, w * z))
    kept = weight > 0
    return total[kept] / weight[kept], weight[kept]
