"""A whole sweep on a toy: resumed anywhere it gives the same result, and it proves nothing."""

from __future__ import annotations

import ast
import json
import random
import shutil
import tomllib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lowprec
import qualitygates
from qualitygates.__main__ import main
from qualitygates.errors import ExperimentError, GateError, RecordError
from qualitygates.experiment import Experiment
from qualitygates.records import read_record
from qualitygates.sensitivity import driver, measuring
from qualitygates.sensitivity.branches import Checkpoint, Setting, sweep_part
from qualitygates.sensitivity.pool import SamePlace
from qualitygates.sensitivity.spec import SweepSpec
from qualitygates.workload import load_workload

FOLDER = Path(__file__).parent
GATE = """
schema = 1
name = "toy"
workload = "{workload}"
margins = "demo"
looks = [3]
options = {{ rows = 1000 }}
train = {{ steps = 20, batch_size = 32 }}
baseline = {{ recipe = "bf16" }}
candidate = {{ recipe = "mxfp8" }}
speed = {{ required = false }}
"""
SWEEP = """
schema = 1
name = "toy-sweep"
gate = "gate.toml"
formats = ["mxfp4", "mxfp8"]
speed = {{ hardware = "none" }}
fixes = {{ rotation = "none" }}
screen = {{ batches = 2 }}
branches = {{ at = [0.1, 0.2], length = 0.2, seeds = 3 }}
evaluation = {{ rows = 300 }}
select = {{ budget = "flops"{saving} }}
confirm = {{ run = false }}
{more}
"""


def spec(folder: Path, *, more: str = "", saving: str = "", workload: str = "") -> SweepSpec:
    workload = workload or f"{FOLDER}/toy_workload.py:build"
    (folder / "gate.toml").write_text(GATE.format(workload=workload))
    (folder / "sweep.toml").write_text(SWEEP.format(more=more, saving=saving))
    return SweepSpec.from_toml(folder / "sweep.toml")


@contextmanager
def same_place(workers: int, *, device: str = "cpu", cluster: str = ""):
    yield SamePlace()


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver, "open_pool", same_place)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(one: SweepSpec, out: Path) -> dict:
    result = qualitygates.sweep(one, out=out, workers=1, progress=False)
    result.pop("seconds")
    return result


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "open_pool", same_place)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        result = run(spec(folder), folder / "out")
        torch.set_num_threads(threads)
    return folder, result


def test_it_ranks_every_product_and_excludes_the_head_with_its_reason(finished) -> None:
    _, result = finished
    assert {(one["group"], one["product"]) for one in result["ranking"]} == {
        (layer, product) for layer in ("body.0", "top") for product in ("fprop", "dgrad", "wgrad")
    }
    assert "N=1" in result["excluded"]["head"]
    assert all(one["lower"] <= one["estimate"] <= one["upper"] for one in result["ranking"])
    assert {"all low", "all fprop", "all dgrad", "all wgrad"} <= set(result["whole"])


def test_the_recipe_has_a_reason_a_rule_and_reads_back_to_the_plan(finished) -> None:
    folder, result = finished
    recipe = lowprec.load_recipe(folder / "out" / "recipe.toml")
    assert len(recipe.rules) == 3
    assert all(rule.why for rule in recipe.rules)
    gate = Experiment.from_toml(folder / "out" / "gate.toml")
    model = load_workload(gate.workload, gate.options, folder=gate.folder).model()
    plan = lowprec.plan(model, recipe, steps=gate.steps)
    assert plan.hash == result["plan_hash"]
    assert result["selection"]["policies"] == {
        name: products
        for name, products in result["selection"]["policies"].items()
        if name in {"body.0", "top"}
    }


def test_the_gate_has_fresh_seeds_and_the_other_evaluation_rows(finished) -> None:
    folder, result = finished
    gate = Experiment.from_toml(folder / "out" / "gate.toml")
    assert not set(gate.seeds) & set(result["seeds"])
    assert not set(gate.seeds) & set(Experiment.from_toml(folder / "gate.toml").seeds)
    rest = load_workload(gate.workload, gate.options, folder=gate.folder)
    other = load_workload(
        "part", {**gate.options, "first": 0.0, "last": gate.options["first"]}, folder=gate.folder
    )
    rows = [
        {
            int(i)
            for batch in part.evaluation_batches(batch_size=512)
            for i, w in zip(batch.ids, batch.weights, strict=True)
            if w > 0
        }
        for part in (rest, other)
    ]
    assert rows[0]
    assert rows[1]
    assert not rows[0] & rows[1]
    assert len(rows[0] | rows[1]) == 1000


