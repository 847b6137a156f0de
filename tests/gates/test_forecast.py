"""What more data would bring: power at later looks, seeds and examples needed, futility."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from qualitygates.forecast import forecast, futile
from qualitygates.judging import judge_records
from tests.gates.synthetic import BAD, NULL, Effect, clicks, gate, records

LOOKS = (3, 5, 8)


def entry(**changes: object) -> dict:
    plain = {
        "estimate": 0.2,
        "margin": 1.0,
        "two_sided": False,
        "alpha": 0.021,
        "seeds": 3,
        "v_seed": 0.25 / 3,
        "v_example": 0.01,
        "clusters": 400,
        "verdict": "INCONCLUSIVE",
    }
    return plain | changes


def test_power_at_the_looks_to_come_equals_the_noncentral_t() -> None:
    found = forecast(entry(), looks=LOOKS, look=3)
    assert list(found["power"]) == ["5", "8"]
    for look in (5, 8):
        v_seed, v = 0.25 / look, 0.25 / look + 0.01
        dof = v**2 / (v_seed**2 / (look - 1) + 0.01**2 / 399)
        t = stats.t.isf(0.021, dof)
        assert found["power"][str(look)] == pytest.approx(stats.nct.sf(t, dof, 0.8 / v**0.5))
        assert found["power_if_neutral"][str(look)] == pytest.approx(
            stats.nct.sf(t, dof, 1.0 / v**0.5)
        )
    assert forecast(entry(), looks=LOOKS, look=8)["power"] == {}


def test_power_of_a_simulated_gate_is_what_was_forecast() -> None:
    rng = np.random.default_rng(0)
    d = rng.normal(0.2, 0.5, (20_000, 8)) + rng.normal(0, 0.1, (20_000, 1))
    v_seed = d.var(axis=1, ddof=1) / 8
    v = v_seed + 0.01
    dof = v**2 / (v_seed**2 / 7 + 0.01**2 / 399)
    accepted = np.mean(d.mean(axis=1) + stats.t.isf(0.021, dof) * np.sqrt(v) < 1.0)
    found = forecast(entry(), looks=LOOKS, look=3)["power"]["8"]
    assert found == pytest.approx(accepted, abs=0.02)


def test_seeds_and_examples_needed() -> None:
    found = forecast(entry(), looks=LOOKS, look=3)
    assert 3 < found["seeds_needed"] < 20
    assert found["examples_factor"] == 1.0
    small = forecast(entry(v_example=0.16), looks=LOOKS, look=3)
    assert small["seeds_needed"] is None
    # tau 0.4 against a quarter of the room 0.8.
    assert small["examples_factor"] == pytest.approx(4.0)
    beyond = forecast(entry(estimate=1.1), looks=LOOKS, look=3)
    assert (beyond["seeds_needed"], beyond["examples_factor"]) == (None, None)
    assert set(beyond["power"].values()) == {0.0}


def test_the_noise_of_the_null_control_plans_when_it_is_larger() -> None:
    noisy = forecast(entry(), looks=LOOKS, look=3, null_sd=1.5)
    assert noisy["paired_sd"] == 1.5
    assert noisy["power"]["8"] < forecast(entry(), looks=LOOKS, look=3)["power"]["8"]


def test_two_sides_of_a_margin_can_both_fail() -> None:
    one = forecast(entry(estimate=0.0), looks=LOOKS, look=3)["power"]["5"]
    both = forecast(entry(estimate=0.0, two_sided=True), looks=LOOKS, look=3)["power"]["5"]
    assert both == pytest.approx(2 * one - 1)
    left = forecast(entry(estimate=-0.7, two_sided=True), looks=LOOKS, look=3)
    right = forecast(entry(estimate=0.7, two_sided=True), looks=LOOKS, look=3)
    assert left["power"] == right["power"]
    assert left["power"]["8"] < 0.5


def test_futile_is_an_open_metric_with_less_than_a_tenth_of_power_at_the_last_look() -> None:
    metrics = {"trained/ne": entry(estimate=0.9), "trained/auc": entry()}
    forecasts = {key: forecast(one, looks=LOOKS, look=3) for key, one in metrics.items()}
    (reason,) = futile(forecasts, metrics)
    assert reason.startswith("trained/ne: at the effect seen the look at 8 seeds")
    decided = {**metrics, "trained/ne": entry(estimate=0.9, verdict="ACCEPT")}
    assert futile(forecasts, decided) == []
    last = {key: forecast(one, looks=LOOKS, look=8) for key, one in metrics.items()}
    assert futile(last, metrics) == []


def test_a_hopeless_gate_stops_early_and_never_accepts() -> None:
    effects = {"candidate": Effect(shared=0.13, seed=0.1), "null": NULL, "known_bad": BAD}
    found = judge_records(gate(LOOKS), records(clicks(), seeds=(11, 12, 13), effects=effects))
    assert found["verdict"] == "INCONCLUSIVE"
    assert (found["final"], found["next_look"], found["look"]) == (True, None, 3)
    assert any(text.startswith("stopped early, ") for text in found["reasons"])
    assert found["reasons"][-1].startswith("more seeds are not worth their cost")
    least = min(one["power"]["8"] for one in found["forecast"].values())
    assert least < 0.1
    assert set(found["forecast"]) == set(found["metrics"])
    assert all(math.isfinite(one["paired_sd"]) for one in found["forecast"].values())
