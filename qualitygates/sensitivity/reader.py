"""Strict reading of TOML tables: every error names the key, what is allowed and the nearest key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ExperimentError
from ..experiment import nearest


def read_toml(path: Path) -> Mapping[str, Any]:
    """The content of a TOML file; raises ExperimentError when it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExperimentError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{path}: not UTF-8 text; TOML files are UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{path}: not valid TOML: {error}") from error


class Reader:
    """One table with its known keys; each method reads a value or raises ExperimentError."""

    def __init__(self, table: Any, keys: Sequence[str], *, section: str = "") -> None:
        self.section = section
        if not isinstance(table, Mapping):
            raise ExperimentError(f"{section} = {table!r} must be a table: [{section}]")
        for key in table:
            if key not in keys:
                place = f"in [{section}]" if section else "at the top"
                raise ExperimentError(f"unknown key {key!r} {place}; {nearest(key, tuple(keys))}")
        self.table = table

    def _at(self, key: str) -> str:
        return f"[{self.section}] {key}" if self.section else key

    def _get(self, key: str, default: Any) -> Any:
        value = self.table.get(key, default)
        if value is None:
            raise ExperimentError(f"{self._at(key)} is missing; it has no default")
        return value

    def inner(self, key: str, keys: Sequence[str]) -> Reader:
        """The table under `key`, empty when absent."""
        return Reader(self.table.get(key, {}), keys, section=key)

    def text(self, key: str, default: str | None = None) -> str:
        """A non-empty printable line."""
        value = self._get(key, default)
        if not isinstance(value, str) or not value.isprintable() or not value.strip():
            raise ExperimentError(f"{self._at(key)} = {value!r} must be a non-empty line of text")
        return value

    def choice(self, key: str, allowed: Sequence[str], default: str | None = None) -> str:
        """One of the allowed words."""
        value = self.text(key, default)
        if value not in allowed:
            raise ExperimentError(f"{self._at(key)} = {value!r}; {nearest(value, tuple(allowed))}")
        return value

    def whole(self, key: str, default: int | None = None, *, least: int, most: int) -> int:
        """A whole number from least to most."""
        value = self._get(key, default)
        if type(value) is not int or not least <= value <= most:
            raise ExperimentError(
                f"{self._at(key)} = {value!r} must be a whole number from {least} to {most}"
            )
        return value

    def number(self, key: str, default: float | None = None, *, low: float, high: float) -> float:
        """A finite number above `low`, at most `high`."""
        return self.number_of(self._get(key, default), key, low=low, high=high)

    def number_of(self, value: Any, key: str, *, low: float, high: float) -> float:
        """`value` as a finite number above `low`, at most `high`."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not abs(value) < 1e300 or not low < value <= high:
            raise ExperimentError(
                f"{self._at(key)} = {value!r} must be a number above {low:g}, at most {high:g}"
            )
        return float(value)

    def numbers(self, key: str, default: list[float], *, low: float, high: float) -> list[float]:
        """A non-empty list of numbers above `low`, at most `high`."""
        value = self._get(key, default)
        if not isinstance(value, list) or not value:
            raise ExperimentError(f"{self._at(key)} = {value!r} must be a non-empty list")
        return [self.number_of(one, key, low=low, high=high) for one in value]

    def boolean(self, key: str, *, default: bool) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ExperimentError(f"{self._at(key)} = {value!r} must be true or false")
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        """A list of different non-empty texts."""
        value = self._get(key, default)
        good = isinstance(value, list) and all(isinstance(v, str) and v.strip() for v in value)
        if not good or len(set(value)) != len(value):
            raise ExperimentError(f"{self._at(key)} = {value!r} must be a list of different texts")
        return list(value)
