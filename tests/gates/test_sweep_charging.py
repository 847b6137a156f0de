"""Charges: noise is not free, the sum is what whole trainings show, rungs by their error."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qualitygates.sensitivity.charging import (
    calibrate,
    charges_of,
    expected,
    measured_items,
    shrunk,
)
from qualitygates.sensitivity.effects import BROKEN, Effect
from qualitygates.sensitivity.groups import Group
from qualitygates.sensitivity.search import Found

PRODUCTS = ("fprop", "dgrad", "wgrad")
RUNGS = (dict.fromkeys(PRODUCTS, "nvfp4"), dict.fromkeys(PRODUCTS, "mxfp8"))
GROUPS = [Group(name, (name,), ((64, 64),), RUNGS, ()) for name in "abcd"]
SCREENED = {
    name: {
        "products": {
            product: {"nvfp4": {"relative_error": 0.1}, "mxfp8": {"relative_error": 0.02}}
            for product in PRODUCTS
        }
    }
    for name in "abcd"
}


def effect(estimate: float, variance: float = 0.0) -> Effect:
    half = 2 * variance**0.5
    return Effect(estimate, estimate - half, estimate + half, 4, variance, 0.0, 0.0)


def found_of(harms: dict[tuple[str, str], Effect]) -> Found:
    found = Found(alone={item: {"nvfp4": one} for item, one in harms.items()})
    found.base = dict.fromkeys(harms, "nvfp4")
    return found


def test_without_a_calibration_noise_is_not_charged_and_harm_is() -> None:
    assert shrunk(effect(-0.01, 1e-6)) == 0
    assert shrunk(effect(0.0005, 1e-6)) == 0
    assert shrunk(effect(0.03, 1e-6)) == pytest.approx(0.03, rel=0.01)
    found = found_of({("a", "fprop"): effect(0.0005, 1e-6)})
    assert charges_of(found, GROUPS, SCREENED, None) == {("a", "fprop"): {"nvfp4": 0.0}}


@pytest.mark.parametrize("estimate", [-0.003, 0.0, 0.001, 0.01])
def test_the_expected_harm_is_the_mean_of_a_normal_above_zero(estimate: float) -> None:
    error = 0.001
    d = np.linspace(0, estimate + 0.02, 400_001)
    weight = np.exp(-0.5 * ((d - estimate) / error) ** 2 + 0.5 * (min(estimate, 0) / error) ** 2)
    mean = float((d * weight).sum() / weight.sum())
    assert expected(effect(estimate, error**2)) == pytest.approx(mean, rel=1e-3)


def test_the_expected_harm_at_its_ends() -> None:
    assert expected(effect(-1.0, 1e-6)) < 1e-5
    assert expected(effect(0.02)) == 0.02
    assert expected(effect(-0.02)) == 0.0
    assert expected(Effect(BROKEN, BROKEN, BROKEN, 2, 0.0, 0.0, 0.0)) == math.inf


def test_charges_add_up_to_what_whole_trainings_show() -> None:
    """Branches see 1 % and hide much in their noise; whole trainings show 8 %."""
    rng = np.random.default_rng(0)
    harms = {(g, p): effect(float(rng.normal(0, 0.001)), 1e-6) for g in "abc" for p in PRODUCTS}
    harms["a", "fprop"] = effect(0.01, 1e-6)
    found = found_of(harms)
    calibration = calibrate(found, effect(0.08, 1e-6))
    assert calibration is not None
    charges = charges_of(found, GROUPS, SCREENED, calibration.factor)
    assert sum(texts["nvfp4"] for texts in charges.values()) == pytest.approx(0.08, rel=1e-3)
    assert all(texts["nvfp4"] > 0 for texts in charges.values())
    assert max(charges, key=lambda item: charges[item]["nvfp4"]) == ("a", "fprop")
    # mxfp8 was tried nowhere: its error is a fifth, its harm a twenty-fifth.
    assert all(t["mxfp8"] == pytest.approx(t["nvfp4"] / 25) for t in charges.values())


def test_a_rung_that_was_tried_is_charged_its_own_harm_when_it_shows_any() -> None:
    found = found_of({("a", "fprop"): effect(0.01, 1e-6), ("b", "fprop"): effect(0.01, 1e-6)})
    found.alone["a", "fprop"]["mxfp8"] = effect(0.005, 1e-6)
    found.alone["b", "fprop"]["mxfp8"] = effect(0.001, 1e-6)
    charges = charges_of(found, GROUPS, SCREENED, 1.0)
    assert charges["a", "fprop"]["mxfp8"] == pytest.approx(0.005, rel=1e-2)
    assert charges["b", "fprop"]["mxfp8"] == pytest.approx(0.01 / 25, rel=1e-2)


def test_an_item_that_broke_is_left_out_of_the_calibration_and_never_chosen() -> None:
    broken = Effect(BROKEN, BROKEN, BROKEN, 2, 0.0, 0.0, 0.0)
    found = found_of({("a", "fprop"): broken, ("b", "fprop"): effect(0.01)})
    assert measured_items(found) == {"b": {"fprop": "nvfp4"}}
    calibration = calibrate(found, effect(0.03))
    assert calibration is not None
    assert calibration.factor == pytest.approx(3)
    charges = charges_of(found, GROUPS, SCREENED, calibration.factor)
    assert charges["a", "fprop"] == {"nvfp4": math.inf}
    assert calibrate(found, broken) is None


def test_a_rung_without_a_known_error_is_not_charged_for_nothing() -> None:
    found = found_of({("a", "fprop"): effect(0.01)})
    unknown = {"a": {"products": {"fprop": {"nvfp4": {"relative_error": None}}}}}
    charges = charges_of(found, GROUPS, unknown, 2.0)
    assert charges["a", "fprop"] == {"nvfp4": pytest.approx(0.02)}
