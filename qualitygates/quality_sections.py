"""The sections of a report on quality: intervals against margins, what more seeds bring, slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .blocks import Block, Cell, Figure, Figures, Fold, Section, Table, Text
from .page import TONES, strip
from .wording import METRICS, amount, evaluation_words, metric_words

Entry = Mapping[str, Any]
# More slices than this in one table are shown on demand.
_MANY: Final = 12


def tightest(verdict: Mapping[str, Any]) -> str:
    """The metric whose interval comes closest to its margin, or goes farthest beyond it."""
    if not verdict["metrics"]:
        return "no metric could be judged"
    used = {key: _share(entry) for key, entry in verdict["metrics"].items()}
    key = max(used, key=lambda one: used[one])
    entry = verdict["metrics"][key]
    end = entry["upper"]
    if entry["two_sided"] and -entry["lower"] > entry["upper"]:
        end = entry["lower"]
    near = "closest to its margin" if used[key] <= 1 else "farthest beyond its margin"
    return (
        f"{near}: {metric_words(key)}, up to {amount(key, end)} where "
        f"{amount(key, entry['margin']).lstrip('+')} is allowed ({100 * used[key]:.0f} % of it)"
    )


def _share(entry: Entry) -> float:
    worst = max(entry["upper"], -entry["lower"]) if entry["two_sided"] else entry["upper"]
    return float(worst / entry["margin"])


def evidence(verdict: Mapping[str, Any], figures: Sequence[Figure]) -> Section:
    """Every co-primary metric: its interval against the margin, and the seeds one by one."""
    title = "Quality against the margins"
    level = f"{verdict['alpha']:g}" if "alpha" in verdict else "the promised level"
    intro = (
        "Positive is worse (calibration: predicts more, and both sides count). "
        "ACCEPT needs every interval inside its shaded zone, in every evaluation "
        f"(one-sided level {level} at each look; variance between seeds plus variance of "
        "the finite evaluation set)."
    )
    if not verdict["metrics"]:
        return Section(title, [Text("No metric could be judged.", "warn")])
    blocks: list[Block] = [Text(intro)]
    for name in dict.fromkeys(key.rpartition("/")[0] for key in verdict["metrics"]):
        entries = {
            key: one for key, one in verdict["metrics"].items() if key.rpartition("/")[0] == name
        }
        rows = [_metric_row(key, entry) for key, entry in entries.items()]
        head = [evaluation_words(name), "", "verdict", "estimate", "interval", "margin"]
        blocks.append(Table(head, rows, "lllrrr"))
        blocks += _information(entries.get(f"{name}/ne"))
    blocks += _forecast(verdict)
    if figures:
        blocks.append(Figures(figures))
    blocks.append(Fold("How the intervals come about", [_variances(verdict)]))
    return Section(title, blocks)


def _metric_row(key: str, entry: Entry) -> list[str | Cell]:
    metric = key.rpartition("/")[2]
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


def _information(ne: Entry | None) -> list[Block]:
    share = None if ne is None else ne.get("relative_information")
    if share is None:
        return []
    text = (
        f"In terms of what the model has learned (1 - NE): {-100 * share:+.2f} % of the baseline's "
        "information gain."
    )
    return [Text(text)]


def _forecast(verdict: Mapping[str, Any]) -> list[Block]:
    """Power at the looks to come and the seeds that would do: open where a reader must decide."""
    found = verdict.get("forecast") or {}
    if not found:
        return []
    looks = list(dict.fromkeys(look for one in found.values() for look in one["power"]))
    rows = [
        [
            metric_words(key),
            *(_power(one, look) for look in looks),
            "over 200" if one["seeds_needed"] is None else str(one["seeds_needed"]),
            "-" if one["examples_factor"] is None else f"x {one['examples_factor']:.3g}",
        ]
        for key, one in found.items()
    ]
    head = ["metric", *(f"at {look} seeds" for look in looks), "seeds needed", "examples"]
    how = (
        "Chance to ACCEPT at the looks to come, if the true effect is the one seen (in brackets: "
        "if it is zero); the seeds needed for 90 %; and how many times as many evaluation examples "
        "bring their error to a quarter of the room that is left. A dash: the estimate is beyond "
        "its margin, and no number of examples moves it."
    )
    blocks: list[Block] = [Text(how), Table(head, rows, "l" + "r" * (len(looks) + 2))]
    title = "What more seeds would bring"
    if verdict["verdict"] == "INCONCLUSIVE":
        return [Text(f"{title}:"), *blocks]
    return [Fold(title, blocks)]


def _power(one: Entry, look: str) -> str:
    if look not in one["power"]:
        return "-"
    neutral = one["power_if_neutral"][look]
    return f"{100 * one['power'][look]:.0f} % ({100 * neutral:.0f} %)"


def _variances(verdict: Mapping[str, Any]) -> Table:
    rows = [
        [
            metric_words(key),
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


def slice_groups(slices: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Every slice in one group: protected, harm, warn, explore, quiet, untestable."""
    groups: dict[str, list[Entry]] = {
        name: [] for name in ("protected", "harm", "warn", "explore", "quiet", "untestable")
    }
    for one in slices:
        groups[_group(one)].append(one)
    return groups


