"""How often the shipped slice rules are wrong, and whether they find one harmed slice of 3 %.

Twenty slices, five seeds; a slice with a share q of the rows has a paired sd of 0.3 margins over
the square root of q, and a fifth of its variance is interaction with the examples. Every
replication goes through `judge_slices`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from qualitygates.slices import SliceRules, judge_slices

SMALL, FULL = 120, 2000
SEEDS, CLUSTERS = 5, 64
MARGIN = 0.0005
# One slice of 3 %, the others share the rest.
SHARES = [0.03, *[0.97 / 19] * 19]
REPORTED: list[dict[str, str | float]] = []


def evaluations(rng: np.random.Generator, effects: np.ndarray) -> list[tuple[Any, Any]]:
    """Pairs of Evaluations with only slices, whose true effects are given in margins [K]."""
    size = len(SHARES)
    sd = 0.3 / np.sqrt(SHARES)[:, None]
    noise = rng.normal(0, sd * math.sqrt(0.2 * CLUSTERS), (SEEDS, size, CLUSTERS))
    drift = rng.normal(0, sd[:, 0] * math.sqrt(0.8), (SEEDS, size))
    harm = MARGIN * (effects[None, :, None] + drift[..., None] + noise)
    held = {"weight": [100.0] * CLUSTERS, "label": [20.0] * CLUSTERS}
    base = _evaluation([{**held, "loss": [40.0] * CLUSTERS}] * size)
    return [
        (base, _evaluation([{**held, "loss": (40.0 * (1 + one)).tolist()} for one in seed]))
        for seed in harm
    ]


def _evaluation(sums: list[dict[str, Any]]) -> dict[str, Any]:
    counts = {"positives": 20.0 * CLUSTERS, "negatives": 80.0 * CLUSTERS}
    return {
        "predictions_finite": True,
        "slices": {
            f"slice {index:02d}": {
                **counts,
                "clusterings": {"user": {"clusters_hit": CLUSTERS, **one}},
            }
            for index, one in enumerate(sums)
        },
    }


def rates(reps: int, effects: np.ndarray, *, seed: int) -> dict[str, float]:
    """Shares of replications with any REJECT, any warning, any on the list of exploration, and
    those in which the slice of 3 % is warned about, or rejected.
    """
    rng = np.random.default_rng([8, seed])
    rules = SliceRules(margin=MARGIN, protected=(), factor=2.0, alpha=0.05)
    counts = np.zeros(5)
    for _ in range(reps):
        found = judge_slices({"trained": evaluations(rng, effects)}, rules)
        first = found[0]
        counts += [
            any(one["verdict"] == "REJECT" for one in found),
            any(one["warn"] for one in found),
            any(one["explore"] for one in found),
            first["warn"],
            first["verdict"] == "REJECT",
        ]
    names = ("any REJECT", "any WARN", "any explored", "3 % slice WARN", "3 % slice REJECT")
    return dict(zip(names, counts / reps, strict=True))


def report(case: str, found: dict[str, float]) -> None:
    REPORTED.append({"case": case, **found})
    print(f"{case}: " + ", ".join(f"{key} {value:.4f}" for key, value in found.items()))


def check_slices(reps: int) -> None:
    slack = 3 * math.sqrt(0.05 * 0.95 / reps)
    neutral = rates(reps, np.zeros(len(SHARES)), seed=1)
    report("20 slices, neutral recipe", neutral)
    assert neutral["any REJECT"] <= 0.01 + slack / 3
    assert neutral["any WARN"] <= 0.05 + slack
    # The largest harm that is still allowed, in every slice at once.
    allowed = rates(reps, np.full(len(SHARES), 3.0), seed=2)
    report("20 slices, all at three margins", allowed)
    assert allowed["any REJECT"] <= 0.05 + slack
    planted = np.zeros(len(SHARES))
    planted[0] = 8.0
    found = rates(reps, planted, seed=3)
    report("20 slices, 8 margins of harm in the slice of 3 %", found)
    assert found["3 % slice WARN"] >= 0.9


def test_slices_keep_their_error_rates_and_find_the_planted_harm() -> None:
    check_slices(SMALL)


@pytest.mark.slow
def test_slices_at_full_size() -> None:
    check_slices(FULL)
