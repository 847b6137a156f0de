"""run: train what a look still lacks, judge, go on until the verdict is final."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import lowprec

from .errors import DataError, ExperimentError, GateError
from .experiment import Experiment
from .judging import judge_records
from .progress import Progress
from .records import RunStore, content_hash
from .report import write_report
from .runs import execute, run_inputs
from .workload import Workload, load_workload


@dataclass(frozen=True)
class Job:
    """One training: an arm and a seed, and the arms whose records it writes."""

    arm: str
    seed: int
    writes: tuple[str, ...]


def run(experiment: Experiment, *, out: Path, workers: int, progress: bool) -> dict[str, Any]:
    """Run a gate in the folder `out` and return the verdict; finished runs are never repeated.

    Everything that can be wrong with the input is found before anything is written: the workload
    loads, both recipes fit the model. gate.json is written before the first run. Killed at any
    point, the same call resumes and gives bit-equal records. Raises GateError and LowprecError.
    """
    checked = _check(experiment)
    store = RunStore(out)
    promise = experiment.promise(created=datetime.now(UTC).isoformat(timespec="seconds"))
    gate = store.write_gate({**promise, **checked})
    verdict: dict[str, Any] = {}
    for look in experiment.looks:
        _check_recipe_unchanged(experiment, gate)
        jobs = _missing(experiment, store, experiment.seeds[:look])
        with Progress(enabled=progress, jobs=len(jobs), steps=experiment.steps) as shown:
            _execute_all(experiment, store, jobs, workers=workers, shown=shown)
        runs, _ = store.load_all()
        verdict = judge_records(gate, runs)
        write_report(out, gate, runs=runs, verdict=verdict)
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
    return {"facts": dict(workload.facts), "recipe_hashes": hashes}


def _draw_one_batch(workload: Workload, experiment: Experiment) -> None:
    """Find a workload that cannot give a batch now, not in every run of the gate."""
    try:
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
    workers: int,
    shown: Progress,
) -> None:
    if not jobs:
        return
    context = multiprocessing.get_context("spawn")
    ticks = context.SimpleQueue()
    with (
        shown.listening(ticks),
        _pool(min(workers, len(jobs)), context, ticks) as pool,
    ):
        futures: dict[Future[list[dict[str, Any]]], Job] = {
            pool.submit(_work, experiment, job.arm, job.seed): job for job in jobs
        }
        for future in as_completed(futures):
            job = futures[future]
            try:
                records = future.result()
            except BrokenProcessPool as error:
                raise GateError(
                    f"the process that trained {job.arm}, seed {job.seed} was killed (out of "
                    "memory?); finished runs are kept, the same command resumes"
                ) from error
            for record in records:
                if record["arm"] in job.writes:
                    store.save(record)
            shown.finished(job.arm, job.seed)


@contextmanager
def _pool(workers: int, context: Any, ticks: Any) -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(ticks, os.getpid())
    )
    try:
        yield pool
    except BaseException:
        for process in list(pool._processes.values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


_ticks: Any = None
_workload: Workload | None = None


def _start_worker(ticks: Any, parent: int) -> None:
    """One thread a run: the sums, and so the bits, do not depend on the number of cores."""
    global _ticks
    _ticks = ticks
    torch.set_num_threads(1)
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: int) -> None:
    """A killed gate leaves nobody to take the record, and an idle worker would wait for ever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _work(experiment: Experiment, arm: str, seed: int) -> list[dict[str, Any]]:
    global _workload
    if _workload is None:
        # Loaded once a worker; a workload that kept state between runs would fail to pair.
        _workload = _load(experiment)
    return execute(experiment, arm, seed, workload=_workload, tick=lambda: _ticks.put((arm, seed)))
