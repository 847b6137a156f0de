"""From a step to a job: conversion and warm-up to be paid back, and what the hardware is used for.

MFU is model flops / (step time x peak of the precision that they are credited at); the flops of
both arms are the baseline's, so a faster step shows as a higher share of the same bf16 peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..verdict import ACCEPT, INCONCLUSIVE, REJECT
from .promise import SpeedPromise
from .record import ARMS

MISSING: Final = "missing"
INFORMATION: Final = "information"

Rungs = Mapping[str, Mapping[str, Any]]


def judge_job(promise: SpeedPromise, record: Mapping[str, Any], rungs: Rungs) -> dict[str, Any]:
    """(T_conv + (N + extra) t_C) / (N t_B) against 1 - eps_step, at the planned N steps.

    t comes from the job rung when it was run, else from the step rung, and `evidence` says which.
    Break-even is the N from which the candidate is ahead, None when it never is.
    """
    entry, evidence = _entry(rungs, "job"), "job"
    if entry is None:
        entry, evidence = _entry(rungs, "step"), "step"
    costs = record.get("costs")
    lacking = None
    if entry is None:
        lacking = "neither the step nor the job rung was run"
    elif costs is None:
        lacking = "what conversion, compilation and warm-up cost was not recorded"
    elif promise.planned_steps is None:
        lacking = "no planned_steps in [speed], so what conversion costs cannot be weighed"
    if lacking is not None or entry is None or costs is None or promise.planned_steps is None:
        return {"status": MISSING, "reason": f"whole job: {lacking}"}
    steps, extra, once_s = promise.planned_steps, promise.extra_steps, sum(costs.values())
    t_b, t_c = entry["baseline_ms"] / 1e3, entry["candidate_ms"] / 1e3
    paid, longer = once_s / (steps * t_b), (steps + extra) / steps
    ratio, lower, upper = (paid + longer * entry[key] for key in ("ratio", "lower", "upper"))
    limit = 1 - promise.eps_step
    status = ACCEPT if upper < limit else REJECT if lower > limit else INCONCLUSIVE
    if entry["status"] == INFORMATION:
        status = INFORMATION
    break_even = (once_s + extra * t_c) / (t_b - t_c) if t_c < t_b else None
    pays = "never pays" if break_even is None else f"pays from step {break_even:.0f} on"
    more = f" and {extra} more for the candidate" if extra else ""
    claim = "no claim, the products are emulated: " if status == INFORMATION else ""
    return {
        "status": status,
        "reason": (
            f"{claim}whole job of {steps} steps{more}: {ratio:.3f} of BF16's time "
            f"[{lower:.3f}, {upper:.3f}], limit {limit:g}; conversion ({once_s:.1f} s) {pays} "
            f"(reckoned from the {evidence} rung)"
        ),
        "evidence": evidence,
        "ratio": ratio,
        "lower": lower,
        "upper": upper,
        "limit": limit,
        "planned_steps": steps,
        "extra_steps": extra,
        "costs": dict(costs),
        "break_even_steps": break_even,
    }


def utilization(promise: SpeedPromise, record: Mapping[str, Any], rungs: Rungs) -> dict[str, Any]:
    """MFU of both arms by bf16 peak and by format peak, with what is missing said in "missing".

    local: one device, without communication (step rung). scaling_ratio: local step time / job step
    time, both per device. job: local x scaling ratio.
    """
    step, job = _entry(rungs, "step"), _entry(rungs, "job")
    flops = (record.get("flops") or {}).get("model_flops_per_step")
    known = record.get("peaks") or {}
    peaks = {
        "bf16": promise.peak_bf16_tflops or known.get("bf16_tflops"),
        "format": promise.peak_format_tflops or known.get("format_tflops"),
    }
    missing = [
        text
        for text, absent in (
            ("the step rung", step is None),
            ("the job rung, and with it the scaling ratio", job is None),
            ("model flops", flops is None),
            ("the dense bf16 peak ([speed] peak_bf16_tflops)", peaks["bf16"] is None),
            ("the dense format peak ([speed] peak_format_tflops)", peaks["format"] is None),
        )
        if absent
    ]
    arms = {arm: _shares(arm, step, job, flops, peaks) for arm in ARMS}
    return {
        "model_flops_per_step": flops,
        "flops_source": (record.get("flops") or {}).get("source"),
        "peak_tflops": peaks,
        "format": known.get("format"),
        "missing": missing,
        "step_ratio_from_modules": _from_modules(step, rungs),
        **arms,
    }


def _shares(
    arm: str,
    step: Mapping[str, Any] | None,
    job: Mapping[str, Any] | None,
    flops: float | None,
    peaks: Mapping[str, float | None],
) -> dict[str, float | None]:
    milliseconds = None if step is None else step[f"{arm}_ms"]
    scaling = None if step is None or job is None else step[f"{arm}_ms"] / job[f"{arm}_ms"]
    shares: dict[str, float | None] = {"scaling_ratio": scaling}
    for name, peak in peaks.items():
        local = None
        if milliseconds and flops and peak:
            local = flops / (milliseconds * 1e-3 * peak * 1e12)
        shares[f"local_mfu_{name}_peak"] = local
        shares[f"job_mfu_{name}_peak"] = local * scaling if local and scaling else None
    return shares


def _from_modules(step: Mapping[str, Any] | None, rungs: Rungs) -> float | None:
    """The step ratio that the layers' own savings would give: a check, never evidence."""
    modules = rungs["module"]["entries"]
    if step is None or not modules:
        return None
    saved = sum(
        (one["baseline_ms"] - one["candidate_ms"]) * max(1, len(one["layers"])) for one in modules
    )
    return float(1 - saved / step["baseline_ms"])


def _entry(rungs: Rungs, rung: str) -> Mapping[str, Any] | None:
    """The measurement of a rung; of several the one with the highest upper bound."""
    entries = rungs[rung]["entries"]
    return max(entries, key=lambda one: one["upper"]) if entries else None
