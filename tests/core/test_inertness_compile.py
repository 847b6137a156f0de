"""Inertness under torch.compile: whole graphs, the results of eager bit for bit, nothing stale."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowprec
from lowprec.policy import LinearPolicy
from lowprec.recipe import Recipe, Rule

POLICIES = {
    "bf16": "bf16",
    "mxfp8": "mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8",
    "random": "mxfp8 x mxfp8_32x32 / mxfp4:sr + rht32:seeded / nvfp4:sr x nvfp4 + rht16",
}
# Tracing instantiates autograd.Function inside torch, which warns about itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


def plan_of(model: nn.Module, *kinds: str) -> lowprec.Plan:
    """The first kind for every layer, the second for the last one."""
    rules = [
        Rule(match, "linear", LinearPolicy.parse(POLICIES[kind]), "test")
        for match, kind in zip(("*", "last:1"), kinds, strict=False)
    ]
    return lowprec.plan(model, Recipe("test", "test", tuple(rules)))


def wrap(model: Any, *kinds: str) -> Any:
    return lowprec.apply(model, plan_of(model, *kinds))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48))


class Everything(nn.Module):
    """A large bias, a layer used twice, a tied weight, a frozen base with its adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared = nn.Linear(64, 64), nn.Linear(64, 64)
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.shared.weight
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 16, bias=False), nn.Linear(16, 64, bias=False)
        nn.init.constant_(self.first.bias, 100.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu_() - 100
        x = self.shared(self.shared(x).relu())
        x = self.tied(x).relu()
        return self.base(x) + self.up(self.down(x))


def rows(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))


def step(
    model: Any, call: Callable[..., Any], x: torch.Tensor, number: int
) -> dict[str, torch.Tensor | None]:
    """Output and all gradients; one that is absent is None."""
    lowprec.set_step(model, number)
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"y": y.detach(), "dx": leaf.grad, **grads}


def equal(a: dict[str, torch.Tensor | None], b: dict[str, torch.Tensor | None]) -> bool:
    def same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
        if left is None or right is None:
            return left is right
        return torch.equal(left, right)

    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def traced(model: Any, **options: Any) -> tuple[Callable[..., Any], list[Any]]:
    """The compiled model, and the graphs that were made so far."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return torch.compile(model, backend=backend, fullgraph=True, **options), graphs


@pytest.mark.parametrize("kinds", [("mxfp8", "bf16"), ("random",)], ids=" and ".join)
def test_compiled_is_eager_bit_for_bit(kinds: tuple[str, ...]) -> None:
    eager, model = wrap(Everything(), *kinds), wrap(Everything(), *kinds)
    compiled, graphs = traced(model)
    for number in range(2):
        got = step(model, compiled, rows(32, number), number)
        want = step(eager, eager, rows(32, number), number)
        assert equal(got, want)
        assert got["base.weight"] is None
        assert got["shared.weight"] is not None
    assert len(graphs) == 1
    assert lowprec.observe(model).gemms == lowprec.observe(eager).gemms


def test_any_number_of_rows_with_few_graphs() -> None:
    """One row, less than a block, whole and ragged blocks: a graph for each sort, not for each."""
    eager, model = (wrap(nn.Sequential(nn.Linear(64, 96)), "random") for _ in range(2))
    eager.load_state_dict(model.state_dict())
    compiled, graphs = traced(model, dynamic=True)
    for number, count in enumerate((64, 100, 7, 96, 33, 128, 250)):
        got = step(model, compiled, rows(count), number)
        assert equal(got, step(eager, eager, rows(count), number)), count
    assert len(graphs) <= 4


def test_nothing_stale_after_a_change() -> None:
    """Evaluation first, edited weights, frozen weights, a demoted layer, and plain layers again."""
    model = net()
    plan = plan_of(model, "mxfp8")
    lowprec.apply(model, plan)
    compiled, _ = traced(model)
    x = rows(32)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(compiled(x), model(x))

    def check() -> dict[str, torch.Tensor | None]:
        got = step(model, compiled, x, 0)
        assert equal(got, step(model, model, x, 0))
        return got

    seen = [check()]
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    seen.append(check())
    model.load_state_dict({name: -value for name, value in model.state_dict().items()})
    seen.append(check())
    model[2].weight.requires_grad_(False)
    assert check()["2.weight"] is None
    model[2].weight.requires_grad_(True)
    lowprec.apply(model, plan.with_layer("0", "bf16", why="test"))
    seen.append(check())
    assert lowprec.observe(model).gemms["0"]["wgrad"] == {"mxfp8": 8, "bf16": 2}
    lowprec.restore(model)
    seen.append(check())
    assert not any(torch.equal(a["y"], b["y"]) for a, b in itertools.pairwise(seen))


def test_checkpointing_inside_a_compiled_region() -> None:
    """What is computed again has the bits of the first time, the step told or not."""
    eager, model = wrap(net(), "random"), wrap(net(), "random")
    compiled, _ = traced(lambda x: checkpoint(model, x, use_reentrant=False))
    seen = []
    for number in (None, None, 0, 1):
        results = []
        for one, call in ((eager, eager), (model, compiled)):
            if number is not None:
                lowprec.set_step(one, number)
            one.zero_grad()
            call(rows(32)).square().sum().backward()
            results.append({name: p.grad for name, p in one.named_parameters()})
        assert equal(*results)
        seen.append(results[0])
    assert not equal(seen[0], seen[1])
    assert not equal(seen[2], seen[3])


def no_compiler() -> str | None:
    try:
        torch._inductor.cpp_builder.get_cpp_compiler()
    except Exception as error:
        return f"inductor needs a C++ compiler: {type(error).__name__}"
    return None


# Importing inductor calls what torch itself has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_is_eager_bit_for_bit() -> None:
    if reason := no_compiler():
        pytest.skip(reason)
    eager, model = wrap(net(), "random", "mxfp8"), wrap(net(), "random", "mxfp8")
    compiled = torch.compile(model, backend="inductor", fullgraph=True)
    for number in range(2):
        got = step(model, compiled, rows(32, number), number)
        assert equal(got, step(eager, eager, rows(32, number), number))
    assert lowprec.observe(model).gemms == lowprec.observe(eager).gemms
