"""Records on disk: written whole or not at all, checked when read, never silently replaced."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .errors import ExperimentError, RecordError

SCHEMA: Final = 1
ARMS: Final = ("baseline", "candidate", "null", "known_bad")
Record = dict[str, Any]

_REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    "run": ("arm", "seed", "key", "inputs", "pairing", "training", "evaluations"),
    "acceptance": ("gate_hash", "verdict_hash", "margins", "versions", "expiry", "created"),
    "speed": ("machine", "inputs", "products", "quantized_layers", "measurements"),
    "gate": ("experiment", "experiment_hash", "margins", "looks", "alpha", "seeds", "speed"),
}
# What two writings of the same promise may differ in.
_VOLATILE: Final = ("created", "checksum")
_LEFTOVER: Final = re.compile(r"\..+\.(\d+)\.tmp")


@dataclass(frozen=True)
class Damage:
    """A run record that cannot be trusted: where it is now, and why."""

    path: Path
    reason: str


def canonical_json(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, shortest round-trip floats, ASCII.

    Raises RecordError for NaN, Inf and whatever else JSON cannot carry.
    """
    return _sorted_json(_plain(value))


def _plain(value: Any) -> Any:
    # Before sorting, because keys that are numbers sort otherwise once they have become text.
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"not plain JSON data: {error}") from error


