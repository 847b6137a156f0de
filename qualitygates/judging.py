"""gate.json + run records -> verdict: pure, without torch, and closed on every doubt.

Anything that does not form clean pairs raises RecordError; anything that cannot be judged is
INCONCLUSIVE, which after the last look counts as not accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .comparing import Outcome, compare
from .controls import CONTROLS, judge_controls, noise_floor, not_run
from .forecast import forecast, futile
from .irreproducibility import prediction_differences
from .pairing import Promise, Run, Table, collect, largest_look, read_promise
from .speed.rules import check_belongs, join, judge_speed
from .trajectory import trajectories
from .verdict import ACCEPT, INCONCLUSIVE, REJECT, advise

# The arms whose further seeds are worth a forecast, and how reasons call them.
_FORECAST = {"candidate": "", "null": "null control, "}
UNRECORDED = "note: which products ran at which precision was not recorded (offline runs)"


def judge_records(
    gate: Mapping[str, Any], runs: Sequence[Run], *, speed: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The verdict dict for the promise in `gate`, all its run records and its speed record (None:
    not timed), at the largest look that is complete.

    Raises ExperimentError for a promise without valid margins, looks or seeds, and RecordError for
    records that are damaged, missing, or do not pair (init, data order, steps, evaluation precision
    or evaluation set differ).
    """
    promise = read_promise(gate)
    table = collect(promise, runs)
    look = largest_look(promise, table)
    used = promise.seeds[:look]
    outcomes = {
        arm: _compare_arm(promise, table, arm=arm, used=used) for arm in table if arm != "baseline"
    }
    for arm in CONTROLS:
        outcomes.setdefault(arm, not_run(arm))
    candidate, null = outcomes["candidate"], outcomes["null"]
    controls = judge_controls(null, outcomes["known_bad"])
    first = table["candidate"][used[0]]
    check_belongs(gate, speed, layers=first["plan_layers"] or ())
    timed = judge_speed(gate["speed"], speed)
    quality, reasons = _combine(candidate, null, controls)
    verdict, reasons = _with_curves(*join(quality, reasons, timed), table=table)
    floor = _noise_floor(promise, table, outcomes, used)
    forecasts = {arm: _forecasts(promise, outcomes[arm], floor, look=look) for arm in _FORECAST}
    hopeless = _hopeless(outcomes, forecasts) if verdict == INCONCLUSIVE else []
    final = bool(hopeless) or _is_final(promise, outcomes, verdict=verdict, look=look)
    reasons += hopeless
    environments = _distinct([run["environment"] for arm in table.values() for run in arm.values()])
    if verdict == INCONCLUSIVE and final:
        why = "more seeds are not worth their cost" if hopeless else "no later look can change this"
        reasons.append(f"{why}: INCONCLUSIVE counts as not accepted")
    if any(run["gemms_match_plan"] is None for run in table["candidate"].values()):
        reasons.append(UNRECORDED)
    if len(environments) > 1:
        reasons.append(f"warning: the runs come from {len(environments)} different environments")
    pairs = [(table["baseline"][seed], table["candidate"][seed]) for seed in used]
    return {
        "verdict": verdict,
        "quality": quality,
        "reasons": reasons,
        "final": final,
        "next_look": None if final else next(one for one in promise.looks if one > look),
        "metrics": candidate["metrics"],
        "forecast": forecasts["candidate"],
        "trajectory": trajectories(pairs),
        "prediction_difference": _prediction_differences(promise, pairs),
        "controls": controls,
        "noise_floor": floor,
        "stability": candidate["stability"],
        "slices": candidate["slices"],
        "speed": timed,
        "plan_hash": first["plan_hash"],
        "recipe_hash": first["recipe_hash"],
        "environment": environments,
        "seeds": list(used),
        "look": look,
        "margins": dict(promise.margins),
        "alpha": promise.alpha,
        "advice": [
            *_advice(promise, table, outcomes, floor=floor, used=used),
            *controls["notes"],
        ],
    }


def _compare_arm(promise: Promise, table: Table, *, arm: str, used: Sequence[int]) -> Outcome:
    seeds = [seed for seed in promise.seeds if seed in table["baseline"] and seed in table[arm]]
    pairs = {seed: (table["baseline"][seed], table[arm][seed]) for seed in seeds}
    later = [pair for seed, pair in pairs.items() if seed not in used]
    return compare(promise, [pairs[seed] for seed in used], beyond=later)


