"""A promise that is edited after the first run no longer fits its runs, even when sealed anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qualitygates import judge
from qualitygates.errors import RecordError
from qualitygates.judging import judge_records
from qualitygates.pairing import promise_hash
from qualitygates.records import RunStore, content_hash, seal
from tests.gates.synthetic import clicks, gate, records
from tests.gates.test_runs import experiment

SEEDS = (11, 12, 13)


def promised(**changes: Any) -> tuple[dict, list[dict]]:
    """A gate and runs that were made under it."""
    promise = gate((3,)) | changes
    runs = records(clicks(), seeds=SEEDS)
    for run in runs:
        run["promise_hash"] = promise_hash(promise)
    return promise, runs


@pytest.fixture(scope="module")
def evidence() -> tuple[dict, list[dict]]:
    return promised()


def test_runs_of_the_promise_are_judged(evidence: tuple[dict, list[dict]]) -> None:
    assert judge_records(*evidence)["verdict"] == "ACCEPT"


@pytest.mark.parametrize(
    "edit",
    [
        {"margins": {"name": "custom", "ne": 0.1, "auc": 0.1, "gauc": 0.1, "calibration": 0.1}},
        {"slices": {"protected": [], "protected_margin_factor": 9.0}},
        {"speed": {"required": True}},
        {"controls": {"null": False}},
        {"experiment_hash": "another"},
    ],
)
def test_an_edited_promise_is_detected(evidence: tuple[dict, list[dict]], edit: dict) -> None:
    promise, runs = evidence
    with pytest.raises(RecordError, match="made under another promise than gate"):
        judge_records(promise | edit, runs)


def test_other_looks_over_the_same_runs_are_another_promise(
    evidence: tuple[dict, list[dict]],
) -> None:
    promise, runs = evidence
    longer = gate((3, 5))
    assert longer["seeds"][:3] == promise["seeds"]
    with pytest.raises(RecordError, match="looks, seeds"):
        judge_records(longer, runs)


def test_what_a_promise_is_made_of_and_what_not() -> None:
    plain = gate((3,))
    assert promise_hash(plain) == promise_hash(plain | {"created": "later", "checksum": "x"})
    assert promise_hash(plain) != promise_hash(plain | {"seeds": [1, 2, 3]})


def test_a_gate_json_edited_and_sealed_again_is_detected_on_disk(tmp_path: Path) -> None:
    one = experiment()
    store = RunStore(tmp_path)
    promise = store.write_gate(one.promise(created="2026-01-01T00:00:00Z"))
    for run in records(clicks(), seeds=one.seeds):
        inputs = {"arm": run["arm"], "seed": run["seed"]}
        kept = {
            "inputs": inputs,
            "key": content_hash(inputs),
            "promise_hash": promise_hash(promise),
        }
        store.save(run | kept)
    assert judge([tmp_path])["verdict"] == "ACCEPT"
    wider = json.loads(store.gate_path.read_text())
    for table in (wider["margins"], wider["experiment"]["margins"]):
        table |= {"name": "custom", "ne": 0.5, "auc": 0.5, "gauc": 0.5, "calibration": 0.5}
    wider["experiment_hash"] = content_hash(wider["experiment"])
    store.gate_path.write_text(json.dumps(wider))
    with pytest.raises(RecordError, match="checksum"):
        judge([tmp_path])
    store.gate_path.write_text(json.dumps(seal(wider)))
    with pytest.raises(RecordError, match="made under another promise"):
        judge([tmp_path])
    store.gate_path.write_text(json.dumps(promise))
    assert judge([tmp_path])["verdict"] == "ACCEPT"
