"""A job and its outcome as JSON text, so that they can go to another process or machine."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from .. import errors
from ..errors import GateError
from ..experiment import Experiment
from ..records import canonical_json, write_text_atomic

Record = dict[str, Any]


class LostProcess(GateError):
    """A process of a run was killed from outside; the run itself may be sound."""


def pack_experiment(experiment: Experiment) -> str:
    """The experiment with the workload file and the recipes of the user's own beside it."""
    return canonical_json(
        {
            "content": experiment.to_dict(),
            "folder": str(experiment.folder.resolve()),
            "sources": _sources(experiment),
        }
    )


@cache
def unpack_experiment(text: str) -> Experiment:
    """The experiment where this process finds its files: in the same folder, or written out anew.

    The folder of the sender is used when the sources there are the same bytes, as they are on a
    shared file system. Otherwise they are written to a private temporary folder, once a process;
    relative paths of data then start there and find nothing.
    """
    packed = json.loads(text)
    folder, sources = Path(packed["folder"]), packed["sources"]
    if not all(_reads(folder / name, source) for name, source in sources.items()):
        folder = Path(tempfile.mkdtemp(prefix="qualitygates-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name, source in sources.items():
            write_text_atomic(folder / name, source)
    return Experiment.from_dict(packed["content"], folder=folder)


def _sources(experiment: Experiment) -> dict[str, str]:
    """Relative path -> text of the files that travel.

    Paths that leave the folder, and text that is not UTF-8, need a shared file system.
    """
    names = (experiment.workload.rpartition(":")[0], experiment.baseline, experiment.candidate)
    sources = {}
    for name in names:
        path = PurePosixPath(name)
        if name and not path.is_absolute() and ".." not in path.parts:
            with suppress(OSError, UnicodeDecodeError):
                sources[name] = (experiment.folder / name).read_bytes().decode()
    return sources


def _reads(path: Path, source: str) -> bool:
    try:
        return path.read_bytes() == source.encode()
    except OSError:
        return False


def outcome_of(work: Callable[[], list[Record]], *, theirs: type[Exception]) -> str:
    """What a job came to, as JSON text: its records, or the error that its user must read.

    `theirs` is the further family of errors that are about the user's input (LowprecError).
    """
    try:
        return canonical_json({"records": work()})
    except (GateError, theirs, OSError, MemoryError) as error:
        return pack_error(error)


def pack_error(error: BaseException) -> str:
    """An error as JSON text."""
    return canonical_json({"error": type(error).__name__, "says": str(error)})


def is_lost(outcome: str) -> bool:
    """True when the run ended because one of its processes was killed from outside."""
    return bool(json.loads(outcome).get("error") == LostProcess.__name__)


def records_of(outcome: str, *, where: str) -> list[Record]:
    """The records of an outcome, or the error it holds, raised with `where` in front."""
    found: Mapping[str, Any] = json.loads(outcome)
    if "error" not in found:
        records: list[Record] = found["records"]
        return records
    if is_lost(outcome):
        raise LostProcess(f"{where}: {found['says']}")
    kind = getattr(errors, found["error"], None)
    if isinstance(kind, type) and issubclass(kind, GateError):
        raise kind(f"{where}: {found['says']}")
    raise GateError(f"{where}: {found['error']}: {found['says']}")
