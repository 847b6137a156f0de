"""Stop a run that is far worse than its paired baseline, at any time, without inflating the error.

The paired relative gap of the training loss, averaged over blocks of 1 % of the steps, gets an
asymptotic confidence sequence: an interval that holds at all times together, so it may be looked
at after every block. Stopping here never accepts anything, so it cannot raise the rate of false
ACCEPTs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import RecordError

BLOCKS: Final = 100
WARM_UP: Final = 0.1
LEAST_BLOCKS: Final = 20
LIMIT_MARGINS: Final = 10.0
ALPHA: Final = 0.05
# The width is smallest after about this many blocks.
TUNED_FOR: Final = 20
_MOST_CORRELATION: Final = 0.9

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Abort:
    """The first step at which a run is known to be too bad, its gap and the limit it passed."""

    step: int
    gap: float
    lower: float
    limit: float


def should_abort(
    baseline_loss: Sequence[float | None],
    candidate_loss: Sequence[float | None],
    *,
    margin: float,
    steps: int,
    alpha: float = ALPHA,
) -> Abort | None:
    """Whether, and when, the candidate's loss is worse than the baseline's by over ten margins.

    The losses are those of the steps seen so far, one a step, of a run of `steps` steps; `margin`
    is the relative NE margin. The first tenth of the steps is warm-up and not looked at. None also
    for a gap that cannot be known yet. Raises RecordError when the candidate has more steps than
    the baseline.
    """
    if len(candidate_loss) > len(baseline_loss):
        raise RecordError(
            f"{len(candidate_loss)} steps of the candidate, {len(baseline_loss)} of the baseline; "
            "a run can only be stopped against the same steps of its baseline"
        )
    size = max(1, steps // BLOCKS)
    gaps = block_gaps(baseline_loss, candidate_loss, size=size, skip=math.ceil(WARM_UP * steps))
    mean, half = confidence_sequence(gaps, alpha=alpha)
    limit = LIMIT_MARGINS * margin
    beyond = np.flatnonzero(mean - half > limit)
    if not beyond.size:
        return None
    first = int(beyond[0])
    step = math.ceil(WARM_UP * steps) + (first + 1) * size
    return Abort(step, float(mean[first]), float(mean[first] - half[first]), limit)


def block_gaps(
    baseline: Sequence[float | None], candidate: Sequence[float | None], *, size: int, skip: int
) -> Floats:
    """Relative loss gap of each whole block of `size` steps after `skip`; blocks end at a NaN.

    A non-finite loss is a hard failure of its own; here it only ends what can be compared.
    """
    steps = min(len(baseline), len(candidate))
    pair = np.array([baseline[:steps], candidate[:steps]], np.float64)[:, skip:]
    count = pair.shape[1] // size
    base, cand = pair[:, : count * size].reshape(2, count, size).mean(axis=-1)
    usable = np.isfinite(base) & np.isfinite(cand) & (base > 0)
    end = int(np.argmin(usable)) if not usable.all() else count
    return np.asarray(cand[:end] / base[:end] - 1.0)


def confidence_sequence(values: ArrayLike, *, alpha: float) -> tuple[Floats, Floats]:
    """Running mean [T] and half-width [T] that holds at all times together (level 1 - alpha).

    Asymptotic confidence sequence of Waudby-Smith et al. 2021, sigma sqrt(2 (t r^2 + 1) / (t^2 r^2)
    log(sqrt(t r^2 + 1) / alpha)), sigma the running sd inflated for serial correlation by the
    lag-1 long-run factor (1 + r1) / (1 - r1), r1 >= 0. Infinite below LEAST_BLOCKS values.
    """
    x = np.asarray(values, np.float64)
    t = np.arange(1.0, x.size + 1)
    mean = np.cumsum(x) / t
    half = np.full(x.size, np.inf)
    log = -2.0 * math.log(alpha)
    r2 = (log + math.log(log) + 1.0) / TUNED_FOR
    for index in range(LEAST_BLOCKS - 1, x.size):
        n = index + 1
        centred = x[:n] - mean[index]
        variance = float(centred @ centred) / (n - 1)
        lag = float(centred[1:] @ centred[:-1])
        r1 = lag / (variance * (n - 1)) if variance > 0 else 0.0
        # Its own bias, -(1 + 3 r1) / n (Kendall 1954), would narrow the first intervals.
        r1 = min(max(r1 + (1.0 + 3.0 * max(r1, 0.0)) / n, 0.0), _MOST_CORRELATION)
        long_run = variance * (1.0 + r1) / (1.0 - r1)
        spread = 2.0 * (n * r2 + 1.0) / (n * n * r2) * math.log(math.sqrt(n * r2 + 1.0) / alpha)
        half[index] = math.sqrt(long_run * spread)
    return mean, half
