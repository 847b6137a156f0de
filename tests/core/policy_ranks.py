"""What every rank does in tests/core/test_distributed_policy.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lowprec
from lowprec.fsdp import shard_quantized
from lowprec.policy import LinearPolicy
from lowprec.recipe import Recipe, Rule, Transport
from tests.core import fsdp_ranks as they
from tests.core import tensor_ranks

SHAPES = {"uneven": (100, 96), "narrow": (96, 160), "wide": (2880, 768), "tiny": (7, 64)}


def invariance(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Codes of each shape as gathered, or None where it came unquantized."""
    return they.invariance(rank, ranks, SHAPES)


def recipe(reduce: str | None) -> Recipe:
    rule = Rule("*", "linear", LinearPolicy.parse(they.TILES), "test")
    return Recipe("test", "test", (rule,), transport=Transport(None, reduce, "test"))


def reduced(rank: int, ranks: int) -> dict[str, Any]:
    """The dtype that enters the sums of gradients, by what the recipe says."""
    name = next(
        one for one in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, one)
    )
    scatter = getattr(dist, name)
    found: dict[str, Any] = {}
    for chosen in (None, "fp32", "bf16"):
        dtypes: list[torch.dtype] = []

        def seen(output: Any, input: Any, *rest: Any, dtypes: Any = dtypes, **more: Any) -> Any:
            dtypes.append(input.dtype)
            return scatter(output, input, *rest, **more)

        model = they.wrap(they.mlp())
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        mesh = init_device_mesh("cpu", (ranks,))
        shard_quantized(model, mesh, mp_policy=mixed, recipe=recipe(chosen))
        setattr(dist, name, seen)
        model(they.share(they.batch(0), rank, ranks)).square().mean().backward()
        setattr(dist, name, scatter)
        gradient = model[0].weight.grad
        found[str(chosen)] = {"dtypes": dtypes, "gradient": gradient.full_tensor()}
    return found


def watched(rank: int, ranks: int) -> dict[str, Any]:
    """Samples of this rank and of all; the last rank alone sees a NaN, the first alone a sample."""
    model = they.wrap(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)))
    found = {}
    with lowprec.watch(model, every=1, what_if=["mxfp4"]) as watch:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank)) * (1 + rank)
        for kind in ("finite", "nan"):
            if kind == "nan" and rank == ranks - 1:
                x[3, 5] = torch.nan
            model[0](x).square().mean().backward()
            if rank == 0:
                model[1](x).square().mean().backward()
            found[kind] = {"own": plain(watch.stats), "all": plain(watch.over_ranks())}
    return found


def plain(stats: Any) -> Any:
    """As dicts that torch.save takes."""
    return {
        (layer, product, operand): {
            **{k: v for k, v in vars(one).items() if k not in ("loss", "what_if")},
            "loss": vars(one.loss),
            "what_if": {name: vars(loss) for name, loss in one.what_if.items()},
        }
        for layer, products in stats.items()
        for product, operands in products.items()
        for operand, one in operands.items()
    }


def held(rank: int, ranks: int) -> dict[str, float]:
    """Bytes that each further layer holds after the first step, all tensors counted."""
    found = {}
    for name in ("bf16", "codes"):
        shallow, deep = (grown(rank, ranks, name, depth) for depth in (2, 6))
        found[name] = (deep - shallow) / 4
    return found


def grown(rank: int, ranks: int, name: str, depth: int) -> int:
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (ranks,))
    model: Any = nn.Sequential(*(nn.Linear(128, 128) for _ in range(depth)))
    if name == "codes":
        they.wrap(model)
        shard_quantized(model, mesh, blocks=list(model), mp_policy=mixed)
    else:
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh, mp_policy=mixed)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(rank))
    before = they.live_bytes()
    model(x).square().mean().backward()
    optimizer.step()
    return they.live_bytes() - before


def policies(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    tasks: dict[str, Callable[[int, int], Any]] = {
        "reduced": reduced,
        "watched": watched,
        "held": held,
    }
    found = {name: task(rank, ranks) for name, task in tasks.items()}
    return {**found, "tensor": tensor_ranks.parallel(rank, ranks, folder)}
