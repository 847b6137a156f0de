"""The report of a gate: verdict.json, report.md and one self-contained report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import plots
from .appendix import appendix
from .blocks import Section, Text, to_markdown
from .page import to_html
from .records import write_json_atomic, write_text_atomic
from .sections import compared, evidence, headline, training, what_ran
from .wording import MEANING

Run = Mapping[str, Any]


def write_report(
    folder: str | Path,
    gate: Mapping[str, Any],
    runs: Sequence[Run],
    *,
    verdict: Mapping[str, Any],
) -> Path:
    """Write verdict.json, report.md and report.html, each whole or not at all; returns the page.

    Raises RecordError when the folder cannot be written.
    """
    folder = Path(folder)
    title, sections = build(gate, runs, verdict=verdict)
    write_json_atomic(folder / "verdict.json", verdict, indent=2)
    write_text_atomic(folder / "report.md", to_markdown(title, sections))
    page = folder / "report.html"
    write_text_atomic(page, to_html(title, verdict["verdict"], sections))
    return page


def build(
    gate: Mapping[str, Any], runs: Sequence[Run], *, verdict: Mapping[str, Any]
) -> tuple[str, list[Section]]:
    """The title and the sections of the report, in reading order."""
    experiment = gate["experiment"]
    drawn = plots.available()
    sections = [
        headline(gate, verdict),
        evidence(verdict, plots.per_seed(verdict) if drawn else []),
        compared(gate, verdict),
        training(runs, verdict, plots.training(runs) if drawn else []),
        *what_ran(gate, runs, verdict, plots.noise(verdict) if drawn else []),
        *appendix(gate, runs, verdict),
    ]
    if not drawn:
        sections[1] = Section(sections[1].title, [*sections[1].blocks, Text(plots.MISSING, "warn")])
    return f"{experiment.get('name', 'gate')}: quality gate", sections


def summary(verdict: Mapping[str, Any]) -> str:
    """The verdict for a terminal: its meaning, the reasons, the intervals, what to do next."""
    lines = [f"{verdict['verdict']}: {MEANING[verdict['verdict']]}"]
    lines += [f"  - {reason}" for reason in verdict["reasons"]]
    for name, entry in verdict["metrics"].items():
        interval = f"[{entry['lower']:+.6f}, {entry['upper']:+.6f}]"
        lines.append(
            f"  {name:<20} {entry['estimate']:+.6f} {interval} margin {entry['margin']:g}: "
            f"{entry['verdict']}"
        )
    if verdict["next_look"]:
        lines.append(f"  next look: {verdict['next_look']} seeds; the same command goes on")
    lines += [f"  advice: {text}" for text in verdict["advice"]]
    return "\n".join(lines)
