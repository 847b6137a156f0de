"""Is the candidate faster? Block times and a promise -> evidence ladder -> verdict; pure numbers.

Of every rung the log of the time ratio candidate / BF16 is averaged over pairs of interleaved
blocks, with a one-sided t bound. A rung that was not run is missing; nothing is inferred from
another rung.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit

from ..errors import ExperimentError, RecordError
from ..slices import holm
from ..verdict import ACCEPT, INCONCLUSIVE, REJECT
from .job import INFORMATION, MISSING, judge_job, utilization
from .promise import SpeedPromise, read_speed_promise
from .record import ARMS, CONDITIONS, RUNGS, Record, check_record, of_rung

ALPHA: Final = 0.05
# Between the arms, of the mean of each condition.
TOLERANCE: Final = 0.03
NOT_REQUIRED, NOT_MEASURABLE = "not_required", "not_measurable"
_ABSOLUTE_ZERO: Final = -273.15

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LogRatio:
    """Mean log(candidate / baseline) over K pairs of blocks, its standard error and dof K - 1."""

    mean: Floats
    error: Floats
    dof: int

    @property
    def lower(self) -> Floats:
        """The one-sided lower bound of the log ratio at ALPHA."""
        return np.asarray(self.mean - stdtrit(self.dof, 1 - ALPHA) * self.error)

    @property
    def upper(self) -> Floats:
        """The one-sided upper bound of the log ratio at ALPHA."""
        return np.asarray(self.mean + stdtrit(self.dof, 1 - ALPHA) * self.error)

    def p_slower(self, limit: float) -> float:
        """One-sided p-value of the hypothesis that the time ratio is at most `limit`."""
        distance, error = float(self.mean) - math.log(limit), float(self.error)
        if error == 0:
            return 0.0 if distance > 0 else 1.0
        return float(stdtr(self.dof, -distance / error))


def log_ratio(baseline: ArrayLike, candidate: ArrayLike) -> LogRatio:
    """From block times [..., K] of both arms, pair by pair; every field has the leading shape."""
    y = np.log(np.asarray(candidate, np.float64)) - np.log(np.asarray(baseline, np.float64))
    pairs = y.shape[-1]
    error = y.std(axis=-1, ddof=1) / math.sqrt(pairs)
    return LogRatio(np.asarray(y.mean(axis=-1)), np.asarray(error), pairs - 1)


def is_faster(ratio: LogRatio, eps: float) -> NDArray[np.bool_]:
    """Where the time ratio is shown to be below 1 - eps."""
    return np.asarray(ratio.upper < math.log1p(-eps))


def judge_speed(promised: Mapping[str, Any], record: Mapping[str, Any] | None) -> dict[str, Any]:
    """The verdict's "speed" from gate["speed"] and the speed record of the folder, or None.

    Returns {"status", "reason", "rungs", ...}: status is ACCEPT, REJECT or INCONCLUSIVE,
    not_required (with "measured", what the timings say all the same) or not_measurable. Raises
    ExperimentError for a promise, RecordError for a record, that is not as it must be.
    """
    promise = read_speed_promise(promised)
    if record is None:
        found = _without_timings()
    else:
        check_record(record)
        found = _judge(promise, record)
    if promise.required:
        return found
    reason = "this gate promises quality only"
    if record is not None:
        reason += f"; its timings say {found['status'].replace('_', ' ')}: {found['reason']}"
    return {**found, "status": NOT_REQUIRED, "reason": reason, "measured": found["status"]}


def _without_timings() -> dict[str, Any]:
    reason = (
        "not measurable here: there are no timings, and emulated products say nothing about time; "
        "run `python -m qualitygates speed GATE.toml` on the target hardware"
    )
    rungs = [_missing(rung) for rung in RUNGS]
    return {"status": NOT_MEASURABLE, "reason": reason, "rungs": rungs}


def _missing(rung: str) -> dict[str, Any]:
    return {"rung": rung, "status": MISSING, "reason": "not run", "entries": []}


def check_belongs(
    gate: Mapping[str, Any],
    record: Mapping[str, Any] | None,
    *,
    layers: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Raise RecordError when the timings are of another recipe, model, batch size or plan than the
    gate's, and ExperimentError when they were taken under another promise.

    layers: the plan that was trained, as run records hold it; empty where it was not recorded.
    """
    if record is None:
        return
    check_record(record)
    inputs, experiment = record["inputs"], gate.get("experiment") or {}
    promise = read_speed_promise(gate["speed"])
    batch_size = promise.batch_size or experiment.get("train", {}).get("batch_size")
    wanted = {
        "recipe_hashes": gate.get("recipe_hashes"),
        "workload": experiment.get("workload"),
        "options": experiment.get("options"),
        "batch_size": batch_size,
        "compile": promise.compile,
    }
    for key, value in wanted.items():
        if value is not None and inputs.get(key) != value:
            raise RecordError(
                f"speed.json: {key} is {inputs.get(key)!r}, the gate promised {value!r}; measure "
                "again with `python -m qualitygates speed`, or move speed.json out of the folder"
            )
    trained = {one["name"] for one in layers if _quantized(one)}
    if trained and trained != set(record["quantized_layers"]):
        different = sorted(trained ^ set(record["quantized_layers"]))
        raise RecordError(
            f"speed.json: {_names(different)}: quantized in the runs or in the timings, not in "
            "both; quality and speed are those of one plan"
        )
    kept = record.get("promised")
    if kept is not None and kept != gate["speed"]:
        raise ExperimentError(
            f"gate: [speed] is {gate['speed']!r}, but the timings were taken under {kept!r}; what "
            "counts as faster is fixed before the first timing: measure again for a new promise"
        )