def _combine(
    candidate: Outcome, null: Outcome, controls: Mapping[str, Any]
) -> tuple[str, list[str]]:
    verdict, reasons = candidate["verdict"], list(candidate["reasons"])
    misbehaved = list(controls["reasons"])
    if verdict == ACCEPT and misbehaved:
        return INCONCLUSIVE, [f"the assay has no sensitivity: {text}" for text in misbehaved]
    if verdict == REJECT and null["verdict"] != ACCEPT:
        why = "the candidate would be REJECT, but the null control was not accepted"
        return INCONCLUSIVE, [why, *reasons, *misbehaved]
    return verdict, [*reasons, *misbehaved]


def _with_curves(verdict: str, reasons: list[str], *, table: Table) -> tuple[str, list[str]]:
    """Without training curves nothing shows that training was stable, so there is no ACCEPT."""
    runs = [run for arm in ("baseline", "candidate") for run in table[arm].values()]
    absent = {key for run in runs for key in run["training"].get("not_recorded", ())}
    if verdict == ACCEPT and "loss" in absent:
        why = (
            "stability: no training curve was recorded, so nothing shows that training was "
            "stable: name them in [[curves]] (TensorBoard or JSONL)"
        )
        return INCONCLUSIVE, [why, *reasons]
    if "grad_norm" in absent:
        return verdict, [*reasons, "note: gradient norms were not recorded, spikes are of the loss"]
    return verdict, reasons


def _is_final(
    promise: Promise, outcomes: Mapping[str, Outcome], *, verdict: str, look: int
) -> bool:
    if verdict != INCONCLUSIVE or look == promise.looks[-1]:
        return True
    candidate, null = outcomes["candidate"], outcomes["null"]
    if null["lasting"] or (candidate["lasting"] and candidate["verdict"] == INCONCLUSIVE):
        return True
    accepted = candidate["verdict"] == null["verdict"] == ACCEPT
    # Everything but the missing timing has already been shown.
    return bool(accepted and outcomes["known_bad"]["verdict"] != ACCEPT)


def _advice(
    promise: Promise,
    table: Table,
    outcomes: Mapping[str, Outcome],
    *,
    floor: Mapping[str, Any],
    used: Sequence[int],
) -> list[str]:
    advice = []
    for arm, label in (("candidate", ""), ("null", "null control, ")):
        for key, entry in outcomes[arm]["metrics"].items():
            if entry["verdict"] == INCONCLUSIVE:
                null_sd = floor[key]["null_paired_sd"] or 0.0
                advice.append(f"{label}{key}: {advise(entry, null_sd=null_sd)}")
    for arm in ("candidate", "null"):
        entries = outcomes[arm]["metrics"].values()
        if entries and not any(one["v_seed"] or one["v_example"] for one in entries):
            advice.append(
                f"the {arm} arm predicts exactly what the baseline predicts in every seed: "
                "nothing was tested by it"
            )
    unused = [
        seed
        for seed in promise.seeds
        if seed not in used and any(seed in arm for arm in table.values())
    ]
    if unused:
        advice.append(
            f"seeds {unused} have runs but no complete look: their metrics are not used, their "
            "hard failures are"
        )
    return advice


def _noise_floor(
    promise: Promise, table: Table, outcomes: Mapping[str, Outcome], used: Sequence[int]
) -> dict[str, dict[str, float | None]]:
    baselines = [table["baseline"][seed] for seed in used]
    null, candidate = outcomes["null"]["metrics"], outcomes["candidate"]["metrics"]
    if not (null or candidate):
        return {}
    by_form = {
        form: [run["evaluations"][form] for run in baselines] for form in promise.evaluations
    }
    return noise_floor(by_form, null, candidate)


def _forecasts(
    promise: Promise, outcome: Outcome, floor: Mapping[str, Any], *, look: int
) -> dict[str, Any]:
    return {
        key: forecast(
            entry, looks=promise.looks, look=look, null_sd=floor[key]["null_paired_sd"] or 0.0
        )
        for key, entry in outcome["metrics"].items()
    }


def _hopeless(
    outcomes: Mapping[str, Outcome], forecasts: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Why no further seed is worth its cost; giving up can never accept anything."""
    return [
        f"stopped early, {label}{text}"
        for arm, label in _FORECAST.items()
        for text in futile(forecasts[arm], outcomes[arm]["metrics"])
    ]


def _prediction_differences(
    promise: Promise, pairs: Sequence[tuple[Run, Run]]
) -> dict[str, dict[str, float | None]]:
    if not all(run["evaluations"] for pair in pairs for run in pair):
        return {}
    return prediction_differences(
        {
            name: [(b["evaluations"][name], c["evaluations"][name]) for b, c in pairs]
            for name in promise.evaluations
        }
    )


def _distinct(environments: Sequence[Any]) -> list[Any]:
    seen: dict[str, Any] = {}
    for environment in environments:
        seen.setdefault(json.dumps(environment, sort_keys=True, default=str), environment)
    return list(seen.values())
