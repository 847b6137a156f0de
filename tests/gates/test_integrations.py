"""Training loops that are not ours: what they must tell, and whole gates around three of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowprec
from qualitygates.errors import DataError, ExperimentError, GateError
from qualitygates.experiment import Experiment
from qualitygates.integrations import (
    EvaluationSet,
    HuggingFaceWorkload,
    LightningWorkload,
    PlainWorkload,
)
from qualitygates.own_loop import LoopReport, batch_hash, drive
from qualitygates.running.places import Place
from qualitygates.runs import execute
from qualitygates.workload import Batch, load_workload
from tests.gates.gate_in_process import run

ROOT = Path(__file__).parents[2]
GATES = ROOT / "examples" / "own-loops"
# Steps of the small gate, and the library that it needs.
EXAMPLES = {
    "training_loop": (8, None),
    "lightning_module": (8, "lightning"),
    "hugging_face_model": (8, "transformers"),
}
# Of the libraries themselves, not of anything they are asked to do here.
WARNINGS = ["-W", "error", "-W", "ignore:`isinstance(treespec:FutureWarning"]


@pytest.fixture(scope="module", params=EXAMPLES)
def gated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The facts of a whole small gate around an example, in one process of its own."""
    steps, library = EXAMPLES[request.param]
    if library and find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    out = tmp_path_factory.mktemp(request.param)
    if library is None:
        threads = torch.get_num_threads()
        try:
            return run(GATES / f"{request.param}.toml", out, steps)
        finally:
            torch.set_num_threads(threads)
    script = [str(Path(__file__).with_name("gate_in_process.py"))]
    command = [*script, str(GATES / f"{request.param}.toml"), str(out), str(steps)]
    done = subprocess.run(
        [sys.executable, *WARNINGS, *command],
        cwd=out,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # What the libraries have to say about themselves stays out of the gate's output.
    assert len(done.stdout.splitlines()) == 1, done.stdout
    assert not done.stderr.strip()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_gate_around_it_is_a_whole_one(gated: dict[str, Any]) -> None:
    runs = gated["runs"]
    assert len(runs) == 12
    assert [one["crashed"] for one in runs] == [None] * 12
    assert all(one["gemms_match_plan"] is True for one in runs)
    assert {one["arm"] for one in runs if one["quantized"]} == {"candidate"}
    assert gated["verdict"] == "ACCEPT", gated["reasons"]
    assert gated["controls"]
    assert gated["accepted"]


def test_arms_of_a_seed_are_paired_and_seeds_differ(gated: dict[str, Any]) -> None:
    by_seed: dict[int, set[str]] = {}
    for one in gated["runs"]:
        assert len(one["loss"]) == len(one["grad_norm"]) == one["pairing"]["steps"] == 8
        by_seed.setdefault(one["seed"], set()).add(json.dumps(one["pairing"], sort_keys=True))
    assert {len(one) for one in by_seed.values()} == {1}
    assert len(set.union(*by_seed.values())) == len(by_seed) == 3
    loss = {(one["arm"], one["seed"]): one["loss"] for one in gated["runs"]}
    assert loss["baseline", 1] != loss["candidate", 1]
    assert loss["baseline", 1][0] == pytest.approx(loss["candidate", 1][0], rel=0.02)
    assert loss["baseline", 1][0] == pytest.approx(loss["null", 1][0], rel=1e-5)


def test_micro_batches_make_one_step_and_norms_are_before_clipping(gated: dict[str, Any]) -> None:
    if not gated["parts"]:
        return
    assert gated["parts"]["batches"] == 6
    assert len(gated["parts"]["told"]) == 3
    for loss, norm in gated["parts"]["told"]:
        # transformers 5 leaves the sum over micro-batches to a model that takes num_items_in_batch,
        # and BERT's own loss is a mean: its Trainer then trains on, and logs, twice the loss.
        assert 0.3 < loss < 1.6
        assert norm > 1e-3


def net() -> nn.Module:
    return nn.Linear(4, 1)


def report_for(model: nn.Module, *, steps: int = 2) -> tuple[LoopReport, list[Any], list[str]]:
    told: list[Any] = []
    order: list[str] = []
    report = LoopReport(
        model, steps=steps, order=order.append, record=lambda *one: told.append(one)
    )
    return report, told, order


def good_loop(model: nn.Module, *, seed: int, steps: int, batch_size: int, report: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(batch_size, 4)
        report.batch({"x": x})
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        report.step(loss)
        optimizer.step()


def test_a_loop_tells_losses_norms_and_batches() -> None:
    model = net()
    report, told, order = report_for(model, steps=3)
    drive(good_loop, model, report, seed=3, batch_size=8)
    assert len(told) == len(set(order)) == 3
    assert all(isinstance(one, float) and one > 0 for pair in told for one in pair)
    again = net()
    again.load_state_dict(model.state_dict())
    second, _, repeated = report_for(again, steps=3)
    drive(good_loop, again, second, seed=3, batch_size=8)
    assert repeated == order


def test_the_step_and_micro_batch_reach_the_random_bits() -> None:
    """Stochastic rounding follows the position that `batch` sets, not a count of calls."""
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    recipe = lowprec.load_recipe("mxfp8")
    plan = lowprec.plan(model, recipe).with_layer("", "mxfp8:sr / mxfp8 / mxfp8", why="bits")
    lowprec.apply(model, plan)
    x, seen = torch.randn(32, 32), []
    for _ in range(2):
        report, _, _ = report_for(model, steps=2)
        for _ in range(2):
            report.batch(x)
            seen.append(model(x).detach())
            report.batch(x)
            y = model(x)
            seen.append(y.detach())
            y.sum().backward()
            report.step(y.sum())
    first, second = seen[:4], seen[4:]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(torch.equal(first[0], other) for other in first[1:])


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        (lambda report, loss: report.step(loss), "no batch was told before its loss"),
        (lambda report, loss: report.batch(1), "told 0 finished steps, the experiment asks for 2"),
        (lambda report, loss: None, "told 0 finished steps"),
        (lambda report, loss: report.batch(object()), "cannot hash a object"),
        (
            lambda report, loss: [(report.batch(i), report.step(loss)) for i in range(3)],
            "goes on after step 2, the last one",
        ),
    ],
)
def test_a_loop_that_leaves_something_out_is_refused(calls: Callable[..., Any], says: str) -> None:
    model = net()

    def loop(model: nn.Module, **given: Any) -> None:
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        calls(given["report"], loss)

    report, _, _ = report_for(model)
    with pytest.raises(DataError, match=says):
        drive(loop, model, report, seed=1, batch_size=8)


