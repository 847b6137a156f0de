"""Where measurements run: processes of this machine or Ray, a thread each: bits never change."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Protocol, TypeVar

from ..errors import GateError
from ..running.processes import die_with, prepare

Job = TypeVar("Job")
Result = TypeVar("Result")


class Pool(Protocol):
    """Runs a module-level function on picklable jobs somewhere; only the caller writes records."""

    def run(
        self, work: Callable[[Job], Result], jobs: Sequence[Job]
    ) -> Iterator[tuple[Job, Result]]:
        """Each job with its result, as they finish; raises the first error of a job."""
        ...


class LocalPool:
    """Spawned processes of this machine, kept until the pool is closed."""

    def __init__(self, workers: int, *, device: str = "cpu") -> None:
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(
            workers, mp_context=context, initializer=_start, initargs=(os.getpid(), device)
        )

    def run(
        self, work: Callable[[Job], Result], jobs: Sequence[Job]
    ) -> Iterator[tuple[Job, Result]]:
        """Each job with its result, as they finish; GateError when a process was killed."""
        futures: dict[Future[Result], Job] = {self._executor.submit(work, job): job for job in jobs}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool as error:
                raise GateError(
                    "a process of the sweep was killed (out of memory?); finished measurements "
                    "are kept, the same command resumes"
                ) from error

    def close(self, *, at_once: bool) -> None:
        """End the processes; `at_once` does not wait for running jobs."""
        if at_once:
            for process in list(self._executor._processes.values()):
                process.terminate()
        self._executor.shutdown(wait=not at_once, cancel_futures=True)


class SamePlace:
    """Runs every job in this process, in order."""

    def run(
        self, work: Callable[[Job], Result], jobs: Sequence[Job]
    ) -> Iterator[tuple[Job, Result]]:
        """Each job with its result."""
        for job in jobs:
            yield job, work(job)


@contextmanager
def open_pool(workers: int, *, device: str = "cpu", cluster: str = "") -> Iterator[Pool]:
    """Processes of this machine, or the tasks of a Ray `cluster`: "local", "auto" or an address.

    None of them is left behind when the block ends.
    """
    if cluster:
        from ..running.ray_executor import RayTasks
        from .ray_pool import RayPool

        with RayTasks(cluster, workers=workers) as tasks:
            yield RayPool(tasks, note=_say)
        return
    pool = LocalPool(workers, device=device)
    try:
        yield pool
    except BaseException:
        pool.close(at_once=True)
        raise
    pool.close(at_once=False)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _start(parent: int, device: str) -> None:
    die_with(parent)
    prepare(device)
