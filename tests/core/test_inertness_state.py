"""Inertness of what is kept: copies, checkpoints, optimizers, modes, random numbers, restoring."""

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowprec
from lowprec.policy import LinearPolicy
from lowprec.recipe import Recipe, Rule

POLICIES = {
    "bf16": "bf16",
    "mxfp8": "mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8",
    "random": "mxfp8 x mxfp8_32x32 / mxfp4:sr + rht32:seeded / nvfp4:sr x nvfp4 + rht16",
}


@pytest.fixture(params=POLICIES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def plan_of(model: nn.Module, kind: str) -> lowprec.Plan:
    rule = Rule("*", "linear", LinearPolicy.parse(POLICIES[kind]), "test")
    return lowprec.plan(model, Recipe("test", "test", (rule,)))


def wrap(model: nn.Module, kind: str) -> Any:
    return lowprec.apply(model, plan_of(model, kind))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 48))


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(32, 40, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> None:
    for step in range(first, first + 2):
        lowprec.set_step(model, step)
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def same_state(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return list(left) == list(right) and all(torch.equal(left[k], right[k]) for k in left)


def test_state_dict_keys_dtypes_and_types_are_the_plain_ones(kind: str) -> None:
    plain, ours = net(), net()
    optimizer = torch.optim.AdamW(wrap(ours, kind).parameters(), lr=1e-2)
    train(ours, optimizer)
    facts = [
        [(name, type(t), t.dtype, t.shape) for name, t in m.state_dict().items()]
        for m in (plain, ours)
    ]
    assert facts[0] == facts[1]
    parts = [[n for n, _ in m.named_buffers()] for m in (plain, ours)]
    assert parts[0] == parts[1]
    parts = [[n for n, _ in m.named_parameters()] for m in (plain, ours)]
    assert parts[0] == parts[1]


def test_checkpoints_travel_both_ways_strictly_and_weights_only(kind: str) -> None:
    for wrapped in (True, False):
        source, target = (wrap(net(), kind), net()) if wrapped else (net(), wrap(net(), kind))
        train(source, torch.optim.SGD(source.parameters(), lr=0.1))
        buffer = io.BytesIO()
        torch.save(source.state_dict(), buffer)
        buffer.seek(0)
        target.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
        assert same_state(source, target)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle, protocol 2": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "torch.save": lambda model: torch.load(saved(model), weights_only=False),
}


def saved(model: nn.Module) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_goes_on_as_the_original_would_and_apart_from_it(kind: str, way: str) -> None:
    model = wrap(net(), kind)
    model(batch())  # random bits of the second forward are others than those of the first
    twin = COPIES[way](model)
    assert type(twin[0]) is lowprec.Linear
    assert repr(twin) == repr(model)
    for one in (model, twin):
        one(batch()).square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p is not q
        assert torch.equal(p, q)
        assert torch.equal(p.grad, q.grad)
    assert lowprec.observe(twin).gemms == lowprec.observe(model).gemms
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.count_nonzero() > 0
    lowprec.restore(twin)
    assert type(model[0]) is lowprec.Linear


def test_an_average_of_the_model_is_wrapped_too(kind: str) -> None:
    model = wrap(net(), kind)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert type(average.module[0]) is lowprec.Linear
    assert torch.equal(average.module[0].weight, model[0].weight)
    lowprec.set_step(average, 0)
    assert average(batch()).isfinite().all()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_built_before_apply_trains_as_one_built_after(
    kind: str, optimizer: type[torch.optim.Optimizer]
) -> None:
    early, late = net(), net()
    first = optimizer(early.parameters(), lr=0.05)
    wrap(early, kind), wrap(late, kind)
    second = optimizer(late.parameters(), lr=0.05)
    train(early, first), train(late, second)
    assert same_state(early, late)
    assert not torch.equal(early[0].weight, net()[0].weight)
    lowprec.restore(early)
    before = early[0].weight.detach().clone()
    train(early, first)
    assert not torch.equal(early[0].weight, before)


def test_training_resumes_from_a_plain_checkpoint(kind: str) -> None:
    whole, resumed = wrap(net(), kind), wrap(net(), kind)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    train(whole, optimizer)
    kept = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    train(whole, optimizer, first=2)
    other = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    resumed.load_state_dict(kept[0])
    other.load_state_dict(kept[1])
    train(resumed, other, first=2)
    assert same_state(whole, resumed)


def test_apply_twice_is_once(kind: str) -> None:
    once, twice = net(), net()
    plan = plan_of(once, kind)
    lowprec.apply(once, plan)
    lowprec.apply(lowprec.apply(twice, plan), plan)
    attributes = [[sorted(m.__dict__) for m in model.modules()] for model in (once, twice)]
    assert attributes[0] == attributes[1]
    for model in (once, twice):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    lowprec.apply(twice, plan)
    for model in (once, twice):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), first=2)
    assert same_state(once, twice)
    assert lowprec.observe(once).gemms == lowprec.observe(twice).gemms
    assert type(lowprec.restore(twice)[0]) is nn.Linear


