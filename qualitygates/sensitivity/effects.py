"""Paired effects of branches on the loss, with intervals; interactions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy.special import chdtri, stdtrit

from ..sequence import confidence_sequence

Result = Mapping[str, Any]

LEVEL: Final = 0.9
"""Coverage of the two-sided intervals of effects."""
PRIOR_DOF: Final = 4
"""Degrees of freedom of the common seed variance in an arm's own."""
# A branch that crashed or gave no finite evaluation: worse than any number, and not averaged.
BROKEN: Final = math.inf


@dataclass(frozen=True)
class Paired:
    """One seed of an arm against the BF16 branch beside it.

    effect: relative change of the evaluation loss (the same as of NE), positive is worse, inf for a
    broken branch. v_example: its variance over clusters. calibration: log of the ratio of summed
    predictions. steps: relative differences of the training loss.
    """

    seed: int
    effect: float
    v_example: float
    calibration: float
    steps: tuple[float, ...]


def pair(seed: int, baseline: Result, branch: Result) -> Paired:
    """The paired effect of a branch from the results of both runs."""
    broken = branch["crashed"] is not None or branch["clusters"] is None
    if broken or any(value is None for value in branch["loss"]):
        return Paired(seed, BROKEN, 0.0, 0.0, ())
    ours, theirs = np.array(baseline["clusters"]), np.array(branch["clusters"])
    total = float(ours.sum())
    ratio = float(theirs.sum()) / total
    psi = (theirs - ratio * ours) / total
    hit = int(np.count_nonzero(np.array(baseline["weight"]) > 0))
    level = float(np.mean(baseline["loss"]))
    steps = (np.array(branch["loss"]) - np.array(baseline["loss"])) / level
    return Paired(
        seed=seed,
        effect=ratio - 1.0,
        v_example=float((psi**2).sum()) * hit / max(hit - 1, 1),
        calibration=math.log(branch["predicted"] / baseline["predicted"]),
        steps=tuple(steps.tolist()),
    )


@dataclass(frozen=True)
class Effect:
    """Mean effect over seeds, with an interval of `LEVEL` coverage, and both variances of it."""

    estimate: float
    lower: float
    upper: float
    seeds: int
    v_seed: float
    v_example: float
    calibration: float

    @property
    def harm(self) -> float:
        """What selection charges: the estimate, never below 0."""
        return max(self.estimate, 0.0)

    def to_dict(self) -> dict[str, float | int | None]:
        """JSON data; infinities become None."""
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}


def summarize(arms: Mapping[str, Sequence[Paired]]) -> dict[str, Effect]:
    """The effect of every arm; few seeds borrow the seed variance of all arms.

    Moderated variance (Smyth 2004): the arm's own counts with its S - 1 degrees of freedom, the
    common one with `PRIOR_DOF`. The common one is the median over arms, made unbiased for normal
    noise, so that a few harmful arms do not widen the rest.
    """
    finite = {name: [p for p in pairs if math.isfinite(p.effect)] for name, pairs in arms.items()}
    several = {name: pairs for name, pairs in finite.items() if len(pairs) >= 2}
    spread = [float(np.var([p.effect for p in one], ddof=1)) for one in several.values()]
    dof = [len(one) - 1 for one in several.values()]
    common = math.nan
    if spread:
        common = float(
            np.median([s * d / chdtri(d, 0.5) for s, d in zip(spread, dof, strict=True)])
        )
    found = {}
    for name, pairs in arms.items():
        if len(finite[name]) < len(pairs) or not pairs:
            found[name] = Effect(BROKEN, BROKEN, BROKEN, len(pairs), 0.0, 0.0, 0.0)
        else:
            found[name] = _effect(pairs, common)
    return found


def _effect(pairs: Sequence[Paired], common: float) -> Effect:
    values = np.array([p.effect for p in pairs])
    seeds, estimate = len(values), float(values.mean())
    own = float(values.var(ddof=1)) if seeds > 1 else 0.0
    dof = PRIOR_DOF + seeds - 1
    v_seed = (PRIOR_DOF * common + (seeds - 1) * own) / dof / seeds
    # The same rows in every seed: averaging over seeds does not lower this part.
    v_example = float(np.mean([p.v_example for p in pairs]))
    half = math.inf
    if math.isfinite(v_seed):
        half = float(stdtrit(dof, (1 + LEVEL) / 2)) * math.sqrt(v_seed + v_example)
    calibration = float(np.mean([p.calibration for p in pairs]))
    return Effect(estimate, estimate - half, estimate + half, seeds, v_seed, v_example, calibration)


def training_bounds(pairs: Sequence[Paired], *, alpha: float = 0.05) -> tuple[float, float]:
    """Bounds of the relative training-loss difference over all steps of all seeds so far."""
    if any(not math.isfinite(p.effect) for p in pairs):
        return BROKEN, BROKEN
    steps = [value for p in pairs for value in p.steps]
    if not steps:
        return -math.inf, math.inf
    mean, half = confidence_sequence(steps, alpha=alpha)
    return float(mean[-1] - half[-1]), float(mean[-1] + half[-1])


def interaction(all_low: float, alone: Sequence[float]) -> float | None:
    """I = effect(all low) / sum of the effects one at a time; None when that sum is not above 0."""
    total = sum(alone)
    if not math.isfinite(all_low) or not math.isfinite(total) or total <= 0:
        return None
    return all_low / total
