"""Slices named before the run: protected ones are co-primary, the others are tested for harm.

Non-inferiority of every slice at once would need no correction but has no power (0.002 for 20
slices of a neutral recipe); hence few protected slices at a wider margin, and for the rest a test
of harm. What is too small for a test of its own is tested once, pooled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import false_discovery_control

from .errors import RecordError
from .influence import Contrast, relative_loss, slice_contrast
from .verdict import ACCEPT, INCONCLUSIVE, REJECT, accepts, p_harm, rejects, widest

Pairs = Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]

PROTECTED_POSITIVES = 1000
MIN_POSITIVES = 200
MIN_CLUSTERS = 50
HARM_FACTOR = 3.0
EXPLORED = 0.1
REST = "rest"
NOT_TESTABLE = "NOT_TESTABLE"


@dataclass(frozen=True)
class SliceRules:
    """The promise about slices: overall NE margin, protected names and their margin factor, level
    of the look.
    """

    margin: float
    protected: tuple[str, ...]
    factor: float
    alpha: float


def judge_slices(evaluations: Mapping[str, Pairs], rules: SliceRules) -> list[dict[str, Any]]:
    """One entry per form and slice, from pairs of Evaluations (baseline, candidate) by form, one
    pair a seed.

    `verdict` is ACCEPT, REJECT or INCONCLUSIVE for a protected slice; REJECT, WARN or OK for the
    others; NOT_TESTABLE below 200 examples of either class or 50 clusters. Those too small form
    one more slice, "rest", of all their rows (a row counts once in each of its slices). Holm's
    family is all tested slices of all forms. `explore` marks slices worth a look (false discovery
    rate 0.1, Benjamini and Hochberg), no part of the verdict. Raises RecordError when a protected
    slice is not in the evaluations.
    """
    entries: list[dict[str, Any]] = []
    for form, pairs in evaluations.items():
        names = sorted(pairs[0][0]["slices"])
        absent = sorted(set(rules.protected) - set(names))
        if absent:
            raise RecordError(
                f"protected slices {absent} are not in the {form} evaluation; it holds: "
                f"{', '.join(names) or 'none'}"
            )
        found = [_entry(form, name, pairs, rules) for name in names]
        entries += [*found, *_rest(form, found, pairs, rules)]
    harm = [entry for entry in entries if entry["class"] != "protected" and _tested(entry)]
    for entry, harmed in zip(
        harm, holm([one["p_harm"] for one in harm], level=rules.alpha), strict=True
    ):
        entry["verdict"] = REJECT if harmed else "OK"
    tested = [entry for entry in entries if _tested(entry)]
    flags = holm([one["p_worse"] for one in tested], level=rules.alpha)
    for entry, worse in zip(tested, flags, strict=True):
        entry["warn"] = worse
        if worse and entry["verdict"] == "OK":
            entry["verdict"] = "WARN"
    if tested:
        adjusted = false_discovery_control([one["p_worse"] for one in tested], method="bh")
        for entry, value in zip(tested, adjusted, strict=True):
            entry["explore"] = bool(value <= EXPLORED)
    return entries


def holm(p_values: Sequence[float], *, level: float) -> list[bool]:
    """Holm's step-down: which hypotheses are rejected with family-wise error at most `level`."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def _entry(form: str, name: str, pairs: Pairs, rules: SliceRules) -> dict[str, Any]:
    protected = name in rules.protected
    held = pairs[0][0]["slices"][name]
    hit = min(one["clusters_hit"] for one in held["clusterings"].values())
    entry = _blank(form, name, rules, protected=protected) | {
        "positives": held["positives"],
        "negatives": held["negatives"],
        "clusters": hit,
    }
    least = PROTECTED_POSITIVES if protected else MIN_POSITIVES
    if reason := _untestable(entry, least=least):
        return entry | {"reason": reason, "verdict": INCONCLUSIVE if protected else NOT_TESTABLE}
    contrasts = {
        clustering: [slice_contrast(b, c, name=name, clustering=clustering) for b, c in pairs]
        for clustering in held["clusterings"]
    }
    return entry | _measured(contrasts, entry["margin"], rules, protected=protected)


