"""The largest gap of the smoothed training loss on the way: reported, never gated.

The end of training can agree while the way there did not; this is the plot that papers on
low-precision training show, as one number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

BLOCKS: Final = 100
SMOOTHED: Final = 5
WARM_UP: Final = 0.1


def trajectory_gap(
    baseline_loss: Sequence[float | None], candidate_loss: Sequence[float | None]
) -> dict[str, Any] | None:
    """{"gap", "step"}: the largest relative loss gap after warm-up (10 % of the steps), signed.

    Losses are averaged over blocks of 1 % of the steps, then over 5 neighbouring blocks. Positive
    is a worse candidate; `step` is the middle of where it is. None for too few finite blocks.
    """
    steps = min(len(baseline_loss), len(candidate_loss))
    size = max(1, steps // BLOCKS)
    skip = math.ceil(WARM_UP * steps)
    pair = np.array([baseline_loss[:steps], candidate_loss[:steps]], np.float64)[:, skip:]
    count = pair.shape[1] // size
    if count < SMOOTHED:
        return None
    blocks = pair[:, : count * size].reshape(2, count, size).mean(axis=-1)
    smooth = np.lib.stride_tricks.sliding_window_view(blocks, SMOOTHED, axis=-1).mean(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = smooth[1] / smooth[0] - 1.0
    usable = np.isfinite(gaps)
    if not usable.any():
        return None
    worst = int(np.argmax(np.where(usable, np.abs(gaps), -1.0)))
    middle = skip + size * worst + size * SMOOTHED // 2
    return {"gap": float(gaps[worst]), "step": middle}


def trajectories(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """The gap of every (baseline, candidate) pair by seed, and the largest of them."""
    found = {
        str(candidate["seed"]): trajectory_gap(
            baseline["training"]["loss"], candidate["training"]["loss"]
        )
        for baseline, candidate in pairs
    }
    known = [one for one in found.values() if one is not None]
    worst = max(known, key=lambda one: abs(one["gap"]), default=None)
    return {"per_seed": found, "largest": worst}
