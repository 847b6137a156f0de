"""The jobs of a look as Ray tasks: on a Ray of our own on this machine, or on a running cluster."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from types import TracebackType
from typing import Any, Final, Self

import torch

import lowprec

from ..errors import ExperimentError, GateError
from ..experiment import Experiment
from ..progress import Progress
from ..records import canonical_json, content_hash
from ..runs import Record, code_hash, run_inputs
from .executors import Job, work
from .handover import (
    LostProcess,
    is_lost,
    outcome_of,
    pack_experiment,
    records_of,
    unpack_experiment,
)
from .ray_guard import guarded

LOCAL: Final = "local"
RETRIES: Final = 3
# Records are some 100 kB; nothing else is kept in Ray's store.
_STORE_BYTES: Final = 100 * 2**20
# Ray reads it when it starts: no report of what is used goes out.
_QUIET: Final = {"RAY_USAGE_STATS_ENABLED": "0"}


class RayTasks:
    """Runs jobs as Ray tasks; Ray starts, or is connected to, when there is a first job.

    A lost worker (killed, out of memory, its node gone) gets its job again, RETRIES times a job.
    """

    def __init__(self, cluster: str, *, workers: int) -> None:
        self.ray = _import_ray()
        self.cluster, self.workers = cluster, workers
        self.started = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.started.close()

    def results(
        self, experiment: Experiment, jobs: Sequence[Job], *, shown: Progress
    ) -> Generator[tuple[Job, list[Record]], None, None]:
        """Each job with its records, as they finish.

        Raises the errors about the user's input with the job in front, and GateError for a cluster
        that cannot be reached, differs in its programs, or loses the same job again and again.
        """
        if not jobs:
            return
        packed, program = pack_experiment(experiment), program_here()

        def asked(job: Job) -> str:
            key = content_hash(run_inputs(experiment, job.arm, job.seed))
            return canonical_json(
                {"arm": job.arm, "seed": job.seed, "key": key, "program": program}
            )

        texts = {f"{job.arm}, seed {job.seed}": (packed, asked(job)) for job in jobs}
        named = dict(zip(texts, jobs, strict=True))
        with closing(self.outcomes(experiment, remote_work, texts, note=shown.note)) as outcomes:
            for where, outcome in outcomes:
                yield named[where], records_of(outcome, where=where)

    def outcomes(
        self,
        experiment: Experiment,
        function: Callable[[str, str], str],
        texts: Mapping[str, tuple[str, str]],
        *,
        note: Callable[[str], None],
    ) -> Generator[tuple[str, str], None, None]:
        """The outcome of `function` on each pair of texts, by the name of the pair, as they finish.

        The first texts of many pairs are the same: each is put into Ray's store once. A task has
        the CPUs and GPUs of a run of the experiment. Raises as `results` does.
        """
        options = self._options(experiment, function, note)
        put = {first: self.ray.put(first) for first, _ in texts.values()}

        def submit(where: str) -> Any:
            first, second = texts[where]
            return options.remote(put[first], second)

        pending = {submit(where): (where, 0) for where in texts}
        try:
            while pending:
                (done,), _ = self.ray.wait(list(pending), num_returns=1)
                where, lost = pending.pop(done)
                outcome = self._outcome(done, where, lost)
                if outcome is None:
                    note(f"{where}: its worker was lost; once more")
                    pending[submit(where)] = (where, lost + 1)
                else:
                    yield where, outcome
        finally:
            for one in pending:
                with suppress(Exception):
                    self.ray.cancel(one, force=True)

    def _options(
        self,
        experiment: Experiment,
        function: Callable[[str, str], str],
        note: Callable[[str], None],
    ) -> Any:
        """The function as a task with the room of a run; Ray starts with the first."""
        self.started.enter_context(_ray(self.ray, self.cluster, self.workers, experiment))
        # Retried here, not by Ray, so that the bound holds for every way of losing a worker.
        task = self.ray.remote(max_retries=0)(function)
        each = experiment.processes
        gpus = each if experiment.device == "cuda" else 0
        room = self.ray.cluster_resources()
        if room.get("CPU", 0) < each or room.get("GPU", 0) < gpus:
            text = (
                f"a run needs {each} CPUs and {gpus} GPUs of one machine, Ray "
                f"{self.cluster!r} has {room.get('CPU', 0):g} and {room.get('GPU', 0):g} in all"
            )
            if self.cluster == LOCAL:
                raise ExperimentError(f"{text}; lower [train] processes or raise --workers")
            # A cluster may still grow.
            note(f"waiting: {text}")
        return task.options(num_cpus=each, num_gpus=gpus)

    def _outcome(self, done: Any, where: str, lost: int) -> str | None:
        """What a finished task came to, None when its worker was lost and may be replaced."""
        errors = self.ray.exceptions
        try:
            outcome: str = self.ray.get(done)
        except (
            *(errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError),
            *(errors.ObjectLostError, errors.LocalRayletDiedError),
        ) as error:
            if lost < RETRIES:
                return None
            raise LostProcess(
                f"{where}: {RETRIES + 1} workers in turn were lost (out of memory?), the last one "
                f"with {type(error).__name__}; finished runs are kept, the same command resumes"
            ) from error
        except errors.RayError as error:
            raise GateError(
                f"{where}: Ray {self.cluster!r}: {type(error).__name__}: {error}; every node needs "
                "Python and lowprec of the versions here"
            ) from error
        return None if lost < RETRIES and is_lost(outcome) else outcome


def remote_work(packed: str, asked: str) -> str:
    """The body of a task: train one run and return the outcome as JSON text."""

    def records() -> list[Record]:
        job: Mapping[str, Any] = json.loads(asked)
        node = platform.node()
        check_program(job["program"])
        experiment = unpack_experiment(packed)
        arm, seed = job["arm"], job["seed"]
        if content_hash(run_inputs(experiment, arm, seed)) != job["key"]:
            raise GateError(
                f"node {node!r} sees other files than the machine that started the gate: the "
                f"workload or the recipe differs under {experiment.folder}; share the folder, or "
                "name both by relative paths without '..', so that they travel"
            )
        return work(experiment, arm, seed, tick=lambda: None)

    return outcome_of(records, theirs=lowprec.LowprecError)


def check_program(theirs: Mapping[str, str]) -> None:
    """GateError when this node has other programs than the machine that started the task."""
    differences = [
        f"{name} {here} instead of {theirs.get(name)}"
        for name, here in program_here().items()
        if here != theirs.get(name)
    ]
    if differences:
        raise GateError(
            f"node {platform.node()!r} has other programs than the machine that started the gate: "
            f"{', '.join(differences)}; install the same versions on every node"
        )


def program_here() -> dict[str, str]:
    """The versions that every node must share."""
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__,
        "lowprec": code_hash()[:12],
    }


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise GateError("Ray is not installed: pip install 'lowprec[cluster]'") from error
    return ray


@contextmanager
def _ray(
    ray: Any, cluster: str, workers: int, experiment: Experiment
) -> Generator[None, None, None]:
    """Ray until the block ends; one that this process had already started stays."""
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    with ExitStack() as stack:
        if cluster == LOCAL:
            quiet |= {"_temp_dir": stack.enter_context(guarded())}
            cpus = max(workers, experiment.processes)
            # Without an address Ray would join a cluster that it finds on this machine.
            quiet |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
            quiet |= {"object_store_memory": _STORE_BYTES}
        else:
            quiet |= {"address": cluster}
        try:
            with _environment(_QUIET):
                ray.init(**quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise ExperimentError(
                f"--cluster {cluster}: Ray cannot be reached: {error}; allowed: local, auto, "
                "HOST:PORT, ray://HOST:10001 (a cluster with tokens wants RAY_AUTH_MODE=token)"
            ) from error
        stack.callback(ray.shutdown)
        yield


@contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None, None, None]:
    """Environment variables for the processes that start inside the block; the user's own win."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
