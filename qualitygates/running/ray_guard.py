"""guarded: the processes of a Ray of our own end with the process that started it.

Ray ends its workers when their driver is killed, but some of its agents stay for another minute.
A guard process waits for the end of its input, which is the end of this process, and then ends
what still writes to the folder of this Ray (an environment would not do as a mark: processes that
set their title overwrite it). It needs /proc, so Linux; elsewhere Ray's own minute remains.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_DONE: Final = b"done"
_PAUSE_S: Final = 0.1
# A process that is just being started may hide for a moment, so one look without a find is no end.
_QUIET_SWEEPS: Final = 50
_SWEEPS: Final = 600


@contextmanager
def guarded() -> Iterator[str]:
    """A folder for Ray; all other processes with open files in it end with the block."""
    folder = tempfile.mkdtemp(prefix="qg-ray-")
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__)), folder, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    last_word = b""
    try:
        yield folder
        last_word = _DONE
    finally:
        guard.communicate(last_word)


def users_of(folder: str) -> list[int]:
    """The processes of this user with open files in the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for handle in (entry / "fd").iterdir():
                with suppress(OSError):
                    if os.readlink(handle).startswith(f"{folder}/"):
                        found.append(int(entry.name))
                        break
    return found


def _end(folder: str, *, driver: int, quiet_sweeps: int) -> None:
    """Kill the users of the folder until so many looks in a row find none, or for a minute."""
    quiet = 0
    for _ in range(_SWEEPS):
        left = [pid for pid in users_of(folder) if pid != driver]
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if left else quiet + 1
        if quiet == quiet_sweeps:
            return
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    # Without the last word the driver ended before Ray had: look for longer.
    done = sys.stdin.buffer.read() == _DONE
    _end(sys.argv[1], driver=int(sys.argv[2]), quiet_sweeps=1 if done else _QUIET_SWEEPS)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
