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
    "mxfp8_1x128 x mxfp8_128x128": 28,
    "mxfp8_1x128": 28,
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


WGRAD_DATA = {
    "gaussian": lambda x: x,
    "outlier channels": lambda x: torch.cat([100 * x[:, ::97], x[:, 1:]], 1)[:, : x.shape[1]],
    "12 octaves across channels": lambda x: x * torch.exp2(torch.linspace(-6, 6, x.shape[1])),
    "12 octaves across tokens": lambda x: x * torch.exp2(torch.linspace(-6, 6, len(x)))[:, None],
}


@pytest.mark.parametrize("data", WGRAD_DATA)
def test_tiles_of_x_cost_wgrad_nothing(data: str) -> None:
    """Why mxfp8-portable casts x in 128x128 tiles there: docs/records/linear-sqnr.jsonl."""
    torch.manual_seed(0)
    x, dy = WGRAD_DATA[data](torch.randn(1024, 256)), torch.randn(1024, 128)
    exact, found = dy.double().T @ x.double(), []
    for left, right in (("mxfp8", "mxfp8"), ("mxfp8_1x128", "mxfp8_128x128")):
        low = [
            lowprec.dequantize(lowprec.quantize(t, cast, axis=-2), torch.float32).double()
            for t, cast in ((dy, left), (x, right))
        ]
        found.append(sqnr(exact, low[0].T @ low[1]))
    assert min(found) >= 28
    assert abs(found[0] - found[1]) <= 0.05


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
    plan = lowprec.plan(model, recipe)
    assert all(layer.converted == (1 not in layer.shape) for layer in plan.layers)
    lowprec.apply(model, plan)
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
    # What runs inside is the same with autocast around forward, around both, and without.
    results = []
    for forward, backward in ((False, False), (True, False), (True, True)):
        layer.zero_grad()
        leaf = x.float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward):
            y = layer(leaf).float()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward):
            y.square().sum().backward()
        results.append((y.detach(), leaf.grad, layer.weight.grad.clone()))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


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
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


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
        (torch.zeros(3, 64, dtype=torch.float16), "torch.float16 input"),
    ],
)
def test_bad_inputs(x: torch.Tensor, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        lowprec.Linear(64, 32, policy=TILES)(x)


# Tracing instantiates autograd.Function inside torch, which warns about itself.
compiled = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def compiled_step(model, x: torch.Tensor, *, autocast: bool, inside: bool) -> list[torch.Tensor]:
    """Gradients of a compiled step with autocast outside or inside the compiled region."""

    def call(value: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast and inside):
            return model(value)

    model.zero_grad()
    step = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast and not inside):
        y = step(x)
    y.float().square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@compiled
@pytest.mark.parametrize(("autocast", "inside"), [(False, False), (True, False), (True, True)])
def test_compiled_equals_eager_and_counts(autocast: bool, inside: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64))
    lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe("mxfp8")))
    x = torch.randn(32, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = model(x)
    y.float().square().sum().backward()
    eager = [p.grad.clone() for p in model.parameters()]
    got = compiled_step(model, x, autocast=autocast, inside=inside)
    for a, b in zip(eager, got, strict=True):
        # torch 2.11 traces the backward of such a region under autocast: the operands are exact in
        # bf16 all the same, but the vendor's bf16 GEMM sums them in another order.
        assert torch.equal(a, b) or (inside and (a - b).norm() <= 0.01 * a.norm())
    gemms = lowprec.observe(model).gemms
    assert gemms["0"] == {
        "fprop": {"mxfp8 x mxfp8_32x32": 2},
        "dgrad": {},
        "wgrad": {"mxfp8": 2},
    }
    assert gemms["2"]["dgrad"] == {"mxfp8 x mxfp8_32x32": 2}


@compiled
def test_two_compiled_forwards_before_one_backward_and_one_graph_for_equal_layers() -> None:
    torch.manual_seed(0)
    layers = [lowprec.Linear(64, 64, policy=TILES) for _ in range(4)]
    x, graphs = torch.randn(8, 64), []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    step = torch.compile(lambda layer, value: layer(value), backend=backend, fullgraph=True)
    (step(layers[0], x) + step(layers[0], 2 * x)).sum().backward()
    for layer in layers[1:]:
        step(layer, x).sum().backward()
    counts = [lowprec.observe(nn.Sequential(layer)).gemms["0"]["wgrad"] for layer in layers]
    assert counts == [{"mxfp8": 2}, {"mxfp8": 1}, {"mxfp8": 1}, {"mxfp8": 1}]


def test_float16_outputs_are_refused() -> None:
    layer = lowprec.Linear(64, 32, policy=TILES)
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(UnsupportedError, match="float16 output"),
    ):
        layer(torch.zeros(3, 64))
    with pytest.raises(UnsupportedError, match="float16 output"):
        layer.half()(torch.zeros(3, 64, dtype=torch.float16))


def test_double_backward_is_refused() -> None:
    layer, x = lowprec.Linear(64, 32, policy=TILES), torch.randn(4, 64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_products_use_the_operands_in_their_own_casts() -> None:
    """With the coarse cast on one side only, error shows on the side that the recipe names."""
    torch.manual_seed(0)
    exact, coarse = "mxfp8", "mxfp4"
    grid = torch.tensor([-1.0, 1.0])[torch.randint(0, 2, (96, 96))]
    fine = torch.randint(9, 16, (96, 96)).float()  # exact in E4M3, not in E2M1
    for text, keeps in ((f"{exact} x {coarse}", "right"), (f"{coarse} x {exact}", "left")):
        one = parse_product(text)
        layer = lowprec.Linear(96, 96, bias=False, policy=LinearPolicy(one, one, one))
        left, right = (fine, grid) if keeps == "right" else (grid, fine)
        with torch.no_grad():
            layer.weight.copy_(right)
        x = left.clone().requires_grad_()
        y = layer(x)
        assert torch.equal(y, (left @ right.T).bfloat16().float())
        # dgrad is dy x w: with dy = left the left cast is again the one that must be exact.
        y.backward(left)
        assert torch.equal(x.grad, (left @ right).bfloat16().float())
        # wgrad is dy x x: both are `left` here, so run it with x = right.
        layer.zero_grad()
        layer(right.clone()).backward(left)
        assert torch.equal(layer.weight.grad, (left.T @ right).bfloat16().float())


def test_bias_gradient_is_summed_in_float32() -> None:
    layer = lowprec.Linear(32, 4, policy=TILES).bfloat16()
    y = layer(torch.zeros(4096, 32, dtype=torch.bfloat16))
    y.backward(torch.full_like(y, 1 + 2**-7))
    assert torch.equal(layer.bias.grad.float(), torch.full((4,), 4096 * (1 + 2**-7)))
