"""Linear: accuracy by product, gradcheck, odd shapes, autocast, counts, inertness."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowprec
from lowprec.errors import UnsupportedError
from lowprec.policy import ALL_BF16, LinearPolicy, parse_product


def policy(text: str) -> LinearPolicy:
    products = (text.split(" / ") * 3)[:3]
    return LinearPolicy(*map(parse_product, products))


TILES = policy("mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8")
ROWS = policy("mxfp8")


def sqnr(exact: torch.Tensor, got: torch.Tensor) -> float:
    exact, got = exact.double(), got.double()
    return float(10 * torch.log10((exact**2).sum() / ((exact - got) ** 2).sum()))


def products(layer_policy: LinearPolicy, rows: int = 512, n: int = 256, k: int = 384):
    """y, dX, dW of a wrapped layer and of float64, on Gaussian data."""
    torch.manual_seed(3)
    layer = lowprec.Linear(k, n, bias=False, policy=layer_policy)
    nn.init.normal_(layer.weight, std=k**-0.5)
    x, dy = torch.randn(rows, k, requires_grad=True), torch.randn(rows, n)
    y = layer(x)
    y.backward(dy)
    wide, x64, dy64 = layer.weight.double(), x.detach().double(), dy.double()
    wide = wide.detach()
    exact = (x64 @ wide.T, dy64 @ wide, dy64.T @ x64)
    return exact, (y.detach(), x.grad, layer.weight.grad)


def test_mxfp8_sqnr_of_all_three_products() -> None:
    results = {}
    for name, layer_policy in (("rows", ROWS), ("tiles", TILES)):
        exact, got = products(layer_policy)
        results[name] = [sqnr(e, g) for e, g in zip(exact, got, strict=True)]
        assert min(results[name]) >= 28.0, results
    for rows, tiles in zip(results["rows"], results["tiles"], strict=True):
        assert abs(rows - tiles) < 0.1, results


# text, lowest SQNR in dB of any product on Gaussian data
FLOORS = {
    "bf16": 45,
    "fp8_rowwise": 27,
    "fp8_tensorwise": 27,
    "mxfp8_1x128 x mxfp8_128x128 / mxfp8_1x128 x mxfp8_128x128 / mxfp8_1x128": 28,
    "fp8_1x128": 28,
    "mxfp8_e5m2": 22,
    "mxfp6_e2m3": 27,
    "mxfp6_e3m2": 22,
    "mxfp4": 15,
    "nvfp4": 16,
}


@pytest.mark.parametrize("text", FLOORS)
def test_every_format_trains_in_all_three_products(text: str) -> None:
    exact, got = products(policy(text), rows=256, n=128, k=160)
    assert min(sqnr(e, g) for e, g in zip(exact, got, strict=True)) >= FLOORS[text]


def test_each_product_follows_its_own_policy() -> None:
    """Only the product that is quantized loses accuracy."""
    for index in range(3):
        texts = ["bf16"] * 3
        texts[index] = "mxfp4"
        exact, got = products(policy(" / ".join(texts)), rows=256, n=128, k=160)
        quality = [sqnr(e, g) for e, g in zip(exact, got, strict=True)]
        assert quality[index] < 20
        assert min(q for i, q in enumerate(quality) if i != index) > 45


def test_float64_gradcheck_with_all_products_bf16() -> None:
    torch.manual_seed(0)
    layer = lowprec.Linear(5, 4, dtype=torch.float64, policy=ALL_BF16)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    inputs = (x, layer.weight, layer.bias)
    assert torch.autograd.gradcheck(
        lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,)), inputs
    )
    counts = lowprec.observe(nn.Sequential(layer)).gemms["0"]
    assert set(counts["fprop"]) == {"float64"}


def test_bf16_product_is_bf16_operands_float32_sums_bf16_result() -> None:
    torch.manual_seed(0)
    layer, x = lowprec.Linear(96, 64, policy=ALL_BF16), torch.randn(40, 96)
    exact = x.bfloat16().double() @ layer.weight.bfloat16().double().T + layer.bias.double()
    y, exact = layer(x).detach(), exact.detach()
    assert y.dtype == torch.float32
    assert torch.equal(y, y.bfloat16().float())
    # float32 sums can differ from exact ones by one bf16 rounding, and in few places.
    ulp = exact.abs().float() * 2.0**-7
    assert ((y - exact).abs() <= ulp).all()
    assert (y.bfloat16() != exact.bfloat16()).float().mean() < 0.01


@pytest.mark.parametrize("rows", [0, 1, 7, 63, 100])
@pytest.mark.parametrize(("n", "k"), [(64, 39), (1, 39), (39, 1), (33, 96)])
def test_odd_shapes_forward_and_backward(rows: int, n: int, k: int) -> None:
    torch.manual_seed(rows)
    model = nn.Sequential(nn.Linear(k, n), nn.Linear(n, 64))
    twin = nn.Sequential(nn.Linear(k, n), nn.Linear(n, 64))
    twin.load_state_dict(model.state_dict())
    recipe = lowprec.load_recipe("bf16") if 1 in (n, k) else lowprec.load_recipe("mxfp8")
    lowprec.apply(model, lowprec.plan(model, recipe))
    x = torch.randn(rows, k)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for m, value in zip((model, twin), inputs, strict=True):
        m(value).sum().backward()
    for (name, p), (_, q) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert p.grad is not None, name
        assert p.grad.isfinite().all()
        if rows == 0:
            assert p.grad.count_nonzero() == 0, name
        else:
            assert (p.grad - q.grad).norm() <= 0.12 * q.grad.norm() + 1e-6, name
    assert inputs[0].grad is not None
    assert inputs[0].grad.shape == (rows, k)


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (2, 0, 64)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = lowprec.Linear(64, 32, policy=TILES)
    x = torch.randn(*shape, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], 32)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_strided_inputs_and_gradients() -> None:
    torch.manual_seed(0)
    layer = lowprec.Linear(64, 32, policy=TILES)
    wide = torch.randn(64, 100)
    for x in (wide.T, wide.T[::2], wide[:1, :64].expand(9, 64)):
        got, want = layer(x), layer(x.contiguous())
        assert torch.equal(got, want)
        dy = torch.randn(32, x.shape[0]).T
        grads = []
        for g in (dy, dy.contiguous()):
            layer.zero_grad()
            layer(x).backward(g)
            grads.append(layer.weight.grad.clone())
        assert torch.equal(*grads)


def test_autocast_gives_the_dtypes_of_nn_linear() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 32)
    layer = lowprec.Linear(64, 32, policy=TILES)
    layer.load_state_dict(plain.state_dict())
    for dtype in (torch.float32, torch.bfloat16):
        x, seen = torch.randn(8, 64).to(dtype), []
        for module in (plain, layer):
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = module(leaf)
            y.float().sum().backward()
            seen.append((y.dtype, leaf.grad.dtype, module.weight.grad.dtype))
        assert seen[0] == seen[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = lowprec.Linear.forward(layer, torch.randn(8, 64))
    assert inside.dtype == torch.bfloat16


def test_large_bias_and_its_gradient() -> None:
    torch.manual_seed(0)
    layer, x = lowprec.Linear(64, 32, policy=TILES), torch.randn(128, 64)
    nn.init.constant_(layer.bias, 100.0)
    y = layer(x)
    assert (y.mean() - 100).abs() < 1
    y.sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((32,), 128.0))


def test_frozen_weight_still_passes_gradients_down() -> None:
    torch.manual_seed(0)
    layer, x = lowprec.Linear(64, 32, policy=TILES), torch.randn(16, 64, requires_grad=True)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad.norm() > 0
    assert layer.weight.grad is None
    counts = lowprec.observe(nn.Sequential(layer)).gemms["0"]
    assert counts["wgrad"] == {}
    assert counts["dgrad"] == {"mxfp8 x mxfp8_32x32": 1}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    torch.manual_seed(0)
    layer, x = lowprec.Linear(64, 64, policy=TILES), torch.randn(32, 64, requires_grad=True)
    layer(x).square().sum().backward()
    plain = layer.weight.grad.clone(), x.grad.clone()
    layer.zero_grad()
    x.grad = None
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(layer.weight.grad, plain[0])
    assert torch.equal(x.grad, plain[1])


def test_counts_are_what_ran() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe("mxfp8-safe")))
    for _ in range(3):
        model(torch.randn(8, 64)).sum().backward()
    with torch.no_grad():
        model(torch.randn(8, 64))
    gemms = lowprec.observe(model).gemms
    assert gemms["0"] == {"fprop": {"mxfp8 x mxfp8_32x32": 4}, "dgrad": {}, "wgrad": {"bf16": 3}}
    assert gemms["1"]["dgrad"] == {"bf16": 3}
    assert "gemm_counts" not in "".join(model.state_dict())


def test_nothing_touches_torch_random_state() -> None:
    layer, x = lowprec.Linear(64, 64, policy=TILES), torch.randn(8, 64)
    before = torch.get_rng_state()
    layer(x).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_repr_shows_the_precision() -> None:
    text = repr(lowprec.Linear(64, 32, policy=TILES))
    assert "in_features=64" in text
    assert "fprop=mxfp8 x mxfp8_32x32" in text


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.zeros(3, 5), r"in_features=64 got an input of shape \(3, 5\)"),
        (torch.zeros(()), "last dimension must be 64"),
        (torch.zeros(3, 64, dtype=torch.bfloat16), "use autocast"),
        (torch.zeros(3, 64, dtype=torch.int64), "torch.int64 input"),
    ],
)
def test_bad_inputs(x: torch.Tensor, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        lowprec.Linear(64, 32, policy=TILES)(x)


# Tracing instantiates autograd.Function inside torch, which warns about itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_equals_eager_and_counts() -> None:
    torch.manual_seed(0)
    layer, x = lowprec.Linear(64, 64, policy=TILES), torch.randn(32, 64)
    layer(x).sum().backward()
    eager = layer.weight.grad.clone()
    layer.zero_grad()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    assert torch.equal(layer.weight.grad, eager)
    assert lowprec.observe(nn.Sequential(layer)).gemms["0"]["wgrad"] == {"mxfp8": 2}
