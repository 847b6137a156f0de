"""Training curves from TensorBoard or JSONL -> the "training" part of a run record.

A value that is not finite counts wherever it was written, also where a restarted training went
over the same steps again: a restart must not hide what made it necessary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import DataError
from .event_files import scalars

# Longer curves are kept as the means of equal blocks of recorded steps.
MAX_POINTS: Final = 20_000
_LONGEST_LINE: Final = 1 << 20
_TEXTS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_TEXTS_LONG: Final = {"infinity": math.inf, "-infinity": -math.inf}
_EVENTS: Final = {"loss": "loss", "grad_norm": "grad"}


@dataclass(frozen=True)
class Curve:
    """What one training recorded: loss at `steps`, and what else was named, at the same steps.

    `values` holds "loss", "grad_norm" and "counter:NAME"; None where not finite.
    """

    steps: list[int]
    values: dict[str, list[float | None]]
    nonfinite: list[dict[str, Any]]
    skipped_steps: int | None

    def training(self) -> dict[str, Any]:
        """The "training" part of a run record."""
        counters = {
            name.removeprefix("counter:"): values
            for name, values in self.values.items()
            if name not in _EVENTS
        }
        found: dict[str, Any] = {
            "loss": self.values["loss"],
            "grad_norm": self.values.get("grad_norm", []),
            "nonfinite": self.nonfinite,
            "not_recorded": [] if "grad_norm" in self.values else ["grad_norm"],
        }
        if self.skipped_steps is not None:
            found["skipped_steps"] = self.skipped_steps
        if counters:
            found["counters"] = counters
        return found


NOTHING_RECORDED: Final[dict[str, Any]] = {
    "loss": [],
    "grad_norm": [],
    "nonfinite": [],
    "not_recorded": ["loss", "grad_norm"],
}


@dataclass
class _Series:
    """One named series: the last value of each step, and the steps whose value was not finite."""

    last: dict[int, float] = field(default_factory=dict)
    broken: list[int] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        self.last[step] = value
        if not math.isfinite(value):
            self.broken.append(step)


def read_curve(path: Path, names: Mapping[str, str], *, label: str) -> Curve:
    """Read one curve; `names` maps step (JSONL), loss, grad_norm, skipped, counter:NAME to tags.

    Everything is kept at the steps that loss, grad_norm and the counters share. `skipped` holds
    how many steps were skipped since the value before it. Raises DataError that names file and
    line.
    """
    wanted = {tag: role for role, tag in names.items() if role != "step"}
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        points = _json_points(path, wanted, step=names.get("step", "step"), label=label)
    elif path.is_dir() or "tfevents" in path.name:
        points = scalars(path, label=label)
    else:
        raise DataError(f"{label}: unknown type; allowed: .jsonl, .ndjson, *tfevents*, a folder")
    series = {role: _Series() for role in wanted.values()}
    for tag, step, value in points:
        if tag in wanted:
            series[wanted[tag]].add(step, value)
    skipped = series.pop("skipped", None)
    for role, one in series.items():
        if not one.last:
            raise DataError(f"{label}: no value of {names[role]!r}, which its entry names")
    return _curve(series, skipped, label=label)


def _curve(series: dict[str, _Series], skipped: _Series | None, *, label: str) -> Curve:
    shared = set.intersection(*(set(one.last) for one in series.values()))
    steps = sorted(shared)
    if not steps:
        raise DataError(f"{label}: {' and '.join(series)} were never recorded at the same step")
    events = [
        {"step": step, "where": _EVENTS[role]}
        for role, one in series.items()
        for step in one.broken
        if role in _EVENTS
    ]
    values = {role: [one.last[step] for step in steps] for role, one in series.items()}
    size = -(-len(steps) // MAX_POINTS)
    return Curve(
        steps=steps[::size],
        values={role: _block_means(one, size) for role, one in values.items()},
        nonfinite=sorted(events, key=lambda event: (event["step"], event["where"])),
        skipped_steps=None if skipped is None else _total(skipped, label=label),
    )


def _block_means(values: list[float], size: int) -> list[float | None]:
    means: list[float | None] = []
    for start in range(0, len(values), size):
        finite = [value for value in values[start : start + size] if math.isfinite(value)]
        means.append(math.fsum(finite) / len(finite) if finite else None)
    return means


def _total(skipped: _Series, *, label: str) -> int:
    for step, value in skipped.last.items():
        if not (value >= 0 and value == math.floor(value) and math.isfinite(value)):
            raise DataError(
                f"{label}: skipped is {value:g} at step {step}; it counts the steps skipped since "
                "the value before it"
            )
    return int(sum(skipped.last.values()))


def _json_points(
    path: Path, wanted: Mapping[str, str], *, step: str, label: str
) -> Iterator[tuple[str, int, float]]:
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(iter(lambda: stream.readline(_LONGEST_LINE), b""), 1):
                if line.strip():
                    yield from _json_line(line, wanted, step, where=f"{label}, line {number}")
    except OSError as error:
        raise DataError(f"{label}: cannot be read: {error.strerror or error}") from error


def _json_line(
    line: bytes, wanted: Mapping[str, str], step: str, *, where: str
) -> Iterator[tuple[str, int, float]]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a JSON object of at most {_LONGEST_LINE} bytes") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: not a JSON object")
    present = [tag for tag in wanted if tag in record]
    if not present:
        return
    at = record.get(step)
    if type(at) is not int or not 0 <= at < 1 << 63:
        raise DataError(f"{where}: {step!r} is {at!s:.40}; a step is a whole number, 0 or more")
    for tag in present:
        yield tag, at, _number(record[tag], tag, where=where)


def _number(value: Any, tag: str, *, where: str) -> float:
    """JSON has no NaN: null and the texts NaN and Infinity stand for values that are not finite."""
    if value is None:
        return math.nan
    if isinstance(value, str):
        found = (_TEXTS | _TEXTS_LONG).get(value.lower())
        if found is not None:
            return found
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e308 or value != value else math.inf
    raise DataError(f"{where}: {tag!r} is {value!s:.40}; it must be a number")
