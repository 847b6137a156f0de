"""Calibrations: how fast a GPU multiplies and casts, by shape; TOML that is read strictly."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from lowprec.errors import PlanError
from lowprec.formats import nearest_names
from lowprec.grids import SKIPPED, Table
from lowprec.hardware import Hardware

SCHEMA: Final = 1
OLDEST_TORCH: Final = (2, 11)
MEASURED, PUBLISHED = "measured", "published"
_TEXTS: Final = ("kind", "gpu", "device", "torch", "triton", "cuda", "lowprec", "date", "source")
_NUMBERS: Final = ("launch_us", "copy_tbytes")
_KEYS: Final = ("schema", "checksum", "capability", *_TEXTS, *_NUMBERS, "notes", "rates", "table")
_RATES: Final = ("bf16_tflops", "fp8_tflops", "cast_tbytes", "fp4_tflops")
_TABLE: Final = ("op", "what", "axes", "us")
_POINTS: Final = 100_000


@dataclass(frozen=True)
class Rates:
    """Published TFLOP/s of large products by element width (0.0: none known), TB/s of casts."""

    bf16_tflops: float
    fp8_tflops: float
    cast_tbytes: float
    fp4_tflops: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Times of one GPU: `tables` where it was measured, `rates` where others published them.

    gpu: the short name that a plan's hardware has; device: what the driver calls it. launch_us: the
    least time of a kernel in a full queue; copy_tbytes: TB/s of a copy, reads and writes counted.
    notes: what was skipped, and why.
    """

    kind: str
    gpu: str
    device: str
    capability: tuple[int, int]
    torch: str
    triton: str
    cuda: str
    lowprec: str
    date: str
    source: str
    launch_us: float
    copy_tbytes: float
    notes: tuple[str, ...]
    tables: tuple[Table, ...] = ()
    rates: Rates | None = None

    @property
    def hardware(self) -> Hardware:
        """The machine that it describes."""
        return Hardware(self.gpu, "cuda", self.capability)

    @property
    def text(self) -> str:
        """Where the figures come from, in one line."""
        if self.kind == PUBLISHED:
            return f"predicted from published rates of {self.gpu}, never measured ({self.source})"
        return f"predicted from rates measured on {self.gpu}, torch {self.torch}, {self.date}"

    def table(self, op: str, what: str) -> Table | None:
        """The table of one kernel, or None when it was not measured."""
        return next((one for one in self.tables if (one.op, one.what) == (op, what)), None)

    def check_fits(self, hardware: Hardware, *, torch_here: str | None) -> None:
        """Raise PlanError when the figures are not those of `hardware`, or are stale.

        torch_here: the version that will run the plan, None for a plan made for another machine.
        """
        if hardware != self.hardware:
            raise PlanError(
                f"the calibration is of {self.hardware}, the plan is for {hardware}: measure that "
                f"machine (python -m lowprec calibrate) or plan for hardware={self.gpu!r}"
            )
        if self.kind == PUBLISHED:
            return
        again = "measure again: python -m lowprec calibrate"
        if _release(self.torch) < OLDEST_TORCH:
            raise PlanError(
                f"the calibration is stale: measured with torch {self.torch}, older than any that "
                f"lowprec runs on; {again}"
            )
        if torch_here is not None and _release(self.torch) != _release(torch_here):
            raise PlanError(
                f"the calibration is stale: measured with torch {self.torch}, this is torch "
                f"{torch_here}, whose products may run at other rates; {again}"
            )

    def to_toml(self) -> str:
        """The TOML file that `parse_calibration` reads back to an equal calibration."""
        data = self._data()
        lines = ["# Written by python -m lowprec calibrate; a file that was edited is refused."]
        if self.kind == PUBLISHED:
            lines = ["# Rates that others published, not measured here; edits are refused."]
        lines += [f"{key} = {_toml(data[key])}" for key in data if key not in ("rates", "table")]
        lines.append(f'checksum = "{_checksum(data)}"')
        if self.rates is not None:
            lines += ["", "[rates]", *(f"{k} = {_toml(v)}" for k, v in data["rates"].items())]
        for table in data.get("table", ()):
            lines += ["", "[[table]]", *(f"{key} = {_toml(table[key])}" for key in _TABLE)]
        return "\n".join(lines) + "\n"

    def _data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"schema": SCHEMA, "capability": list(self.capability)}
        data |= {key: getattr(self, key) for key in (*_TEXTS, *_NUMBERS)}
        data["notes"] = list(self.notes)
        if self.rates is not None:
            data["rates"] = dataclasses.asdict(self.rates)
        if self.tables:
            data["table"] = [
                {"op": t.op, "what": t.what, "axes": [list(a) for a in t.axes], "us": list(t.us)}
                for t in self.tables
            ]
        return data


def shipped_calibrations() -> tuple[str, ...]:
    """Names of the calibrations that come with lowprec."""
    return tuple(sorted(path.stem for path in _shipped_folder().glob("*.toml")))


def load_calibration(name_or_path: str | Path) -> Calibration:
    """Read a calibration: a bare name is a shipped one, anything with a slash or `.toml` a file.

    Raises PlanError with the file, what is wrong and the way out: damaged, edited by hand, of
    another schema, unknown name.
    """
    text = os.fspath(name_or_path)
    path = Path(text)
    if "/" not in text and "\\" not in text and not text.endswith(".toml"):
        known = shipped_calibrations()
        if text not in known:
            raise PlanError(
                f"no shipped calibration is called {text!r}; {nearest_names(text, known)} (a file "
                "of your own, from python -m lowprec calibrate, needs a slash or the ending .toml)"
            )
        path = _shipped_folder() / f"{text}.toml"
    try:
        return parse_calibration(_read(path))
    except PlanError as error:
        shown = str(path) if str(path).isprintable() else repr(str(path))
        raise PlanError(f"calibration {shown}: {error}") from error


