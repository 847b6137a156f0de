"""The abort monitor: its formula, its false aborts when watched all the time, what it stops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qualitygates.errors import RecordError
from qualitygates.judging import judge_records
from qualitygates.sequence import (
    LEAST_BLOCKS,
    TUNED_FOR,
    block_gaps,
    confidence_sequence,
    should_abort,
)
from tests.gates.synthetic import clicks, find, gate, records

SMALL, FULL = 300, 3000
STEPS, MARGIN = 1000, 0.001
REPORTED: list[dict[str, str | float]] = []


def losses(
    rng: np.random.Generator, *, gap: float, noise: float, correlation: float = 0.0
) -> tuple[list[float], list[float]]:
    """Loss curves of a pair whose relative gap is `gap` on average; noise is the sd of a block."""
    base = 0.5 + 0.2 * np.exp(-np.arange(STEPS) / 100)
    own = rng.normal(0, 1, STEPS // 10)
    for index in range(1, own.size):
        own[index] = correlation * own[index - 1] + math.sqrt(1 - correlation**2) * own[index]
    relative = gap + noise * np.repeat(own, 10)
    return base.tolist(), (base * (1 + relative)).tolist()


def aborts(reps: int, *, gap: float, correlation: float, seed: int) -> dict[str, float]:
    """How many runs are stopped at a gap in margins, block noise ten margins, and when."""
    rng = np.random.default_rng([9, seed, int(gap), int(10 * correlation)])
    at = []
    for _ in range(reps):
        pair = losses(rng, gap=gap * MARGIN, noise=10 * MARGIN, correlation=correlation)
        found = should_abort(*pair, margin=MARGIN, steps=STEPS)
        if found is not None:
            at.append(found.step / STEPS)
    return {"aborted": len(at) / reps, "median share of the steps": float(np.median(at or [1.0]))}


def check_aborts(reps: int) -> None:
    slack = 3 * math.sqrt(0.05 * 0.95 / reps)
    for correlation in (0.0, 0.3, 0.5):
        at_limit = aborts(reps, gap=10, correlation=correlation, seed=1)
        report(f"abort monitor, correlation {correlation}, at the limit", at_limit)
        assert at_limit["aborted"] <= 0.05 + slack
        far = aborts(reps, gap=40, correlation=correlation, seed=2)
        report(f"abort monitor, correlation {correlation}, four times the limit", far)
        assert far["aborted"] > 0.99
        assert far["median share of the steps"] <= 0.35
        harmless = aborts(reps, gap=1, correlation=correlation, seed=3)
        report(f"abort monitor, correlation {correlation}, at the margin", harmless)
        assert harmless["aborted"] <= 0.01


def report(case: str, found: dict[str, float]) -> None:
    REPORTED.append({"case": case, **found})
    print(f"{case}: " + ", ".join(f"{key} {value:.4f}" for key, value in found.items()))


def test_watched_after_every_block_it_seldom_stops_what_is_allowed() -> None:
    check_aborts(SMALL)


@pytest.mark.slow
def test_false_aborts_at_full_size() -> None:
    check_aborts(FULL)


def test_a_plain_test_after_every_block_would_stop_too_often() -> None:
    rng = np.random.default_rng(5)
    wrong = 0
    for _ in range(400):
        gaps = block_gaps(*losses(rng, gap=0.01, noise=0.01), size=10, skip=100)
        t = np.arange(1, gaps.size + 1)
        mean = np.cumsum(gaps) / t
        sd = np.array([gaps[:n].std(ddof=1) if n > 1 else np.inf for n in t])
        wrong += bool((mean - 1.645 * sd / np.sqrt(t) > 0.01)[LEAST_BLOCKS - 1 :].any())
    assert wrong / 400 > 0.1


def test_the_width_equals_the_formula() -> None:
    x = np.random.default_rng(1).normal(0.3, 2.0, 40)
    mean, half = confidence_sequence(x, alpha=0.05)
    assert np.isinf(half[: LEAST_BLOCKS - 1]).all()
    n = 31
    r2 = (-2 * math.log(0.05) + math.log(-2 * math.log(0.05)) + 1) / TUNED_FOR
    part = x[:n] - x[:n].mean()
    sd = x[:n].std(ddof=1)
    r1 = sum(part[i] * part[i - 1] for i in range(1, n)) / (sd**2 * (n - 1))
    r1 = max(0.0, r1 + (1 + 3 * max(r1, 0.0)) / n)
    spread = 2 * (n * r2 + 1) / (n**2 * r2) * math.log(math.sqrt(n * r2 + 1) / 0.05)
    expected = sd * math.sqrt((1 + r1) / (1 - r1) * spread)
    assert half[n - 1] == pytest.approx(expected, rel=1e-12)
    assert mean[n - 1] == pytest.approx(x[:n].mean(), rel=1e-12)


def test_it_says_when_and_by_how_much() -> None:
    base, candidate = losses(np.random.default_rng(2), gap=0.08, noise=0.001)
    found = should_abort(base, candidate, margin=MARGIN, steps=STEPS)
    assert found is not None
    # After a warm-up of 100 steps and 20 blocks of 10.
    assert found.step == 300
    assert found.gap == pytest.approx(0.08, abs=0.002)
    assert found.limit == pytest.approx(0.01)
    assert 0.01 < found.lower < found.gap


def test_what_is_stopped_does_not_depend_on_how_often_one_looks() -> None:
    base, candidate = losses(np.random.default_rng(3), gap=0.02, noise=0.01)
    whole = should_abort(base, candidate, margin=MARGIN, steps=STEPS)
    assert whole is not None
    for seen in (whole.step - 1, whole.step, whole.step + 57):
        found = should_abort(base, candidate[:seen], margin=MARGIN, steps=STEPS)
        assert found == (None if seen < whole.step else whole)


def test_a_gap_during_warm_up_and_a_better_candidate_are_no_reason() -> None:
    base, candidate = losses(np.random.default_rng(4), gap=0.0, noise=0.001)
    slow = [1.5 * one for one in candidate[:100]] + candidate[100:]
    assert should_abort(base, slow, margin=MARGIN, steps=STEPS) is None
    better = [0.5 * one for one in candidate]
    assert should_abort(base, better, margin=MARGIN, steps=STEPS) is None


def test_equal_curves_short_runs_and_missing_values_stop_nothing() -> None:
    base, candidate = losses(np.random.default_rng(6), gap=0.5, noise=0.001)
    assert should_abort(base, base, margin=MARGIN, steps=STEPS) is None
    assert should_abort([], [], margin=MARGIN, steps=STEPS) is None
    assert should_abort(base[:15], candidate[:15], margin=MARGIN, steps=15) is None
    holes = [None if step == 120 else value for step, value in enumerate(candidate)]
    assert should_abort(base, holes, margin=MARGIN, steps=STEPS) is None
    with pytest.raises(RecordError, match="1000 steps of the candidate, 900 of the baseline"):
        should_abort(base[:900], candidate, margin=MARGIN, steps=STEPS)


def test_a_candidate_that_learns_far_worse_rejects_the_gate_at_any_look() -> None:
    runs = records(clicks(), seeds=(11, 12, 13, 14))
    # Seed 14 lies beyond the look: its metrics are not used, what is surely wrong with it is.
    loss = find(runs, "candidate", 14)["training"]["loss"]
    loss[:] = [1.06 * value for value in loss]
    found = judge_records(gate((3, 5)), runs)
    assert (found["verdict"], found["look"], found["final"]) == ("REJECT", 3, True)
    assert found["reasons"][0].startswith(
        "hard stability failure: candidate, seed 14: training loss worse than the baseline's"
    )
