"""The workload criteo: its layout, missing and negative values, blocks as clusters, refusals."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qualitygates.errors import DataError, ExperimentError
from qualitygates.workload import Workload, load_workload
from qualitygates.workloads.criteo import BLOCKS, CATEGORICALS, INTEGERS


def lines(rows: int, seed: int) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(rows):
        integers = rng.integers(-2, 500, 13)
        hexes = rng.integers(0, 2**32, 26)
        lost = rng.random(39) < 0.2
        values = [*(str(i) for i in integers), *(f"{h:08x}" for h in hexes)]
        # A column that names the label, so that there is something to learn.
        label = int(rng.random() < 0.3)
        values[13] = f"{label:08x}"
        made.append([str(label), *("" if no else v for no, v in zip(lost, values, strict=True))])
    return made


def write(path: Path, rows: list[list[str]]) -> None:
    path.write_text("".join("\t".join(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "train.txt", lines(600, 0))
    write(tmp_path / "test.txt", lines(500, 1))
    return tmp_path


def load(folder: Path, **changes: Any) -> Workload:
    options = {"train": "train.txt", "evaluate": "test.txt", "buckets": 128} | changes
    return load_workload("criteo", options, folder=folder)


def test_features_are_those_of_a_plain_loop(folder: Path) -> None:
    (batch,) = load(folder).evaluation_batches(batch_size=500)
    columns = list(zip(*lines(600, 0), strict=True))[1:14]
    logs = [np.array([np.log1p(max(int(v), 0)) for v in column if v]) for column in columns]
    for row, values in enumerate(lines(500, 1)[:60]):
        assert batch.labels[row].item() == float(values[0])
        dense = []
        for value, log in zip(values[1:14], logs, strict=True):
            scaled = (np.log1p(max(int(value), 0)) - log.mean()) / log.std() if value else 0.0
            dense.append(np.clip(scaled, -5, 5))
        flags = [float(not value) for value in values[1:14]]
        np.testing.assert_allclose(
            batch.features["dense"][row], dense + flags, rtol=1e-4, atol=1e-5
        )
        wanted = [zlib.crc32(value.encode()) % 128 for value in values[14:]]
        assert batch.features["categorical"][row].tolist() == wanted
    assert len(INTEGERS) == 13
    assert len(CATEGORICALS) == 26


def test_blocks_of_consecutive_rows_are_the_clusters(folder: Path) -> None:
    batches = list(load(folder, clusters=["C2"]).evaluation_batches(batch_size=64))
    blocks = np.concatenate([batch.clusters["block of rows"] for batch in batches])
    assert (np.diff(blocks) >= 0).all()
    counts = np.bincount(blocks)
    assert len(counts) == BLOCKS
    assert set(counts) == {1, 2}
    assert set(batches[0].clusters) == {"block of rows", "C2"}
    assert batches[0].groups is None


def test_a_model_learns_from_it(folder: Path) -> None:
    workload = load(folder)
    torch.manual_seed(0)
    model = workload.model()
    optimizer, schedule = workload.optimizer(model, steps=25)
    losses = []
    for batch in workload.training_batches(seed=1, steps=25, batch_size=200):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            model(batch.features), batch.labels
        )
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_the_window_and_the_facts(folder: Path) -> None:
    workload = load(folder, evaluation_rows=300)
    assert workload.facts["evaluation rows"] == 300
    assert workload.facts["clusters by block of rows"] == BLOCKS
    assert sum(len(b.labels) for b in workload.evaluation_batches(batch_size=77)) == 300


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # What the competition calls test.txt has no labels.
        (lambda rows: [row[1:] for row in rows], ["line 1", "39 values where 40 are expected"]),
        (lambda rows: [*rows[:70], rows[70][:20], *rows[71:]], ["line 71", "20 values"]),
        (lambda rows: [*rows[:9], ["2", *rows[9][1:]], *rows[10:]], ["line 10", "0 to 1"]),
        (
            lambda rows: [*rows[:9], ["1", "a1", *rows[9][2:]], *rows[10:]],
            ["line 10", "'I1'", "not a number"],
        ),
        (lambda rows: [["0", *row[1:]] for row in rows], ["no positive label"]),
        (lambda rows: rows[:100], ["100 evaluation rows", "256 blocks"]),
        (lambda rows: [[",".join(row)] for row in rows], ["1 values where 40"]),
        (lambda rows: [], ["is empty"]),
    ],
)
def test_files_of_another_layout(folder: Path, change: Any, words: list[str]) -> None:
    write(folder / "test.txt", change(lines(500, 1)))
    with pytest.raises(DataError) as caught:
        load(folder)
    for word in ["test.txt", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clusters": ["I3"]}, "allowed: C1 to C26"),
        ({"evaluation_rows": 100}, "evaluation_rows = 100"),
        ({"buckets": 0}, "buckets = 0"),
        ({"label": "x"}, "unknown option 'label'"),
    ],
)
def test_options_that_make_no_sense(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load(folder, **changes)
    assert words in str(caught.value)
