"""The workload `part`: other rows count for nothing, training is the inner workload's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qualitygates.errors import DataError, ExperimentError
from qualitygates.workload import load_workload

FOLDER = Path(__file__).parent
TOY = {"workload": "toy_workload.py:build", "options": {"rows": 900}}


def part(of=None, **options):
    return load_workload("part", {"of": {**TOY, **(of or {})}, **options}, folder=FOLDER)


def counted(workload) -> dict[int, float]:
    return {
        int(i): float(w)
        for batch in workload.evaluation_batches(batch_size=128)
        for i, w in zip(batch.ids, batch.weights, strict=True)
        if w > 0
    }


def test_parts_are_whole_clusters_and_cover_everything_once() -> None:
    shares = [(0.0, 0.4), (0.4, 0.7), (0.7, 1.0)]
    rows = [counted(part(first=a, last=b)) for a, b in shares]
    users = [{i % 200 for i in one} for one in rows]
    assert sum(map(len, rows)) == 900
    assert [len(one) for one in users] == [80, 60, 60]
    assert not users[0] & users[1]
    assert "clusters 1 to 80 of 200 of 'user'" in str(part(last=0.4).facts["evaluated on"])


def test_training_model_and_optimizer_are_those_of_the_inner_workload() -> None:
    inner = load_workload(TOY["workload"], TOY["options"], folder=FOLDER)
    outer = part(last=0.4)
    both = [next(one.training_batches(seed=3, steps=1, batch_size=16)) for one in (inner, outer)]
    assert torch.equal(both[0].ids, both[1].ids)
    assert repr(outer.model()) == repr(inner.model())


def test_batches_outside_are_left_out_and_names_stay(tmp_path: Path) -> None:
    batches = list(part(last=0.1).evaluation_batches(batch_size=16))
    assert all(float(batch.weights.sum()) > 0 for batch in batches)
    assert set(batches[0].clusters) == {"user"}
    assert np.array_equal(batches[0].slices["even"], batches[0].ids.numpy() % 2 == 0)


def test_relative_paths_start_at_base() -> None:
    of = {**TOY, "base": FOLDER.name}
    found = load_workload("part", {"of": of, "last": 0.5}, folder=FOLDER.parent)
    assert found.name == "toy"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"first": 0.5, "last": 0.5}, ExperimentError, "no row is left"),
        ({"first": -1}, ExperimentError, "allowed: 0 to 1"),
        ({"clusters": "day"}, ExperimentError, "no clustering 'day'; toy has user"),
        ({"first": 0.5, "last": 0.501}, DataError, "of the 200 clusters 'user' is none"),
        ({"of": {"source": "0" * 64}}, ExperimentError, "not the file that this part was made for"),
        ({"of": {"workload": 3}}, ExperimentError, "it is a table with workload"),
        ({"of": {"workload": "flihgts"}}, ExperimentError, "did you mean 'flights'"),
        ({"of": {"workload": "none.py:build"}}, ExperimentError, "none.py"),
    ],
)
def test_mistakes_are_named(options, error, message) -> None:
    with pytest.raises(error, match=message):
        part(**options)
