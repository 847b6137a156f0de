"""How often the interleaved speed test is wrong, by simulation through the code that judges.

Simulated steps have noise of their own, slow outliers, noise shared by a block, and a machine that
drifts by 3 % over the session. Small sizes run by default; the `slow` mark runs the sizes whose
numbers are in docs/records/speed-error-rates.jsonl. 40,000 replications have a standard error of
0.0011 at 0.05; 4,000 have 0.0034, so the small bounds are more than three of them wider.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from qualitygates.speed.record import STEPS_PER_BLOCK, block_order
from qualitygates.speed.rules import is_faster, log_ratio

SMALL, FULL = 4_000, 40_000
PAIRS = 10
EPS = 0.02
DRIFT = 0.03


@dataclass(frozen=True)
class Machine:
    """Relative sd of a step and of a whole block, share of slow steps, and how the clock drifts."""

    step: float = 0.03
    block: float = 0.005
    outliers: float = 0.05
    drift: str = "linear"


MACHINES = {
    "quiet": Machine(block=0.003),
    "usual": Machine(),
    "noisy": Machine(step=0.04, block=0.004),
    "loud": Machine(step=0.06, block=0.01),
    "no drift": Machine(drift="none"),
    "slowing": Machine(drift="slowing"),
    "waves": Machine(drift="waves"),
    "wandering": Machine(drift="wandering"),
}


def drift(rng: np.random.Generator, machine: Machine, reps: int, blocks: int) -> np.ndarray:
    """Log speed of the machine at each block, [reps, blocks]; it changes by DRIFT in all."""
    place = np.linspace(0, 1, blocks)
    if machine.drift == "wandering":
        steps = rng.normal(0, DRIFT / math.sqrt(blocks), (reps, blocks))
        return steps.cumsum(axis=-1)
    shapes = {
        "none": 0 * place,
        "linear": -DRIFT * place,
        "slowing": DRIFT * place,
        "waves": DRIFT / 2 * np.sin(6 * place),
    }
    return np.broadcast_to(shapes[machine.drift], (reps, blocks))


def block_times(
    rng: np.random.Generator, machine: Machine, order: str, *, reps: int, ratio: float
) -> tuple[np.ndarray, np.ndarray]:
    """Block medians of B and of C in ms, [reps, blocks of the arm], run in `order` ("BCCB...")."""
    shape = (reps, len(order), STEPS_PER_BLOCK)
    step = rng.normal(0, machine.step, shape)
    step += np.log(2.0) * (rng.random(shape) < machine.outliers)
    shared = drift(rng, machine, reps, len(order)) + rng.normal(0, machine.block, shape[:2])
    medians = 5.0 * np.exp(np.median(step, axis=-1) + shared)
    is_candidate = np.array([arm == "C" for arm in order])
    return medians[:, ~is_candidate], ratio * medians[:, is_candidate]


def called_faster(machine: Machine, reps: int, *, ratio: float, pairs: int = PAIRS) -> float:
    """Share of sessions in which the shipped test says: faster by more than EPS."""
    rng = np.random.default_rng(0)
    order = "".join(block_order(pairs))
    baseline, candidate = block_times(rng, machine, order, reps=reps, ratio=ratio)
    return float(is_faster(log_ratio(baseline, candidate), EPS).mean())


def called_faster_one_after_the_other(machine: Machine, reps: int, *, ratio: float) -> float:
    """The same with all of B before all of C and a z-test of the means."""
    rng = np.random.default_rng(0)
    b, c = block_times(rng, machine, "B" * PAIRS + "C" * PAIRS, reps=reps, ratio=ratio)
    b, c = np.log(b), np.log(c)
    error = np.sqrt((b.var(axis=-1, ddof=1) + c.var(axis=-1, ddof=1)) / PAIRS)
    z = (c.mean(axis=-1) - b.mean(axis=-1) - math.log1p(-EPS)) / error
    return float((stats.norm.cdf(z) < 0.05).mean())


def below_at_sight(machine: Machine, reps: int, *, ratio: float) -> float:
    """Share in which the mean ratio alone is below 1 - EPS, with no interval."""
    rng = np.random.default_rng(0)
    order = "".join(block_order(PAIRS))
    b, c = block_times(rng, machine, order, reps=reps, ratio=ratio)
    return float((np.log(c / b).mean(axis=-1) < math.log1p(-EPS)).mean())


def report(what: str, value: float) -> None:
    print(f"{what}: {value:.4f}")


def check_false_faster(reps: int, *, low: float, high: float) -> None:
    for name, machine in MACHINES.items():
        found = called_faster(machine, reps, ratio=1 - EPS)
        report(f"{name}: called faster at a true ratio of 0.98, {PAIRS} pairs", found)
        assert low <= found <= high, name
    more = called_faster(MACHINES["usual"], reps, ratio=1 - EPS, pairs=20)
    report("usual: called faster at a true ratio of 0.98, 20 pairs", more)
    assert low <= more <= high


def check_power(reps: int) -> None:
    for name, machine in MACHINES.items():
        found = called_faster(machine, reps, ratio=0.95)
        report(f"{name}: called faster at a true ratio of 0.95, {PAIRS} pairs", found)
        assert found >= (0.7 if name == "loud" else 0.95), name
    assert called_faster(MACHINES["usual"], reps, ratio=1.0) <= 0.001


def check_the_usual_ways_are_wrong(reps: int) -> None:
    usual = MACHINES["usual"]
    for name in ("usual", "noisy", "loud"):
        after = called_faster_one_after_the_other(MACHINES[name], reps, ratio=1 - EPS)
        report(f"{name}: baseline then candidate, z-test, true ratio 0.98", after)
        assert after >= 0.2, name
    at_sight = below_at_sight(usual, reps, ratio=1 - EPS)
    report("usual: interleaved without an interval, true ratio 0.98", at_sight)
    assert at_sight >= 0.4


def test_the_false_faster_rate_is_nominal_under_drift() -> None:
    check_false_faster(SMALL, low=0.03, high=0.065)


def test_a_true_gain_is_found() -> None:
    check_power(SMALL)


def test_one_arm_after_the_other_takes_drift_for_speed() -> None:
    check_the_usual_ways_are_wrong(SMALL)


@pytest.mark.slow
def test_error_rates_at_full_size() -> None:
    check_false_faster(FULL, low=0.04, high=0.06)
    check_power(FULL)
    check_the_usual_ways_are_wrong(FULL)
