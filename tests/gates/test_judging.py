"""From a promise and run records to a verdict; every doubt ends closed."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import numpy as np
import pytest

from qualitygates.errors import ExperimentError, RecordError
from qualitygates.judging import judge_records
from tests.gates.synthetic import (
    BAD,
    EFFECTS,
    NULL,
    Effect,
    changed,
    clicks,
    evaluation,
    find,
    gate,
    records,
)

DATA = clicks()
FIVE = (11, 12, 13, 14, 15)
KEYS = {
    f"{form}/{metric}"
    for form in ("trained", "bf16")
    for metric in ("ne", "auc", "gauc", "calibration")
}


def with_candidate(effect: Effect, **changes: object) -> list[dict]:
    return records(DATA, seeds=FIVE, effects=EFFECTS | {"candidate": effect}, **changes)


@pytest.fixture(scope="module")
def runs() -> list[dict]:
    return records(DATA, seeds=FIVE)


def test_a_neutral_candidate_is_accepted_on_every_metric_of_both_forms(runs: list[dict]) -> None:
    found = judge_records(gate(), runs)
    assert found["verdict"] == "ACCEPT"
    assert set(found["metrics"]) == KEYS
    assert {entry["verdict"] for entry in found["metrics"].values()} == {"ACCEPT"}
    assert found["final"] is True
    assert found["next_look"] is None
    assert (found["look"], found["seeds"]) == (5, list(FIVE))
    assert found["controls"]["behaved"] is True
    assert found["controls"]["known_bad"]["verdict"] == "REJECT"
    assert (found["plan_hash"], found["recipe_hash"]) == ("plan-candidate", "recipe-candidate")
    assert found["speed"]["status"] == "not_required"
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_same_records_in_any_order_give_the_same_verdict(runs: list[dict]) -> None:
    assert judge_records(gate(), runs[::-1]) == judge_records(gate(), runs)


def test_judging_leaves_the_records_alone(runs: list[dict]) -> None:
    before = copy.deepcopy(runs)
    judge_records(gate(), runs)
    assert runs == before


def test_the_estimate_is_the_mean_of_the_paired_differences(runs: list[dict]) -> None:
    entry = judge_records(gate(), runs)["metrics"]["bf16/ne"]
    ne = {
        arm: [find(runs, arm, seed)["evaluations"]["bf16"]["metrics"]["ne"] for seed in FIVE]
        for arm in ("baseline", "candidate")
    }
    d = [c / b - 1 for c, b in zip(ne["candidate"], ne["baseline"], strict=True)]
    assert entry["per_seed"] == pytest.approx(d, abs=1e-12)
    assert entry["estimate"] == pytest.approx(np.mean(d), abs=1e-12)
    gain = 1 - np.mean(ne["baseline"])
    assert entry["relative_information"] == pytest.approx(np.mean(d) / gain, rel=1e-9)


def test_the_noise_floor_is_in_the_units_of_the_margin(runs: list[dict]) -> None:
    found = judge_records(gate(), runs)
    floor = found["noise_floor"]["trained/ne"]
    levels = [find(runs, "baseline", s)["evaluations"]["trained"]["metrics"]["ne"] for s in FIVE]
    assert floor["seed_sd"] == pytest.approx(np.std(levels, ddof=1) / np.mean(levels))
    own = np.std(found["metrics"]["trained/ne"]["per_seed"], ddof=1)
    assert floor["candidate_paired_sd"] == pytest.approx(own)
    assert floor["null_paired_sd"] < floor["candidate_paired_sd"]


def test_gauc_is_judged_only_when_present() -> None:
    found = judge_records(gate(), records(DATA, seeds=FIVE, grouped=False))
    assert found["verdict"] == "ACCEPT"
    assert set(found["metrics"]) == {key for key in KEYS if not key.endswith("gauc")}


def test_gauc_without_a_clustering_that_holds_its_groups_is_inconclusive(runs: list[dict]) -> None:
    split = copy.deepcopy(runs)
    for run in split:
        for form in run["evaluations"].values():
            del form["clusterings"]["user"]
            for entry in form["slices"].values():
                del entry["clusterings"]["user"]
    found = judge_records(gate(), split)
    assert found["verdict"] == "INCONCLUSIVE"
    assert "groups span several clusters" in found["reasons"][0]


def test_a_planted_harm_of_twice_the_margin_is_rejected() -> None:
    runs = with_candidate(Effect(shared=0.32, seed=0.01))
    found = judge_records(gate(), runs)
    assert found["metrics"]["trained/ne"]["estimate"] > 2 * 0.005
    assert found["verdict"] == "REJECT"
    assert found["final"] is True
    assert any(text.startswith("trained/ne REJECT") for text in found["reasons"])


def test_a_harm_in_the_served_form_alone_is_rejected() -> None:
    served = EFFECTS | {"candidate": Effect(shared=0.4)}
    found = judge_records(gate(), records(DATA, seeds=FIVE, served=served))
    assert found["metrics"]["trained/ne"]["verdict"] == "ACCEPT"
    assert found["verdict"] == "REJECT"
    assert all(not text.startswith("trained") for text in found["reasons"])


def test_a_better_ne_does_not_excuse_a_miscalibrated_candidate() -> None:
    runs = with_candidate(Effect(shared=0.005, seed=0.005, shift=-0.05))
    found = judge_records(gate(), runs)
    assert found["metrics"]["trained/ne"]["estimate"] < 0
    assert found["metrics"]["trained/ne"]["verdict"] == "ACCEPT"
    assert found["metrics"]["trained/calibration"]["verdict"] == "REJECT"
    assert found["verdict"] == "REJECT"


def test_noise_beyond_the_margin_is_inconclusive_and_says_what_to_add() -> None:
    quiet = Effect(shared=1e-4, seed=1e-4)
    effects = {"candidate": Effect(shared=0.02, seed=0.02), "null": quiet, "known_bad": BAD}
    found = judge_records(gate(margins="strict"), records(DATA, seeds=FIVE, effects=effects))
    assert found["verdict"] == "INCONCLUSIVE"
    assert found["final"] is True
    assert found["reasons"][-1].endswith("INCONCLUSIVE counts as not accepted")
    assert any("dominates" in text for text in found["advice"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("init_hash", "another init"),
        ("batches_hash", "another order"),
        ("evaluation_hash", "another window"),
        ("evaluation_forms", ["bf16", "trained"]),
    ],
)
@pytest.mark.parametrize("arm", ["candidate", "null", "known_bad"])
def test_runs_that_do_not_pair_are_refused_with_both_values(
    runs: list[dict], arm: str, key: str, value: object
) -> None:
    ours = find(runs, "baseline", 12)["pairing"][key]
    with pytest.raises(RecordError) as caught:
        judge_records(gate(), changed(runs, arm, 12, f"pairing.{key}", value))
    for part in (key, repr(ours), repr(value), f"{arm} seed 12"):
        assert part in str(caught.value)


def test_other_step_counts_are_refused(runs: list[dict]) -> None:
    fewer = changed(runs, "candidate", 12, "pairing.steps", 190)
    with pytest.raises(RecordError, match="200 values of loss for 190 steps"):
        judge_records(gate(), fewer)
    training = find(fewer, "candidate", 12)["training"]
    training["loss"], training["grad_norm"] = training["loss"][:190], training["grad_norm"][:190]
    with pytest.raises(
        RecordError, match=r"steps: 200 in baseline seed 12, 190 in candidate seed 12"
    ):
        judge_records(gate(), fewer)


def test_another_evaluation_precision_is_refused(runs: list[dict]) -> None:
    only = changed(runs, "candidate", 12, "pairing.evaluation_forms", ["trained"])
    with pytest.raises(RecordError, match="the gate promised trained, bf16"):
        judge_records(gate(), only)
    lacking = changed(runs, "candidate", 12, "evaluations", {})
    with pytest.raises(RecordError, match="the gate promised trained, bf16"):
        judge_records(gate(), lacking)


def test_seeds_evaluated_on_different_examples_are_refused(runs: list[dict]) -> None:
    moved = runs
    for arm in ("baseline", "candidate", "null", "known_bad"):
        moved = changed(moved, arm, 13, "pairing.evaluation_hash", "later window")
    with pytest.raises(RecordError, match="all seeds are evaluated on the same examples"):
        judge_records(gate(), moved)


def test_records_that_are_not_the_promised_ones_are_refused(runs: list[dict]) -> None:
    without = [run for run in runs if (run["arm"], run["seed"]) != ("null", 14)]
    with pytest.raises(RecordError, match="missing: null seed 14"):
        judge_records(gate(), without)
    with pytest.raises(RecordError, match="missing: known_bad seed 11, known_bad seed 12"):
        judge_records(gate(), [run for run in runs if run["arm"] != "known_bad"])
    with pytest.raises(RecordError, match="two records of this run"):
        judge_records(gate(), [*runs, runs[3]])
    for path, value, message in (
        ("arm", "placebo", "promised no such arm"),
        ("seed", 99, "this gate promised the seeds"),
        ("schema", 2, "reads runs of schema 1"),
        ("recipe_hash", "edited", "one recipe by one plan"),
        ("plan_hash", "edited", "one recipe by one plan"),
        ("training", {"loss": []}, "'grad_norm', 'nonfinite', 'crashed'"),
    ):
        with pytest.raises(RecordError, match=message):
            judge_records(gate(), changed(runs, "candidate", 13, path, value))
    with pytest.raises(RecordError, match=r"\['pairing'\] missing"):
        judge_records(gate(), [{key: runs[0][key] for key in runs[0] if key != "pairing"}])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("margins", None, "none given"),
        (
            "margins",
            {"name": "demo", "ne": 0.05, "auc": 1, "gauc": 1, "calibration": 1},
            "'demo' means",
        ),
        ("looks", [2], "no computed error level"),
        ("looks", [3, 4], "no computed error level"),
        ("looks", "5", "list of whole numbers"),
        ("alpha", 0.10, "have the level 0.05"),
        ("seeds", [11, 12, 13, 14], "needs 5 different seeds"),
        ("seeds", [11, 12, 13, 14, 14], "needs 5 different seeds"),
        ("speed", {}, "true or false"),
        ("slices", {"protected_margin_factor": 0.0}, "above 0"),
        ("schema", 7, "reads gates of schema 1"),
    ],
)
def test_a_promise_that_binds_nothing_is_refused(
    runs: list[dict], key: str, value: object, message: str
) -> None:
    with pytest.raises(ExperimentError, match=message):
        judge_records(gate() | {key: value}, runs)


def test_a_promise_without_looks_is_refused(runs: list[dict]) -> None:
    for key in ("looks", "alpha", "seeds", "speed"):
        promise = gate()
        del promise[key]
        with pytest.raises(ExperimentError, match=f"'{key}' is missing"):
            judge_records(promise, runs)


def crash(runs: list[dict], arm: str, seed: int) -> list[dict]:
    """The run died at step 2: a short curve, no evaluation, its data hash ends early."""
    dead = changed(runs, arm, seed, "training.crashed", "RuntimeError: out of memory")
    run = find(dead, arm, seed)
    run["training"] |= {"loss": [0.7, 0.6], "grad_norm": [1.0, 1.0]}
    run["pairing"] |= {"batches_hash": "short", "evaluation_hash": None}
    return changed(dead, arm, seed, "evaluations", {})


def test_a_crashed_candidate_is_rejected_never_dropped(runs: list[dict]) -> None:
    found = judge_records(gate(), crash(runs, "candidate", 14))
    assert found["verdict"] == "REJECT"
    assert "crashed: RuntimeError: out of memory" in found["reasons"][0]
    assert found["stability"]["verdict"] == "REJECT"


def test_a_crashed_baseline_invalidates_the_pair(runs: list[dict]) -> None:
    found = judge_records(gate((3, 5, 8)), crash(runs, "baseline", 14))
    assert found["verdict"] == "INCONCLUSIVE"
    assert "the baseline failed, so its pair is invalid" in " ".join(found["reasons"])
    assert found["final"] is True
    assert found["reasons"][-1].endswith("INCONCLUSIVE counts as not accepted")


def test_a_crashed_run_must_still_start_from_the_same_init(runs: list[dict]) -> None:
    dead = changed(crash(runs, "candidate", 14), "candidate", 14, "pairing.init_hash", "other")
    with pytest.raises(RecordError, match="init_hash"):
        judge_records(gate(), dead)


def test_a_nan_at_step_50_rejects_although_the_last_metrics_are_fine(runs: list[dict]) -> None:
    event = [{"step": 50, "where": "loss"}]
    hurt = changed(runs, "candidate", 12, "training.nonfinite", event)
    hurt = changed(
        hurt,
        "candidate",
        12,
        "training.loss",
        [
            None if step == 50 else value
            for step, value in enumerate(find(runs, "candidate", 12)["training"]["loss"])
        ],
    )
    found = judge_records(gate(), hurt)
    assert found["metrics"]["trained/ne"]["verdict"] == "ACCEPT"
    assert found["verdict"] == "REJECT"
    assert "non-finite loss at step 50" in found["reasons"][0]


def test_nonfinite_predictions_of_the_candidate_are_rejected(runs: list[dict]) -> None:
    broken = evaluation(DATA, np.where(np.arange(6000) == 3, np.nan, DATA.truth))
    found = judge_records(gate(), changed(runs, "candidate", 12, "evaluations.trained", broken))
    assert found["verdict"] == "REJECT"
    assert found["metrics"] == {}
    assert found["noise_floor"]["trained/ne"]["candidate_paired_sd"] is None


def test_a_run_that_did_not_execute_its_plan_is_inconclusive(runs: list[dict]) -> None:
    hidden = changed(runs, "candidate", 15, "gemms_match_plan", False)
    gemms = {"fprop": {"mxfp8": 200}, "dgrad": {"mxfp8": 200}, "wgrad": {"bf16": 200}}
    find(hidden, "candidate", 15)["gemms"]["mlp.1"] = gemms
    found = judge_records(gate(), hidden)
    assert found["verdict"] == "INCONCLUSIVE"
    assert "layers: mlp.1)" in found["reasons"][0]
    assert found["final"] is True


def test_too_few_examples_or_clusters_are_inconclusive() -> None:
    few = judge_records(gate(), records(clicks(rows=700, users=60), seeds=FIVE, effects=EFFECTS))
    assert few["verdict"] == "INCONCLUSIVE"
    assert any("positives; below 200" in text for text in few["reasons"])
    coarse = judge_records(gate(), records(clicks(days=30), seeds=FIVE))
    assert coarse["verdict"] == "INCONCLUSIVE"
    assert any("30 clusters in 'day'" in text for text in coarse["reasons"])
    rare = clicks(base=6.0)
    assert np.count_nonzero(rare.labels == 0) < 200
    assert "negatives; below 200" in judge_records(gate(), records(rare, seeds=FIVE))["reasons"][0]


def test_looks_use_the_first_seeds_of_the_promise_only() -> None:
    promise = gate((3, 5, 8))
    runs = records(DATA, seeds=(11, 12, 13, 14))
    # Seed 14 is harmful, but the look of 5 is not complete.
    harmful = records(DATA, seeds=(14,), effects=EFFECTS | {"candidate": Effect(shared=0.8)})
    mixed = [run for run in runs if run["seed"] != 14] + harmful
    found = judge_records(promise, mixed)
    assert (found["look"], found["seeds"]) == (3, [11, 12, 13])
    assert found["metrics"]["trained/ne"]["seeds"] == 3
    assert found["alpha"] == found["metrics"]["trained/ne"]["alpha"] == 0.021
    assert found["verdict"] == "ACCEPT"
    assert any("seeds [14] have runs but no complete look" in text for text in found["advice"])
    dead = judge_records(promise, crash(mixed, "candidate", 14))
    assert dead["verdict"] == "REJECT"


def test_an_open_look_names_the_next_one_and_the_last_one_closes() -> None:
    # The null is quiet enough to accept, the candidate sits near the margin.
    effects = {"candidate": Effect(shared=0.05, seed=0.1), "null": NULL, "known_bad": BAD}
    promise = gate((3, 5, 8))
    runs = records(DATA, seeds=range(11, 19), effects=effects)
    for present, look, next_look in ((3, 3, 5), (4, 3, 5), (5, 5, 8), (8, 8, None)):
        found = judge_records(promise, [run for run in runs if run["seed"] < 11 + present])
        assert found["verdict"] == "INCONCLUSIVE"
        assert (found["look"], found["next_look"]) == (look, next_look)
        assert found["final"] is (next_look is None)
    assert found["reasons"][-1].endswith("INCONCLUSIVE counts as not accepted")


def test_a_null_control_that_is_not_accepted_takes_every_verdict_back() -> None:
    noisy = Effect(shared=0.4)
    for candidate in (EFFECTS["candidate"], BAD):
        effects = {"candidate": candidate, "null": noisy, "known_bad": BAD}
        found = judge_records(gate(), records(DATA, seeds=FIVE, effects=effects))
        assert found["verdict"] == "INCONCLUSIVE"
        assert found["controls"]["behaved"] is False
        assert "the null control" in " ".join(found["reasons"])


def test_a_known_bad_control_that_passes_means_no_sensitivity() -> None:
    effects = EFFECTS | {"known_bad": NULL}
    found = judge_records(gate(), records(DATA, seeds=FIVE, effects=effects))
    assert found["verdict"] == "INCONCLUSIVE"
    assert "the assay has no sensitivity" in found["reasons"][0]
    worse = judge_records(gate(), records(DATA, seeds=FIVE, effects=effects | {"candidate": BAD}))
    assert worse["verdict"] == "REJECT"


def test_a_known_bad_control_may_fail_in_any_way_but_must_be_judged(runs: list[dict]) -> None:
    event = [{"step": 50, "where": "grad"}]
    found = judge_records(gate(), changed(runs, "known_bad", 11, "training.nonfinite", event))
    assert found["verdict"] == "ACCEPT"
    assert found["controls"]["known_bad"]["verdict"] == "REJECT"
    mismatched = changed(runs, "known_bad", 11, "gemms_match_plan", False)
    for unjudged in (mismatched, crash(runs, "known_bad", 11)):
        found = judge_records(gate(), unjudged)
        assert found["verdict"] == "INCONCLUSIVE"
        assert "the known-bad control could not be judged" in found["reasons"][0]


@pytest.mark.parametrize(
    ("arm", "controls"),
    [
        ("null", {"null": False, "known_bad_margins": 2.0}),
        ("known_bad", {"null": True, "known_bad_margins": 0.0}),
    ],
)
def test_a_control_that_is_switched_off_makes_acceptance_impossible(
    runs: list[dict], arm: str, controls: dict
) -> None:
    promise = gate((3, 5, 8)) | {"controls": controls}
    found = judge_records(promise, [run for run in runs if run["arm"] != arm])
    assert found["verdict"] == "INCONCLUSIVE"
    assert found["final"] is True
    assert found["controls"][arm]["verdict"] == "NOT_RUN"
    assert f"the {arm} control is switched off" in found["reasons"][0]
    with pytest.raises(RecordError, match=f"{arm} seed 11: this gate promised no such arm"):
        judge_records(promise, runs)


def test_a_control_equal_to_the_baseline_is_pointed_out() -> None:
    effects = EFFECTS | {"null": Effect()}
    found = judge_records(gate(), records(DATA, seeds=FIVE, effects=effects))
    assert found["verdict"] == "ACCEPT"
    assert any("the null arm predicts exactly" in text for text in found["advice"])


def test_a_required_speed_cannot_be_accepted_without_timing(runs: list[dict]) -> None:
    promise = gate((3, 5, 8)) | {"speed": {"required": True}}
    found = judge_records(promise, runs)
    assert found["verdict"] == "INCONCLUSIVE"
    assert found["reasons"][0].startswith("speed: not measurable here")
    assert found["final"] is True
    assert judge_records(promise, with_candidate(BAD))["verdict"] == "REJECT"


def test_different_environments_warn_and_are_listed(runs: list[dict]) -> None:
    other = {"torch": "2.14", "device": "cpu"}
    found = judge_records(gate(), changed(runs, "candidate", 12, "environment", other))
    assert found["verdict"] == "ACCEPT"
    assert len(found["environment"]) == 2
    assert found["reasons"][-1].startswith("warning: the runs come from 2 different environments")


def test_judging_imports_neither_torch_nor_lowprec() -> None:
    code = (
        "import sys, qualitygates.judging\n"
        "assert not {'torch', 'lowprec'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
