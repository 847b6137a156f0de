"""Confirmation: levels that add up, recipes in a fixed order, a gate too noisy for any of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.special import stdtr

from qualitygates.sensitivity.confirm import (
    LEVEL,
    Attempt,
    changed_groups,
    confirm,
    levels,
    p_value,
)


def gates(*outcomes: tuple[str, float], null: str = "ACCEPT"):
    """Gates that give these verdicts and p-values in turn."""

    def attempt(number: int, level: float) -> Attempt:
        verdict, p = outcomes[number]
        found = {"verdict": verdict, "seeds": [1], "controls": {"null": {"verdict": null}}}
        return Attempt(Path(f"{number + 1}"), ("a",) * number, found, p, level)

    return attempt


def test_the_single_attempt_has_the_level_of_the_gate() -> None:
    done = confirm(1, gates(("ACCEPT", 0.06)))
    assert (done["verdict"], done["accepted"]) == ("ACCEPT", "1")


@pytest.mark.parametrize("count", range(1, 8))
def test_levels_add_up(count: int) -> None:
    assert len(levels(count)) == count
    assert sum(levels(count)) == pytest.approx(LEVEL)
    assert list(levels(count)) == sorted(levels(count), reverse=True)


def test_attempts_share_the_error() -> None:
    rejected = ("REJECT", 1.0)
    done = confirm(3, gates(("ACCEPT", 0.03), rejected, rejected))
    assert (done["verdict"], done["accepted"]) == ("REJECT", None)
    done = confirm(3, gates(rejected, ("ACCEPT", 0.012), rejected))
    assert (done["verdict"], done["accepted"], done["given_back"]) == ("ACCEPT", "2", ["a"])
    assert [one["accepted"] for one in done["attempts"]] == [False, True]
    done = confirm(2, gates(("INCONCLUSIVE", 0.001), ("INCONCLUSIVE", 0.001)))
    assert (done["verdict"], len(done["attempts"])) == ("INCONCLUSIVE", 2)


def test_a_gate_too_noisy_for_bf16_ends_the_search_with_the_reason() -> None:
    open_ends = [("INCONCLUSIVE", 1.0)] * 3
    done = confirm(3, gates(*open_ends, null="INCONCLUSIVE"))
    assert len(done["attempts"]) == 1
    assert "cannot tell BF16 from BF16 moved by an ulp" in done["reason"]
    assert len(confirm(3, gates(*open_ends, null="NOT_RUN"))["attempts"]) == 3
    # A candidate that is shown to be worse says something about itself: the next one is gated.
    rejected = [("REJECT", 1.0)] * 3
    assert len(confirm(3, gates(*rejected, null="INCONCLUSIVE"))["attempts"]) == 3


@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_the_chance_to_confirm_anything_at_the_margin_is_the_level(shared: float) -> None:
    """Ten thousand searches over 3 recipes that are all exactly at the margin.

    `shared` is the part of the variance that the gates have in common, as the same rows give them.
    """
    rng, wrong, searches = np.random.default_rng(0), 0, 10_000
    for _ in range(searches):
        common = rng.standard_normal()
        z = shared**0.5 * common + (1 - shared) ** 0.5 * rng.standard_normal(3)
        p = stdtr(1e9, z)
        outcomes = [("ACCEPT" if one < LEVEL else "INCONCLUSIVE", float(one)) for one in p]
        wrong += confirm(3, gates(*outcomes))["accepted"] is not None
    # 2.5 standard errors above 0.05; stopping at the first ACCEPT of three gates gives 0.14.
    assert wrong / searches < 0.0555
    assert wrong / searches > 0.02


def test_the_p_value_is_that_of_the_worst_metric_times_the_looks() -> None:
    def entry(estimate: float, *, two_sided: bool = False) -> dict:
        return {
            "estimate": estimate,
            "margin": 1.0,
            "v_seed": 0.04,
            "v_example": 0.0,
            "dof": 1e6,
            "two_sided": two_sided,
        }

    one = {"metrics": {"a": entry(1.0 - 1.6449 * 0.2)}}
    assert p_value(one, looks=1) == pytest.approx(0.05, rel=1e-3)
    assert p_value(one, looks=3) == pytest.approx(0.15, rel=1e-3)
    two = {"metrics": {"a": entry(-10), "b": entry(-1 + 1.6449 * 0.2, two_sided=True)}}
    assert p_value(two, looks=1) == pytest.approx(0.05, rel=1e-3)
    assert p_value({"metrics": {}}, looks=1) == 1.0


def test_changed_groups_are_named() -> None:
    first, other = {"a": {"fprop": "nvfp4"}}, {"a": {"fprop": "mxfp8"}}
    assert changed_groups(first, other) == ("a",)
    assert changed_groups({**first, "b": {}}, first) == ()
