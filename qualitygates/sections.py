"""The sections of a report that open it: the verdict and why, and what was compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .blocks import Block, Bullets, Cell, Facts, Fold, Section, Table, Text
from .page import TONES
from .quality_sections import slice_groups, slices_in_short, tightest
from .speed.sections import speed_in_short, speed_tone
from .usage_sections import acceptance_in_short
from .wording import (
    MEANING,
    METRICS,
    amount,
    evaluation_words,
    flatten,
    metric_words,
    number,
    table_of,
)

_FEW: Final = 4


def headline(
    gate: Mapping[str, Any], verdict: Mapping[str, Any], accepted: Mapping[str, Any] | None
) -> Section:
    """The verdict and why in a sentence, what each part of the gate found, what to do next."""
    word = verdict["verdict"]
    meaning = MEANING[word]
    why, *others = [str(reason) for reason in verdict["reasons"]] or ["no reason is recorded"]
    lead = f"{meaning[0].upper()}{meaning[1:]} Why: {_in_words(why, verdict)}."
    blocks: list[Block] = [Text(lead, "lead")]
    fault = table_of(gate["experiment"], "candidate").get("fault")
    if fault:
        named = fault.items() if isinstance(fault, Mapping) else [("fault", fault)]
        planted = ", ".join(f"{key} = {number(value)}" for key, value in named)
        text = f"The candidate carries a planted harm ({planted}): this gate tests the gate itself."
        blocks.append(Text(text, "warn"))
    blocks.append(_glance(verdict, accepted))
    # The table above says these two in full.
    told = (verdict["stability"]["statement"], f"speed: {verdict['speed']['reason']}")
    blocks += _listed([one for one in others if one not in told], "reason")
    if verdict["next_look"]:
        more = f"Next look: {verdict['next_look']} seeds. The same command goes on from here."
        blocks.append(Text(more, "warn"))
    blocks += _listed([f"Advice: {text}" for text in verdict["advice"]], "piece of advice")
    return Section(f"Verdict: {word}", blocks)


def _in_words(reason: str, verdict: Mapping[str, Any]) -> str:
    """A reason that begins with the key of a metric begins with its name."""
    key, space, rest = reason.rstrip(".").partition(" ")
    return (
        f"{metric_words(key)}: {rest}" if space and key in verdict["metrics"] else f"{key} {rest}"
    )


def _listed(items: Sequence[str], what: str) -> list[Block]:
    """A list, of which a long one shows its first lines and the others on demand."""
    if not items:
        return []
    few, more = items[:_FEW], items[_FEW:]
    blocks: list[Block] = [Bullets(few)]
    if more:
        noun = (
            what if len(more) == 1 else what.replace("piece", "pieces").replace("reason", "reasons")
        )
        blocks.append(Fold(f"{len(more)} more {noun}", [Bullets(more)]))
    return blocks


def _glance(verdict: Mapping[str, Any], accepted: Mapping[str, Any] | None) -> Table:
    """One row a part of the gate: what it found, in a word and in a sentence."""
    quality = verdict.get("quality", verdict["verdict"])
    health, controls = verdict["stability"], verdict["controls"]
    rows: list[list[str | Cell]] = [
        ["Quality", Cell(quality, TONES[quality]), tightest(verdict)],
        ["Stability", Cell(health["verdict"], TONES[health["verdict"]]), health["statement"]],
    ]
    if verdict["slices"]:
        groups = slice_groups(verdict["slices"])
        open_ones = [one for one in groups["protected"] if one["verdict"] != "ACCEPT"]
        rejected = groups["harm"] + [one for one in open_ones if one["verdict"] == "REJECT"]
        tone = "bad" if rejected else "warn" if open_ones or groups["warn"] else "good"
        word = {"bad": "harm", "warn": "look", "good": "no harm"}[tone]
        rows.append(["Slices", Cell(word, tone), slices_in_short(verdict["slices"])])
    behaved = controls["behaved"]
    shown = "the harmless arm accepted, the harmful one not" if behaved else controls["reasons"][0]
    rows.append(
        [
            "Controls",
            Cell("behaved", "good") if behaved else Cell("misbehaved", "bad"),
            shown,
        ]
    )
    speed = verdict["speed"]
    status, reason = speed_in_short(speed)
    rows.append(["Speed", Cell(status, speed_tone(speed["status"])), reason])
    written = Cell("written", "good") if accepted else Cell("none")
    rows.append(["acceptance.json", written, acceptance_in_short(accepted)])
    return Table(["", "found", "in short"], rows, "lll", stacks=True)


def compared(gate: Mapping[str, Any], verdict: Mapping[str, Any]) -> Section:
    """What was compared with what, and what was promised before the first run."""
    experiment = gate["experiment"]
    train = table_of(experiment, "train")
    margins = ", ".join(
        f"{METRICS[name]} {amount(name, verdict['margins'][name])[1:]}" for name in METRICS
    )
    looks = ", ".join(map(str, gate["looks"]))
    evaluations = gate.get("evaluations") or ("trained", "bf16")
    pairs = [
        ("workload", str(experiment.get("workload", "-"))),
        ("baseline", str(table_of(experiment, "baseline").get("recipe", "-"))),
        ("candidate", str(table_of(experiment, "candidate").get("recipe", "-"))),
        *_training(gate, train),
        ("evaluated", "; ".join(map(evaluation_words, evaluations))),
        ("seeds judged", ", ".join(map(str, verdict["seeds"]))),
        ("looks", f"after {looks} seeds; level {gate['alpha']:g} each, 0.05 overall"),
        ("margins", f"{verdict['margins'].get('name', 'custom')}: {margins}"),
        ("promised", str(gate.get("created", "-"))),
    ]
    blocks: list[Block] = [Facts(pairs)]
    if isinstance(gate.get("facts"), Mapping) and gate["facts"]:
        says = "About these predictions:" if gate.get("inputs") else "The workload says of itself:"
        blocks += [Text(says), Facts(flatten(gate["facts"]))]
    return Section("What was compared", blocks)


def _training(gate: Mapping[str, Any], train: Mapping[str, Any]) -> list[tuple[str, str]]:
    if gate.get("inputs"):
        told = f"predictions and curves that another training wrote, {len(gate['inputs'])} files"
        return [
            ("offline gate", told),
            ("pairing", "the same examples in every arm and seed; the rest is told, not checked"),
        ]
    said = f"{train.get('steps', '-')} steps, batch size {train.get('batch_size', '-')}"
    if train.get("processes", 1) != 1:
        said += f", {number(train['processes'])} processes a run"
    if train.get("device"):
        said += f", on {train['device']}"
    return [
        ("training", said),
        ("pairing", "same seed, initial weights, data order and steps in every arm"),
    ]