def test_whole_trainings_calibrate_what_is_charged(finished) -> None:
    _, result = finished
    chosen = result["selection"]
    assert chosen["calibration"]["training"]["seeds"] == 2
    assert chosen["calibration"]["factor"] > 0
    assert chosen["measured"]["trainings"]
    assert chosen["measured"]["effect"]["seeds"] == 2


def metric(estimate: float) -> dict:
    facts = {"margin": 0.005, "v_seed": 1e-8, "v_example": 0.0, "dof": 10, "two_sided": False}
    return {"estimate": estimate, **facts}


def test_after_a_reject_a_recipe_of_less_harm_is_gated_with_fresh_seeds(
    finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = finished
    gated: list[tuple[Experiment, str]] = []

    def gate(experiment: Experiment, *, out: Path, **options) -> dict:
        recipe = experiment.recipe_source(experiment.candidate)
        gated.append((experiment, lowprec.load_recipe(recipe).hash))
        bad = len(gated) == 1
        return {
            "verdict": "REJECT" if bad else "ACCEPT",
            "seeds": list(experiment.seeds),
            "metrics": {"trained/ne": metric(0.02 if bad else 0.0)},
            "controls": {"null": {"verdict": "ACCEPT"}},
        }

    monkeypatch.setattr(driver, "run", gate)
    text = (folder / "sweep.toml").read_text()
    one = spec(folder)
    out = folder / "confirmed"
    shutil.copytree(folder / "out" / "measured", out / "measured")
    result = run(replace(one, confirm=True), out)
    (folder / "sweep.toml").write_text(text)
    done = result["confirmation"]
    assert (done["verdict"], done["accepted"]) == ("ACCEPT", "2")
    assert [gate.seeds for gate, _ in gated] == [(101, 102, 103), (104, 105, 106)]
    assert [a["level"] for a in done["attempts"]] == [0.025, 0.0125]
    # What is left in the folder is the accepted recipe and its own gate.
    assert gated[0][1] != gated[1][1] == lowprec.load_recipe(out / "recipe.toml").hash
    assert Experiment.from_toml(out / "gate.toml").seeds == (104, 105, 106)
    first, last = (r["selection"]["harm"] for r in (finished[1], result))
    assert last <= first / 4
    assert set(done["given_back"]) <= {"body.0", "top"}
    assert result["plan_hash"] != finished[1]["plan_hash"]


def test_a_whole_training_is_the_branch_from_step_0(tmp_path: Path) -> None:
    """On a model without dropout, whose stream a branch starts anew."""
    options = {"layers": 2, "width": 16, "heavy": -1, "outliers": 1, "rows": 200}
    train = {"steps": 6, "batch_size": 16}
    text = GATE.format(workload=f"{FOLDER}/planted_workload.py:build")
    content = {**tomllib.loads(text), "options": options, "train": train}
    gate = Experiment.from_dict(content, folder=tmp_path)
    late = Setting(gate, {"first": 0.0, "last": 0.5, "clusters": ""}, 100, 2, 4)
    arm = {"layers.1.linear": "nvfp4 / nvfp4 / nvfp4"}
    found = {}
    for setting in (late, replace(late, start=0, window=6)):
        checkpoint = Checkpoint(setting, 7, sweep_part(setting))
        found[setting.start] = [checkpoint.branch(one) for one in ({}, arm, {})]
    assert found[0][0] == found[0][2]
    assert found[0][0]["loss"][2:] == found[2][0]["loss"]
    assert found[0][0]["clusters"] == found[2][0]["clusters"]
    assert found[0][1]["clusters"] != found[2][1]["clusters"]


def test_reports_are_written(finished) -> None:
    folder, _ = finished
    page = (folder / "out" / "report.html").read_text()
    assert "NOT GATED" in page
    assert "<script" not in page
    assert str(folder) not in page
    text = (folder / "out" / "report.md").read_text()
    assert "Nothing on this page is evidence" in text
    assert "everything low, whole trainings" in text
    assert "measured together, in whole trainings" in text


def test_the_command_says_that_nothing_is_accepted(finished, capsys) -> None:
    folder, _ = finished
    code = main(["sweep", str(folder / "sweep.toml"), "--out", str(folder / "out")])
    said = capsys.readouterr().out
    assert code == 2
    assert "nothing is accepted: a sweep chooses, only that gate judges" in said
    assert f"python -m qualitygates run {folder / 'out' / 'gate.toml'}" in said


def test_the_command_ends_with_3_on_broken_input(tmp_path: Path, capsys) -> None:
    assert main(["sweep", str(tmp_path / "none.toml")]) == 3
    assert "none.toml: cannot be read" in capsys.readouterr().err


class Interrupting(SamePlace):
    """Stops before the n-th result is handed over, as a kill would."""

    left = 0

    def run(self, work, jobs):
        for pair in super().run(work, jobs):
            if Interrupting.left == 0:
                raise KeyboardInterrupt
            Interrupting.left -= 1
            yield pair


def test_interrupted_at_random_points_it_gives_the_same_result(
    finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = finished

    @contextmanager
    def interrupting(workers: int, *, device: str = "cpu", cluster: str = ""):
        yield Interrupting()

    monkeypatch.setattr(driver, "open_pool", interrupting)
    monkeypatch.setattr(measuring, "_CHUNK", 3)
    one, dice, stops = spec(tmp_path), random.Random(0), 0
    while True:
        Interrupting.left = dice.randrange(1, 9)
        try:
            result = run(one, tmp_path / "out")
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops >= 2
    assert result == expected


def test_a_damaged_measurement_is_made_again(finished, tmp_path: Path) -> None:
    folder, expected = finished
    files = sorted((folder / "out" / "measured").glob("sweep-branch-*.json"))
    files[0].write_bytes(files[0].read_bytes()[:-40])
    assert run(spec(folder), folder / "out") == expected
    assert list((folder / "out" / "measured").glob("*.damaged"))


def test_nothing_that_a_sweep_writes_can_be_judged(finished) -> None:
    folder, _ = finished
    files = [*(folder / "out" / "measured").glob("*.json"), folder / "out" / "sweep.json"]
    assert len(files) > 10
    for path in files:
        with pytest.raises(RecordError, match="kind 'sweep"):
            read_record(path)
    with pytest.raises(GateError):
        qualitygates.judge([folder / "out"])
    record = json.loads(files[0].read_text())
    assert "evaluations" not in record
    assert not (folder / "out" / "acceptance.json").exists()


def test_no_module_that_judges_knows_the_sweep() -> None:
    """The commands start one; nothing that reaches a verdict imports it, now or later."""
    package = Path(qualitygates.__file__).parent
    may = {package / "__init__.py", package / "__main__.py"}
    for path in package.rglob("*.py"):
        if path not in may and path.parent.name != "sensitivity":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = [
                f"{getattr(node, 'module', '')}.{alias.name}"
                for node in ast.walk(tree)
                if isinstance(node, (ast.Import, ast.ImportFrom))
                for alias in node.names
            ]
            assert not [one for one in names if "sensitivity" in one], path


def test_the_sweep_measures_on_its_own_part(finished) -> None:
    folder, _ = finished
    for path in (folder / "out" / "measured").glob("sweep-branch-*.json"):
        inputs = json.loads(path.read_text())["inputs"]
        assert inputs["part"]["last"] == 0.4


def test_a_saving_that_cannot_be_met_is_said(finished) -> None:
    folder, _ = finished
    text = (folder / "sweep.toml").read_text()
    one = spec(folder, saving=", saving = 0.999")
    with pytest.raises(ExperimentError, match=r"saving = 0.999 .*cannot be met: .* at most 9"):
        run(one, folder / "out")
    (folder / "sweep.toml").write_text(text)


def test_fused_layers_share_a_choice_and_a_layer_has_one_group(finished, tmp_path: Path) -> None:
    fused = '[[group]]\nname = "both"\nmatch = ["body.*", "top"]'
    from qualitygates.sensitivity.groups import find_groups

    one = spec(tmp_path, more=fused)
    plan = driver.bf16_models(one.gate).plan
    groups = find_groups(plan, one).candidates
    assert [group.layers for group in groups] == [("body.0", "top")]
    twice = fused + '\n[[group]]\nname = "again"\nmatch = ["t*"]'
    with pytest.raises(ExperimentError, match="'top' is in two groups, 'both' and 'again'"):
        find_groups(plan, spec(tmp_path, more=twice))
    with pytest.raises(ExperimentError, match=r"'none' matches no linear layer.*body.0, top"):
        find_groups(plan, spec(tmp_path, more='[[group]]\nname = "none"\nmatch = ["x"]'))


def test_a_model_of_heads_has_no_candidate(tmp_path: Path) -> None:
    (tmp_path / "heads.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(FOLDER)!r})\n"
        "import toy_workload\n"
        "from torch import nn\n"
        "class Heads(toy_workload.Toy):\n"
        "    def model(self):\n"
        "        class Net(nn.Module):\n"
        "            def __init__(self):\n"
        "                super().__init__()\n"
        "                self.head = nn.Linear(32, 1)\n"
        "                self.never = nn.Linear(32, 32)\n"
        "            def forward(self, features):\n"
        "                return self.head(features['x']).squeeze(-1)\n"
        "        return Net()\n"
        "def build(rows=2000):\n"
        "    return Heads(rows, 0, False)\n"
    )
    one = spec(tmp_path, workload="heads.py:build")
    with pytest.raises(ExperimentError, match="no candidate layer is executed in training: never"):
        run(one, tmp_path / "out")
