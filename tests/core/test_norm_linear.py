"""NormLinear: the norm and the layer behind it as one step, against the two of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowprec
from lowprec.errors import UnsupportedError
from tests.core.accountant import kept_bytes

# torch does this itself while it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "rms": lambda width: nn.RMSNorm(width, eps=1e-6),
    "layer": nn.LayerNorm,
}
Result = list[torch.Tensor | None]


def built(norm: str = "rms", recipe: str | None = "mxfp8", width: int = 64) -> lowprec.NormLinear:
    torch.manual_seed(0)
    module = lowprec.NormLinear(NORMS[norm](width), nn.Linear(width, 96))
    nn.init.normal_(module.norm.weight)
    if recipe is not None:
        lowprec.apply(module, lowprec.plan(module, lowprec.load_recipe(recipe), hardware="cpu"))
    return module


def result(module: nn.Module, x: torch.Tensor, residual: torch.Tensor | None) -> Result:
    """Output, sum, and gradients of x, residual and parameters."""
    lowprec.set_step(module, 3)
    module.zero_grad()
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, residual)]
    found = module(*leaves)
    y, summed = found if residual is not None else (found, None)
    loss = y.float().sin().sum() + (0 if summed is None else summed.float().cos().sum())
    loss.backward()
    grads = [None if t is None else t.grad for t in leaves]
    return [y.detach(), summed, *grads, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-rotated-wgrad", "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", NORMS)
def test_equals_the_norm_followed_by_the_layer(
    norm: str, dtype: torch.dtype, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, but for dx of RMSNorm, whose backward here is a formula and not a graph."""
    module = built(norm, None).to(dtype)
    two = copy.deepcopy(module)
    monkeypatch.setattr(two, "_is_one_step", lambda x: False, raising=False)
    for one in (module, two):
        lowprec.apply(one, lowprec.plan(one, lowprec.load_recipe(recipe), hardware="cpu"))
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(5, 8, 64, generator=generator).to(dtype) for _ in "ab")
    for other in (None, residual):
        got, want = result(module, x, other), result(two, x, other)
        for place, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            if mine is None or theirs is None:
                assert mine is theirs
            elif norm == "layer" or place not in (2, 3):
                assert torch.equal(mine, theirs), place
            else:
                error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
                assert error <= (2**-8 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_bytes_kept_for_backward(norm: str) -> None:
    """What was normalized, in bf16, and nothing else: half of what BF16 keeps."""
    module = built(norm, None, width=512).bfloat16()
    x = torch.randn(1024, 512).bfloat16()
    with torch.no_grad():
        n = module.norm(x)
    plain = kept_bytes(module.linear(n)) + x.nbytes  # at least: a norm keeps its input
    lowprec.apply(module, lowprec.plan(module, lowprec.load_recipe("mxfp8"), hardware="cpu"))
    key = module.linear.lowprec_products.key
    y, summed = module(x, torch.zeros_like(x))
    assert kept_bytes(y, summed, without=[key]) == x.nbytes
    assert x.nbytes <= 0.55 * plain
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert kept_bytes(module(x.clone().requires_grad_()), without=[key]) == x.nbytes
    with torch.no_grad():
        assert module(x).grad_fn is None


@pytest.mark.parametrize("norm", NORMS)
def test_compiled_without_graph_breaks_equals_eager(norm: str) -> None:
    module = built(norm)
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(16, 64, generator=generator) for _ in "ab")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for got, want in zip(result(compiled, x, residual), result(module, x, residual), strict=True):
        assert got is want or torch.equal(got, want)


def test_is_two_modules_where_it_cannot_be_one_step() -> None:
    module = built()
    seen: list[str] = []
    x = torch.randn(4, 64)
    one = module(x)
    handle = module.norm.register_forward_hook(lambda *_: seen.append("norm"))
    assert torch.equal(module(x), one)
    handle.remove()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).dtype == torch.bfloat16
    plain = built(recipe=None)
    handle = plain.linear.register_forward_pre_hook(lambda *_: seen.append("linear"))
    assert torch.equal(plain(x), plain.linear(plain.norm(x)))
    assert seen == ["norm", "linear", "linear"]


def test_shapes_states_and_copies() -> None:
    module = built("layer")
    assert list(module.state_dict()) == ["norm.weight", "norm.bias", "linear.weight", "linear.bias"]
    x = torch.randn(3, 5, 64)
    for shape in ((0, 64), (64,), (3, 0, 64)):
        assert module(torch.ones(shape, requires_grad=True)).shape == (*shape[:-1], 96)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
    frozen = built()
    frozen.linear.weight.requires_grad_(False)
    frozen(x).sum().backward()
    assert frozen.linear.weight.grad is None
    assert frozen.norm.weight.grad is not None
    lowprec.restore(module)
    assert type(module.linear) is nn.Linear


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="got GroupNorm and Linear"):
        lowprec.NormLinear(nn.GroupNorm(2, 64), nn.Linear(64, 8))
    with pytest.raises(UnsupportedError, match=r"runs over \(4, 64\), the linear layer takes 64"):
        lowprec.NormLinear(nn.LayerNorm((4, 64)), nn.Linear(64, 8))
    with pytest.raises(UnsupportedError, match="both must be alike"):
        built()(torch.ones(2, 64), torch.ones(3, 64))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        built()(torch.ones(2, 32))
