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

from .sequence import should_abort
from .verdict import ACCEPT, INCONCLUSIVE, REJECT

Run = Mapping[str, Any]
Floats = NDArray[np.float64]
Series = tuple[Sequence[float | None] | None, Sequence[float | None] | None]

SPIKE_MADS = 6.0
HISTORY_BLOCKS = 20
SOFT_LEVEL, SOFT_EXCESS = 0.01, 5
ABOVE_START_SHARE = 0.05


def judge_stability(
    pairs: Sequence[tuple[Run, Run]],
    *,
    beyond: Sequence[tuple[Run, Run]] = (),
    margin: float | None = None,
) -> dict[str, Any]:
    """Stability of (baseline, candidate) run pairs: {"verdict", "hard", "soft",
    "baseline_failures", "statement"}.

    A hard failure of a candidate is REJECT, one of a baseline INCONCLUSIVE (the pair is invalid),
    and neither is dropped: `beyond` holds pairs of later seeds, whose hard failures count although
    the look does not use them. With the relative NE `margin`, a training loss that is worse than
    the paired baseline's by more than ten margins (`sequence.should_abort`) is a hard failure too.
    """
    hard: list[str] = []
    invalid: list[str] = []
    for baseline, candidate in (*pairs, *beyond):
        invalid += [_named(baseline, text) for text in hard_failures(baseline)]
        failures = hard_failures(candidate, baseline=baseline)
        if margin is not None and not (failures or hard_failures(baseline)):
            failures = _far_worse(baseline, candidate, margin)
        hard += [_named(candidate, text) for text in failures]
    counted = [pair for pair in pairs if not (_crashed(pair[0]) or _crashed(pair[1]))]
    soft = [
        _compare_spikes("loss spikes", [_series(pair, "loss") for pair in counted]),
        _compare_spikes("grad_norm spikes", [_series(pair, "grad_norm") for pair in counted]),
        *_compare_skipped(counted),
        *_compare_counters(counted),
    ]
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


def _far_worse(baseline: Run, candidate: Run, margin: float) -> list[str]:
    ours, theirs = candidate["training"]["loss"], baseline["training"]["loss"]
    found = should_abort(theirs, ours, margin=margin, steps=len(theirs))
    if found is None:
        return []
    return [
        f"training loss worse than the baseline's by {found.gap:.2%} on average at step "
        f"{found.step}, surely above {found.lower:.2%} (allowed: ten NE margins, {found.limit:.2%})"
    ]


def _series(pair: tuple[Run, Run], key: str) -> Series:
    return pair[0]["training"][key], pair[1]["training"][key]


def _compare_spikes(name: str, series: Sequence[Series]) -> dict[str, Any]:
    ours = sum(spikes(candidate or ()) for _, candidate in series)
    theirs = sum(spikes(baseline or ()) for baseline, _ in series)
    return _compare_counts(name, ours, theirs)


def _compare_counts(name: str, ours: int, theirs: int) -> dict[str, Any]:
    """Under equal rates over equal steps `ours` of the total is Binomial(1/2)."""
    total = ours + theirs
    p_value = float(binomtest(ours, total, 0.5, alternative="greater").pvalue) if total else 1.0
    return {
        "counter": name,
        "candidate": ours,
        "baseline": theirs,
        "p_value": p_value,
        "flagged": p_value < SOFT_LEVEL and ours >= theirs + SOFT_EXCESS,
    }


def _compare_skipped(pairs: Sequence[tuple[Run, Run]]) -> list[dict[str, Any]]:
    """Steps that a loss scaler or a guard skipped, where the records count them."""
    counted = [[run["training"].get("skipped_steps") for run in pair] for pair in pairs]
    if not any(isinstance(one, int) for pair in counted for one in pair):
        return []
    theirs, ours = (sum(pair[arm] or 0 for pair in counted) for arm in (0, 1))
    return [_compare_counts("skipped steps", ours, theirs)]


def _compare_counters(pairs: Sequence[tuple[Run, Run]]) -> list[dict[str, Any]]:
    """Spikes and mean level of each numerics counter that was sampled in training.

    One that only the candidate can have (a BF16 baseline saturates nothing) is listed and never
    flagged: there is nothing to compare it with.
    """
    names = sorted({name for pair in pairs for run in pair for name in _counters(run)})
    found = []
    for name in names:
        series = [(_counters(b).get(name), _counters(c).get(name)) for b, c in pairs]
        entry = _compare_spikes(f"{name} spikes", series)
        if all(baseline is None for baseline, _ in series):
            entry |= {"baseline": None, "p_value": 1.0, "flagged": False}
        entry["baseline_level"] = _level([baseline for baseline, _ in series])
        entry["candidate_level"] = _level([candidate for _, candidate in series])
        found.append(entry)
    return found


def _counters(run: Run) -> Mapping[str, Sequence[float | None]]:
    return run["training"].get("counters") or {}


def _level(series: Sequence[Sequence[float | None] | None]) -> float | None:
    values = [value for one in series for value in one or () if value is not None]
    finite = [value for value in values if np.isfinite(value)]
    return float(np.mean(finite)) if finite else None


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
