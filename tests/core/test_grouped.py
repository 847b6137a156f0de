"""Grouped products over experts: the numbers of one lowprec.Linear for each of them."""

from __future__ import annotations

import pytest
import torch

import lowprec
from lowprec.errors import UnsupportedError
from lowprec.formats import FORMATS
from lowprec.grouped import grouped_matmul, native_refusal
from lowprec.hardware import named
from lowprec.nn.grouped import GroupedLinear
from lowprec.policy import LinearPolicy

K, N = 72, 40
POLICIES = (
    "mxfp8",
    "mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8",
    "fp8_rowwise",
    "bf16",
    "mxfp8 / bf16 / skip",
)
COUNTS = ([5, 0, 40, 19], [64, 0, 0, 0], [0, 0, 0, 0])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_expert_is_a_linear_layer_of_its_own(
    policy: str, counts: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    how = LinearPolicy.parse(policy)
    grouped = GroupedLinear(4, K, N, policy=how).to(dtype)
    x = torch.randn(sum(counts), K, dtype=dtype, requires_grad=True)
    y = grouped(x, counts)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert x.grad is not None
    assert y.dtype == x.grad.dtype == dtype
    rows = zip(
        x.split(counts), y.split(counts), dy.split(counts), x.grad.split(counts), strict=True
    )
    for expert, (own, got, gradient, dx) in enumerate(rows):
        alone = lowprec.Linear(K, N, bias=False, dtype=dtype, policy=how)
        with torch.no_grad():
            alone.weight.copy_(grouped.weight[expert])
        own = own.detach().requires_grad_()
        want = alone(own)
        want.backward(gradient)
        assert torch.equal(got, want)
        assert torch.equal(dx, own.grad)
        if how.wgrad is lowprec.policy.SKIP:
            assert grouped.weight.grad is None
        else:
            assert torch.equal(grouped.weight.grad[expert], alone.weight.grad)


def test_a_token_does_not_notice_the_tokens_of_another_expert() -> None:
    torch.manual_seed(0)
    grouped = GroupedLinear(2, K, N, policy=LinearPolicy.parse("mxfp8"))
    x = torch.randn(48, K)
    other = x.clone()
    other[:20] = torch.nan
    assert torch.equal(grouped(x, [20, 28])[20:], grouped(other, [20, 28])[20:])
    grouped(other, [20, 28]).sum().backward()
    gradient = grouped.weight.grad
    assert gradient is not None
    assert gradient[0].isnan().all()
    assert gradient[1].isfinite().all()


def test_what_does_not_fit_says_so() -> None:
    a, b = torch.zeros(6, K), torch.zeros(2, N, K)
    for x, counts in ((a, [6]), (a, [3, 4]), (a, [7, -1]), (torch.zeros(6, K + 1), [3, 3])):
        with pytest.raises(UnsupportedError, match="grouped_matmul"):
            grouped_matmul(x, b, counts)
    q = lowprec.quantize(b, "mxfp8")
    for wrong in ("mxfp8_32x32", "fp8_tensorwise", "nvfp4"):
        with pytest.raises(UnsupportedError, match=r"in a reaches over several experts"):
            grouped_matmul(lowprec.quantize(a, wrong), q, [3, 3])
    with pytest.raises(UnsupportedError, match="cast along axis -2, not K"):
        grouped_matmul(lowprec.quantize(a, "mxfp8", axis=-2), q, [3, 3])
    for policy in ("mxfp8:sr", "mxfp8 + rht32"):
        with pytest.raises(UnsupportedError, match="nearest rounding and no rotation"):
            GroupedLinear(2, K, N, policy=LinearPolicy.parse(policy))
    with pytest.raises(UnsupportedError, match="convert them to one dtype"):
        GroupedLinear(2, K, N, policy=LinearPolicy.parse("mxfp8"))(a.bfloat16(), [3, 3])


def test_where_the_native_product_runs_is_known_without_a_gpu() -> None:
    rowwise, mx = FORMATS["fp8_rowwise"], FORMATS["mxfp8"]
    assert native_refusal(rowwise, rowwise, named("h200")) is None
    assert "sm90" in str(native_refusal(rowwise, rowwise, named("cpu")))
    assert "sm90" in str(native_refusal(rowwise, rowwise, named("b200")))
    assert "fp8_rowwise, not mxfp8" in str(native_refusal(rowwise, mx, named("h200")))
    grouped = GroupedLinear(2, K, N, policy=LinearPolicy.parse("fp8_rowwise"), native=True)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="is for sm90, this is cpu"):
            grouped(torch.zeros(6, K), [3, 3])
