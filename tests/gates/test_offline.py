"""The offline gate from files to verdict: exact, repeatable, closed on every doubt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qualitygates import plots
from qualitygates.__main__ import main
from qualitygates.errors import ExperimentError, RecordError
from qualitygates.metrics import evaluate
from qualitygates.records import RunStore
from tests.gates import offline_data as toy
from tests.gates.synthetic import Effect

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than everything else together; test_report.py draws."""
    monkeypatch.setattr(plots, "available", lambda: False)


def test_a_neutral_candidate_is_accepted_with_everything_run_writes(tmp_path: Path) -> None:
    gate, out = toy.write_gate(tmp_path), tmp_path / "out"
    assert main(["judge", str(gate), "--out", str(out)]) == 0
    written = {name for name in toy.contents(out) if not name.startswith("runs/")}
    assert written == {
        *("gate.json", "verdict.json", "acceptance.json", "report.html", "report.md")
    }
    promise = json.loads((out / "gate.json").read_text())
    assert promise["evaluations"] == ["trained"]
    assert set(promise["inputs"]) == {
        f"{arm}-{seed}{end}"
        for arm in toy.ARMS
        for seed in (1, 2, 3)
        for end in (".parquet", "-curve.jsonl")
    }
    # The same folder judged as records alone, and reported anew.
    assert main(["judge", str(out)]) == 0
    assert main(["report", str(out)]) == 0


def test_records_hold_what_evaluate_gives_in_memory(tmp_path: Path) -> None:
    toy.judged(toy.write_gate(tmp_path))
    data = toy.examples()
    rows = toy.columns(data, "candidate", 2, toy.QUIET)
    names = ("DE", "FR", "US")
    wanted = evaluate(
        rows["score"],
        rows["clicked"],
        weights=rows["w"],
        clusters={"user": data.users, "day": data.days},
        groups=data.users,
        slices={
            "mobile": rows["mobile"],
            **{f"country={name}": rows["country"] == name for name in names},
        },
    )
    found = toy.record(tmp_path / "out", "candidate", 2)["evaluations"]["trained"]
    assert found == json.loads(json.dumps(wanted))


def test_the_same_call_changes_nothing_and_a_fresh_folder_gets_the_same_runs(
    tmp_path: Path,
) -> None:
    gate = toy.write_gate(tmp_path)
    toy.judged(gate)
    before = toy.contents(tmp_path / "out")
    toy.judged(gate)
    assert toy.contents(tmp_path / "out") == before
    toy.judged(gate, tmp_path / "fresh")
    fresh = toy.contents(tmp_path / "fresh")
    assert {k: v for k, v in fresh.items() if k.startswith("runs/")} == {
        k: v for k, v in before.items() if k.startswith("runs/")
    }


