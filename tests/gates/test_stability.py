"""Hard failures are never averaged away; spikes are compared with the paired baseline."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from scipy.stats import binomtest

from qualitygates.stability import above_start, hard_failures, judge_stability, spikes
from tests.gates.synthetic import STEPS, clicks, evaluation, record

DATA = clicks(0, rows=600, users=60, days=50)
EVALUATION = evaluation(DATA, DATA.truth)


def healthy(arm: str, seed: int = 11) -> dict:
    return record(arm, seed, {form: copy.deepcopy(EVALUATION) for form in ("trained", "bf16")})


def pairs(seeds: int = 5) -> list[tuple[dict, dict]]:
    return [
        (healthy("baseline", seed), healthy("candidate", seed)) for seed in range(11, 11 + seeds)
    ]


def test_healthy_pairs_pass_and_promise_no_more_than_they_show() -> None:
    found = judge_stability(pairs())
    assert found["verdict"] == "ACCEPT"
    assert found["hard"] == []
    assert "no hard failure seen in 5 runs" in found["statement"]
    assert "45%" in found["statement"]


def test_a_nonfinite_loss_at_step_50_counts_although_the_last_metric_is_finite() -> None:
    run = pairs()
    run[2][1]["training"]["loss"][50] = None
    run[2][1]["training"]["nonfinite"] = [{"step": 50, "where": "loss"}]
    found = judge_stability(run)
    assert found["verdict"] == "REJECT"
    assert found["hard"] == ["candidate, seed 13: non-finite loss at step 50"]


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_a_missing_number_counts_without_an_event(key: str) -> None:
    run = healthy("candidate")
    run["training"][key][50] = None
    assert hard_failures(run) == [f"non-finite {key} at index 50 of the recorded steps"]


@pytest.mark.parametrize("where", ["grad", "weights", "predictions"])
def test_every_place_of_a_nonfinite_value_counts(where: str) -> None:
    run = healthy("candidate")
    run["training"]["nonfinite"] = [{"step": 3, "where": where}, {"step": 4, "where": where}]
    assert hard_failures(run) == [f"non-finite {where} at step 3 (and 1 more)"]


def test_nonfinite_predictions_in_one_form_count() -> None:
    run = healthy("candidate")
    logits = np.where(np.arange(600) == 5, np.inf, DATA.truth)
    run["evaluations"]["bf16"] = evaluation(DATA, logits)
    assert hard_failures(run) == ["non-finite predictions in the bf16 evaluation"]


def test_a_crashed_run_without_evaluations_is_a_failure_not_missing_data() -> None:
    run = healthy("candidate")
    run["training"] |= {"crashed": "RuntimeError: out of memory", "loss": [0.7], "grad_norm": [1.0]}
    run["evaluations"] = {}
    found = judge_stability([*pairs(4), (healthy("baseline", 15), run)])
    assert found["verdict"] == "REJECT"
    assert "crashed: RuntimeError: out of memory" in found["hard"][0]


def test_a_failed_baseline_invalidates_the_pair_even_when_the_candidate_fails_too() -> None:
    run = pairs()
    run[0][0]["training"]["crashed"] = "killed"
    assert judge_stability(run)["verdict"] == "INCONCLUSIVE"
    run[0][1]["training"]["crashed"] = "killed"
    found = judge_stability(run)
    assert found["verdict"] == "INCONCLUSIVE"
    assert found["baseline_failures"] == ["baseline, seed 11: crashed: killed"]


def test_failures_of_seeds_after_the_look_are_not_dropped() -> None:
    later = (healthy("baseline", 16), healthy("candidate", 16))
    later[1]["training"]["crashed"] = "killed"
    assert judge_stability(pairs(), beyond=[later])["verdict"] == "REJECT"


def test_a_candidate_that_ends_at_the_base_rate_failed_only_if_the_baseline_did_not() -> None:
    lost, learned = healthy("candidate"), healthy("baseline")
    lost["evaluations"]["trained"]["metrics"]["ne"] = 1.0
    assert "no better than the base rate" in hard_failures(lost, baseline=learned)[0]
    learned["evaluations"]["trained"]["metrics"]["ne"] = 1.01
    assert hard_failures(lost, baseline=learned) == []
    assert hard_failures(lost) == []


def test_training_loss_above_its_start_late_in_training() -> None:
    run = healthy("candidate")
    run["training"]["loss"][STEPS - 30 :] = [0.9] * 30
    assert "above its starting level in 26% of the last half" in hard_failures(run)[0]
    brief = healthy("candidate")
    brief["training"]["loss"][STEPS - 2 :] = [1.2] * 2
    assert hard_failures(brief) == []


def test_above_start_is_a_share_of_the_smoothed_last_half() -> None:
    falling = np.linspace(1.0, 0.5, 400)
    assert above_start(falling) == 0.0
    assert above_start(np.linspace(0.5, 1.0, 400)) == 1.0
    assert above_start([1.0, 0.5]) == 0.0
    noisy = falling * 0 + 0.6 + np.random.default_rng(1).normal(0, 0.1, 400)
    noisy[:20] += 0.2
    # One batch in 40 lies above the start of 0.8, which is noise of batches and not of the model.
    assert above_start(noisy) < 0.01


def test_a_model_that_starts_at_the_base_rate_does_not_fail_by_batch_noise() -> None:
    """200 healthy runs that gain a fifth of the batch noise, and the same runs drifting up."""
    rng = np.random.default_rng(4)
    steps = np.arange(300)
    shares = {"healthy": 0, "drifting": 0}
    for _ in range(200):
        noise = 0.05 * rng.standard_normal(300)
        shares["healthy"] += above_start(0.5 - 0.01 * steps / 300 + noise) > 0.05
        shares["drifting"] += above_start(0.5 + 0.1 * steps / 300 + noise) > 0.05
    assert shares["healthy"] <= 20
    assert shares["drifting"] >= 180


def test_spikes_are_counted_once_each_and_noise_is_not_a_spike() -> None:
    rng = np.random.default_rng(2)
    quiet = 0.5 + rng.normal(0, 0.01, 400)
    assert spikes(quiet) <= 1
    jumped = quiet.copy()
    for start in (150, 220, 300):
        jumped[start : start + 6] += 0.5
    assert spikes(jumped) == spikes(quiet) + 3
    assert spikes(np.full(400, 0.5)) == 0
    assert spikes(quiet[:10]) == 0


def test_more_spikes_than_the_baseline_reject_by_the_binomial_rule() -> None:
    run = pairs(3)
    for _, candidate in run:
        for start in (60, 90, 120, 150, 180):
            candidate["training"]["grad_norm"][start : start + 2] = [9.0, 9.0]
    found = judge_stability(run)
    assert found["verdict"] == "REJECT"
    flagged = next(entry for entry in found["soft"] if entry["flagged"])
    assert flagged["counter"] == "grad_norm spikes"
    ours, theirs = flagged["candidate"], flagged["baseline"]
    assert ours >= 15
    expected = binomtest(ours, ours + theirs, 0.5, alternative="greater").pvalue
    assert flagged["p_value"] == pytest.approx(expected)


def test_four_extra_spikes_are_too_few_to_reject() -> None:
    run = pairs(3)
    for start in (60, 90, 120, 150):
        run[0][1]["training"]["loss"][start : start + 2] = [1.5, 1.5]
    found = judge_stability(run)
    assert found["verdict"] == "ACCEPT"
    assert not any(entry["flagged"] for entry in found["soft"])


def with_counters(ours: list, theirs: list | None) -> list[tuple[dict, dict]]:
    found = pairs()
    for baseline, candidate in found:
        candidate["training"]["counters"] = {"amax": ours}
        baseline["training"]["counters"] = {} if theirs is None else {"amax": theirs}
    return found


def jumpy(every: int) -> list[float]:
    """A sampled counter of 100 values that spikes at every so many samples."""
    level = 1 + 0.01 * np.sin(np.arange(100))
    return [9.0 if index % every == every - 1 else float(level[index]) for index in range(100)]


def test_spikes_of_a_counter_are_compared_with_the_paired_baseline() -> None:
    found = judge_stability(with_counters(jumpy(25), jumpy(101)))
    entry = next(one for one in found["soft"] if one["counter"] == "amax spikes")
    assert (entry["candidate"], entry["baseline"]) == (5 * 4, 0)
    assert entry["p_value"] == pytest.approx(0.5**20)
    assert entry["flagged"] is True
    assert found["verdict"] == "REJECT"
    assert entry["candidate_level"] > entry["baseline_level"]
    same = judge_stability(with_counters(jumpy(25), jumpy(25)))
    assert same["verdict"] == "ACCEPT"


def test_a_counter_that_the_baseline_cannot_have_is_listed_and_not_flagged() -> None:
    found = judge_stability(with_counters(jumpy(25), None))
    entry = next(one for one in found["soft"] if one["counter"] == "amax spikes")
    assert (entry["candidate"], entry["baseline"], entry["flagged"]) == (5 * 4, None, False)
    assert entry["baseline_level"] is None
    assert found["verdict"] == "ACCEPT"


@pytest.mark.parametrize(("ours", "theirs", "verdict"), [(3, 0, "REJECT"), (3, 2, "ACCEPT")])
def test_skipped_steps_are_counted_over_all_pairs(ours: int, theirs: int, verdict: str) -> None:
    found = pairs()
    for baseline, candidate in found:
        candidate["training"]["skipped_steps"] = ours
        baseline["training"]["skipped_steps"] = theirs
    judged = judge_stability(found)
    entry = next(one for one in judged["soft"] if one["counter"] == "skipped steps")
    assert (entry["candidate"], entry["baseline"]) == (5 * ours, 5 * theirs)
    expected = binomtest(5 * ours, 5 * (ours + theirs), 0.5, alternative="greater").pvalue
    assert entry["p_value"] == pytest.approx(expected)
    assert judged["verdict"] == verdict


def far_worse(factor: float) -> list[tuple[dict, dict]]:
    found = pairs()
    loss = found[1][1]["training"]["loss"]
    found[1][1]["training"]["loss"] = [factor * value for value in loss]
    return found


def test_a_training_loss_ten_margins_above_the_baselines_is_a_hard_failure() -> None:
    found = judge_stability(far_worse(1.06), margin=0.005)
    assert found["verdict"] == "REJECT"
    (text,) = found["hard"]
    assert text.startswith("candidate, seed 12: training loss worse than the baseline's by 6.00%")
    assert "allowed: ten NE margins, 5.00%" in text
    assert judge_stability(far_worse(1.04), margin=0.005)["hard"] == []
    assert judge_stability(far_worse(0.5), margin=0.005)["hard"] == []
    # Without a margin nothing was promised that a loss could break.
    assert judge_stability(far_worse(1.06))["hard"] == []


def test_it_counts_for_seeds_beyond_the_look_and_not_beside_another_failure() -> None:
    run = far_worse(1.06)
    found = judge_stability(run[2:], beyond=run[:2], margin=0.005)
    assert found["verdict"] == "REJECT"
    run[1][1]["training"]["nonfinite"] = [{"step": 3, "where": "grad"}]
    assert judge_stability(run, margin=0.005)["hard"] == [
        "candidate, seed 12: non-finite grad at step 3"
    ]
