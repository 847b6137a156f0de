"""acceptance.json: what an ACCEPT covers and for how long; `lowprec.apply(require=...)` reads it.

A pure function of gate.json and the run records: judging again gives the same bytes, so it never
prolongs an acceptance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from .errors import ExperimentError, RecordError
from .records import content_hash, seal, write_json_atomic

FILE: Final = "acceptance.json"
HASHES: Final = ("recipe_hash", "plan_hash", "model_hash")
# expires_days counts from the promise; 0 is never. versions: which versions must stay equal.
DEFAULTS: Final = {"expires_days": 90, "versions": "minor", "hardware": "same"}
KEYS: Final = (*DEFAULTS, *HASHES)
_ALLOWED: Final = {"versions": ("exact", "minor", "any"), "hardware": ("same", "any")}
_VERSIONS: Final = ("lowprec", "torch", "python")
_MOST_DAYS: Final = 3650
_VOLATILE: Final = ("created", "checksum")
Record = Mapping[str, Any]


def read_rules(table: Record) -> dict[str, Any]:
    """The [acceptance] table of an experiment with its defaults; raises ExperimentError."""
    rules = {**DEFAULTS, **table}
    days = rules["expires_days"]
    if type(days) is not int or not 0 <= days <= _MOST_DAYS:
        raise ExperimentError(
            f"[acceptance] expires_days = {days!r}; allowed: a whole number of days up to "
            f"{_MOST_DAYS}, or 0 for an acceptance that never expires by age"
        )
    for key, allowed in _ALLOWED.items():
        if rules[key] not in allowed:
            raise ExperimentError(
                f"[acceptance] {key} = {rules[key]!r}; allowed: {', '.join(allowed)}"
            )
    for key in HASHES:
        given = rules.get(key)
        if given is not None and not _is_hash(given):
            raise ExperimentError(
                f"[acceptance] {key} = {given!r}; it is 64 hexadecimal digits, as "
                f"lowprec's plan.recipe_hash, plan.hash and fingerprint(model).hash give them"
            )
    return rules


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")


def settle(
    folder: str | Path, gate: Record, runs: Sequence[Record], *, verdict: Record
) -> Path | None:
    """Write acceptance.json when the verdict is ACCEPT, else remove it; the path, or None.

    Call it before the verdict is written, so that no verdict ever stands beside an acceptance that
    it contradicts. A gate with a planted fault tests the gate: it accepts nothing. Raises
    RecordError when the folder cannot be written, or the runs are of several models.
    """
    path = Path(folder) / FILE
    planted = (gate["experiment"].get("candidate") or {}).get("fault")
    if verdict["verdict"] != "ACCEPT" or planted:
        withdraw(folder)
        return None
    try:
        record = acceptance(gate, runs, verdict=verdict)
    except RecordError:
        withdraw(folder)
        raise
    write_json_atomic(path, record, indent=1)
    return path


def withdraw(folder: str | Path) -> None:
    """Remove acceptance.json if it is there; raises RecordError when it cannot be removed."""
    path = Path(folder) / FILE
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    except OSError as error:
        raise RecordError(
            f"{path} no longer holds and cannot be removed: {error.strerror or error}; remove it"
        ) from error


def acceptance(gate: Record, runs: Sequence[Record], *, verdict: Record) -> dict[str, Any]:
    """The sealed record of an ACCEPT. A hash that nothing tells stays None: unknown."""
    candidates = [run for run in runs if run["arm"] == "candidate"]
    rules = {**DEFAULTS, **(gate.get("acceptance") or {})}
    created = _time(gate)
    days = rules["expires_days"]
    plan, model = _one(candidates, "plan"), _one(candidates, "model")
    known = {
        "recipe_hash": _one(candidates, "recipe_hash"),
        "plan_hash": _one(candidates, "plan_hash"),
        "model_hash": None if model is None else model["hash"],
    }
    return seal(
        {
            "schema": 1,
            "kind": "acceptance",
            "experiment": gate["experiment"].get("name", ""),
            "gate_hash": content_hash({k: v for k, v in gate.items() if k not in _VOLATILE}),
            "verdict_hash": content_hash(verdict),
            **{key: _agreed(key, known[key], rules.get(key)) for key in HASHES},
            "plan": plan,
            "model": model,
            "margins": gate["margins"],
            "seeds": list(verdict["seeds"]),
            "speed": verdict["speed"]["status"],
            "versions": _versions(candidates),
            "hardware": rules["hardware"],
            "expiry": {
                "days": days,
                "versions": rules["versions"],
                "at": (created + timedelta(days=days)).isoformat() if days else None,
            },
            "created": created.isoformat(),
        }
    )


def _time(gate: Record) -> datetime:
    try:
        created = datetime.fromisoformat(gate["created"])
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"gate.json does not say when it was created: {error!r}") from error
    return created if created.tzinfo else created.replace(tzinfo=UTC)


def _one(runs: Sequence[Record], key: str) -> Any:
    """What all runs say under `key`; None when none says it; RecordError when they differ."""
    found = [run.get(key) for run in runs]
    for run, value in zip(runs, found, strict=True):
        if value != found[0]:
            raise RecordError(
                f"candidate, seed {run['seed']}: its {key} is not that of seed {runs[0]['seed']}; "
                "an acceptance covers one recipe, one plan and one model"
            )
    # Runs that nobody watched hold a word instead of a hash.
    unknown = not found or (key.endswith("_hash") and not _is_hash(found[0]))
    return None if unknown else found[0]


def _agreed(key: str, known: str | None, given: str | None) -> str | None:
    if None not in (known, given) and known != given:
        raise RecordError(
            f"[acceptance] {key} = {given!r}, but the runs are of {known!r}; leave the key out: "
            "it is for predictions that do not say what made them"
        )
    return known if given is None else given


def _versions(runs: Sequence[Record]) -> dict[str, str | None]:
    """The versions in which every candidate run agrees, None for the others."""
    found = {name: {run["environment"].get(name) for run in runs} for name in _VERSIONS}
    return {name: one.pop() if len(one) == 1 else None for name, one in found.items()}
