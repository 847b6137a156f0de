"""A run that several processes of one machine share, started by torch.distributed.run.

Run as a program: `start` is the agent, `rank` one process of the run. A chain of parents holds
them together: each ends when the one above it does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
from torch import distributed

import lowprec

from ..experiment import Experiment
from ..records import canonical_json
from ..runs import Record, execute
from ..workload import load_workload
from .handover import LostProcess, outcome_of, pack_experiment, records_of, unpack_experiment
from .places import Place
from .processes import die_with, prepare

# A rank that waits longer for another one takes it for lost.
_PATIENCE: Final = timedelta(minutes=30)
_LAST_LINES: Final = 12
_KILLED: Final = "killed"


def launch(experiment: Experiment, arm: str, seed: int) -> list[Record]:
    """Train one run in `experiment.processes` processes and return its records.

    Each process holds the same share of every batch, so the whole batch is that of one process; a
    crash of the model in any of them is a record that says so. Raises the errors about the user's
    input, and LostProcess when one of the processes was killed.
    """
    with tempfile.TemporaryDirectory(prefix="qualitygates-") as name:
        folder = Path(name)
        job = {"experiment": pack_experiment(experiment), "arm": arm, "seed": seed}
        (folder / "job.json").write_text(canonical_json(job), encoding="utf-8")
        module = ["-m", "qualitygates.running.torchrun"]
        command = [sys.executable, *module, "start", str(os.getpid()), name]
        with (folder / "log").open("wb") as log:
            ended = subprocess.run(
                [*command, str(experiment.processes)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=False,
            )
        outcome = folder / "outcome.json"
        if (folder / _KILLED).exists() or not outcome.exists():
            raise LostProcess(
                f"{arm}, seed {seed}: its {experiment.processes} processes ended with code "
                f"{ended.returncode} and no outcome (killed, out of memory?): finished runs are "
                f"kept, the same command resumes; the last lines: {_tail(folder / 'log')}"
            )
        return records_of(
            outcome.read_text(encoding="utf-8"), where=f"{experiment.processes} processes"
        )


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])


def _start(parent: int, folder: str, processes: int) -> None:
    """The agent: torchrun with this module as the program of every rank."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    die_with(parent)
    options = ("--standalone", f"--nproc-per-node={processes}", "--max-restarts=0")
    try:
        main([*options, "-m", "qualitygates.running.torchrun", "rank", folder])
    except ChildFailedError as error:
        # Another rank may have met the lost connection first, and taken it for its own crash.
        if any(failure.exitcode < 0 for failure in error.failures.values()):
            (Path(folder) / _KILLED).touch()
        raise


def _rank(folder: Path) -> int:
    """One process: train, and as rank 0, or as the first that fails, leave the outcome."""
    die_with(os.getppid())
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    experiment = unpack_experiment(job["experiment"])
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    prepare(experiment.device)
    if experiment.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if experiment.device == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=_PATIENCE)
    place = Place(rank, processes, experiment.device)

    def work() -> list[Record]:
        workload = load_workload(experiment.workload, experiment.options, folder=experiment.folder)
        return execute(
            experiment, job["arm"], job["seed"], workload=workload, tick=_no_tick, place=place
        )

    outcome = outcome_of(work, theirs=lowprec.LowprecError)
    failed = _failed(outcome)
    if rank == 0 or failed:
        _leave(folder, outcome, rank)
    if failed:
        # The others may wait for this one in a collective: ending tells the agent to stop them.
        os._exit(1)
    distributed.destroy_process_group()
    return 0


def _no_tick() -> None:
    pass


def _failed(outcome: str) -> bool:
    found = json.loads(outcome)
    return "error" in found or any(r["training"]["crashed"] for r in found["records"])


def _leave(folder: Path, outcome: str, rank: int) -> None:
    """Write the outcome unless another rank has: the first to fail knows the cause."""
    own = folder / f"outcome-{rank}.json"
    own.write_text(outcome, encoding="utf-8")
    try:
        os.link(own, folder / "outcome.json")
    except FileExistsError:
        own.unlink()


if __name__ == "__main__":
    if sys.argv[1] == "start":
        _start(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        sys.exit(_rank(Path(sys.argv[2])))
