"""The two-way interval against loops, the rules around it, and power against published sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from qualitygates.errors import ExperimentError
from qualitygates.influence import Contrast
from qualitygates.verdict import (
    LOOK_ALPHAS,
    MARGINS,
    Design,
    Interval,
    accepts,
    advise,
    judge_metric,
    look_alpha,
    p_harm,
    rejects,
    resolve_margins,
    two_way,
)


def by_loops(d: np.ndarray, psi: np.ndarray, alpha: float) -> dict[str, float]:
    """The same interval from the formulas, one number after the other."""
    seeds, clusters = psi.shape
    mean = sum(d) / seeds
    v_seed = sum((x - mean) ** 2 for x in d) / (seeds - 1) / seeds
    v_ex = 0.0
    for u in range(clusters):
        v_ex += (sum(psi[s, u] for s in range(seeds)) / seeds) ** 2
    v_ex *= clusters / (clusters - 1)
    v = v_seed + v_ex
    nu = v**2 / (v_seed**2 / (seeds - 1) + v_ex**2 / (clusters - 1))
    half = stats.t.ppf(1 - alpha, nu) * math.sqrt(v)
    return {
        "lower": mean - half,
        "upper": mean + half,
        "v_seed": v_seed,
        "v_example": v_ex,
        "dof": nu,
    }


def draw(seed: int, *, lead: tuple[int, ...] = (), seeds: int = 5, clusters: int = 70) -> tuple:
    rng = np.random.default_rng(seed)
    psi = rng.normal(0, 0.01, (*lead, 1, clusters)) + rng.normal(0, 0.02, (*lead, seeds, clusters))
    return rng.normal(0.1, 0.5, (*lead, seeds)), psi - psi.mean(axis=-1, keepdims=True)


@pytest.mark.parametrize("seeds", [3, 5, 8])
@pytest.mark.parametrize("alpha", [0.021, 0.05])
def test_interval_equals_the_formulas_by_loops(seeds: int, alpha: float) -> None:
    d, psi = draw(1, seeds=seeds)
    found = two_way(d, psi, alpha=alpha)
    for key, value in by_loops(d, psi, alpha).items():
        assert float(getattr(found, key)) == pytest.approx(value, rel=1e-9), key


def test_a_leading_axis_gives_the_same_numbers_as_one_call_each() -> None:
    d, psi = draw(2, lead=(4, 3))
    found = two_way(d, psi, alpha=0.05)
    for index in np.ndindex(4, 3):
        alone = two_way(d[index], psi[index], alpha=0.05)
        assert found.upper[index] == pytest.approx(float(alone.upper), rel=1e-12)
        assert found.dof[index] == pytest.approx(float(alone.dof), rel=1e-12)


def test_without_example_effects_it_is_the_paired_t_interval() -> None:
    d, psi = draw(3, seeds=6)
    found = two_way(d, 0 * psi, alpha=0.05)
    t = stats.ttest_1samp(d, 0.0).confidence_interval(0.90)
    assert float(found.lower) == pytest.approx(t.low, rel=1e-9)
    assert float(found.upper) == pytest.approx(t.high, rel=1e-9)
    margin_test = stats.ttest_1samp(d, 0.2, alternative="greater")
    ours = p_harm(found, 0.2, seeds=6, clusters=psi.shape[1])
    assert ours == pytest.approx(margin_test.pvalue, rel=1e-9)


def test_equal_arms_have_a_point_as_interval() -> None:
    found = two_way(np.zeros(3), np.zeros((3, 60)), alpha=0.05)
    assert (float(found.lower), float(found.upper), float(found.dof)) == (0.0, 0.0, 2.0)
    assert p_harm(found, 0.0, seeds=3, clusters=60) == 1.0
    harmed = two_way(np.ones(3), np.zeros((3, 60)), alpha=0.05)
    assert p_harm(harmed, 0.5, seeds=3, clusters=60) == 0.0


@pytest.mark.parametrize("v_seed", [1e-4, 0.2, 1.0])
def test_p_of_harm_equals_the_behrens_fisher_integral(v_seed: float) -> None:
    found = Interval(*(np.asarray(one) for one in (4.0, 0.0, 0.0, v_seed, 1.0, 0.0)))

    def density(x: float) -> float:
        return stats.t.pdf(x, 63) * stats.t.sf((3.5 - x) / math.sqrt(v_seed), 4)

    expected, _ = integrate.quad(density, -40, 40, points=[3.5], limit=500)
    assert p_harm(found, 0.5, seeds=5, clusters=64) == pytest.approx(expected, rel=1e-6)


def test_clusters_without_weight_do_not_count() -> None:
    d, psi = draw(4)
    padded = np.concatenate([psi, np.zeros((5, 30))], axis=1)
    assert float(two_way(d, padded, alpha=0.05, clusters=70).upper) == pytest.approx(
        float(two_way(d, psi, alpha=0.05).upper), rel=1e-12
    )


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_are_refused(seeds: int) -> None:
    with pytest.raises(ExperimentError, match="at least 3"):
        two_way(np.zeros(seeds), np.zeros((seeds, 60)), alpha=0.05)
    with pytest.raises(ExperimentError, match="no computed error level"):
        look_alpha([seeds])


def test_a_single_cluster_is_refused() -> None:
    with pytest.raises(ExperimentError, match="at least 2"):
        two_way(np.zeros(3), np.zeros((3, 1)), alpha=0.05)


def interval_at(d: list[float]) -> object:
    return two_way(d, np.zeros((len(d), 60)), alpha=0.05)


def test_acceptance_and_rejection_by_the_bounds() -> None:
    near_zero, far, wide = [0.0, 0.1, -0.1], [2.0, 2.1, 1.9], [0.0, 5.0, -5.0]
    for d, accepted, rejected in ((near_zero, 1, 0), (far, 0, 1), (wide, 0, 0)):
        for two_sided in (False, True):
            assert accepts(interval_at(d), 1.0, two_sided=two_sided) == accepted
            assert rejects(interval_at(d), 1.0, two_sided=two_sided) == rejected
    better = [-value for value in far]
    assert accepts(interval_at(better), 1.0, two_sided=False)
    assert not accepts(interval_at(better), 1.0, two_sided=True)
    assert rejects(interval_at(better), 1.0, two_sided=True)


def test_an_effect_exactly_at_the_margin_without_noise_is_neither() -> None:
    at = interval_at([1.0, 1.0, 1.0])
    assert not accepts(at, 1.0, two_sided=False)
    assert not rejects(at, 1.0, two_sided=False)


def test_the_metric_is_gated_on_the_clustering_with_the_larger_variance() -> None:
    d, psi = draw(5)
    by_name = {
        name: [Contrast(x, factor * one, 70) for x, one in zip(d, psi, strict=True)]
        for name, factor in (("row", 1.0), ("day", 4.0), ("user", 2.0))
    }
    entry = judge_metric(by_name, margin=1.0, alpha=0.05, two_sided=False)
    assert entry["clustering"] == "day"
    assert entry["upper"] == pytest.approx(by_loops(d, 4 * psi, 0.05)["upper"], rel=1e-9)
    assert set(entry["clusterings"]) == {"row", "day", "user"}
    ratio = entry["clusterings"]["day"]["v_example"] / entry["clusterings"]["row"]["v_example"]
    assert ratio == pytest.approx(16.0, rel=1e-9)
    assert entry["per_seed"] == list(d)


def test_margins_by_name_and_by_numbers() -> None:
    assert resolve_margins("standard") == {"name": "standard", **MARGINS["standard"]}
    own = {"ne": 0.001, "auc": 0.0005, "gauc": 0.001, "calibration": 0.01}
    assert resolve_margins(own) == {"name": "custom", **own}
    assert resolve_margins(resolve_margins(own)) == {"name": "custom", **own}
    assert resolve_margins(resolve_margins("demo"))["name"] == "demo"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "none given"),
        ("lenient", "'lenient' is unknown; allowed: strict, standard, demo"),
        ({"ne": 0.001}, "missing \\['auc', 'gauc', 'calibration'\\]"),
        ({"ne": 1, "auc": 1, "gauc": 1, "calibration": 1, "logloss": 1}, "unknown \\['logloss'\\]"),
        ({"ne": 0.0, "auc": 1, "gauc": 1, "calibration": 1}, "above 0"),
        ({"ne": math.inf, "auc": 1, "gauc": 1, "calibration": 1}, "finite"),
        ({"ne": "0.1", "auc": 1, "gauc": 1, "calibration": 1}, "finite number"),
        ({"ne": True, "auc": 1, "gauc": 1, "calibration": 1}, "finite number"),
        ({"name": "strict", "ne": 0.1, "auc": 1, "gauc": 1, "calibration": 1}, "'strict' means"),
    ],
)
def test_margins_that_promise_nothing_are_refused(spec: object, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        resolve_margins(spec)


def test_looks_have_the_tabled_level_and_others_are_refused() -> None:
    assert look_alpha([3, 5, 8]) == 0.0210
    assert look_alpha((5,)) == look_alpha([3]) == look_alpha([40]) == 0.05
    for looks in ([], [3, 4], [8, 5, 3], [3, 5, 8, 12], [0]):
        with pytest.raises(ExperimentError, match=r"allowed: \[3, 5\], \[3, 5, 8\]"):
            look_alpha(looks)
    assert len(LOOK_ALPHAS) == 5


@pytest.mark.parametrize(
    ("sigma", "tau", "room", "expected"),
    [
        (0.25, 0.0, 1.0, 3),
        (0.5, 0.0, 1.0, 4),
        (0.75, 0.0, 1.0, 7),
        (1.0, 0.0, 1.0, 11),
        (1.5, 0.0, 1.0, 21),
        (0.5, 0.25, 1.0, 6),
        (1.0, 0.25, 1.0, 20),
        (0.25, 0.0, 0.5, 4),
        (0.5, 0.0, 0.5, 11),
        (1.0, 0.0, 0.5, 36),
    ],
)
def test_seeds_needed_for_90_percent_power(
    sigma: float, tau: float, room: float, expected: int
) -> None:
    assert Design(sigma, tau, room).seeds_needed() == expected


def test_power_equals_the_noncentral_t_and_a_simulation() -> None:
    design = Design(0.5, 0.0, 1.0)
    exact = stats.nct.sf(stats.t.ppf(0.95, 4), 4, 1.0 / (0.5 / math.sqrt(5)))
    assert design.power(5) == pytest.approx(exact, rel=1e-9)
    rng = np.random.default_rng(6)
    found = two_way(rng.normal(0, 0.5, (20_000, 5)), np.zeros((20_000, 5, 2)), alpha=0.05)
    # Standard error 0.0012.
    assert np.mean(found.upper < 1.0) == pytest.approx(exact, abs=0.005)


def test_a_too_small_evaluation_set_cannot_be_mended_by_seeds() -> None:
    assert Design(0.01, 0.36, 1.0).seeds_needed() is None
    assert Design(0.01, 0.33, 1.0).seeds_needed() is not None
    assert Design(0.1, 0.0, 0.0).power(100) == 0.0
    assert Design(0.0, 0.0, 1.0).power(3) == 1.0
    assert Design(1e-3, 0.0, 1.0).power(3) == 1.0


def entry_for(d: np.ndarray, psi: np.ndarray, *, margin: float, two_sided: bool = False) -> dict:
    seeds = [Contrast(float(x), one, psi.shape[-1]) for x, one in zip(d, psi, strict=True)]
    return judge_metric({"user": seeds}, margin=margin, alpha=0.05, two_sided=two_sided)


def test_advice_names_the_dominating_variance_and_the_number() -> None:
    d = np.array([0.9, -0.9, 0.3, -0.3, 0.0])
    quiet = np.zeros((5, 60))
    text = advise(entry_for(d, quiet, margin=0.5))
    sigma = float(np.std(d, ddof=1))
    needed = Design(sigma, 0.0, 0.5).seeds_needed()
    assert text.startswith("noise between seeds dominates (100 % of the variance)")
    assert f"needs {needed} seeds in all, {needed - 5} more" in text

    psi = np.tile(np.where(np.arange(60) % 2, 0.05, -0.05), (5, 1))
    text = advise(entry_for(0.01 * d, psi, margin=0.5))
    tau = math.sqrt(60 / 59 * 60 * 0.05**2)
    assert text.startswith("the finite evaluation set dominates")
    assert f"{(tau / (0.5 / 4)) ** 2:.1f} times as many examples" in text

    assert "rather REJECT than ACCEPT" in advise(entry_for(d + 1.0, quiet, margin=0.9))
    assert "rather REJECT than ACCEPT" in advise(
        entry_for(d - 1.0, quiet, margin=0.9, two_sided=True)
    )


def test_advice_plans_with_the_larger_of_null_and_candidate_noise() -> None:
    d = np.array([0.9, -0.9, 0.3, -0.3, 0.0])
    own = advise(entry_for(d, np.zeros((5, 60)), margin=0.5))
    assert own == advise(entry_for(d, np.zeros((5, 60)), margin=0.5), null_sd=0.01)
    planned = Design(1.0, 0.0, 0.5).seeds_needed()
    assert f"needs {planned} seeds" in advise(
        entry_for(d, np.zeros((5, 60)), margin=0.5), null_sd=1.0
    )
