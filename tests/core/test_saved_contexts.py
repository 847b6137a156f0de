"""saved_activations in use: nesting, threads, refusals, checkpoints, torch.compile, our layers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowprec
from lowprec.errors import UnsupportedError
from lowprec.formats import FORMATS
from lowprec.saved import saved_activations
from tests.core.accountant import kept_bytes, quantized_kept
from tests.core.test_saved import Function, leaf, mlp, sqnr

# Contexts


def bits(y: torch.Tensor) -> list[int]:
    return [q.format.element.bits for q in quantized_kept(y)]


def test_the_innermost_context_applies_and_each_exit_restores() -> None:
    x, outer, inner = leaf(64, 64), saved_activations("mxfp4"), saved_activations("mxfp8")
    with outer:
        a = F.silu(x)
        with inner:
            b = F.silu(x)
            with inner, outer:
                c = F.silu(x)
            d = F.silu(x)
        e = F.silu(x)
    f = F.silu(x)
    with inner:
        g = F.silu(x)
    assert [bits(y) for y in (a, b, c, d, e, f, g)] == [[4], [8], [4], [8], [4], [], [8]]


def test_an_error_inside_leaves_the_context() -> None:
    x, manager = leaf(64, 64), saved_activations("mxfp8")
    with pytest.raises(ZeroDivisionError), manager:
        raise ZeroDivisionError
    assert bits(F.silu(x)) == []
    with manager:
        assert bits(F.silu(x)) == [8]


def test_one_object_in_several_threads() -> None:
    x, manager = leaf(64, 64), saved_activations("mxfp8")
    entered, checked = threading.Barrier(2), threading.Barrier(2)
    found: dict[str, list[int]] = {}

    def inside() -> None:
        with manager:
            entered.wait(60)
            found["inside"] = bits(F.silu(x))
            checked.wait(60)

    def outside() -> None:
        entered.wait(60)
        found["outside"] = bits(F.silu(x))
        checked.wait(60)
        with manager:
            found["later"] = bits(F.silu(x))

    threads = [threading.Thread(target=one) for one in (inside, outside)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {"inside": [8], "outside": [], "later": [8]}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_entering_without_gradients_is_refused(mode: Callable[[], Any]) -> None:
    manager = saved_activations("mxfp8")
    with mode(), pytest.raises(UnsupportedError, match=r"leave torch\.no_grad"), manager:
        pass
    x = leaf(64, 64)
    with manager:
        with mode():
            assert not F.silu(x).requires_grad
        y = F.silu(x)
    assert bits(y) == [8]
    assert bits(F.silu(x)) == []


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("mxfp4:sr", "stochastic rounding could not be repeated"),
        ("mxfp9", "did you mean"),
        ("mxfp8:exact", "does not apply"),
        (FORMATS["mxfp8"], "takes a Cast or its text"),
        (8, "takes a Cast or its text"),
        (None, "takes a Cast or its text"),
    ],
    ids=str,
)
def test_formats_that_are_refused(format: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        saved_activations(format)


# Checkpointing, compilation, wrapped layers


@pytest.mark.parametrize("reentrant", [False, True])
def test_around_checkpointing(reentrant: bool) -> None:
    """What a checkpoint keeps is its input, quantized; the rest is recomputed from that."""
    model, x = mlp(64, 3, torch.float32), leaf(64, 64)

    def run(x: torch.Tensor) -> torch.Tensor:
        for block in (model[:3], model[3:6], model[6:]):
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    inputs = (x, *model.parameters())
    manager = saved_activations("mxfp8")
    with manager:
        y = run(x)
        assert len(manager._packed) == 3
        y.sum().backward()
    got = [one.grad for one in inputs]
    exact = torch.autograd.grad(model(x).sum(), inputs)
    assert min(sqnr(e, g) for e, g in zip(exact, got, strict=True) if g is not None) > 25
    assert all(g is not None for g in got)


def test_inside_a_checkpoint_codes_are_kept_instead_of_recomputed() -> None:
    model, x, calls = mlp(64, 3, torch.float32), leaf(64, 64), []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        with saved_activations("mxfp8"):
            return model(x)  # type: ignore[no-any-return]

    got = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), x)[0]
    assert len(calls) == 1
    assert sqnr(torch.autograd.grad(model(x).sum(), x)[0], got) > 25
    with pytest.raises(UnsupportedError, match="around the call of checkpoint"):
        checkpoint(block, x, use_reentrant=True)


def compiled(function: Function, *, fullgraph: bool = True) -> Function:
    torch._dynamo.reset()
    result: Function = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
    return result


def test_around_compiled_code_only_its_inputs_are_quantized() -> None:
    model, x = mlp(64, 2, torch.float32), leaf(64, 64)
    run = compiled(model)
    with saved_activations("mxfp8"):
        y = run(x)
    assert bits(y) == [8]
    assert sqnr(*(torch.autograd.grad(f(x).sum(), x)[0] for f in (model, run))) > 100
    assert sqnr(torch.autograd.grad(model(x).sum(), x)[0], torch.autograd.grad(y.sum(), x)[0]) > 25
    batch = x.detach()
    with saved_activations("mxfp8"):
        got = torch.autograd.grad(run(batch).sum(), list(model.parameters()))
    plain = torch.autograd.grad(run(batch).sum(), list(model.parameters()))
    assert all(torch.equal(g, p) for g, p in zip(got, plain, strict=True))


def test_inside_compiled_code_it_is_refused_or_breaks_the_graph() -> None:
    x, manager = leaf(64, 64), saved_activations("mxfp8")

    def fresh(x: torch.Tensor) -> torch.Tensor:
        with saved_activations("mxfp8"):
            return F.silu(x * 1)

    def given(x: torch.Tensor) -> torch.Tensor:
        with manager:
            return F.silu(x * 1)

    for function, message in ((fresh, "enter it around the call"), (given, "saved_activations")):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
            compiled(function)(x)
        y = compiled(function, fullgraph=False)(x)
        assert (
            sqnr(torch.autograd.grad(F.silu(x).sum(), x)[0], torch.autograd.grad(y.sum(), x)[0])
            > 25
        )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("compile_it", [False, True])
def test_with_wrapped_layers(compile_it: bool) -> None:
    plain, model = mlp(128, 3, torch.bfloat16), mlp(128, 3, torch.bfloat16)
    lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe("mxfp8")))
    run: Function = compiled(model) if compile_it else model
    x = leaf(256, 128, dtype=torch.bfloat16)
    with saved_activations("mxfp8"):
        y = run(x)
    if not compile_it:
        assert kept_bytes(y) < 0.6 * kept_bytes(plain(x))
    y.float().square().sum().backward()
    plain(x.detach()).float().square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert sqnr(one.grad, other.grad) > 15


def test_four_bit_context_over_layers_that_keep_eight() -> None:
    plain, model = mlp(512, 6, torch.bfloat16), mlp(512, 6, torch.bfloat16)
    lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe("mxfp8")))
    x = leaf(256, 512, dtype=torch.bfloat16)
    with saved_activations("mxfp4"):
        kept = kept_bytes(model(x))
    assert kept / kept_bytes(plain(x)) == pytest.approx(0.350, abs=6e-4)


class Block(nn.Module):
    """A pre-norm transformer block with fused attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return result


@pytest.mark.parametrize(("text", "ratio"), [("mxfp8", 0.640), ("mxfp4", 0.422)])
def test_transformer_blocks(text: str, ratio: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(256, 4) for _ in range(4)]).bfloat16()
    x = leaf(2, 256, 256, dtype=torch.bfloat16)
    plain = model(x)
    with saved_activations(text):
        y = model(x)
    assert kept_bytes(y) / kept_bytes(plain) == pytest.approx(ratio, abs=6e-4)
    inputs = (x, *model.parameters())
    exact, got = (torch.autograd.grad(one.float().square().sum(), inputs) for one in (plain, y))
    joined = [torch.cat([g.flatten().double() for g in gs]) for gs in (exact, got)]
    assert sqnr(*joined) > (28 if text == "mxfp8" else 14)
