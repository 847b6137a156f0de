"""Two Evaluations of the same examples -> what the candidate loses, and each cluster's share in it.

All contrasts are positive when the candidate is worse (calibration: when it predicts more). The
influence values psi of a contrast sum to 0; U/(U-1) times the sum of their squares is its
cluster-robust variance over examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import RecordError

Floats = NDArray[np.float64]

METRICS = ("ne", "auc", "gauc", "calibration")


@dataclass(frozen=True)
class Contrast:
    """One seed's candidate-minus-baseline estimate, its influence values [U] and the clusters that
    carry weight.
    """

    estimate: float
    psi: Floats
    clusters: int


def contrast(
    baseline: Mapping[str, Any], candidate: Mapping[str, Any], *, metric: str, clustering: str
) -> Contrast | None:
    """Contrast of two Evaluations of the same examples, for one clustering.

    ne: relative NE, R - 1 with R = sum w·loss_C / sum w·loss_B; auc, gauc: baseline minus
    candidate; calibration: log(sum w·p_C / sum w·p_B). None when the influence is unknown for this
    clustering (GAUC whose groups span clusters). Raises RecordError when the two do not cover the
    same examples or hold no finite predictions.
    """
    if metric not in METRICS:
        raise ValueError(f"metric {metric!r} is unknown; known: {', '.join(METRICS)}")
    base, cand = _clustering(baseline, clustering), _clustering(candidate, clustering)
    _same_examples(base, cand, where=f"clustering {clustering!r}")
    clusters = int(np.count_nonzero(_array(base, "weight")))
    if metric == "ne":
        return _relative_loss(base, cand, clusters=clusters, where="baseline")
    if metric == "calibration":
        pb, pc = _array(base, "prediction"), _array(cand, "prediction")
        estimate = float(np.log(pc.sum() / pb.sum()))
        return Contrast(estimate, pc / pc.sum() - pb / pb.sum(), clusters)
    levels = baseline["metrics"][metric], candidate["metrics"][metric]
    psis = base[f"{metric}_psi"], cand[f"{metric}_psi"]
    if None in levels or any(psi is None for psi in psis):
        return None
    drop = np.asarray(psis[0], np.float64) - np.asarray(psis[1], np.float64)
    return Contrast(float(levels[0]) - float(levels[1]), drop, clusters)


def slice_contrast(
    baseline: Mapping[str, Any], candidate: Mapping[str, Any], *, name: str, clustering: str
) -> Contrast:
    """Relative NE contrast inside one slice; raises RecordError as `contrast` does, or when the
    slice is unknown.
    """
    entries = []
    for evaluation in (baseline, candidate):
        _require_finite(evaluation)
        if name not in evaluation["slices"]:
            known = ", ".join(sorted(evaluation["slices"])) or "none"
            raise RecordError(f"slice {name!r} is not in the evaluation; it holds: {known}")
        entries.append(evaluation["slices"][name]["clusterings"][clustering])
    base, cand = entries
    where = f"slice {name!r}"
    _same_examples(base, cand, where=where)
    return _relative_loss(base, cand, clusters=int(base["clusters_hit"]), where=where)


def _relative_loss(
    base: Mapping[str, Any], cand: Mapping[str, Any], *, clusters: int, where: str
) -> Contrast:
    return relative_loss(_array(base, "loss"), _array(cand, "loss"), clusters=clusters, where=where)


def relative_loss(lb: Floats, lc: Floats, *, clusters: int, where: str) -> Contrast:
    """R - 1 with R = sum lC / sum lB from summed losses [U] of the same examples in both arms.

    Raises RecordError, which starts with `where`, when the baseline's loss is 0.
    """
    total = float(lb.sum())
    if total <= 0:
        raise RecordError(
            f"{where}: the baseline's summed log-loss is {total:g}, so a relative change is "
            "undefined; "
            "the labels can be read off its inputs"
        )
    ratio = float(lc.sum()) / total
    return Contrast(ratio - 1.0, (lc - ratio * lb) / total, clusters)


def _array(entry: Mapping[str, Any], key: str) -> Floats:
    return np.asarray(entry[key], np.float64)


def _require_finite(evaluation: Mapping[str, Any]) -> None:
    if not evaluation["predictions_finite"]:
        raise RecordError(
            "evaluation with non-finite predictions: it has no metrics to compare; it is a "
            "failed run"
        )


def _clustering(evaluation: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    _require_finite(evaluation)
    if name not in evaluation["clusterings"]:
        known = ", ".join(sorted(evaluation["clusterings"]))
        raise RecordError(f"clustering {name!r} is not in the evaluation; it holds: {known}")
    entry: Mapping[str, Any] = evaluation["clusterings"][name]
    return entry


def _same_examples(base: Mapping[str, Any], cand: Mapping[str, Any], *, where: str) -> None:
    for key in ("weight", "label"):
        ours, theirs = _array(base, key), _array(cand, key)
        if ours.shape != theirs.shape:
            raise RecordError(
                f"{where}: {ours.size} clusters in the baseline, {theirs.size} in the candidate; "
                "both arms must be evaluated on the same examples"
            )
        differing = int(np.count_nonzero(ours != theirs))
        if differing:
            raise RecordError(
                f"{where}: the sums of {key} differ in {differing} of {ours.size} clusters; "
                "both arms must be evaluated on the same examples, labels and weights"
            )