def parse_calibration(text: str) -> Calibration:
    """Read a calibration from TOML text; raises PlanError that names the key."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"is not TOML: {error}") from error
    if type(data.get("schema")) is not int or data["schema"] != SCHEMA:
        _wrong(
            f"schema is {data.get('schema')!r}; this version reads {SCHEMA}: measure again with "
            "python -m lowprec calibrate"
        )
    _check_keys(data, _KEYS, "")
    checksum = data.pop("checksum", None)
    if checksum != _checksum(data):
        _wrong(
            "was edited by hand or damaged: its checksum does not fit its content; measure again "
            "with python -m lowprec calibrate"
        )
    plain: dict[str, Any] = {key: _text(data, key) for key in _TEXTS}
    plain |= {key: _number(data.get(key), key) for key in _NUMBERS}
    notes = data.get("notes")
    if not isinstance(notes, list) or not all(isinstance(one, str) for one in notes):
        _wrong(f"notes must be a list of strings, not {_shown(notes)}")
    found = Calibration(
        **plain,
        capability=_capability(data.get("capability")),
        notes=tuple(notes),
        tables=_tables(data.get("table", [])),
        rates=_rates(data["rates"]) if "rates" in data else None,
    )
    if found.kind not in (MEASURED, PUBLISHED):
        _wrong(f"kind is {found.kind!r}; it is 'measured' or 'published'")
    if (found.rates is not None, bool(found.tables)) != (
        found.kind == PUBLISHED,
        found.kind == MEASURED,
    ):
        _wrong("measured calibrations have [[table]] and no [rates], published ones the reverse")
    if found.kind == MEASURED and not re.match(r"\d+\.\d+", found.torch):
        _wrong(f"torch is {found.torch!r}, not a version")
    return found


def _tables(found: Any) -> tuple[Table, ...]:
    if not isinstance(found, list):
        _wrong("table must be written as [[table]]")
    tables: dict[tuple[str, str], Table] = {}
    for number, data in enumerate(found, start=1):
        where = f"table {number}: "
        if not isinstance(data, dict):
            _wrong(f"{where}is not a table; write it as [[table]]")
        _check_keys(data, _TABLE, where)
        op, what = _text(data, "op", where), _text(data, "what", where)
        axes, us = data.get("axes"), data.get("us")
        if not isinstance(axes, list) or not axes or not all(map(_is_axis, axes)):
            _wrong(f"{where}axes must be lists of increasing whole numbers from 1")
        points = math.prod(map(len, axes))
        if not isinstance(us, list) or len(us) != points or points > _POINTS:
            _wrong(f"{where}us must be a list of {points} numbers, one for each point of the grid")
        times = [_number(one, f"{where}us", least=SKIPPED) for one in us]
        if (op, what) in tables:
            _wrong(f"{where}{op} {what!r} is there twice")
        tables[op, what] = Table(op, what, tuple(map(tuple, axes)), tuple(times))
    return tuple(tables.values())


def _rates(data: Any) -> Rates:
    if not isinstance(data, dict):
        _wrong("rates must be a table: [rates]")
    _check_keys(data, _RATES, "rates: ")
    fp4 = _number(data.get("fp4_tflops", 0.0), "fp4_tflops", least=0.0)
    bf16, fp8, copied = (_number(data.get(key), key) for key in _RATES[:3])
    return Rates(bf16, fp8, copied, fp4)


def _is_axis(axis: object) -> bool:
    if not isinstance(axis, list) or not axis or not all(type(n) is int and n > 0 for n in axis):
        return False
    return all(a < b for a, b in itertools.pairwise(axis))


def _capability(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int for n in value):
        _wrong(f"capability must be two whole numbers, as in [9, 0], not {_shown(value)}")
    return value[0], value[1]


def _number(value: Any, key: str, *, least: float | None = None) -> float:
    low = f"at least {least:g}" if least is not None else "above 0"
    fits = type(value) in (int, float) and math.isfinite(value)
    if not fits or not (value > 0 if least is None else value >= least):
        _wrong(f"{key} must be a number {low}, not {_shown(value)}")
    return float(value)


def _text(data: Mapping[str, Any], key: str, where: str = "") -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        _wrong(f"{where}{key} must be a non-empty line of text, not {_shown(value)}")
    return value


def _check_keys(data: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in data:
        if key not in known:
            _wrong(f"{where}unknown key {key!r}; {nearest_names(key, known)}")


def _checksum(data: Mapping[str, Any]) -> str:
    # TOML dates and the like have no JSON form; they are refused by key afterwards.
    text = json.dumps(data, sort_keys=True, ensure_ascii=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def _toml(value: Any) -> str:
    # JSON's text of strings, numbers and lists of them is TOML's too, but for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"is not UTF-8 text in a file: {error}") from error


def _shipped_folder() -> Path:
    inside = Path(__file__).parent / "calibrations"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "calibrations"


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "this integer"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _wrong(why: str) -> NoReturn:
    raise PlanError(why)
