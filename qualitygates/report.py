"""The report of a gate: verdict.json, report.md and one self-contained report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import plots
from .acceptance import settle
from .appendix import appendix, products
from .blocks import Section, Text, to_markdown
from .page import to_html
from .quality_sections import evidence, slices_section
from .records import write_json_atomic, write_text_atomic
from .sections import compared, headline
from .shapes import check_gate, check_run
from .speed.sections import speed_section
from .training_sections import controls_section, numerics, training
from .usage_sections import acceptance_section, accepted
from .wording import MEANING, table_of

Run = Mapping[str, Any]


def write_report(
    folder: str | Path,
    gate: Mapping[str, Any],
    runs: Sequence[Run],
    *,
    verdict: Mapping[str, Any],
) -> Path:
    """Write verdict.json, report.md and report.html, each whole or not at all; returns the page.

    acceptance.json comes first, written or removed as the verdict says: no verdict ever stands
    beside an acceptance that it contradicts. Raises RecordError when the folder cannot be written,
    or a record holds what no record of this program holds.
    """
    folder = Path(folder)
    check_gate(gate)
    for run in runs:
        check_run(run)
    title, sections = build(gate, runs, verdict=verdict)
    # All is made before anything is written: what cannot be shown changes nothing on disk.
    text, html = to_markdown(title, sections), to_html(title, verdict["verdict"], sections)
    settle(folder, gate, runs, verdict=verdict)
    write_json_atomic(folder / "verdict.json", verdict, indent=2)
    write_text_atomic(folder / "report.md", text)
    page = folder / "report.html"
    write_text_atomic(page, html)
    return page


def build(
    gate: Mapping[str, Any], runs: Sequence[Run], *, verdict: Mapping[str, Any]
) -> tuple[str, list[Section]]:
    """The title and the sections of the report, in reading order."""
    drawn = plots.available()
    covered = accepted(gate, runs, verdict=verdict)
    shown = evidence(verdict, plots.per_seed(verdict) if drawn else [])
    if not drawn:
        shown = Section(shown.title, [*shown.blocks, Text(plots.MISSING, "warn")])
    sections = [
        headline(gate, verdict, covered),
        shown,
        *([slices_section(verdict["slices"])] if verdict["slices"] else []),
        training(runs, verdict, plots.training(runs) if drawn else []),
        numerics(verdict),
        controls_section(gate, verdict, plots.noise(verdict) if drawn else []),
        speed_section(verdict["speed"]),
        products(runs),
        acceptance_section(covered),
        compared(gate, verdict),
        *appendix(gate, runs, verdict),
    ]
    return f"{table_of(gate, 'experiment').get('name', 'gate')}: quality gate", sections


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
