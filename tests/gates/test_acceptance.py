"""acceptance.json: written by an ACCEPT alone, removed by everything else, the same bytes again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qualitygates.acceptance import FILE, acceptance, read_rules, settle, withdraw
from qualitygates.errors import ExperimentError, RecordError
from qualitygates.experiment import Experiment
from qualitygates.judging import judge_records
from qualitygates.records import content_hash, read_record
from qualitygates.report import write_report
from tests.gates import synthetic

SEEDS = (11, 12, 13)
HASH = "0123456789abcdef" * 4
VERSIONS = {"lowprec": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}
GATE = synthetic.gate((3,))
RUNS = synthetic.records(synthetic.clicks(0), seeds=SEEDS)
JUDGED = judge_records(GATE, RUNS)


def runs(**facts: Any) -> list[dict[str, Any]]:
    """The synthetic runs as a training gate records them, with what an acceptance binds."""
    known = {
        "plan": "{}",
        "plan_hash": HASH,
        "recipe_hash": HASH,
        "model": {"hash": HASH, "modules": [["", "Net"]], "parameters": []},
        "environment": VERSIONS,
    }
    return [
        run | (known | facts if run["arm"] == "candidate" else {"environment": VERSIONS})
        for run in RUNS
    ]


def settled(folder: Path, found: Sequence[Any], *, gate: Any = GATE, word: str = "ACCEPT") -> Any:
    verdict = JUDGED | {"verdict": word}
    path = settle(folder, gate, found, verdict=verdict)
    assert (path is not None) == (folder / FILE).exists()
    return None if path is None else read_record(path, kind="acceptance")


def test_an_accepted_gate_says_what_it_accepted(tmp_path: Path) -> None:
    found = runs()
    verdict = judge_records(GATE, found)
    assert verdict["verdict"] == JUDGED["verdict"] == "ACCEPT"
    write_report(tmp_path, GATE, found, verdict=verdict)
    record = read_record(tmp_path / FILE, kind="acceptance")
    assert [record[key] for key in ("recipe_hash", "plan_hash", "model_hash")] == [HASH] * 3
    assert record["margins"] == GATE["margins"]
    assert record["versions"] == VERSIONS
    assert record["seeds"] == list(SEEDS)
    assert record["expiry"] == {
        "days": 90,
        "versions": "minor",
        "at": "2026-04-01T00:00:00+00:00",
    }
    assert record["verdict_hash"] == content_hash(
        json.loads((tmp_path / "verdict.json").read_text())
    )


@pytest.mark.parametrize("word", ["REJECT", "INCONCLUSIVE"])
def test_a_later_verdict_takes_the_acceptance_away(tmp_path: Path, word: str) -> None:
    found = runs()
    assert settled(tmp_path, found)
    assert settled(tmp_path, found, word=word) is None
    assert settled(tmp_path, found, word=word) is None


def test_judging_again_gives_the_same_bytes_and_no_longer_life(tmp_path: Path) -> None:
    found = runs()
    settled(tmp_path, found)
    first = (tmp_path / FILE).read_bytes()
    settled(tmp_path, found)
    assert (tmp_path / FILE).read_bytes() == first


def test_a_planted_fault_accepts_nothing(tmp_path: Path) -> None:
    gate = GATE | {"experiment": {"candidate": {"recipe": "mxfp8", "fault": {"logit_noise": 0.01}}}}
    assert settled(tmp_path, runs(), gate=gate) is None


def test_candidates_of_two_models_are_no_acceptance(tmp_path: Path) -> None:
    found = runs()
    settled(tmp_path, found)
    last = next(run for run in reversed(found) if run["arm"] == "candidate")
    last["model"] = {"hash": "f" * 64, "modules": [], "parameters": []}
    with pytest.raises(RecordError, match=r"seed 13: its model is not that of seed 11"):
        settled(tmp_path, found)
    assert not (tmp_path / FILE).exists()


def test_what_nobody_watched_is_unknown_until_its_hash_is_given(tmp_path: Path) -> None:
    found = runs(plan=None, model=None, plan_hash="unknown", recipe_hash="unknown")
    record = settled(tmp_path, found)
    assert [record[key] for key in ("recipe_hash", "plan_hash", "model_hash")] == [None] * 3
    given = {"recipe_hash": HASH, "plan_hash": HASH, "model_hash": HASH}
    gate = GATE | {"acceptance": read_rules(given)}
    record = settled(tmp_path, found, gate=gate)
    assert [record[key] for key in given] == [HASH] * 3
    with pytest.raises(RecordError, match="leave the key out"):
        settled(tmp_path, runs(recipe_hash="f" * 64), gate=gate)


def test_versions_that_differ_between_runs_are_unknown(tmp_path: Path) -> None:
    found = runs()
    found[1] = found[1] | {"environment": VERSIONS | {"python": "3.12.1"}}
    assert found[1]["arm"] == "candidate"
    assert settled(tmp_path, found)["versions"] == VERSIONS | {"python": None}


def test_a_gate_that_does_not_say_when_it_began_is_refused() -> None:
    verdict = JUDGED
    with pytest.raises(RecordError, match="does not say when it was created"):
        acceptance({k: v for k, v in GATE.items() if k != "created"}, runs(), verdict=verdict)


def test_an_acceptance_that_cannot_be_removed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(RecordError, match="no longer holds and cannot be removed"):
        withdraw(tmp_path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("expires_days = -1", "0 for an acceptance that never expires"),
        ("expires_days = true", "a whole number of days"),
        ("expires_days = 4000", "up to 3650"),
        ('versions = "major"', "allowed: exact, minor, any"),
        ('hardware = "h100"', "allowed: same, any"),
        ('plan_hash = "abc"', "64 hexadecimal digits"),
        ("days = 3", "unknown key 'days' in"),
    ],
)
def test_the_table_is_read_strictly(tmp_path: Path, line: str, says: str) -> None:
    flights = Path(__file__).parents[2] / "examples" / "flights.toml"
    path = tmp_path / "gate.toml"
    path.write_text(f"{flights.read_text()}\n[acceptance]\n{line}\n")
    with pytest.raises(ExperimentError, match=says):
        Experiment.from_toml(path)


def test_the_rules_are_part_of_the_promise() -> None:
    flights = Experiment.from_toml(Path(__file__).parents[2] / "examples" / "flights.toml")
    promised = flights.promise(created="")
    assert promised["acceptance"] == {"expires_days": 90, "versions": "minor", "hardware": "same"}
    assert Experiment.from_dict(flights.to_dict()).hash == flights.hash
