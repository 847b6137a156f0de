"""Observation files: what a training recorded about its own plan, products and start, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import DataError
from ..tables import is_line

_LARGEST: Final = 64 << 20
_PRODUCTS: Final = ("fprop", "dgrad", "wgrad")


def read_observation(path: Path, *, label: str) -> dict[str, Any]:
    """The known keys of an observation, checked; raises DataError that names file and key.

    All are optional: init_hash and batches_hash (that arms of a seed started alike), recipe_hash,
    plan_hash, plan_table, plan_layers, gemms and gemms_match_plan as in a run record, environment,
    plan and model as an acceptance needs them.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(_LARGEST + 1)
        found = json.loads(content) if len(content) <= _LARGEST else None
    except OSError as error:
        raise DataError(f"{label}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{label}: not JSON") from error
    if not isinstance(found, dict):
        raise DataError(f"{label}: must be a JSON object of at most {_LARGEST >> 20} MiB")
    for key, value in found.items():
        if key not in _CHECKS:
            raise DataError(f"{label}: unknown key {key!r:.60}; allowed: {', '.join(_CHECKS)}")
        if not _CHECKS[key](value):
            raise DataError(f"{label}: {key} does not have the form that a run record gives it")
    if found.get("gemms_match_plan") and not found.get("plan_layers"):
        raise DataError(
            f"{label}: gemms_match_plan is true without plan_layers; a reader could not check it"
        )
    return found


def _is_layers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(layer, Mapping)
        and all(is_line(layer.get(key)) for key in ("name", *_PRODUCTS))
        and isinstance(layer.get("reason", ""), str)
        and isinstance(layer.get("converted", True), bool)
        for layer in value
    )


def _is_counts(value: Any) -> bool:
    """layer -> product -> precision -> count"""
    return isinstance(value, Mapping) and all(
        isinstance(products, Mapping)
        and all(
            product in _PRODUCTS
            and isinstance(counts, Mapping)
            and all(type(count) is int and count >= 0 for count in counts.values())
            for product, counts in products.items()
        )
        for products in value.values()
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


_CHECKS: Final[dict[str, Callable[[Any], bool]]] = {
    "init_hash": is_line,
    "batches_hash": is_line,
    "recipe_hash": is_line,
    "plan_hash": is_line,
    "plan_table": _is_text,
    "plan_layers": _is_layers,
    "gemms": _is_counts,
    "gemms_match_plan": lambda value: value is None or isinstance(value, bool),
    "environment": _is_table,
    "plan": _is_text,
    "model": lambda value: isinstance(value, Mapping) and is_line(value.get("hash")),
}
