"""The speed gate on a GPU: events against the wall clock, clocks on record, verdict by plan."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from qualitygates.experiment import Experiment
from qualitygates.speed.blocks import block_timer
from qualitygates.speed.command import _sampler, measure
from qualitygates.speed.record import CONDITIONS, STEPS_PER_BLOCK
from qualitygates.speed.rules import judge_speed
from tests.gates.test_speed import TEXT

pytestmark = pytest.mark.gpu


def test_a_block_is_as_long_as_the_wall_clock_says() -> None:
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(20):
            a @ a

    block_ms = block_timer(torch.device("cuda"))
    block_ms(step)
    started = time.perf_counter()
    found = block_ms(step)
    wall_ms = (time.perf_counter() - started) * 1e3
    assert 0.6 * wall_ms < found * STEPS_PER_BLOCK <= 1.05 * wall_ms


def test_this_gpu_tells_its_clocks() -> None:
    sampler = _sampler(torch.device("cuda"))
    assert sampler is not None
    found = sampler.sample()
    assert found is not None
    assert set(found) == set(CONDITIONS)


def test_both_arms_are_measured_and_judged_by_what_is_native(tmp_path: Path) -> None:
    path = tmp_path / "toy.toml"
    path.write_text(TEXT, encoding="utf-8")
    record = measure(Experiment.from_toml(path), tell=print)
    assert record["machine"]["device"] == "cuda"
    assert record["machine"]["name"] == torch.cuda.get_device_name()
    assert record["inputs"]["baseline_dtype"] == "bfloat16"
    for one in record["measurements"]:
        assert len(one["conditions"]["candidate"]["sm_clock_mhz"]) == 10
    found = judge_speed({"required": True, "planned_steps": 100_000}, record)
    native = record["products"]["native"] > 0
    assert (found["status"] == "not_measurable") is not native
    # 64 rows of 64 columns gain from nothing.
    assert found["status"] != "ACCEPT"
