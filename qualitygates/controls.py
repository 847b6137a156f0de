"""The assay's own controls: a null recipe must be accepted, a known-bad one must not.

Without them an INCONCLUSIVE-free record proves little: a gate that accepts everything would look
the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .verdict import ACCEPT, INCONCLUSIVE

Evaluation = Mapping[str, Any]

CONTROLS = ("null", "known_bad")
NOT_RUN = "NOT_RUN"
_CURES = {
    "null": "switch it on, or give predictions of another training an arm null (the baseline's "
    "recipe and seeds, from weights moved by one rounding step) in a folder of its own",
    "known_bad": "set known_bad_margins = 2 in a folder of its own",
}


def not_run(arm: str) -> dict[str, Any]:
    """The outcome of a control that the promise switched off: it shows nothing, now or later."""
    reason = (
        f"the {arm} control is switched off, so nothing shows what this gate can tell apart: "
        f"{_CURES[arm]}"
    )
    return {
        "verdict": NOT_RUN,
        "reasons": [reason],
        "metrics": {},
        "lasting": True,
        "crashed": False,
    }


def judge_controls(null: Mapping[str, Any], known_bad: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the outcomes of both control arms, judged like the candidate, are what a sensitive
    assay gives.
    """
    reasons = []
    if null["verdict"] != ACCEPT:
        reasons.append(
            f"the null control (baseline recipe, perturbed by rounding) is {null['verdict']}, it "
            "must be ACCEPT: " + "; ".join(null["reasons"])
        )
    if known_bad["verdict"] == ACCEPT:
        reasons.append("the known-bad control is ACCEPT: this gate would not notice a real harm")
    # An open interval has accepted nothing. A run that could not be judged, or died of an error
    # that has nothing to do with quality, is no proof that harm would be seen.
    undecided = known_bad["verdict"] in (INCONCLUSIVE, NOT_RUN)
    open_forever = undecided and known_bad["lasting"]
    unjudged = open_forever or known_bad["crashed"]
    if unjudged:
        reasons.append(
            "the known-bad control could not be judged: " + "; ".join(known_bad["reasons"])
        )
    notes = []
    if known_bad["verdict"] == INCONCLUSIVE and not unjudged:
        notes.append("the known-bad control is only INCONCLUSIVE, a sharper gate would REJECT it")
    kept = ("verdict", "reasons", "metrics")
    return {
        "null": {key: null[key] for key in kept},
        "known_bad": {key: known_bad[key] for key in kept},
        "behaved": not reasons,
        "reasons": reasons,
        "notes": notes,
    }


def noise_floor(
    baselines: Mapping[str, Sequence[Evaluation]],
    null_metrics: Mapping[str, Any],
    candidate_metrics: Mapping[str, Any],
) -> dict[str, dict[str, float | None]]:
    """Per metric: sd over baseline seeds, and the paired sd of the null control and of the
    candidate.

    In the units of the margin (relative NE, AUC, log calibration). `baselines` holds the
    Evaluations by form; a sd is None where the arm has no metrics.
    """
    floor: dict[str, dict[str, float | None]] = {}
    for key in sorted(set(null_metrics) | set(candidate_metrics)):
        form, metric = key.split("/")
        floor[key] = {
            "seed_sd": _seed_sd([one["metrics"][metric] for one in baselines[form]], metric),
            "null_paired_sd": _paired_sd(null_metrics.get(key)),
            "candidate_paired_sd": _paired_sd(candidate_metrics.get(key)),
        }
    return floor


def _seed_sd(levels: Sequence[float], metric: str) -> float:
    values = np.asarray(levels, np.float64)
    if metric == "ne":
        values = values / values.mean()
    elif metric == "calibration":
        values = np.log(values)
    return float(values.std(ddof=1))


def _paired_sd(entry: Mapping[str, Any] | None) -> float | None:
    return None if entry is None else math.sqrt(entry["seeds"] * entry["v_seed"])
