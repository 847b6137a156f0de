"""What every rank does in tests/core/test_fsdp.py; results go to one file a rank."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lowprec
from lowprec.fsdp import shard_quantized
from lowprec.policy import LinearPolicy
from lowprec.recipe import Recipe, Rule
from lowprec.transport import all_to_all

TILES = "mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8"
PORTABLE = "fp8_1x128 x fp8_128x128 / fp8_1x128 x fp8_128x128 / fp8_1x128"
RANDOM = "mxfp8 x mxfp8_32x32 / mxfp4:sr x mxfp8_32x32 / mxfp8:sr"
SHAPES = {"uneven": (100, 96), "narrow": (96, 160), "wide": (288, 64), "tiny": (7, 64)}
WIDTHS = (64, 512, 128)
BATCH, STEPS = 64, 3


def wrap(model: nn.Module, policy: str = TILES) -> Any:
    rule = Rule("*", "linear", LinearPolicy.parse(policy), "test")
    return lowprec.apply(model, lowprec.plan(model, Recipe("test", "test", (rule,), seed=3)))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for k, n in pairwise(WIDTHS):
        layers += [nn.Linear(k, n), nn.ReLU()]
    return nn.Sequential(*layers)


def linears(model: Any) -> list[nn.Module]:
    return [layer for layer in model if isinstance(layer, nn.Linear)]


def batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTHS[0], generator=torch.Generator().manual_seed(step))


def share(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    rows = len(x) // ranks
    return x[rank * rows : (rank + 1) * rows]


def codes_of(weight: Any) -> list[torch.Tensor] | None:
    """None for a weight that came unquantized."""
    if not hasattr(weight, "lowprec_quantized"):
        return None
    q = weight.lowprec_quantized.q
    return [q.codes.clone(), q.scales.clone()]


def watch_codes(model: Any) -> list[Any]:
    """The codes of every gathered weight, as its layer sees them in forward."""
    seen: list[Any] = []
    for layer in linears(model):
        layer.register_forward_pre_hook(lambda one, _: seen.append(codes_of(one.weight)))
    return seen


def invariance(
    rank: int, ranks: int, shapes: dict[str, tuple[int, int]] = SHAPES
) -> dict[str, Any]:
    """Codes of each shape as gathered, or None where it came unquantized."""
    found: dict[str, Any] = {}
    for name, (n, k) in shapes.items():
        torch.manual_seed(1)
        layer = wrap(nn.Sequential(nn.Linear(k, n)))
        shard_quantized(layer, init_device_mesh("cpu", (ranks,)))
        seen: list[Any] = []
        layer[0].register_forward_pre_hook(
            lambda one, _, seen=seen: seen.append(codes_of(one.weight))
        )
        layer(torch.randn(32, k, generator=torch.Generator().manual_seed(rank)))
        found[name] = seen[0]
    return found


def train(model: Any, rank: int, ranks: int, *, steps: range) -> dict[str, Any]:
    """Train a sharded model on this rank's rows; codes and summed losses of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return go_on(model, optimizer, rank, ranks, steps=steps)


def go_on(model: Any, optimizer: Any, rank: int, ranks: int, *, steps: range) -> dict[str, Any]:
    seen, losses = watch_codes(model), []
    for step in steps:
        lowprec.set_step(model, step, data_rank=rank)
        loss = model(share(batch(step), rank, ranks)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    options = StateDictOptions(full_state_dict=True)
    return {
        "losses": losses,
        "codes": seen,
        "weights": get_model_state_dict(model, options=options),
    }


def trained(rank: int, ranks: int) -> dict[str, Any]:
    found = {}
    for name, policy in (("tiles", TILES), ("portable", PORTABLE), ("random", RANDOM)):
        model = wrap(mlp(), policy)
        mesh = init_device_mesh("cpu", (ranks,))
        shard_quantized(model, mesh, blocks=linears(model))
        found[name] = train(model, rank, ranks, steps=range(STEPS))
    return found


def two_dimensional(rank: int, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    model = shard_quantized(wrap(mlp()), mesh)
    return train(model, rank, ranks, steps=range(STEPS))


def on_the_wire(rank: int, ranks: int) -> dict[str, int]:
    """Bytes that enter the all-gathers of one step, with weights in bf16 and as codes."""
    found = {}
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    collective = (
        "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    )
    gather = getattr(dist, collective)
    for name in ("bf16", "codes"):
        sent: list[int] = []

        def counted(out: Any, given: Any, *rest: Any, sent: list[int] = sent, **more: Any) -> Any:
            sent.append(given.nbytes)
            return gather(out, given, *rest, **more)

        model = wrap(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3))))
        mesh = init_device_mesh("cpu", (ranks,))
        if name == "codes":
            shard_quantized(model, mesh, blocks=linears(model), mp_policy=mixed)
        else:
            for layer in linears(model):
                fully_shard(layer, mesh=mesh, mp_policy=mixed)
            fully_shard(model, mesh=mesh, mp_policy=mixed)
        x = torch.randn(32, 512, generator=torch.Generator().manual_seed(0))
        setattr(dist, collective, counted)
        model(x).square().mean().backward()
        setattr(dist, collective, gather)
        found[name] = sum(sent)
    return found


