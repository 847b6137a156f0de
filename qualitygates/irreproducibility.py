"""Prediction difference: how far two models are apart row by row, however equal their quality.

Reported beside that of two retrainings of the baseline, never gated (Shamir & Lin 2022 use it as a
metric of its own). It is taken over the rows that every Evaluation keeps as a sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Evaluation = Mapping[str, Any]


def prediction_difference(first: Evaluation, second: Evaluation) -> float | None:
    """PD = mean |p1 - p2| / mean((p1 + p2) / 2) over the sampled rows; None without a sample."""
    samples = [one.get("prediction_sample") for one in (first, second)]
    if any(not one for one in samples):
        return None
    p, q = (np.asarray(one, np.float64) for one in samples)
    total = float((p + q).sum()) / 2
    if p.shape != q.shape or total <= 0:
        return None
    return float(np.abs(p - q).sum()) / total


def prediction_differences(
    pairs: Mapping[str, Sequence[tuple[Evaluation, Evaluation]]],
) -> dict[str, dict[str, float | None]]:
    """By evaluation name the mean PD of candidate and baseline of a seed, and of two baselines.

    `pairs` holds (baseline, candidate) Evaluations, one pair a seed.
    """
    return {
        name: {
            "candidate": _mean([prediction_difference(b, c) for b, c in of_form]),
            "baselines": _mean(
                [
                    prediction_difference(one, other)
                    for one, other in itertools.combinations([b for b, _ in of_form], 2)
                ]
            ),
        }
        for name, of_form in pairs.items()
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return float(np.mean(known)) if known else None
