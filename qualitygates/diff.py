"""diff: in what two records differ, in words and as JSON data.

Two gate folders, or two files of one kind: promises (gate.json), run records, verdicts,
acceptances. Times and checksums are no difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .errors import RecordError
from .records import RunStore, read_record

_LARGEST: Final = 1 << 30
# What two recordings of the same thing may differ in. An acceptance's age is its gate's.
_VOLATILE: Final = ("checksum", "timing", "created", "expiry.at")
_SEALED: Final = ("gate", "run", "acceptance", "speed")
_LONG: Final = 60
_ABSENT: Final = "absent"
_NOTHING: Final = object()


@dataclass(frozen=True)
class Difference:
    """One field in which two records differ: where, both values as JSON data, and a sentence."""

    field: str
    first: Any
    second: Any
    words: str

    def to_data(self) -> dict[str, Any]:
        """The difference as JSON data; a value that is absent on one side is null there."""
        values = {"first": self.first, "second": self.second}
        plain = {side: None if one is _NOTHING else one for side, one in values.items()}
        return {"field": self.field, **plain, "words": self.words}


def diff(first: str | Path, second: str | Path) -> dict[str, Any]:
    """{"kind", "same", "differences": [{field, first, second, words}]} of two records.

    Raises RecordError for a path that holds no record, one that is damaged, or two of different
    kinds.
    """
    kinds, records = zip(*(_load(Path(path)) for path in (first, second)), strict=True)
    if kinds[0] != kinds[1]:
        raise RecordError(
            f"{first} is a {kinds[0]}, {second} is a {kinds[1]}; diff compares two of one kind"
        )
    found = list(_differences(records[0], records[1], field=""))
    return {
        "kind": kinds[0],
        "same": not found,
        "differences": [one.to_data() for one in found],
    }


def in_words(result: Mapping[str, Any]) -> str:
    """The result of `diff` as lines for a terminal; text of the records is shown escaped."""
    if result["same"]:
        return f"the same {result['kind']}, times and checksums aside"
    lines = [one["words"] for one in result["differences"]]
    return "\n".join([f"{len(lines)} differences between two of kind {result['kind']}:", *lines])


def _load(path: Path) -> tuple[str, dict[str, Any]]:
    if path.is_dir():
        return "gate folder", _folder(path)
    record = _json(path)
    kind = record.get("kind")
    if kind in _SEALED:
        return str(kind), read_record(path, kind=str(kind))
    if kind is None and {"verdict", "reasons", "metrics"} <= set(record):
        return "verdict", record
    raise RecordError(
        f"{path}: no record that diff knows; it takes gate folders, gate.json, run records, "
        "verdict.json and acceptance.json"
    )


def _folder(path: Path) -> dict[str, Any]:
    """The parts of a gate folder by name; runs by arm and seed."""
    store = RunStore(path)
    runs, damaged = store.load_all(quarantine=False)
    if damaged:
        raise RecordError(f"{damaged[0].reason} ({len(damaged)} damaged in all)")
    found: dict[str, Any] = {"gate": store.read_gate()}
    for name in ("verdict", "acceptance", "speed"):
        file = path / f"{name}.json"
        if file.exists():
            found[name] = _load(file)[1]
    found["runs"] = {f"{one['arm']}, seed {one['seed']}": one for one in runs}
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"it is larger than {_LARGEST} bytes")
        record = json.loads(path.read_bytes().decode(), parse_constant=_no_constant)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not a whole JSON file: {error}") from error
    if not isinstance(record, dict):
        raise RecordError(f"{path}: holds a {type(record).__name__}, not a record")
    return record


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _differences(first: Any, second: Any, *, field: str) -> Iterator[Difference]:
    if isinstance(first, dict) and isinstance(second, dict):
        for name in {**first, **second}:
            inner = f"{field}.{name}" if field else name
            if name not in _VOLATILE and not inner.endswith(_VOLATILE[-1]):
                values = (one.get(name, _NOTHING) for one in (first, second))
                yield from _differences(*values, field=inner)
    elif first is _NOTHING or second is _NOTHING or first != second:
        first, second = _opened(first, field), _opened(second, field)
        if isinstance(first, dict) and isinstance(second, dict):
            yield from _differences(first, second, field=field)
        else:
            yield Difference(field, first, second, _words(field, first, second))


def _opened(value: Any, field: str) -> Any:
    """Named entries as a table, so that what differs has a name instead of a position."""
    if field.endswith("plan") and isinstance(value, str):
        try:
            return _opened(json.loads(value), field)
        except (ValueError, RecursionError):
            return value
    if isinstance(value, dict):
        return {name: _opened(one, f"{field}.{name}") for name, one in value.items()}
    if not isinstance(value, list) or not value:
        return value
    if all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in value):
        # A slice is named in each form.
        names = [":".join(filter(None, (one["name"], one.get("form")))) for one in value]
        return dict(zip(names, value, strict=True)) if len(set(names)) == len(names) else value
    pairs = all(
        isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) for one in value
    )
    return dict(value) if pairs else value


def _words(field: str, first: Any, second: Any) -> str:
    name = _clean(field)
    if first is _NOTHING or second is _NOTHING:
        side, value = ("second", second) if first is _NOTHING else ("first", first)
        return f"{name}: only in the {side}: {_shown(value)}"
    if isinstance(first, list) and isinstance(second, list):
        return f"{name}: {_lists(first, second)}"
    if _number(first) and _number(second):
        return f"{name}: {first:g} -> {second:g} ({second - first:+.3g})"
    return f"{name}: {_shown(first)} -> {_shown(second)}"


def _lists(first: list[Any], second: list[Any]) -> str:
    both = list(zip(first, second, strict=False))
    differing = [index for index, (a, b) in enumerate(both) if a != b]
    parts = [] if len(first) == len(second) else [f"{len(first)} -> {len(second)} entries"]
    if len(first) <= 8 >= len(second) and not any(isinstance(one, (list, dict)) for one in first):
        return f"{_shown(first)} -> {_shown(second)}"
    if differing:
        at = differing[0]
        parts.append(
            f"{len(differing)} of {len(both)} entries differ, the first at {at}: "
            f"{_shown(first[at])} -> {_shown(second[at])}"
        )
        gaps = [abs(a - b) for a, b in both if _number(a) and _number(b)]
        if gaps:
            parts.append(f"largest difference {max(gaps):.3g}")
    return "; ".join(parts)


def _number(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) < 1e300 and math.isfinite(value)


def _shown(value: Any) -> str:
    if value is _NOTHING:
        return _ABSENT
    text = json.dumps(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def _clean(text: str) -> str:
    """Names come from models and files: nothing in them may steer a terminal."""
    return json.dumps(text)[1:-1]
