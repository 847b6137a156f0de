"""watch: what is sampled and when, and that training does not notice."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowprec
from lowprec.errors import UnsupportedError
from lowprec.operand_stats import OperandStats
from lowprec.watching import watch

BOTH = {("fprop", "x"), ("fprop", "w"), ("wgrad", "dy"), ("wgrad", "x")}
ALL = BOTH | {("dgrad", "dy"), ("dgrad", "w")}


def network(recipe: str = "mxfp8", seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 96), nn.Linear(96, 32)]
    model = nn.Sequential(*layers)
    return lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe(recipe)))


def step(model, rows: int = 40) -> torch.Tensor:
    loss = model(torch.randn(rows, 64)).square().mean()
    loss.backward()
    return loss.detach()


def operands(stats: dict[str, dict[str, OperandStats]]) -> set[tuple[str, str]]:
    return {(product, operand) for product, found in stats.items() for operand in found}


def calls(stats: dict[str, dict[str, OperandStats]]) -> set[int]:
    return {one.call for found in stats.values() for one in found.values()}


def train(recipe: str, *, watched: bool) -> list[torch.Tensor]:
    model = network(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    running = watch(model, every=2, what_if=["mxfp4:sr", "nvfp4"]) if watched else None
    for index in range(4):
        if index == 2:
            lowprec.set_step(model, 9)
        optimizer.zero_grad()
        seen.append(step(model))
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        with torch.no_grad():
            seen.append(model(torch.randn(8, 64)))
    if running is not None:
        assert len(running.stats) == 3
        running.close()
    return [*seen, torch.get_rng_state()]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "mxfp4-backward", "mxfp8-safe", "bf16"])
def test_watching_changes_no_bit(recipe: str) -> None:
    plain, watched = train(recipe, watched=False), train(recipe, watched=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_every_nth_forward_call_and_its_backward_are_sampled() -> None:
    model = network()
    seen = []
    with watch(model, every=3):
        for _ in range(8):
            step(model)
            stats = lowprec.observe(model).stats
            assert operands(stats["0"]) == BOTH  # nothing asks for the gradient of the input
            assert operands(stats["3"]) == operands(stats["4"]) == ALL
            (call,) = set().union(*(calls(one) for one in stats.values()))
            seen.append(call)
    assert seen == [0, 0, 0, 3, 3, 3, 6, 6]


def test_the_step_is_the_one_told_else_the_count() -> None:
    model = network()
    with watch(model, every=2) as running:
        steps = []
        for told in (None, None, None, 100, 101, 102):
            if told is not None:
                lowprec.set_step(model, told)
            step(model)
            found = running.stats["3"]
            steps.append({one.step for side in found.values() for one in side.values()})
    assert steps == [{0}, {0}, {2}, {2}, {101}, {101}]


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-safe"])
def test_calls_without_gradients_are_neither_sampled_nor_counted(recipe: str) -> None:
    model = network(recipe)
    with watch(model, every=2) as running:
        with torch.no_grad():
            model(torch.full((8, 64), 1000.0))
        assert lowprec.observe(model).stats == {}
        seen = []
        for _ in range(4):
            step(model)
            with torch.inference_mode():
                model(torch.full((8, 64), 1000.0))
            found = running.stats["0"]
            seen.append((*calls(found), found["fprop"]["x"].amax < 100))
    assert seen == [(0, True), (0, True), (2, True), (2, True)]


def test_only_what_runs_is_sampled_when_a_weight_is_frozen() -> None:
    model = network()
    model[3].weight.requires_grad_(False)
    with watch(model) as running:
        step(model)
        found = operands(running.stats["3"])
    assert found == {("fprop", "x"), ("fprop", "w"), ("dgrad", "dy"), ("dgrad", "w")}


def test_what_if_statistics_of_a_run_in_bf16() -> None:
    model = network("bf16")
    with watch(model, what_if=("mxfp8", "mxfp4", "mxfp4:floor")) as running:
        step(model)
    for found in running.stats.values():
        for side in found.values():
            for one in side.values():
                assert one.cast == "bf16"
                assert list(one.what_if) == ["mxfp8", "mxfp4", "mxfp4:floor"]
                assert one.what_if["mxfp8"].sqnr_db > 28 > 22 > one.what_if["mxfp4"].sqnr_db


def test_each_operand_is_measured_along_its_contraction() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe("mxfp8")))
    # Rows of x differ by 2^20, columns do not: one scale along the rows loses half of the values.
    x = torch.rand(64, 64) + 0.5
    x[1::2] *= 2.0**-20
    with watch(model) as running:
        model(x).sum().backward()
    found = running.stats["0"]
    assert found["fprop"]["x"].underflow == 0
    assert found["wgrad"]["x"].underflow == 0.5
    assert found["fprop"]["w"].cast == "mxfp8_32x32"


# Tracing instantiates autograd.Function inside torch, which warns about itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_compiled_statistics_are_the_eager_ones(recipe: str) -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
        lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe(recipe)))
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        with watch(model, every=2) as running:
            for _ in range(3):
                step(call)
                with torch.no_grad():
                    call(torch.zeros(40, 64))
        results.append((running.stats, [p.grad.clone() for p in model.parameters()]))
    (eager, eager_grads), (traced, traced_grads) = results
    assert eager == traced
    assert calls(traced["0"]) == {2}
    assert all(torch.equal(a, b) for a, b in zip(eager_grads, traced_grads, strict=True))


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-safe"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_computing_again_is_not_a_new_sample(reentrant: bool, recipe: str) -> None:
    results = []
    for again in (False, True):
        model = network(recipe)
        with watch(model, every=2) as running:
            for _ in range(3):
                x = torch.randn(40, 64, requires_grad=True)
                y = checkpoint(model, x, use_reentrant=reentrant) if again else model(x)
                y.square().mean().backward()
        results.append(running.stats)
    assert results[0] == results[1]
    assert calls(results[1]["3"]) == {2}


def test_copies_and_pickles_are_not_watched() -> None:
    model = network()
    with watch(model, every=1) as running:
        step(model)
        before = running.stats
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert lowprec.observe(other).stats == {}
            step(other)
        assert running.stats == before
        assert list(model.state_dict()) == list(other.state_dict())


def test_closing_detaches_and_keeps_what_was_seen() -> None:
    model = network()
    assert lowprec.observe(model).stats == {}
    running = watch(model)
    step(model)
    assert lowprec.observe(model).stats == running.stats != {}
    gemms = lowprec.observe(model).gemms
    running.close()
    running.close()
    assert lowprec.observe(model).stats == {}
    assert lowprec.observe(model).gemms == gemms
    assert len(running.stats) == 3
    before = running.stats
    step(model)
    assert running.stats == before
    watch(model).close()  # free to be watched again


def test_a_restored_model_closes_quietly() -> None:
    model = network()
    running = watch(model)
    lowprec.restore(model)
    running.close()


def test_a_batch_without_rows() -> None:
    model = network()
    with watch(model) as running:
        step(model, rows=0)
        assert running.stats["0"]["fprop"]["x"].elements == 0
        assert running.stats["0"]["fprop"]["w"].sqnr_db > 28


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"every": 0}, "every must be a whole number from 1 on, not 0"),
        ({"every": True}, "not True"),
        ({"every": 2.5}, "not 2.5"),
        ({"what_if": ["mxfp9"]}, "unknown format 'mxfp9'; did you mean mxfp8"),
        ({"what_if": "mxfp8"}, r"what_if=\['mxfp8'\]"),
        ({"what_if": [3]}, "takes casts or their text, not 3"),
        ({"what_if": ["mxfp4:floor:sr"]}, "clips"),
        ({"tensorboard": 3}, "neither a folder nor a writer"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], says: str) -> None:
    model = network()
    with pytest.raises(UnsupportedError, match=says):
        watch(model, **arguments)
    watch(model).close()  # nothing was attached


def test_models_that_cannot_be_watched() -> None:
    with pytest.raises(UnsupportedError, match=r"call lowprec\.apply first"):
        watch(nn.Sequential(nn.Linear(8, 8)))
    model = network()
    with watch(model), pytest.raises(UnsupportedError, match="layer '3' is watched already"):
        watch(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU(), model[3]))
