"""The sections of a report on training: curves, stability, numerics counters, controls, noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .blocks import Block, Bullets, Cell, Facts, Figure, Figures, Fold, Section, Table, Text
from .page import TONES
from .wording import ARMS, deviation, evaluation_words, metric_words, number, table_of

Run = Mapping[str, Any]

# What lowprec.watch counts; a user's own counter is shown by its name alone.
_COUNTERS: Final = {
    "saturation": "share of quantized values beyond the largest of the format",
    "underflow": "share of quantized values that became zero",
    "amax_jumps": "operands whose largest magnitude moved by more than 8 times between samples",
    "weight_drift": "distance of the weights from their start, root mean square",
}


def training(runs: Sequence[Run], verdict: Mapping[str, Any], figures: Sequence[Figure]) -> Section:
    """Training curves and the stability rules."""
    health = verdict["stability"]
    tone = TONES[health["verdict"]]
    blocks: list[Block] = [Figures(figures)] if figures else []
    statement = health.get("statement", "")
    blocks.append(Text(f"Stability: {health['verdict']}; {statement}".strip("; "), tone))
    blocks.append(Bullets([*health["hard"], *health.get("baseline_failures", [])]))
    if any("loss" in run["training"].get("not_recorded", ()) for run in runs):
        said = "Training curves were not recorded: name them in [[curves]] (TensorBoard or JSONL)."
        blocks.append(Text(said, "warn"))
    rows = [_spike_row(entry) for entry in health["soft"] if "candidate_level" not in entry]
    if rows:
        head = ["counter", "baseline", "candidate", "p", "finding"]
        blocks.append(Table(head, rows, "lrrrl"))
    blocks += _trajectory(verdict.get("trajectory"))
    seconds = [run["timing"]["train_s"] for run in runs if run.get("timing")]
    if seconds:
        note = f"{len(seconds)} runs, {sum(seconds):.0f} s of training in all."
        blocks.append(Text(f"{note} No claim about speed follows from it."))
    return Section("Training and stability", blocks)


def _spike_row(entry: Mapping[str, Any]) -> list[str | Cell]:
    return [
        str(entry.get("counter", "-")),
        _count(entry.get("baseline")),
        _count(entry.get("candidate")),
        f"{entry.get('p_value', 1.0):.2g}",
        _finding(entry),
    ]


def _count(value: Any) -> str:
    return "-" if value is None else str(value)


def _finding(entry: Mapping[str, Any]) -> Cell:
    if entry.get("flagged"):
        return Cell("too many", "bad")
    if entry.get("baseline") is None:
        return Cell("BF16 has no such counter")
    return Cell("no excess", "good")


def _trajectory(found: Mapping[str, Any] | None) -> list[Block]:
    """The largest gap of the smoothed loss on the way; reported, never gated."""
    if not found:
        return []
    worst = found["largest"]
    if worst is None:
        text = "Gap of the smoothed training loss on the way: too few recorded steps to say."
        return [Text(text)]
    text = (
        f"Largest gap of the smoothed training loss after warm-up: {_gap(worst)} (positive: the "
        "candidate's loss is higher; reported, not gated)."
    )
    rows: list[list[str | Cell]] = [
        [seed, "-" if one is None else f"{100 * one['gap']:+.3f} %", _step(one)]
        for seed, one in found["per_seed"].items()
    ]
    table = Table(["seed", "largest gap", "at step"], rows, "rrr")
    return [Text(text), Fold("The same by seed", [table])]


def _gap(one: Mapping[str, Any]) -> str:
    return f"{100 * one['gap']:+.3f} % at step {one['step']}"


def _step(one: Mapping[str, Any] | None) -> str:
    return "-" if one is None else str(one["step"])


def numerics(verdict: Mapping[str, Any]) -> Section:
    """Saturation, underflow and the other counters: spikes in pairs and mean levels."""
    title = "Numerics warnings"
    entries = [one for one in verdict["stability"]["soft"] if "candidate_level" in one]
    if not entries:
        text = "No numerics counters were recorded: saturation and underflow are not known."
        return Section(title, [Text(text, "warn")])
    flagged = [str(one["counter"]).removesuffix(" spikes") for one in entries if one["flagged"]]
    blocks: list[Block]
    if flagged:
        said = f"Spikes of {', '.join(flagged)} are more frequent than in the baseline: a REJECT."
        blocks = [Text(said, "bad")]
    else:
        blocks = [Text("No counter spikes more often than in the baseline.", "good")]
    rows: list[list[str | Cell]] = []
    for one in entries:
        name = str(one["counter"]).removesuffix(" spikes")
        levels = [_level(name, one[f"{arm}_level"]) for arm in ("baseline", "candidate")]
        spikes = [_count(one["baseline"]), _count(one["candidate"])]
        rows.append([name, *levels, *spikes, _finding(one)])
    head = ["counter", "mean, BF16", "mean, candidate", "spikes, BF16", "spikes, candidate"]
    blocks.append(Table([*head, "finding"], rows, "lrrrrl"))
    names = [str(row[0]) for row in rows]
    blocks.append(Facts([(name, _COUNTERS[name]) for name in names if name in _COUNTERS]))
    why = (
        "Sampled in training. Levels are shown, not gated: a format with block scales may flush "
        "many small values and learn as well; the intervals above decide."
    )
    return Section(title, [*blocks, Text(why)])


def _level(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.3g} %" if name in ("saturation", "underflow") else f"{value:.3g}"


def controls_section(
    gate: Mapping[str, Any], verdict: Mapping[str, Any], figures: Sequence[Figure]
) -> Section:
    """Both controls, the noise floor, and how far single predictions are apart."""
    controls = verdict["controls"]
    size = table_of(gate["experiment"], "controls").get("known_bad_margins")
    bad = "BF16 with logit noise"
    bad += f" worth {number(size)} NE margins" if size else ""
    rows: list[list[str | Cell]] = []
    for arm, how, wanted in (
        ("null", "BF16, initial weights moved by one rounding step", "ACCEPT"),
        ("known_bad", bad, "not ACCEPT"),
    ):
        found = (controls.get(arm) or {}).get("verdict", "not run")
        fits = found == "ACCEPT" if arm == "null" else found in ("REJECT", "INCONCLUSIVE")
        rows.append([ARMS[arm], how, wanted, Cell(found, "good" if fits else "bad")])
    if controls["behaved"]:
        said = "Both controls behaved: this gate accepts a harmless arm and not a harmful one."
        blocks: list[Block] = [Text(said, "good")]
    else:
        blocks = [Text("The controls do not show that this gate can tell good from bad.", "bad")]
    blocks.append(Table(["control", "what it is", "must be", "was"], rows, "llll"))
    blocks.append(Bullets([*controls["reasons"], *controls.get("notes", [])]))
    blocks += _noise_floor(verdict)
    if figures:
        blocks.append(Figures(figures))
    blocks += _differences(verdict.get("prediction_difference") or {})
    return Section("Controls and noise floor", blocks)


def _noise_floor(verdict: Mapping[str, Any]) -> list[Block]:
    floor = [
        [metric_words(key), *(deviation(key, one) for one in verdict["noise_floor"][key].values())]
        for key in verdict["metrics"]
        if key in verdict["noise_floor"]
    ]
    if not floor:
        return []
    head = ["metric", "BF16 seeds, unpaired", "null control, paired", "candidate, paired"]
    return [
        Text("Noise floor: standard deviations over seeds."),
        Table(head, floor, "lrrr"),
    ]


def _differences(found: Mapping[str, Mapping[str, float | None]]) -> list[Block]:
    """Prediction difference of the candidate beside that of two retrainings of the baseline."""
    rows: list[list[str | Cell]] = []
    for name, one in found.items():
        ours, theirs = one["candidate"], one["baselines"]
        if ours is None:
            continue
        times = f"x {ours / theirs:.2g}" if theirs else "-"
        cells = [_percent(ours), _percent(theirs), times]
        rows.append([evaluation_words(name), *cells])
    if not rows:
        return []
    text = (
        "Prediction difference: mean distance of two models' predictions on the same rows, over "
        "their mean prediction. Reported, not gated: two seeds of BF16 differ as well."
    )
    head = ["evaluation", "candidate and baseline, one seed", "baselines of two seeds", "ratio"]
    return [Text(text), Table(head, rows, "lrrr")]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"
