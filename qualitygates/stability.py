"""Training health run by run: hard failures are not averaged away, spikes are counted in pairs.

A few seeds cannot show that a recipe is stable, only that no failure was seen: zero failures in S
runs bound the failure rate below 1 - 0.05^(1/S), which is 45 % for S = 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from .verdict import ACCEPT, INCONCLUSIVE, REJECT

Run = Mapping[str, Any]
Floats = NDArray[np.float64]

SPIKE_MADS = 6.0
HISTORY_BLOCKS = 20
SOFT_LEVEL, SOFT_EXCESS = 0.01, 5
ABOVE_START_SHARE = 0.05


def judge_stability(
    pairs: Sequence[tuple[Run, Run]], *, beyond: Sequence[tuple[Run, Run]] = ()
) -> dict[str, Any]:
    """Stability of (baseline, candidate) run pairs: {"verdict", "hard", "soft",
    "baseline_failures", "statement"}.

    A hard failure of a candidate is REJECT, one of a baseline INCONCLUSIVE (the pair is invalid),
    and neither is dropped: `beyond` holds pairs of later seeds, whose hard failures count although
    the look does not use them.
    """
    hard: list[str] = []
    invalid: list[str] = []
    for baseline, candidate in (*pairs, *beyond):
        invalid += [_named(baseline, text) for text in hard_failures(baseline)]
        hard += [_named(candidate, text) for text in hard_failures(candidate, baseline=baseline)]
    counted = [pair for pair in pairs if not (_crashed(pair[0]) or _crashed(pair[1]))]
    soft = [_compare_spikes(counted, key=key) for key in ("loss", "grad_norm")]
    if invalid:
        verdict = INCONCLUSIVE
    elif hard or any(entry["flagged"] for entry in soft):
        verdict = REJECT
    else:
        verdict = ACCEPT
    seen = len(pairs) + len(beyond)
    bound = 1.0 - 0.05 ** (1.0 / seen) if seen else 1.0
    clean = (
        f"no hard failure seen in {seen} runs, which bounds the failure rate only below {bound:.0%}"
    )
    return {
        "verdict": verdict,
        "hard": hard,
        "soft": soft,
        "baseline_failures": invalid,
        "statement": f"{len(hard)} hard failures in {seen} runs" if hard else clean,
    }


def hard_failures(run: Run, *, baseline: Run | None = None) -> list[str]:
    """What is unrecoverably wrong with one run, a sentence each; `baseline` enables the rule on a
    final NE above 1.
    """
    training = run["training"]
    found: list[str] = []
    if _crashed(run):
        found.append(f"crashed: {training['crashed']}")
    for event in training["nonfinite"][:1]:
        more = len(training["nonfinite"]) - 1
        also = f" (and {more} more)" if more else ""
        found.append(f"non-finite {event['where']} at step {event['step']}{also}")
    for key in ("loss", "grad_norm"):
        missing = [step for step, value in enumerate(training[key]) if not _finite(value)]
        if missing and not training["nonfinite"]:
            found.append(f"non-finite {key} at index {missing[0]} of the recorded steps")
    for form, evaluation in (run["evaluations"] or {}).items():
        if not evaluation["predictions_finite"]:
            found.append(f"non-finite predictions in the {form} evaluation")
        elif baseline is not None:
            found += _lost_everything(form, evaluation, baseline)
    if not found and (share := above_start(training["loss"])) > ABOVE_START_SHARE:
        found.append(
            f"training loss above its starting level in {share:.0%} of the last half "
            f"(allowed: {ABOVE_START_SHARE:.0%})"
        )
    return found


def above_start(loss: Sequence[float]) -> float:
    """Share of the last half of training whose running median lies above the first block's mean.

    The median runs over a block of 1/20 of the steps, at most 10, and the mean is raised by two
    standard errors of the difference of two blocks: a model that starts at the base rate of a
    weakly learnable label stays near its starting level and crosses it by chance. The batch noise
    is the MAD of successive differences, which no trend inflates.
    """
    values = np.asarray(loss, np.float64)
    if values.size < 4:
        return 0.0
    block = max(1, min(10, values.size // 20))
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(values, block), axis=-1)
    last = smooth[-(values.size // 2) :]
    noise = 1.4826 * np.median(np.abs(np.diff(values))) / np.sqrt(2)
    allowed = values[:block].mean() + 2 * noise * np.sqrt(2 / block)
    return float(np.mean(last > allowed))


def spikes(values: Sequence[float | None]) -> int:
    """Number of spikes: blocks of 1 % of the steps whose mean exceeds the running median by 6 MAD.

    Median and MAD come from the 20 blocks before; adjacent blocks count as one spike.
    """
    finite = np.asarray([value for value in values if _finite(value)], np.float64)
    size = max(1, finite.size // 100)
    count = finite.size // size
    blocks = finite[: count * size].reshape(count, size).mean(axis=1)
    if count <= HISTORY_BLOCKS:
        return 0
    history = np.lib.stride_tricks.sliding_window_view(blocks, HISTORY_BLOCKS)[:-1]
    median = np.median(history, axis=1)
    mad = np.median(np.abs(history - median[:, None]), axis=1)
    # A constant history has MAD 0; a relative floor keeps the last bits of a float from being
    # spikes.
    high = blocks[HISTORY_BLOCKS:] > median + SPIKE_MADS * np.maximum(mad, 1e-6 * np.abs(median))
    return int(np.count_nonzero(high & ~np.concatenate(([False], high[:-1]))))


def _compare_spikes(pairs: Sequence[tuple[Run, Run]], *, key: str) -> dict[str, Any]:
    ours = sum(spikes(candidate["training"][key]) for _, candidate in pairs)
    theirs = sum(spikes(baseline["training"][key]) for baseline, _ in pairs)
    total = ours + theirs
    p_value = float(binomtest(ours, total, 0.5, alternative="greater").pvalue) if total else 1.0
    return {
        "counter": f"{key} spikes",
        "candidate": ours,
        "baseline": theirs,
        "p_value": p_value,
        "flagged": p_value < SOFT_LEVEL and ours >= theirs + SOFT_EXCESS,
    }


def _lost_everything(form: str, evaluation: Mapping[str, Any], baseline: Run) -> list[str]:
    reference = (baseline["evaluations"] or {}).get(form)
    if reference is None or not reference["predictions_finite"]:
        return []
    ours, theirs = evaluation["metrics"]["ne"], reference["metrics"]["ne"]
    if ours < 1.0 or theirs >= 1.0:
        return []
    return [
        f"final NE {ours:.4f} in the {form} evaluation, no better than the base rate (baseline "
        f"{theirs:.4f})"
    ]


def _crashed(run: Run) -> bool:
    return run["training"]["crashed"] is not None


def _finite(value: float | None) -> bool:
    return value is not None and bool(np.isfinite(value))


def _named(run: Run, text: str) -> str:
    return f"{run['arm']}, seed {run['seed']}: {text}"
