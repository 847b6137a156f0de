"""The speed section of the report: both gates in a sentence, the ladder, gaps, hostile names."""

from __future__ import annotations

from typing import Any

import pytest

from qualitygates.blocks import Section, to_markdown
from qualitygates.page import to_html
from qualitygates.speed.rules import judge_speed
from qualitygates.speed.sections import release_sentences, speed_section, speed_summary
from tests.gates.timings import PROMISE, changed, speed_record


def shown(found: dict[str, Any]) -> str:
    return to_markdown("t", [speed_section(found)])


def page(found: dict[str, Any]) -> str:
    return to_html("t", "ACCEPT", [Section("Verdict", []), speed_section(found)])


def test_each_gate_has_a_sentence() -> None:
    speed = judge_speed(PROMISE, speed_record())
    quality, timing = release_sentences({"verdict": "ACCEPT", "quality": "ACCEPT", "speed": speed})
    assert quality == "Quality ACCEPT: non-inferior to BF16 by the promised margins."
    assert timing.startswith("Speed ACCEPT: module: all 2 faster")
    none = judge_speed(PROMISE, None)
    quality, timing = release_sentences(
        {"verdict": "INCONCLUSIVE", "quality": "REJECT", "speed": none}
    )
    assert quality.startswith("Quality REJECT: worse than the promised margins")
    assert timing.startswith("Speed: not measurable here: there are no timings")
    unasked = judge_speed({"required": False}, None)
    sentences = release_sentences({"verdict": "ACCEPT", "quality": "ACCEPT", "speed": unasked})
    assert sentences[1] == "Speed not required: this gate promises quality only."


def test_the_ladder_shows_every_rung_and_what_is_missing() -> None:
    text = shown(judge_speed(PROMISE, speed_record()))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    ladder = {row[0]: row for row in cells if row[0] in ("kernel", "module", "step", "job")}
    assert set(ladder) == {"kernel", "module", "step", "job"}
    assert ladder["kernel"][2:] == ["missing", "-", "-", "-"]
    assert ladder["job"][1].startswith("not run: ")
    assert ladder["step"][1:4] == ["training step", "ACCEPT", "0.800"]
    assert "pays from step" in text
    assert "Missing: the job rung, and with it the scaling ratio" in text.replace("\\", "")
    assert "local MFU by bf16 peak, 989.4 TFLOP/s dense" in text


def test_mfu_tax_and_layers_to_give_back_are_shown() -> None:
    found = judge_speed(PROMISE, speed_record(modules=(0.7, 1.2)))
    text = shown(found)
    assert "Not shown to gain, better left in BF16: mlp.1" in text
    # 4e12 flops in 10 ms are 400 TFLOP/s.
    local = found["utilization"]["baseline"]["local_mfu_bf16_peak"]
    assert local == pytest.approx(400 / 989.4, rel=0.02)
    assert f"{100 * local:.1f} %" in text
    tax = found["rungs"][1]["entries"][0]["conversion_tax"]
    assert f"{100 * tax:.1f} %" in text


def test_the_terminal_says_the_same() -> None:
    text = speed_summary(judge_speed(PROMISE, speed_record(modules=(0.7, 1.2))))
    assert text.startswith("speed REJECT: module: mlp.1 is not faster")
    assert "kernel  missing" in text
    assert "advice: leave these in BF16: mlp.1" in text
    assert speed_summary(judge_speed(PROMISE, None)).startswith("speed: not measurable here")


def test_information_is_no_verdict() -> None:
    text = shown(judge_speed(PROMISE, speed_record(native=0)))
    assert "| information |" in text
    assert "| ACCEPT |" not in text


def test_hostile_names_stay_text() -> None:
    evil = '</td><script>alert("1")</script>|`x`'
    record = speed_record()
    record = changed(record, "measurements.1.name", evil)
    record = changed(record, "measurements.1.layers", [evil])
    record = changed(record, "measurements.0.name", evil)
    record = changed(record, "machine.name", evil)
    record["quantized_layers"] = [evil, "mlp.1"]
    found = judge_speed(PROMISE, record)
    html = page(found)
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "\\<script\\>" in shown(found)