def everything(model: nn.Module) -> list[Any]:
    """Every attribute of every module, by identity."""
    return [
        (name, type(m), {key: id(value) for key, value in m.__dict__.items()})
        for name, m in model.named_modules()
    ]


def test_restore_is_the_identity(kind: str) -> None:
    model = net()
    model[0].register_forward_hook(lambda m, i, o: None)
    model[3].note = "the user's own"
    before = everything(model)
    outputs = model(batch())
    wrap(model, kind)
    assert everything(model) != before
    model(batch()).square().mean().backward()
    assert lowprec.restore(model) is model
    model.zero_grad()
    assert everything(model) == before
    assert torch.equal(model(batch()), outputs)
    assert lowprec.restore(model) is model
    assert everything(model) == before


def test_train_and_eval_are_untouched(kind: str) -> None:
    model = net()
    model[1].eval()
    model[3].eval()
    before = [m.training for m in model.modules()]
    wrap(model, kind)
    assert [m.training for m in model.modules()] == before
    model(batch())
    assert [m.training for m in model.modules()] == before
    model.eval()
    assert not any(m.training for m in model.modules())
    assert not model.train(False)[0].training
    assert model.train()[0].training


def test_random_numbers_of_others_are_untouched(kind: str) -> None:
    def state() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())]

    model, x = net(), batch()
    before = state()
    plan = plan_of(model, kind)
    lowprec.apply(model, plan)
    lowprec.set_step(model, 3)
    model(x).square().mean().backward()
    copy.deepcopy(model)
    lowprec.restore(model)
    assert state() == before


def test_dropout_draws_the_same_masks(kind: str) -> None:
    masks: list[list[torch.Tensor]] = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 64), nn.Dropout(), nn.Linear(64, 48), nn.Dropout())
        if wrapped:
            wrap(model, kind)
        seen: list[torch.Tensor] = []
        for index in (1, 3):
            model[index].register_forward_hook(lambda m, i, o, seen=seen: seen.append(o == 0))
        torch.manual_seed(7)
        for step in range(2):
            model(batch(step) + 1).sum().backward()
        masks.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*masks, strict=True))


def test_what_applies_to_every_linear_layer_still_does(kind: str) -> None:
    """Initialisation by class, sharing between processes, anomaly mode, determinism."""
    model = wrap(net(), kind)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
            module.reset_parameters()
    assert not torch.equal(model[0].weight, torch.ones(64, 40))
    assert model.share_memory() is model
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.set_detect_anomaly(True):
            model(batch()).square().mean().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert model[0].weight.grad.isfinite().all()
    assert model[0].in_features == 40
    assert "in_features=40, out_features=64, bias=True" in repr(model[0])


def test_no_tensor_beside_the_parameters_stays_after_a_step(kind: str) -> None:
    """No copy of a weight, cast or transposed, is kept anywhere in a layer."""
    model = wrap(net(), kind)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def tensors(value: Any, depth: int = 0) -> int:
        if isinstance(value, torch.Tensor):
            return value.numel()
        children: Any = ()
        if isinstance(value, dict):
            children = value.values()
        elif isinstance(value, (tuple, list)):
            children = value
        elif hasattr(value, "__dict__") and depth < 4:
            children = vars(value).values()
        return sum(tensors(child, depth + 1) for child in children)

    for layer in (model[0], model[3]):
        assert tensors(layer.lowprec_products) <= 8
