"""Two processes share every batch of a run (gloo): the record of one process, up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from qualitygates.errors import ExperimentError
from qualitygates.experiment import Experiment
from qualitygates.running.executors import work
from qualitygates.running.handover import LostProcess

FOLDER = Path(__file__).parent


def experiment(processes: int, **options) -> Experiment:
    data = {
        "schema": 1,
        "name": "shared",
        "workload": "accident_workload.py:build",
        "margins": "demo",
        "looks": [3],
        "options": {"rows": 2000, **options},
        "train": {"steps": 12, "batch_size": 64, "processes": processes},
        "baseline": {"recipe": "bf16"},
        "candidate": {"recipe": "mxfp8"},
        "speed": {"required": False},
    }
    return Experiment.from_dict(data, folder=FOLDER)


def records(processes: int, arm: str, **options) -> list[dict]:
    return work(experiment(processes, **options), arm, 1, tick=lambda: None)


def test_two_processes_train_what_one_trains() -> None:
    (one,), (two,) = records(1, "candidate"), records(2, "candidate")
    assert two["pairing"] == one["pairing"]
    assert two["inputs"] == {**one["inputs"], "processes": 2}
    assert two["key"] != one["key"]
    assert (one["environment"]["processes"], two["environment"]["processes"]) == (1, 2)
    assert two["gemms"] == one["gemms"]
    assert two["gemms_match_plan"]
    # The first forward sees the same weights; later ones the weight gradients rounded in halves.
    assert two["training"]["loss"][0] == pytest.approx(one["training"]["loss"][0], rel=1e-6)
    for name in ("loss", "grad_norm"):
        assert two["training"][name] == pytest.approx(one["training"][name], rel=5e-3)
        assert two["training"][name] != one["training"][name]
    metrics = [r["evaluations"]["trained"]["metrics"]["ne"] for r in (one, two)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3)


@pytest.mark.slow
def test_two_processes_give_the_same_bits_twice() -> None:
    first, second = records(2, "baseline", dropout=0.2), records(2, "baseline", dropout=0.2)
    assert len(first) == 2
    for a, b in zip(first, second, strict=True):
        assert {**a, "timing": None} == {**b, "timing": None}


@pytest.mark.slow
def test_a_crash_in_one_process_is_the_crash_of_the_run() -> None:
    base, bad = records(2, "baseline", fails_on_rank=1)
    for record in (base, bad):
        assert record["training"]["crashed"] == "RuntimeError: rank 1 fell over"
        assert record["evaluations"] == {}


@pytest.mark.slow
def test_a_killed_process_is_not_taken_for_a_crash_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "death-1").touch()
    with pytest.raises(LostProcess, match=r"baseline, seed 1: its 2 processes .*resumes"):
        records(2, "baseline", deaths=str(tmp_path))


@pytest.mark.slow
def test_an_error_about_the_input_is_raised_where_the_run_was_asked_for() -> None:
    with pytest.raises(ExperimentError, match=r"2 processes: .*unknown option 'colour'"):
        records(2, "baseline", colour="red")
