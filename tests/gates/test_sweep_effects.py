"""Paired effects, their intervals, the confidence sequence and the interaction index."""

import math

import numpy as np
import pytest

from qualitygates.sensitivity.effects import (
    interaction,
    pair,
    summarize,
    training_bounds,
)
from qualitygates.sequence import confidence_sequence


def result(clusters, loss=(0.5, 0.4), crashed=None):
    return {
        "loss": list(loss),
        "crashed": crashed,
        "clusters": None if clusters is None else list(clusters),
        "weight": [1.0] * 4,
        "predicted": 2.0,
        "labelled": 2.0,
    }


def test_the_effect_is_the_relative_change_of_the_loss() -> None:
    one = pair(1, result([1, 2, 3, 4]), result([1.1, 2, 3.3, 4.1], loss=(0.55, 0.4)))
    assert one.effect == pytest.approx(10.5 / 10 - 1)
    assert one.steps == pytest.approx((0.05 / 0.45, 0.0))
    psi = (np.array([1.1, 2, 3.3, 4.1]) - 1.05 * np.array([1, 2, 3, 4])) / 10
    assert one.v_example == pytest.approx((psi**2).sum() * 4 / 3)


@pytest.mark.parametrize(
    "broken", [result(None), result([1, 2, 3, 4], crashed="Boom"), result([1] * 4, (0.5, None))]
)
def test_a_broken_branch_is_worse_than_any_number(broken) -> None:
    one = pair(1, result([1, 2, 3, 4]), broken)
    effects = summarize({"a": [one], "b": [pair(2, result([1] * 4), result([1] * 4))] * 2})
    assert one.effect == math.inf
    assert effects["a"].estimate == math.inf
    assert effects["a"].to_dict()["estimate"] is None
    assert training_bounds([one]) == (math.inf, math.inf)


def simulated(rng, effect, seeds, sd):
    pairs = []
    for seed in range(seeds):
        base = rng.gamma(4, 1, 200)
        ratio = 1 + effect + sd * rng.standard_normal()
        branch = base * ratio + 0.02 * rng.standard_normal(200)
        one = {**result(base), "weight": [1.0] * 200}
        pairs.append(pair(seed, one, {**one, "clusters": branch.tolist()}))
    return pairs


def test_intervals_cover_with_two_seeds_because_they_borrow_the_common_variance() -> None:
    rng = np.random.default_rng(0)
    hits = total = 0
    for _ in range(60):
        effects = np.where(np.arange(20) < 3, 0.03, 0.0)
        arms = {str(i): simulated(rng, e, 2, 0.002) for i, e in enumerate(effects)}
        for i, one in summarize(arms).items():
            hits += one.lower <= effects[int(i)] <= one.upper
            total += 1
    assert 0.86 <= hits / total <= 0.96


def test_bounds_of_the_training_loss_hold_although_steps_are_correlated() -> None:
    rng = np.random.default_rng(1)
    misses = {0.0: 0, 0.5: 0}
    for carry in misses:
        for _ in range(400):
            noise = rng.standard_normal(60)
            for i in range(1, 60):
                noise[i] += carry * noise[i - 1]
            mean, half = confidence_sequence(0.3 + noise, alpha=0.05)
            misses[carry] += bool(np.any(np.abs(mean - 0.3) > half))
    assert misses[0.0] / 400 <= 0.07
    assert misses[0.5] / 400 <= 0.12


def test_a_clear_difference_of_the_training_loss_is_seen_within_a_window() -> None:
    rng = np.random.default_rng(3)
    base = 0.5 + 0.05 * rng.standard_normal(24)
    worse = base + 0.02 + 0.003 * rng.standard_normal(24)
    one = pair(1, result([1] * 4, base), result([1] * 4, worse))
    low, high = training_bounds([one])
    assert 0.02 < low < 0.04 < high


def test_the_interaction_index() -> None:
    assert interaction(0.55, [0.5, 0.5]) == pytest.approx(0.55)
    assert interaction(0.1, [-0.1, 0.05]) is None
    assert interaction(math.inf, [0.1]) is None
