"""docs/failures.md: its table is whole and every test in it exists; and the tests only it needs."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowprec
from lowprec.policy import LinearPolicy, parse_product
from lowprec.recipe import shipped_recipes

ROOT = Path(__file__).parent.parent.parent
TILES = "mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8"
TABLE = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (ROOT / "docs" / "failures.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| *\d", line)
]


def test_the_table_has_all_forty_rows_and_says_what_is_missing() -> None:
    assert [row[0] for row in TABLE] == [str(number) for number in range(1, 41)]
    for number, elsewhere, ours, shown in TABLE:
        told, thread = re.fullmatch(r"(.*) \(([\w-]+#\d+)\)", elsewhere).groups()
        assert len(told.split()) <= 15, number
        assert thread
        assert ours, number
        assert "`tests/" in shown, number
    threads = [row[1].rpartition("(")[2] for row in TABLE]
    assert len(set(threads)) == 40


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_every_test_in_the_table_exists(row: list[str]) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row[3])
    assert len(named) == row[3].count("::")
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{file} has no {name}"


def layer_of(k: int, n: int, policy: str) -> lowprec.Linear:
    torch.manual_seed(0)
    return lowprec.Linear(k, n, policy=LinearPolicy.parse(policy), name="layer")


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 95, 96, 127, 128, 129])
def test_row_counts_around_blocks_and_tiles(count: int) -> None:
    layer = layer_of(64, 96, TILES)
    x, dy = normal(count, 64).requires_grad_(), normal(count, 96, seed=2)
    layer(x).backward(dy)
    assert relative(layer.weight.grad, dy.double().T @ x.detach().double()) < 0.05
    assert relative(x.grad, dy.double() @ layer.weight.detach().double()) < 0.05


@pytest.mark.parametrize("policy", [TILES, "mxfp4", "fp8_rowwise"])
def test_rows_of_zeros_change_no_other_row(policy: str) -> None:
    """What pads a packed batch to a block of its own does nothing to the rows that are real."""
    layer, x, dy = layer_of(64, 96, policy), normal(45, 64), normal(45, 96, seed=2)
    results = []
    for padding in (0, 19, 64):
        layer.zero_grad()
        leaf = torch.cat([x, torch.zeros(padding, 64)]).requires_grad_()
        y = layer(leaf)
        y.backward(torch.cat([dy, torch.zeros(padding, 96)]))
        assert leaf.grad[45:].count_nonzero() == 0
        results.append((y.detach()[:45], leaf.grad[:45], layer.weight.grad.clone()))
    for other in results[1:]:
        assert torch.equal(other[0], results[0][0])
        assert torch.equal(other[1], results[0][1])
        # A longer contraction may be summed in another order: one bf16 rounding apart.
        assert torch.allclose(other[2], results[0][2], rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("recipe", [n for n in shipped_recipes() if "attention" not in n])
def test_multiples_of_32_that_are_none_of_128(recipe: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32 + 64 * i, 96 + 64 * i, bias=False) for i in range(3)))
    wide = [m.weight.detach().double() for m in model]
    plan = lowprec.plan(model, lowprec.load_recipe(recipe), steps=100)
    lowprec.set_step(lowprec.apply(model, plan), 0)
    for layer, weight in zip(model, wide, strict=True):
        n, k = weight.shape
        x, dy = normal(96, k).requires_grad_(), normal(96, n, seed=2)
        y = layer(x)
        y.backward(dy)
        for got, exact in (
            (y.detach(), x.detach().double() @ weight.T),
            (x.grad, dy.double() @ weight),
            (layer.weight.grad, dy.double().T @ x.detach().double()),
        ):
            assert relative(got, exact) < 0.4


def test_stochastic_gradients_average_to_the_exact_ones() -> None:
    layer, steps = layer_of(32, 32, "bf16 / mxfp4:sr / mxfp4:sr"), 100
    x, dy = normal(32, 32), normal(32, 32, seed=2)
    exact = {
        "dx": dy.double() @ layer.weight.detach().double(),
        "dw": dy.double().T @ x.double(),
    }
    single: dict[str, float] = {}
    total = {name: torch.zeros(32, 32, dtype=torch.float64) for name in exact}
    for step in range(steps):
        lowprec.set_step(layer, step)
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        layer(leaf).backward(dy)
        assert leaf.grad.count_nonzero() > 900
        assert layer.weight.grad.count_nonzero() > 900
        for name, gradient in (("dx", leaf.grad), ("dw", layer.weight.grad)):
            single.setdefault(name, relative(gradient, exact[name]))
            total[name] += gradient.double()
    for name, value in total.items():
        assert relative(value / steps, exact[name]) < 0.25 * single[name], name


def test_the_scale_rule_reaches_every_product() -> None:
    outputs: dict[str, list[torch.Tensor]] = {}
    x, dy = normal(64, 64), normal(64, 64, seed=2)
    for rule in ("floor", "rceil", "ceil", "even"):
        layer = layer_of(64, 64, f"mxfp4:{rule}")
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        outputs[rule] = [y.detach(), leaf.grad, layer.weight.grad]
        ran = lowprec.observe(nn.Sequential(layer)).gemms["0"]
        product = str(parse_product(f"mxfp4:{rule}"))
        assert ran == {name: {product: 1} for name in ("fprop", "dgrad", "wgrad")}
    rules = list(outputs)
    for index, one in enumerate(rules):
        for other in rules[index + 1 :]:
            for a, b in zip(outputs[one], outputs[other], strict=True):
                assert not torch.equal(a, b), (one, other)


class Kept:
    """The tensors that are kept for backward inside the block, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self.owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.tensors: list[torch.Tensor] = []

    def __enter__(self) -> "Kept":
        self.hooks: Any = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    def pack(self, t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in self.owned:
            self.tensors.append(t)
        return t

    @property
    def facts(self) -> list[tuple[torch.Size, torch.dtype]]:
        return [(t.shape, t.dtype) for t in self.tensors]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


@pytest.mark.parametrize(
    ("wgrad", "most"), [("mxfp8", 0.52), ("mxfp4", 0.27), ("mxfp6_e2m3", 0.40), ("nvfp4", 0.29)]
)
def test_bytes_kept_for_backward(wgrad: str, most: float) -> None:
    """The cast input and nothing else: no copy of x, none of the weight, for three layers."""
    torch.manual_seed(0)
    policy = LinearPolicy.parse(f"mxfp8 / mxfp8 / {wgrad}")
    model = nn.Sequential(*(lowprec.Linear(256, 256, policy=policy) for _ in range(3)))
    x = normal(128, 256).requires_grad_()
    with Kept(model) as kept:
        y = model(x)
    assert kept.bytes <= most * 3 * x.numel() * 2  # of what BF16 keeps
    y.sum().backward()
    model.requires_grad_(False)
    with Kept(model) as kept:
        model(x)
    assert kept.bytes == 0


def test_recompute_keeps_what_forward_kept_in_the_layers_precision() -> None:
    """checkpoint itself compares the tensors of both times by number, shape and dtype."""
    layer, x = layer_of(64, 96, TILES), normal(32, 64).requires_grad_()
    facts = []
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            with Kept(layer) as kept:
                layer(x)
            facts.append(kept.facts)
            y = checkpoint(layer, x, use_reentrant=False)
        y.float().sum().backward()
    assert facts[0] == facts[1]
    assert [dtype for _, dtype in facts[0]] == [torch.uint8, torch.uint8]
    ran = lowprec.observe(nn.Sequential(layer)).gemms["0"]
    assert ran["fprop"] == {"mxfp8 x mxfp8_32x32": 6}
    assert ran["wgrad"] == {"mxfp8": 2}
