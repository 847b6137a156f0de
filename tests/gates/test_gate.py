"""The whole gate on a toy: verdicts, resuming, promises, damaged records."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import lowprec
from qualitygates import judge
from qualitygates.errors import DataError, ExperimentError, RecordError
from qualitygates.experiment import Experiment
from qualitygates.gate import _check_recipe_unchanged, run
from qualitygates.locking import folder_lock
from qualitygates.records import RunStore
from tests.gates.killing import contents

FOLDER = Path(__file__).parent
TOML = """
schema = 1
name = "toy"
workload = "{folder}/toy_workload.py:build"
margins = "demo"
looks = [3]
[options]
rows = {rows}
[train]
steps = {steps}
batch_size = 128
[baseline]
recipe = "bf16"
[candidate]
recipe = "mxfp8"
{fault}
[speed]
required = false
"""


def experiment(folder: Path, *, rows: int = 8000, steps: int = 60, fault: str = "") -> Path:
    path = folder / "toy.toml"
    path.write_text(TOML.format(folder=FOLDER, rows=rows, steps=steps, fault=fault))
    return path


def run_gate(path: Path, out: Path, *, workers: int = 2) -> dict:
    return run(Experiment.from_toml(path), out=out, workers=workers, progress=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict]:
    """An uninterrupted gate: its TOML, its folder and its verdict."""
    folder = tmp_path_factory.mktemp("gate")
    path = experiment(folder)
    verdict = run_gate(path, folder / "out")
    return path, folder / "out", verdict


def test_a_gate_ends_in_a_verdict_with_behaving_controls(finished) -> None:
    _, out, verdict = finished
    assert verdict["verdict"] == "ACCEPT", verdict["reasons"]
    assert verdict["controls"]["behaved"]
    assert verdict["controls"]["known_bad"]["verdict"] == "REJECT"
    assert len(contents(out)) == 12
    assert {p.name for p in out.iterdir()} >= {"gate.json", "verdict.json", "report.html"}


def test_judging_the_records_gives_the_same_verdict(finished) -> None:
    _, out, verdict = finished
    assert judge([out]) == verdict


def test_running_again_trains_nothing_and_changes_nothing(finished) -> None:
    path, out, verdict = finished
    times = {f: f.stat().st_mtime_ns for f in (out / "runs").iterdir()}
    assert run_gate(path, out) == verdict
    assert {f: f.stat().st_mtime_ns for f in (out / "runs").iterdir()} == times


def test_damaged_record_is_rerun_and_the_others_kept(finished) -> None:
    path, out, verdict = finished
    files = sorted((out / "runs").glob("*.json"))
    victim = files[4]
    good = contents(out)
    kept = {f: f.stat().st_mtime_ns for f in files if f != victim}
    victim.write_bytes(victim.read_bytes()[:-500])
    assert run_gate(path, out)["verdict"] == verdict["verdict"]
    assert contents(out) == good
    assert {f: f.stat().st_mtime_ns for f in kept} == kept
    assert list((out / "runs").glob("*.damaged"))


def test_a_promise_cannot_change_in_place(finished, tmp_path: Path) -> None:
    path, out, _ = finished
    other = tmp_path / "toy.toml"
    other.write_text(path.read_text().replace('"demo"', '"standard"'))
    with pytest.raises(ExperimentError, match=r"margins.*--out"):
        run_gate(other, out)


def test_planted_harm_of_twice_the_margin_is_rejected(finished, tmp_path: Path) -> None:
    """The true effect of the fault is measured on the baseline's own predictions first."""
    _, out, _ = finished
    baseline, bad = (
        json.loads(next((out / "runs").glob(f"{arm}-001-*")).read_text())
        for arm in ("baseline", "known_bad")
    )
    noise = 1.5 * bad["training"]["logit_noise"]
    harm = (
        bad["evaluations"]["trained"]["metrics"]["logloss"]
        / baseline["evaluations"]["trained"]["metrics"]["logloss"]
        - 1
    )
    assert harm * 1.5**2 > 2 * 0.005
    path = experiment(tmp_path, fault=f"fault = {{ logit_noise = {noise} }}")
    verdict = run_gate(path, tmp_path / "out")
    assert verdict["verdict"] == "REJECT", verdict["reasons"]
    assert verdict["metrics"]["trained/ne"]["lower"] > 0.005


def test_a_second_gate_in_the_folder_is_refused_while_one_runs(finished) -> None:
    path, out, verdict = finished
    with folder_lock(out), ThreadPoolExecutor(1) as other:
        second = other.submit(run_gate, path, out)
        with pytest.raises(ExperimentError, match=r"in use by process \d+ on .*--out"):
            second.result()
    assert run_gate(path, out) == verdict


@pytest.mark.parametrize("workers", [1])
def test_the_number_of_workers_changes_no_bit(finished, tmp_path: Path, workers: int) -> None:
    path, out, _ = finished
    run_gate(path, tmp_path / "out", workers=workers)
    assert contents(tmp_path / "out") == contents(out)


def test_runs_of_another_recipe_are_not_judged_under_this_promise(finished, tmp_path: Path) -> None:
    _, out, _ = finished
    gate = json.loads((out / "gate.json").read_text())
    gate["recipe_hashes"]["candidate"] = lowprec.load_recipe("mxfp8-portable").hash
    store = RunStore(tmp_path / "out")
    store.write_gate(gate)
    shutil.copytree(out / "runs", store.runs)
    with pytest.raises(RecordError, match=r"candidate.*recipe_hash is .* gate.json promised"):
        judge([tmp_path / "out"])


def test_a_recipe_edited_while_the_gate_runs_stops_it(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(lowprec.load_recipe("mxfp8").to_toml())
    path = experiment(tmp_path)
    path.write_text(path.read_text().replace('"mxfp8"', '"./mine.toml"'))
    checked = Experiment.from_toml(path)
    gate = {"recipe_hashes": {"candidate": lowprec.load_recipe(recipe).hash}}
    _check_recipe_unchanged(checked, gate)
    recipe.write_text(lowprec.load_recipe("mxfp8-portable").to_toml())
    with pytest.raises(ExperimentError, match="was edited while the gate ran"):
        _check_recipe_unchanged(checked, gate)


def test_a_crashing_candidate_is_rejected(tmp_path: Path) -> None:
    path = experiment(tmp_path, steps=20)
    path.write_text(path.read_text().replace("rows = 8000", "rows = 8000\ncrash = true"))
    verdict = run_gate(path, tmp_path / "out")
    assert verdict["verdict"] == "REJECT"
    assert any("kernel fell over" in text for text in verdict["stability"]["hard"])


@pytest.mark.parametrize(
    ("old", "new", "error", "says"),
    [
        ('recipe = "mxfp8"', 'recipe = "mxfp9"', lowprec.RecipeError, "did you mean mxfp8"),
        ("rows = 8000", "rowz = 8000", ExperimentError, "unknown option 'rowz'"),
        (":build", ":bild", ExperimentError, "no function 'bild'"),
        ("toy_workload.py", "toy_work.py", ExperimentError, "does not exist"),
        ('recipe = "mxfp8"', 'recipe = "bf16"', ExperimentError, "quantizes nothing"),
        ("rows = 8000", 'rows = "many"', ExperimentError, "cannot be built with rows = 'many'"),
        ("rows = 8000", "rows = 0", DataError, "cannot give a batch"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    tmp_path: Path, old: str, new: str, error: type[Exception], says: str
) -> None:
    path = experiment(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(error, match=says):
        run_gate(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
