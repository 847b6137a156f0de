"""What a speed record must hold: the protocol, hostile files, the [speed] table, the machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from qualitygates.errors import ExperimentError, RecordError
from qualitygates.experiment import Experiment
from qualitygates.records import read_speed, seal, write_json_atomic
from qualitygates.speed.machine import Sampler, parse, peaks
from qualitygates.speed.promise import KEYS, SpeedPromise, read_speed_promise
from qualitygates.speed.record import block_order, check_record, read_timings
from tests.gates.timings import changed, speed_record


def test_the_blocks_take_turns() -> None:
    assert block_order(4) == ["BC", "CB", "BC", "CB"]


def test_a_complete_record_passes() -> None:
    check_record(speed_record())


DEEP = "measurements.0"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("machine", ..., "machine missing"),
        ("machine", [], "machine must be an object"),
        ("machine.name", 3, "machine.name"),
        ("inputs.recipe_hashes", ..., "inputs.recipe_hashes"),
        ("products.native", -1, "products.native"),
        ("products.native", True, "products.native"),
        ("quantized_layers", [], "quantized_layers is empty"),
        ("quantized_layers", [1], "list of layer names"),
        ("measurements", {}, "measurements must be a list"),
        (DEEP, [], "a measurement has a rung"),
        (f"{DEEP}.rung", "dream", "a measurement has a rung"),
        (f"{DEEP}.name", "", "a measurement has a rung"),
        (f"{DEEP}.baseline_ms", [0.0] * 10, "baseline_ms must be a list"),
        (f"{DEEP}.baseline_ms", [float("nan")] * 10, "baseline_ms must be a list"),
        (f"{DEEP}.baseline_ms", [float("inf")] * 10, "baseline_ms must be a list"),
        (f"{DEEP}.baseline_ms", [10**400] * 10, "baseline_ms must be a list"),
        (f"{DEEP}.baseline_ms", ["1"] * 10, "baseline_ms must be a list"),
        (f"{DEEP}.candidate_ms", [1.0, 2.0], "10 blocks of the baseline and 2 of the candidate"),
        (f"{DEEP}.order", ["BC"] * 10, "did not run in the order BC CB BC CB"),
        (f"{DEEP}.order", ..., "did not run in the order BC CB BC CB"),
        (f"{DEEP}.steps_per_block", 1, "at least 10"),
        (f"{DEEP}.includes_conversions", False, "inside the timed region"),
        (f"{DEEP}.includes_conversions", ..., "inside the timed region"),
        (f"{DEEP}.candidate_ms", [8.0] * 10, "every candidate block took the same time"),
        (f"{DEEP}.conversion_ms", -1, "conversion_ms = -1"),
        (f"{DEEP}.gpus", 0, "gpus = 0"),
        (f"{DEEP}.layers", "mlp.0", "layers must be a list"),
        (f"{DEEP}.conditions.candidate", ..., "conditions.candidate.sm_clock_mhz"),
        (f"{DEEP}.conditions.candidate.power_limit_w", [], "conditions.candidate.power_limit_w"),
        (f"{DEEP}.conditions", "cool", "conditions.baseline.sm_clock_mhz"),
        ("costs", {"compile_s": 1.0}, "costs are seconds"),
        ("costs.compile_s", -1.0, "costs are seconds"),
        ("flops", 3, "flops must be an object"),
        ("flops.model_flops_per_step", "many", "flops.model_flops_per_step"),
        ("peaks.bf16_tflops", 0, "peaks.bf16_tflops"),
    ],
)
def test_timings_that_did_not_follow_the_protocol_are_refused(
    path: str, value: Any, said: str
) -> None:
    with pytest.raises(RecordError, match=said):
        check_record(changed(speed_record(), path, value))


@pytest.mark.parametrize("pairs", [2, 8, 11])
def test_too_few_pairs_or_an_odd_number_are_refused(pairs: int) -> None:
    record = speed_record()
    one = record["measurements"][0]
    times = [1.0 + index / 100 for index in range(pairs)]
    one |= {"baseline_ms": times, "candidate_ms": times, "order": block_order(pairs)}
    with pytest.raises(RecordError, match="an even number of pairs, 10 or more"):
        check_record(record)


def as_lines(path: Path, record: dict[str, Any]) -> Path:
    head = {k: v for k, v in record.items() if k not in ("measurements", "source")}
    rows = [{"schema": 1, "kind": "speed-timings", **head}, *record["measurements"]]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def test_lines_become_the_record(tmp_path: Path) -> None:
    path = as_lines(tmp_path / "timings.jsonl", speed_record())
    assert read_timings(path) == speed_record(source="timings file")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "first line must be the head"),
        ("{}", "first line must be the head"),
        ('{"schema": 2, "kind": "speed-timings"}', "first line must be the head"),
        ('{"schema": 1, "kind": "speed-timings"}', "machine, inputs, products"),
        ("[1]", "line 1 holds no JSON object"),
        ('{"a": NaN}', "line 1 is not JSON: NaN is not JSON"),
        ("{} \n {", "line 2 is not JSON"),
        ('{"a": ' + "9" * 5000 + "}", "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('\x80\x03cos\nsystem\n(S"touch hacked"\ntR.', "line 1 is not JSON"),
    ],
)
def test_hostile_lines_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "timings.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match=said):
        read_timings(path)


def test_files_that_are_no_timings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl"
    with pytest.raises(RecordError, match="cannot be read"):
        read_timings(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="not UTF-8"):
        read_timings(path)
    with path.open("wb") as stream:
        stream.truncate((64 << 20) + 1)
    with pytest.raises(RecordError, match="larger than 64 MiB"):
        read_timings(path)


def test_an_edited_speed_json_is_refused(tmp_path: Path) -> None:
    assert read_speed(tmp_path) is None
    sealed = seal({"schema": 1, "kind": "speed", **speed_record()})
    write_json_atomic(tmp_path / "speed.json", sealed)
    assert read_speed(tmp_path) == sealed
    sealed["measurements"][0]["candidate_ms"][0] /= 2
    write_json_atomic(tmp_path / "speed.json", sealed)
    with pytest.raises(RecordError, match="damaged or edited"):
        read_speed(tmp_path)


EXPERIMENT = {
    "schema": 1,
    "name": "t",
    "workload": "flights",
    "margins": "demo",
    "looks": [3],
    "train": {"steps": 200, "batch_size": 64},
    "baseline": {"recipe": "bf16"},
    "candidate": {"recipe": "mxfp8"},
}


def experiment(**speed: Any) -> Experiment:
    return Experiment.from_dict({**EXPERIMENT, "speed": speed})


def test_a_gate_about_quality_alone_promises_no_numbers() -> None:
    found = experiment(required=False)
    assert found.speed == SpeedPromise(required=False)
    # As gate.json has always said it, so that older folders resume.
    assert found.to_dict()["speed"] == {"required": False}


def test_a_promise_of_speed_is_resolved_and_reads_back() -> None:
    found = experiment(required=True)
    assert found.speed == SpeedPromise(
        required=True,
        eps_step=0.02,
        eps_module=0.05,
        planned_steps=200,
        extra_steps=0,
        pairs=10,
        batch_size=64,
        compile=False,
    )
    assert Experiment.from_dict(found.to_dict()) == found
    assert found.promise(created="")["speed"]["planned_steps"] == 200
    full = experiment(
        required=True,
        eps_step=0.1,
        eps_module=0,
        planned_steps=10**6,
        extra_steps=7,
        pairs=20,
        batch_size=4096,
        compile=True,
        peak_bf16_tflops=989.4,
        peak_format_tflops=1978.9,
    )
    assert Experiment.from_dict(full.to_dict()) == full
    assert set(full.to_dict()["speed"]) == set(KEYS)


def test_a_gate_json_from_before_these_keys_reads() -> None:
    assert read_speed_promise({"required": True}).planned_steps is None
    assert read_speed_promise({"required": False}) == SpeedPromise(required=False)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("eps_step", 1.0, "at least 0 and below 1"),
        ("eps_step", -0.1, "at least 0 and below 1"),
        ("eps_step", True, "finite number"),
        ("eps_module", "5 %", "finite number"),
        ("eps_module", float("nan"), "finite number"),
        ("eps_module", 10**400, "finite number"),
        ("planned_steps", 0, "whole number, 1 or more"),
        ("planned_steps", 1e5, "whole number, 1 or more"),
        ("extra_steps", -1, "whole number, 0 or more"),
        ("pairs", 8, "even number from 10 to 1000"),
        ("pairs", 11, "even number from 10 to 1000"),
        ("batch_size", 0, "whole number, 1 or more"),
        ("compile", 1, "must be true or false"),
        ("peak_bf16_tflops", 0, "above 0, in dense TFLOP/s"),
        ("eps_stp", 0.02, "unknown key 'eps_stp'"),
    ],
)
def test_a_promise_that_cannot_be_kept_is_refused(key: str, value: Any, said: str) -> None:
    with pytest.raises(ExperimentError, match=said):
        experiment(required=True, **{key: value})
    with pytest.raises(ExperimentError, match=said):
        read_speed_promise({"required": True, key: value})


LINE = "1980, 3201, 700.00, 55\n"


def test_nvidia_smi_is_read_and_its_absence_is_no_number() -> None:
    asked: list[list[str]] = []

    def run(command: list[str]) -> str:
        asked.append(command)
        return LINE

    assert Sampler("GPU-1", run=run).sample() == {
        "sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 3201.0,
        "power_limit_w": 700.0,
        "temperature_c": 55.0,
    }
    assert asked[0][:2] == ["nvidia-smi", "--id=GPU-1"]
    for text in ("1980, 3201, [N/A], 55", "1980, 3201", "", "0, 0, 0, 0", "nan, 1, 1, 1"):
        assert parse(text) is None

    def fails(command: list[str]) -> str:
        raise subprocess.CalledProcessError(9, command)

    def absent(command: list[str]) -> str:
        raise FileNotFoundError(command[0])

    assert Sampler("0", run=fails).sample() is None
    assert Sampler("0", run=absent).sample() is None


def test_peaks_are_dense_and_known_by_the_whole_name() -> None:
    h200 = peaks("NVIDIA H200", bits=8)
    assert h200 == {"bf16_tflops": 989.4, "format_tflops": 1978.9, "source": "data sheet, dense"}
    assert peaks("NVIDIA H200 NVL", bits=8) is None
    for bits, rate in ((8, 4500.0), (6, 4500.0), (4, 9000.0)):
        found = peaks("NVIDIA B200", bits=bits)
        assert found is not None
        assert found["format_tflops"] == rate
    # No 4-bit units on Hopper, no 8-bit ones on Ampere.
    assert peaks("NVIDIA H200", bits=4) == h200
    a100 = peaks("NVIDIA A100-SXM4-80GB", bits=8)
    assert a100 is not None
    assert a100["format_tflops"] is None
