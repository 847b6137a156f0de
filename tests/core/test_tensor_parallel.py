"""Tensor parallelism: each rank's products are parts of those of the whole layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
)

from lowprec.errors import PlanError, UnsupportedError
from lowprec.tensor_parallel import parallelize_quantized, refusal
from tests.core import fsdp_ranks
from tests.core import tensor_ranks as they

Found = dict[str, Any]


def spawn(folder: Path, ranks: int, task: Any) -> list[Found]:
    mp.spawn(fsdp_ranks.worker, (ranks, str(folder), task), nprocs=ranks)
    return [torch.load(folder / f"{task.__name__}-{rank}.pt") for rank in range(ranks)]


@pytest.mark.slow
def test_tensor_parallel_under_fsdp(tmp_path: Path) -> None:
    want = they.losses_of(they.mlp(), they.tensors()[0])
    for one in spawn(tmp_path, 4, they.with_fsdp):
        assert one["losses"] == pytest.approx(want, rel=1e-2)
        assert one["plan"] == ["its weight is a DTensor, not a plain Parameter"] * 2


@pytest.mark.parametrize(
    ("policy", "n", "letter", "why"),
    [
        (fsdp_ranks.TILES, 128, "N", None),
        (fsdp_ranks.TILES, 96, "N", "48 values a rank are not a multiple of 32"),
        (fsdp_ranks.TILES, 97, "N", "N=97 does not divide by 2"),
        (fsdp_ranks.TILES, 97, "K", None),
        ("mxfp8", 128, "N", None),
        ("mxfp8 / bf16 / bf16", 96, "N", None),  # rows of 1x32 blocks may be cut anywhere
        ("mxfp8 + rht32", 128, "N", None),
        ("mxfp8 + rht128:none", 128, "N", "64 values a rank are not a multiple of 128"),
        ("mxfp8:sr", 128, "N", "random bits"),
        ("fp8_rowwise / bf16 / bf16", 128, "N", None),
        ("fp8_rowwise / bf16 / bf16", 128, "K", "in fprop a scale of fp8_rowwise reaches over"),
        ("fp8_rowwise", 128, "N", "in dgrad a scale of fp8_rowwise reaches over"),
        ("fp8_tensorwise", 128, "N", "in fprop a scale of fp8_tensorwise reaches over"),
        ("nvfp4", 128, "N", "a scale of nvfp4 reaches over"),
        ("bf16", 96, "N", None),
    ],
)
def test_what_would_get_another_scale_is_refused(
    policy: str, n: int, letter: str, why: str | None
) -> None:
    (layer,) = they.layer(n=n, policy=policy)
    reason = refusal(layer, letter, 2)
    assert (reason is None) == (why is None), reason
    assert why is None or why in str(reason)


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("gloo")
def test_refusals_change_nothing_and_say_what_to_do() -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = fsdp_ranks.wrap(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "mxfp8:sr")
    with pytest.raises(PlanError, match=r"layer '1' cut along N over 1 ranks: random bits"):
        parallelize_quantized(model, mesh, {"1": ColwiseParallel()})
    assert type(model[1].weight) is nn.Parameter
    model = fsdp_ranks.wrap(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    with pytest.raises(PlanError, match="takes ColwiseParallel and RowwiseParallel"):
        parallelize_quantized(model, mesh, {"0": SequenceParallel()})
    parallelize_quantized(model, mesh, {"*": RowwiseParallel(input_layouts=None)})
    with pytest.raises(PlanError, match="'0' is sharded already"):
        parallelize_quantized(model, mesh, {"0": ColwiseParallel()})
    with pytest.raises(UnsupportedError, match="'0' is tensor parallel: its input and weight"):
        type(model[0]).forward(model[0], torch.ones(2, 64))
