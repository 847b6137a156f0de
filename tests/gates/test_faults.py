"""Planted differences have the size they claim, measured independently."""

import numpy as np
import pytest
import torch
from torch import nn

from qualitygates.faults import expected_harm, known_bad_noise, noisy, perturb_one_ulp


def example(rows: int = 40_000, seed: int = 0):
    rng = np.random.default_rng(seed)
    z = rng.standard_normal(rows) - 1.5
    y = (rng.random(rows) < 1 / (1 + np.exp(-z))).astype(np.float32)
    return z.astype(np.float32), y, rng.uniform(0.5, 2, rows).astype(np.float32)


def relative_ne(z: np.ndarray, noisy_z: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
    def loss(logits: np.ndarray) -> float:
        p = 1 / (1 + np.exp(-logits.astype(np.float64)))
        return float(np.sum(w * -(y * np.log(p) + (1 - y) * np.log(1 - p))))

    return loss(noisy_z) / loss(z) - 1


@pytest.mark.parametrize("harm", [0.0004, 0.01, 0.2])
def test_known_bad_noise_does_the_promised_harm_on_average(harm: float) -> None:
    z, y, w = example()
    sd = known_bad_noise(z, y, w, relative_ne=harm)
    assert expected_harm(z, y, w, sd=sd) == pytest.approx(harm, rel=1e-3)
    drawn = [relative_ne(z, noisy(z, sd, seed=s), y, w) for s in range(40)]
    assert np.mean(drawn) == pytest.approx(harm, abs=4 * np.std(drawn, ddof=1) / 40**0.5)


def test_noise_for_many_rows_is_found_from_their_summary() -> None:
    z, y, w = example(150_000)
    sd = known_bad_noise(z, y, w, relative_ne=0.001)
    assert expected_harm(z, y, w, sd=sd) == pytest.approx(0.001, rel=1e-3)
    assert sd != known_bad_noise(z[:100_000], y[:100_000], w[:100_000], relative_ne=0.001)


def test_noise_is_reproducible_and_absent_at_zero() -> None:
    z, _, _ = example(100)
    assert noisy(z, 0.0, seed=1) is z
    assert np.array_equal(noisy(z, 0.3, seed=1), noisy(z, 0.3, seed=1))
    assert not np.array_equal(noisy(z, 0.3, seed=1), noisy(z, 0.3, seed=2))


def test_nonfinite_logits_need_no_noise() -> None:
    z, y, w = example(100)
    z[3] = np.nan
    assert known_bad_noise(z, y, w, relative_ne=0.01) == 0


def test_perturbation_moves_every_parameter_by_exactly_one_ulp() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    perturb_one_ulp(model, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    for old, p in zip(before, model.parameters(), strict=True):
        up, down = (torch.nextafter(old, old + side) for side in (1, -1))
        assert ((p == up) | (p == down)).all()
        assert (p != old).all()
