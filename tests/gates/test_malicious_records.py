"""Records that somebody else sealed: nothing in them runs, escapes, or writes elsewhere."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qualitygates import plots
from qualitygates.__main__ import main
from qualitygates.errors import RecordError
from qualitygates.judging import judge_records
from qualitygates.records import RunStore, content_hash, seal
from qualitygates.report import write_report
from qualitygates.shapes import check_gate, check_run
from tests.gates import verdicts
from tests.gates.browser import PROGRAM, Browser
from tests.gates.synthetic import clicks, gate, records
from tests.gates.test_report import Page
from tests.gates.timings import PROMISE, speed_record

HARM = "window.harmed=1"
ATTACKS = (
    f"<script>{HARM}</script>",
    f"<img src=x onerror={HARM}>",
    f"'\"><svg onload={HARM}><a href=javascript:{HARM}>",
    f"</td></table></style></pre></title><script>{HARM}</script>",
    f"]]>--><iframe srcdoc='<script>{HARM}</script>'></iframe>",
    "<style>*{background:url(http://harm.example/x)}</style>",
    "$\\frac{$ `x` |a| [b](javascript:1) ![c](http://harm.example/y)",
    "\x00\x1b[31m\x08\u202egnol\u2066\x85\ud800",
)
EVIL = " ".join(ATTACKS)
LONG = "<b>" + "A" * 100_000
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "nav", "section"),
    *("footer", "h1", "h2", "h3", "p", "a", "ul", "li", "dl", "dt", "dd", "pre", "div", "table"),
    *("thead", "tbody", "tr", "th", "td", "details", "summary", "figure", "figcaption", "svg"),
    *("g", "path", "rect", "line", "circle", "text", "tspan", "defs", "use", "clippath"),
}
DATA = clicks(rows=6000, users=400)
RUNS = records(DATA, seeds=(11, 12, 13))
for one in RUNS:
    one["inputs"] = {"arm": one["arm"], "seed": one["seed"]}
    one["key"] = content_hash(one["inputs"])
JUDGED = judge_records(gate((3,)), RUNS)


def hostile(text: str) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """A gate, its runs and timings with `text` in every place that a text can have."""
    promise = gate((3,)) | {"experiment": verdicts._experiment(), "speed": PROMISE}
    for key in ("name", "workload"):
        promise["experiment"][key] = text
    promise["experiment"]["baseline"] = {"recipe": text}
    promise["experiment"]["train"] = {"steps": text, "batch_size": text, "device": text}
    promise |= {"facts": {text: {text: [text]}}, "experiment_hash": text, "created": "2026-01-01"}
    promise["margins"] = promise["margins"] | {"name": text}
    runs = copy.deepcopy(RUNS)
    for run in runs:
        for evaluation in run["evaluations"].values():
            evaluation["slices"] = {text: evaluation["slices"]["mobile"]}
        run["environment"] = {text: {text: text}}
        run["plan_table"] = text
        run["training"]["counters"] = {text: [0.1] * 50}
        run |= {"plan_hash": text, "recipe_hash": text}
        run["inputs"] |= {"recipe": text, text: text}
        run["key"] = content_hash(run["inputs"])
        for layer in run["plan_layers"]:
            layer |= {"name": f"{text} {layer['name']}", "fprop": text, "reason": text}
        run["gemms"] = {layer["name"]: {"fprop": {text: 3}} for layer in run["plan_layers"]}
    speed = speed_record()
    speed["machine"] = {"device": text, "name": text, text: text}
    speed["source"] = text
    names = [layer["name"] for layer in runs[0]["plan_layers"]]
    speed["quantized_layers"] = names
    speed["inputs"] |= {"workload": text, "batch_size": text}
    for one, name in zip(speed["measurements"][1:], names, strict=True):
        one |= {"name": name, "layers": [name]}
    return promise, runs, speed


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    promise, runs, _ = hostile(EVIL)
    verdict = judge_records(promise, runs)
    verdict["reasons"] = verdict["advice"] = [EVIL, *verdict["reasons"]]
    return write_report(tmp_path_factory.mktemp("evil"), promise, runs, verdict=verdict)


def test_no_text_becomes_markup(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = Page(text)
    assert found.tags <= TAGS, found.tags - TAGS
    assert all(link.startswith("#") for link in found.links)
    assert found.text.count("onerror=") > 20
    tags = re.findall(r"<[a-z][^<>]*>", text)
    assert not [tag for tag in tags if HARM in tag and "aria-label" not in tag]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def test_no_text_becomes_markdown(page: Path) -> None:
    text = (page.parent / "report.md").read_text(encoding="utf-8")
    prose = "\n".join(line for line in text.split("\n") if not line.startswith("    "))
    assert not re.search(r"(?<!\\)<[a-zA-Z/]", prose)
    assert not re.search(r"(?<!\\)\]\(", prose)
    assert "\x00" not in text


@pytest.mark.skipif(PROGRAM is None, reason="no chromium in PATH")
def test_no_text_runs_in_a_browser(page: Path) -> None:
    with Browser() as browser:
        seen = browser.load(page, width=375)
        assert browser.evaluate(seen, "window.harmed === undefined")
        assert seen.messages == []
        assert seen.requests == [page.as_uri()]
        assert browser.evaluate(seen, "document.documentElement.scrollWidth") <= 375


def test_timings_of_hostile_names_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    promise, runs, speed = hostile(EVIL)
    promise["recipe_hashes"] = None
    verdict = judge_records(promise, runs, speed=seal({"kind": "speed", "schema": 1, **speed}))
    found = Page(write_report(tmp_path, promise, runs, verdict=verdict).read_text("utf-8"))
    assert found.tags <= TAGS
    assert "conversion tax" in found.text


def test_names_of_any_length_make_a_page_that_opens(tmp_path: Path) -> None:
    promise, runs, _ = hostile(LONG)
    verdict = judge_records(promise, runs)
    page = write_report(tmp_path, promise, runs, verdict=verdict)
    text = page.read_text(encoding="utf-8")
    assert len(text) < 3_000_000
    assert "more characters)" in text
    assert Page(text).tags <= TAGS


def test_tasks_that_matplotlib_takes_for_formulas_are_drawn_as_they_are(tmp_path: Path) -> None:
    names = ["trained:$\\frac{<b>$", "bf16:$\\frac{<b>$"]
    promise = gate((3,)) | {"evaluations": names, "experiment": {}}
    runs = copy.deepcopy(RUNS)
    for run in runs:
        run["evaluations"] = dict(zip(names, run["evaluations"].values(), strict=True))
        run["pairing"]["evaluation_forms"] = names
    page = write_report(tmp_path, promise, runs, verdict=judge_records(promise, runs))
    found = Page(page.read_text(encoding="utf-8"))
    assert found.tags <= TAGS
    assert len(found.ids) == len(set(found.ids))
    assert "Relative NE by seed, $\\frac{<b>$" in found.text


def on_disk(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """A gate folder whose first candidate record and promise `change` alters before sealing."""
    promise, runs = gate((3,)) | {"experiment": verdicts._experiment()}, copy.deepcopy(RUNS)
    change(next(run for run in runs if run["arm"] == "candidate"), promise)
    (folder / "runs").mkdir(parents=True)
    (folder / "gate.json").write_text(json.dumps(seal(promise)))
    for number, run in enumerate(runs):
        (folder / "runs" / f"{number}.json").write_text(json.dumps(seal(run)))


@pytest.mark.parametrize(
    "field",
    [
        {"arm": "../../outside"},
        {"seed": "../../outside"},
        {"seed": True},
        {"key": "../../outside"},
    ],
    ids=str,
)
def test_no_field_of_a_record_leads_out_of_the_folder(
    tmp_path: Path, field: dict[str, Any]
) -> None:
    folder = tmp_path / "a" / "gate"
    on_disk(folder, lambda run, promise: run.update(field))
    before = {path for path in tmp_path.rglob("*") if folder not in path.parents}
    assert main(["report", str(folder)]) == 3
    RunStore(folder).load_all()
    with pytest.raises(RecordError):
        RunStore(folder).save(RUNS[0] | field)
    assert {path for path in tmp_path.rglob("*") if folder not in path.parents} == before
    assert sorted(one.name for one in folder.iterdir()) == [".lock", "gate.json", "runs"]


class Touch:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def content(kind: str, sentinel: Path) -> bytes:
    head = b'{"schema":1,"kind":"run","arm":'
    return {
        "pickle": pickle.dumps(Touch(sentinel)),
        "list 10^5 deep": b"[" * 100_000 + b"]" * 100_000,
        "object 10^5 deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        # 10^9 digits in a file of 1 GB are refused by the same limit.
        "10^7 digits": head + b"9" * 10_000_000 + b"}",
        "exponent of 10^12": head + b"1e999999999999}",
        "NaN": head + b"NaN}",
        "-Infinity": head + b"-Infinity}",
    }[kind]


KINDS = (
    *("pickle", "list 10^5 deep", "object 10^5 deep", "10^7 digits", "exponent of 10^12"),
    *("NaN", "-Infinity"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["runs/x.json", "gate.json", "speed.json"])
def test_what_is_no_record_is_refused_in_a_sentence(
    tmp_path: Path, kind: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    on_disk(tmp_path / "gate", lambda run, promise: None)
    sentinel = tmp_path / "harmed"
    (tmp_path / "gate" / where).write_bytes(content(kind, sentinel))
    assert main(["report", str(tmp_path / "gate")]) == 3
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert len(said) < 1000
    assert not sentinel.exists()
    assert not (tmp_path / "gate" / "report.html").exists()


FORMS = {
    "environment": "text",
    "plan_layers": [1],
    "plan_table": 5,
    "gemms": {"a": {"fprop": {"x": "y"}}},
    "gemms_match_plan": "yes",
    "timing": "x",
    "inputs": [],
    "training.loss": ["1"] * 200,
    "training.grad_norm": [1e308] * 200,
    "training.nonfinite": [1],
    "training.crashed": {"a": 1},
    "training.counters": {"x": "y"},
    "training.not_recorded": 5,
    "evaluations.trained.metrics": {"ne": "x"},
    "evaluations.trained.prediction_sample": "x",
}


@pytest.mark.parametrize("field", FORMS)
def test_a_sealed_record_of_another_form_is_named(tmp_path: Path, field: str) -> None:
    run = copy.deepcopy(RUNS[0])
    check_run(run)
    *parents, last = field.split(".")
    target: Any = run
    for key in parents:
        target = target[key]
    target[last] = FORMS[field]
    named = "evaluations" if field.startswith("evaluations") else field
    with pytest.raises(RecordError, match=f"seed 11: {named} does not have the form"):
        check_run(run)
    with pytest.raises(RecordError, match=named):
        write_report(tmp_path, gate((3,)), [run, *RUNS[1:]], verdict=JUDGED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", ["plan_layers", "training.loss", "training.counters"])
def test_the_commands_name_a_sealed_record_of_another_form(
    tmp_path: Path, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(run: dict[str, Any], promise: dict[str, Any]) -> None:
        *parents, last = field.split(".")
        (run[parents[0]] if parents else run)[last] = FORMS[field]

    on_disk(tmp_path / "gate", change)
    for command in ("judge", "report"):
        assert main([command, str(tmp_path / "gate")]) == 3
        said = capsys.readouterr().err
        assert f"{field} does not have the form" in said
        assert "Traceback" not in said


def test_losses_that_would_overflow_in_sums_are_no_record(tmp_path: Path) -> None:
    """Alternating 1e308 and -1e308 sum to NaN, which no rule calls too large."""

    def change(run: dict[str, Any], promise: dict[str, Any]) -> None:
        run["training"]["loss"] = [1e308, -1e308] * 100

    on_disk(tmp_path / "gate", change)
    assert main(["judge", str(tmp_path / "gate")]) == 3


def test_an_infinite_number_in_a_whole_record_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_disk(tmp_path / "gate", lambda run, promise: None)
    path = tmp_path / "gate" / "runs" / "0.json"
    text = path.read_text()
    seconds = json.loads(text)["timing"]["train_s"]
    path.write_text(text.replace(f'"train_s": {seconds}', '"train_s": 1e999'))
    assert "1e999" in path.read_text()
    assert main(["report", str(tmp_path / "gate")]) == 3
    assert "not plain JSON data" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"experiment": "x"},
        {"experiment": {"candidate": [1]}},
        {"inputs": 5},
        {"acceptance": {"expires_days": 10**30}},
        {"created": 5},
    ],
    ids=str,
)
def test_a_sealed_gate_of_another_form_is_named(change: dict[str, Any]) -> None:
    check_gate(gate((3,)))
    with pytest.raises(RecordError, match=f"gate.json: {next(iter(change))}"):
        check_gate(gate((3,)) | change)


def test_a_table_nested_deeply_is_refused(tmp_path: Path) -> None:
    nested: Any = {}
    for _ in range(400):
        nested = {"a": [nested]}
    run = RUNS[0] | {"environment": nested}
    with pytest.raises(RecordError, match="environment does not have the form"):
        write_report(tmp_path, gate((3,)), [run, *RUNS[1:]], verdict=JUDGED)
    with pytest.raises(RecordError, match="experiment does not have the form"):
        write_report(tmp_path, gate((3,)) | {"experiment": nested}, RUNS, verdict=JUDGED)
    assert list(tmp_path.iterdir()) == []
