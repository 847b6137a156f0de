"""lowprec.Attention: dense and jagged, rotary, QK-norm, autocast, compile, copies, counts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowprec
from lowprec import Attention, Mask, Rotary, ops
from lowprec.errors import UnsupportedError
from lowprec.rotary import positions
from tests.core.attention_cases import COMPILERS, MXFP8, offsets, one_thread

__all__ = ["one_thread"]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mask", [Mask(), Mask("causal"), Mask("blocks", size=4)], ids=str)
def test_dense_is_the_case_of_equal_lengths(mask: Mask) -> None:
    layer = Attention(mask=mask, policy=MXFP8)
    q, k, v = (drawn(3, 9, heads, 32, seed=heads).requires_grad_() for heads in (4, 2, 2))
    dense = layer(q, k, v)
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    jagged = layer(*flat, offsets((9, 9, 9)))
    assert torch.equal(dense.flatten(0, 1), jagged)
    found = [torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True) for o in (dense, jagged)]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def turned(x: torch.Tensor, at: int, base: float, interleaved: bool) -> torch.Tensor:
    """One token [H, D] as complex numbers times exp(i at base^(-2j / D)), in float64."""
    half = x.shape[-1] // 2
    powers = torch.tensor([base ** (-j / half) for j in range(half)], dtype=torch.float64)
    wave = torch.polar(torch.ones(half, dtype=torch.float64), at * powers)
    pairs = x.double().unflatten(-1, (half, 2) if interleaved else (2, half))
    axis = -1 if interleaved else -2
    a, b = pairs.unbind(axis)
    product = torch.complex(a, b) * wave
    return torch.stack((product.real, product.imag), axis).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_by_position_in_the_sequence(interleaved: bool) -> None:
    rotary = Rotary(base=100.0, dims=16, interleaved=interleaved)
    x, cu = drawn(8, 2, 32), offsets((3, 0, 5))
    found = rotary.rotate(x, positions(cu, cu, 8))
    for row, at in enumerate((0, 1, 2, 0, 1, 2, 3, 4)):
        expected = turned(x[row, :, :16], at, 100.0, interleaved)
        torch.testing.assert_close(found[row, :, :16].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[..., 16:], x[..., 16:])


def test_queries_count_from_the_end_of_the_keys() -> None:
    assert positions(offsets((2, 1)), offsets((5, 1)), 3).tolist() == [3, 4, 0]
    assert positions(offsets(()), offsets(()), 0).tolist() == []


def test_rotary_and_norm_come_before_the_casts() -> None:
    torch.manual_seed(0)
    rotary = Rotary()
    layer = Attention(mask=Mask("causal"), policy=MXFP8, qk_norm=32, rotary=rotary)
    assert layer.q_norm is not None
    assert layer.k_norm is not None
    for norm in (layer.q_norm, layer.k_norm):
        nn.init.normal_(norm.weight)
    q, k, v, cu = drawn(8, 2, 32), drawn(8, 2, 32, seed=1), drawn(8, 2, 32, seed=2), offsets((3, 5))
    at = positions(cu, cu, 8)
    by_hand = [rotary.rotate(norm(t), at) for norm, t in ((layer.q_norm, q), (layer.k_norm, k))]
    expected = ops.attention(*by_hand, v, cu, policy=MXFP8, mask=Mask("causal"))
    assert torch.equal(layer(q, k, v, cu), expected)
    layer(q, k, v, cu).sum().backward()
    assert layer.q_norm.weight.grad is not None
    assert sorted(layer.state_dict()) == ["k_norm.weight", "q_norm.weight"]


class Model(nn.Module):
    """Projections around one attention."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.qkv, self.attention, self.out = nn.Linear(32, 96), attention, nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, cu: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(-3)
        o: torch.Tensor = self.out(self.attention(q, k, v, cu).flatten(-2))
        return o


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    made = Model(Attention(mask=Mask("causal"), qk_norm=16, rotary=Rotary()))
    lowprec.apply(made, lowprec.plan(made, lowprec.load_recipe("mxfp8-attention")))
    return made


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@COMPILERS
def test_compiled_is_eager_and_both_are_counted(model: Model, compiler: str) -> None:
    torch.compiler.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend=compiler)
    for lengths in ((3, 0, 6), (5, 2), (8, 40)):
        x, cu = drawn(sum(lengths), 32), offsets(lengths)
        y, found = model(x, cu), compiled(x, cu)
        assert torch.equal(y, found)
        gradients = [torch.autograd.grad(o.sum(), list(model.parameters())) for o in (y, found)]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
    counts = lowprec.observe(model).gemms["attention"]
    tiles, blocks = "mxfp8_32x32", "mxfp8 x mxfp8_32x32"
    texts = {"qk": tiles, "pv": blocks, "dp": tiles, "dv": blocks, "dq": blocks, "dk": blocks}
    assert counts == {name: {text: 6} for name, text in texts.items()}


