"""Reports: complete, escaped, self-contained, and the same bytes for the same records."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from qualitygates import plots
from qualitygates.blocks import Cell, Facts, Fold, Pre, Section, Table, Text, to_markdown
from qualitygates.errors import RecordError
from qualitygates.experiment import Experiment
from qualitygates.judging import judge_records
from qualitygates.page import strip, to_html
from qualitygates.report import summary, write_report
from qualitygates.wording import amount, deviation, flatten
from tests.gates.synthetic import EFFECTS, Effect, clicks, find, records

EVIL = '<script>alert("x")</script>|&`*'
SEEDS = (1, 2, 3)
VOID = {"meta", "br", "img"}


def promise(**changes: Any) -> dict[str, Any]:
    toml = {
        "schema": 1,
        "name": "flights-mxfp8",
        "workload": "flights",
        "margins": "demo",
        "looks": [3, 5, 8],
        "options": {"rows": 1000},
        "train": {"steps": 200, "batch_size": 1024},
        "baseline": {"recipe": "bf16"},
        "candidate": {"recipe": "mxfp8"},
        "slices": {"protected": ["mobile"]},
        "speed": {"required": False},
    }
    gate = Experiment.from_dict(toml | changes).promise(created="2026-01-01T00:00:00+00:00")
    return gate | {"facts": {"label": "late by 15 minutes", "rows": {"train": 245012}}}


def finished(effect: Effect = EFFECTS["candidate"]) -> list[dict[str, Any]]:
    runs = records(DATA, seeds=SEEDS, effects=EFFECTS | {"candidate": effect})
    for run in runs:
        run["plan_table"] = f"layer   fprop\nmlp.0   mxfp8  {EVIL}"
        run["inputs"] = {"recipe": "schema = 1\n", "seed": run["seed"]}
    return runs


DATA = clicks(rows=20_000, users=1200)
GATE, RUNS = promise(), finished()
VERDICT = judge_records(GATE, RUNS)


class Page(HTMLParser):
    """Checks nesting, and keeps tags, attributes, texts and ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name.split(":")[-1] in ("href", "src", "action", "data", "srcset"):
                self.links.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def written(folder: Path, gate: Any = GATE, runs: Any = RUNS, verdict: Any = VERDICT) -> Page:
    return Page(write_report(folder, gate, runs, verdict=verdict).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("gate")
    written(target)
    return target


def test_three_files_an_acceptance_and_nothing_else(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "acceptance.json",
        "report.html",
        "report.md",
        "verdict.json",
    ]
    assert json.loads((folder / "verdict.json").read_text(encoding="utf-8")) == VERDICT


def test_the_page_needs_nothing_from_outside(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.isdisjoint({"script", "link", "iframe", "img", "object", "embed", "base"})
    assert not re.search(r"https?:", text)
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text


def test_everything_a_reader_needs_is_there(folder: Path) -> None:
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    markdown = (folder / "report.md").read_text(encoding="utf-8").replace("\\", "")
    for needed in (
        "The candidate is non-inferior to BF16",
        *VERDICT["reasons"],
        "NE, relative",
        "calibration shift",
        "±2.000 %",
        "200 steps, batch size 1024",
        "late by 15 minutes",
        "rows.train",
        "Both controls behaved",
        "BF16 with logit noise worth 2 NE margins",
        "no hard failure seen in 3 runs",
        "loss spikes",
        "mobile",
        "not testable",
        "this gate promises quality only",
        "every product ran in the precision that was planned",
        "600 times mxfp8",
        VERDICT["plan_hash"],
        GATE["experiment_hash"],
        "python -m qualitygates judge DIR",
        'workload = "flights"',
    ):
        assert needed in page.text or needed in " ".join(page.words), needed
        if "\n" not in needed:
            assert needed in markdown, needed
    for run in RUNS:
        ne = f"{run['evaluations']['bf16']['metrics']['ne']:.5f}"
        assert ne in page.text
        assert ne in markdown


def test_the_plots_show_both_arms_and_every_metric(folder: Path) -> None:
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    for title in (
        *("Training loss", "Gradient norm", "Loss gap, paired", "Noise floor"),
        *("Relative NE by seed", "AUC drop by seed", "GAUC drop by seed"),
        "Calibration shift by seed",
    ):
        assert title in page.text
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.count("<figure>") == 8
    tested = [one for one in VERDICT["slices"] if one["estimate"] is not None]
    assert len(VERDICT["metrics"]) == 8
    assert text.count('class="strip"') == 8 + len(tested)
    assert "var(--base)" in text
    assert "var(--cand)" in text
    assert not re.search(r"#(0[1-7])\1\1", text)


def test_the_same_records_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    written(tmp_path)
    for name in ("report.html", "report.md", "verdict.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_data_cannot_become_markup(tmp_path: Path) -> None:
    gate, runs, verdict = copy.deepcopy((GATE, RUNS, VERDICT))
    gate["experiment"]["name"] = gate["experiment"]["workload"] = EVIL
    gate["facts"] = {EVIL: EVIL}
    verdict["reasons"] = verdict["advice"] = [EVIL]
    verdict["environment"] = [{EVIL: EVIL}]
    verdict["slices"][0]["name"] = EVIL
    for run in runs:
        run["plan_layers"][0]["name"] = EVIL
        run["inputs"]["recipe"] = EVIL
    page = written(tmp_path, gate, runs, verdict)
    assert "script" not in page.tags
    assert page.text.count(EVIL) > 8
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    # Indented blocks are literal in Markdown; everywhere else the tag is escaped.
    prose = [line for line in markdown.splitlines() if not line.startswith("    ")]
    assert not [line for line in prose if "<script" in line.replace("\\<", "")]
    for line in prose:
        if line.startswith("| ") and "script" in line:
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 6, 8)


def test_without_matplotlib_the_report_says_how_to_get_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    page = written(tmp_path)
    assert "plots: pip install 'lowprec[plots]'" in page.text
    assert "figure" not in page.tags
    assert "NE, relative" in page.text


def test_a_rejected_candidate(tmp_path: Path) -> None:
    runs = finished(Effect(shared=0.5, seed=0.1))
    gate = promise(candidate={"recipe": "mxfp8", "fault": {"logit_noise": 0.3}})
    verdict = judge_records(gate, runs)
    page = written(tmp_path, gate, runs, verdict)
    assert verdict["verdict"] == "REJECT"
    assert "worse than the promised margins allow" in page.text
    assert "planted harm (logit_noise = 0.3)" in page.text


def test_runs_that_crashed_or_lost_their_numbers(tmp_path: Path) -> None:
    runs = copy.deepcopy(RUNS)
    crashed, holed = find(runs, "candidate", 1), find(runs, "candidate", 2)
    crashed["training"].update(loss=[0.7, None], grad_norm=[1.0, None], crashed="CUDA gone")
    crashed["evaluations"] = {}
    holed["training"]["loss"][50:] = [None] * 150
    holed["training"]["nonfinite"] = [{"step": 50, "where": "loss"}]
    verdict = judge_records(GATE, runs)
    page = written(tmp_path, GATE, runs, verdict)
    assert verdict["verdict"] == "REJECT"
    assert "crashed: CUDA gone" in page.text
    assert "No metric could be judged" in page.text
    assert "non-finite loss at step 50" in page.text


def test_runs_that_never_took_a_step(tmp_path: Path) -> None:
    runs = copy.deepcopy(RUNS)
    for seed in SEEDS:
        run = find(runs, "candidate", seed)
        run["training"].update(loss=[], grad_norm=[], crashed="out of memory")
        run["evaluations"], run["gemms"] = {}, {}
    page = written(tmp_path, GATE, runs, judge_records(GATE, runs))
    assert "crashed: out of memory" in page.text
    assert "Training loss" not in page.text


def test_products_that_differ_from_the_plan_are_named(tmp_path: Path) -> None:
    runs = copy.deepcopy(RUNS)
    run = find(runs, "candidate", 3)
    run["gemms"]["mlp.1"]["wgrad"] = {"bf16": 200}
    run["gemms_match_plan"] = False
    for one in runs:
        one["plan_layers"].append(
            {"name": "head", "fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16", "converted": False}
        )
    page = written(tmp_path, GATE, runs, judge_records(GATE, runs))
    assert "Planned and executed products differ: candidate seed 3" in page.text
    assert "400 times mxfp8, 200 times bf16 differs" in page.text
    assert "left as it was, not counted" in page.text


def test_controls_that_did_not_run_are_said(tmp_path: Path) -> None:
    gate = promise(controls={"null": False, "known_bad_margins": 0})
    runs = [run for run in RUNS if run["arm"] in ("baseline", "candidate")]
    verdict = judge_records(gate, runs)
    page = written(tmp_path, gate, runs, verdict)
    assert verdict["verdict"] == "INCONCLUSIVE"
    assert "do not show that this gate can tell good from bad" in page.text
    assert "Both controls behaved" not in page.text


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("", encoding="utf-8")
    with pytest.raises(RecordError, match="was not written"):
        write_report(blocker / "gate", GATE, RUNS, verdict=VERDICT)


def test_the_summary_for_a_terminal() -> None:
    lines = summary(VERDICT).splitlines()
    assert lines[0].startswith("ACCEPT: the candidate is non-inferior")
    assert sum("margin" in line and "ACCEPT" in line for line in lines) >= 8
    waiting = VERDICT | {"verdict": "INCONCLUSIVE", "next_look": 5, "advice": ["two more"]}
    assert "next look: 5 seeds" in summary(waiting)
    assert "advice: two more" in summary(waiting)


def test_numbers_are_said_in_the_unit_of_their_margin() -> None:
    assert amount("trained/ne", 0.0005) == "+0.050 %"
    assert amount("auc", -0.00025) == "-0.00025"
    assert amount("gauc", None) == "-"
    assert deviation("bf16/calibration", 0.000123) == "0.012 %"
    assert deviation("auc", 5.8e-5) == "5.8e-05"
    assert flatten({"a": {"b": 0.25, "c": [1, 2]}, "d": True}) == [
        ("a.b", "0.25"),
        ("a.c", "1, 2"),
        ("d", "True"),
    ]


def positions(svg: str) -> list[float]:
    return [float(one) for one in re.findall(r'(?:x1|cx)="([\d.]+)"', svg)]


def test_the_strip_puts_the_interval_where_it_is() -> None:
    entry = {"estimate": 0.0, "lower": -0.5, "upper": 0.5, "margin": 1.0, "verdict": "ACCEPT"}
    zero, margin, low, mid = positions(strip(entry, label="x"))
    assert zero == mid == 130
    assert low < mid < margin
    assert margin - mid == pytest.approx(2 * (mid - low), abs=0.2)
    both = strip(entry | {"two_sided": True}, label="x")
    assert len(positions(both)) == 5
    assert both.count("<path") == 0
    far = {"estimate": 40.0, "lower": 30.0, "upper": 50.0, "margin": 1.0, "verdict": "REJECT"}
    assert "<path" in strip(far, label='"><b>')
    assert "<b>" not in strip(far, label='"><b>')


def test_blocks_render_in_both_languages() -> None:
    sections = [
        Section("Top", [Text("a_b")]),
        Section("Rest", [Fold("More", [Pre("x  y\n z"), Facts([("k", "v|w")])])]),
        Section("Numbers", [Table(["n", "m"], [["1", Cell("2", "good")]], "lr")]),
    ]
    markdown = to_markdown("T", sections)
    for line in ("a\\_b", "### More", "    x  y", "| k | v\\|w |", "| :-- | --: |", "| 1 | 2 |"):
        assert line in markdown.splitlines()
    page = Page(to_html("T", "REJECT", sections))
    assert {"details", "pre", "dl", "table"} <= page.tags
