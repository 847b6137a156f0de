"""Protected slices are co-primary, the others are tested for harm with Holm's correction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qualitygates.errors import RecordError
from qualitygates.judging import judge_records
from qualitygates.slices import holm
from tests.gates.synthetic import EFFECTS, Effect, clicks, gate, records

SEEDS = (11, 12, 13)


def judged(effect: Effect, *, protected: tuple[str, ...] = (), rows: int = 6000) -> dict:
    runs = records(
        clicks(rows=rows), seeds=SEEDS, effects=EFFECTS | {"candidate": effect}, grouped=False
    )
    return judge_records(gate((3,), protected=protected), runs)


def entry(found: dict, name: str) -> dict:
    return next(one for one in found["slices"] if (one["name"], one["form"]) == (name, "trained"))


def by_definition(p_values: list[float], level: float) -> list[bool]:
    """Holm through adjusted p-values: max over smaller ones of (m - rank) p."""
    order = np.argsort(p_values, kind="stable")
    adjusted, highest = {}, 0.0
    for rank, index in enumerate(order):
        highest = max(highest, (len(p_values) - rank) * p_values[index])
        adjusted[int(index)] = highest
    return [adjusted[index] <= level for index in range(len(p_values))]


def test_holm_equals_its_adjusted_p_values_and_stops_at_the_first_failure() -> None:
    rng = np.random.default_rng(1)
    for size in (1, 2, 7, 20):
        p = (rng.random(size) ** 4).tolist()
        assert holm(p, level=0.05) == by_definition(p, 0.05)
    assert holm([0.03, 0.001, 0.03], level=0.05) == [False, True, False]
    # Step-down: 0.02 fails Bonferroni's 0.0167 but passes 0.025 once the smallest is rejected.
    assert holm([0.9, 0.02, 0.001], level=0.05) == [False, True, True]
    assert holm([], level=0.05) == []


def test_holm_keeps_the_family_wise_error() -> None:
    p = np.random.default_rng(2).random((4000, 10))
    wrong = np.mean([any(holm(row.tolist(), level=0.05)) for row in p])
    # Exact: 1 - (1 - 0.005)^10 = 0.0489, standard error 0.0034.
    assert wrong == pytest.approx(0.0489, abs=0.0125)


def test_neutral_slices_are_listed_and_the_small_one_is_not_testable() -> None:
    found = judged(Effect(shared=0.01, seed=0.01))
    assert found["verdict"] == "ACCEPT"
    assert entry(found, "mobile")["verdict"] == "OK"
    small = entry(found, "rare")
    assert small["verdict"] == "NOT_TESTABLE"
    assert "needs 200 of either class" in small["reason"]


def test_harm_in_one_slice_rejects_although_the_overall_loss_is_small() -> None:
    found = judged(Effect(seed=0.005, slice_noise={"mobile": 0.6}))
    assert entry(found, "mobile")["verdict"] == "REJECT"
    assert entry(found, "mobile")["margin"] == pytest.approx(3 * 0.005)
    assert found["verdict"] == "REJECT"
    assert any("slice mobile (trained, other) REJECT" in text for text in found["reasons"])


def test_a_small_loss_in_a_slice_is_a_warning_not_a_rejection() -> None:
    found = judged(Effect(seed=0.002, slice_noise={"mobile": 0.22}), rows=20_000)
    assert entry(found, "mobile")["verdict"] == "WARN"
    assert entry(found, "mobile")["warn"] is True
    assert found["verdict"] == "ACCEPT"
    assert any("mobile (trained, other) worse than" in text for text in found["reasons"])


def test_a_protected_slice_must_be_non_inferior_at_its_own_margin() -> None:
    found = judged(Effect(shared=0.01, seed=0.01), protected=("mobile",), rows=14_000)
    own = entry(found, "mobile")
    assert (own["class"], own["verdict"]) == ("protected", "ACCEPT")
    assert own["margin"] == pytest.approx(2 * 0.005)
    assert own["positives"] >= 1000
    assert found["verdict"] == "ACCEPT"
    harmed = judged(
        Effect(seed=0.002, slice_noise={"mobile": 0.6}), protected=("mobile",), rows=14_000
    )
    assert entry(harmed, "mobile")["verdict"] == "REJECT"
    assert harmed["verdict"] == "REJECT"


def test_a_protected_slice_with_too_few_positives_is_inconclusive() -> None:
    found = judged(Effect(shared=0.01, seed=0.01), protected=("mobile",))
    assert found["verdict"] == "INCONCLUSIVE"
    assert "slice mobile (trained) is protected but too small" in " ".join(found["reasons"])


def test_a_protected_slice_that_nobody_evaluated_is_refused() -> None:
    with pytest.raises(RecordError, match=r"\['tablet'\] are not in the trained evaluation"):
        judged(Effect(), protected=("tablet",))


SMALL = {f"ad={index}": np.arange(6000) % 30 == index for index in range(6)}


def with_small_slices(effect: Effect, names: dict[str, np.ndarray] = SMALL) -> dict:
    data = replace(clicks(), slices=names)
    effects = EFFECTS | {"candidate": effect}
    return judge_records(gate((3,)), records(data, seeds=SEEDS, effects=effects, grouped=False))


def test_slices_too_small_for_a_test_are_tested_as_one() -> None:
    found = with_small_slices(Effect(shared=0.01, seed=0.01))
    pooled = entry(found, "rest")
    assert pooled["class"] == "rest"
    assert pooled["pooled"] == sorted(SMALL)
    assert pooled["verdict"] == "OK"
    inside = np.any(list(SMALL.values()), axis=0)
    assert pooled["positives"] == clicks().labels[inside].sum()
    assert all(entry(found, name)["verdict"] == "NOT_TESTABLE" for name in SMALL)
    # The pooled slice is one slice of those rows.
    alone = with_small_slices(Effect(shared=0.01, seed=0.01), {"all six": inside})
    for key in ("estimate", "lower", "upper", "p_harm", "p_worse"):
        assert pooled[key] == pytest.approx(entry(alone, "all six")[key], rel=1e-9)


def test_harm_in_the_pooled_rest_rejects() -> None:
    harm = dict.fromkeys(SMALL, 0.9)
    found = with_small_slices(Effect(seed=0.002, slice_noise=harm))
    assert entry(found, "rest")["verdict"] == "REJECT"
    assert found["verdict"] == "REJECT"
    assert any(text.startswith("slice rest (trained, rest) REJECT") for text in found["reasons"])


def test_overlapping_small_slices_do_not_count_their_rows_twice() -> None:
    twice = SMALL | {f"again={index}": mask for index, mask in enumerate(SMALL.values())}
    found = with_small_slices(Effect(shared=0.01, seed=0.01), twice)
    once = entry(with_small_slices(Effect(shared=0.01, seed=0.01)), "rest")
    pooled = entry(found, "rest")
    assert pooled["positives"] == once["positives"]
    assert pooled["estimate"] == pytest.approx(once["estimate"], rel=1e-9)


def test_a_slice_of_one_class_is_not_testable_and_says_why() -> None:
    data = clicks()
    found = with_small_slices(Effect(shared=0.01, seed=0.01), {"no clicks": data.labels < 0.5})
    one = entry(found, "no clicks")
    assert (one["verdict"], one["estimate"], one["warn"]) == ("NOT_TESTABLE", None, False)
    assert one["reason"].startswith("one class only, so its NE is undefined: 0 positives")
    # A single small slice has nobody to be pooled with.
    assert [entry["name"] for entry in found["slices"]] == ["no clicks", "no clicks"]
    assert found["verdict"] == "ACCEPT"


def test_the_list_of_exploration_is_benjamini_hochberg_and_decides_nothing() -> None:
    found = judged(Effect(seed=0.002, slice_noise={"mobile": 0.22}), rows=20_000)
    tested = [one for one in found["slices"] if one["p_worse"] is not None]
    order = sorted(one["p_worse"] for one in tested)
    limits = [0.1 * (rank + 1) / len(order) for rank in range(len(order))]
    passed = [p for p, limit in zip(order, limits, strict=True) if p <= limit]
    assert {one["explore"] for one in found["slices"] if one["name"] == "mobile"} == {True}
    for one in tested:
        assert one["explore"] == (bool(passed) and one["p_worse"] <= max(passed))
    assert found["verdict"] == "ACCEPT"
