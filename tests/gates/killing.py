"""Kill a gate with SIGKILL at random moments, let it resume, and compare what it leaves."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
# What two runs of the same gate may differ in; verdict.json may not differ at all.
TIMES = ("timing", "checksum")
_MARK = "GATE_UNDER_TEST"


def contents(out: Path) -> dict[str, dict]:
    """The run records of a gate folder without their times."""
    kept = {}
    for file in sorted((out / "runs").glob("*.json")):
        record = json.loads(file.read_text())
        kept[file.name] = {name: value for name, value in record.items() if name not in TIMES}
    return kept


@dataclass
class Command:
    """`python -m qualitygates run` as a process whose descendants can be found."""

    gate: Path
    out: Path
    options: Sequence[str] = ()
    workers: int = 2

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "qualitygates", "run", str(self.gate)),
                *("--out", str(self.out), "--workers", str(self.workers), *self.options),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", _MARK: self.mark},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def ended(self, within: float) -> bool:
        """Wait, and say whether the process ended by itself."""
        try:
            self.errors = self.process.communicate(timeout=within)[1].decode()
        except subprocess.TimeoutExpired:
            return False
        return True

    def check(self) -> None:
        """A verdict was reached."""
        assert self.process.returncode in (0, 1, 2), self.errors

    def kill(self) -> None:
        """kill -9 of the process alone, and no descendant of it left within 30 seconds."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        deadline = time.monotonic() + 30
        while left := self.descendants():
            assert time.monotonic() < deadline, f"outlived the killed gate: {left}"
            time.sleep(0.1)

    def descendants(self) -> dict[int, str]:
        """The command lines of the living processes that carry the mark in their environment."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        return found


def time_of(gate: Path, out: Path, options: Sequence[str] = ()) -> float:
    """Seconds of an uninterrupted gate as a process of its own."""
    started = time.monotonic()
    command = Command(gate, out, options)
    assert command.ended(within=600)
    command.check()
    return time.monotonic() - started


def killed_after_records(gate: Path, out: Path, *, kills: int, options: Sequence[str] = ()) -> None:
    """Kill a gate `kills` times, each time a moment after one more record is on disk."""
    moments = random.Random(kills)
    for _ in range(kills):
        command, seen = Command(gate, out, options, workers=1), len(contents(out))
        while len(contents(out)) == seen:
            assert not command.ended(within=0.05), command.errors
        assert not command.ended(within=moments.random() * 0.3), command.errors
        command.kill()


def killed_and_resumed(
    gate: Path, folder: Path, *, kills: int, duration: float, options: Sequence[str] = ()
) -> list[Path]:
    """Kill a gate at `kills` random moments, resuming in between, and let it end.

    The moments are uniform over what an uninterrupted gate takes, starting and reporting included.
    A gate that ended before its moment came is kept, and the next one starts in a new folder.
    Returns the folders; each holds a finished gate.
    """
    moments = random.Random(kills)
    folders, landed = [folder / "killed-0"], 0
    while landed < kills:
        command = Command(gate, folders[-1], options)
        if command.ended(within=moments.random() * duration):
            command.check()
            folders.append(folder / f"killed-{len(folders)}")
        else:
            command.kill()
            landed += 1
    last = Command(gate, folders[-1], options)
    assert last.ended(within=600)
    last.check()
    return folders