def _sorted_json(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_hash(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of a value."""
    return _sha256(canonical_json(value))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def seal(record: Mapping[str, Any]) -> Record:
    """The record as plain JSON data with "checksum", the hash of everything else in it."""
    plain: Record = _plain({k: v for k, v in record.items() if k != "checksum"})
    return {**plain, "checksum": _sha256(_sorted_json(plain))}


def write_json_atomic(path: Path, value: Any, *, indent: int | None = None) -> None:
    """Write a value as JSON so that the file is either complete or absent; raises RecordError."""
    text = canonical_json(value)
    if indent is not None:
        text = json.dumps(value, indent=indent, allow_nan=False)
    write_text_atomic(path, text + "\n")


def write_text_atomic(path: Path, text: str) -> None:
    """Write UTF-8 text to a temporary file beside `path`, sync it, rename it, or RecordError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        _remove(temporary)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = "free some space" if full else "make the folder writable"
        raise RecordError(
            f"{path} was not written: {error.strerror or error}; every record finished before it "
            f"is kept: {cure} and give the same command again, it resumes"
        ) from error
    except BaseException:
        _remove(temporary)
        raise


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # A rename is on the disk only when its folder is.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_record(path: Path, *, kind: str = "run") -> Record:
    """Read a record; verify schema, kind, fields, checksum and a run's key; raises RecordError."""
    try:
        record = json.loads(path.read_bytes().decode(), parse_constant=_no_constant)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not a whole JSON file: {error}") from error
    try:
        fault = _fault(record, kind)
    except (ValueError, RecursionError) as error:  # 1e999 reads as infinity
        raise RecordError(f"{path}: not plain JSON data: {error}") from error
    if fault:
        raise RecordError(f"{path}: {fault}")
    return dict(record)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _fault(record: Any, kind: str) -> str | None:
    if not isinstance(record, dict):
        return f"holds a {type(record).__name__}, not a {kind} record"
    if record.get("schema") != SCHEMA or record.get("kind") != kind:
        found = f"schema {record.get('schema')!r}, kind {record.get('kind')!r}"
        return f"{found}; this version reads schema {SCHEMA}, kind {kind!r}"
    missing = [name for name in (*_REQUIRED[kind], "checksum") if name not in record]
    if missing:
        return f"without {', '.join(missing)}"
    content = {name: value for name, value in record.items() if name != "checksum"}
    # Read from JSON, so already plain: the checks take half the time.
    if _sha256(_sorted_json(content)) != record["checksum"]:
        return (
            "its checksum does not fit its content: it was damaged or edited after it was written"
        )
    if kind == "run" and record["key"] != content_hash(record["inputs"]):
        return "its key is not the hash of its inputs"
    if kind == "run" and (record["arm"] not in ARMS or type(record["seed"]) is not int):
        return f"arm {record['arm']!r}, seed {record['seed']!r}; arms are {', '.join(ARMS)}"
    return None


class RunStore:
    """The folder of one gate: gate.json (the promise) and one file a run under runs/."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.gate_path = self.folder / "gate.json"
        self.runs = self.folder / "runs"

    def path(self, arm: str, seed: int, key: str) -> Path:
        """Where the run of this arm and seed with these inputs is kept."""
        return self.runs / f"{arm}-{seed:03d}-{key[:16]}.json"

    def save(self, record: Mapping[str, Any]) -> Path:
        """Seal a run record, write it, and return its path; raises RecordError."""
        sealed = seal({"schema": SCHEMA, "kind": "run", **record})
        fault = _fault(sealed, "run")
        if fault:
            raise RecordError(f"run record not written: {fault}")
        path = self.path(sealed["arm"], sealed["seed"], sealed["key"])
        # Sealed, so already plain: a record of many clusters is written in half the time.
        write_text_atomic(path, _sorted_json(sealed) + "\n")
        return path

    def load_all(self, *, quarantine: bool = True) -> tuple[list[Record], list[Damage]]:
        """Every good record by arm and seed, and every damaged one.

        With `quarantine`, damaged files become *.damaged, so that they are run again and never
        read, and what killed writers left behind is removed; without it nothing on disk changes.
        """
        good, damaged = [], []
        if quarantine:
            self._clean()
        for path in sorted(self.runs.glob("[!.]*.json")):
            try:
                good.append(read_record(path))
            except RecordError as error:
                damaged.append(Damage(_set_aside(path) if quarantine else path, str(error)))
        good.sort(key=lambda record: (ARMS.index(record["arm"]), record["seed"], record["key"]))
        return good, damaged

    def _clean(self) -> None:
        for folder in (self.folder, self.runs):
            for path in folder.glob(".*.tmp"):
                match = _LEFTOVER.fullmatch(path.name)
                if match and not _alive(int(match[1])):
                    _remove(path)

    def write_gate(self, gate: Mapping[str, Any]) -> Record:
        """Write gate.json, or return the one that is there when it promises the same.

        Raises ExperimentError with the differing fields when the folder holds another promise.
        """
        sealed = seal({"schema": SCHEMA, "kind": "gate", **gate})
        if not self.gate_path.exists():
            write_json_atomic(self.gate_path, sealed, indent=2)
            return sealed
        kept = self.read_gate()
        changes = differences(kept, sealed)
        if changes:
            raise ExperimentError(
                f"{self.gate_path} promises another gate: {'; '.join(changes)}. A promise "
                "never changes once it is written: give this experiment its own folder with --out"
            )
        return kept

    def read_gate(self) -> Record:
        """The promise of this folder; raises RecordError when it is absent, damaged or edited."""
        if not self.gate_path.exists():
            raise RecordError(
                f"{self.gate_path} does not exist; `run` writes it before the first run"
            )
        return read_record(self.gate_path, kind="gate")


def _set_aside(path: Path) -> Path:
    target = path.with_name(path.name + ".damaged")
    try:
        os.replace(path, target)
    except OSError as error:
        raise RecordError(f"{path}: damaged, and cannot be set aside: {error.strerror}") from error
    return target


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def differences(kept: Any, asked: Any, *, field: str = "") -> list[str]:
    """The dotted fields in which two records differ, with both values; never times or checksums."""
    if isinstance(kept, dict) and isinstance(asked, dict):
        names = [name for name in {**kept, **asked} if field or name not in _VOLATILE]
        return [
            change
            for name in names
            for change in differences(
                kept.get(name), asked.get(name), field=f"{field}.{name}" if field else name
            )
        ]
    return [] if kept == asked else [f"{field} is {kept!r} there and {asked!r} here"]


def load_evidence(paths: Sequence[str | Path]) -> tuple[Record, list[Record]]:
    """The gate and the runs of a gate folder, or of run files with gate.json beside or above them.

    Changes nothing on disk. Raises RecordError for a damaged record (a seed must not vanish from a
    verdict), for files of several gates, and for two records of one arm and seed.
    """
    stores: dict[Path, RunStore] = {}
    records: dict[Path, Record] = {}
    for path in map(Path, paths):
        store = RunStore(_gate_folder(path))
        stores[store.folder.resolve()] = store
        if path.is_dir():
            good, damaged = store.load_all(quarantine=False)
            if damaged:
                raise RecordError(
                    f"{damaged[0].reason} ({len(damaged)} damaged in all); "
                    "give `run` again: it makes them anew"
                )
            records |= {
                store.path(one["arm"], one["seed"], one["key"]).resolve(): one for one in good
            }
        else:
            records[path.resolve()] = read_record(path)
    if len(stores) != 1:
        raise RecordError(f"runs of {len(stores)} gates; a verdict needs the runs of exactly one")
    (store,) = stores.values()
    return store.read_gate(), _distinct(records)


def load_speed(paths: Sequence[str | Path]) -> Record | None:
    """The speed record of the gate that `load_evidence` takes these paths for, or None."""
    return read_speed(_gate_folder(Path(paths[0])))


def read_speed(folder: str | Path) -> Record | None:
    """The timings in a gate folder, None when it has none; RecordError when they are damaged."""
    path = Path(folder) / "speed.json"
    return read_record(path, kind="speed") if path.exists() else None


def _gate_folder(path: Path) -> Path:
    if path.is_dir():
        return path
    for folder in (path.parent, path.parent.parent):
        if (folder / "gate.json").exists():
            return folder
    raise RecordError(
        f"{path}: no gate.json in its folder or the one above; without it no margin was promised"
    )


def _distinct(records: Mapping[Path, Record]) -> list[Record]:
    seen: dict[tuple[str, int], Path] = {}
    for path, record in records.items():
        identity = (record["arm"], record["seed"])
        if identity in seen:
            raise RecordError(
                f"{path} and {seen[identity]} are both arm {identity[0]}, seed {identity[1]}; "
                "move the one that does not belong to this gate out of the folder"
            )
        seen[identity] = path
    return sorted(records.values(), key=lambda one: (ARMS.index(one["arm"]), one["seed"]))