def test_gradients_that_are_gone_or_elsewhere_are_refused() -> None:
    model = net()
    report, _, _ = report_for(model)
    report.batch(1)
    with pytest.raises(DataError, match=r"before optimizer.zero_grad\(\), and train the model"):
        report.step(1.0)


def test_a_hash_depends_on_values_shapes_names_and_order() -> None:
    x = torch.arange(6)
    batch = Batch({"x": x}, x.float(), x.float(), x)
    batches = [x, x.float(), x.view(2, 3), [x, x], {"a": x}, {"b": x}, x.numpy(), batch, (x, 1)]
    batches += [(x, "1"), (x, None), [], ["ab", "c"], ["a", "bc"], np.float32(1), [[x], x]]
    assert len({batch_hash(one) for one in batches}) == len(batches)
    assert batch_hash({"a": x}) == batch_hash({"a": x.clone()})


TOML = """
schema = 1
name = "plain"
workload = "loops.py:{function}"
margins = "demo"
looks = [3]
[train]
steps = 3
batch_size = 8
processes = {processes}
[baseline]
recipe = "bf16"
[candidate]
recipe = "mxfp8"
[speed]
required = false
"""
LOOPS = """
import copy, numpy as np, torch
from torch import nn
from qualitygates.integrations import (
    EvaluationSet,
    HuggingFaceWorkload,
    LightningWorkload,
    PlainWorkload,
)
def loop(net, *, seed, steps, batch_size, report):
    for _ in range(steps):
        x = torch.randn(batch_size, 32)
        report.batch(x)
        net(x).mean().backward()
        report.step(1.0)
def aside(net, **given):
    other = copy.deepcopy(net)
    for one in net.parameters():
        one.grad = torch.ones_like(one)
    loop(other, **{**given, "report": given["report"]})
def build(train=loop):
    x, y = torch.randn(200, 32), (torch.arange(200) % 2).float()
    held_out = EvaluationSet({"x": x}, y, {"user": np.arange(200)})
    return PlainWorkload(
        name="plain", build=lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1)), loop=train,
        evaluation=held_out, logits=lambda m, f: m(f["x"]).squeeze(-1),
    )
def build_aside():
    return build(aside)
class Wrong:
    name, facts = "wrong", {}
    def model(self): ...
    def evaluation_batches(self, *, batch_size): ...
    def train(self, model, *, seed, epochs): ...
"""


