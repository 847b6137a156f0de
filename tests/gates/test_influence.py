"""Contrasts and influence values against loops, derivatives and the bootstrap."""

from __future__ import annotations

import numpy as np
import pytest

from qualitygates.errors import RecordError
from qualitygates.influence import METRICS, contrast, slice_contrast
from qualitygates.metrics import evaluate
from tests.gates.synthetic import Clicks, clicks, evaluation


def arms(data: Clicks, *, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(9)
    base = data.truth + 0.1 * rng.normal(size=data.truth.size)
    return base, 1.05 * base + 0.05 + noise * rng.normal(size=base.size)


def level(metric: str, data: Clicks, logits: np.ndarray, weights: np.ndarray) -> float:
    """One metric of one arm under other example weights, from the definition."""
    z, y = logits.astype(np.float32).astype(np.float64), data.labels
    p = 1 / (1 + np.exp(-z))
    if metric == "ne":
        return float((weights * -(y * np.log(p) + (1 - y) * np.log1p(-p))).sum())
    if metric == "calibration":
        return float((weights * p).sum())
    if metric == "auc":
        return ranked(z, weights * y, weights * (1 - y))
    total = mass = 0.0
    for user in np.unique(data.users):
        of = data.users == user
        pos, neg = (weights * y)[of], (weights * (1 - y))[of]
        if pos.sum() > 0 and neg.sum() > 0:
            total += weights[of].sum() * ranked(z[of], pos, neg)
            mass += weights[of].sum()
    return total / mass


def ranked(z: np.ndarray, pos: np.ndarray, neg: np.ndarray) -> float:
    wins = (z[:, None] > z[None, :]) + (z[:, None] == z[None, :]) / 2
    return float(pos @ wins @ neg / (pos.sum() * neg.sum()))


def effect(metric: str, data: Clicks, logits: tuple, weights: np.ndarray) -> float:
    base, cand = (level(metric, data, one, weights) for one in logits)
    if metric == "ne":
        return cand / base - 1
    return float(np.log(cand / base)) if metric == "calibration" else base - cand


@pytest.mark.parametrize("metric", METRICS)
def test_estimate_is_the_written_out_contrast_and_psi_sums_to_zero(metric: str) -> None:
    data = clicks(1, rows=400, users=60, days=20)
    logits = arms(data)
    found = contrast(
        evaluation(data, logits[0]), evaluation(data, logits[1]), metric=metric, clustering="user"
    )
    assert found is not None
    expected = effect(metric, data, logits, data.weights)
    assert found.estimate == pytest.approx(expected, rel=1e-9)
    assert found.clusters == 60
    assert found.psi.sum() == pytest.approx(0.0, abs=1e-12)
    assert np.abs(found.psi).max() > 1e-6


@pytest.mark.parametrize("metric", METRICS)
def test_psi_is_the_derivative_by_the_weight_of_a_cluster(metric: str) -> None:
    data = clicks(2, rows=400, users=60, days=20)
    logits = arms(data)
    found = contrast(
        evaluation(data, logits[0]), evaluation(data, logits[1]), metric=metric, clustering="user"
    )
    assert found is not None
    # Central difference: the error is of second order, 1e-4 squared over the share of a cluster.
    step = 1e-4
    for user in (0, 7, 23, 59):
        bump = step * (data.users == user)
        high = effect(metric, data, logits, data.weights * (1 + bump))
        low = effect(metric, data, logits, data.weights * (1 - bump))
        assert found.psi[user] == pytest.approx((high - low) / (2 * step), rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("metric", METRICS)
def test_leaving_a_cluster_out_moves_the_estimate_by_minus_psi(metric: str) -> None:
    data = clicks(3, rows=900, users=150, days=20)
    logits = arms(data)
    found = contrast(
        evaluation(data, logits[0]), evaluation(data, logits[1]), metric=metric, clustering="user"
    )
    assert found is not None
    moves = [
        effect(metric, data, logits, data.weights * (data.users != user)) - found.estimate
        for user in range(0, 150, 10)
    ]
    # First order in 1/U: agreement is close in correlation, not exact in value.
    assert np.corrcoef(moves, -found.psi[::10])[0, 1] > 0.97


@pytest.mark.parametrize("metric", ["ne", "auc", "calibration"])
def test_example_variance_agrees_with_a_cluster_bootstrap(metric: str) -> None:
    data = clicks(4, rows=1500, users=200, days=40)
    base, cand = arms(data)
    found = contrast(
        evaluation(data, base), evaluation(data, cand), metric=metric, clustering="user"
    )
    assert found is not None
    v_ex = 200 / 199 * float((found.psi**2).sum())
    rng = np.random.default_rng(5)
    draws = []
    for _ in range(500):
        weights = rng.poisson(1.0, 200)[data.users].astype(np.float64)
        one, other = (
            evaluate(
                logits.astype(np.float32),
                data.labels,
                weights=weights,
                clusters={"all": np.zeros(1500, np.int64)},
                groups=None,
                slices={},
            )["metrics"]
            for logits in (base, cand)
        )
        change = {
            "ne": other["ne"] / one["ne"] - 1,
            "auc": one["auc"] - other["auc"],
            "calibration": np.log(other["calibration"] / one["calibration"]),
        }
        draws.append(change[metric])
    # 500 draws carry a relative error of 6 % on a variance; 20 % is three of them and the bias.
    assert np.var(draws, ddof=1) == pytest.approx(v_ex, rel=0.20)


def test_rows_of_one_user_are_not_independent() -> None:
    data = clicks(6, rows=4000, users=100, days=50)
    rows = np.arange(4000)
    harm = np.random.default_rng(7).normal(0, 0.5, 100)[data.users]
    forms = [
        evaluate(
            logits.astype(np.float32),
            data.labels,
            weights=data.weights,
            clusters={"user": data.users, "row": rows},
            groups=None,
            slices={},
        )
        for logits in (data.truth, data.truth + harm)
    ]
    v_ex = {}
    for name in ("user", "row"):
        found = contrast(*forms, metric="calibration", clustering=name)
        assert found is not None
        v_ex[name] = found.clusters / (found.clusters - 1) * float((found.psi**2).sum())
    assert v_ex["user"] > 5 * v_ex["row"]


def test_slice_contrast_is_the_relative_loss_inside_the_slice() -> None:
    data = clicks(8, rows=2000, users=100, days=50)
    logits = arms(data)
    found = slice_contrast(
        evaluation(data, logits[0]), evaluation(data, logits[1]), name="mobile", clustering="user"
    )
    inside = data.weights * data.slices["mobile"]
    assert found.estimate == pytest.approx(effect("ne", data, logits, inside), rel=1e-9)
    assert found.psi.sum() == pytest.approx(0.0, abs=1e-12)
    assert found.clusters == np.unique(data.users[data.slices["mobile"]]).size


def test_evaluations_of_other_examples_are_refused() -> None:
    data, other = clicks(10), clicks(11)
    ours = evaluation(data, data.truth)
    with pytest.raises(RecordError, match="the sums of weight differ in"):
        contrast(ours, evaluation(other, other.truth), metric="ne", clustering="user")
    smaller = clicks(10, users=300)
    with pytest.raises(RecordError, match="400 clusters in the baseline, 300 in the candidate"):
        contrast(ours, evaluation(smaller, smaller.truth), metric="ne", clustering="user")
    with pytest.raises(RecordError, match="holds: day, user"):
        contrast(ours, ours, metric="ne", clustering="hour")
    with pytest.raises(RecordError, match="slice 'tablet' is not in the evaluation"):
        slice_contrast(ours, ours, name="tablet", clustering="user")


def test_nonfinite_predictions_cannot_be_contrasted() -> None:
    data = clicks(12)
    broken = evaluation(data, np.where(np.arange(6000) == 3, np.nan, data.truth))
    with pytest.raises(RecordError, match="non-finite predictions"):
        contrast(evaluation(data, data.truth), broken, metric="auc", clustering="user")


def test_gauc_is_unknown_for_a_clustering_that_splits_groups() -> None:
    data = clicks(13)
    ours = evaluation(data, data.truth)
    assert contrast(ours, ours, metric="gauc", clustering="day") is None
    assert contrast(ours, ours, metric="gauc", clustering="user") is not None
