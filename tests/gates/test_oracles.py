"""Our metrics beside torchrec's (NE, calibration, CTR, recalibration, segments) and scikit-learn's.

Both libraries are optional: without them these tests are skipped, and the same metrics are still
held by the formulas written out in test_metrics.py.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from qualitygates.errors import DataError
from qualitygates.metrics import evaluate, recalibrated
from tests.gates.synthetic import clicks

TASKS, ROWS = 2, 5000


def optional(name: str) -> Any:
    """The module, or a skip that says what is missing; its own deprecations are not ours."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name.partition('.')[0]} is not installed: {error}")


def rows(task: int) -> dict[str, np.ndarray]:
    data = clicks(task, rows=ROWS)
    rng = np.random.default_rng([1, task])
    return {
        # Rounded: many ties, as quantized logits have them.
        "logits": np.round(data.truth + rng.normal(0, 0.5, ROWS), 2).astype(np.float32),
        "labels": data.labels,
        "weights": rng.choice([0.5, 1.0, 2.5], ROWS),
        "users": data.users,
    }


def ours(task: int, *, rate: float = 1.0, slices: dict | None = None) -> dict[str, Any]:
    one = rows(task)
    return evaluate(
        recalibrated(one["logits"], rate),
        one["labels"],
        weights=one["weights"],
        clusters={"user": one["users"]},
        groups=None,
        slices=slices or {},
    )


def theirs(module: str, name: str, **options: Any) -> list[dict[str, float]]:
    """What a torchrec computation reports for both tasks after five batches, lifetime values."""
    computation = getattr(optional(f"torchrec.metrics.{module}"), name)(
        my_rank=0, batch_size=ROWS // 5, n_tasks=TASKS, window_size=ROWS, **options
    )
    tasks = [rows(task) for task in range(TASKS)]
    for part in np.split(np.arange(ROWS), 5):
        stacked = {
            key: torch.from_numpy(np.stack([one[key][part] for one in tasks]).astype(np.float64))
            for key in ("logits", "labels", "weights")
        }
        computation.update(
            # Cloned: torchrec clamps the caller's float64 tensor in place.
            predictions=torch.sigmoid(stacked["logits"]).clone(),
            labels=stacked["labels"],
            weights=stacked["weights"],
        )
    # compute() would also gather over processes, which torchmetrics does for its own states only.
    reports = [one for one in computation._compute() if "lifetime" in str(one.metric_prefix)]
    return [{str(one.name): float(one.value[task]) for one in reports} for task in range(TASKS)]


def test_ne_and_logloss_equal_torchrecs() -> None:
    found = theirs("ne", "NEMetricComputation", include_logloss=True)
    for task in range(TASKS):
        metrics = ours(task)["metrics"]
        assert metrics["ne"] == pytest.approx(found[task]["ne"], rel=1e-6)
        # torchrec's log-loss is in bits.
        assert metrics["logloss"] == pytest.approx(found[task]["logloss"] * np.log(2), rel=1e-6)


def test_calibration_equals_torchrecs() -> None:
    found = theirs("calibration", "CalibrationMetricComputation")
    for task in range(TASKS):
        calibration = ours(task)["metrics"]["calibration"]
        assert calibration == pytest.approx(found[task]["calibration"], rel=1e-6)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_ne_recalibrated_for_negative_downsampling_equals_torchrecs(rate: float) -> None:
    found = theirs(
        "ne_with_recalibration", "RecalibratedNEMetricComputation", recalibration_coefficient=rate
    )
    for task in range(TASKS):
        ne = ours(task, rate=rate)["metrics"]["ne"]
        assert ne == pytest.approx(found[task]["ne"], rel=1e-6)
        assert ne != pytest.approx(ours(task)["metrics"]["ne"], rel=1e-3)


def test_ne_of_a_slice_equals_the_ne_of_its_rows_alone() -> None:
    module = optional("torchrec.metrics.ne")
    one = rows(0)
    mask = np.arange(ROWS) % 3 == 0
    sums = ours(0, slices={"third": mask})["slices"]["third"]["clusterings"]["user"]
    total = {key: sum(sums[key]) for key in ("loss", "weight", "label")}
    states = module.get_ne_states(
        *(
            torch.from_numpy(values[mask].astype(np.float64))[None]
            for values in (one["labels"], 1 / (1 + np.exp(-one["logits"].astype(float))))
        ),
        torch.from_numpy(one["weights"][mask])[None],
        1e-12,
    )
    expected = module.compute_ne(
        states["cross_entropy_sum"],
        states["weighted_num_samples"],
        pos_labels=states["pos_labels"],
        neg_labels=states["neg_labels"],
        eta=1e-12,
    )
    rate = total["label"] / total["weight"]
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    ne = total["loss"] / total["weight"] / entropy
    assert ne == pytest.approx(float(expected), rel=1e-6)


def test_auc_equals_scikit_learns_with_ties() -> None:
    sklearn = optional("sklearn.metrics")
    for task in range(TASKS):
        one = rows(task)
        assert len(np.unique(one["logits"])) < ROWS / 4
        expected = sklearn.roc_auc_score(one["labels"], one["logits"], sample_weight=one["weights"])
        assert ours(task)["metrics"]["auc"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("rate", [0.02, 0.3])
def test_recalibration_is_the_map_on_probabilities_and_keeps_the_order(rate: float) -> None:
    z = rows(0)["logits"]
    p = 1 / (1 + np.exp(-z.astype(np.float64)))
    moved = 1 / (1 + np.exp(-recalibrated(z, rate)))
    np.testing.assert_allclose(moved, p / (p + (1 - p) / rate), rtol=1e-12)
    assert ours(0, rate=rate)["metrics"]["auc"] == ours(0)["metrics"]["auc"]
    assert recalibrated(z, 1.0) is z


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan")])
def test_a_rate_that_is_no_share_is_refused(rate: float) -> None:
    with pytest.raises(DataError, match="negative sampling rate"):
        recalibrated(np.zeros(3, np.float32), rate)
