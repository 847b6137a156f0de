"""The measurements of a sweep as Ray tasks: what goes out and comes back is JSON text."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeVar

import lowprec

from ..errors import GateError
from ..experiment import Experiment
from ..records import canonical_json, content_hash
from ..running.handover import outcome_of, pack_experiment, records_of, unpack_experiment
from ..running.processes import prepare
from ..running.ray_executor import RayTasks, check_program, program_here
from .branches import BranchJob, Setting, branch_inputs, run_branches
from .measuring import ScreenJob, run_screen

Job = TypeVar("Job")
Result = TypeVar("Result")


class RayPool:
    """A pool whose jobs are tasks of a Ray cluster, one CPU (or GPU) each.

    `tasks` starts Ray with the first job; a lost worker gets its job again.
    """

    def __init__(self, tasks: RayTasks, *, note: Callable[[str], None]) -> None:
        self.tasks, self.note = tasks, note

    def run(
        self, work: Callable[[Job], Result], jobs: Sequence[Job]
    ) -> Iterator[tuple[Job, Result]]:
        """Each job with its result, as they finish; raises the first error of a job."""
        if not jobs:
            return
        named: dict[str, Any] = {f"{_name(job)} ({i + 1})": job for i, job in enumerate(jobs)}
        experiment: Experiment = next(iter(named.values())).setting.experiment
        texts = {
            where: (pack_experiment(experiment), _asked(work, job)) for where, job in named.items()
        }
        outcomes = self.tasks.outcomes(experiment, remote_measurement, texts, note=self.note)
        with closing(outcomes):
            for where, outcome in outcomes:
                (found,) = records_of(outcome, where=where)
                result: Any = found["result"]
                yield named[where], result


def _name(job: Any) -> str:
    what = "screen" if isinstance(job, ScreenJob) else "branches"
    return f"{what}, seed {job.seed}, from step {job.setting.start}"


def _asked(work: Callable[[Job], Result], job: Any) -> str:
    """A job as JSON text, without its experiment."""
    setting = {name: value for name, value in vars(job.setting).items() if name != "experiment"}
    rest = {name: value for name, value in vars(job).items() if name != "setting"}
    return canonical_json(
        {
            "work": work.__name__,
            "setting": setting,
            "job": rest,
            "key": content_hash(branch_inputs(job.setting, job.seed, {})),
            "program": program_here(),
        }
    )


def remote_measurement(packed: str, asked: str) -> str:
    """The body of a task: one job of a sweep; returns its outcome as JSON text."""

    def records() -> list[dict[str, Any]]:
        text: Mapping[str, Any] = json.loads(asked)
        check_program(text["program"])
        experiment = unpack_experiment(packed)
        prepare(experiment.device)
        setting = Setting(experiment, **text["setting"])
        if content_hash(branch_inputs(setting, text["job"]["seed"], {})) != text["key"]:
            raise GateError(
                f"node {platform.node()!r} sees another workload file than the machine that "
                f"started the sweep, under {experiment.folder}; share the folder, or name it by a "
                "relative path without '..', so that it travels"
            )
        return [{"result": _measured(text["work"], setting, text["job"])}]

    return outcome_of(records, theirs=lowprec.LowprecError)


def _measured(work: str, setting: Setting, job: Mapping[str, Any]) -> Any:
    if work == run_screen.__name__:
        options = {product: tuple(texts) for product, texts in job["options"].items()}
        layers = tuple(job["layers"])
        return run_screen(ScreenJob(setting, job["seed"], job["batches"], layers, options))
    return run_branches(BranchJob(setting, job["seed"], tuple(job["arms"])))
