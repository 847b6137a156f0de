"""Predictions -> additive sums per cluster -> NE, log-loss, calibration, AUC and GAUC.

Everything is float64 and starts from logits. A bf16 sigmoid saturates at 1.0 near a logit of 6, and
a bf16 batch sum is rounded to 8 bits, so neither probabilities nor sums of a lower precision are
accepted. Sums of two sets of clusters merge by addition; ranks do not, so AUC keeps the influence
value of every cluster instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from .errors import DataError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SAMPLED_ROWS = 1000


def evaluate(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    weights: ArrayLike,
    clusters: Mapping[str, ArrayLike],
    groups: ArrayLike | None,
    slices: Mapping[str, ArrayLike],
) -> dict[str, Any]:
    """Reduce one model's predictions on N examples to the Evaluation that a run record stores.

    logits: float32 or float64 [N]; labels: [N] in [0, 1]; weights: [N] >= 0; clusters: name -> int
    [N], dense ids 0..U-1; groups: int [N] (the users of GAUC) or None; slices: name -> bool [N]. A
    fractional label counts as weight y of a positive and 1 - y of a negative. Non-finite logits are
    a failed run, not an error: `predictions_finite` is then False and there are no metrics. Raises
    DataError for data that cannot carry a gate.
    """
    z, y, w = _checked_rows(logits, labels, weights)
    ids = _checked_clusters(clusters, len(z))
    group_ids = None if groups is None else _ids("groups", groups, len(z))
    masks = {name: _mask(name, mask, len(z)) for name, mask in slices.items()}
    counted = w > 0
    result: dict[str, Any] = {
        "examples": len(z),
        "weight": float(w.sum()),
        "positives": float(np.count_nonzero(counted & (y > 0.5))),
        "negatives": float(np.count_nonzero(counted & (y <= 0.5))),
        "distinct_predictions": int(np.unique(z[counted]).size),
        "predictions_finite": False,
        "metrics": None,
        "clusterings": {},
        "slices": {},
    }
    sums = _example_sums(z, y, w)
    if sums is None:
        return result
    area, auc_psi = auc(z, positive=w * y, negative=w * (1.0 - y))
    grouped = None if group_ids is None else _Gauc(z, w * y, w * (1.0 - y), group_ids)
    totals = {key: float(values.sum()) for key, values in sums.items()}
    result["predictions_finite"] = True
    result["prediction_sample"] = sampled_predictions(z)
    result["metrics"] = {
        "ne": normalized_entropy(totals["loss"], weight=totals["weight"], label=totals["label"]),
        "logloss": totals["loss"] / totals["weight"],
        "calibration": totals["prediction"] / totals["label"],
        "auc": area,
        "gauc": None if grouped is None else grouped.value,
    }
    for name, cluster in ids.items():
        entry = _cluster_sums(sums, cluster)
        entry["auc_psi"] = np.bincount(cluster, auc_psi, minlength=_size(cluster)).tolist()
        entry["gauc_psi"] = None if grouped is None else grouped.cluster_psi(cluster)
        result["clusterings"][name] = entry
    for name, mask in masks.items():
        result["slices"][name] = _slice_entry(sums, mask, ids=ids, labels=y, counted=counted)
    return result


def sampled_predictions(logits: Floats) -> list[float]:
    """The probabilities of at most 1,000 evenly spread rows, the same rows for every model [N]."""
    rows = np.linspace(0, len(logits) - 1, min(SAMPLED_ROWS, len(logits))).round().astype(np.int64)
    sample: list[float] = expit(logits[rows]).tolist()
    return sample


def recalibrated(logits: NDArray[Any], rate: float) -> NDArray[Any]:
    """Logits [N] of a model that trained on a share `rate` of the negatives, for all of them.

    Adds log c to each logit, which turns p into p / (p + (1 - p) / c) (He et al. 2014, section
    6.3); float64, or the logits themselves when `rate` is 1. Raises DataError outside (0, 1].
    """
    if not 0.0 < rate <= 1.0:
        raise DataError(
            f"negative sampling rate {rate!r}; allowed: the share of the negatives that training "
            "kept, above 0, at most 1"
        )
    return logits if rate == 1.0 else np.asarray(logits, np.float64) + math.log(rate)


def normalized_entropy(loss: float, *, weight: float, label: float) -> float:
    """NE (He et al. 2014): log-loss over the entropy of the base rate, from the sums of w·loss, w
    and w·y.
    """
    rate = label / weight
    if not 0.0 < rate < 1.0:
        raise DataError(
            f"normalized entropy: the base rate is {rate:g}, so its entropy is 0 and NE is "
            "undefined; "
            "evaluate on examples of both classes"
        )
    entropy = -(rate * math.log(rate) + (1.0 - rate) * math.log1p(-rate))
    return loss / weight / entropy


def auc(scores: ArrayLike, *, positive: ArrayLike, negative: ArrayLike) -> tuple[float, Floats]:
    """Weighted AUC with mid-rank ties, and each example's influence value on it [N] (DeLong 1988
    placements).

    positive and negative are the weights [N] with which an example counts for either class; the
    influence values sum to 0. Raises DataError when a class has no weight.
    """
    pos, neg = np.asarray(positive, np.float64), np.asarray(negative, np.float64)
    n1, n0 = float(pos.sum()), float(neg.sum())
    if n1 <= 0 or n0 <= 0:
        raise DataError(
            f"AUC: the weight of positives is {n1:g} and of negatives {n0:g}; both must be above 0"
        )
    _, tie = np.unique(np.asarray(scores), return_inverse=True)
    tied_pos, tied_neg = np.bincount(tie, pos), np.bincount(tie, neg)
    # Mid-rank distribution functions of the scores of either class: a tie counts half.
    below_neg = (np.cumsum(tied_neg) - tied_neg / 2) / n0
    below_pos = (np.cumsum(tied_pos) - tied_pos / 2) / n1
    area = float((tied_pos * below_neg).sum() / n1)
    psi = pos * (below_neg[tie] - area) / n1 + neg * (1.0 - below_pos[tie] - area) / n0
    return area, psi


class _Gauc:
    """Impression-weighted mean of the AUC of every group that has both classes."""

    def __init__(self, scores: Floats, positive: Floats, negative: Floats, groups: Ints) -> None:
        dense = groups if _is_dense(groups) else np.unique(groups, return_inverse=True)[1]
        order = _sorted_within(dense, scores)
        self._order, self._group = order, dense[order]
        score, pos, neg = scores[order], positive[order], negative[order]
        self._starts = np.flatnonzero(np.diff(self._group, prepend=-1))
        # A run is a set of equal scores inside one group.
        new_run = np.diff(self._group, prepend=-1) != 0
        new_run[1:] |= np.diff(score) != 0
        run = np.cumsum(new_run) - 1
        run_group = self._group[new_run]
        run_pos, run_neg = np.bincount(run, pos), np.bincount(run, neg)
        n1, n0 = np.bincount(self._group, pos), np.bincount(self._group, neg)
        negatives_of_earlier_groups = (np.cumsum(n0) - n0)[run_group]
        below = np.cumsum(run_neg) - run_neg / 2 - negatives_of_earlier_groups
        pairs = np.bincount(run_group, run_pos * below)
        both = (n1 > 0) & (n0 > 0)
        mass = np.where(both, n1 + n0, 0.0)
        area = np.divide(pairs, n1 * n0, out=np.zeros_like(pairs), where=both)
        total = float(mass.sum())
        self.value: float | None = float((mass * area).sum() / total) if total > 0 else None
        self._psi = None if self.value is None else mass * (area - self.value) / total

    def cluster_psi(self, cluster: Ints) -> list[float] | None:
        """Influence per cluster [U]; None when a group spans clusters, for then groups are not the
        sampled units.
        """
        if self._psi is None:
            return None
        ordered = cluster[self._order]
        lowest = np.minimum.reduceat(ordered, self._starts)
        highest = np.maximum.reduceat(ordered, self._starts)
        if not np.array_equal(lowest, highest):
            return None
        values: list[float] = np.bincount(lowest, self._psi, minlength=_size(cluster)).tolist()
        return values


def _sorted_within(groups: Ints, scores: Floats) -> Ints:
    """What np.lexsort((scores, groups)) gives, with one slow sort in place of two.

    A row's place among all scores makes every key different, so plain sorting of int64 keeps ties
    in order; a key stays below 2^63 up to 3 billion rows.
    """
    by_score = np.argsort(scores, kind="stable")
    place = np.empty(len(scores), np.int64)
    place[by_score] = np.arange(len(scores))
    place += groups * len(scores)
    place.sort()
    order: Ints = by_score[place % len(scores)]
    return order


def _example_sums(z: Floats, y: Floats, w: Floats) -> dict[str, Floats] | None:
    """The additive quantities of every example, or None when they cannot be computed from these
    logits.
    """
    if not np.isfinite(z).all():
        return None
    prediction = expit(z)
    with np.errstate(over="ignore"):
        loss = w * (np.logaddexp(0.0, z) - y * z)
        usable = bool(np.isfinite(loss.sum())) and float((w * prediction).sum()) > 0.0
    # Predictions that are all exactly 0 have no calibration: the same kind of broken run as a NaN.
    if not usable:
        return None
    return {"weight": w, "label": w * y, "prediction": w * prediction, "loss": loss}


def _cluster_sums(sums: Mapping[str, Floats], cluster: Ints) -> dict[str, Any]:
    size = _size(cluster)
    entry: dict[str, Any] = {"clusters": size}
    for key, values in sums.items():
        entry[key] = np.bincount(cluster, values, minlength=size).tolist()
    return entry


def _slice_entry(
    sums: Mapping[str, Floats],
    mask: NDArray[np.bool_],
    *,
    ids: Mapping[str, Ints],
    labels: Floats,
    counted: NDArray[np.bool_],
) -> dict[str, Any]:
    rows = np.flatnonzero(mask)
    inside, positive = counted[rows], labels[rows] > 0.5
    taken = {key: values[rows] for key, values in sums.items()}
    clusterings: dict[str, Any] = {}
    for name, cluster in ids.items():
        size, of_rows = _size(cluster), cluster[rows]
        hit = np.bincount(of_rows[inside], minlength=size)
        entry: dict[str, Any] = {"clusters_hit": int(np.count_nonzero(hit))}
        for key, values in taken.items():
            entry[key] = np.bincount(of_rows, values, minlength=size).tolist()
        clusterings[name] = entry
    return {
        "positives": float(np.count_nonzero(inside & positive)),
        "negatives": float(np.count_nonzero(inside & ~positive)),
        "clusterings": clusterings,
    }


def _size(cluster: Ints) -> int:
    return int(cluster.max()) + 1


def _checked_rows(
    logits: ArrayLike, labels: ArrayLike, weights: ArrayLike
) -> tuple[Floats, Floats, Floats]:
    raw = np.asarray(logits)
    if raw.ndim != 1 or raw.dtype not in (np.float32, np.float64):
        raise DataError(
            f"logits: shape {raw.shape} of {raw.dtype}; metrics need a vector [N] of float32 or "
            "float64, "
            "cast before the last rounding, not after it"
        )
    if raw.size == 0:
        raise DataError("evaluation set: it has 0 rows; metrics need examples of both classes")
    y, w = np.asarray(labels, np.float64), np.asarray(weights, np.float64)
    for name, values in (("labels", y), ("weights", w)):
        if values.shape != raw.shape:
            raise DataError(
                f"{name}: shape {values.shape}, but the logits have shape {raw.shape}; one value "
                "per example"
            )
    wrong = int(np.count_nonzero(~((y >= 0) & (y <= 1))))
    if wrong:
        raise DataError(
            f"labels: {wrong} of {y.size} rows are NaN or outside [0, 1]; "
            "a label is 0, 1 or a click share between them"
        )
    wrong = int(np.count_nonzero(~(np.isfinite(w) & (w >= 0))))
    if wrong:
        raise DataError(
            f"weights: {wrong} of {w.size} rows are negative or not finite; weights are finite "
            "and >= 0"
        )
    if not w.any():
        raise DataError(f"weights: all {w.size} rows have weight 0; nothing would be measured")
    positive, negative = float((w * y).sum()), float((w * (1 - y)).sum())
    if positive <= 0 or negative <= 0:
        only = "negatives" if positive <= 0 else "positives"
        raise DataError(
            f"labels: the {int(np.count_nonzero(w))} rows with weight are all {only}, so NE and "
            "AUC are undefined; "
            "evaluate on a window that holds both classes"
        )
    return raw.astype(np.float64), y, w


def _checked_clusters(clusters: Mapping[str, ArrayLike], rows: int) -> dict[str, Ints]:
    if not clusters:
        raise DataError(
            "clusters: none given; name at least one clustering (users, days, or one id per row)"
        )
    checked = {}
    for name, values in clusters.items():
        ids = _ids(f"clusters[{name!r}]", values, rows)
        if not _is_dense(ids):
            distinct = int(np.unique(ids).size)
            raise DataError(
                f"clusters[{name!r}]: ids run from {ids.min()} to {ids.max()} with {distinct} "
                "distinct values; "
                "they must be dense, 0..U-1 (numpy.unique(..., return_inverse=True) gives that)"
            )
        checked[name] = ids
    return checked


def _is_dense(ids: Ints) -> bool:
    """Whether the ids are 0 .. U-1, each of them present."""
    low, high = int(ids.min()), int(ids.max())
    return low == 0 and high < len(ids) and bool(np.bincount(ids).all())


def _ids(name: str, values: ArrayLike, rows: int) -> Ints:
    ids = np.asarray(values)
    if ids.shape != (rows,) or not np.issubdtype(ids.dtype, np.integer):
        raise DataError(
            f"{name}: shape {ids.shape} of {ids.dtype}; needs an integer id per example, shape "
            f"({rows},)"
        )
    return ids.astype(np.int64)


def _mask(name: str, values: ArrayLike, rows: int) -> NDArray[np.bool_]:
    mask = np.asarray(values)
    if mask.shape != (rows,) or mask.dtype != np.bool_:
        raise DataError(
            f"slices[{name!r}]: shape {mask.shape} of {mask.dtype}; needs a bool per example, "
            f"shape ({rows},)"
        )
    return mask
