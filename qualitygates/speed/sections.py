"""The report's section on speed, and the two sentences that say what both release gates found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..blocks import Block, Bullets, Cell, Facts, Section, Table, Text
from ..page import TONES

RUNGS: Final = {
    "kernel": "one kernel",
    "module": "one layer, forward and backward, every conversion inside",
    "step": "one training step, optimizer included",
    "job": "the job on all its devices",
}
_QUALITY: Final = {
    "ACCEPT": "non-inferior to BF16 by the promised margins",
    "REJECT": "worse than the promised margins allow, or failed in training",
    "INCONCLUSIVE": "neither harm nor harmlessness is shown",
}
_NO_TONE: Final = {"missing": "warn", "information": "", "not_required": "", "not_measurable": ""}


def release_sentences(verdict: Mapping[str, Any]) -> list[str]:
    """One sentence for the quality gate and one for the speed gate."""
    quality = verdict.get("quality", verdict["verdict"])
    speed = verdict["speed"]
    return [
        f"Quality {quality}: {_QUALITY[quality]}.",
        f"{_said(speed)}.",
    ]


def _said(speed: Mapping[str, Any]) -> str:
    """Verdict and reason; a reason that begins with the verdict says it once."""
    word = _word(speed["status"])
    return f"Speed{'' if speed['reason'].startswith(word) else ' ' + word}: {speed['reason']}"


def speed_in_short(speed: Mapping[str, Any]) -> tuple[str, str]:
    """The word and the reason for the head of the report."""
    word = _word(speed["status"])
    reason = str(speed["reason"]).removeprefix(word).lstrip(": ").removeprefix("here: ")
    return word, reason or "-"


def speed_tone(status: str) -> str:
    """The tone in which a status of the speed gate is shown."""
    return _NO_TONE[status] if status in _NO_TONE else TONES[status]


def speed_section(speed: Mapping[str, Any]) -> Section:
    """The speed gate: verdict, the evidence ladder with what is missing, costs, MFU."""
    status = speed["status"]
    blocks: list[Block] = [Text(f"{_said(speed)}.", speed_tone(status))]
    rungs = speed.get("rungs", [])
    if rungs:
        blocks.append(
            Text(
                "Evidence ladder: time of the candidate over time of BF16, one-sided 95 % bounds "
                "over pairs of interleaved blocks; a rung not run is missing, and nothing is "
                "inferred from another one. ACCEPT needs the whole interval below the limit."
            )
        )
        head = ["rung", "what was timed", "verdict", "time ratio", "interval", "limit"]
        rows = [row for rung in rungs for row in _rung_rows(rung)]
        blocks.append(Table(head, rows, "lllrrr"))
    if any(one["conversion_ms"] for rung in rungs for one in rung["entries"]):
        blocks.append(_conversions(rungs))
    if speed.get("give_back"):
        names = ", ".join(speed["give_back"])
        blocks.append(Text(f"Not shown to gain, better left in BF16: {names}", "warn"))
    blocks += _whole_job(speed.get("whole_job"))
    blocks += _utilization(speed.get("utilization"))
    if speed.get("machine"):
        facts = [(key, str(value)) for key, value in speed["machine"].items()]
        blocks.append(Facts([*facts, ("timings", speed.get("source", "measured"))]))
    return Section("Speed", blocks)


def _rung_rows(rung: Mapping[str, Any]) -> list[list[str | Cell]]:
    name = rung["rung"]
    if not rung["entries"]:
        word = Cell("missing", "warn")
        return [[name, f"not run: {RUNGS[name]}", word, "-", "-", "-"]]
    return [_entry_row(name, entry) for entry in rung["entries"]]


def _entry_row(rung: str, entry: Mapping[str, Any]) -> list[str | Cell]:
    low, mid, high, limit = (entry[key] for key in ("lower", "ratio", "upper", "limit"))
    status = entry["status"]
    alike = len(entry["layers"]) - 1
    what = entry["name"] + (f" and {alike} alike" if alike > 0 else "")
    return [
        rung,
        what,
        Cell(_word(status), speed_tone(status)),
        f"{mid:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{limit:g}",
    ]


def _conversions(rungs: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[list[str | Cell]] = [
        [
            one["name"],
            f"{one['baseline_ms']:.3f}",
            f"{one['candidate_ms']:.3f}",
            f"{one['conversion_ms']:.3f}",
            _percent(one["conversion_tax"]),
        ]
        for rung in rungs
        for one in rung["entries"]
        if one["conversion_ms"] is not None
    ]
    head = ["layer", "BF16, ms", "candidate, ms", "its casts alone, ms", "conversion tax"]
    return Table(head, rows, "lrrrr")


def _whole_job(job: Mapping[str, Any] | None) -> list[Block]:
    if job is None:
        return []
    blocks: list[Block] = [Text(f"{job['reason'][0].upper()}{job['reason'][1:]}.")]
    if job.get("costs"):
        costs = [(key.replace("_s", ", s"), f"{value:.2f}") for key, value in job["costs"].items()]
        even = job["break_even_steps"]
        said = "never" if even is None else f"{even:.0f} steps"
        blocks.append(Facts([*costs, ("break-even", said)]))
    return blocks


def _utilization(found: Mapping[str, Any] | None) -> list[Block]:
    if found is None:
        return []
    blocks: list[Block] = []
    peak = found["peak_tflops"]
    rows: list[list[str | Cell]] = []
    for key, what in (
        ("local_mfu_bf16_peak", f"local MFU by bf16 peak, {_tflops(peak['bf16'])}"),
        ("local_mfu_format_peak", f"local MFU by format peak, {_tflops(peak['format'])}"),
        ("scaling_ratio", "scaling ratio, step on one device / step in the job"),
        ("job_mfu_bf16_peak", "MFU of the job by bf16 peak"),
    ):
        values = [_percent(found[arm][key]) for arm in ("baseline", "candidate")]
        if any(value != "-" for value in values):
            rows.append([what, *values])
    if rows:
        blocks.append(Table(["", "BF16", "candidate"], rows, "lrr"))
    if found["step_ratio_from_modules"] is not None:
        text = (
            "The layers' own savings alone would make the step "
            f"{found['step_ratio_from_modules']:.3f} of BF16's: a check of the table, no evidence."
        )
        blocks.append(Text(text))
    if found["missing"]:
        blocks.append(Bullets([f"Missing: {one}" for one in found["missing"]]))
    return blocks


def speed_summary(found: Mapping[str, Any]) -> str:
    """The speed gate for a terminal: verdict, ladder, whole job, what to do."""
    lines = [_said(found)[0].lower() + _said(found)[1:]]
    for rung in found["rungs"]:
        if not rung["entries"]:
            lines.append(f"  {rung['rung']:<7} missing")
        for one in rung["entries"]:
            lines.append(
                f"  {rung['rung']:<7} {one['ratio']:.3f} [{one['lower']:.3f}, {one['upper']:.3f}] "
                f"limit {one['limit']:g}: {_word(one['status'])}  {one['name']}"
            )
    job = found.get("whole_job")
    if job is not None:
        lines.append(f"  {job['reason']}")
    if found.get("give_back"):
        lines.append(f"  advice: leave these in BF16: {', '.join(found['give_back'])}")
    return "\n".join(lines)


def _word(status: str) -> str:
    return status.replace("_", " ")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _tflops(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g} TFLOP/s dense"