def held(rank: int, ranks: int) -> dict[str, list[int]]:
    """Bytes of all live tensors after each of some steps."""
    found: dict[str, list[int]] = {}
    for name in ("plain", "codes"):
        model = wrap(mlp())
        mesh = init_device_mesh("cpu", (ranks,))
        if name == "codes":
            shard_quantized(model, mesh, blocks=linears(model))
        else:
            for layer in (*linears(model), model):
                fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = live_bytes()
        found[name] = []
        for step in range(3):
            model(share(batch(step), rank, ranks)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found[name].append(live_bytes() - before)
    return found


def live_bytes() -> int:
    gc.collect()
    storages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    for tensor in tensors:
        if type(tensor) in (torch.Tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def saved(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Train whole; train to the middle, save, load into a new model, go on."""
    half = STEPS - 1
    mesh = init_device_mesh("cpu", (ranks,))
    model = shard_quantized(wrap(mlp(), RANDOM), mesh)
    whole = train(model, rank, ranks, steps=range(STEPS))
    model = shard_quantized(wrap(mlp(), RANDOM), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    go_on(model, optimizer, rank, ranks, steps=range(half))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=str(folder / f"from-{ranks}"))
    optimizer_names = sorted(get_optimizer_state_dict(model, optimizer)["state"])
    return {"whole": whole, "names": optimizer_names, **resumed(rank, ranks, folder, ranks)}


def resumed(rank: int, ranks: int, folder: Path, saved_by: int) -> dict[str, Any]:
    """Load what `saved_by` ranks wrote and make the last step."""
    model = shard_quantized(wrap(mlp(), RANDOM), init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=str(folder / f"from-{saved_by}"))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    loaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    loaded = {name: tensor.clone() for name, tensor in loaded.items()}
    last = go_on(model, optimizer, rank, ranks, steps=range(STEPS - 1, STEPS))
    return {"loaded": loaded, "resumed": last}


SENT = ([0, 5, 3, 1], [7, 0, 0, 2], [4, 4, 4, 4], [0, 0, 0, 0])
"""Rows from each rank to each rank; the last one has none to send."""


def exchanged(rank: int, ranks: int) -> dict[str, Any]:
    """Rows there and back in several formats, with the bytes that entered the collective."""
    send = list(SENT[rank][:ranks])
    receive = [SENT[other][rank] for other in range(ranks)]
    found: dict[str, Any] = {}
    exchange, sent = dist.all_to_all_single, []

    def counted(out: Any, given: Any, *rest: Any, **more: Any) -> Any:
        sent.append(given.nbytes)
        return exchange(out, given, *rest, **more)

    dist.all_to_all_single = counted
    for cast in ("mxfp8", "mxfp4", "mxfp6_e2m3"):
        x = torch.randn(sum(send), 69, generator=torch.Generator().manual_seed(rank))
        x = x.bfloat16().requires_grad_()
        y = all_to_all(x, send, receive, cast=cast)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(10 + rank)).bfloat16()
        y.backward(dy)
        found[cast] = {"x": x.detach(), "y": y.detach(), "dy": dy, "dx": x.grad, "bytes": sent[:1]}
        sent.clear()
    dist.all_to_all_single = exchange
    return found


def everything(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "invariance": invariance(rank, ranks),
        "trained": trained(rank, ranks),
        "wire": on_the_wire(rank, ranks),
        "exchanged": exchanged(rank, ranks),
    }
    if ranks % 2 == 0 and ranks > 2:
        found["hsdp"] = two_dimensional(rank, ranks)
        found["resharded"] = resumed(rank, ranks, folder.parent / "2", saved_by=2)
    else:
        found["held"] = held(rank, ranks)
        found["saved"] = saved(rank, ranks, folder)
    return found


def lost(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """The last rank is killed between forward and backward of the second step."""
    model = shard_quantized(wrap(mlp()), init_device_mesh("cpu", (ranks,)))
    started = time.monotonic()
    try:
        for step in range(3):
            loss = model(share(batch(step), rank, ranks)).square().mean()
            if step == 1 and rank == ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
    except RuntimeError as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    return {"error": None, "seconds": time.monotonic() - started}


def worker(
    rank: int, ranks: int, folder: str, task: Callable[[int, int, Path], dict[str, Any]]
) -> None:
    warnings.simplefilter("ignore")  # of torch about its own gloo and FSDP
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{task.__name__}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    found = task(rank, ranks, Path(folder))
    torch.save(found, Path(folder) / f"{task.__name__}-{rank}.pt")
    if task is not lost:
        dist.destroy_process_group()
