"""run: train what a look still lacks, judge, go on until the verdict is final."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import lowprec

from .acceptance import withdraw
from .errors import DataError, ExperimentError, GateError
from .evaluating import evaluation_names
from .experiment import Experiment
from .judging import judge_records
from .locking import folder_lock
from .progress import Progress
from .records import RunStore, content_hash, read_speed
from .report import write_report
from .running.executors import Executor, Job, open_executor
from .runs import run_inputs
from .workload import Workload, load_workload


def run(
    experiment: Experiment, *, out: Path, workers: int, progress: bool, cluster: str = ""
) -> dict[str, Any]:
    """Run a gate in the folder `out` and return the verdict; finished runs are never repeated.

    The runs are trained by `workers` processes of this machine, or as Ray tasks: `cluster` is
    "local" for a Ray on this machine, "auto" or an address for one that runs. The folder is locked
    until the verdict is written: a second gate in it is refused with ExperimentError.
    Everything that can be wrong with the input is found before anything is written: the workload
    loads, both recipes fit the model. gate.json is written before the first run. Killed at any
    point, the same call resumes and gives bit-equal records. Raises GateError and LowprecError.
    """
    checked = _check(experiment)
    with folder_lock(out), open_executor(cluster, workers=workers) as executor:
        return _run(experiment, checked, RunStore(out), executor=executor, progress=progress)


def _run(
    experiment: Experiment,
    checked: Mapping[str, Any],
    store: RunStore,
    *,
    executor: Executor,
    progress: bool,
) -> dict[str, Any]:
    promise = experiment.promise(created=datetime.now(UTC).isoformat(timespec="seconds"))
    gate = store.write_gate({**promise, **checked})
    verdict: dict[str, Any] = {}
    for look in experiment.looks:
        _check_recipe_unchanged(experiment, gate)
        jobs = _missing(experiment, store, experiment.seeds[:look])
        if jobs:
            withdraw(store.folder)
        with Progress(enabled=progress, jobs=len(jobs), steps=experiment.steps) as shown:
            _execute_all(experiment, store, jobs, executor=executor, shown=shown)
        runs, _ = store.load_all()
        verdict = judge_records(gate, runs, speed=read_speed(store.folder))
        write_report(store.folder, gate, runs=runs, verdict=verdict)
        if verdict["final"]:
            break
    return verdict


def _check(experiment: Experiment) -> dict[str, Any]:
    """Load the workload and make both plans, so that a mistake costs seconds.

    Returns what gate.json promises besides the experiment: the workload's facts and the decisions
    of both recipes, so that an edited recipe file is another gate.
    """
    workload = _load(experiment)
    torch.manual_seed(0)
    model = workload.model()
    hashes = {}
    for arm, name in (("baseline", experiment.baseline), ("candidate", experiment.candidate)):
        recipe = lowprec.load_recipe(experiment.recipe_source(name))
        lowprec.plan(model, recipe, steps=experiment.steps)
        hashes[arm] = recipe.hash
        if arm == "candidate" and not recipe.quantizes:
            raise ExperimentError(
                f"candidate recipe {name!r} quantizes nothing: the gate would compare BF16 with "
                "itself; the null control does that already"
            )
    _draw_one_batch(workload, experiment)
    return {
        "facts": dict(workload.facts),
        "recipe_hashes": hashes,
        "evaluations": evaluation_names(workload),
    }


def _draw_one_batch(workload: Workload, experiment: Experiment) -> None:
    """Find a workload that cannot give a batch now, not in every run of the gate."""
    try:
        if not hasattr(workload, "train"):
            next(workload.training_batches(seed=0, steps=1, batch_size=experiment.batch_size))
        next(workload.evaluation_batches(batch_size=experiment.batch_size))
    except (GateError, OSError):
        raise
    except StopIteration as error:
        raise DataError(f"workload {experiment.workload} gives no batch") from error
    except Exception as error:
        raise DataError(
            f"workload {experiment.workload} cannot give a batch: {type(error).__name__}: {error}"
        ) from error


def _check_recipe_unchanged(experiment: Experiment, gate: dict[str, Any]) -> None:
    """A recipe file edited while the gate runs would make runs that the promise does not cover."""
    now = lowprec.load_recipe(experiment.recipe_source(experiment.candidate)).hash
    if now != gate["recipe_hashes"]["candidate"]:
        raise ExperimentError(
            f"candidate recipe {experiment.candidate!r} was edited while the gate ran; undo the "
            "edit, or give the new recipe a gate of its own with --out"
        )


def _load(experiment: Experiment) -> Workload:
    return load_workload(experiment.workload, experiment.options, folder=experiment.folder)


def _missing(experiment: Experiment, store: RunStore, seeds: Sequence[int]) -> list[Job]:
    """The trainings whose records are not on disk; records of other inputs are moved aside."""
    store.load_all()
    arms = ["baseline", "candidate"] + ["null"] * experiment.null_control
    jobs = []
    for seed in seeds:
        for arm in arms:
            extra = ("known_bad",) if arm == "baseline" and experiment.known_bad_margins else ()
            writes = (arm, *extra)
            absent = []
            for written in writes:
                key = content_hash(run_inputs(experiment, written, seed))
                _set_superseded_aside(store, written, seed, key)
                if not store.path(written, seed, key).exists():
                    absent.append(written)
            if absent:
                jobs.append(Job(arm, seed, tuple(absent)))
    return jobs


def _set_superseded_aside(store: RunStore, arm: str, seed: int, key: str) -> None:
    """Move records of this arm and seed that other inputs made (another program, other data)."""
    current = store.path(arm, seed, key)
    for path in store.runs.glob(f"{arm}-{seed:03d}-*.json"):
        if path != current:
            path.replace(path.with_suffix(".superseded"))


def _execute_all(
    experiment: Experiment,
    store: RunStore,
    jobs: Sequence[Job],
    *,
    executor: Executor,
    shown: Progress,
) -> None:
    """Run the jobs wherever the executor does; records are written here and nowhere else."""
    with closing(executor.results(experiment, jobs, shown=shown)) as results:
        for job, records in results:
            for record in records:
                if record["arm"] in job.writes:
                    store.save(record)
            shown.finished(job.arm, job.seed)
