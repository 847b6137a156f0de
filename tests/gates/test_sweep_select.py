"""Selection: exact on small cases by enumeration, fused groups, budgets that cannot be met."""

import itertools

import numpy as np
import pytest

from qualitygates.errors import ExperimentError
from qualitygates.sensitivity.cost import SpeedFacts
from qualitygates.sensitivity.groups import Group
from qualitygates.sensitivity.options import Fixes
from qualitygates.sensitivity.select import (
    choices_of,
    least_harm,
    most_saving,
    pareto,
    totals,
)

FACTS = SpeedFacts.of(hardware="b200", rows=65536, casts="dual", width=1.0, calibration=None)
RUNG = dict.fromkeys(("fprop", "dgrad", "wgrad"), "mxfp4")


def case(seed: int, count: int = 4):
    rng = np.random.default_rng(seed)
    groups, charges = [], {}
    for i in range(count):
        size = int(rng.choice([1024, 2048, 4096]))
        group = Group(f"g{i}", (f"l{i}",), ((size, size),), (RUNG,), ())
        groups.append(group)
        for product in RUNG:
            harm = float(abs(rng.normal(0, 0.002)))
            charges[group.name, product] = {"mxfp4": harm, "mxfp8": harm / 5}
    shapes = [shape for group in groups for shape in group.shapes]
    return choices_of(groups, charges, FACTS), totals(groups, FACTS, shapes)


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    options, total = case(seed, count=3)
    budget = 0.003
    best = max(
        sum(one.saved["time"] for one in every)
        for every in itertools.product(*options)
        if sum(one.harm for one in every) <= budget
    )
    found = most_saving(options, total, budget="time", harm=budget)
    assert found.harm <= budget * (1 + 1e-5)
    assert found.saved["time"] * total["time"] == pytest.approx(best, rel=1e-6)
    least = least_harm(options, total, budget="time", saving=0.2, harm=1.0)
    cheapest = min(
        sum(one.harm for one in every)
        for every in itertools.product(*options)
        if sum(one.saved["time"] for one in every) >= 0.2 * total["time"]
    )
    assert least.harm == pytest.approx(cheapest, rel=1e-4, abs=1e-9)


def test_layers_of_a_fused_group_share_one_choice() -> None:
    group = Group("qkv", ("q", "k", "v"), ((1024, 1024),) * 3, (RUNG,), ())
    charges = {("qkv", product): {"mxfp4": 0.001} for product in RUNG}
    options = choices_of([group], charges, FACTS)
    found = most_saving(options, totals([group], FACTS, group.shapes), budget="flops", harm=0.0015)
    assert len(found.choices) == 1
    assert found.saved["flops"] == pytest.approx(1 / 3)


def test_a_policy_slower_than_bf16_is_no_choice() -> None:
    small = Group("s", ("s",), ((64, 64),), (RUNG,), ())
    charges = {("s", product): {"mxfp4": 0.0} for product in RUNG}
    (choices,) = choices_of([small], charges, FACTS)
    assert [set(one.products.values()) for one in choices] == [{"bf16"}]


def test_a_broken_option_is_no_choice() -> None:
    group = Group("g", ("g",), ((2048, 2048),), (RUNG,), ())
    charges = {("g", product): {"mxfp4": float("inf")} for product in RUNG}
    (choices,) = choices_of([group], charges, FACTS)
    assert len(choices) == 1


def test_a_budget_that_cannot_be_met_says_what_can() -> None:
    options, total = case(0)
    with pytest.raises(ExperimentError, match=r"0.95 .* most \d+\.\d%; .*harm of 0\.2500% "):
        least_harm(options, total, budget="time", saving=0.95, harm=0.0025)
    most = most_saving(options, total, budget="time", harm=1.0).saved["time"]
    with pytest.raises(ExperimentError, match=r"costs a predicted .*relative NE at least"):
        least_harm(options, total, budget="time", saving=most - 0.001, harm=1e-5)


def test_the_pareto_curve_rises() -> None:
    options, total = case(1)
    points = pareto(options, total, budget="time", harm=0.0025)
    harms, saved = ([one[key] for one in points] for key in ("harm", "time"))
    assert len(points) > 3
    assert harms == sorted(harms)
    assert saved == sorted(saved)


def test_fixes_come_cheapest_first_and_only_where_they_exist() -> None:
    fixes = Fixes(sr=True, rotation="rht16", higher=True)
    assert fixes.of("wgrad", "nvfp4", ["mxfp8"]) == [
        "nvfp4:sr x nvfp4",
        "nvfp4 + rht16",
        "nvfp4:sr x nvfp4 + rht16",
        "mxfp8",
    ]
    assert fixes.of("fprop", "nvfp4", []) == ["nvfp4 + rht16"]
    # FLOOR clips, and what is clipped cannot be rounded without bias.
    assert fixes.of("dgrad", "mxfp4:floor", []) == ["mxfp4:floor + rht16"]
