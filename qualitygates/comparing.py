"""One arm against the baseline at one look: health, metrics, slices -> its verdict with reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .influence import METRICS, Contrast, contrast
from .pairing import Promise, Run
from .slices import MIN_CLUSTERS, MIN_POSITIVES, SliceRules, judge_slices
from .stability import hard_failures, judge_stability
from .verdict import ACCEPT, INCONCLUSIVE, REJECT, judge_metric

Pairs = Sequence[tuple[Run, Run]]
Outcome = dict[str, Any]


def compare(promise: Promise, pairs: Pairs, *, beyond: Pairs = ()) -> Outcome:
    """Judge one arm against the baseline at one look, from its pairs of runs, one a seed.

    Returns verdict, reasons, metrics, stability and slices as in the verdict dict; `lasting`, that
    more seeds cannot change an INCONCLUSIVE or REJECT; `crashed`, that a run died with an error.
    `beyond` holds pairs of seeds after the look, of which only the hard failures count.
    """
    health = judge_stability(pairs, beyond=beyond, margin=promise.margins["ne"])
    blocked: list[str] = []
    metrics: dict[str, Any] = {}
    slices: list[dict[str, Any]] = []
    if all(_has_metrics(run, promise.evaluations) for pair in pairs for run in pair):
        by_form = {
            form: [(b["evaluations"][form], c["evaluations"][form]) for b, c in pairs]
            for form in promise.evaluations
        }
        blocked += _too_small(by_form)
        if not blocked:
            metrics, blocked = _judge_metrics(promise, by_form)
            slices = judge_slices(by_form, _slice_rules(promise))
    else:
        blocked.append("a run without finite predictions leaves no metrics to judge")
    blocked += _plan_mismatches([run for pair in (*pairs, *beyond) for run in pair])
    blocked += [
        f"slice {one['name']} ({one['form']}) is protected but too small: {one['reason']}"
        for one in slices
        if one["class"] == "protected" and one["p_harm"] is None
    ]
    verdict, reasons = _outcome(health, blocked, metrics, slices)
    return {
        "verdict": verdict,
        "reasons": reasons,
        "metrics": metrics,
        "stability": health,
        "slices": slices,
        "lasting": bool(health["baseline_failures"] or health["hard"] or blocked),
        "crashed": any(run["training"]["crashed"] is not None for _, run in (*pairs, *beyond)),
    }


def _outcome(
    health: Mapping[str, Any],
    blocked: Sequence[str],
    metrics: Mapping[str, Any],
    slices: Sequence[Mapping[str, Any]],
) -> tuple[str, list[str]]:
    if health["baseline_failures"]:
        failures = "; ".join(health["baseline_failures"])
        return INCONCLUSIVE, [f"the baseline failed, so its pair is invalid: {failures}"]
    if health["hard"]:
        return REJECT, [f"hard stability failure: {text}" for text in health["hard"]]
    if blocked:
        return INCONCLUSIVE, list(blocked)
    against = [_say(key, entry) for key, entry in metrics.items() if entry["verdict"] == REJECT]
    against += [_say_spikes(entry) for entry in health["soft"] if entry["flagged"]]
    against += [_say_slice(entry) for entry in slices if entry["verdict"] == REJECT]
    if against:
        return REJECT, against
    open_questions = [
        _say(key, entry) for key, entry in metrics.items() if entry["verdict"] == INCONCLUSIVE
    ]
    open_questions += [_say_slice(entry) for entry in slices if entry["verdict"] == INCONCLUSIVE]
    if open_questions:
        return INCONCLUSIVE, open_questions
    seeds = next(iter(metrics.values()))["seeds"]
    shown = f"all {len(metrics)} co-primary metrics are within their margins over {seeds} seeds"
    warned = [_say_slice(entry) for entry in slices if entry["warn"]]
    return ACCEPT, [shown, health["statement"], *warned]


def _judge_metrics(
    promise: Promise, by_form: Mapping[str, Pairs]
) -> tuple[dict[str, Any], list[str]]:
    metrics: dict[str, Any] = {}
    blocked: list[str] = []
    for form, pairs in by_form.items():
        for metric in METRICS:
            if all(one["metrics"][metric] is None for pair in pairs for one in pair):
                continue
            contrasts = _contrasts(pairs, metric)
            if not contrasts:
                blocked.append(
                    f"{form}/{metric}: its groups span several clusters in every clustering, so "
                    "its error is unknown; "
                    "add a clustering that holds each group whole, for example the group itself"
                )
                continue
            entry = judge_metric(
                contrasts,
                margin=promise.margins[metric],
                alpha=promise.alpha,
                two_sided=metric == "calibration",
            )
            if metric == "ne":
                entry["relative_information"] = _relative_information(entry["estimate"], pairs)
            metrics[f"{form}/{metric}"] = entry
    return metrics, blocked


def _contrasts(pairs: Pairs, metric: str) -> dict[str, list[Contrast]]:
    found = {}
    for name in pairs[0][0]["clusterings"]:
        seeds = [contrast(b, c, metric=metric, clustering=name) for b, c in pairs]
        complete = [one for one in seeds if one is not None]
        if len(complete) == len(seeds):
            found[name] = complete
    return found


def _relative_information(estimate: float, pairs: Pairs) -> float | None:
    """d / (1 - NE_B): at NE 0.98 a loss of 0.05 % of NE is 2.5 % of everything the model has
    learned.
    """
    gain = 1.0 - sum(float(b["metrics"]["ne"]) for b, _ in pairs) / len(pairs)
    return estimate / gain if gain > 0 else None


def _too_small(by_form: Mapping[str, Pairs]) -> list[str]:
    found = []
    for form, pairs in by_form.items():
        held = pairs[0][0]
        for label in ("positives", "negatives"):
            if held[label] < MIN_POSITIVES:
                found.append(
                    f"{form} evaluation: {held[label]:.0f} {label}; below {MIN_POSITIVES} the "
                    "error rate of the "
                    "verdict is not known: evaluate on more examples"
                )
        for name, entry in held["clusterings"].items():
            hit = sum(weight > 0 for weight in entry["weight"])
            if hit < MIN_CLUSTERS:
                found.append(
                    f"{form} evaluation: {hit} clusters in {name!r}; the variance over examples "
                    "needs "
                    f"{MIN_CLUSTERS}: evaluate on more of them"
                )
    return found


def _plan_mismatches(runs: Sequence[Run]) -> list[str]:
    found = []
    for run in runs:
        recorded = run["gemms_match_plan"]
        if recorded is True or recorded is None or hard_failures(run):
            continue
        layers = [
            layer["name"]
            for layer in run["plan_layers"]
            if any(
                sorted(run["gemms"].get(layer["name"], {}).get(product, {})) != [layer[product]]
                for product in ("fprop", "dgrad", "wgrad")
            )
        ]
        named = ", ".join(layers[:8]) + (" and more" if len(layers) > 8 else "")
        found.append(
            f"{run['arm']}, seed {run['seed']}: the products that ran are not the planned ones "
            f"(layers: {named or 'not named by the record'}); this run does not test its recipe"
        )
    return found


def _has_metrics(run: Run, names: Sequence[str]) -> bool:
    evaluations = run["evaluations"] or {}
    return all(
        name in evaluations and evaluations[name]["predictions_finite"] is True for name in names
    )


def _slice_rules(promise: Promise) -> SliceRules:
    return SliceRules(
        margin=promise.margins["ne"],
        protected=promise.protected,
        factor=promise.protected_factor,
        alpha=promise.alpha,
    )


def _say(key: str, entry: Mapping[str, Any]) -> str:
    absolute = key.endswith("auc")
    low, high, margin = (
        f"{entry[part]:+.5f}" if absolute else f"{100 * entry[part]:+.3f} %"
        for part in ("lower", "upper", "margin")
    )
    side = "either side of 0" if entry["two_sided"] else "worse is positive"
    where = "lies beyond" if entry["verdict"] == REJECT else "does not exclude"
    return f"{key} {entry['verdict']}: [{low}, {high}] {where} the margin {margin} ({side})"


def _say_slice(entry: Mapping[str, Any]) -> str:
    margin = f"margin {100 * entry['margin']:.3f} %"
    where = f"slice {entry['name']} ({entry['form']}, {entry['class']})"
    verdict = (
        "worse than the baseline" if entry["verdict"] in (ACCEPT, "WARN") else entry["verdict"]
    )
    low, high = 100 * entry["lower"], 100 * entry["upper"]
    return f"{where} {verdict}: NE [{low:+.3f} %, {high:+.3f} %], {margin}"


def _say_spikes(entry: Mapping[str, Any]) -> str:
    return (
        f"{entry['counter']}: {entry['candidate']} in the candidate, {entry['baseline']} in the "
        f"baseline over equal steps (p = {entry['p_value']:.2g})"
    )
