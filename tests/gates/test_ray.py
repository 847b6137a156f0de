"""Runs as Ray tasks: the same bits, lost workers replaced, errors that reach the user.

Ray starts once for this file: about 4 s and 0.5 GB on an idle machine of two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from qualitygates.errors import ExperimentError, GateError
from qualitygates.experiment import Experiment
from qualitygates.gate import run
from qualitygates.progress import Progress
from qualitygates.running import ray_executor as ray_executor
from qualitygates.running.executors import Job, LocalPool
from tests.gates.killing import TIMES, contents

pytest.importorskip("ray", reason="ray is not installed (lowprec[cluster])")

FOLDER = Path(__file__).parent


def experiment(**options) -> Experiment:
    data = {
        "schema": 1,
        "name": "toy",
        "workload": "accident_workload.py:build",
        "margins": "demo",
        "looks": [3],
        "options": {"rows": 2000, **options},
        "train": {"steps": 20, "batch_size": 64},
        "baseline": {"recipe": "bf16"},
        "candidate": {"recipe": "mxfp8"},
        "speed": {"required": False},
    }
    return Experiment.from_dict(data, folder=FOLDER)


@pytest.fixture(scope="module")
def tasks() -> Iterator[ray_executor.RayTasks]:
    with ray_executor.RayTasks("local", workers=1) as executor:
        yield executor


def results(executor, gate: Experiment, *jobs: Job) -> dict[Job, list[dict]]:
    with (
        Progress(enabled=False, jobs=len(jobs), steps=gate.steps) as shown,
        closing(executor.results(gate, jobs, shown=shown)) as found,
    ):
        return dict(found)


def stable(records: list[dict]) -> list[dict]:
    return [{name: r[name] for name in r if name not in TIMES} for r in records]


JOB = Job("candidate", 2, ("candidate",))
BASE = Job("baseline", 1, ("baseline", "known_bad"))


def test_a_task_returns_the_records_of_a_local_run(tasks) -> None:
    there = results(tasks, experiment(), JOB, BASE)
    here = results(LocalPool(1), experiment(), JOB, BASE)
    assert there.keys() == here.keys() == {JOB, BASE}
    assert [len(there[job]) for job in (JOB, BASE)] == [1, 2]
    for job in there:
        assert stable(there[job]) == stable(here[job])


def test_a_lost_worker_is_replaced_but_not_for_ever(
    tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = experiment(deaths=str(tmp_path))
    (tmp_path / "death-1").touch()
    (record,) = results(tasks, gate, JOB)[JOB]
    assert record["training"]["crashed"] is None
    assert not list(tmp_path.iterdir())
    (tmp_path / "death-1").touch()
    monkeypatch.setattr(ray_executor, "RETRIES", 0)
    with pytest.raises(GateError, match=r"candidate, seed 2: 1 workers in turn were lost"):
        results(tasks, gate, JOB)


def test_errors_about_the_input_arrive_as_themselves(tasks) -> None:
    with pytest.raises(ExperimentError, match=r"candidate, seed 2: .*unknown option 'colour'"):
        results(tasks, experiment(colour="red"), JOB)


def test_a_node_with_another_program_or_other_files_is_refused(
    tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ray_executor.program_here()
    monkeypatch.setattr(ray_executor, "program_here", lambda: {**program, "lowprec": "older"})
    with pytest.raises(GateError, match=r"node .* lowprec [0-9a-f]{12} instead of older"):
        results(tasks, experiment(), JOB)
    monkeypatch.undo()
    monkeypatch.setattr(ray_executor, "run_inputs", lambda *_: {"another": "file"})
    with pytest.raises(GateError, match=r"node .* sees other files"):
        results(tasks, experiment(), JOB)


def test_more_than_this_machine_has_is_refused_and_not_waited_for(tasks) -> None:
    with pytest.raises(ExperimentError, match=r"2 CPUs and 0 GPUs .* has 1 and 0"):
        results(tasks, replace(experiment(), processes=2), JOB)
    with pytest.raises(ExperimentError, match=r"1 CPUs and 1 GPUs"):
        results(tasks, replace(experiment(), device="cuda"), JOB)


@pytest.mark.slow
def test_a_gate_on_ray_leaves_the_bytes_of_a_local_one(tasks, tmp_path: Path) -> None:
    for out, cluster in (("ray", "local"), ("here", "")):
        run(experiment(), out=tmp_path / out, workers=2, progress=False, cluster=cluster)
    assert contents(tmp_path / "ray") == contents(tmp_path / "here")
    verdicts = [(tmp_path / out / "verdict.json").read_bytes() for out in ("ray", "here")]
    assert verdicts[0] == verdicts[1]


def test_a_cluster_that_is_not_there_is_an_error_of_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Absent:
        is_initialized = staticmethod(lambda: False)

        @staticmethod
        def init(**_):
            raise ConnectionError("nobody answers")

    with (
        pytest.raises(ExperimentError, match=r"--cluster 10\.0\.0\.9:1: .*nobody answers; allowed"),
        ray_executor._ray(Absent, "10.0.0.9:1", 2, experiment()),
    ):
        pass
