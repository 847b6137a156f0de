"""The same codes, scales and products on a GPU as on the CPU (make test-gpu)."""

import pytest
import torch
from torch import nn

import lowprec
from lowprec import ops
from lowprec.formats import FORMATS, Cast
from lowprec.hardware import current

pytestmark = pytest.mark.gpu
CASES = [f"{name}:{rule}" for name, fmt in FORMATS.items() for rule in fmt.scale_rules]
SHAPES = [(0, 64), (1, 39), (63, 100), (256, 1000), (96, 32 * 5 + 96)]


def data(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.exp2(torch.linspace(-6, 6, shape[-1]))


@pytest.mark.parametrize("text", CASES)
def test_casts_are_bitwise_equal_to_the_cpu(text: str) -> None:
    cast = Cast.parse(text)
    for shape in SHAPES:
        x = data(*shape, seed=1)
        extreme = x * 2.0**-130
        for source in (x, x.bfloat16(), x.mT, extreme):
            for axis in (-1, -2):
                want = ops.quantize(source, cast, axis=axis)
                got = ops.quantize(source.cuda(), cast, axis=axis)
                assert torch.equal(got.codes.cpu(), want.codes), (shape, axis)
                assert torch.equal(got.scales.cpu(), want.scales), (shape, axis)


@pytest.mark.parametrize("name", FORMATS)
def test_products_stay_within_twice_the_references_error(name: str) -> None:
    for m, k in SHAPES[1:]:
        a, b, bias = data(m, k, seed=2), data(48, k, seed=3), data(48, seed=4)
        left, right = ops.quantize(a, name), ops.quantize(b, name)
        exact = ops.dequantize(left, torch.float64) @ ops.dequantize(right, torch.float64).mT
        exact = exact + bias.double()
        reference = ops.matmul(left, right, bias=bias, backend="reference").double()
        got = ops.matmul(
            ops.quantize(a.cuda(), name), ops.quantize(b.cuda(), name), bias=bias.cuda()
        )
        error = (got.cpu().double() - exact).norm()
        assert error <= 2 * (reference - exact).norm() + 1e-30, (m, k)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8-portable", "fp8-rowwise"])
def test_a_training_step_agrees_with_the_cpu(recipe: str) -> None:
    gradients = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(39, 256), nn.Tanh(), nn.Linear(256, 64)).to(device)
        x = torch.randn(100, 39).to(device)
        lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe(recipe)))
        model(x).square().mean().backward()
        assert lowprec.observe(model).gemms["2"]["wgrad"]
        gradients.append([p.grad.cpu() for p in model.parameters()])
    for cpu, gpu in zip(*gradients, strict=True):
        assert (cpu - gpu).norm() <= 0.02 * cpu.norm()


def test_the_machine_is_known_and_the_plan_says_emulated() -> None:
    hardware = current()
    assert hardware.device == "cuda"
    assert hardware.capability == torch.cuda.get_device_capability()
    plan = lowprec.plan(nn.Linear(64, 64), lowprec.load_recipe("mxfp8"))
    assert "emulated" in str(plan)
