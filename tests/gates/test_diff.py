"""qualitygates diff: exit code 0, 1 or 3, every difference named, nothing else touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from qualitygates.__main__ import main
from qualitygates.acceptance import settle
from qualitygates.diff import diff, in_words
from qualitygates.errors import RecordError
from qualitygates.judging import judge_records
from qualitygates.records import RunStore, content_hash, seal, write_json_atomic
from tests.gates import synthetic

GATE = synthetic.gate((3,))
RUNS = synthetic.records(synthetic.clicks(0), seeds=(11, 12, 13))


def folder(path: Path, *, gate: dict[str, Any] = GATE, **facts: Any) -> Path:
    """A judged gate folder around synthetic runs; `facts` change the candidates."""
    store = RunStore(path)
    promise = store.write_gate(gate)
    runs = [run | (facts if run["arm"] == "candidate" else {}) for run in RUNS]
    for run in runs:
        store.save(run | {"key": content_hash(run["inputs"])})
    verdict = judge_records(promise, runs)
    settle(path, promise, runs, verdict=verdict)
    write_json_atomic(path / "verdict.json", verdict)
    return path


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("first"))


@pytest.fixture
def copy(first: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first, tmp_path / "copy"))


def words(result: dict[str, Any]) -> list[str]:
    return [one["words"] for one in result["differences"]]


def test_two_writings_of_one_gate_are_the_same(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = GATE | {"created": "2026-02-02T00:00:00Z"}
    second = folder(tmp_path / "second", gate=later, timing={"train_s": 9.0})
    assert main(["diff", str(first), str(second)]) == 0
    assert "the same gate folder" in capsys.readouterr().out
    for name in ("gate", "verdict", "acceptance"):
        assert diff(first / f"{name}.json", second / f"{name}.json")["same"], name
    assert diff(*(sorted((one / "runs").glob("candidate*"))[0] for one in (first, second)))["same"]


def test_every_difference_is_named(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = {"name": "mlp.0", "fprop": "nvfp4", "dgrad": "mxfp8", "wgrad": "mxfp8", "reason": "r"}
    other = {"name": "mlp.1", "fprop": "mxfp8", "dgrad": "mxfp8", "wgrad": "mxfp8"}
    strict = GATE | {"margins": GATE["margins"] | {"name": "custom", "auc": 0.001}}
    second = folder(tmp_path / "second", gate=strict, plan_layers=[layer, other])
    before = {path: path.read_bytes() for path in second.rglob("*.json")}
    assert main(["diff", str(first), str(second), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    fields = {one["field"]: one for one in result["differences"]}
    auc = fields["gate.margins.auc"]
    assert (auc["first"], auc["second"]) == (0.0025, 0.001)
    assert auc["words"] == "gate.margins.auc: 0.0025 -> 0.001 (-0.0015)"
    assert "runs.candidate, seed 11.plan_layers.mlp.0.fprop" in fields
    assert not [name for name in fields if "mlp.1.fprop" in name]
    assert {path: path.read_bytes() for path in second.rglob("*.json")} == before
    assert main(["diff", str(first), str(second)]) == 1
    assert '"mxfp8" -> "nvfp4"' in capsys.readouterr().out


def test_curves_are_summed_up(first: Path, tmp_path: Path) -> None:
    path = next((first / "runs").glob("candidate-011*"))
    run = json.loads(path.read_text())
    run["training"]["loss"][5] += 0.25
    changed = tmp_path / "run.json"
    write_json_atomic(changed, seal(run))
    (line,) = words(diff(path, changed))
    assert line.startswith("training.loss: 1 of 200 entries differ, the first at 5:")
    assert line.endswith("largest difference 0.25")


def test_missing_parts_and_runs_are_differences(first: Path, copy: Path) -> None:
    second = copy
    (second / "acceptance.json").unlink()
    next((second / "runs").glob("null-012*")).unlink()
    found = words(diff(first, second))
    assert any(line.startswith("acceptance: only in the first") for line in found)
    assert any(line.startswith("runs.null, seed 12: only in the first") for line in found)
    assert len(found) == 2


def test_broken_input_ends_in_three(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.json"
    cut.write_text((first / "gate.json").read_text()[:-30])
    edited = tmp_path / "edited.json"
    edited.write_text((first / "gate.json").read_text().replace("0.0025", "0.0026"))
    plain = tmp_path / "plain.json"
    plain.write_text("{}")
    gate = first / "gate.json"
    for other, says in (
        (tmp_path / "absent.json", "cannot be read"),
        (cut, "not a whole JSON file"),
        (edited, "damaged or edited"),
        (plain, "no record that diff knows"),
        (first / "verdict.json", "diff compares two of one kind"),
        (tmp_path, "gate.json does not exist"),
    ):
        assert main(["diff", str(gate if other.suffix else first), str(other)]) == 3
        assert says in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["diff", str(gate)])
    assert caught.value.code == 3


def test_a_damaged_run_is_an_error_not_a_difference(first: Path, copy: Path) -> None:
    next((copy / "runs").glob("null-012*")).write_text("{")
    with pytest.raises(RecordError, match="damaged"):
        diff(first, copy)
    assert next((copy / "runs").glob("null-012*")).name.endswith(".json")


def test_text_from_records_cannot_steer_a_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2J\u202e<script>"
    files = []
    for name in (evil, "plain"):
        file = tmp_path / f"{len(files)}.json"
        value = {"verdict": name, "reasons": [], "metrics": {name: 1}}
        file.write_text(json.dumps(value))
        files.append(file)
    text = in_words(diff(*files))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\u001b[2J" in text
