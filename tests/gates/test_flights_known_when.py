"""The workload flights: nothing of the future is a feature, and the airports are kept apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qualitygates.workload import EvaluationBatch
from qualitygates.workloads import flights as module
from qualitygates.workloads.flights import KNOWN_BEFORE, Flights


@pytest.fixture(scope="module")
def columns() -> dict[str, Any]:
    return module._load()


def test_nothing_of_the_future_reaches_the_features(columns: dict[str, Any]) -> None:
    """Outcomes that happen after a moment are replaced; earlier predictions must not notice."""
    rng = np.random.default_rng(0)
    scheduled, delay = columns["scheduled"], columns["dep_delay"]
    cut = int(scheduled[columns["month"] == 11][5000])
    changed = dict(columns)
    departs_later = scheduled + delay > cut
    after = np.maximum(cut - scheduled, 0) + rng.integers(1, 300, len(delay))
    changed["dep_delay"] = np.where(departs_later, after, delay)
    arrives_later = departs_later | (scheduled + delay + columns["air_time"] > cut)
    noise = rng.integers(-60, 300, len(delay)).astype(np.float64)
    changed["arr_delay"] = np.where(arrives_later, noise, columns["arr_delay"])
    changed["air_time"] = np.where(arrives_later, 10_000.0, columns["air_time"])
    before, later = Flights(columns, 1), Flights(changed, 1)
    predicted = scheduled - KNOWN_BEFORE <= cut
    assert departs_later[np.flatnonzero(predicted)[-20:]].mean() > 0.8
    assert (changed["dep_delay"] != delay).sum() > 10_000
    for name in ("dense", "categorical"):
        old, new = getattr(before, name), getattr(later, name)
        np.testing.assert_array_equal(old[predicted], new[predicted])
    for name in ("count", "dest", "values"):
        np.testing.assert_array_equal(
            before.legs[name][predicted], later.legs[name][predicted], err_msg=name
        )
    assert (before.dense[~predicted] != later.dense[~predicted]).any(1).mean() > 0.9


def test_the_three_airports_stay_apart(columns: dict[str, Any]) -> None:
    held_out: EvaluationBatch
    (held_out,) = Flights(columns, 13).evaluation_batches(batch_size=10**6)
    origins = [held_out.slices[f"origin={name}"] for name in ("EWR", "JFK", "LGA")]
    assert (sum(member.astype(int) for member in origins) == 1).all()
    codes = held_out.features["categorical"][:, list(module._CATEGORICAL).index("origin")].numpy()
    assert [len(np.unique(codes[member])) for member in origins] == [1, 1, 1]
    assert len({int(codes[member][0]) for member in origins}) == 3
    assert held_out.groups is not None
    groups = [set(held_out.groups[member].tolist()) for member in origins]
    assert not groups[0] & groups[1]
    assert not groups[0] & groups[2]
    assert not groups[1] & groups[2]


def test_departures_an_hour_count_each_airport_and_the_cancelled(columns: dict[str, Any]) -> None:
    count = columns["departures_an_hour"]
    flown = {}
    hours = columns["scheduled"] // 60
    for key in zip(columns["origin"].tolist(), hours.tolist(), strict=True):
        flown[key] = flown.get(key, 0) + 1
    own = np.array([flown[k] for k in zip(columns["origin"].tolist(), hours.tolist(), strict=True)])
    assert (count >= own).all()
    assert 0 < (count > own).mean() < 0.5
