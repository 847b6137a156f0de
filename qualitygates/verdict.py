"""Two-way non-inferiority: margins and looks fixed in advance -> interval -> verdict.

A recipe's rounding error is nearly the same function of the example in every seed. Seeds therefore
average away the noise of training but not the error of a finite evaluation set, and the interval
adds both variances.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit
from scipy.stats import nct, t

from .errors import ExperimentError
from .influence import METRICS, Contrast

Floats = NDArray[np.float64]

ACCEPT, REJECT, INCONCLUSIVE = "ACCEPT", "REJECT", "INCONCLUSIVE"
MIN_SEEDS = 3

# A row belongs together: near Criteo's operating point 0.001 AUC goes with 0.2 % of log-loss.
MARGINS: dict[str, dict[str, float]] = {
    "strict": {"ne": 0.0002, "auc": 1e-4, "gauc": 2e-4, "calibration": 0.002},
    "standard": {"ne": 0.0005, "auc": 2.5e-4, "gauc": 5e-4, "calibration": 0.005},
    "demo": {"ne": 0.005, "auc": 2.5e-3, "gauc": 5e-3, "calibration": 0.02},
}

# Nested t statistics are pivotal at the margin: the level of each look that gives 0.05 over all of
# them.
LOOK_ALPHAS: dict[tuple[int, ...], float] = {
    (3, 5): 0.0292,
    (3, 5, 8): 0.0210,
    (4, 8): 0.0284,
    (5, 8, 12): 0.0226,
    (3, 4, 5, 6, 8): 0.0171,
}


# Gauss-Legendre nodes under sinh: they reach 1,490, beyond which t with 2 dof has 5e-7 left.
_POINTS, _POINT_WEIGHTS = np.polynomial.legendre.leggauss(160)
_NODES = np.sinh(8.0 * _POINTS)
_NODE_WEIGHTS = 8.0 * _POINT_WEIGHTS * np.cosh(8.0 * _POINTS)


@dataclass(frozen=True)
class Interval:
    """One-sided bounds at level alpha on either side; every field has the leading shape of the
    input.
    """

    estimate: Floats
    lower: Floats
    upper: Floats
    v_seed: Floats
    v_example: Floats
    dof: Floats


def resolve_margins(spec: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """The promised margins {"name", "ne", "auc", "gauc", "calibration"} from a name or from all
    four numbers.

    Raises ExperimentError when there is no margin, a number is missing, or a named row was altered.
    """
    names = ", ".join(MARGINS)
    if spec is None:
        raise ExperimentError(
            f"margins: none given; a gate needs them before its first run: name one of {names}, "
            f"or give all of {', '.join(METRICS)}"
        )
    if isinstance(spec, str):
        if spec not in MARGINS:
            raise ExperimentError(
                f"margins: {spec!r} is unknown; allowed: {names}, or four numbers"
            )
        return {"name": spec, **MARGINS[spec]}
    name = str(spec.get("name", "custom"))
    missing = [key for key in METRICS if key not in spec]
    unknown = sorted(set(spec) - {"name", *METRICS})
    if missing or unknown:
        raise ExperimentError(
            f"margins: missing {missing}, unknown {unknown}; custom margins give each of "
            f"{', '.join(METRICS)}"
        )
    values = {key: _margin(key, spec[key]) for key in METRICS}
    if name in MARGINS and values != MARGINS[name]:
        raise ExperimentError(
            f"margins: {name!r} means {MARGINS[name]}, but the numbers are {values}; "
            "give other numbers the name 'custom'"
        )
    return {"name": name, **values}


def _margin(key: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < 1e300:
        raise ExperimentError(f"margins: {key} = {value!r}; a margin is a finite number above 0")
    return float(value)


def look_alpha(looks: Sequence[int]) -> float:
    """The one-sided level of each look for an overall 0.05; raises ExperimentError for looks
    without a level.
    """
    key = tuple(looks)
    if len(key) == 1 and key[0] >= MIN_SEEDS:
        return 0.05
    if key in LOOK_ALPHAS:
        return LOOK_ALPHAS[key]
    allowed = ", ".join(str(list(known)) for known in LOOK_ALPHAS)
    raise ExperimentError(
        f"looks: {list(key)} has no computed error level; allowed: {allowed}, "
        f"or a single look [S] with S >= {MIN_SEEDS}"
    )


def two_way(
    per_seed: ArrayLike, psi: ArrayLike, *, alpha: float, clusters: int | None = None
) -> Interval:
    """Interval for the mean contrast from per-seed estimates [..., S] and their influence values
    [..., S, U].

    V = V_seed + V_ex with Welch-Satterthwaite degrees of freedom; the interaction is counted once
    in each, on purpose. `clusters` is the number of clusters that carry weight when some of the U
    do not. Raises ExperimentError below 3 seeds, where Welch-Satterthwaite borrows too much.
    """
    d, values = np.asarray(per_seed, np.float64), np.asarray(psi, np.float64)
    seeds, units = d.shape[-1], values.shape[-1] if clusters is None else clusters
    if seeds < MIN_SEEDS:
        raise ExperimentError(f"seeds: {seeds} given; a verdict needs at least {MIN_SEEDS}")
    if units < 2:
        raise ExperimentError(f"clusters: {units} given; a variance over examples needs at least 2")
    v_seed = np.asarray(d.var(axis=-1, ddof=1) / seeds)
    v_example = np.asarray(units / (units - 1) * (values.mean(axis=-2) ** 2).sum(axis=-1))
    dof = _welch(v_seed, v_example, seeds=seeds, clusters=units)
    estimate = np.asarray(d.mean(axis=-1))
    half = stdtrit(dof, 1.0 - alpha) * np.sqrt(v_seed + v_example)
    return Interval(estimate, estimate - half, estimate + half, v_seed, v_example, dof)


def _welch(v_seed: Floats, v_example: Floats, *, seeds: int, clusters: int) -> Floats:
    total = v_seed + v_example
    # Shares instead of squares of variances: 1e-170 squared would underflow. No variance at all: S
    # - 1.
    share = np.divide(v_seed, total, out=np.ones_like(total), where=total > 0)
    return np.asarray(1.0 / (share**2 / (seeds - 1) + (1.0 - share) ** 2 / (clusters - 1)))


def accepts(interval: Interval, margin: float, *, two_sided: bool) -> NDArray[np.bool_]:
    """Where the effect is shown to be below the margin (two-sided: on both sides)."""
    inside = interval.upper < margin
    return np.asarray(inside & (interval.lower > -margin) if two_sided else inside)


def rejects(interval: Interval, margin: float, *, two_sided: bool) -> NDArray[np.bool_]:
    """Where the effect is shown to be beyond the margin (two-sided: on either side)."""
    beyond = interval.lower > margin
    return np.asarray(beyond | (interval.upper < -margin) if two_sided else beyond)


def p_harm(interval: Interval, bound: float, *, seeds: int, clusters: int) -> float:
    """One-sided p-value of the hypothesis that the effect is at most `bound`.

    Behrens-Fisher: the error is the sum of two independent t variables, scaled by sqrt(V_seed) and
    sqrt(V_ex), with seeds - 1 and clusters - 1 degrees of freedom. Holm's correction asks for
    levels far below 0.05, where Welch-Satterthwaite rejects up to 2.4 times too often.
    """
    distance = float(interval.estimate) - bound
    parts = (
        (math.sqrt(float(interval.v_seed)), seeds - 1),
        (math.sqrt(float(interval.v_example)), clusters - 1),
    )
    (narrow, narrow_dof), (wide, wide_dof) = sorted(parts)
    if wide == 0:
        return 0.0 if distance > 0 else 1.0
    density = np.exp(t.logpdf(_NODES, narrow_dof))
    tail = stdtr(wide_dof, -(distance - narrow * _NODES) / wide)
    return min(1.0, float((_NODE_WEIGHTS * density * tail).sum() / (_NODE_WEIGHTS * density).sum()))


def widest(
    contrasts: Mapping[str, Sequence[Contrast]], *, alpha: float
) -> tuple[str, Interval, dict[str, dict[str, float]]]:
    """The clustering with the largest V_ex, its interval, and {"v_example", "clusters"} of every
    clustering.
    """
    intervals = {
        name: two_way(
            [one.estimate for one in seeds],
            np.stack([one.psi for one in seeds]),
            alpha=alpha,
            clusters=seeds[0].clusters,
        )
        for name, seeds in contrasts.items()
    }
    name = max(intervals, key=lambda key: float(intervals[key].v_example))
    every = {
        key: {"v_example": float(one.v_example), "clusters": contrasts[key][0].clusters}
        for key, one in intervals.items()
    }
    return name, intervals[name], every


def judge_metric(
    contrasts: Mapping[str, Sequence[Contrast]], *, margin: float, alpha: float, two_sided: bool
) -> dict[str, Any]:
    """The verdict entry of one metric from its contrasts by clustering (one Contrast a seed), gated
    on the larger V_ex.
    """
    name, interval, every = widest(contrasts, alpha=alpha)
    if accepts(interval, margin, two_sided=two_sided):
        verdict = ACCEPT
    elif rejects(interval, margin, two_sided=two_sided):
        verdict = REJECT
    else:
        verdict = INCONCLUSIVE
    seeds = contrasts[name]
    return {
        "estimate": float(interval.estimate),
        "lower": float(interval.lower),
        "upper": float(interval.upper),
        "margin": margin,
        "two_sided": two_sided,
        "alpha": alpha,
        "seeds": len(seeds),
        "v_seed": float(interval.v_seed),
        "v_example": float(interval.v_example),
        "dof": float(interval.dof),
        "clusters": seeds[0].clusters,
        "clustering": name,
        "clusterings": every,
        "verdict": verdict,
        "per_seed": [one.estimate for one in seeds],
    }


@dataclass(frozen=True)
class Design:
    """What a gate's power depends on: per-seed paired sd sigma, example error tau = sqrt(V_ex),
    room to the margin.
    """

    sigma: float
    tau: float
    room: float
    alpha: float = 0.05
    clusters: int = 4096

    def power(self, seeds: int) -> float:
        """Probability to ACCEPT one metric with this many seeds (noncentral t)."""
        v_seed, v_example = np.asarray(self.sigma**2 / seeds), np.asarray(self.tau**2)
        error = math.sqrt(float(v_seed + v_example))
        if self.room <= 0:
            return 0.0
        # Beyond 30 standard errors the noncentral t of scipy loses its digits and the power is 1.
        if error == 0 or self.room / error > 30:
            return 1.0
        dof = float(_welch(v_seed, v_example, seeds=seeds, clusters=self.clusters))
        return float(nct.sf(stdtrit(dof, 1.0 - self.alpha), dof, self.room / error))

    def seeds_needed(self, *, power: float = 0.9, most: int = 200) -> int | None:
        """The smallest number of seeds with at least this power, or None when `most` do not reach
        it.
        """
        if self.power(most) < power:
            return None
        # Power rises with the seeds: less variance, and more degrees of freedom for it.
        low, high = MIN_SEEDS, most
        while low < high:
            middle = (low + high) // 2
            if self.power(middle) >= power:
                high = middle
            else:
                low = middle + 1
        return low


def advise(entry: Mapping[str, Any], *, null_sd: float = 0.0, power: float = 0.9) -> str:
    """One sentence for an INCONCLUSIVE metric: which variance dominates, and how many seeds or
    examples to add.

    null_sd is the paired sd of the null control: seeds are planned with the larger of it and the
    candidate's own.
    """
    seeds = int(entry["seeds"])
    sigma = max(math.sqrt(seeds * entry["v_seed"]), null_sd)
    tau = math.sqrt(entry["v_example"])
    total = entry["v_seed"] + entry["v_example"]
    share = entry["v_seed"] / total if total > 0 else 1.0
    source = "noise between seeds" if share >= 0.5 else "the finite evaluation set"
    text = f"{source} dominates ({100 * max(share, 1 - share):.0f} % of the variance)"
    worse = abs(entry["estimate"]) if entry["two_sided"] else max(entry["estimate"], 0.0)
    room = entry["margin"] - worse
    if room <= 0:
        return (
            f"{text}; the estimate itself is beyond the margin, so more data will rather REJECT "
            "than ACCEPT"
        )
    # Both sides of a two-sided margin can fail when the effect is near 0.
    target = (1 + power) / 2 if entry["two_sided"] else power
    design = Design(sigma, tau, room, alpha=entry["alpha"], clusters=int(entry["clusters"]))
    needed = design.seeds_needed(power=target)
    if needed is not None and needed > seeds:
        return (
            f"{text}; {power:.0%} power at the effect seen needs {needed} seeds in all, "
            f"{needed - seeds} more"
        )
    if needed is not None:
        return (
            f"{text}; {seeds} seeds already have {power:.0%} power at the effect seen: take the "
            "next look"
        )
    factor = (tau / (room / 4)) ** 2
    if factor > 1:
        return (
            f"{text}; no number of seeds is enough: evaluate on {factor:.1f} times as many "
            "examples first"
        )
    return (
        f"{text}; not even 200 seeds have {power:.0%} power: reduce the noise between the paired "
        "runs"
    )
