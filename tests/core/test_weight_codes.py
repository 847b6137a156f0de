"""Weights are cast once for the micro-batches of a step, and never from an older content."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowprec
from lowprec import ops
from lowprec.nn import weight_codes
from lowprec.nn.position import At
from lowprec.nn.weight_codes import WeightCodes
from lowprec.policy import LinearPolicy
from lowprec.tensor import QuantizedTensor


@pytest.fixture
def weight_casts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Data pointers of what was cast with 24 rows: the weight, neither x nor dy."""
    seen: list[int] = []
    plain = ops.quantize

    def counted(x: torch.Tensor, *args: object, **options: object) -> QuantizedTensor:
        if x.shape == (24, 64):
            seen.append(x.data_ptr())
        return plain(x, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ops, "quantize", counted)
    return seen


def layer(recipe: str = "mxfp8") -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(64, 24).bfloat16()
    lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe(recipe), hardware="cpu"))
    return model


def backward(model: nn.Linear, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    y = model(x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    return torch.cat([y.detach().flatten(), x.grad.flatten()])


def test_one_cast_a_product_and_step_and_the_results_are_the_same(weight_casts: list[int]) -> None:
    model, twin = layer(), layer()
    for step in range(3):
        before = len(weight_casts)
        for micro_batch in range(4):
            lowprec.set_step(model, step, micro_batch=micro_batch)
            found = backward(model, 10 * step + micro_batch)
            mine = len(weight_casts)
            assert torch.equal(found, backward(twin, 10 * step + micro_batch))
            del weight_casts[mine:]
        # Until a second micro-batch is seen nothing says that there will be one.
        assert len(weight_casts) - before == (4 if step == 0 else 2)
        for one in (model, twin):
            with torch.no_grad():
                one.weight -= 0.1 * one.weight.grad
            one.zero_grad()


def test_without_micro_batches_every_forward_casts_and_nothing_is_held(
    weight_casts: list[int],
) -> None:
    model = layer()
    for step in range(3):
        lowprec.set_step(model, step)
        backward(model, step)
    assert len(weight_casts) == 6
    assert model.lowprec_products.weights._held == {}


@pytest.mark.parametrize("change", ["version", "step", "memory", "same micro-batch"])
def test_any_witness_that_differs_casts_again(change: str, weight_casts: list[int]) -> None:
    model = layer()
    for micro_batch in (1, 2):
        lowprec.set_step(model, 0, micro_batch=micro_batch)
        backward(model, 1)
    assert len(weight_casts) == 2
    with torch.no_grad():
        if change == "version":
            model.weight.mul_(2)
        elif change == "memory":
            model.weight.data = model.weight.data * 2
        else:  # a write that no version counts, as FSDP's gather and `.data` do
            model.weight.data.mul_(2)
    at = {"step": (1, 3), "same micro-batch": (0, 1)}.get(change, (0, 3))
    lowprec.set_step(model, at[0], micro_batch=at[1])
    found = backward(model, 2)
    fresh = layer()
    with torch.no_grad():
        fresh.weight.mul_(2)
    assert torch.equal(found, backward(fresh, 2))


def test_stochastic_weights_are_drawn_anew(weight_casts: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 24).bfloat16()
    recipe = lowprec.load_recipe("mxfp8")
    plan = lowprec.plan(model, recipe, hardware="cpu")
    policy = LinearPolicy.parse("mxfp8 x mxfp8:sr / mxfp8 x mxfp8:sr / mxfp8")
    lowprec.apply(model, plan.with_layer("", policy, why="test"))
    for micro_batch in range(3):
        lowprec.set_step(model, 0, micro_batch=micro_batch)
        backward(model, micro_batch)
    assert len(weight_casts) == 6


def test_codes_cast_ahead_serve_one_backward() -> None:
    weight, codes = torch.zeros(4, 4), WeightCodes()
    operand = ops.quantize(weight, "mxfp8", backend="reference")
    codes.put(1, weight, 0, None, operand, ahead=True)
    assert codes.get(1, weight, 0, None) is operand
    assert codes.get(1, weight, 0, None) is None
    codes.put(1, weight, 0, None, operand, ahead=True)
    weight.add_(1)
    assert codes.get(1, weight, 0, None) is None
    codes.put(0, weight, 0, At(0, 0, 0), operand)
    assert codes.get(0, weight, 0, At(0, 1, 0)) is None
    codes.put(0, weight, 0, At(0, 1, 0), operand)
    codes.put(1, weight, 0, At(1, 0, 0), operand, ahead=True)
    for micro_batch in range(3):
        assert codes.get(1, weight, 0, At(1, micro_batch, 0)) is operand
    assert codes.get(1, weight, 1, At(1, 3, 0)) is None


def test_nothing_is_held_of_weights_that_fsdp_may_have_gathered(
    monkeypatch: pytest.MonkeyPatch, weight_casts: list[int]
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    assert weight_codes.may_be_gathered()
    model = layer()
    for micro_batch in range(3):
        lowprec.set_step(model, 0, micro_batch=micro_batch)
        backward(model, micro_batch)
    assert len(weight_casts) == 6
    assert model.lowprec_products.weights._held == {}
