"""clicks: synthetic impressions with known click probabilities, so the best NE is known.

Users have a latent taste, items a latent direction, and users have clicked items of their taste
before. Training impressions are made afresh for every step, so no row is seen twice. Times below
`SPLIT` are for training, later ones for evaluation, and an impression sees only the clicks of its
user before its own time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import nn

from ..errors import ExperimentError
from ..workload import Batch, EvaluationBatch
from .model import RankingModel, Sizes, adam_with_warmup
from .options import check_whole

TASTES: Final = 8
HISTORY: Final = 16  # latest clicks that a model sees
SPLIT: Final = 0.8
CLUSTERS: Final = 4096
FIRST_EVALUATION_ID: Final = 2**62  # training ids lie below
NEW_USERS: Final = 0.2
_DEVICES: Final = {"phone": 0.6, "desktop": 0.3, "tablet": 0.1}
_COUNTRIES: Final = {"A": 0.4, "B": 0.3, "C": 0.2, "D": 0.1}
_SLOTS: Final = 10
_CLICKS: Final = 40  # most clicks that one user ever has
_CANDIDATES: Final = 8

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def build(
    *,
    folder: Path,
    data_seed: int = 0,
    evaluation_rows: int = 100_000,
    users: int = 5000,
    items: int = 2000,
    base_rate: float = 0.02,
) -> Clicks:
    """The workload; the world and its evaluation set depend on these options alone."""
    del folder
    check_whole(
        "clicks",
        data_seed=(data_seed, 0, 2**63 - 1),
        evaluation_rows=(evaluation_rows, 1000, 5_000_000),
        users=(users, 50, 1_000_000),
        items=(items, 50, 1_000_000),
    )
    if isinstance(base_rate, bool) or not isinstance(base_rate, (int, float)):
        raise ExperimentError(f"workload clicks: base_rate = {base_rate!r} is not a number")
    if not 0.001 <= base_rate <= 0.5:
        raise ExperimentError(f"workload clicks: base_rate = {base_rate}; allowed: 0.001 to 0.5")
    world = _World(data_seed, users, items)
    return Clicks(world, evaluation_rows=evaluation_rows, base_rate=base_rate)


@dataclass(frozen=True)
class _Impressions:
    """Columns of B impressions; `score` is the logit of a click up to the intercept."""

    user: Ints
    item: Ints
    categorical: Ints
    dense: NDArray[np.float32]
    clicked: Ints  # number of clicks of the user before the impression
    score: Floats
    draw: Floats  # uniform: clicked when below the probability

    def rows(self, part: slice) -> _Impressions:
        return _Impressions(**{name: column[part] for name, column in vars(self).items()})


class _World:
    """Users, items and everything that decides a click, from one seed."""

    def __init__(self, data_seed: int, users: int, items: int) -> None:
        rng = np.random.default_rng([data_seed, 0])
        self.data_seed = data_seed
        self.taste = rng.standard_normal((users, TASTES)).astype(np.float32)
        self.direction = rng.standard_normal((items, TASTES)).astype(np.float32) / TASTES**0.5
        self.quality = 0.5 * rng.standard_normal(items)
        popularity = 1 / (np.arange(items) + 10.0)
        self.popularity = rng.permutation(popularity / popularity.sum()).cumsum()
        self.price = rng.lognormal(size=items)
        self.device_effect = np.array([0.0, -0.4, 0.2])
        self.country_effect = np.array([0.0, 0.3, -0.3, 0.6])
        self.country = rng.choice(len(_COUNTRIES), users, p=list(_COUNTRIES.values()))
        self.total = np.minimum(rng.geometric(1 / 12, users), _CLICKS)
        self.total[rng.random(users) < NEW_USERS] = 0
        self.clicks = self._past_clicks(rng)

    def _past_clicks(self, rng: np.random.Generator) -> Ints:
        """[users, _CLICKS]: the best for the user of a few items that popularity put forward."""
        best = np.empty((len(self.taste), _CLICKS), np.int64)
        for slot in range(_CLICKS):
            shown = self._items(rng, len(self.taste) * _CANDIDATES).reshape(-1, _CANDIDATES)
            liking = np.einsum("uk,uck->uc", self.taste, self.direction[shown])
            liking += rng.gumbel(size=shown.shape)
            best[:, slot] = np.take_along_axis(shown, liking.argmax(1)[:, None], 1)[:, 0]
        return best

    def _items(self, rng: np.random.Generator, count: int) -> Ints:
        drawn = np.searchsorted(self.popularity, rng.random(count), side="right")
        return np.minimum(drawn, len(self.popularity) - 1)

    def impressions(self, rng: np.random.Generator, count: int, *, late: bool) -> _Impressions:
        """Impressions of the training time, or of the later evaluation time."""
        user = rng.integers(0, len(self.taste), count)
        item = self._items(rng, count)
        device = rng.choice(len(_DEVICES), count, p=list(_DEVICES.values()))
        slot = rng.integers(0, _SLOTS, count)
        hour = rng.integers(0, 24, count)
        start, stop = (SPLIT, 1.0) if late else (0.0, SPLIT)
        time = rng.uniform(start, stop, count)
        clicked = (time * (self.total[user] + 1)).astype(np.int64)
        clicked = np.minimum(clicked, self.total[user])
        liking = np.einsum("bk,bk->b", self.taste[user], self.direction[item])
        mood = rng.standard_normal(count)
        price = np.log(self.price[item])
        score = (
            1.0 * liking
            + self.quality[item]
            + self.device_effect[device]
            + self.country_effect[self.country[user]]
            - 0.15 * slot
            + 0.3 * np.sin(2 * np.pi * hour / 24)
            - 0.2 * price
            + 0.7 * mood
            + 0.3 * np.tanh(clicked / 8)
        )
        clock = 2 * np.pi * hour / 24
        dense = [price, mood, np.log1p(clicked) - 1.5, np.sin(clock), np.cos(clock), slot / 5 - 1]
        country = self.country[user]
        return _Impressions(
            user=user,
            item=item,
            categorical=np.stack([user, item, device, country, slot, hour], axis=1),
            dense=np.stack(dense, axis=1).astype(np.float32),
            clicked=clicked,
            score=score,
            draw=rng.random(count),
        )

    def history(self, seen: _Impressions) -> dict[str, torch.Tensor]:
        """The latest HISTORY clicks before each impression, oldest first."""
        length = np.minimum(seen.clicked, HISTORY)
        offsets = np.concatenate([[0], length.cumsum()])
        rows = np.repeat(np.arange(len(length)), length)
        within = np.arange(offsets[-1]) - offsets[rows]
        at = (seen.clicked - length)[rows] + within
        return {
            "history_ids": torch.from_numpy(self.clicks[seen.user[rows], at]),
            "history_offsets": torch.from_numpy(offsets),
        }


class Clicks:
    """Training batches are a function of (data_seed, seed, step); evaluation is held in memory."""

    name = "clicks"

    def __init__(self, world: _World, *, evaluation_rows: int, base_rate: float) -> None:
        self.world = world
        rng = np.random.default_rng([world.data_seed, 1])
        self.held_out = world.impressions(rng, evaluation_rows, late=True)
        self.intercept = intercept(self.held_out.score, base_rate)
        self.probability = expit(self.held_out.score + self.intercept)
        self.labels = (self.held_out.draw < self.probability).astype(np.float32)
        bayes = bayes_ne(self.probability)
        device, country = self.held_out.categorical[:, 2], self.held_out.categorical[:, 3]
        self.slices = {f"device={name}": device == i for i, name in enumerate(_DEVICES)}
        self.slices |= {f"country={name}": country == i for i, name in enumerate(_COUNTRIES)}
        self.slices["new users"] = self.held_out.clicked == 0
        self.facts: dict[str, str | int | float] = {
            "data": "synthetic impressions with known click probabilities",
            "evaluation rows": evaluation_rows,
            "clicks, evaluation": int(self.labels.sum()),
            "click rate, expected": round(float(self.probability.mean()), 6),
            "click rate, evaluation": round(float(self.labels.mean()), 6),
            "Bayes NE, expected": round(bayes, 6),
            "Bayes NE, these labels": round(bayes_ne(self.probability, self.labels), 6),
            "users": len(world.taste),
            "items": len(world.direction),
            "data seed": world.data_seed,
        }

    def model(self) -> nn.Module:
        """The network, about 0.4 million weights in linear layers."""
        users, items = self.world.taste.shape[0], self.world.direction.shape[0]
        return RankingModel(
            Sizes(
                dense=self.held_out.dense.shape[1],
                buckets=(users, items, len(_DEVICES), len(_COUNTRIES), _SLOTS, 24),
                history_buckets=items,
                history_dense=0,
            )
        )

    def optimizer(
        self, model: nn.Module, *, steps: int
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """Adam with warmup and cosine decay."""
        return adam_with_warmup(model, steps=steps, learning_rate=2e-3)

    def training_batches(self, *, seed: int, steps: int, batch_size: int) -> Iterator[Batch]:
        """Fresh impressions of the training time for every step."""
        for step in range(steps):
            rng = np.random.default_rng([self.world.data_seed, 2, seed, step])
            seen = self.world.impressions(rng, batch_size, late=False)
            labels = seen.draw < expit(seen.score + self.intercept)
            ids = rng.integers(0, FIRST_EVALUATION_ID, batch_size)
            yield Batch(**self._tensors(seen, labels.astype(np.float32), ids))

    def evaluation_batches(self, *, batch_size: int) -> Iterator[EvaluationBatch]:
        """Impressions of the later time; clusters are users (hashed when many) and items."""
        for start in range(0, len(self.labels), batch_size):
            part = slice(start, start + batch_size)
            seen, labels = self.held_out.rows(part), self.labels[part]
            ids = FIRST_EVALUATION_ID + start + np.arange(len(labels))
            yield EvaluationBatch(
                **self._tensors(seen, labels, ids),
                clusters={"user": seen.user % CLUSTERS, "item": seen.item % CLUSTERS},
                groups=seen.user,
                slices={name: member[part] for name, member in self.slices.items()},
            )

    def _tensors(
        self, seen: _Impressions, labels: NDArray[np.float32], ids: Ints
    ) -> dict[str, Any]:
        features = {
            "dense": torch.from_numpy(seen.dense),
            "categorical": torch.from_numpy(seen.categorical),
            **self.world.history(seen),
        }
        return {
            "features": features,
            "labels": torch.from_numpy(labels),
            "weights": torch.ones(len(labels)),
            "ids": torch.from_numpy(ids),
        }


def intercept(score: Floats, base_rate: float) -> float:
    """b with mean(sigmoid(score + b)) = base_rate, by bisection to float64 resolution."""
    low, high = -60.0 - float(score.max()), 60.0 - float(score.min())
    for _ in range(100):
        middle = (low + high) / 2
        too_high = expit(score + middle).mean() > base_rate
        low, high = (low, middle) if too_high else (middle, high)
    return (low + high) / 2


def bayes_ne(probability: Floats, labels: NDArray[np.float32] | None = None) -> float:
    """NE of the true probabilities: expected over the labels they give, or for given labels.

    Log-loss over the entropy of the mean label (He et al. 2014, "Practical Lessons from Predicting
    Clicks on Ads at Facebook"); nothing can be expected to score lower.
    """
    label = probability if labels is None else labels.astype(np.float64)
    rate = label.mean()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    loss = -(label * np.log(probability) + (1 - label) * np.log1p(-probability))
    return float(loss.mean() / entropy)
