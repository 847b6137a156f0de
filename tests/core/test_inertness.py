"""Inertness: a wrapped model differs from the plain one in precision and in nothing else.

Most tests run in a world where precision makes no difference: inputs, gradients and biases are -1
and 1, each weight row holds a single -1 or 1. MXFP8 and BF16 hold every number of such a network
exactly, so that results must be those of nn.Linear bit for bit. Rotated products cannot be exact;
there the same facts are held within a tolerance.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import lowprec
from lowprec.errors import LowprecError
from lowprec.policy import LinearPolicy
from lowprec.recipe import Recipe, Rule

POLICIES = {
    "bf16": "bf16",
    "mxfp8": "mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8",
    "random": "mxfp8 x mxfp8_32x32 / mxfp4:sr + rht32:seeded / nvfp4:sr x nvfp4 + rht16",
}
# Relative error of a tensor against the plain model's; 0: bit for bit.
TOLERANCE = {"bf16": 0.0, "mxfp8": 0.0, "random": 0.5}


@pytest.fixture(params=POLICIES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def wrap(model: nn.Module, kind: str) -> nn.Module:
    policy = LinearPolicy.parse(POLICIES.get(kind, kind))
    recipe = Recipe("test", "test", (Rule("*", "linear", policy, "test"),))
    return lowprec.apply(model, lowprec.plan(model, recipe))


def signs(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0


def linear(k: int, n: int, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    """A layer whose products with -1 and 1 are exact in every precision without rotation."""
    layer = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        layer.weight.zero_()
        rows = torch.arange(n)
        layer.weight[rows, (rows * 7 + seed) % k] = signs(n, seed=seed)
        if layer.bias is not None:
            layer.bias.copy_(signs(n, seed=seed + 3))
    return layer


def net() -> nn.Sequential:
    return nn.Sequential(linear(64, 96), nn.ReLU(), linear(96, 48, seed=1))


def twins(build: Callable[[], nn.Module], kind: str) -> tuple[Any, Any]:
    """The plain model and the wrapped one, with the same weights."""
    plain = build()
    return plain, wrap(copy.deepcopy(plain), kind)


def step(model: Any, x: torch.Tensor, *, seed: int = 2) -> dict[str, torch.Tensor]:
    """Output and all gradients of one step."""
    leaf = x.detach().requires_grad_()
    y = model(leaf)
    y.backward(signs(*y.shape, seed=seed).to(y))
    found = {"y": y.detach(), "dx": leaf.grad}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: t.clone() for name, t in found.items() if t is not None}


def agree(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], kind: str, tolerance: float = 0
) -> None:
    """The same tensors by name, shape, dtype and strides, and the same numbers."""
    assert got.keys() == want.keys()
    for name, a in got.items():
        b = want[name]
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), name
        if allowed := max(tolerance, TOLERANCE.get(kind, 0.0)):
            assert (a.double() - b.double()).norm() <= allowed * b.double().norm(), name
        else:
            assert torch.equal(a, b), name


def counts(model: nn.Module, name: str) -> dict[str, int]:
    """How often each product of a layer ran."""
    return {key: sum(ran.values()) for key, ran in lowprec.observe(model).gemms[name].items()}


def test_a_network_with_all_its_gradients(kind: str) -> None:
    plain, ours = twins(net, kind)
    agree(step(ours, signs(32, 64)), step(plain, signs(32, 64)), kind)


def test_a_large_bias_and_its_gradient(kind: str) -> None:
    plain, ours = twins(lambda: nn.Sequential(linear(64, 96)), kind)
    for model in (plain, ours):
        nn.init.constant_(model[0].bias, 100.0)
    got, want = (step(model, signs(32, 64)) for model in (ours, plain))
    assert torch.equal(got["y"], want["y"])
    assert torch.equal(got["0.bias"], want["0.bias"])
    assert got["y"].mean() > 99
    agree(got, want, kind)


def test_tied_weights_are_one_parameter_and_its_gradient_the_sum(kind: str) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(linear(64, 64), nn.ReLU(), linear(64, 64))
        model[2].weight = model[0].weight
        return model

    plain, ours = twins(tied, kind)
    assert ours[0].weight is ours[2].weight
    assert len(list(ours.parameters())) == 3
    got = step(ours, signs(32, 64))
    agree(got, step(plain, signs(32, 64)), kind)
    apart = twins(lambda: nn.Sequential(linear(64, 64), nn.ReLU(), linear(64, 64)), kind)[1]
    each = step(apart, signs(32, 64))
    total = each["0.weight"] + each["2.weight"]
    assert (got["0.weight"] - total).norm() <= TOLERANCE[kind] * total.norm()


def test_a_layer_used_twice_in_one_forward(kind: str) -> None:
    def shared() -> nn.Module:
        layer = linear(64, 64)
        return nn.Sequential(layer, nn.ReLU(), layer)

    plain, ours = twins(shared, kind)
    agree(step(ours, signs(32, 64)), step(plain, signs(32, 64)), kind)
    assert counts(ours, "0") == {"fprop": 2, "dgrad": 2, "wgrad": 2}


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")])
def test_frozen_parameters(kind: str, frozen: tuple[str, ...]) -> None:
    """Flags stay, the frozen get no gradient, and the gradient reaches what comes before."""

    def build() -> nn.Module:
        model = net()
        for layer in (model[0], model[2]):
            for name in frozen:
                getattr(layer, name).requires_grad_(False)
        return model

    plain, ours = twins(build, kind)
    flags = [[p.requires_grad for p in model.parameters()] for model in (plain, ours)]
    assert flags[0] == flags[1]
    got = step(ours, signs(32, 64))
    agree(got, step(plain, signs(32, 64)), kind)
    assert got["dx"].norm() > 0
    assert not any(name.endswith(frozen) for name in got)
    assert counts(ours, "2") == {"fprop": 1, "dgrad": 1, "wgrad": 0 if "weight" in frozen else 1}


def test_only_what_needs_a_gradient_makes_a_graph(kind: str) -> None:
    plain, ours = twins(net, kind)
    x = signs(4, 64)
    for frozen in (False, True):
        for model in (plain, ours):
            model.requires_grad_(not frozen)
            y = model(x)
            assert y.requires_grad is not frozen
            assert (y.grad_fn is None) is frozen
            with torch.no_grad():
                assert not model(x).requires_grad


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it, as it starts: `up` is all zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down = linear(64, 64), linear(64, 16, bias=False, seed=2)
        self.up = nn.Linear(16, 64, bias=False)
        nn.init.zeros_(self.up.weight)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def test_a_frozen_base_with_an_adapter(kind: str) -> None:
    plain, ours = twins(Adapted, kind)
    x = signs(32, 64)
    x[3] = 0  # a row of zeros has no largest magnitude
    got = step(ours, x)
    agree(got, step(plain, x), kind)
    assert set(got) == {"y", "dx", "down.weight", "up.weight"}
    assert got["dx"].norm() > 0
    before = {name: p.detach().clone() for name, p in ours.named_parameters()}
    torch.optim.SGD(ours.parameters(), lr=0.1).step()
    changed = {n for n, p in ours.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"up.weight"}


def watched(model: nn.Sequential) -> tuple[list[Any], list[Any]]:
    """Every kind of hook, and what those of modules and of parameters get to see."""
    of_modules: list[Any] = []
    of_parameters: list[Any] = []

    def facts(values: Any) -> list[Any]:
        return [None if v is None else (tuple(v.shape), v.dtype) for v in values]

    def note(name: str) -> Callable[..., None]:
        return lambda module, *args: of_modules.append((name, [facts(a) for a in args]))

    def note_gradient(name: str) -> Callable[..., None]:
        return lambda g: of_parameters.append((name, facts([g])))

    for index in (0, 2):
        layer = model[index]
        layer.register_forward_pre_hook(note(f"{index} pre"))
        layer.register_forward_hook(lambda m, i, o: of_modules.append(facts([*i, o])))
        layer.register_full_backward_pre_hook(note(f"{index} before backward"))
        layer.register_full_backward_hook(note(f"{index} backward"))
        for name, p in layer.named_parameters():
            p.register_hook(note_gradient(f"{index} {name}"))
            p.register_post_accumulate_grad_hook(
                lambda p: of_parameters.append(("done", facts([p.grad])))
            )
    return of_modules, of_parameters


@pytest.mark.parametrize("first", [True, False], ids=["before apply", "after apply"])
def test_hooks_see_what_they_saw(kind: str, first: bool) -> None:
    plain, ours = net(), net()
    want = watched(plain)
    if first:
        got = watched(ours)
    wrap(ours, kind)
    if not first:
        got = watched(ours)
    agree(step(ours, signs(32, 64)), step(plain, signs(32, 64)), kind)
    assert got[0] == want[0]
    assert len(want[0]) == 8
    # In which order autograd fills the parameters of one layer is its own affair.
    assert sorted(map(str, got[1])) == sorted(map(str, want[1]))
    assert len(want[1]) == 8


def test_hooks_may_change_what_they_see(kind: str) -> None:
    plain, ours = twins(net, kind)
    for model in (plain, ours):
        model[0].register_forward_pre_hook(lambda m, args: (-args[0],))
        model[0].register_forward_hook(lambda m, args, y: 2 * y)
        model[2].register_full_backward_hook(lambda m, gi, go: (2 * gi[0],))
        model[2].weight.register_hook(lambda g: g * 4)
    agree(step(ours, signs(32, 64)), step(plain, signs(32, 64)), kind)


class OwnForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


class NoForward(nn.Linear):
    """A subclass that only has a name of its own."""


@pytest.mark.parametrize("subclass", [OwnForward, NoForward])
def test_subclasses_stay_what_they_are(kind: str, subclass: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"sub": subclass(64, 64), "plain": nn.Linear(64, 64)})
    x = torch.randn(8, 64)
    before = step(model["sub"], x)
    model.zero_grad()
    wrap(model, kind)
    assert type(model["sub"]) is subclass
    assert type(model["plain"]) is lowprec.Linear
    agree(step(model["sub"], x), before, "exact")


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: signs(64, 32).T,
    "every second row": lambda: signs(64, 64)[::2],
    "every second column": lambda: signs(32, 128)[:, ::2],
    "expanded": lambda: signs(1, 64).expand(32, 64),
    "expanded twice": lambda: signs(1, 1, 64).expand(4, 8, 64),
    "offset": lambda: signs(33, 65)[1:, 1:],
    "one vector": lambda: signs(64),
    "channels last": lambda: signs(2, 64, 4, 4).permute(0, 2, 3, 1),
    "batches swapped": lambda: signs(8, 4, 64).transpose(0, 1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_as_inputs(kind: str, view: str) -> None:
    plain, ours = twins(net, kind)
    x = VIEWS[view]()
    got, want = step(ours, x), step(plain, x)
    for found in (got, want):
        found["dx"] = found["dx"].contiguous()  # torch keeps the strides of a strange leaf, or not
    agree(got, want, kind)


GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "stride 0": lambda y: torch.ones(()).expand(y.shape),
    "one row": lambda y: signs(1, y.shape[1]).expand(y.shape),
    "transposed": lambda y: signs(*reversed(y.shape)).T,
    "strided": lambda y: signs(y.shape[0], 2 * y.shape[1])[:, ::2],
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_that_are_views(kind: str, name: str) -> None:
    results = []
    for model in twins(net, kind):
        x = signs(32, 64).requires_grad_()
        y = model(x)
        y.backward(GRADIENTS[name](y))
        found = {n: p.grad for n, p in model.named_parameters()}
        results.append({"dx": x.grad, **found})
    agree(results[1], results[0], kind)


MIXED = [*POLICIES, "mxfp8 / bf16 / bf16", "bf16 / mxfp8 / bf16", "bf16 / bf16 / mxfp8"]


@pytest.mark.parametrize("both", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", MIXED)
def test_float32_weights_under_autocast(policy: str, dtype: torch.dtype, both: bool) -> None:
    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        x = signs(32, 64).to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
            if both:
                y.backward(signs(*y.shape).to(y.dtype))
        if not both:
            y.backward(signs(*y.shape).to(y.dtype))
        grads = {name: p.grad for name, p in model.named_parameters()}
        return {"y": y.detach(), "dx": x.grad, **grads}

    plain, ours = twins(net, policy)
    got, want = run(ours), run(plain)
    assert got["y"].dtype == torch.bfloat16
    assert got["0.weight"].dtype == torch.float32
    agree(got, want, policy)


def test_gradient_accumulation(kind: str) -> None:
    plain, ours = twins(net, kind)
    last = []
    for model in (ours, plain):
        for micro in range(3):
            lowprec.set_step(model, 0, micro_batch=micro)
            found = step(model, signs(32, 64, seed=micro), seed=micro + 10)
        last.append(found)
    agree(*last, kind)
    assert counts(ours, "0")["wgrad"] == 3


def by_optimizer(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.detach().clone()
    torch.optim.SGD(model.parameters(), lr=2.0).step()


def by_copy(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(-p)


def by_replacement(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(-module.weight.detach())
            module.bias = nn.Parameter(-module.bias.detach())


EDITS: dict[str, Callable[[nn.Module], None]] = {
    "optimizer": by_optimizer,
    "copy_ under no_grad": by_copy,
    ".data, in place": lambda m: [p.data.neg_() for p in m.parameters()],
    ".data, assigned": lambda m: [setattr(p, "data", -p.data) for p in m.parameters()],
    "load_state_dict": lambda m: m.load_state_dict({k: -v for k, v in m.state_dict().items()}),
    "load_state_dict, assigned": lambda m: m.load_state_dict(
        {k: -v for k, v in m.state_dict().items()}, assign=True
    ),
    "another Parameter": by_replacement,
}


MODES: dict[str, Callable[[], Any]] = {
    "training": torch.enable_grad,
    "no_grad first": torch.no_grad,
    "inference_mode first": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("edit", EDITS)
def test_the_next_forward_sees_edited_weights(edit: str, mode: str) -> None:
    """Every weight changes its sign: whoever remembers a cast of it gives the old answer."""
    plain, ours = twins(lambda: nn.Sequential(linear(64, 96)), "mxfp8")
    x = signs(32, 64)
    with MODES[mode]():
        before = ours(x).clone()
    if mode == "training":
        step(ours, x)
    for model in (plain, ours):
        EDITS[edit](model)
        model.zero_grad()
    got = step(ours, x)
    agree(got, step(plain, x), "mxfp8")
    assert torch.equal(got["y"], -before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_before_training(kind: str, mode: Callable[[], Any]) -> None:
    plain, ours = twins(net, kind)
    outputs = []
    for model in (plain, ours):
        with mode():
            outputs.append(model(signs(32, 64)))
    assert torch.equal(*outputs)
    assert outputs[1].is_inference() == (mode is torch.inference_mode)
    agree(step(ours, signs(32, 64)), step(plain, signs(32, 64)), kind)
    with mode():
        assert torch.equal(plain(signs(32, 64)), ours(signs(32, 64)))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_zero_rows(kind: str, shape: tuple[int, ...]) -> None:
    plain, ours = twins(net, kind)
    got = step(ours, torch.zeros(shape))
    agree(got, step(plain, torch.zeros(shape)), kind)
    assert got["0.weight"].count_nonzero() == 0


def test_clipping_the_norm_of_the_gradients(kind: str) -> None:
    norms, results = [], []
    for model in twins(net, kind):
        step(model, signs(32, 64))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True))
        results.append({name: p.grad for name, p in model.named_parameters()})
    agree(results[1], results[0], kind)
    assert norms[1] == pytest.approx(float(norms[0]), rel=max(TOLERANCE[kind], 1e-6))


def test_a_graph_is_walked_twice_and_in_parts(kind: str) -> None:
    plain, ours = twins(net, kind)
    parts = []
    for model in (plain, ours):
        lowprec.set_step(model, 0)
        x = signs(32, 64).requires_grad_()
        y = model(x)
        dy = signs(32, 48)
        w, b = model[0].weight, model[2].bias
        first = torch.autograd.grad(y, [x, b], dy, retain_graph=True)
        second = torch.autograd.grad(y, [w], dy, retain_graph=True)
        again = torch.autograd.grad(y, [x, b, w], dy)
        for a, c in zip((*first, *second), again, strict=True):
            assert torch.equal(a, c)
        parts.append(dict(zip(("dx", "b", "w"), again, strict=True)))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(y, [x], dy)
    agree(parts[1], parts[0], kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_conversion_to_another_dtype(kind: str, dtype: torch.dtype) -> None:
    plain, ours = twins(net, kind)
    for model in (plain, ours):
        assert model.to(dtype) is model
    agree(step(ours, signs(32, 64).to(dtype)), step(plain, signs(32, 64).to(dtype)), kind)
    for model in (plain, ours):
        model.zero_grad()
        model.float()
    agree(step(ours, signs(32, 64)), step(plain, signs(32, 64)), kind)


def test_on_the_meta_device_and_back(kind: str) -> None:
    plain, ours = twins(net, kind)
    state = plain.state_dict()
    ours.to("meta")
    shapes = step(ours, signs(32, 64).to("meta"))
    assert {t.device.type for t in shapes.values()} == {"meta"}
    ours.to_empty(device="cpu")
    ours.load_state_dict(state)
    ours.zero_grad()
    got, want = step(ours, signs(32, 64)), step(plain, signs(32, 64))
    agree(got, want, kind)
    assert {n: t.shape for n, t in shapes.items()} == {n: t.shape for n, t in got.items()}


class Negative(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return -weight


def test_a_parametrization_on_a_wrapped_layer(kind: str) -> None:
    plain, ours = twins(net, kind)
    for model in (plain, ours):
        parametrize.register_parametrization(model[0], "weight", Negative())
    got = step(ours, signs(32, 64))
    agree(got, step(plain, signs(32, 64)), kind)
    assert "0.parametrizations.weight.original" in got
    assert counts(ours, "0")["wgrad"] == 1
    for model in (plain, ours):
        parametrize.remove_parametrizations(model[0], "weight")
        model.zero_grad()
    agree(step(ours, signs(32, 64)), step(plain, signs(32, 64)), kind)
    assert type(lowprec.restore(ours)[0]) is nn.Linear


def test_functional_call(kind: str) -> None:
    plain, ours = twins(net, kind)
    values = {name: -p.detach() for name, p in plain.named_parameters()}
    results = []
    for model in (plain, ours):
        leaves = {name: v.clone().requires_grad_() for name, v in values.items()}
        y = torch.func.functional_call(model, leaves, (signs(32, 64),))
        y.backward(signs(*y.shape))
        results.append({"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}})
        assert all(p.grad is None for p in model.parameters())
    agree(results[1], results[0], kind)


def test_the_input_may_be_passed_by_name(kind: str) -> None:
    plain, ours = twins(lambda: linear(64, 96), kind)
    assert torch.equal(ours(input=signs(32, 64)), plain(input=signs(32, 64)))


def test_an_output_is_a_view_only_where_nn_linear_gives_one(kind: str) -> None:
    """FSDP hangs its backward hook on the output; a change in place of a view drops the hook."""
    for model in twins(lambda: linear(64, 96), kind):
        assert not model(signs(32, 64))._is_view()


def test_a_weight_or_input_that_only_looks_like_a_tensor_is_refused() -> None:
    """Casts of a wrapper's parts would be casts of something else."""
    layer = wrap(nn.Sequential(linear(64, 96)), "mxfp8")
    jagged = torch.nested.nested_tensor([signs(3, 64), signs(5, 64)], layout=torch.jagged)
    with pytest.raises(LowprecError, match="NestedTensor"):
        layer(jagged)
