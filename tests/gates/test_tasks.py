"""Several tasks of one model: each is co-primary under its own name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qualitygates.errors import DataError, ExperimentError
from qualitygates.evaluating import evaluation_names, mean_task_loss
from qualitygates.experiment import Experiment
from qualitygates.judging import judge_records
from qualitygates.runs import execute
from qualitygates.workload import Batch, load_workload, tasks_of
from tests.gates.synthetic import EFFECTS, Effect, arm_logits, clicks, evaluation, gate, record

FOLDER = Path(__file__).parent
NAMES = ["trained:click", "trained:buy", "bf16:click", "bf16:buy"]


def experiment(**changes) -> Experiment:
    data = {
        "schema": 1,
        "name": "two tasks",
        "workload": "two_task_workload.py:build",
        "margins": "demo",
        "looks": [3],
        "train": {"steps": 30, "batch_size": 64},
        "baseline": {"recipe": "bf16"},
        "candidate": {"recipe": "mxfp8"},
        "speed": {"required": False},
    }
    return Experiment.from_dict(data | changes, folder=FOLDER)


def workload():
    return load_workload("two_task_workload.py:build", {"rows": 3000}, folder=FOLDER)


@pytest.fixture(scope="module")
def baseline() -> list[dict]:
    return execute(experiment(), "baseline", 1, workload=workload(), tick=lambda: None)


def test_a_run_is_evaluated_by_form_and_task(baseline: list[dict]) -> None:
    assert evaluation_names(workload()) == NAMES
    run = baseline[0]
    assert run["pairing"]["evaluation_forms"] == NAMES
    assert list(run["evaluations"]) == NAMES
    clicked, bought = (run["evaluations"][f"trained:{task}"] for task in ("click", "buy"))
    y = workload().y[1]
    assert clicked["positives"] == y.sum()
    # Only clicked rows weigh in the second task.
    assert bought["weight"] == y.sum()
    assert bought["positives"] + bought["negatives"] == y.sum()
    assert clicked["metrics"] != bought["metrics"]


def test_the_known_bad_control_harms_every_task_by_the_promised_margins(
    baseline: list[dict],
) -> None:
    good, bad = baseline
    assert set(bad["training"]["logit_noise"]) == {"click", "buy"}
    for name in NAMES:
        ne = [run["evaluations"][name]["metrics"]["ne"] for run in (good, bad)]
        assert 0 < ne[1] / ne[0] - 1 < 5 * 2 * 0.005


def test_the_loss_is_the_mean_of_the_tasks_weighted_losses() -> None:
    rng = torch.Generator().manual_seed(0)
    logits, weights = torch.randn(50, 2, generator=rng), torch.rand(50, 2, generator=rng)
    labels = (torch.rand(50, 2, generator=rng) < 0.3).float()
    batch = Batch({}, labels, weights, torch.arange(50))
    z, y, w = (one.double().numpy() for one in (logits, labels, weights))
    per_task = (w * (np.logaddexp(0, z) - y * z)).sum(0) / w.sum(0)
    found = mean_task_loss(logits, batch, where="step 0", whole=weights)
    assert found.item() == pytest.approx(per_task.mean(), rel=1e-6)
    by_row = Batch({}, labels, weights[:, 0], torch.arange(50))
    per_task = (w[:, :1] * (np.logaddexp(0, z) - y * z)).sum(0) / w[:, 0].sum()
    found = mean_task_loss(logits, by_row, where="step 0", whole=weights[:, 0])
    assert found.item() == pytest.approx(per_task.mean(), rel=1e-6)


def test_a_task_without_weight_in_a_batch_adds_nothing_and_breaks_nothing() -> None:
    logits = torch.zeros(4, 2, requires_grad=True)
    weights = torch.tensor([[1.0, 0.0]] * 4)
    batch = Batch({}, torch.zeros(4, 2), weights, torch.arange(4))
    loss = mean_task_loss(logits, batch, where="step 3", whole=weights)
    loss.backward()
    assert loss.item() == pytest.approx(np.log(2) / 2)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[:, 1].any()
    empty = Batch({}, torch.zeros(4, 2), torch.zeros(4, 2), torch.arange(4))
    with pytest.raises(DataError, match="step 3: all weights of the batch are zero"):
        mean_task_loss(logits, empty, where="step 3", whole=empty.weights)


@pytest.mark.parametrize("shape", [(4,), (4, 3), (5, 2)])
def test_logits_that_do_not_fit_the_labels_are_refused(shape: tuple[int, ...]) -> None:
    batch = Batch({}, torch.zeros(4, 2), torch.ones(4), torch.arange(4))
    with pytest.raises(DataError, match=r"logits and labels are \[rows\] or \[rows, tasks\]"):
        mean_task_loss(torch.zeros(shape), batch, where="step 0", whole=batch.weights)


@pytest.mark.parametrize("names", ["click", ("a", "a"), ("a:b",), ("a/b",), ("",), (1,)])
def test_tasks_that_cannot_name_a_metric_are_refused(names: object) -> None:
    class Named:
        name = "mine"
        tasks = names

    with pytest.raises(ExperimentError, match="mine: tasks"):
        tasks_of(Named())  # type: ignore[arg-type]


def test_labels_must_have_one_column_a_task() -> None:
    class Unnamed(type(workload())):
        tasks = ("click", "buy", "like")

    with pytest.raises(DataError, match="names 3 tasks"):
        execute(experiment(), "baseline", 1, workload=Unnamed(3000), tick=lambda: None)


def judged(effects: dict[str, Effect], names: list[str]) -> dict:
    """Three seeds of four arms; the arms' effects on the second task alone."""
    data, runs = clicks(), []
    for seed in (11, 12, 13):
        for arm in ("baseline", "candidate", "null", "known_bad"):
            plain = evaluation(data, arm_logits(data, EFFECTS.get(arm), seed=seed, arm=arm))
            other = evaluation(data, arm_logits(data, effects.get(arm), seed=seed, arm=arm))
            found = {name: other if name.endswith("buy") else plain for name in names}
            run = record(arm, seed, found)
            run["pairing"]["evaluation_forms"] = list(found)
            runs.append(run)
    return judge_records(gate((3,)) | {"evaluations": names}, runs)


def test_every_task_is_co_primary() -> None:
    names = ["trained:click", "trained:buy"]
    fine = judged(EFFECTS, names)
    assert fine["verdict"] == "ACCEPT"
    assert {key for key in fine["metrics"] if key.endswith("/ne")} == {
        "trained:click/ne",
        "trained:buy/ne",
    }
    harmed = judged(EFFECTS | {"candidate": Effect(shared=0.4)}, names)
    assert harmed["verdict"] == "REJECT"
    assert harmed["metrics"]["trained:click/ne"]["verdict"] == "ACCEPT"
    assert any(text.startswith("trained:buy/ne REJECT") for text in harmed["reasons"])
    assert set(harmed["noise_floor"]) == set(harmed["metrics"])


@pytest.mark.parametrize("names", [[], "trained", ["a", "a"], ["a/b"], ["a:"], [":a"], [1]])
def test_evaluations_that_cannot_be_promised_are_refused(names: object) -> None:
    with pytest.raises(ExperimentError, match="gate: evaluations"):
        judge_records(gate((3,)) | {"evaluations": names}, [])
