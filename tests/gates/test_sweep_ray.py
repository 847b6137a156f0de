"""A sweep on Ray measures what a sweep in this process does, and refuses other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qualitygates.errors import GateError
from qualitygates.experiment import Experiment
from qualitygates.records import canonical_json
from qualitygates.running.ray_executor import RayTasks
from qualitygates.sensitivity import ray_pool
from qualitygates.sensitivity.branches import BranchJob, Setting, run_branches
from qualitygates.sensitivity.measuring import ScreenJob, run_screen
from qualitygates.sensitivity.pool import SamePlace

pytest.importorskip("ray", reason="ray is not installed (lowprec[cluster])")

LOW = "mxfp4 / bf16 / mxfp4"
DATA = {
    "schema": 1,
    "name": "toy",
    "workload": "toy_workload.py:build",
    "margins": "demo",
    "looks": [3],
    "options": {"rows": 1000},
    "train": {"steps": 20, "batch_size": 32},
    "baseline": {"recipe": "bf16"},
    "candidate": {"recipe": "mxfp8"},
    "speed": {"required": False},
}


class HereTasks:
    """Tasks that run in this process: the texts that Ray would carry, without a Ray."""

    def outcomes(self, experiment, function, texts, *, note):
        for where, pair in texts.items():
            yield where, function(*pair)


def pool() -> ray_pool.RayPool:
    return ray_pool.RayPool(HereTasks(), note=print)


def setting() -> Setting:
    experiment = Experiment.from_dict(DATA, folder=Path(__file__).parent)
    return Setting(experiment, {"first": 0.0, "last": 0.4, "clusters": ""}, 300, 4, 3)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def same_as_here(pool: ray_pool.RayPool) -> bool:
    branches = [BranchJob(setting(), seed, ({}, {"body.0": LOW, "top": LOW})) for seed in (5, 6)]
    screen = ScreenJob(setting(), 5, 2, ("body.0", "top"), {"fprop": ("mxfp4", "mxfp8")})
    for work, jobs in ((run_branches, branches), (run_screen, [screen])):
        there = {repr(job): result for job, result in pool.run(work, jobs)}
        here = {repr(job): result for job, result in SamePlace().run(work, jobs)}
        assert len(there) == len(jobs)
        if there != here:
            return False
    return True


def test_what_travels_as_text_is_measured_alike() -> None:
    assert same_as_here(pool())


@pytest.mark.slow
def test_ray_measures_what_this_process_does() -> None:
    with RayTasks("local", workers=1) as tasks:
        assert same_as_here(ray_pool.RayPool(tasks, note=print))


def test_no_job_starts_no_ray() -> None:
    assert list(ray_pool.RayPool(RayTasks("local", workers=1), note=print).run(len, [])) == []


def test_a_node_with_other_programs_or_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = BranchJob(setting(), 5, ({},))
    asked = ray_pool._asked

    def other(**changed):
        monkeypatch.setattr(
            ray_pool,
            "_asked",
            lambda work, job: canonical_json({**json.loads(asked(work, job)), **changed}),
        )

    other(program={**ray_pool.program_here(), "torch": "0.1"})
    with pytest.raises(GateError, match=r"branches, seed 5.*has other programs.*torch .* 0.1"):
        list(pool().run(run_branches, [job]))
    other(key="another file")
    with pytest.raises(GateError, match="sees another workload file"):
        list(pool().run(run_branches, [job]))


def test_an_error_about_the_input_reaches_the_user() -> None:
    job = BranchJob(setting(), 5, ({"body.0": "mxfp4 / bf16 / none"},))
    with pytest.raises(GateError, match="branches, seed 5"):
        list(pool().run(run_branches, [job]))
