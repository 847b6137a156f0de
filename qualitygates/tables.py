"""Strict reading of one TOML table: every error names the key, what it held and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from .errors import ExperimentError

_MISSING: Any = object()


class Table:
    """A TOML table whose keys are known in advance; `section` is its name in messages."""

    def __init__(self, data: Any, section: str, *, keys: Sequence[str]) -> None:
        self.section = section
        if not isinstance(data, Mapping):
            raise ExperimentError(f"{section} = {_shown(data)} must be a table: [{section}]")
        for key in data:
            if key not in keys:
                close = get_close_matches(key, keys, n=1, cutoff=0.0)
                place = f"in [{section}]" if section else "at the top"
                raise ExperimentError(
                    f"unknown key {_shown(key)} {place}; nearest known: {close[0]!r}; allowed: "
                    f"{', '.join(keys)}"
                )
        self.data = data

    def raw(self, key: str, default: Any = _MISSING) -> Any:
        """The value as TOML gave it; without a default a missing key is an error."""
        if key in self.data:
            return self.data[key]
        if default is _MISSING:
            raise ExperimentError(f"{self.at(key)} is missing; it has no default")
        return default

    def text(self, key: str, default: Any = _MISSING) -> str:
        """A line of text."""
        value = self.raw(key, default)
        if value is default:
            return str(value)
        if not is_line(value):
            raise self.wrong(key, "a non-empty line of text")
        return str(value)

    def texts(self, key: str, default: Sequence[str] = ()) -> tuple[str, ...]:
        """A list of different lines of text."""
        value = self.raw(key, list(default))
        if not isinstance(value, list) or not all(map(is_line, value)):
            raise self.wrong(key, "a list of texts")
        if len(set(value)) != len(value):
            raise self.wrong(key, "a list that names nothing twice")
        return tuple(value)

    def whole(self, key: str, default: Any = _MISSING, *, least: int) -> int:
        """A whole number of at least `least` that fits 64 bits."""
        value = self.raw(key, default)
        if type(value) is not int or not least <= value < 1 << 63:
            raise self.wrong(key, f"a whole number, {least} or more")
        return int(value)

    def wholes(self, key: str, default: Any = _MISSING) -> tuple[int, ...]:
        """A list of whole numbers that fit 64 bits."""
        value = self.raw(key, default)
        if not isinstance(value, (list, tuple)) or not value:
            raise self.wrong(key, "a list of whole numbers")
        if not all(type(one) is int and 0 <= one < 1 << 63 for one in value):
            raise self.wrong(key, "a list of whole numbers, 0 or more")
        return tuple(value)

    def number(self, key: str, default: float) -> float:
        """A finite number, not below 0."""
        value = self.raw(key, default)
        whole = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not whole or not 0 <= value < 1e300 or math.isnan(value):
            raise self.wrong(key, "a finite number, not below 0")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """true or false."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def tables(self, key: str) -> list[Any]:
        """An array of tables, [[key]]; empty when absent."""
        value = self.raw(key, [])
        if not isinstance(value, list):
            raise ExperimentError(f"{key} = {_shown(value)} must be an array of tables: [[{key}]]")
        return value

    def at(self, key: str) -> str:
        """How messages call a key of this table."""
        return f"[{self.section}] {key}" if self.section else key

    def wrong(self, key: str, allowed: str) -> ExperimentError:
        """The error that says what a key holds and what it must hold."""
        return ExperimentError(f"{self.at(key)} = {_shown(self.raw(key))} must be {allowed}")


def is_line(value: Any) -> bool:
    """Whether a value is one non-empty, printable line of at most 1,000 characters."""
    return isinstance(value, str) and bool(value.strip()) and value.isprintable() and _short(value)


def _short(value: str) -> bool:
    return len(value) <= 1000


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python prints
        text = "a number of thousands of digits"
    return text if len(text) <= 200 else text[:200] + "..."