def _judge(promise: SpeedPromise, record: Mapping[str, Any]) -> dict[str, Any]:
    rungs = [_judge_rung(promise, record, rung) for rung in RUNGS]
    by_rung = {one["rung"]: one for one in rungs}
    job = judge_job(promise, record, by_rung)
    found: Record = {
        "rungs": rungs,
        "whole_job": job,
        "utilization": utilization(promise, record, by_rung),
        "give_back": _give_back(by_rung["module"]),
        "machine": dict(record["machine"]),
        "source": str(record.get("source", "measured")),
    }
    products = record["products"]
    if not products["native"]:
        why = products.get("why") or "every quantized product is emulated"
        reason = f"not measurable here: {why} on {record['machine']['name']}"
        return {"status": NOT_MEASURABLE, "reason": f"{reason}; measure where it is native"} | found
    gated = [by_rung["module"], by_rung["step"], job]
    if by_rung["job"]["status"] != MISSING:
        gated.append(by_rung["job"])
    status, reasons = _combine(gated, _doubts(promise, record))
    return {"status": status, "reason": "; ".join(reasons)} | found


def _combine(gated: Sequence[Mapping[str, Any]], doubts: Sequence[str]) -> tuple[str, list[str]]:
    """Doubts about the timings come before what they say; then any REJECT, then any gap."""
    if doubts:
        return INCONCLUSIVE, list(doubts)
    for status in (REJECT, INCONCLUSIVE):
        alike = [one["reason"] for one in gated if _gap(one["status"]) == status]
        if alike:
            return status, alike
    return ACCEPT, [one["reason"] for one in gated]


def _gap(status: str) -> str:
    return INCONCLUSIVE if status == MISSING else status


def _judge_rung(promise: SpeedPromise, record: Mapping[str, Any], rung: str) -> dict[str, Any]:
    measurements = of_rung(record, rung)
    if not measurements:
        reason = f"the {rung} rung is missing: it was not run"
        return _missing(rung) | {"reason": reason}
    gated = record["products"]["native"] > 0 and rung != "kernel"
    eps = promise.eps_module if rung == "module" else promise.eps_step
    ratios = [log_ratio(one["baseline_ms"], one["candidate_ms"]) for one in measurements]
    slower = holm([one.p_slower(1 - eps) for one in ratios], level=ALPHA)
    entries = []
    for one, ratio, beyond in zip(measurements, ratios, slower, strict=True):
        faster = bool(is_faster(ratio, eps))
        status = ACCEPT if faster else REJECT if beyond else INCONCLUSIVE
        entries.append(_entry(one, ratio, status=status if gated else INFORMATION, limit=1 - eps))
    if not gated:
        said = f"{len(entries)} measured; no verdict follows from the {rung} rung here"
        return {"rung": rung, "status": INFORMATION, "reason": said, "entries": entries}
    status, reason = _of_entries(rung, entries)
    untimed = _untimed(record, entries) if rung == "module" else []
    if untimed and status != REJECT:
        status = INCONCLUSIVE
        reason = f"module: quantized layers without a timing: {_names(untimed)}"
    return {"rung": rung, "status": status, "reason": reason, "entries": entries}


