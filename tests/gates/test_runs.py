"""One run: determinism, shared and separate random streams, what is recorded."""

from pathlib import Path

import numpy as np
import pytest

from qualitygates.evaluating import EVALUATION_FORMS
from qualitygates.experiment import Experiment
from qualitygates.pairing import promise_hash
from qualitygates.runs import execute, run_inputs, stream_seed
from qualitygates.workload import load_workload

FOLDER = Path(__file__).parent


def experiment(**changes) -> Experiment:
    data = {
        "schema": 1,
        "name": "toy",
        "workload": "toy_workload.py:build",
        "margins": "demo",
        "looks": [3],
        "options": {"rows": 2000},
        "train": {"steps": 60, "batch_size": 64},
        "baseline": {"recipe": "bf16"},
        "candidate": {"recipe": "mxfp8"},
        "speed": {"required": False},
    }
    return Experiment.from_dict(data | changes, folder=FOLDER)


def records(arm: str, seed: int = 1, **changes) -> list[dict]:
    gate = experiment(**changes)
    workload = load_workload(gate.workload, gate.options, folder=gate.folder)
    return execute(gate, arm, seed, workload=workload, tick=lambda: None)


def stable(record: dict) -> dict:
    return {k: v for k, v in record.items() if k not in ("timing", "environment", "checksum")}


def test_same_inputs_give_the_same_record() -> None:
    first = records("candidate")[0]
    assert stable(first) == stable(records("candidate")[0])
    # What binds it to the margins and looks that were promised.
    assert first["promise_hash"] == promise_hash(experiment().promise(created="at any time"))


def test_arms_of_a_seed_share_init_order_and_evaluation_and_seeds_do_not() -> None:
    base, known_bad = records("baseline")
    candidate, null = records("candidate")[0], records("null")[0]
    for other in (known_bad, candidate, null):
        assert other["pairing"] == base["pairing"]
    second = records("baseline", seed=2)[0]
    for key in ("init_hash", "batches_hash"):
        assert second["pairing"][key] != base["pairing"][key]
    assert second["pairing"]["evaluation_hash"] == base["pairing"]["evaluation_hash"]
    assert base["pairing"]["evaluation_forms"] == list(EVALUATION_FORMS)
    assert len({stream_seed(1, s) for s in ("init", "data", "dropout", "perturb", "fault")}) == 5


def test_quantized_arm_really_ran_quantized_and_the_baseline_did_not() -> None:
    candidate, base = records("candidate")[0], records("baseline")[0]
    assert candidate["gemms_match_plan"]
    assert candidate["gemms"]["top"] == {
        "fprop": {"mxfp8 x mxfp8_32x32": 60},
        "dgrad": {"mxfp8 x mxfp8_32x32": 60},
        "wgrad": {"mxfp8": 60},
    }
    assert "head" not in candidate["gemms"]
    assert "N=1 head" in candidate["plan_layers"][2]["reason"]
    assert base["gemms"]["top"]["wgrad"] == {"bf16": 60}
    assert base["evaluations"]["trained"] == base["evaluations"]["bf16"]
    assert candidate["evaluations"]["trained"] != candidate["evaluations"]["bf16"]


def test_null_control_differs_by_rounding_only() -> None:
    base, null = records("baseline")[0], records("null")[0]
    ne = [r["evaluations"]["trained"]["metrics"]["ne"] for r in (base, null)]
    assert ne[0] != ne[1]
    assert ne[0] == pytest.approx(ne[1], rel=2e-2)
    assert null["inputs"]["faults"] == {"init_ulp": 1}


def test_known_bad_is_the_baseline_with_noise_of_two_margins() -> None:
    base, bad = records("baseline")
    assert bad["training"]["loss"] == base["training"]["loss"]
    ne = [r["evaluations"]["trained"]["metrics"]["ne"] for r in (base, bad)]
    assert ne[1] / ne[0] - 1 == pytest.approx(2 * 0.005, rel=0.6)


def test_nan_at_one_step_is_recorded_and_training_goes_on() -> None:
    record = records("candidate", options={"rows": 2000, "explode_at": 51})[0]
    assert record["training"]["loss"][50] is None
    assert {"step": 50, "where": "loss"} in record["training"]["nonfinite"]
    assert len(record["training"]["loss"]) == 60
    clean = records("baseline", options={"rows": 2000, "explode_at": 51})[0]
    assert clean["training"]["nonfinite"] == []


def test_a_crash_of_the_model_is_a_record() -> None:
    record = records("candidate", options={"rows": 2000, "crash": True})[0]
    assert record["training"]["crashed"] == "RuntimeError: the kernel fell over"
    assert record["evaluations"] == {}


def test_inputs_cover_what_matters() -> None:
    base = run_inputs(experiment(), "candidate", 1)
    others = [
        run_inputs(experiment(), "baseline", 1),
        run_inputs(experiment(), "candidate", 2),
        run_inputs(experiment(train={"steps": 61, "batch_size": 64}), "candidate", 1),
        run_inputs(experiment(candidate={"recipe": "mxfp8-safe"}), "candidate", 1),
        run_inputs(experiment(options={"rows": 2001}), "candidate", 1),
        run_inputs(
            experiment(candidate={"recipe": "mxfp8", "fault": {"logit_noise": 0.1}}), "candidate", 1
        ),
    ]
    assert all(other != base for other in others)
    # Margins and looks are the judge's, not the run's: a longer gate reuses its runs.
    assert run_inputs(experiment(looks=[3, 5], margins="strict"), "candidate", 1) == base


def test_both_arms_are_recalibrated_for_negatives_that_training_left_out() -> None:
    plain, moved = (
        records("baseline", evaluate={"negative_sampling_rate": rate})[0] for rate in (1.0, 0.1)
    )
    assert plain["training"]["loss"] == moved["training"]["loss"]
    before, after = (run["evaluations"]["trained"]["metrics"] for run in (plain, moved))
    assert after["auc"] == pytest.approx(before["auc"], abs=1e-12)
    assert after["calibration"] < 0.5 * before["calibration"]
    p = np.array(plain["evaluations"]["trained"]["prediction_sample"])
    recalibrated = moved["evaluations"]["trained"]["prediction_sample"]
    np.testing.assert_allclose(recalibrated, p / (p + (1 - p) / 0.1), rtol=1e-6)
    assert plain["key"] != moved["key"]