def _blank(form: str, name: str, rules: SliceRules, *, protected: bool) -> dict[str, Any]:
    return {
        "name": name,
        "form": form,
        "class": "protected" if protected else "other",
        "margin": rules.margin * (rules.factor if protected else HARM_FACTOR),
        **dict.fromkeys(("estimate", "lower", "upper", "p_harm", "p_worse")),
        "warn": False,
        "explore": False,
        "verdict": NOT_TESTABLE,
        "reason": "",
    }


def _untestable(entry: Mapping[str, Any], *, least: int) -> str:
    rarer = min(entry["positives"], entry["negatives"])
    if rarer >= least and entry["clusters"] >= MIN_CLUSTERS:
        return ""
    counts = f"{entry['positives']:.0f} positives, {entry['negatives']:.0f} negatives"
    one_class = "one class only, so its NE is undefined: " if rarer == 0 else ""
    return (
        f"{one_class}{counts} in {entry['clusters']} clusters; "
        f"needs {least} of either class and {MIN_CLUSTERS} clusters"
    )


def _rest(
    form: str, entries: Sequence[Mapping[str, Any]], pairs: Pairs, rules: SliceRules
) -> list[dict[str, Any]]:
    """The slices that are too small for a test of their own, tested as one; [] below two."""
    small = [one["name"] for one in entries if one["class"] == "other" and not _tested(one)]
    if len(small) < 2:
        return []
    held = [pairs[0][0]["slices"][name] for name in small]
    clusterings = held[0]["clusterings"]
    weights = {key: _pooled(pairs[0][0], small, key, "weight") for key in clusterings}
    entry = _blank(form, REST, rules, protected=False) | {
        "class": "rest",
        "positives": _at_least(small, held, "positives"),
        "negatives": _at_least(small, held, "negatives"),
        "clusters": min(int(np.count_nonzero(one)) for one in weights.values()),
        "pooled": small,
    }
    if reason := _untestable(entry, least=MIN_POSITIVES):
        return [entry | {"reason": reason}]
    contrasts = {
        key: [
            relative_loss(
                _pooled(b, small, key, "loss"),
                _pooled(c, small, key, "loss"),
                clusters=int(np.count_nonzero(weights[key])),
                where=f"slice {REST!r}",
            )
            for b, c in pairs
        ]
        for key in clusterings
    }
    return [entry | _measured(contrasts, entry["margin"], rules, protected=False)]


def _pooled(
    evaluation: Mapping[str, Any], names: Sequence[str], clustering: str, key: str
) -> NDArray[np.float64]:
    parts = [evaluation["slices"][name]["clusterings"][clustering][key] for name in names]
    total: NDArray[np.float64] = np.sum(np.asarray(parts, np.float64), axis=0)
    return total


def _at_least(names: Sequence[str], held: Sequence[Mapping[str, Any]], key: str) -> float:
    """A lower bound on the distinct examples: only slices `column=value` of one column are
    disjoint.
    """
    by_column: dict[str, float] = {}
    for name, one in zip(names, held, strict=True):
        column = name.partition("=")[0] if "=" in name else name
        by_column[column] = by_column.get(column, 0.0) + float(one[key])
    return max(by_column.values())


def _measured(
    contrasts: Mapping[str, Sequence[Contrast]],
    margin: float,
    rules: SliceRules,
    *,
    protected: bool,
) -> dict[str, Any]:
    chosen, interval, every = widest(contrasts, alpha=rules.alpha)
    sizes = {"seeds": len(contrasts[chosen]), "clusters": int(every[chosen]["clusters"])}
    found: dict[str, Any] = {
        "clustering": chosen,
        "estimate": float(interval.estimate),
        "lower": float(interval.lower),
        "upper": float(interval.upper),
        "p_harm": p_harm(interval, margin, **sizes),
        "p_worse": p_harm(interval, 0.0, **sizes),
    }
    if protected:
        if accepts(interval, margin, two_sided=False):
            found["verdict"] = ACCEPT
        elif rejects(interval, margin, two_sided=False):
            found["verdict"] = REJECT
        else:
            found["verdict"] = INCONCLUSIVE
    return found


def _tested(entry: Mapping[str, Any]) -> bool:
    return entry["p_harm"] is not None
