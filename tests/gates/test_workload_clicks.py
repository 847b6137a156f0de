"""The workload clicks: its probabilities are known, so its best NE is checked by plain sums."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from qualitygates.errors import ExperimentError
from qualitygates.metrics import evaluate
from qualitygates.workload import Batch
from qualitygates.workloads import clicks
from qualitygates.workloads.clicks import Clicks, bayes_ne, build, intercept
from qualitygates.workloads.model import RankingModel


@pytest.fixture(scope="module")
def workload() -> Clicks:
    return small()


def small(**changes: Any) -> Clicks:
    options = {"evaluation_rows": 20_000, "users": 500, "items": 200} | changes
    return build(folder=None, **options)


def one(batches: Any) -> Batch:
    (batch,) = batches
    return batch


def test_bayes_ne_is_the_sum_over_the_true_probabilities() -> None:
    p = [0.01, 0.2, 0.03, 0.5]
    entropy = [-(q * math.log(q) + (1 - q) * math.log(1 - q)) for q in p]
    base = sum(p) / 4
    whole = -(base * math.log(base) + (1 - base) * math.log(1 - base))
    assert bayes_ne(np.array(p)) == pytest.approx(sum(entropy) / 4 / whole, rel=1e-12)


def test_bayes_ne_of_labels_is_the_ne_of_the_gate(workload: Clicks) -> None:
    logits = np.log(workload.probability) - np.log1p(-workload.probability)
    rows = len(logits)
    result = evaluate(
        logits,
        workload.labels,
        weights=np.ones(rows),
        clusters={"row": np.arange(rows)},
        groups=None,
        slices={},
    )
    assert workload.facts["Bayes NE, these labels"] == pytest.approx(
        result["metrics"]["ne"], abs=1e-6
    )
    assert result["metrics"]["calibration"] == pytest.approx(1, abs=0.15)


def test_labels_are_drawn_from_the_probabilities(workload: Clicks) -> None:
    p, y = workload.probability, workload.labels
    assert p.mean() == pytest.approx(0.02, abs=1e-9)
    order = np.argsort(p)
    for part in np.array_split(order, 5):
        spread = math.sqrt((p[part] * (1 - p[part])).sum())
        assert abs(y[part].sum() - p[part].sum()) < 4 * spread
    assert 0.5 < float(workload.facts["Bayes NE, expected"]) < 0.95


def test_defaults_carry_a_gate() -> None:
    workload = build(folder=None)
    assert int(workload.facts["clicks, evaluation"]) >= 1000
    # As docs/workloads.md says.
    assert workload.facts["Bayes NE, expected"] == pytest.approx(0.8072, abs=5e-5)
    for name, member in workload.slices.items():
        assert workload.labels[member].sum() >= 200, name


def test_the_intercept_gives_the_base_rate() -> None:
    score = np.random.default_rng(0).normal(size=1000) * 3
    for rate in (0.001, 0.3):
        found = (1 / (1 + np.exp(-(score + intercept(score, rate))))).mean()
        assert found == pytest.approx(rate, rel=1e-10)


def test_batches_depend_on_the_seeds_alone(workload: Clicks) -> None:
    state = torch.get_rng_state()
    again, other = small(), small(data_seed=1)

    def second(source: Clicks, seed: int) -> Batch:
        return list(source.training_batches(seed=seed, steps=2, batch_size=64))[1]

    torch.manual_seed(5)
    drawn = torch.get_rng_state()
    a, b = second(workload, 3), second(again, 3)
    for name, tensor in a.features.items():
        assert torch.equal(tensor, b.features[name]), name
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.labels, b.labels)
    assert not torch.equal(a.ids, second(workload, 4).ids)
    assert not torch.equal(a.ids, second(other, 3).ids)
    assert torch.equal(drawn, torch.get_rng_state())
    torch.set_rng_state(state)
    np.testing.assert_array_equal(workload.labels, again.labels)
    assert not np.array_equal(workload.labels, other.labels)


def test_a_step_does_not_depend_on_how_many_follow(workload: Clicks) -> None:
    few = one(workload.training_batches(seed=3, steps=1, batch_size=64))
    many = next(iter(workload.training_batches(seed=3, steps=50, batch_size=64)))
    assert torch.equal(few.ids, many.ids)


def test_training_and_evaluation_share_no_row(workload: Clicks) -> None:
    trained = torch.cat([b.ids for b in workload.training_batches(seed=1, steps=9, batch_size=500)])
    held = torch.cat([b.ids for b in workload.evaluation_batches(batch_size=4096)])
    assert len(trained.unique()) == 4500
    assert len(held.unique()) == 20_000
    assert int(trained.max()) < int(held.min())


def test_histories_are_the_clicks_before_the_impression(workload: Clicks) -> None:
    (batch,) = workload.evaluation_batches(batch_size=20_000)
    seen, world = workload.held_out, workload.world
    offsets, ids = batch.features["history_offsets"], batch.features["history_ids"]
    lengths = offsets.diff()
    assert int(lengths.min()) == 0
    assert int(lengths.max()) == clicks.HISTORY
    assert len(lengths.unique()) > 5
    for row in range(300):
        count = int(seen.clicked[row])
        wanted = world.clicks[seen.user[row], max(count - clicks.HISTORY, 0) : count]
        assert ids[offsets[row] : offsets[row + 1]].tolist() == wanted.tolist()
    trained = one(workload.training_batches(seed=1, steps=1, batch_size=20_000))
    assert trained.features["history_offsets"].diff().float().mean() < lengths.float().mean()


def test_users_clicked_what_they_like(workload: Clicks) -> None:
    world = workload.world
    liking = np.einsum("uk,uck->uc", world.taste, world.direction[world.clicks])
    everything = world.taste @ world.direction.T
    assert liking.mean() > everything.mean() + 0.5 * everything.std()


def test_groups_nest_in_the_clusters_and_slices_are_what_they_say(workload: Clicks) -> None:
    many = small(users=9000)
    (batch,) = many.evaluation_batches(batch_size=20_000)
    assert batch.groups is not None
    cluster = batch.clusters["user"]
    pairs = np.unique(np.stack([batch.groups, cluster]), axis=1)
    assert pairs.shape[1] == len(np.unique(batch.groups)) > 4096
    assert 0 <= cluster.min() <= cluster.max() < 4096
    empty = batch.features["history_offsets"].diff().numpy() == 0
    np.testing.assert_array_equal(batch.slices["new users"], empty)
    devices = [batch.slices[name] for name in batch.slices if name.startswith("device=")]
    np.testing.assert_array_equal(np.sum(devices, axis=0), 1)


def test_the_model_learns(workload: Clicks) -> None:
    torch.manual_seed(0)
    model = workload.model()
    assert isinstance(model, RankingModel)
    batch = one(workload.training_batches(seed=1, steps=1, batch_size=500))
    optimizer, schedule = workload.optimizer(model, steps=15)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            model(batch.features), batch.labels
        )
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"users": 3},
        {"items": 2.5},
        {"evaluation_rows": 10},
        {"data_seed": -1},
        {"base_rate": 0.9},
        {"base_rate": "2 %"},
        {"base_rate": True},
    ],
)
def test_options_that_make_no_sense(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ExperimentError, match=f"workload clicks: {name} = "):
        small(**changes)
