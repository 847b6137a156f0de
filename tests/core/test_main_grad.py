"""The float32 main gradient: what it sums, what becomes of .grad, and where it is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowprec
from lowprec import ops
from lowprec.errors import PlanError, UnsupportedError
from lowprec.formats import Cast

K, N, ROWS, MICRO = 64, 32, 96, 16


def plan_of(*, recipe: str = "mxfp8") -> lowprec.Plan:
    model = nn.Linear(K, N).bfloat16()
    return lowprec.plan(model, lowprec.load_recipe(recipe), hardware="cpu")


def layer(*, main_grad: bool | None = True) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(K, N).bfloat16()
    lowprec.apply(model, plan_of(), main_grad=main_grad)
    return model


def micro_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    for _ in range(MICRO):
        # A common part in every gradient: the sum grows while what is added to it does not.
        x, dy = torch.randn(ROWS, K) + 1.0, torch.randn(ROWS, N) + 1.0
        yield x.bfloat16(), dy.bfloat16()


def wgrad(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """One micro-batch's wgrad by the ops alone: float32, not rounded."""
    cast = Cast.parse("mxfp8")
    left, right = (ops.quantize(t, cast, axis=-2).mT for t in (dy, x))
    return ops.matmul(left, right, out_dtype=torch.float32)


def trained(model: nn.Module, weight: torch.Tensor) -> None:
    for x, dy in micro_batches():
        model(x).backward(dy)
    assert weight.grad is None


def test_it_is_the_float32_sum_of_the_micro_batches() -> None:
    model = layer()
    assert model.weight.main_grad is None
    trained(model, model.weight)
    want = torch.zeros(N, K)
    for x, dy in micro_batches():
        want += wgrad(x, dy)
    assert model.weight.main_grad.dtype == torch.float32
    assert torch.equal(model.weight.main_grad, want)
    assert model.bias.grad is not None
    assert "main_grad" not in model.state_dict()


def test_it_keeps_what_a_bfloat16_gradient_loses() -> None:
    ours, plain = layer(), layer(main_grad=None)
    exact = torch.zeros(N, K, dtype=torch.float64)
    for x, dy in micro_batches():
        exact += wgrad(x, dy).double()
        ours(x).backward(dy)
        plain(x).backward(dy)
    lost = (plain.weight.grad.double() - exact).norm() / exact.norm()
    kept = (ours.weight.main_grad.double() - exact).norm() / exact.norm()
    assert lost > 1e-3
    assert kept < 1e-6


def test_none_starts_a_new_sum_and_a_buffer_is_added_to_in_place() -> None:
    model, (x, dy) = layer(), next(micro_batches())
    model(x).backward(dy)
    first = model.weight.main_grad.clone()
    model.weight.main_grad = None
    model(x).backward(dy)
    assert torch.equal(model.weight.main_grad, first)
    buffer = model.weight.main_grad.fill_(2.0)
    model.weight.grad_added_to_main_grad = False  # as Megatron marks its weights
    model(x).backward(dy)
    assert model.weight.main_grad is buffer
    assert torch.equal(buffer, first + 2.0)
    assert model.weight.grad_added_to_main_grad
    assert torch.equal(model.weight.grad, torch.zeros_like(model.weight))  # hooks saw a gradient


@pytest.mark.parametrize("kind", ["norm", "gate"])
def test_fused_layers_have_it_too(kind: str) -> None:
    def build() -> tuple[nn.Module, nn.Linear]:
        torch.manual_seed(0)
        linear = nn.Linear(K, N)
        if kind == "norm":
            return lowprec.NormLinear(nn.RMSNorm(K, eps=1e-6), linear).bfloat16(), linear
        return lowprec.GatedLinear(linear, gated=False).bfloat16(), linear

    found = []
    for main_grad in (True, None):
        model, linear = build()
        plan = lowprec.plan(model, lowprec.load_recipe("mxfp8"), hardware="cpu")
        lowprec.apply(model, plan, main_grad=main_grad)
        x, dy = next(micro_batches())
        model(x).backward(dy)
        found.append(linear.weight)
    ours, plain = found
    assert ours.grad is None
    assert torch.equal(ours.main_grad.bfloat16(), plain.grad)


def test_only_what_wants_a_gradient_gets_one() -> None:
    model, (x, dy) = layer(), next(micro_batches())
    model.weight.requires_grad_(False)
    model(x.requires_grad_()).backward(dy)
    assert model.weight.main_grad is None


def test_a_gradient_of_the_input_alone_adds_too_unless_weights_are_frozen() -> None:
    """As docs/kernels.md says: autograd does not tell a function which gradients are asked for."""
    model, (x, dy) = layer(), next(micro_batches())
    x.requires_grad_()
    model.weight.requires_grad_(False)
    (of_frozen,) = torch.autograd.grad(model(x), x, dy)
    assert model.weight.main_grad is None
    model.weight.requires_grad_(True)
    (dx,) = torch.autograd.grad(model(x), x, dy)
    assert torch.equal(dx, of_frozen)
    assert torch.equal(model.weight.main_grad, wgrad(x.detach(), dy))


def test_it_stays_under_another_plan_and_goes_with_restore() -> None:
    model = layer()
    lowprec.apply(model, plan_of(recipe="mxfp8-portable"))
    trained(model, model.weight)
    assert model.weight.main_grad is not None
    lowprec.restore(model)
    assert not hasattr(model.weight, "main_grad")


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    model = nn.Linear(K, N).bfloat16()
    model.weight.main_grad = torch.zeros(N, K, dtype=torch.bfloat16)
    with pytest.raises(PlanError, match=r"main_grad is torch.bfloat16 \(32, 64\) on cpu, which"):
        lowprec.apply(model, plan_of(), main_grad=True)
    assert type(model) is nn.Linear


def test_a_weight_that_is_another_parameter_is_refused() -> None:
    model, (x, _) = copy.deepcopy(layer()), next(micro_batches())
    with pytest.raises(UnsupportedError, match="not the Parameter that got a main_grad"):
        model(x)
    with torch.no_grad():
        model(x)  # an average of weights is only ever evaluated
    lowprec.apply(model, plan_of(), main_grad=True)
    model(x)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_reduces_grad_is_refused(kind: str) -> None:
    model, (x, _) = layer(), next(micro_batches())
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        if kind == "fsdp":
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
            wrapped: nn.Module = fully_shard(nn.Sequential(model), mesh=mesh)
            words = r"FSDP gathered it .*reduce_dtype=torch.float32"
        else:
            wrapped = nn.parallel.DistributedDataParallel(model)
            words = "DistributedDataParallel averages .grad"
        with pytest.raises(UnsupportedError, match=words):
            wrapped(x)
    finally:
        torch.distributed.destroy_process_group()


def test_compiled_it_breaks_the_graph_and_sums_the_same() -> None:
    eager, compiled = layer(), layer()
    run = torch.compile(nn.Sequential(compiled), backend="eager")
    x, dy = next(micro_batches())
    for _ in range(2):
        eager(x).backward(dy)
        run(x).backward(dy)
    assert torch.equal(compiled.weight.main_grad, eager.weight.main_grad)
    torch._dynamo.reset()  # the frame that broke is not traced again
    whole = torch.compile(nn.Sequential(layer()), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="UnsupportedError"):
        whole(x)
