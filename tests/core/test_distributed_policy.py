"""Sums of gradients, samples of all ranks, memory, tensor parallelism, codes at 1 to 8 ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import lowprec
from lowprec.errors import PlanError
from lowprec.fsdp import reduce_policy, shard_plan
from tests.core import fsdp_ranks, tensor_ranks
from tests.core import policy_ranks as they

Found = dict[str, Any]


def spawn(folder: Path, ranks: int, task: Any) -> list[Found]:
    mp.spawn(fsdp_ranks.worker, (ranks, str(folder), task), nprocs=ranks)
    return [torch.load(folder / f"{task.__name__}-{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What two ranks saw."""
    return spawn(tmp_path_factory.mktemp("policies"), 2, they.policies)


def test_gradients_are_summed_in_what_the_recipe_says(two: list[Found]) -> None:
    for one in two:
        found = one["reduced"]
        for name, dtype in (
            ("None", torch.bfloat16),  # of the gradients, as FSDP2 has it
            ("fp32", torch.float32),
            ("bf16", torch.bfloat16),
        ):
            assert set(found[name]["dtypes"]) == {dtype}
        same = torch.equal(found["None"]["gradient"], found["bf16"]["gradient"])
        assert same
        assert not torch.equal(found["fp32"]["gradient"], found["bf16"]["gradient"])
        torch.testing.assert_close(
            found["fp32"]["gradient"], found["bf16"]["gradient"], rtol=2**-7, atol=1e-6
        )


def test_two_places_that_disagree_are_refused() -> None:
    asked = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert reduce_policy(they.recipe(None), asked) == asked
    assert reduce_policy(they.recipe("fp32"), asked) == asked
    alone = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert reduce_policy(they.recipe("fp32"), alone) == asked
    with pytest.raises(PlanError, match=r"sums gradients in bf16, .* leave one of the two out"):
        reduce_policy(they.recipe("bf16"), asked)


KEY = ("0", "fprop", "x")


def test_samples_of_all_ranks_are_the_worst_of_any(two: list[Found]) -> None:
    owns = [one["watched"]["finite"]["own"] for one in two]
    for one in two:
        every = one["watched"]["finite"]["all"]
        assert every == two[0]["watched"]["finite"]["all"]
        assert set(every) == set(owns[0]) > set(owns[1])
        got, parts = every[KEY], [own[KEY] for own in owns]
        assert got["amax"] == max(part["amax"] for part in parts)
        assert got["elements"] == sum(part["elements"] for part in parts)
        assert got["mean_square"] == pytest.approx(sum(p["mean_square"] for p in parts) / 2)
        assert got["loss"]["sqnr_db"] == min(part["loss"]["sqnr_db"] for part in parts)
        worst = min(part["what_if"]["mxfp4"]["sqnr_db"] for part in parts)
        assert got["what_if"]["mxfp4"]["sqnr_db"] == worst
        assert got["scale_min"] == min(part["scale_min"] for part in parts)
        assert got["scale_max"] == max(part["scale_max"] for part in parts)
        assert got["nonfinite"] == got["nonfinite_blocks"] == 0
        # A layer that only one rank ran.
        alone = ("1", "fprop", "x")
        assert every[alone] == owns[0][alone]


def test_a_nan_of_one_rank_is_seen_by_all(two: list[Found]) -> None:
    """A maximum over ranks that drops NaN would report the finite amax of the other rank."""
    owns = [one["watched"]["nan"]["own"] for one in two]
    assert owns[0][KEY]["amax"] is not None
    assert owns[1][KEY]["amax"] is None
    for one in two:
        got = one["watched"]["nan"]["all"][KEY]
        assert got["amax"] is None
        assert got["nonfinite"] == 1 / (2 * 32 * 64)
        assert got["nonfinite_blocks"] == owns[1][KEY]["nonfinite_blocks"] > 0
        assert math.isfinite(got["loss"]["sqnr_db"])
        dy = ("0", "wgrad", "dy")
        assert owns[0][dy]["amax"] is not None
        assert one["watched"]["nan"]["all"][dy]["amax"] is None


def test_without_ranks_samples_are_those_of_the_process() -> None:
    model = fsdp_ranks.wrap(nn.Sequential(nn.Linear(64, 64)))
    with lowprec.watch(model, every=1) as watch:
        model(torch.ones(32, 64, requires_grad=True)).sum().backward()
        assert watch.over_ranks() == watch.stats


def test_a_layer_holds_no_more_than_in_bf16(two: list[Found]) -> None:
    """After the first step, per layer: shards of weight, gradient and optimizer, and no copy."""
    for one in two:
        assert 0 < one["held"]["codes"] <= one["held"]["bf16"]


def whole() -> dict[str, torch.Tensor]:
    model = tensor_ranks.layer()
    x, dy = tensor_ranks.tensors()
    x.requires_grad_()
    y = model(x)
    y.backward(dy)
    assert x.grad is not None
    gradients = {f"d{name}": p.grad for name, p in model.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients}


@pytest.mark.parametrize(
    ("style", "summed"), [("columns", "dx"), ("sequence", "dx"), ("rows", "y")]
)
def test_parts_are_those_of_the_whole(two: list[Found], style: str, summed: str) -> None:
    """Bit for bit, except where ranks add up what each rounded to bfloat16."""
    for rank, one in enumerate(two):
        got, want = one["tensor"][style], whole()
        if style == "sequence":
            want["dx"] = fsdp_ranks.share(want["dx"], rank, 2)
        assert set(got) == set(want) == {"y", "dx", "d0.weight", "d0.bias"}
        for name, tensor in want.items():
            if name == summed:
                torch.testing.assert_close(got[name], tensor, rtol=2**-7, atol=2**-6)
            else:
                assert torch.equal(got[name], tensor), name


def test_a_parallel_model_trains_like_one_process(two: list[Found]) -> None:
    want = tensor_ranks.losses_of(tensor_ranks.mlp(), tensor_ranks.tensors()[0])
    assert want[-1] < want[0]
    for one in two:
        assert one["tensor"]["losses"] == pytest.approx(want, rel=1e-2)
        for name in ("0", "2"):
            assert one["tensor"]["counts"][name]["fprop"] == {
                "mxfp8 x mxfp8_32x32": tensor_ranks.STEPS
            }


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 9))
def test_codes_do_not_depend_on_the_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    """Those of the whole weight, or gathered unquantized as the plan declared."""
    found = spawn(tmp_path, ranks, they.invariance)
    for name, (n, k) in they.SHAPES.items():
        torch.manual_seed(1)
        whole = lowprec.quantize(nn.Linear(k, n).weight.detach(), "mxfp8_32x32")
        model = fsdp_ranks.wrap(nn.Sequential(nn.Linear(k, n)))
        travels = shard_plan(model, ranks).weights[0].cast is not None
        rows = n // ranks
        assert travels == (ranks == 1 or (n % ranks == 0 and rows % 32 == 0))
        for one in found:
            if travels:
                codes, scales = one[name]
                assert torch.equal(codes, whole.codes)
                assert torch.equal(scales, whole.scales)
            else:
                assert one[name] is None
