"""Slices named before the run: protected ones are co-primary, the others are tested for harm.

Non-inferiority of every slice at once would need no correction but has no power (0.002 for 20
slices of a neutral recipe); hence few protected slices at a wider margin, and for the rest a test
of harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import RecordError
from .influence import slice_contrast
from .verdict import ACCEPT, INCONCLUSIVE, REJECT, Interval, accepts, p_harm, rejects, widest

Pairs = Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]

PROTECTED_POSITIVES = 1000
MIN_POSITIVES = 200
MIN_CLUSTERS = 50
HARM_FACTOR = 3.0


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
    others; NOT_TESTABLE below 200 examples of either class or 50 clusters. Holm's family is all
    tested slices of all forms. Raises RecordError when a protected slice is not in the evaluations.
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
        entries += [_entry(form, name, pairs, rules) for name in names]
    harm = [entry for entry in entries if entry["class"] == "other" and _tested(entry)]
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
    rarer = min(held["positives"], held["negatives"])
    entry: dict[str, Any] = {
        "name": name,
        "form": form,
        "class": "protected" if protected else "other",
        "positives": held["positives"],
        "negatives": held["negatives"],
        "clusters": hit,
        "margin": rules.margin * (rules.factor if protected else HARM_FACTOR),
        "estimate": None,
        "lower": None,
        "upper": None,
        "p_harm": None,
        "p_worse": None,
        "warn": False,
        "verdict": "NOT_TESTABLE",
        "reason": "",
    }
    least = PROTECTED_POSITIVES if protected else MIN_POSITIVES
    if rarer < least or hit < MIN_CLUSTERS:
        entry["reason"] = (
            f"{held['positives']:.0f} positives, {held['negatives']:.0f} negatives in {hit} "
            "clusters; "
            f"needs {least} of either class and {MIN_CLUSTERS} clusters"
        )
        if protected:
            entry["verdict"] = INCONCLUSIVE
        return entry
    chosen, interval, _ = widest(
        {
            clustering: [slice_contrast(b, c, name=name, clustering=clustering) for b, c in pairs]
            for clustering in held["clusterings"]
        },
        alpha=rules.alpha,
    )
    return (
        entry | {"clustering": chosen} | _measured(interval, entry["margin"], protected=protected)
    )


def _measured(interval: Interval, margin: float, *, protected: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "estimate": float(interval.estimate),
        "lower": float(interval.lower),
        "upper": float(interval.upper),
        "p_harm": p_harm(interval, margin),
        "p_worse": p_harm(interval, 0.0),
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
