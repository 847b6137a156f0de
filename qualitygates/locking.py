"""folder_lock: one writer at a time in a gate folder."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from .errors import ExperimentError, GateError

NAME: Final = ".lock"
# The folders that this process holds, each by the thread that took it.
_held: dict[Path, int] = {}
_held_guard = threading.Lock()


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Hold a gate folder for writing until the block ends; the folder is made when absent.

    A lock of the operating system (flock, so Linux and macOS) on the file .lock in the folder: it
    goes with its process, however that ends, so nothing stale is ever left to remove. The same
    thread may take it again inside the block. Machines that share the folder by NFS exclude each
    other where NFS carries locks (v4, or v3 with lockd). Raises ExperimentError when another
    process or thread holds the folder, with its pid and host, or when it cannot be locked.
    """
    folder = Path(folder)
    key = folder.resolve()
    with _held_guard:
        nested = _held.get(key) == threading.get_ident()
    if nested:
        yield
        return
    handle = _locked(folder)
    with _held_guard:
        _held[key] = threading.get_ident()
    try:
        yield
    finally:
        with _held_guard:
            del _held[key]
        os.close(handle)


def _locked(folder: Path) -> int:
    try:
        import fcntl
    except ImportError as error:
        raise GateError(
            "writing a gate folder needs the locks of Linux or macOS (flock): run it there, or "
            "under WSL"
        ) from error
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ExperimentError(
            f"{path} cannot be made: {error.strerror or error}; make the folder writable, or give "
            "another one with --out"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(path)
        os.close(handle)
        if not isinstance(error, BlockingIOError):
            raise ExperimentError(
                f"{path} cannot be locked: {error.strerror or error}; use a folder on a file "
                "system with locks"
            ) from error
        raise ExperimentError(
            f"{folder} is in use by {holder}; wait for it to end, or give this one its own folder "
            "with --out"
        ) from error
    os.ftruncate(handle, 0)
    os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
    return handle


def _holder(path: Path) -> str:
    try:
        found = json.loads(path.read_bytes()[:1000])
        return f"process {int(found['pid'])} on {str(found['host'])!r}"
    except (OSError, ValueError, TypeError, KeyError):
        # Between taking the lock and writing the name there is a moment without one.
        return "another process"
