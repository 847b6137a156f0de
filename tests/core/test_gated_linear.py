"""GatedLinear: the activation and the layer behind it as one step, against the two of them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import lowprec
from lowprec.errors import UnsupportedError
from tests.core.accountant import kept_bytes
from tests.core.kernel_cases import needs_triton

# torch does this itself while it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
FUNCTIONS = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda t: nn.functional.gelu(t, approximate="tanh"),
}


class Two(nn.Module):
    """The same by nn.functional and a layer of its own."""

    def __init__(self, linear: nn.Linear, kind: str, *, gated: bool) -> None:
        super().__init__()
        self.linear, self.kind, self.gated = linear, kind, gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.gated:
            return self.linear(FUNCTIONS[self.kind](x))
        gate, up = x.chunk(2, -1)
        return self.linear(FUNCTIONS[self.kind](gate) * up)


def applied(module: nn.Module, recipe: str = "mxfp8") -> nn.Module:
    plan = lowprec.plan(module, lowprec.load_recipe(recipe), hardware="cpu")
    return lowprec.apply(module, plan)


def built(
    kind: str = "silu", recipe: str | None = "mxfp8", *, gated: bool = True, width: int = 64
) -> lowprec.GatedLinear:
    torch.manual_seed(0)
    module = lowprec.GatedLinear(nn.Linear(width, 96), activation=kind, gated=gated)
    if recipe is not None:
        applied(module, recipe)
    return module


def result(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Output and gradients of x, weight and bias."""
    lowprec.set_step(module, 3)
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    y.float().sin().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-rotated-wgrad", "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_equals_the_activation_followed_by_the_layer(
    kind: str, gated: bool, dtype: torch.dtype, recipe: str
) -> None:
    """Bit for bit."""
    module = built(kind, None, gated=gated).to(dtype)
    two = Two(copy.deepcopy(module.linear), kind, gated=gated)
    generator = torch.Generator().manual_seed(1)
    x = (3 * torch.randn(5, 8, 128 if gated else 64, generator=generator)).to(dtype)
    assert torch.equal(module(x), two(x))
    for one in (module, two):
        applied(one, recipe)
    assert module._is_one_step(x)
    for place, (got, want) in enumerate(zip(result(module, x), result(two, x), strict=True)):
        assert torch.equal(got, want), place


@pytest.mark.parametrize("gated", [True, False])
def test_bytes_kept_for_backward(gated: bool) -> None:
    """The input, in bf16, and nothing else, where torch keeps the activation's steps as well."""
    module = built(recipe=None, gated=gated, width=512).bfloat16()
    x = torch.randn(1024, 1024 if gated else 512).bfloat16().requires_grad_()
    plain = kept_bytes(module(x))
    assert plain == x.nbytes * 2
    applied(module)
    key = module.linear.lowprec_products.key
    assert kept_bytes(module(x), without=[key]) == x.nbytes
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert kept_bytes(module(x), without=[key]) == x.nbytes
    with torch.no_grad():
        assert module(x).grad_fn is None


@pytest.mark.parametrize(
    ("gated", "recipe"), [(True, "mxfp8"), (False, "mxfp8-rotated-wgrad"), (True, "bf16")]
)
def test_compiled_without_graph_breaks_equals_eager(gated: bool, recipe: str) -> None:
    module = built("gelu_tanh", recipe, gated=gated)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 128 if gated else 64, generator=generator)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for got, want in zip(result(compiled, x), result(module, x), strict=True):
        assert torch.equal(got, want)


def test_is_two_steps_where_it_cannot_be_one() -> None:
    module = built()
    seen: list[str] = []
    x = torch.randn(4, 128)
    one = module(x)
    handle = module.linear.register_forward_pre_hook(lambda *_: seen.append("pre"))
    assert torch.equal(module(x), one)
    assert seen == ["pre"]
    handle.remove()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not module._is_one_step(x)
        assert module(x).dtype == torch.bfloat16
    wide = built(recipe="bf16").double()
    assert module(x).dtype == torch.float32
    assert wide(x.double()).dtype == torch.float64
    with pytest.raises(UnsupportedError, match="convert them to one dtype"):
        module(x.bfloat16())


def test_shapes_states_copies_and_frozen_weights() -> None:
    module = built("gelu")
    assert list(module.state_dict()) == ["linear.weight", "linear.bias"]
    assert "activation=gelu, gated=True" in repr(module)
    x = torch.randn(3, 5, 128)
    for shape in ((0, 128), (128,), (3, 0, 128)):
        leaf = torch.ones(shape, requires_grad=True)
        y = module(leaf)
        assert y.shape == (*shape[:-1], 96)
        y.sum().backward()
        assert leaf.grad.shape == shape
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
    strided = torch.randn(7, 256)[:, 64:192]
    assert torch.equal(result(module, strided)[1], result(module, strided.contiguous())[1])
    module.linear.weight.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    module(leaf).sum().backward()
    assert module.linear.weight.grad is None
    assert leaf.grad is not None
    module.linear.weight.requires_grad_(True)
    module(x).sum().backward()
    assert module.linear.weight.grad is not None
    lowprec.restore(module)
    assert type(module.linear) is nn.Linear


def test_counts_what_ran() -> None:
    module = built()
    module(torch.randn(4, 128, requires_grad=True)).sum().backward()
    counts = lowprec.observe(module).gemms["linear"]
    assert all(sum(found.values()) == 1 for found in counts.values())


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"takes an nn\.Linear, got Conv1d"):
        lowprec.GatedLinear(nn.Conv1d(2, 2, 1))
    with pytest.raises(UnsupportedError, match="'relu' is not one of silu, gelu, gelu_tanh"):
        lowprec.GatedLinear(nn.Linear(64, 8), activation="relu")
    for recipe in (None, "mxfp8"):
        for gated, width in ((True, 128), (False, 64)):
            module = built(recipe=recipe, gated=gated)
            for x in (torch.ones(2, 127), torch.ones(()), torch.ones(2, 192 - width)):
                with pytest.raises(UnsupportedError, match=f"last dimension must be {width}"):
                    module(x)


@needs_triton
def test_tensors_on_a_cpu_under_a_plan_for_a_gpu_are_refused() -> None:
    layers = {lowprec.NormLinear(nn.RMSNorm(64), nn.Linear(64, 8)): 64, built(recipe=None): 128}
    for module, width in layers.items():
        plan = lowprec.plan(module, lowprec.load_recipe("mxfp8"), hardware="h200")
        lowprec.apply(module, plan)
        with pytest.raises(UnsupportedError, match=r"the tensor is on cpu.* plan again"):
            module(torch.ones(2, width))
