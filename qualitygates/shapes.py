"""The form of a gate and its run records, checked before they are shown: a seal proves no origin.

Whoever can write a file can seal it, so what is inside may be of any type. Checked is what a
reader of records relies on; keys that a record lacks are the business of who needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from .errors import RecordError

Check = Callable[[Any], bool]
# A float32 ends at 3.4e38; sums and squares of what is far beyond overflow to NaN, which no rule
# sees.
LARGEST: Final = 1e100
_PRODUCTS: Final = ("fprop", "dgrad", "wgrad")
_MOST_DAYS: Final = 3650
_DEEPEST: Final = 32


def check_run(run: Mapping[str, Any]) -> None:
    """Raise RecordError that names the field of a run record which does not have its form."""
    _check(run, _RUN, name=f"{run.get('arm')!s:.20} seed {run.get('seed')!s:.20}")


def check_gate(gate: Mapping[str, Any]) -> None:
    """Raise RecordError that names the field of a gate dict which does not have its form."""
    _check(gate, _GATE, name="gate.json")


def _check(record: Mapping[str, Any], checks: Mapping[str, Check], *, name: str) -> None:
    for field, check in checks.items():
        value: Any = record
        for key in field.split("."):
            # Of the table above a field its own check has spoken.
            value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT and not check(value):
            raise RecordError(
                f"{name}: {field} does not have the form that this program gives it, so nothing "
                "of this program wrote it; move it out of the folder and give `run` again"
            )


_ABSENT: Final = object()


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_table(value: Any) -> bool:
    """A table that is not nested so deeply that writing it as text would fail."""
    level: list[Any] = [value] if isinstance(value, Mapping) else []
    for _ in range(_DEEPEST):
        if not level:
            break
        tables = [list(one.values()) if isinstance(one, Mapping) else one for one in level]
        level = [x for one in tables for x in one if isinstance(x, (Mapping, list, tuple))]
    return isinstance(value, Mapping) and not level


def _is_table_or_none(value: Any) -> bool:
    return value is None or _is_table(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_series(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number_or_none, value))


def _is_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_text, value))


def _is_events(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, Mapping) and "step" in one and "where" in one for one in value
    )


def _table_of(check: Check) -> Check:
    return lambda value: isinstance(value, Mapping) and all(map(check, value.values()))


def _is_evaluation(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("predictions_finite"), bool)
        and _table_of(_is_number_or_none)(value.get("metrics") or {})
        and _table_of(_is_clustering)(value.get("clusterings") or {})
        and _table_of(_is_slice)(value.get("slices") or {})
        and (value.get("prediction_sample") is None or _is_series(value["prediction_sample"]))
    )


def _is_clustering(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_series(one) for one in value.values() if isinstance(one, (list, str, Mapping))
    )


def _is_slice(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(_is_number(value.get(key)) for key in ("positives", "negatives"))
        and _table_of(_is_table)(value.get("clusterings"))
    )


def _is_layers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(layer, Mapping) and all(_is_text(layer.get(k)) for k in ("name", *_PRODUCTS))
        for layer in value
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


_RUN: Final[dict[str, Check]] = {
    "inputs": _is_table,
    "environment": _is_table,
    "pairing": _is_table,
    "pairing.steps": _is_count,
    "pairing.evaluation_forms": _is_texts,
    "plan_table": _is_text,
    "plan_layers": _is_layers,
    "gemms": _table_of(_table_of(_table_of(_is_count))),
    "gemms_match_plan": lambda value: value is None or isinstance(value, bool),
    "timing": _table_of(_is_number_or_none),
    "training": _is_table,
    "training.loss": _is_series,
    "training.grad_norm": _is_series,
    "training.nonfinite": _is_events,
    "training.crashed": lambda value: value is None or isinstance(value, str),
    "training.counters": _table_of(_is_series),
    "training.skipped_steps": _is_count,
    "training.not_recorded": _is_texts,
    "evaluations": lambda value: value is None or _table_of(_is_evaluation)(value),
}
_GATE: Final[dict[str, Check]] = {
    "experiment": _is_table,
    **{f"experiment.{key}": _is_table for key in ("train", "baseline", "candidate", "controls")},
    "speed": _is_table,
    **dict.fromkeys(("controls", "slices", "facts", "acceptance", "inputs"), _is_table_or_none),
    "acceptance.expires_days": lambda value: type(value) is int and 0 <= value <= _MOST_DAYS,
    "created": _is_text,
}