@pytest.mark.parametrize("saved", [1, 7])
def test_a_killed_call_is_resumed_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int
) -> None:
    gate = toy.write_gate(tmp_path)
    toy.judged(gate, tmp_path / "whole")
    save, calls = RunStore.save, []

    def dies(self: RunStore, record: dict) -> Path:
        if len(calls) == saved:
            raise KeyboardInterrupt
        calls.append(record)
        return save(self, record)

    monkeypatch.setattr(RunStore, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        toy.judged(gate)
    monkeypatch.undo()
    monkeypatch.setattr(plots, "available", lambda: False)
    (tmp_path / "out" / ".rows-left").mkdir()
    toy.judged(gate)
    assert not list((tmp_path / "out").glob(".rows-*"))
    whole, resumed = toy.contents(tmp_path / "whole"), toy.contents(tmp_path / "out")
    assert {k: v for k, v in whole.items() if k.startswith("runs/")} == {
        k: v for k, v in resumed.items() if k.startswith("runs/")
    }


def test_changed_predictions_are_another_gate(tmp_path: Path) -> None:
    gate = toy.write_gate(tmp_path)
    toy.judged(gate)
    before = toy.contents(tmp_path / "out")
    rows = toy.columns(toy.examples(), "candidate", 2, Effect(shared=0.5))
    toy.write_rows(tmp_path / "candidate-2.parquet", rows)
    with pytest.raises(ExperimentError, match=r"candidate-2\.parquet has other content now"):
        toy.judged(gate)
    (tmp_path / "candidate-2.parquet").unlink()
    with pytest.raises(ExperimentError, match=r"candidate-2\.parquet is gone"):
        toy.judged(gate)
    assert toy.contents(tmp_path / "out") == before


EDITS = {
    "margins": ('margins = "demo"', 'margins = "strict"'),
    "experiment": ("mobile", "day"),
    "clusters": ('"day"', '"row"'),
    "name": ('name = "toy"', 'name = "other"'),
    "known_bad_margins": ("[clusters]", "[controls]\nknown_bad_margins = 5.0\n[clusters]"),
}


def test_a_promise_is_never_edited_after_the_first_look(tmp_path: Path) -> None:
    gate = toy.write_gate(tmp_path)
    toy.judged(gate)
    before, text = toy.contents(tmp_path / "out"), gate.read_text()
    for field, (old, new) in EDITS.items():
        assert old in text
        gate.write_text(text.replace(old, new))
        with pytest.raises(ExperimentError, match=f"promises another gate: .*{field}"):
            toy.judged(gate)
    assert toy.contents(tmp_path / "out") == before


def test_further_seeds_may_be_added(tmp_path: Path) -> None:
    toy.write_gate(tmp_path)
    gate = toy.write_toml(
        tmp_path,
        predictions="{arm}-{seed}.parquet",
        top='margins = "strict"\nlooks = [3, 5]\nseeds = [1, 2, 3, 4, 5]\n',
    )
    first = toy.judged(gate)
    assert (first["look"], first["verdict"]) == (3, "INCONCLUSIVE")
    early = {k: v for k, v in toy.contents(tmp_path / "out").items() if k.startswith("runs/")}
    data = toy.examples()
    for arm in toy.ARMS:
        for seed in (4, 5):
            rows = toy.columns(data, arm, seed, toy.EFFECTS[arm])
            toy.write_rows(tmp_path / f"{arm}-{seed}.parquet", rows)
            toy.write_curve(tmp_path / f"{arm}-{seed}-curve.jsonl", seed)
    second = toy.judged(gate)
    assert second["look"] == 5
    late = toy.contents(tmp_path / "out")
    assert {name: late[name] for name in early} == early
    assert len([name for name in late if name.startswith("runs/")]) == 20


def test_without_a_null_control_there_is_no_accept(tmp_path: Path) -> None:
    verdict = toy.judged(toy.write_gate(tmp_path, arms=("baseline", "candidate")))
    assert verdict["verdict"] == "INCONCLUSIVE"
    assert any("give predictions of another training an arm null" in r for r in verdict["reasons"])
    assert all(one["verdict"] == "ACCEPT" for one in verdict["metrics"].values())
    assert not (tmp_path / "out" / "acceptance.json").exists()


def test_without_curves_there_is_no_accept_but_there_is_a_reject(tmp_path: Path) -> None:
    toy.write_gate(tmp_path)
    gate = toy.write_toml(tmp_path, predictions="{arm}-{seed}.parquet", curves=False)
    verdict = toy.judged(gate)
    assert verdict["verdict"] == "INCONCLUSIVE"
    assert "no training curve was recorded" in verdict["reasons"][0]
    effects = {**toy.EFFECTS, "candidate": Effect(shared=0.8)}
    toy.write_gate(tmp_path / "bad", effects=effects)
    gate = toy.write_toml(tmp_path / "bad", predictions="{arm}-{seed}.parquet", curves=False)
    assert toy.judged(gate)["verdict"] == "REJECT"


def test_the_known_bad_control_is_the_baseline_with_noise_of_the_promised_size(
    tmp_path: Path,
) -> None:
    data = toy.examples(40_000)
    verdict = toy.judged(toy.write_gate(tmp_path, data=data))
    assert verdict["controls"]["known_bad"]["verdict"] != "ACCEPT"
    for seed in (1, 2, 3):
        base, bad = (toy.record(tmp_path / "out", arm, seed) for arm in ("baseline", "known_bad"))
        ne = [one["evaluations"]["trained"]["metrics"]["ne"] for one in (base, bad)]
        # Two demo margins; the sd of one draw is about a tenth of that here.
        assert ne[1] / ne[0] - 1 == pytest.approx(0.01, abs=0.004)
        assert bad["training"]["logit_noise"]["trained"] > 0
        assert bad["training"]["loss"] == base["training"]["loss"]


@pytest.mark.parametrize(
    ("arm", "verdict", "value"),
    [("candidate", "REJECT", np.nan), ("baseline", "INCONCLUSIVE", np.inf)],
)
def test_predictions_that_are_not_finite_are_a_hard_failure(
    tmp_path: Path, arm: str, verdict: str, value: float
) -> None:
    def broken(one: str, seed: int, rows: toy.Columns) -> toy.Columns:
        if (one, seed) == (arm, 2):
            rows["score"] = np.where(rows["row"] == 10_007, value, rows["score"])
        return rows

    found = toy.judged(toy.write_gate(tmp_path, change=broken))
    assert found["verdict"] == verdict
    assert "non-finite predictions in the trained evaluation" in " ".join(found["reasons"])


def test_a_crash_is_declared_and_counts(tmp_path: Path) -> None:
    toy.write_gate(tmp_path)
    (tmp_path / "candidate-2.parquet").unlink()
    (tmp_path / "candidate-2-curve.jsonl").unlink()
    with pytest.raises(RecordError, match=r"no predictions of candidate seed 2.*\[\[crashed\]\]"):
        toy.judged(tmp_path / "gate.toml")
    assert not (tmp_path / "out" / "gate.json").exists()
    more = '[[crashed]]\narm = "candidate"\nseed = 2\nreason = "NCCL timeout"\n'
    gate = toy.write_toml(tmp_path, predictions="{arm}-{seed}.parquet", more=more)
    verdict = toy.judged(gate)
    assert verdict["verdict"] == "REJECT"
    assert "crashed: NCCL timeout" in verdict["reasons"][0]
    # Once judged a crash cannot be taken back.
    toy.write_gate(tmp_path)
    with pytest.raises(RecordError, match="candidate seed 2: its files or their entries"):
        toy.judged(tmp_path / "gate.toml")


def test_rows_in_any_order_join_by_id(tmp_path: Path) -> None:
    def shuffled(arm: str, seed: int, rows: toy.Columns) -> toy.Columns:
        order = np.random.default_rng([seed, len(arm)]).permutation(len(rows["row"]))
        return {name: values[order] for name, values in rows.items()}

    toy.judged(toy.write_gate(tmp_path / "straight"))
    toy.judged(toy.write_gate(tmp_path / "shuffled", change=shuffled))
    for arm in (*toy.ARMS, "known_bad"):
        runs = [toy.record(tmp_path / name / "out", arm, 3) for name in ("straight", "shuffled")]
        assert runs[0]["evaluations"] == runs[1]["evaluations"]
        assert runs[0]["pairing"] == runs[1]["pairing"]


def test_an_observation_says_what_ran_and_how_it_started(tmp_path: Path) -> None:
    layer = {"name": "mlp.0", "fprop": "mxfp8", "dgrad": "mxfp8", "wgrad": "mxfp8"}
    ran = {product: {"mxfp8": 200} for product in ("fprop", "dgrad", "wgrad")}
    toy.write_gate(tmp_path)
    more = '[[observations]]\npath = "{arm}-{seed}.json"\n'
    gate = toy.write_toml(tmp_path, predictions="{arm}-{seed}.parquet", more=more)
    for arm in toy.ARMS:
        for seed in (1, 2, 3):
            seen = {
                "init_hash": f"i{seed}",
                "plan_layers": [layer],
                "gemms": {"mlp.0": ran},
                "gemms_match_plan": True,
                "recipe_hash": "a" * 64,
            }
            (tmp_path / f"{arm}-{seed}.json").write_text(json.dumps(seen))
    verdict = toy.judged(gate)
    assert verdict["verdict"] == "ACCEPT"
    assert verdict["recipe_hash"] == "a" * 64
    assert not any("was not recorded" in reason for reason in verdict["reasons"])
    other = json.loads((tmp_path / "candidate-2.json").read_text())
    (tmp_path / "candidate-2.json").write_text(json.dumps({**other, "init_hash": "else"}))
    with pytest.raises(RecordError, match="init_hash: 'i2' in baseline seed 2, 'else' in candid"):
        toy.judged(gate, tmp_path / "other")


def test_judging_imports_neither_torch_nor_lowprec(tmp_path: Path) -> None:
    gate = toy.write_gate(tmp_path)
    code = (
        "import sys; from qualitygates.__main__ import main; "
        f"code = main(['judge', {str(gate)!r}, '--out', {str(tmp_path / 'out')!r}]); "
        "assert not {'torch', 'lowprec', 'tensorboard'} & set(sys.modules); sys.exit(code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["parquet, 2 arms x 5 seeds", "parquet, 2 arms x 3 seeds"])
def test_twenty_million_rows_in_three_minutes_and_two_gib(setting: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "offline.py"), "--only", setting],
        capture_output=True,
        text=True,
        check=True,
    )
    line = json.loads(done.stdout)
    assert line["rows"] == 20_000_000
    assert line["peak_rss_mib"] < 2048
    assert line["wall_s"] < 180
