"""The speed verdict from block times: ladder, whole job, MFU, doubts, and how it joins quality."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from qualitygates.errors import ExperimentError, RecordError
from qualitygates.speed.rules import check_belongs, join, judge_speed, log_ratio
from tests.gates.timings import LAYERS, PROMISE, changed, measurement, speed_record


def rung(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["rungs"] if one["rung"] == name)


def test_the_interval_is_a_paired_t_of_log_ratios() -> None:
    rng = np.random.default_rng(0)
    b, c = np.exp(rng.normal(1, 0.1, (2, 3, 12)))
    found = log_ratio(b, c)
    for row in range(3):
        y = [math.log(c[row, k] / b[row, k]) for k in range(12)]
        mean, sd = sum(y) / 12, np.std(y, ddof=1)
        reach = stats.t.ppf(0.95, 11) * sd / math.sqrt(12)
        assert found.mean[row] == pytest.approx(mean, rel=1e-12)
        assert found.lower[row] == pytest.approx(mean - reach, rel=1e-12)
        assert found.upper[row] == pytest.approx(mean + reach, rel=1e-12)
    one = log_ratio(b[0], c[0])
    p = stats.ttest_1samp(np.log(c[0] / b[0]), math.log(0.98), alternative="greater").pvalue
    assert one.p_slower(0.98) == pytest.approx(p, rel=1e-9)


def test_everything_faster_is_accepted_and_the_ladder_shows_what_is_missing() -> None:
    found = judge_speed(PROMISE, speed_record())
    assert found["status"] == "ACCEPT"
    statuses = {one["rung"]: one["status"] for one in found["rungs"]}
    assert statuses == {
        "kernel": "missing",
        "module": "ACCEPT",
        "step": "ACCEPT",
        "job": "missing",
    }
    assert rung(found, "job")["reason"] == "the job rung is missing: it was not run"
    step = rung(found, "step")["entries"][0]
    assert step["lower"] < step["ratio"] < step["upper"] < step["limit"] == 0.98
    assert rung(found, "module")["entries"][0]["limit"] == 0.95
    assert "from the step rung" in found["reason"]
    assert found["give_back"] == []


@pytest.mark.parametrize(
    ("step", "modules", "status", "said"),
    [
        (0.8, (0.7, 0.75), "ACCEPT", "all 2 faster"),
        (1.1, (0.7, 0.75), "REJECT", "step: training step is not faster"),
        (0.976, (0.7, 0.75), "INCONCLUSIVE", "step: training step is not shown to be faster"),
        (0.8, (0.7, 1.2), "REJECT", "module: mlp.1 is not faster"),
        (0.8, (0.7, 0.949), "INCONCLUSIVE", "module: mlp.1 is not shown to be faster"),
        (0.8, (0.7,), "INCONCLUSIVE", "quantized layers without a timing: mlp.1"),
        (0.8, (), "INCONCLUSIVE", "the module rung is missing"),
        (1.1, (), "REJECT", "step: training step is not faster"),
    ],
)
def test_each_rung_can_stop_it(
    step: float, modules: tuple[float, ...], status: str, said: str
) -> None:
    found = judge_speed(PROMISE, speed_record(step=step, modules=modules))
    assert found["status"] == status
    assert said in found["reason"]


def test_slow_layers_are_named_to_be_given_back() -> None:
    group = measurement("module", "a", 1.3, layers=["a", "b"])
    record = speed_record(modules=(0.7, 0.75))
    record["measurements"].append(group)
    assert judge_speed(PROMISE, record)["give_back"] == ["a", "b"]


def test_a_false_alarm_of_one_module_among_many_does_not_reject() -> None:
    # p = 0.03 for one of 20: below 0.05, above 0.05 / 20.
    record = speed_record()
    record["quantized_layers"] = [f"l{index}" for index in range(20)]
    record["measurements"] = record["measurements"][:1] + [
        measurement("module", name, 0.7) for name in record["quantized_layers"][1:]
    ]
    slow = measurement("module", "l0", 0.95)
    y = np.linspace(-1, 1, 10)
    mean = -stats.t.ppf(0.03, 9) * y.std(ddof=1) / math.sqrt(10)
    slow["candidate_ms"] = [
        b * 0.95 * math.exp(0.01 * (one + mean))
        for b, one in zip(slow["baseline_ms"], y, strict=True)
    ]
    record["measurements"].append(slow)
    assert log_ratio(slow["baseline_ms"], slow["candidate_ms"]).p_slower(0.95) == pytest.approx(
        0.03, rel=1e-6
    )
    assert rung(judge_speed(PROMISE, record), "module")["status"] == "INCONCLUSIVE"
    alone = speed_record()
    alone["quantized_layers"] = ["l0"]
    alone["measurements"] = [alone["measurements"][0], slow]
    assert rung(judge_speed(PROMISE, alone), "module")["status"] == "REJECT"


def test_the_whole_job_pays_for_its_conversion() -> None:
    record = speed_record()
    found = judge_speed(PROMISE | {"planned_steps": 1000}, record)
    job = found["whole_job"]
    step = rung(found, "step")["entries"][0]
    b, c = step["baseline_ms"] / 1e3, step["candidate_ms"] / 1e3
    assert job["ratio"] == pytest.approx(10 / (1000 * b) + step["ratio"], rel=1e-12)
    assert job["break_even_steps"] == pytest.approx(10 / (b - c), rel=1e-12)
    # 10 s of conversion against 1000 steps of 2 ms saved each.
    assert found["status"] == "REJECT"
    assert "whole job of 1000 steps" in found["reason"]
    assert judge_speed(PROMISE | {"planned_steps": 50_000}, record)["status"] == "ACCEPT"


def test_extra_steps_count_against_the_candidate() -> None:
    found = judge_speed(PROMISE | {"extra_steps": 30_000}, speed_record())
    assert found["status"] == "REJECT"
    job, step = found["whole_job"], rung(found, "step")["entries"][0]
    b, c = step["baseline_ms"] / 1e3, step["candidate_ms"] / 1e3
    even = job["break_even_steps"]
    assert 10 + (even + 30_000) * c == pytest.approx(even * b, rel=1e-9)
    slower = judge_speed(PROMISE, speed_record(step=1.1))["whole_job"]
    assert slower["break_even_steps"] is None
    assert "never pays" in slower["reason"]


@pytest.mark.parametrize(
    ("promise", "record", "said"),
    [
        ({"required": True}, speed_record(), "no planned_steps"),
        (PROMISE, speed_record(costs=None), "was not recorded"),
    ],
)
def test_without_planned_steps_or_costs_nothing_is_accepted(
    promise: dict, record: dict, said: str
) -> None:
    found = judge_speed(promise, record)
    assert found["status"] == "INCONCLUSIVE"
    assert said in found["reason"]


def test_a_job_that_was_run_is_judged_and_weighed_in_place_of_the_step() -> None:
    record = speed_record()
    slow = measurement("job", "64 GPUs", 1.05, gpus=64, pairs=10)
    slow["baseline_ms"] = [2 * one for one in slow["baseline_ms"]]
    slow["candidate_ms"] = [2 * one for one in slow["candidate_ms"]]
    record["measurements"].append(slow)
    found = judge_speed(PROMISE, record)
    assert found["status"] == "REJECT"
    assert found["whole_job"]["evidence"] == "job"
    used = found["utilization"]
    step, job = (rung(found, name)["entries"][0] for name in ("step", "job"))
    for arm in ("baseline", "candidate"):
        scaling = step[f"{arm}_ms"] / job[f"{arm}_ms"]
        assert used[arm]["scaling_ratio"] == pytest.approx(scaling)
        local = 4e12 / (step[f"{arm}_ms"] * 1e-3 * 989.4e12)
        assert used[arm]["local_mfu_bf16_peak"] == pytest.approx(local)
        assert used[arm]["job_mfu_bf16_peak"] == pytest.approx(local * scaling)
        fine = 4e12 / (step[f"{arm}_ms"] * 1e-3 * 1978.9e12)
        assert used[arm]["local_mfu_format_peak"] == pytest.approx(fine)
    assert used["missing"] == []


def test_mfu_says_what_it_lacks_and_takes_promised_peaks() -> None:
    bare = speed_record(flops=None, peaks=None)
    used = judge_speed(PROMISE, bare)["utilization"]
    assert used["baseline"]["local_mfu_bf16_peak"] is None
    assert any("model flops" in one for one in used["missing"])
    assert any("peak_bf16_tflops" in one for one in used["missing"])
    assert any("scaling ratio" in one for one in used["missing"])
    named = judge_speed(PROMISE | {"peak_bf16_tflops": 500.0}, speed_record(peaks=None))
    assert named["utilization"]["peak_tflops"]["bf16"] == 500.0


def test_the_conversion_tax_is_conversion_over_what_the_products_save() -> None:
    entry = rung(judge_speed(PROMISE, speed_record()), "module")["entries"][0]
    saved = entry["baseline_ms"] - entry["candidate_ms"]
    assert entry["conversion_tax"] == pytest.approx(1.0 / (saved + 1.0))
    lost = rung(judge_speed(PROMISE, speed_record(modules=(1.5, 0.7))), "module")["entries"][0]
    assert lost["conversion_tax"] is None


def test_the_step_is_compared_with_the_sum_of_its_layers() -> None:
    found = judge_speed(PROMISE, speed_record())
    saved = sum(
        one["baseline_ms"] - one["candidate_ms"] for one in rung(found, "module")["entries"]
    )
    step = rung(found, "step")["entries"][0]["baseline_ms"]
    assert found["utilization"]["step_ratio_from_modules"] == pytest.approx(1 - saved / step)


def test_emulated_products_are_never_a_pass() -> None:
    found = judge_speed(PROMISE, speed_record(native=0, step=0.5, modules=(0.5, 0.5)))
    assert found["status"] == "not_measurable"
    assert found["reason"].startswith("not measurable here: every quantized product is emulated")
    assert {one["status"] for one in found["rungs"]} == {"missing", "information"}
    assert found["whole_job"]["status"] == "information"
    assert found["whole_job"]["reason"].startswith("no claim, the products are emulated: ")
    assert found["give_back"] == []
    nothing = judge_speed(PROMISE, None)
    assert nothing["status"] == "not_measurable"
    assert {one["status"] for one in nothing["rungs"]} == {"missing"}


def test_a_gate_about_quality_alone_shows_timings_without_judging_by_them() -> None:
    found = judge_speed({"required": False}, None)
    assert (found["status"], found["reason"]) == (
        "not_required",
        "this gate promises quality only",
    )
    found = judge_speed({"required": False}, speed_record(step=1.2))
    assert found["status"] == "not_required"
    assert found["measured"] == "REJECT"
    assert join("ACCEPT", ["fine"], found) == ("ACCEPT", ["fine"])


def conditions(key: str, arm: str, value: float) -> dict[str, Any]:
    return changed(speed_record(), f"measurements.0.conditions.{arm}.{key}", [value] * 10)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (conditions("sm_clock_mhz", "candidate", 1900), "sm_clock_mhz was 1980"),
        (conditions("memory_clock_mhz", "baseline", 3000), "memory_clock_mhz"),
        (conditions("power_limit_w", "candidate", 650), "power_limit_w"),
        (conditions("temperature_c", "candidate", 70), "temperature_c was 55"),
        (changed(speed_record(), "measurements.1.conditions", None), "were not recorded"),
        (changed(speed_record(), "inputs.baseline_dtype", "float32"), "'float32', not in bfloat16"),
        (changed(speed_record(), "inputs.baseline_dtype", ...), "not in bfloat16"),
        (speed_record(later_stages=[900]), "changes precision at step 900"),
    ],
)
def test_doubtful_timings_carry_no_verdict(record: dict, said: str) -> None:
    found = judge_speed(PROMISE, record)
    assert found["status"] == "INCONCLUSIVE"
    assert said in found["reason"]


def test_conditions_within_three_percent_are_the_same() -> None:
    for key, value in (("sm_clock_mhz", 1930), ("power_limit_w", 690), ("temperature_c", 60)):
        assert judge_speed(PROMISE, conditions(key, "candidate", value))["status"] == "ACCEPT"


def test_the_number_of_pairs_is_the_promised_one() -> None:
    found = judge_speed(PROMISE | {"pairs": 12}, speed_record())
    assert found["status"] == "INCONCLUSIVE"
    assert "10 pairs, 12 were promised" in found["reason"]


GATE = {
    "speed": PROMISE,
    "recipe_hashes": {"baseline": "b", "candidate": "c"},
    "experiment": {"workload": "flights", "options": {}, "train": {"batch_size": 512}},
}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("inputs.recipe_hashes", {"baseline": "b", "candidate": "x"}, "recipe_hashes is"),
        ("inputs.workload", "clicks", "workload is 'clicks', the gate promised 'flights'"),
        ("inputs.options", {"rows": 3}, "options is"),
        ("inputs.batch_size", 64, "batch_size is 64, the gate promised 512"),
        ("inputs.compile", True, "compile is True"),
    ],
)
def test_timings_of_something_else_are_refused(path: str, value: Any, said: str) -> None:
    check_belongs(GATE, speed_record())
    check_belongs(GATE, None)
    with pytest.raises(RecordError, match=said):
        check_belongs(GATE, changed(speed_record(), path, value))


def test_a_promise_edited_after_the_timing_is_detected() -> None:
    record = speed_record(promised=PROMISE)
    check_belongs(GATE, record)
    with pytest.raises(ExperimentError, match="fixed before the first timing"):
        check_belongs(GATE | {"speed": PROMISE | {"eps_step": 0.0}}, record)


def test_quality_and_speed_are_those_of_one_plan() -> None:
    def layer(name: str, precision: str) -> dict[str, str]:
        return {"name": name, "fprop": precision, "dgrad": precision, "wgrad": "skip"}

    trained = [layer(name, "mxfp8") for name in LAYERS] + [layer("head", "bf16")]
    check_belongs(GATE, speed_record(), layers=trained)
    check_belongs(GATE, speed_record(), layers=[])
    with pytest.raises(RecordError, match=r"mlp\.1: quantized in the runs or in the timings"):
        check_belongs(GATE, speed_record(), layers=[trained[0], layer("mlp.1", "bf16")])


@pytest.mark.parametrize(
    ("quality", "speed", "both"),
    [
        ("ACCEPT", "ACCEPT", "ACCEPT"),
        ("ACCEPT", "REJECT", "REJECT"),
        ("ACCEPT", "INCONCLUSIVE", "INCONCLUSIVE"),
        ("ACCEPT", "not_measurable", "INCONCLUSIVE"),
        ("ACCEPT", "not_required", "ACCEPT"),
        ("INCONCLUSIVE", "ACCEPT", "INCONCLUSIVE"),
        ("INCONCLUSIVE", "REJECT", "REJECT"),
        ("INCONCLUSIVE", "not_measurable", "INCONCLUSIVE"),
        ("REJECT", "ACCEPT", "REJECT"),
        ("REJECT", "REJECT", "REJECT"),
        ("REJECT", "INCONCLUSIVE", "REJECT"),
    ],
)
def test_both_gates_must_accept_and_either_rejects(quality: str, speed: str, both: str) -> None:
    verdict, reasons = join(quality, ["quality said so"], {"status": speed, "reason": "timed"})
    assert verdict == both
    assert "quality said so" in reasons
    if speed in ("ACCEPT", "REJECT"):
        assert "speed: timed" in reasons
    if both != quality:
        assert reasons[0] == "speed: timed"


def test_judging_speed_imports_neither_torch_nor_lowprec() -> None:
    code = (
        "import sys, qualitygates.speed.rules, qualitygates.speed.sections\n"
        "assert not {'torch', 'lowprec'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
