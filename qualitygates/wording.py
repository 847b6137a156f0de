"""The words of a report: names of metrics, arms and forms, and how numbers are said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from .blocks import plain

MEANING: Final = {
    "ACCEPT": "the candidate is non-inferior to BF16 by the margins promised before the first run.",
    "REJECT": "the candidate is worse than the promised margins allow, failed in training, or is "
    "not as fast as promised.",
    "INCONCLUSIVE": "neither harm nor harmlessness is shown. It counts as not accepted.",
}
FORMS: Final = {"trained": "as trained", "bf16": "served in BF16"}
METRICS: Final = {
    "ne": "NE, relative",
    "auc": "AUC drop",
    "gauc": "GAUC drop",
    "calibration": "calibration shift",
}
ARMS: Final = {
    "baseline": "baseline",
    "candidate": "candidate",
    "null": "null control",
    "known_bad": "known-bad control",
}
PRODUCTS: Final = ("fprop", "dgrad", "wgrad")


def table_of(value: Any, key: str) -> Mapping[str, Any]:
    """The table under a key of a record; what is no table there is empty."""
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def evaluation_words(name: str) -> str:
    """`trained:click` -> "as trained, task click"; a form without words of its own is itself."""
    form, _, task = name.partition(":")
    words = FORMS.get(form, form)
    return f"{words}, task {task}" if task else words


def metric_words(key: str) -> str:
    """`bf16/ne` -> "NE, relative, served in BF16"."""
    name, _, metric = key.rpartition("/")
    return f"{METRICS.get(metric, metric)}, {evaluation_words(name)}"


def number(value: Any) -> str:
    """A number to six digits, anything else as it is."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:g}" if is_number and abs(value) < 1e300 else plain(value)


def amount(metric: str, value: float | None) -> str:
    """A difference in the unit in which its margin is usually said: % or absolute AUC."""
    if value is None:
        return "-"
    return f"{value:+.5f}" if metric.endswith("auc") else f"{100 * value:+.3f} %"


def deviation(key: str, value: float | None) -> str:
    """A standard deviation in the unit of its metric, to two digits."""
    if value is None:
        return "-"
    return f"{value:.2g}" if key.endswith("auc") else f"{100 * value:.2g} %"


def flatten(value: Mapping[str, Any], *, prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts as (dotted name, text) pairs."""
    pairs: list[tuple[str, str]] = []
    for key, one in value.items():
        if isinstance(one, Mapping):
            pairs += flatten(one, prefix=f"{prefix}{key}.")
        elif isinstance(one, (list, tuple)):
            pairs.append((f"{prefix}{key}", ", ".join(map(plain, one))))
        else:
            pairs.append((f"{prefix}{key}", f"{one:g}" if isinstance(one, float) else plain(one)))
    return pairs


def experiment_toml(experiment: Mapping[str, Any]) -> str:
    """The experiment as TOML: values first, then one table a section."""
    values = {key: value for key, value in experiment.items() if not isinstance(value, Mapping)}
    lines = [f"{_toml(key, bare=True)} = {_toml(value)}" for key, value in values.items()]
    for key, table in experiment.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_toml(key, bare=True)}]"]
            lines += [f"{_toml(name, bare=True)} = {_toml(one)}" for name, one in table.items()]
    return "\n".join(lines)


def _toml(value: Any, *, bare: bool = False) -> str:
    if bare and str(value).replace("_", "").replace("-", "").isalnum() and str(value).isascii():
        return str(value)
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{_toml(k, bare=True)} = {_toml(v)}" for k, v in value.items()) + " }"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
