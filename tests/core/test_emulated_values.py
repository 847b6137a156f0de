"""Emulated products that take values by one kernel in place of codes: the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowprec
from lowprec.backends import GemmBackends, triton_kernels
from lowprec.errors import UnsupportedError
from lowprec.hardware import NAMED
from lowprec.nn.products import Products
from lowprec.policy import LinearPolicy
from lowprec.stages import Stage
from tests.core.kernel_cases import INTERPRETED, inside, needs_triton

pytestmark = needs_triton
POLICY = LinearPolicy.parse("mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8")


def layer(casts: str) -> lowprec.Linear:
    torch.manual_seed(0)
    model = lowprec.Linear(32, 64, dtype=torch.bfloat16, policy=POLICY)
    backends = {name: GemmBackends(casts, casts, "emulated") for name, _ in POLICY.items()}
    stage = Stage.with_backends(0, POLICY, backends, NAMED["cpu"])
    model.lowprec_products = Products((stage,), layer="", seed=0)
    return model


def step(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(40, 32).bfloat16().requires_grad_()
    y = model(x)
    y.backward(torch.randn(40, 64).bfloat16())
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@inside
def test_a_layer_of_values_equals_one_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.Size] = []
    round_trip = triton_kernels.round_trip

    def counted(x: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        taken.append(x.shape)
        return round_trip(x, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_kernels, "round_trip", counted)
    ours, law = layer("triton"), layer("emulated")
    for micro_batch in range(3):
        for one in (ours, law):
            lowprec.set_step(one, 0, micro_batch=micro_batch)
        for got, want in zip(step(ours), step(law), strict=True):
            assert torch.equal(got, want)
    # dy for dgrad and for wgrad each time; w once for both in the first micro-batch, and in the
    # second, which shows that there are more; x is kept as codes.
    assert taken.count(torch.Size([40, 64])) == 2 * 3
    assert taken.count(torch.Size([64, 32])) == 2
    held = ours.lowprec_products.weights._held.values()
    assert len({one.operand.untyped_storage().data_ptr() for one in held}) == 1
    assert torch.Size([40, 32]) not in taken


def test_a_plan_of_another_machine_says_so() -> None:
    if INTERPRETED:
        pytest.skip("the interpreter runs the kernels on a CPU")
    with pytest.raises(UnsupportedError, match="plan again on the machine that runs"):
        layer("triton")(torch.zeros(8, 32).bfloat16())


def test_only_proven_formats_to_nearest_go_that_way() -> None:
    from lowprec.formats import Cast

    fits = ("mxfp8", "mxfp8_32x32", "mxfp8_1x128", "mxfp8_128x128", "mxfp4")
    for text in fits:
        assert triton_kernels.fits_round_trip(Cast.parse(text))
    for text in ("mxfp8:sr", "mxfp8:floor", "fp8_rowwise", "fp8_tensorwise", "nvfp4", "mxfp6_e2m3"):
        assert not triton_kernels.fits_round_trip(Cast.parse(text))
