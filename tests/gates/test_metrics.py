"""Metrics against formulas written out with numpy and scipy, and every refused input."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, rankdata

from qualitygates.errors import DataError
from qualitygates.metrics import auc, evaluate, normalized_entropy
from tests.gates.synthetic import clicks, evaluation


def small(seed: int = 0, rows: int = 240, *, fractional: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(-1, 1, rows), 1).astype(np.float32)  # many ties
    labels = (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float64)
    if fractional:
        labels[::7] = 0.25
    weights = rng.choice([0.0, 0.5, 1.0, 3.0], rows)
    users = np.concatenate([np.arange(30), rng.integers(0, 30, rows - 30)])
    return {"logits": logits, "labels": labels, "weights": weights, "users": users}


def run(rows: dict[str, np.ndarray], **changes: object) -> dict:
    arguments = {
        "weights": rows["weights"],
        "clusters": {"user": rows["users"]},
        "groups": rows["users"],
        "slices": {},
    } | changes
    return evaluate(rows["logits"], rows["labels"], **arguments)


def pairwise_auc(scores: np.ndarray, positive: np.ndarray, negative: np.ndarray) -> float:
    """P(s+ > s-) + P(s+ = s-)/2 by comparing every pair."""
    won = 0.0
    for i, score in enumerate(scores):
        won += positive[i] * (negative[score > scores].sum() + negative[score == scores].sum() / 2)
    return won / (positive.sum() * negative.sum())


def test_loss_ne_and_calibration_equal_the_written_out_formulas() -> None:
    rows = small(fractional=True)
    found = run(rows)["metrics"]
    z, y, w = rows["logits"].astype(np.float64), rows["labels"], rows["weights"]
    p = 1 / (1 + np.exp(-z))
    loss = -(w * (y * np.log(p) + (1 - y) * np.log(1 - p))).sum() / w.sum()
    rate = (w * y).sum() / w.sum()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert found["logloss"] == pytest.approx(loss, rel=1e-12)
    assert found["ne"] == pytest.approx(loss / entropy, rel=1e-12)
    assert found["calibration"] == pytest.approx((w * p).sum() / (w * y).sum(), rel=1e-12)


def test_ne_of_the_base_rate_is_one() -> None:
    rows = small()
    rate = float(np.average(rows["labels"], weights=rows["weights"]))
    rows["logits"] = np.full(rows["logits"].shape, math.log(rate / (1 - rate)))
    found = run(rows)["metrics"]
    assert found["ne"] == pytest.approx(1.0, rel=1e-12)
    assert found["calibration"] == pytest.approx(1.0, rel=1e-12)
    assert found["auc"] == 0.5


def test_loss_of_a_confident_miss_is_its_logit_not_a_clamp() -> None:
    found = evaluate(
        np.array([60.0, -60.0, 0.0, 0.0]),
        np.array([0.0, 1.0, 0.0, 1.0]),
        weights=np.array([1.0, 1.0, 0.0, 0.0]),
        clusters={"row": np.arange(4)},
        groups=None,
        slices={},
    )
    assert found["metrics"]["logloss"] == pytest.approx(60.0, rel=1e-12)


@pytest.mark.parametrize("fractional", [False, True])
def test_weighted_auc_equals_all_pairs(fractional: bool) -> None:
    rows = small(1, fractional=fractional)
    w, y = rows["weights"], rows["labels"]
    expected = pairwise_auc(rows["logits"], w * y, w * (1 - y))
    assert run(rows)["metrics"]["auc"] == pytest.approx(expected, rel=1e-12)


def test_unweighted_auc_equals_mann_whitney_and_mid_ranks() -> None:
    rows = small(2)
    z, positive = rows["logits"], rows["labels"] > 0.5
    found = run(rows, weights=np.ones(z.size))["metrics"]["auc"]
    n1, n0 = positive.sum(), (~positive).sum()
    ranks = rankdata(z)[positive].sum() - n1 * (n1 + 1) / 2
    assert found == pytest.approx(ranks / (n1 * n0), rel=1e-12)
    u = mannwhitneyu(z[positive], z[~positive]).statistic
    assert found == pytest.approx(u / (n1 * n0), rel=1e-12)


def test_auc_influence_equals_delong_placements_by_loops() -> None:
    rows = small(3)
    z, y = rows["logits"], rows["labels"]
    area, psi = auc(z, positive=y, negative=1 - y)
    pos, neg = z[y > 0.5], z[y <= 0.5]
    for i in range(0, z.size, 5):
        if y[i] > 0.5:
            placement = np.mean([(z[i] > s) + (z[i] == s) / 2 for s in neg])
            expected = (placement - area) / pos.size
        else:
            placement = np.mean([(s > z[i]) + (s == z[i]) / 2 for s in pos])
            expected = (placement - area) / neg.size
        assert psi[i] == pytest.approx(expected, abs=1e-15)
    assert psi.sum() == pytest.approx(0.0, abs=1e-12)


def test_gauc_is_the_weighted_mean_over_groups_with_both_classes() -> None:
    rows = small(4)
    rows["labels"][rows["users"] == 3] = 0.0
    z, y, w = rows["logits"], rows["labels"], rows["weights"]
    areas, masses, skipped = [], [], 0
    for user in range(30):
        of = rows["users"] == user
        pos, neg = (w * y)[of], (w * (1 - y))[of]
        if pos.sum() > 0 and neg.sum() > 0:
            areas.append(pairwise_auc(z[of], pos, neg))
            masses.append(w[of].sum())
        else:
            skipped += 1
    assert skipped >= 1
    found = run(rows)
    assert found["metrics"]["gauc"] == pytest.approx(np.average(areas, weights=masses), rel=1e-12)
    assert sum(found["clusterings"]["user"]["gauc_psi"]) == pytest.approx(0.0, abs=1e-12)


def test_gauc_influence_is_unknown_where_a_group_spans_clusters() -> None:
    rows = small(5)
    clusters = {"user": rows["users"], "row": np.arange(240), "pair": rows["users"] // 2}
    found = run(rows, clusters=clusters)["clusterings"]
    assert found["row"]["gauc_psi"] is None
    assert found["user"]["gauc_psi"] is not None
    merged = np.asarray(found["user"]["gauc_psi"]).reshape(15, 2).sum(axis=1)
    np.testing.assert_allclose(found["pair"]["gauc_psi"], merged, atol=1e-15)


def test_no_group_with_both_classes_means_no_gauc() -> None:
    rows = small(6)
    found = run(rows, groups=np.arange(240))
    assert found["metrics"]["gauc"] is None
    assert run(rows, groups=None)["metrics"]["gauc"] is None


def test_bf16_logits_keep_auc_within_1e_4() -> None:
    data = clicks(7, rows=40_000, users=2000)
    logits = data.truth.astype(np.float32)
    bits = logits.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    exact, coarse = evaluation(data, logits), evaluation(data, rounded)
    assert coarse["distinct_predictions"] < exact["distinct_predictions"] / 10
    assert abs(coarse["metrics"]["auc"] - exact["metrics"]["auc"]) < 1e-4


def test_cluster_sums_are_additive_over_any_split() -> None:
    rows = small(8)
    whole = run(rows, clusters={"user": rows["users"], "all": np.zeros(240, np.int64)})
    user, total = whole["clusterings"]["user"], whole["clusterings"]["all"]
    for key in ("weight", "label", "prediction", "loss", "auc_psi"):
        assert sum(user[key]) == pytest.approx(total[key][0], rel=1e-12, abs=1e-12)
    half = {key: values[:120] for key, values in rows.items()}
    rest = {key: values[120:] for key, values in rows.items()}
    parts = [
        run(part, clusters={"all": np.zeros(120, np.int64)})["clusterings"]["all"]
        for part in (half, rest)
    ]
    for key in ("weight", "label", "prediction", "loss"):
        assert parts[0][key][0] + parts[1][key][0] == pytest.approx(total[key][0], rel=1e-12)
    weight, label, loss = (total[key][0] for key in ("weight", "label", "loss"))
    again = normalized_entropy(loss, weight=weight, label=label)
    assert again == pytest.approx(whole["metrics"]["ne"], rel=1e-12)


def test_rows_of_weight_zero_change_no_metric() -> None:
    rows = small(9)
    extra = {key: np.concatenate([values, values[:40]]) for key, values in rows.items()}
    extra["weights"][240:] = 0.0
    extra["labels"][240:] = 1.0
    assert run(extra)["metrics"] == pytest.approx(run(rows)["metrics"], rel=1e-12)


def test_slices_hold_the_sums_of_their_rows_only() -> None:
    rows = small(10)
    mask = np.arange(240) % 4 == 0
    found = run(rows, slices={"quarter": mask})["slices"]["quarter"]
    w, y = rows["weights"][mask], rows["labels"][mask]
    entry = found["clusterings"]["user"]
    assert sum(entry["weight"]) == pytest.approx(w.sum())
    assert sum(entry["label"]) == pytest.approx((w * y).sum())
    assert found["positives"] == np.count_nonzero((w > 0) & (y > 0.5))
    assert found["negatives"] == np.count_nonzero((w > 0) & (y <= 0.5))
    assert entry["clusters_hit"] == np.unique(rows["users"][mask][w > 0]).size


def test_evaluation_survives_json_without_losing_a_bit() -> None:
    found = run(small(11), slices={"odd": np.arange(240) % 2 == 1})
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_nonfinite_predictions_are_a_failed_run_not_an_error(broken: float) -> None:
    rows = small(12)
    rows["logits"][17] = broken
    found = run(rows)
    assert found["predictions_finite"] is False
    assert found["metrics"] is None
    assert found["clusterings"] == {}
    json.dumps(found, allow_nan=False)


def test_predictions_that_are_all_exactly_zero_are_a_failed_run() -> None:
    rows = small(13)
    rows["logits"] = np.full(240, -800.0)
    assert run(rows)["predictions_finite"] is False


@pytest.mark.parametrize(
    ("key", "rows_changed", "value", "message"),
    [
        ("labels", slice(0, 3), 2.0, "3 of 240 rows are NaN or outside"),
        ("labels", slice(0, 2), -0.1, "2 of 240 rows are NaN or outside"),
        ("labels", slice(5, 6), np.nan, "1 of 240 rows are NaN or outside"),
        ("labels", slice(None), 0.0, "are all negatives"),
        ("labels", slice(None), 1.0, "are all positives"),
        ("weights", slice(0, 4), -1.0, "4 of 240 rows are negative or not finite"),
        ("weights", slice(0, 1), np.inf, "1 of 240 rows are negative or not finite"),
        ("weights", slice(None), 0.0, "all 240 rows have weight 0"),
    ],
)
def test_rows_that_cannot_carry_a_gate_are_refused(
    key: str, rows_changed: slice, value: float, message: str
) -> None:
    rows = small(14)
    rows[key][rows_changed] = value
    with pytest.raises(DataError, match=message):
        run(rows)


def test_one_class_among_the_weighted_rows_is_refused() -> None:
    rows = small(15)
    rows["weights"] = np.where(rows["labels"] > 0.5, 0.0, 1.0)
    with pytest.raises(DataError, match="all negatives"):
        run(rows)


def test_ne_of_one_class_is_undefined_not_huge() -> None:
    for label in (0.0, 10.0):
        with pytest.raises(DataError, match="undefined"):
            normalized_entropy(1.0, weight=10.0, label=label)
    with pytest.raises(DataError, match="both must be above 0"):
        auc([0.0, 1.0], positive=[0.0, 0.0], negative=[1.0, 1.0])


def test_wrong_shapes_dtypes_and_ids_are_refused() -> None:
    rows = small(16)
    halves = rows | {"logits": rows["logits"].astype(np.float16)}
    with pytest.raises(DataError, match="float16"):
        run(halves)
    with pytest.raises(DataError, match="0 rows"):
        run({key: values[:0] for key, values in rows.items()})
    with pytest.raises(DataError, match=r"labels: shape \(239,\)"):
        run(rows | {"labels": rows["labels"][1:]})
    with pytest.raises(DataError, match="dense"):
        run(rows, clusters={"user": rows["users"] * 1000})
    with pytest.raises(DataError, match="at least one clustering"):
        run(rows, clusters={})
    with pytest.raises(DataError, match="integer id per example"):
        run(rows, groups=rows["users"].astype(np.float64))
    with pytest.raises(DataError, match="bool per example"):
        run(rows, slices={"odd": np.arange(240) % 2})
