"""The sections of a report that argue: verdict, evidence, training, controls, slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .appendix import products
from .blocks import Block, Bullets, Cell, Facts, Figure, Figures, Fold, Section, Table, Text
from .page import TONES, strip
from .wording import ARMS, FORMS, MEANING, METRICS, amount, deviation, flatten

Run = Mapping[str, Any]


def headline(gate: Mapping[str, Any], verdict: Mapping[str, Any]) -> Section:
    """The verdict in plain words, its reasons, and what to do next."""
    word = verdict["verdict"]
    meaning = MEANING[word]
    blocks: list[Block] = [Text(meaning[0].upper() + meaning[1:], "lead")]
    fault = gate["experiment"].get("candidate", {}).get("fault")
    if fault:
        planted = ", ".join(f"{key} = {value:g}" for key, value in fault.items())
        text = f"The candidate carries a planted harm ({planted}): this gate tests the gate itself."
        blocks.append(Text(text, "warn"))
    blocks.append(Bullets(verdict["reasons"]))
    if verdict["next_look"]:
        more = f"Next look: {verdict['next_look']} seeds. The same command goes on from here."
        blocks.append(Text(more, "warn"))
    if verdict["advice"]:
        blocks.append(Bullets([f"Advice: {text}" for text in verdict["advice"]]))
    return Section(f"Verdict: {word}", blocks)


def evidence(verdict: Mapping[str, Any], figures: Sequence[Figure]) -> Section:
    """Every co-primary metric: its interval against the margin, and the seeds one by one."""
    level = f"{verdict['alpha']:g}" if "alpha" in verdict else "the promised level"
    intro = (
        "Positive is worse (calibration: predicts more, and both sides count). "
        "ACCEPT needs every interval inside its shaded zone, in both forms of "
        f"serving (one-sided level {level} at each look; variance between seeds plus variance of "
        "the finite evaluation set)."
    )
    if not verdict["metrics"]:
        return Section("Quality against the margins", [Text("No metric could be judged.", "warn")])
    blocks: list[Block] = [Text(intro)]
    for form, how in FORMS.items():
        entries = {
            key: one for key, one in verdict["metrics"].items() if key.startswith(f"{form}/")
        }
        rows = [_metric_row(key, entry) for key, entry in entries.items()]
        head = [how, "", "verdict", "estimate", "interval", "margin"]
        blocks.append(Table(head, rows, "lllrrr"))
    blocks += _information(verdict)
    if figures:
        blocks.append(Figures(figures))
    blocks.append(Fold("How the intervals come about", [_variances(verdict)]))
    return Section("Quality against the margins", blocks)


def _metric_row(key: str, entry: Mapping[str, Any]) -> list[str | Cell]:
    metric = key.partition("/")[2]
    low, mid, high = (amount(metric, entry[part]) for part in ("lower", "estimate", "upper"))
    margin = amount(metric, entry["margin"])
    both = entry.get("two_sided")
    return [
        METRICS.get(metric, metric),
        Cell("", drawing=strip(entry, label=f"{key}: {low} to {high}, margin {margin}")),
        Cell(entry["verdict"], TONES[entry["verdict"]]),
        mid,
        f"{low} to {high}",
        f"±{margin[1:]}" if both else margin,
    ]


def _information(verdict: Mapping[str, Any]) -> list[Block]:
    share = verdict["metrics"].get("trained/ne", {}).get("relative_information")
    if share is None:
        return []
    text = (
        f"In terms of what the model has learned (1 - NE): {-100 * share:+.2f} % of the baseline's "
        "information gain."
    )
    return [Text(text)]


def _variances(verdict: Mapping[str, Any]) -> Table:
    rows = [
        [
            key,
            amount(key, entry["v_seed"] ** 0.5),
            amount(key, entry["v_example"] ** 0.5),
            f"{entry['dof']:.1f}",
            str(entry["seeds"]),
            f"{entry['clusters']} x {entry['clustering']}",
        ]
        for key, entry in verdict["metrics"].items()
    ]
    head = ["metric", "error, seeds", "error, examples", "dof", "seeds", "clusters"]
    return Table(head, rows, "lrrrrl")


def compared(gate: Mapping[str, Any], verdict: Mapping[str, Any]) -> Section:
    """What was compared with what, and what was promised before the first run."""
    experiment = gate["experiment"]
    train = experiment.get("train", {})
    margins = ", ".join(
        f"{METRICS[name]} {amount(name, gate['margins'][name])[1:]}" for name in METRICS
    )
    looks = ", ".join(map(str, gate["looks"]))
    pairs = [
        ("workload", str(experiment.get("workload", "-"))),
        ("baseline", str(experiment.get("baseline", {}).get("recipe", "-"))),
        ("candidate", str(experiment.get("candidate", {}).get("recipe", "-"))),
        ("training", f"{train.get('steps', '-')} steps, batch size {train.get('batch_size', '-')}"),
        ("pairing", "same seed, initial weights, data order and steps in every arm"),
        ("seeds judged", ", ".join(map(str, verdict["seeds"]))),
        ("looks", f"after {looks} seeds; level {gate['alpha']:g} each, 0.05 overall"),
        ("margins", f"{gate['margins'].get('name', 'custom')}: {margins}"),
        ("promised", str(gate.get("created", "-"))),
    ]
    blocks: list[Block] = [Facts(pairs)]
    if gate.get("facts"):
        blocks += [Text("The workload says about itself:"), Facts(flatten(gate["facts"]))]
    return Section("What was compared", blocks)


def training(runs: Sequence[Run], verdict: Mapping[str, Any], figures: Sequence[Figure]) -> Section:
    """Training curves and the stability rules."""
    health = verdict["stability"]
    tone = TONES[health["verdict"]]
    blocks: list[Block] = [Figures(figures)] if figures else []
    statement = health.get("statement", "")
    blocks.append(Text(f"Stability: {health['verdict']}; {statement}".strip("; "), tone))
    blocks.append(Bullets([*health["hard"], *health.get("baseline_failures", [])]))
    rows: list[list[str | Cell]] = [
        [
            str(entry.get("counter", "-")),
            str(entry.get("baseline", "-")),
            str(entry.get("candidate", "-")),
            f"{entry.get('p_value', 1.0):.2g}",
            Cell("too many", "bad") if entry.get("flagged") else Cell("no excess", "good"),
        ]
        for entry in health["soft"]
    ]
    if rows:
        head = ["counter", "baseline", "candidate", "p", "finding"]
        blocks.append(Table(head, rows, "lrrrl"))
    seconds = [run["timing"]["train_s"] for run in runs if run.get("timing")]
    if seconds:
        note = f"{len(seconds)} runs, {sum(seconds):.0f} s of training in all."
        blocks.append(Text(f"{note} No claim about speed follows from it."))
    return Section("Training and stability", blocks)


def what_ran(
    gate: Mapping[str, Any],
    runs: Sequence[Run],
    verdict: Mapping[str, Any],
    figures: Sequence[Figure],
) -> list[Section]:
    """Controls and noise floor, slices, speed, and the products that really ran beside the plan."""
    sections = [_controls(gate, verdict, figures)]
    if verdict["slices"]:
        sections.append(_slices(verdict["slices"]))
    speed = verdict["speed"]
    said = f"{speed['status'].replace('_', ' ')}: {speed['reason']}"
    sections.append(Section("Speed", [Text(said[0].upper() + said[1:])]))
    sections.append(products(runs))
    return sections


def _controls(
    gate: Mapping[str, Any], verdict: Mapping[str, Any], figures: Sequence[Figure]
) -> Section:
    controls = verdict["controls"]
    asked = gate["experiment"].get("controls", {})
    size = asked.get("known_bad_margins")
    bad = f"BF16 with logit noise worth {size:g} NE margins" if size else "BF16 with logit noise"
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
    floor = [
        [key, *(deviation(key, one) for one in verdict["noise_floor"][key].values())]
        for key in verdict["metrics"]
        if key in verdict["noise_floor"]
    ]
    if floor:
        head = ["metric", "BF16 seeds, unpaired", "null control, paired", "candidate, paired"]
        blocks.append(Text("Noise floor: standard deviations over seeds."))
        blocks.append(Table(head, floor, "lrrr"))
    if figures:
        blocks.append(Figures(figures))
    return Section("Controls and noise floor", blocks)


def _slices(slices: Sequence[Mapping[str, Any]]) -> Section:
    rows: list[list[str | Cell]] = []
    for one in slices:
        tested = one.get("estimate") is not None
        low, high = (amount("ne", one.get(part)) for part in ("lower", "upper"))
        interval = f"{low} to {high}" if tested else one["reason"]
        word = one["verdict"].replace("_", " ").lower()
        shown = Cell(one["verdict"] if one["verdict"] in MEANING else word, TONES[one["verdict"]])
        where = FORMS.get(one.get("form", ""), one.get("form", "-"))
        count = f"{one['positives']:.0f}"
        rows.append(
            [one["name"], where, one["class"], count, interval, amount("ne", one["margin"]), shown]
        )
    intro = (
        "Relative NE inside each declared slice. Protected slices must be non-inferior by their "
        "own margin; the others are tested for harm beyond theirs (Holm over all)."
    )
    head = ["slice", "form", "class", "positives", "interval", "margin", "verdict"]
    return Section("Slices", [Text(intro), Table(head, rows, "lllrrrl")])
