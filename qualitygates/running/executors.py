"""Where the jobs of a look run: in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import ExperimentError, GateError
from ..experiment import Experiment
from ..progress import Progress
from ..runs import Record, execute
from ..workload import Workload, load_workload
from .handover import pack_experiment
from .places import Place
from .processes import die_with, prepare


@dataclass(frozen=True)
class Job:
    """One training: an arm and a seed, and the arms whose records it writes."""

    arm: str
    seed: int
    writes: tuple[str, ...]


class Executor(Protocol):
    """Runs jobs somewhere; the caller alone writes what they return."""

    def results(
        self, experiment: Experiment, jobs: Sequence[Job], *, shown: Progress
    ) -> Generator[tuple[Job, list[Record]], None, None]:
        """Each job with its records, as they finish; raises the first error of a job."""
        ...


def open_executor(cluster: str, *, workers: int) -> AbstractContextManager[Executor]:
    """The executor of a run: processes of this machine ("") or Ray ("local", "auto", an address).

    `workers` is how many runs share this machine; a cluster runs as many as it has room for.
    """
    if not cluster:
        return nullcontext(LocalPool(workers))
    from .ray_executor import RayTasks

    return RayTasks(cluster, workers=workers)


@dataclass(frozen=True)
class LocalPool:
    """Spawned processes of this machine, one run each at a time."""

    workers: int

    def results(
        self, experiment: Experiment, jobs: Sequence[Job], *, shown: Progress
    ) -> Generator[tuple[Job, list[Record]], None, None]:
        """Each job with its records, as they finish; GateError when a process was killed."""
        if not jobs:
            return
        context = multiprocessing.get_context("spawn")
        ticks, gpus = context.SimpleQueue(), context.SimpleQueue()
        slots = _slots(experiment, self.workers)
        for slot in slots:
            gpus.put(slot)
        with (
            shown.listening(ticks),
            _pool(min(len(slots), len(jobs)), context, (ticks, gpus)) as pool,
        ):
            futures: dict[Future[list[Record]], Job] = {
                pool.submit(_work_and_tick, experiment, job.arm, job.seed): job for job in jobs
            }
            for future in as_completed(futures):
                job = futures[future]
                try:
                    yield job, future.result()
                except BrokenProcessPool as error:
                    raise GateError(
                        f"the process that trained {job.arm}, seed {job.seed} was killed (out of "
                        "memory?); finished runs are kept, the same command resumes"
                    ) from error


def _slots(experiment: Experiment, workers: int) -> list[str]:
    """One entry a run at a time: the GPUs it may see, "" on a CPU."""
    each = experiment.processes
    if experiment.device == "cpu":
        return [""] * max(1, workers // each)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    names = visible.split(",")[:count] if visible else [str(i) for i in range(count)]
    slots = [",".join(names[i : i + each]) for i in range(0, count - each + 1, each)]
    if not slots:
        raise ExperimentError(
            f"[train] device = 'cuda' with processes = {each} needs {each} GPUs, this machine has "
            f"{count}; give --cluster, or device = 'cpu'"
        )
    return slots[: max(1, workers // each)]


@contextmanager
def _pool(workers: int, context: Any, queues: tuple[Any, Any]) -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(*queues, os.getpid())
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
# The data of one gate stay with a worker, known by the experiment and the sources.
_loaded: tuple[str, Workload] | None = None


def _start_worker(ticks: Any, gpus: Any, parent: int) -> None:
    global _ticks
    _ticks = ticks
    if gpu := gpus.get():
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    die_with(parent)


def _work_and_tick(experiment: Experiment, arm: str, seed: int) -> list[Record]:
    return work(experiment, arm, seed, tick=lambda: _ticks.put((arm, seed)))


def work(experiment: Experiment, arm: str, seed: int, *, tick: Callable[[], None]) -> list[Record]:
    """Train one run in this process, or in the processes that share it, and return its records."""
    global _loaded
    if experiment.processes > 1:
        from .torchrun import launch

        return launch(experiment, arm, seed)
    prepare(experiment.device)
    identity = pack_experiment(experiment)
    if _loaded is None or _loaded[0] != identity:
        # Loaded once a worker; a workload that kept state between runs would fail to pair.
        folder = experiment.folder
        _loaded = (identity, load_workload(experiment.workload, experiment.options, folder=folder))
    place = Place(device=experiment.device)
    return execute(experiment, arm, seed, workload=_loaded[1], tick=tick, place=place)