def test_autocast_gives_its_dtype(model: Model) -> None:
    with torch.autocast("cpu"):
        y = model(drawn(2, 7, 32))
    assert y.dtype == torch.bfloat16
    y.sum().backward()


def test_a_checkpoint_computes_the_same_again(model: Model) -> None:
    x = drawn(2, 7, 32)
    gradients = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        model.zero_grad()
        run(x).sum().backward()
        gradients.append([one.grad.clone() for one in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_quantized_saving_keeps_what_is_exponentiated_exact() -> None:
    cu = offsets((250, 350))  # an lse of fewer than 1024 numbers is never quantized
    do, *leaves = (drawn(600, 2, 32, seed=seed) for seed in range(4))
    q, k, v = (t.requires_grad_() for t in leaves)

    def gradients() -> tuple[torch.Tensor, ...]:
        o = ops.attention(q * 1, k * 1, v * 1, cu, policy="bf16")
        return torch.autograd.grad(o, (q, k, v), do)

    exact = gradients()
    with lowprec.saved_activations("mxfp8"):
        found = gradients()
    for a, b in zip(found, exact, strict=True):
        # o itself, which delta reads, is kept in eight bits, as for torch's own attention.
        assert (a - b).norm() <= 0.01 * b.norm()


def test_inference_mode(model: Model) -> None:
    x, cu = drawn(9, 32), offsets((4, 5))
    expected = model(x, cu)
    with torch.inference_mode():
        assert torch.equal(model(x.clone(), cu.clone()), expected)


def test_copies_run_and_count_by_themselves(model: Model) -> None:
    x = drawn(2, 7, 32)
    y = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), y)
        assert lowprec.observe(other).gemms["attention"]["qk"] == {"mxfp8_32x32": 2}
    assert lowprec.observe(model).gemms["attention"]["qk"] == {"mxfp8_32x32": 1}


def test_float64_without_casts_is_exact_and_said_so() -> None:
    layer = Attention()
    q = drawn(1, 5, 2, 16).double()
    expected = nn.functional.scaled_dot_product_attention(*(q.transpose(1, 2),) * 3)
    torch.testing.assert_close(layer(q, q, q), expected.transpose(1, 2), rtol=1e-12, atol=1e-12)
    assert lowprec.observe(layer).gemms[""]["qk"] == {"float64": 1}
    half = Attention(policy="bf16 x mxfp8")
    half(q, q, q)
    assert lowprec.observe(half).gemms[""]["qk"] == {"float64 x mxfp8": 1}


def test_a_schedule_follows_the_step() -> None:
    text = lowprec.load_recipe("mxfp8-attention").to_toml()
    rule = text[text.rindex("[[rule]]") :].replace("mxfp8_32x32", "bf16").replace("mxfp8 x ", "")
    from lowprec.recipe import parse_recipe

    recipe = parse_recipe(text + rule.replace("why", "from_step = 2\nwhy"), name="late")
    model = Model(Attention())
    lowprec.apply(model, lowprec.plan(model, recipe))
    x = drawn(2, 7, 32)
    with pytest.raises(UnsupportedError, match=r"lowprec\.set_step"):
        model(x)
    for step in range(3):
        lowprec.set_step(model, step)
        model(x).sum().backward()
    counts = lowprec.observe(model).gemms["attention"]
    assert counts["qk"] == {"mxfp8_32x32": 2, "bf16": 1}
    assert counts["dk"] == {"mxfp8 x mxfp8_32x32": 2, "bf16": 1}


REFUSED = {
    "offsets of keys alone": (
        lambda a, q: a(q[0], q[0], q[0], None, offsets((5,))),
        "without cu_s",
    ),
    "jagged without offsets": (lambda a, q: a(q[0], q[0], q[0]), "all are dense"),
    "dense with offsets": (
        lambda a, q: a(q, q, q, offsets((5,))),
        "not \\[tokens, heads, head dim",
    ),
    "two batches": (lambda a, q: a(q, q.expand(2, -1, -1, -1), q), "of one B"),
    "short keys": (lambda a, q: a(q, q[:, :2], q[:, :2]), "keys may not be fewer than queries"),
    "short bias": (lambda a, q: a(q, q, q, bias=torch.zeros(1, 5, 4)), "more than the bias, 5 x 4"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(UnsupportedError, match=message):
        call(Attention(mask=Mask("causal")), torch.zeros(1, 5, 2, 16))


def test_what_cannot_be_built() -> None:
    with pytest.raises(UnsupportedError, match="unknown activation"):
        Attention(activation="sigmoid")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="gelu gives P no bound"):
        Attention(activation="gelu", policy="bf16 / e4m3*256 x mxfp8 / bf16 / bf16 / bf16 / bf16")
    with pytest.raises(UnsupportedError, match="dims must be even"):
        Rotary(dims=3)
    with pytest.raises(UnsupportedError, match="base must be positive"):
        Rotary(base=0)
    with pytest.raises(UnsupportedError, match="64 dims do not fit head dim 16"):
        Attention(rotary=Rotary(dims=64))(*[torch.zeros(1, 5, 2, 16)] * 3)
