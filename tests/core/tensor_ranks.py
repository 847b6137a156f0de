"""What every rank does in tests/core/test_tensor_parallel.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import lowprec
from lowprec.fsdp import shard_plan, shard_quantized
from lowprec.tensor_parallel import parallelize_quantized
from tests.core import fsdp_ranks as they

K, N, M, STEPS = 64, 128, 48, 4
PORTABLE_N = 512


def layer(*, n: int = N, k: int = K, policy: str = they.TILES) -> Any:
    torch.manual_seed(0)
    return they.wrap(nn.Sequential(nn.Linear(k, n)), policy)


def tensors(n: int = N, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(M, k, generator=draw), torch.randn(M, n, generator=draw)


def alone(style: Any, ranks: int, *, part: int | None = None) -> dict[str, torch.Tensor]:
    """One layer, forward and backward; part: which of the ranks' rows of x this rank has."""
    model = layer()
    parallelize_quantized(model, init_device_mesh("cpu", (ranks,)), {"0": style})
    x, dy = tensors()
    x = x if part is None else they.share(x, part, ranks).clone()
    x.requires_grad_()
    y = model(x)
    y.backward(dy)
    assert x.grad is not None
    gradients = {f"d{name}": p.grad.full_tensor() for name, p in model.named_parameters()}
    # Copies, because some are results that a collective is still filling.
    found = {"y": y.detach(), "dx": x.grad, **gradients}
    return {name: one.clone() for name, one in found.items()}


def mlp() -> Any:
    torch.manual_seed(0)
    return they.wrap(nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K)))


def losses_of(model: Any, x: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parallel(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    model = mlp()
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_quantized(model, init_device_mesh("cpu", (ranks,)), styles)
    return {
        "columns": alone(ColwiseParallel(output_layouts=Replicate()), ranks),
        "sequence": alone(
            ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()), ranks, part=rank
        ),
        "rows": alone(RowwiseParallel(input_layouts=Replicate()), ranks),
        "losses": losses_of(model, tensors()[0]),
        "counts": lowprec.observe(model).gemms,
    }


def with_fsdp(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Two tensor-parallel groups of two, weights sharded over both."""
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    model = mlp()
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_quantized(model, mesh["tensor"], styles)
    plan = shard_plan(model, mesh["data"])
    shard_quantized(model, mesh["data"])
    x = they.share(tensors()[0], mesh["data"].get_local_rank(), ranks // 2)
    losses = torch.tensor(losses_of(model, x))
    dist.all_reduce(losses)
    return {"losses": (losses / ranks).tolist(), "plan": [one.why for one in plan.weights]}
