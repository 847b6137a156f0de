"""A batch shared by rows, and jobs and outcomes as text."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import lowprec
from qualitygates.errors import DataError, ExperimentError, GateError, RecordError
from qualitygates.evaluating import mean_task_loss
from qualitygates.experiment import Experiment
from qualitygates.running.handover import (
    LostProcess,
    is_lost,
    outcome_of,
    pack_experiment,
    records_of,
    unpack_experiment,
)
from qualitygates.running.places import Place
from qualitygates.runs import execute, run_inputs
from qualitygates.workload import Batch, load_workload

ROWS = 12
LENGTHS = [0, 3, 1, 0, 2, 5, 1, 1, 0, 4, 0, 2]
FOLDER = Path(__file__).parent
DATA = {
    "schema": 1,
    "name": "toy",
    "workload": "toy_workload.py:build",
    "margins": "demo",
    "looks": [3],
    "options": {"rows": 500},
    "train": {"steps": 2, "batch_size": 64},
    "baseline": {"recipe": "bf16"},
    "candidate": {"recipe": "mxfp8"},
    "speed": {"required": False},
}


def batch(tasks: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(1)
    shape = (ROWS, tasks) if tasks else (ROWS,)
    entries = sum(LENGTHS)
    return Batch(
        features={
            "dense": torch.randn(ROWS, 3, generator=generator),
            "history_ids": torch.arange(entries),
            "history_values": torch.randn(entries, 2, generator=generator),
            "history_offsets": torch.tensor([0, *np.cumsum(LENGTHS)]),
        },
        labels=torch.randint(0, 2, shape, generator=generator).float(),
        weights=torch.rand(ROWS, generator=generator),
        ids=torch.arange(ROWS),
    )


def entries_of_rows(one: Batch) -> list[list[int]]:
    offsets = one.features["history_offsets"].tolist()
    ids = one.features["history_ids"].tolist()
    return [ids[a:b] for a, b in itertools.pairwise(offsets)]


@pytest.mark.parametrize("processes", [2, 3, 12])
def test_the_parts_of_a_batch_are_its_rows_in_order(processes: int) -> None:
    whole = batch()
    parts = [Place(rank, processes).part(whole) for rank in range(processes)]
    for name in ("labels", "weights", "ids"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))
    for name in ("dense", "history_ids", "history_values"):
        assert torch.equal(torch.cat([p.features[name] for p in parts]), whole.features[name])
    assert [row for p in parts for row in entries_of_rows(p)] == entries_of_rows(whole)
    assert {p.features["history_offsets"][0].item() for p in parts} == {0}


@pytest.mark.parametrize("tasks", [0, 2])
def test_the_losses_of_the_parts_add_up_to_that_of_the_whole(tasks: int) -> None:
    whole = batch(tasks)
    logits = torch.linspace(-2, 2, whole.labels.numel()).reshape(whole.labels.shape)
    parts = [
        mean_task_loss(
            Place(rank, 3).part(replace(whole, features={"z": logits})).features["z"],
            Place(rank, 3).part(whole),
            where="here",
            whole=whole.weights,
        )
        for rank in range(3)
    ]
    torch.testing.assert_close(sum(parts), mean_task_loss(logits, whole, where="here"))


def test_a_part_without_weight_adds_nothing() -> None:
    whole = batch()
    whole = replace(whole, weights=whole.weights * (torch.arange(ROWS) >= 6))
    first = mean_task_loss(
        torch.zeros(6), Place(0, 2).part(whole), where="here", whole=whole.weights
    )
    assert first == 0


@pytest.mark.parametrize(
    ("processes", "change", "says"),
    [
        (5, {}, "12 rows cannot be shared by 5"),
        (2, {"table": torch.zeros(7, 2)}, r"'table' has shape \(7, 2\)"),
        (2, {"scale": torch.tensor(1.0)}, r"'scale' has shape \(\)"),
    ],
)
def test_a_batch_that_has_no_equal_parts_is_refused(processes, change, says) -> None:
    whole = batch()
    whole = replace(whole, features={**whole.features, **change})
    with pytest.raises(DataError, match=says):
        Place(0, processes).part(whole)


def test_one_process_gets_the_very_batch() -> None:
    whole = batch()
    assert Place().part(whole) is whole


def experiment(folder: Path = FOLDER, **train) -> Experiment:
    return Experiment.from_dict({**DATA, "train": {**DATA["train"], **train}}, folder=folder)


def test_processes_and_device_make_another_run_and_are_no_part_of_older_promises() -> None:
    plain = experiment()
    assert "processes" not in plain.to_dict()["train"]
    assert experiment(processes=1, device="cpu").hash == plain.hash
    for other in (experiment(processes=2), experiment(device="cuda")):
        assert other.hash != plain.hash
        assert run_inputs(other, "null", 1) != run_inputs(plain, "null", 1)
        assert Experiment.from_dict(other.to_dict(), folder=FOLDER) == other


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"processes": 3}, "processes = 3 cannot share batch_size = 64"),
        ({"processes": 0}, "processes = 0"),
        ({"processes": True}, "processes = True"),
        ({"device": "tpu"}, "device = 'tpu'; allowed: cpu, cuda"),
    ],
)
def test_bad_places_are_refused(train: dict, says: str) -> None:
    with pytest.raises(ExperimentError, match=says):
        experiment(**train)


def test_a_run_of_two_processes_is_not_made_by_one() -> None:
    two = experiment(processes=2)
    workload = load_workload(two.workload, two.options, folder=FOLDER)
    with pytest.raises(GateError, match="wants 2 processes"):
        execute(two, "null", 1, workload=workload, tick=lambda: None)


def test_an_experiment_travels_with_its_workload_and_recipe(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "sub").mkdir(parents=True)
    shutil.copy(FOLDER / "toy_workload.py", home)
    (home / "sub" / "mine.toml").write_text(lowprec.load_recipe("mxfp8").to_toml())
    data = {**DATA, "candidate": {"recipe": "sub/mine.toml"}}
    sent = Experiment.from_dict(data, folder=home)
    text = pack_experiment(sent)
    wanted = run_inputs(sent, "candidate", 1)
    assert unpack_experiment(text).folder == home
    unpack_experiment.cache_clear()
    (home / "toy_workload.py").write_text("raise SystemExit('an older file of the same name')")
    arrived = unpack_experiment(text)
    assert arrived.folder != home
    assert arrived.folder.stat().st_mode & 0o077 == 0
    assert arrived == sent
    assert run_inputs(arrived, "candidate", 1) == wanted


def test_paths_that_leave_the_folder_do_not_travel(tmp_path: Path) -> None:
    (tmp_path / "secret.py").write_text("x = 1")
    (tmp_path / "in").mkdir()
    for workload in ("../secret.py:build", f"{tmp_path}/secret.py:build"):
        one = Experiment.from_dict({**DATA, "workload": workload}, folder=tmp_path / "in")
        assert "x = 1" not in pack_experiment(one)


def test_an_outcome_is_the_records_or_the_error_with_where_in_front() -> None:
    def refuse(error: Exception):
        def work() -> list[dict]:
            raise error

        return outcome_of(work, theirs=lowprec.LowprecError)

    records = [{"loss": [0.1 + 0.2, None, 1e-300], "name": "é\ud800"}]
    assert records_of(outcome_of(lambda: records, theirs=OSError), where="w") == records
    for error, kind, says in (
        (DataError("bad rows"), DataError, "null, seed 1: bad rows"),
        (RecordError("torn"), RecordError, "null, seed 1: torn"),
        (lowprec.RecipeError("no rule"), GateError, "null, seed 1: RecipeError: no rule"),
        (OSError(28, "full"), GateError, "OSError"),
    ):
        with pytest.raises(kind, match=says):
            records_of(refuse(error), where="null, seed 1")
    lost = refuse(LostProcess("rank 1 is gone"))
    assert is_lost(lost)
    assert not is_lost(refuse(DataError("bad rows")))
    with pytest.raises(LostProcess, match="w: rank 1 is gone"):
        records_of(lost, where="w")
    with pytest.raises(GateError, match="int: 3"):
        records_of('{"error": "int", "says": "3"}', where="w")
