"""Numerics counters of a run: sampled, deterministic, and without a trace in training."""

from __future__ import annotations

import runpy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import lowprec
from qualitygates import counting
from qualitygates.counting import Counters
from tests.gates.test_runs import records

APART = 10
STEPS = 2 * APART


@pytest.fixture(autouse=True, scope="module")
def closer() -> Iterator[None]:
    """Samples 10 steps apart instead of 120, so that a run of 20 steps has two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "LEAST_APART", APART)
        patch.setattr(counting, "SAMPLES", 2)
        yield


def trained(recipe: str, *, counted: bool, jump: bool = False) -> tuple[nn.Module, dict]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe(recipe), steps=STEPS))
    counters = Counters(model, steps=STEPS if counted else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    with counters:
        step_done = counters.then(lambda: None)
        for step in range(STEPS):
            lowprec.set_step(model, step)
            optimizer.zero_grad()
            x = torch.randn(16, 64, generator=generator)
            scale = 1e4 if jump and step >= APART else 1.0
            model(scale * x).square().mean().div(scale).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step_done()
    return model, counters.values


@pytest.fixture(scope="module")
def quantized_run() -> tuple[nn.Module, dict]:
    return trained("mxfp8", counted=True)


@pytest.fixture(scope="module")
def plain() -> dict:
    return trained("bf16", counted=True)[1]


def test_both_arms_are_sampled_at_the_same_steps(quantized_run, plain) -> None:
    _, quantized = quantized_run
    assert set(quantized) == {"saturation", "underflow", "amax_jumps", "weight_drift"}
    assert set(plain) == {"amax_jumps", "weight_drift"}
    assert {len(values) for values in (quantized | plain).values()} == {2}
    assert quantized["underflow"][0] is not None
    assert 0 < quantized["weight_drift"][0] < quantized["weight_drift"][1]


def test_counting_changes_no_bit_of_training(quantized_run) -> None:
    with_counts, values = quantized_run
    without, none = trained("mxfp8", counted=False)
    assert values
    assert not none
    for ours, theirs in zip(with_counts.parameters(), without.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert trained("mxfp8", counted=True)[1] == values


def test_a_jump_of_the_largest_magnitude_is_counted(plain) -> None:
    assert plain["amax_jumps"] == [0.0, 0.0]
    jumped = trained("bf16", counted=True, jump=True)[1]["amax_jumps"]
    assert jumped[0] == 0.0
    assert jumped[1] >= 2


def test_weight_drift_is_the_root_mean_square_distance_from_the_start() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe("bf16"), steps=STEPS))
    counters = Counters(model, steps=STEPS)
    with counters, torch.no_grad():
        model[0].weight += 0.25
        for _ in range(APART):
            counters.after_step()
    assert counters.values["weight_drift"] == [pytest.approx(0.25, rel=1e-6)]


def test_other_ranks_and_short_runs_take_no_sample() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe("bf16"), steps=STEPS))
    for counters in (Counters(model, steps=STEPS, rank=1), Counters(model, steps=9)):
        with counters:
            for _ in range(STEPS):
                counters.after_step()
        assert counters.values == {}


def test_a_run_record_holds_its_counters() -> None:
    train = {"steps": APART + 1, "batch_size": 16}
    found = {arm: records(arm, train=train)[0]["training"] for arm in ("baseline", "candidate")}
    assert set(found["baseline"]["counters"]) == {"amax_jumps", "weight_drift"}
    assert len(found["candidate"]["counters"]["saturation"]) == 1
    assert np.isfinite(found["candidate"]["counters"]["underflow"]).all()


def test_at_most_one_step_in_120_pays_for_a_sample() -> None:
    # A fresh module: the constants as they are shipped.
    shipped = runpy.run_path(counting.__file__, run_name="qualitygates.counting")
    model = nn.Sequential(nn.Linear(64, 64))
    for steps in (120, 121, 239, 241, 500, 60_000):
        every = shipped["Counters"](model, steps=steps).every
        sampled = range(every // 2, steps, every)
        assert 1 <= len(sampled) <= min(steps // 120, 100)
