"""The screen: what it measures, and that it leaves the model, its gradients and all RNGs alone."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import lowprec
from qualitygates.errors import DataError, ExperimentError
from qualitygates.sensitivity.screen import ranking, screen

OPTIONS = dict.fromkeys(("fprop", "dgrad", "wgrad"), ("mxfp4", "mxfp8"))


class Model(nn.Module):
    """Dropout, batch norm, a shared layer, one that never runs, a frozen one, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 48)
        self.norm = nn.BatchNorm1d(48)
        self.twice = nn.Linear(48, 48)
        self.never = nn.Linear(48, 48)
        self.frozen = nn.Linear(48, 32).requires_grad_(False)
        self.head = nn.Linear(32, 1)
        self.poison = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.dropout(self.norm(self.a(x)), 0.2, self.training)
        noise = 1e-3 * random.random() + 1e-3 * float(np.random.rand())
        h = self.twice(torch.relu(self.twice(h))) + noise
        return self.head(self.frozen(h * self.poison)).squeeze(-1)


def batches(count: int = 3, rows: int = 64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows, 64, generator=generator), torch.rand(rows, generator=generator).round())
        for _ in range(count)
    ]


def loss(model: nn.Module, batch) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


NAMES = ("a", "twice", "never", "frozen")


def test_the_model_and_every_random_stream_are_what_they_were(model: Model) -> None:
    loss(model, batches(1)[0]).backward()
    model.norm.eval()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    before = copy.deepcopy((model, optimizer.state_dict()))
    grads = {name: p.grad for name, p in model.named_parameters()}
    copies = {name: None if g is None else g.clone() for name, g in grads.items()}
    hooks = [len(m._forward_hooks) for m in model.modules()]
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    screen(model, batches(), loss=loss, options=OPTIONS, layers=NAMES)
    for name, p in model.named_parameters():
        assert p.grad is grads[name]
        assert copies[name] is None or torch.equal(p.grad, copies[name])
        assert torch.equal(p, before[0].get_parameter(name))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[0].get_buffer(name))
    assert [m.training for m in model.modules()] == [m.training for m in before[0].modules()]
    assert hooks == [len(m._forward_hooks) for m in model.modules()]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2][1], np.random.get_state()[1])
    assert str(optimizer.state_dict()) == str(before[1])


def test_they_are_put_back_when_the_loss_fails_too(model: Model) -> None:
    mean = model.norm.running_mean.clone()

    def fails(model: nn.Module, batch) -> torch.Tensor:
        loss(model, batch)
        raise KeyError("a column")

    with pytest.raises(KeyError):
        screen(model, batches(), loss=fails, options=OPTIONS, layers=NAMES)
    assert torch.equal(model.norm.running_mean, mean)
    assert not model.a._forward_hooks


def test_errors_are_those_of_the_products_written_out() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 1))
    ((x, y),) = batches(1)
    seen = {}

    def hook(module: nn.Module, args: tuple, out: torch.Tensor) -> None:
        out.register_hook(lambda dy: seen.update(dy=dy))

    handle = model[0].register_forward_hook(hook)
    value = loss_of(model, (x, y))
    torch.autograd.grad(value, list(model.parameters()))
    handle.remove()
    found = screen(model, [(x, y)], loss=loss_of, options=OPTIONS, layers=["0"])["0"]["products"]
    w, dy = model[0].weight.detach(), seen["dy"]

    def cast(t: torch.Tensor, axis: int) -> torch.Tensor:
        return lowprec.dequantize(lowprec.quantize(t, "mxfp4", axis=axis))

    pairs = {
        "fprop": (x @ w.T, cast(x, -1) @ cast(w, -1).T),
        "dgrad": (dy @ w, cast(dy, -1) @ cast(w, -2)),
        "wgrad": (dy.T @ x, cast(dy, -2).T @ cast(x, -2)),
    }
    for product, (exact, low) in pairs.items():
        expected = ((low - exact).norm() / exact.norm()).item()
        assert found[product]["mxfp4"]["relative_error"] == pytest.approx(expected, rel=1e-4)
        sqnr = -20 * np.log10(expected)
        assert found[product]["mxfp4"]["sqnr_db"] == pytest.approx(sqnr, abs=1e-2)
    error = pairs["fprop"][1] - pairs["fprop"][0]
    fisher = 0.5 * ((dy * 64 * error) ** 2).sum() / 64 / value
    assert found["fprop"]["mxfp4"]["fisher"] == pytest.approx(fisher.item(), rel=1e-4)


def loss_of(model: nn.Module, batch) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch[0]).squeeze(-1), batch[1])


def test_calls_are_counted_and_lower_formats_lose_more(model: Model) -> None:
    found = screen(model, batches(), loss=loss, options=OPTIONS, layers=NAMES)
    assert {name: one["calls"] for name, one in found.items()} == {
        "a": 3,
        "twice": 6,
        "never": 0,
        "frozen": 3,
    }
    for name in ("a", "twice", "frozen"):
        for product in OPTIONS:
            four, eight = (found[name]["products"][product][t] for t in ("mxfp4", "mxfp8"))
            assert four["relative_error"] > 2 * eight["relative_error"] > 0
    assert found["never"]["products"]["fprop"]["mxfp4"]["relative_error"] is None


def test_a_proxy_that_is_not_finite_comes_first_and_is_said(model: Model) -> None:
    def skewed(model: nn.Module, batch) -> torch.Tensor:
        # The loss is finite; what the square root sends back to one layer is not.
        return loss(model, batch) + (0 * model.a(batch[0]).mean()).sqrt()

    found = screen(model, batches(1), loss=skewed, options=OPTIONS, layers=("a", "twice"))
    broken = found["a"]["products"]["wgrad"]["mxfp4"]
    assert broken["broken"] == 1
    assert broken["relative_error"] is not None  # the finite call still counts
    first = ranking(found, dict.fromkeys(OPTIONS, "mxfp4"))
    assert next(one for one in first if one[1] == "wgrad") == ("a", "wgrad")


def test_a_loss_that_is_not_finite_is_an_error(model: Model) -> None:
    model.poison = float("nan")
    with pytest.raises(DataError, match="own loss is nan in high precision"):
        screen(model, batches(1), loss=loss, options=OPTIONS, layers=("a",))


def test_a_name_that_is_no_linear_layer_is_an_error(model: Model) -> None:
    with pytest.raises(ExperimentError, match="'norm' is not a linear layer"):
        screen(model, batches(1), loss=loss, options=OPTIONS, layers=("norm",))


def test_large_layers_are_sampled_without_losing_the_error() -> None:
    torch.manual_seed(2)
    big = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 1))
    x = torch.randn(700, 256) * torch.logspace(-1, 1, 256)
    batch = (x, (x[:, 0] > 0).float())
    texts = dict.fromkeys(OPTIONS, ("mxfp4 + rht16", "mxfp4:sr x mxfp4"))
    found = screen(big, [batch], loss=loss_of, options=texts, layers=("0",))["0"]["products"]
    for product in texts:
        for proxies in found[product].values():
            assert 0.02 < proxies["relative_error"] < 0.6
            assert proxies["saturation"] is not None
            assert 0 <= proxies["underflow"] < 0.5
