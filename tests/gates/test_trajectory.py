"""What is reported and never gated: the trajectory of the loss, the prediction difference."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from scipy.special import expit

from qualitygates.irreproducibility import prediction_difference, prediction_differences
from qualitygates.judging import judge_records
from qualitygates.metrics import SAMPLED_ROWS
from qualitygates.trajectory import trajectories, trajectory_gap
from tests.gates.synthetic import clicks, evaluation, find, gate, records

SEEDS = (11, 12, 13)


def test_the_gap_is_the_largest_of_the_smoothed_blocks_after_warm_up() -> None:
    base = np.full(1000, 0.5)
    candidate = base.copy()
    candidate[:100] = 5.0  # warm-up
    candidate[600:650] = 0.55  # five blocks of ten steps
    candidate[800:810] = 0.6  # one block: smoothed to a fifth
    found = trajectory_gap(base.tolist(), candidate.tolist())
    assert found is not None
    assert found["gap"] == pytest.approx(0.1)
    assert found["step"] == 625
    better = trajectory_gap(candidate.tolist(), base.tolist())
    assert better is not None
    assert better["gap"] == pytest.approx(1 / 1.1 - 1)


def test_gaps_that_cannot_be_known() -> None:
    assert trajectory_gap([0.5] * 4, [0.5] * 4) is None
    assert trajectory_gap([], []) is None
    assert trajectory_gap([None] * 100, [0.5] * 100) is None
    holes = [0.5] * 50 + [None] + [0.6] * 149
    found = trajectory_gap([0.5] * 200, holes)
    assert found is not None
    assert found["gap"] == pytest.approx(0.2)


def test_the_verdict_reports_both_and_judges_neither() -> None:
    runs = records(clicks(), seeds=SEEDS)
    found = judge_records(gate((3,)), runs)
    assert found["verdict"] == "ACCEPT"
    assert found["trajectory"]["largest"]["gap"] == 0.0
    assert list(found["trajectory"]["per_seed"]) == ["11", "12", "13"]
    changed = copy.deepcopy(runs)
    loss = find(changed, "candidate", 12)["training"]["loss"]
    loss[100:104] = [1.02 * value for value in loss[100:104]]
    again = judge_records(gate((3,)), changed)
    assert again["verdict"] == "ACCEPT"
    assert again["trajectory"]["largest"] == again["trajectory"]["per_seed"]["12"]
    assert again["trajectory"]["largest"]["gap"] == pytest.approx(4 / 10 * 0.02, rel=0.05)
    difference = found["prediction_difference"]["trained"]
    assert 0 < difference["candidate"] < difference["baselines"]


def test_prediction_difference_equals_the_formula_on_the_sampled_rows() -> None:
    data = clicks(rows=6000)
    logits = [data.truth, data.truth + np.random.default_rng(0).normal(0, 0.1, 6000)]
    pair = [evaluation(data, one) for one in logits]
    rows = np.linspace(0, 5999, SAMPLED_ROWS).round().astype(int)
    p, q = (expit(one.astype(np.float32).astype(np.float64))[rows] for one in logits)
    expected = np.abs(p - q).mean() / ((p + q) / 2).mean()
    assert prediction_difference(*pair) == pytest.approx(expected, rel=1e-12)
    assert prediction_difference(pair[0], pair[0]) == 0.0
    # A sample of 1,000 rows is within a tenth of all rows.
    p, q = (expit(one) for one in logits)
    assert expected == pytest.approx(np.abs(p - q).mean() / ((p + q) / 2).mean(), rel=0.1)


def test_evaluations_without_a_sample_have_no_prediction_difference() -> None:
    data = clicks()
    full = evaluation(data, data.truth)
    bare = {key: value for key, value in full.items() if key != "prediction_sample"}
    assert prediction_difference(full, bare) is None
    found = prediction_differences({"trained": [(bare, bare), (bare, full)]})
    assert found == {"trained": {"candidate": None, "baselines": None}}


def test_a_crashed_run_has_the_trajectory_of_its_steps() -> None:
    pair = ({"training": {"loss": [0.5] * 100}}, {"seed": 3, "training": {"loss": [0.5] * 20}})
    assert trajectories([pair])["per_seed"]["3"] == {"gap": 0.0, "step": 4}