def experiment(folder: Path, function: str = "build", processes: int = 1) -> Experiment:
    (folder / "loops.py").write_text(LOOPS)
    path = folder / "gate.toml"
    path.write_text(TOML.format(function=function, processes=processes))
    return Experiment.from_toml(path)


def records(one: Experiment, arm: str = "candidate", place: Place = Place()) -> Iterator[Any]:  # noqa: B008
    workload = load_workload(one.workload, {}, folder=one.folder)
    yield from execute(one, arm, 1, workload=workload, tick=lambda: None, place=place)


def test_a_loop_that_trains_a_copy_does_not_match_its_plan(tmp_path: Path) -> None:
    (run,) = records(experiment(tmp_path))
    assert run["gemms_match_plan"] is True
    (run,) = records(experiment(tmp_path, "build_aside"))
    assert run["training"]["crashed"] is None
    assert run["gemms_match_plan"] is False


def test_a_record_of_the_candidate_holds_what_an_acceptance_binds(tmp_path: Path) -> None:
    one = experiment(tmp_path)
    (run,) = records(one)
    plan = lowprec.Plan.from_json(run["plan"])
    assert plan.hash == run["plan_hash"]
    model = load_workload(one.workload, {}, folder=one.folder).model()
    assert lowprec.Fingerprint.from_data(run["model"]) == lowprec.fingerprint(model)
    baseline, _ = records(one, "baseline")
    assert "plan" not in baseline
    assert baseline["environment"]["lowprec"] == lowprec.__version__


def test_an_own_loop_runs_in_one_process(tmp_path: Path) -> None:
    one = experiment(tmp_path, processes=2)
    with pytest.raises(DataError, match="its own training loop runs in one process"):
        list(records(one, place=Place(processes=2)))


def test_a_train_method_of_another_signature_is_found_early(tmp_path: Path) -> None:
    one = experiment(tmp_path, "Wrong")
    with pytest.raises(ExperimentError, match=r"cannot be called as train\(model, seed="):
        load_workload(one.workload, {}, folder=one.folder)


def test_an_evaluation_set_is_checked() -> None:
    x, y = torch.zeros(4, 2), torch.zeros(4)
    with pytest.raises(DataError, match="'user' has 3 rows, labels 4"):
        EvaluationSet({"x": x}, y, {"user": np.arange(3)})
    with pytest.raises(DataError, match="clusters is empty"):
        EvaluationSet({"x": x}, y, {})
    few = EvaluationSet({"x": x}, y, {"user": np.arange(4)}, slices={"odd": np.arange(4) % 2 == 1})
    workload = PlainWorkload(
        name="few", build=net, evaluation=few, logits=lambda m, f: f["x"][:, 0], loop=good_loop
    )
    sizes = [len(batch.labels) for batch in workload.evaluation_batches(batch_size=3)]
    assert sizes == [3, 1]


@pytest.mark.parametrize("kind", [LightningWorkload, HuggingFaceWorkload])
def test_an_absent_library_is_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("qualitygates.integrations.scored.version", absent)
    given = {"data": None} if kind is LightningWorkload else {"dataset": None}
    with pytest.raises(GateError, match=r"is not installed: pip install 'lowprec\[\w+\]'"):
        kind(name="few", build=net, evaluation=None, logits=None, **given)


def test_the_version_of_the_library_is_part_of_the_promise(gated: dict[str, Any]) -> None:
    for name, version in gated["facts"].items():
        assert find_spec(name) is not None
        assert version[0].isdecimal()
    assert gated["facts"] or not gated["parts"]
