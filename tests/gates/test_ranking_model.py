"""The ranking network: jagged histories, odd batches, and what low precision covers of it."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import lowprec
from qualitygates.workloads.model import RankingModel, Sizes, adam_with_warmup

SIZES = Sizes(
    dense=5,
    buckets=(7, 11),
    history_buckets=13,
    history_dense=3,
    embedding=8,
    width=32,
    hidden=(64, 32),
)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def features(lengths: list[int], *, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    rows, entries = len(lengths), sum(lengths)
    draw = torch.Generator().manual_seed(1)
    return {
        "dense": torch.randn(rows, 5, generator=draw).to(dtype),
        "categorical": torch.randint(0, 7, (rows, 2), generator=draw),
        "history_ids": torch.randint(0, 13, (entries,), generator=draw),
        "history_values": torch.randn(entries, 3, generator=draw).to(dtype),
        "history_offsets": torch.tensor([0, *lengths]).cumsum(0),
    }


def test_history_is_pooled_as_in_a_plain_loop() -> None:
    model = RankingModel(SIZES)
    assert model.history is not None
    lengths = [3, 0, 1, 5, 0]
    given = features(lengths)
    pooled = model.history(given)
    at = 0
    for row, length in enumerate(lengths):
        entries = [
            torch.relu(
                model.history.table.weight[given["history_ids"][one]]
                + model.history.values(given["history_values"][one])
            )
            for one in range(at, at + length)
        ]
        mean = sum(entries) / length if entries else torch.zeros(8)
        last = entries[-1] if entries else torch.zeros(8)
        torch.testing.assert_close(pooled[row], torch.cat([mean, last]))
        at += length


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    model = RankingModel(SIZES)
    lengths = [2, 0, 4]
    whole, at = model(features(lengths)), 0
    for row, length in enumerate(lengths):
        given = features(lengths)
        part = {
            "dense": given["dense"][row : row + 1],
            "categorical": given["categorical"][row : row + 1],
            "history_ids": given["history_ids"][at : at + length],
            "history_values": given["history_values"][at : at + length],
            "history_offsets": torch.tensor([0, length]),
        }
        torch.testing.assert_close(model(part), whole[row : row + 1], rtol=1e-4, atol=1e-5)
        at += length


@pytest.mark.parametrize("recipe", [None, "bf16", "mxfp8"])
@pytest.mark.parametrize("lengths", [[0, 0, 0], [0], [4], [], [3, 0]])
def test_batches_of_any_size_train(recipe: str | None, lengths: list[int]) -> None:
    model = RankingModel(SIZES)
    if recipe:
        lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe(recipe)))
    logits = model(features(lengths))
    assert logits.shape == (len(lengths),)
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert bool(logits.isfinite().all())
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.isfinite().all()), name


def test_init_depends_on_the_seed_alone() -> None:
    first = RankingModel(SIZES).state_dict()
    torch.manual_seed(0)
    for name, tensor in RankingModel(SIZES).state_dict().items():
        assert torch.equal(tensor, first[name]), name
    other = RankingModel(SIZES).state_dict()
    assert not torch.equal(other["project.1.weight"], first["project.1.weight"])


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(5, (), 0, 0, 8, 32, (32,)),
        Sizes(0, (7, 11), 0, 0, 8, 32, (32,)),
        Sizes(0, (), 13, 0, 8, 32, (32,)),
        Sizes(5, (7, 11), 13, 0, 8, 32, ()),
    ],
)
def test_any_kind_of_feature_may_be_absent(sizes: Sizes) -> None:
    logits = RankingModel(sizes)(features([2, 0, 1]))
    assert logits.shape == (3,)
    assert len(logits.unique()) == 3


def test_columns_of_one_table_do_not_share_rows() -> None:
    model = RankingModel(SIZES)
    given = features([0])
    given["categorical"] = torch.tensor([[6, 0]])
    before = model(given)
    with torch.no_grad():
        model.table.weight[7] += 1
    assert not torch.equal(model(given), before)
    given["categorical"] = torch.tensor([[0, 1]])
    before = model(given)
    with torch.no_grad():
        model.table.weight[7] += 1
    assert torch.equal(model(given), before)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_predictions_have_many_distinct_values_in_low_precision(recipe: str) -> None:
    model = RankingModel(SIZES)
    lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe(recipe)))
    with torch.no_grad():
        logits = model(features([3] * 4000))
    # A bf16 logit of this spread would take a few hundred values.
    assert len(logits.unique()) > 3600


def test_a_plan_has_every_linear_layer() -> None:
    model = RankingModel(SIZES)
    linears = {name for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    plan = lowprec.plan(model, lowprec.load_recipe("bf16"))
    assert {layer.name for layer in plan.layers} == linears
    assert all(layer.converted for layer in plan.layers)
    quantized = lowprec.plan(model, lowprec.load_recipe("mxfp8"))
    by_name = {layer.name: layer for layer in quantized.layers}
    for name in ("project.1", "cross.0", "cross.1", "mlp.0.1", "mlp.1.1"):
        products = {str(product) for _, product in by_name[name].policy.items()}
        assert by_name[name].converted
        assert "bf16" not in products, name


@pytest.mark.parametrize("steps", [1, 2, 7, 200])
def test_the_rate_rises_then_falls(steps: int) -> None:
    model = nn.Linear(2, 1)
    optimizer, schedule = adam_with_warmup(model, steps=steps, learning_rate=0.5)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    top = rates.index(max(rates))
    assert 0 < max(rates) <= 0.5
    assert min(rates) >= 0
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert top <= max(steps // 10, 1)