def _group(one: Entry) -> str:
    if one["class"] == "protected":
        return "protected"
    if one["verdict"] == "REJECT":
        return "harm"
    if one.get("estimate") is None:
        return "untestable"
    if one["verdict"] == "WARN":
        return "warn"
    return "explore" if one.get("explore") else "quiet"


def slices_in_short(slices: Sequence[Entry]) -> str:
    """How many slices there are of each kind, for the head of the report."""
    names = {
        "protected": "protected",
        "harm": "harmed",
        "warn": "worse than the baseline",
        "explore": "worth a look",
        "quiet": "without a finding",
        "untestable": "too small for a test",
    }
    groups = slice_groups(slices)
    return ", ".join(f"{len(groups[one])} {name}" for one, name in names.items() if groups[one])


def slices_section(slices: Sequence[Entry]) -> Section:
    """The slices by what was found: protected first, then harm, warnings, and what is unknown."""
    groups = slice_groups(slices)
    blocks: list[Block] = [
        Text(
            "Relative NE inside each declared slice. Protected slices must be non-inferior by "
            "their own margin; the others are tested for harm beyond theirs (Holm over all)."
        )
    ]
    for name, said in (
        ("protected", "Protected: each must pass, or the gate does not."),
        ("harm", "Harm beyond the margin is shown: this alone is a REJECT."),
        ("warn", "Worse than the baseline beyond chance, harm beyond the margin not shown: noted."),
        ("explore", "Worth a look (false discovery rate 0.1), no part of the verdict."),
    ):
        if groups[name]:
            blocks += [Text(said), _slice_table(groups[name])]
    if not groups["harm"] and any(groups[one] for one in ("warn", "explore", "quiet")):
        blocks.append(Text("No slice shows harm beyond its margin.", "good"))
    if groups["quiet"]:
        quiet = _slice_table(groups["quiet"])
        many = len(groups["quiet"]) > _MANY
        title = f"Slices without a finding: {len(groups['quiet'])}"
        blocks += [Fold(title, [quiet])] if many else [Text(f"{title}."), quiet]
    if groups["untestable"]:
        blocks += _untestable(groups["untestable"])
    for one in slices:
        if one.get("pooled"):
            where = evaluation_words(one["form"])
            blocks.append(Text(f"rest, {where}, pools: {', '.join(map(str, one['pooled']))}"))
    return Section("Slices", blocks)


def _slice_table(slices: Sequence[Entry]) -> Table:
    rows: list[list[str | Cell]] = []
    for one in slices:
        tested = one.get("estimate") is not None
        low, high = (amount("ne", one.get(part)) for part in ("lower", "upper"))
        interval = f"{low} to {high}" if tested else str(one["reason"])
        label = f"{one['name']}: {interval}, margin {amount('ne', one['margin'])}"
        # In the other slices only harm is tested: the zone is the promise, not a need to pass.
        drawing = strip(one, label=label) if tested else ""
        rows.append(
            [
                str(one["name"]),
                evaluation_words(one["form"]),
                Cell("", drawing=drawing),
                Cell(_word(one["verdict"]), TONES[one["verdict"]]),
                f"{one['positives']:.0f}",
                interval,
                amount("ne", one["margin"]),
            ]
        )
    head = ["slice", "evaluation", "", "verdict", "positives", "interval", "margin"]
    return Table(head, rows, "lllcrrr")


def _untestable(slices: Sequence[Entry]) -> list[Block]:
    rows: list[list[str | Cell]] = [
        [str(one["name"]), evaluation_words(one["form"]), Cell("not testable"), str(one["reason"])]
        for one in slices
    ]
    table = Table(["slice", "evaluation", "verdict", "why"], rows, "llll")
    title = f"Too small for a test: {len(slices)}; nothing is known about harm in them"
    return [Fold(title, [table])] if len(slices) > _MANY else [Text(f"{title}."), table]


def _word(verdict: str) -> str:
    return {"WARN": "worse", "OK": "no harm shown"}.get(verdict, verdict)
