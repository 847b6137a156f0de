"""Checks of the values in [options]; every message names the workload, the option and the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ExperimentError


def check_whole(workload: str, /, **options: tuple[Any, int, int]) -> None:
    """name=(value, least, most): ExperimentError unless it is a whole number in the range."""
    for name, (value, least, most) in options.items():
        if type(value) is not int or not least <= value <= most:
            raise ExperimentError(
                f"workload {workload}: {name} = {value!r}; allowed: a whole number from {least} "
                f"to {most}"
            )


def check_name(workload: str, /, **options: Any) -> None:
    """name=value: ExperimentError unless it is a text that is not empty, or not given (None)."""
    for name, value in options.items():
        if value is not None and (not isinstance(value, str) or not value):
            raise ExperimentError(
                f"workload {workload}: {name} = {value!r}; allowed: a text in quotes"
            )


def names(workload: str, option: str, value: Any) -> tuple[str, ...]:
    """A list of different texts as a tuple, or ExperimentError."""
    listed = isinstance(value, (list, tuple))
    if not listed or not all(isinstance(one, str) and one for one in value):
        raise ExperimentError(
            f"workload {workload}: {option} = {value!r}; allowed: a list of texts, such as "
            f'{option} = ["first", "second"]'
        )
    twice = [one for one in value if value.count(one) > 1]
    if twice:
        raise ExperimentError(
            f"workload {workload}: {option} names {twice[0]!r} twice; leave one out"
        )
    return tuple(value)


def paths(workload: str, option: str, value: Any, *, folder: Path) -> tuple[Path, ...]:
    """One path or a list of paths, relative ones below `folder`, or ExperimentError."""
    found = names(workload, option, [value] if isinstance(value, str) else value)
    if not found:
        raise ExperimentError(f"workload {workload}: {option} = []; name at least one file")
    return tuple(folder / Path(one).expanduser() for one in found)