def _entry(one: Mapping[str, Any], ratio: LogRatio, *, status: str, limit: float) -> dict[str, Any]:
    baseline_ms, candidate_ms = (float(np.median(one[f"{arm}_ms"])) for arm in ARMS)
    conversion, saved = one.get("conversion_ms"), baseline_ms - candidate_ms
    # Conversion time over the time that the products alone would save.
    gross = None if conversion is None else saved + conversion
    tax = conversion / gross if conversion is not None and gross and gross > 0 else None
    return {
        "name": one["name"],
        "layers": list(one.get("layers", [])),
        "status": status,
        "ratio": math.exp(float(ratio.mean)),
        "lower": math.exp(float(ratio.lower)),
        "upper": math.exp(float(ratio.upper)),
        "limit": limit,
        "pairs": ratio.dof + 1,
        "baseline_ms": baseline_ms,
        "candidate_ms": candidate_ms,
        "conversion_ms": conversion,
        "conversion_tax": tax,
        "gpus": one.get("gpus"),
    }


def _of_entries(rung: str, entries: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    for status, said in ((REJECT, "is not faster"), (INCONCLUSIVE, "is not shown to be faster")):
        alike = [one for one in entries if one["status"] == status]
        if alike:
            worst = max(alike, key=lambda one: one["ratio"])
            more = f" (and {len(alike) - 1} more)" if len(alike) > 1 else ""
            return status, f"{rung}: {worst['name']}{more} {said}: {_interval(worst)}"
    worst = max(entries, key=lambda one: one["upper"])
    if len(entries) == 1:
        return ACCEPT, f"{rung}: {_interval(worst)}"
    return ACCEPT, f"{rung}: all {len(entries)} faster, the least of them {_interval(worst)}"


def _interval(entry: Mapping[str, Any]) -> str:
    return (
        f"{entry['ratio']:.3f} of BF16's time [{entry['lower']:.3f}, {entry['upper']:.3f}], "
        f"limit {entry['limit']:g}"
    )


def _untimed(record: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> list[str]:
    timed = {name for entry in entries for name in (entry["name"], *entry["layers"])}
    return [name for name in record["quantized_layers"] if name not in timed]


def _quantized(layer: Mapping[str, Any]) -> bool:
    products = [layer.get(name) for name in ("fprop", "dgrad", "wgrad")]
    return any(product not in ("bf16", "skip", None) for product in products)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _give_back(modules: Mapping[str, Any]) -> list[str]:
    """Layers whose own time is not shown to shrink: back to BF16 before any question of quality."""
    slow = [one for one in modules["entries"] if one["status"] in (REJECT, INCONCLUSIVE)]
    return [name for one in slow for name in one["layers"] or [one["name"]]]


def _doubts(promise: SpeedPromise, record: Mapping[str, Any]) -> list[str]:
    """Why these timings, whatever they say, carry no verdict."""
    doubts = []
    for one in record["measurements"]:
        where = f"{one['rung']} {one['name']}"
        if len(one["baseline_ms"]) != promise.pairs:
            doubts.append(
                f"{where}: {len(one['baseline_ms'])} pairs, {promise.pairs} were promised"
            )
        if one["rung"] == "kernel":
            continue
        conditions = one.get("conditions")
        if conditions is None:
            doubts.append(f"{where}: clocks, power cap and temperature were not recorded")
            continue
        doubts += [f"{where}: {text}" for text in _unequal(conditions)]
    dtype = record["inputs"].get("baseline_dtype")
    if dtype != "bfloat16":
        doubts.append(
            f"the baseline's layers multiplied in {dtype!r}, not in bfloat16: BF16 training is "
            "what has to be beaten"
        )
    if record.get("later_stages"):
        doubts.append(
            f"the recipe changes precision at step {record['later_stages'][0]}, and the timings "
            "are of the steps before it"
        )
    return doubts[:8]


def _unequal(conditions: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    found = []
    for key in CONDITIONS:
        shift = _ABSOLUTE_ZERO if key == "temperature_c" else 0.0
        b, c = (float(np.mean(conditions[arm][key])) - shift for arm in ARMS)
        if abs(c / b - 1) > TOLERANCE:
            found.append(
                f"{key} was {b + shift:g} in the baseline and {c + shift:g} in the candidate, more "
                f"than {TOLERANCE:.0%} apart"
            )
    return found


def join(quality: str, reasons: Sequence[str], speed: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The verdict of the whole gate from that of quality and the speed of `judge_speed`.

    A REJECT of either rejects; ACCEPT needs both, where speed was promised.
    """
    status = speed["status"]
    if status == NOT_REQUIRED:
        return quality, list(reasons)
    said = f"speed: {speed['reason']}"
    if status == REJECT:
        return REJECT, [said, *reasons] if quality != REJECT else [*reasons, said]
    if status == ACCEPT:
        return quality, [*reasons, said]
    return (INCONCLUSIVE, [said, *reasons]) if quality == ACCEPT else (quality, list(reasons))
