"""Sharded weights over NCCL: codes, training, bytes on the wire, memory and step times, in JSON.

torchrun --standalone --nproc-per-node N benchmarks/nccl_session.py      (any number of GPUs)

Prints one JSON line a check, from rank 0, in under a minute; the exit code is 1 if one fails. On a
machine without a GPU it runs over gloo on small shapes, to try the script itself. Times are medians
of steps that take turns between the arms, in ms of wall clock of the slowest rank.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

import lowprec
from lowprec.fsdp import shard_plan, shard_quantized
from lowprec.grouped import native_refusal
from lowprec.hardware import current
from lowprec.nn.grouped import GroupedLinear
from lowprec.policy import LinearPolicy
from lowprec.tensor_parallel import parallelize_quantized
from lowprec.transport import all_to_all

GPU = torch.cuda.is_available()
SHAPES = ((100, 96), (96, 160), (2880, 768), (7, 64), (1024, 512))
WIDTH, LAYERS, ROWS, STEPS = (4096, 4, 8192, 12) if GPU else (256, 3, 128, 4)
TILES = "mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8"
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if GPU else torch.device("cpu")


def mesh(*shape: int) -> Any:
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cuda" if GPU else "cpu", shape, mesh_dim_names=names)


def policy_of(text: str) -> LinearPolicy:
    return LinearPolicy.parse(text)


def convert(model: nn.Module, recipe: str) -> nn.Module:
    return lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe(recipe)))


def stack(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(device())


def blocks(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if isinstance(one, nn.Linear)]


def bf16_fsdp(model: nn.Module) -> nn.Module:
    for one in (*blocks(model), model):
        fully_shard(one, mesh=mesh(dist.get_world_size()), mp_policy=MIXED)
    return model


def codes_fsdp(model: nn.Module) -> nn.Module:
    sharding = mesh(dist.get_world_size())
    return shard_quantized(model, sharding, blocks=blocks(model), mp_policy=MIXED)


def batch(rank: int, rows: int, width: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(rows, width, generator=draw).to(device())


def codes() -> dict[str, Any]:
    """Gathered codes are those of the whole weight, or the plan said that it stays unquantized."""
    ranks, found = dist.get_world_size(), []
    for n, k in SHAPES:
        torch.manual_seed(1)
        layer = nn.Sequential(nn.Linear(k, n)).to(device())
        whole = lowprec.quantize(layer[0].weight.detach(), "mxfp8_32x32")
        convert(layer, "mxfp8")
        planned = shard_plan(layer, ranks).weights[0].cast is not None
        shard_quantized(layer, mesh(ranks))
        seen: list[Any] = []
        layer[0].register_forward_pre_hook(lambda one, _, seen=seen: seen.append(arrived(one)))
        layer(batch(dist.get_rank(), 32, k))
        same = seen[0] is not None and all(
            torch.equal(a, b) for a, b in zip(seen[0], (whole.codes, whole.scales), strict=True)
        )
        found.append({"shape": [n, k], "as_codes": planned, "ok": same == planned})
    return {"shapes": found, "ok": all(one["ok"] for one in found)}


def arrived(layer: nn.Module) -> list[torch.Tensor] | None:
    if not hasattr(layer.weight, "lowprec_quantized"):
        return None
    q = layer.weight.lowprec_quantized.q
    return [q.codes.clone(), q.scales.clone()]


def trains(sharding: Any = None) -> dict[str, Any]:
    """Losses of the sharded model are those of one process that averages the ranks' gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    one, many = (convert(stack(256, 3), "mxfp8") for _ in range(2))
    shard_quantized(many, sharding or mesh(ranks), blocks=blocks(many))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (one, many)]
    losses: list[tuple[float, float]] = []
    for step in range(5):
        pair = []
        for model, optimizer in zip((one, many), optimizers, strict=True):
            lowprec.set_step(model, step, data_rank=rank)
            loss = (model(batch(rank, 64, 256)) - 1).square().mean()
            loss.backward()
            if model is one:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= ranks
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            pair.append(total.item() / ranks)
        losses.append((pair[0], pair[1]))
    apart = max(abs(a - b) / abs(a) for a, b in losses)
    fell = losses[-1][1] < losses[0][1]
    return {"losses": [b for _, b in losses], "apart": apart, "ok": apart < 1e-4 and fell}


def hybrid() -> dict[str, Any]:
    """The same over a mesh of two dimensions, replicate and shard."""
    ranks = dist.get_world_size()
    if ranks % 2:
        return {"skipped": f"{ranks} ranks are no two groups", "ok": True}
    return {"mesh": [2, ranks // 2], **trains(mesh(2, ranks // 2))}


@contextmanager
def counted(*names: str) -> Iterator[list[int]]:
    """Bytes that enter the collectives of these names, those of them that torch has."""
    sent: list[int] = []
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            given = args[1] if len(args) > 1 else more.get("input", more.get("input_tensor"))
            sent.append(given.nbytes)
            return original(*args, **more)

        return call

    for name, original in originals.items():
        setattr(dist, name, counting(original))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def wire() -> dict[str, Any]:
    """Bytes into the all-gathers of one step, of FSDP2 in bf16 and with codes."""
    if dist.get_world_size() == 1:
        return {"skipped": "one rank gathers nothing", "ok": True}
    sent = {}
    for name, sharded in (("bf16", bf16_fsdp), ("codes", codes_fsdp)):
        model = sharded(convert(stack(512, 3), "mxfp8"))
        with counted("all_gather_single", "all_gather_into_tensor") as entered:
            model(batch(dist.get_rank(), 32, 512)).square().mean().backward()
        sent[name] = sum(entered)
    ratio = sent["codes"] / sent["bf16"]
    return {"bytes": sent, "ratio": ratio, "ok": ratio <= 0.52}


def activations() -> dict[str, Any]:
    """Rows that cross as codes arrive as their own cast, and so does the gradient."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    send = [8 + other for other in range(ranks)]
    x = batch(rank, sum(send), 96).bfloat16().requires_grad_()
    receive = [8 + rank] * ranks
    y = all_to_all(x, send, receive)
    others = [batch(other, sum(send), 96).bfloat16().split(send)[rank] for other in range(ranks)]
    want = lowprec.dequantize(lowprec.quantize(torch.cat(others), "mxfp8"), torch.bfloat16)
    y.backward(torch.ones_like(y))
    back = x.grad is not None and bool((x.grad == 1).all())
    return {"ok": torch.equal(y, want) and back}


def tensor() -> dict[str, Any]:
    """Tensor parallelism along N: y and the gradient of the weight are those of the whole layer."""
    ranks, results = dist.get_world_size(), []
    for parallel in (False, True):
        torch.manual_seed(0)
        layer = convert(nn.Sequential(nn.Linear(256, 64 * ranks)).to(device()), "mxfp8")
        if parallel:
            style = ColwiseParallel(output_layouts=Replicate())
            parallelize_quantized(layer, init_device_mesh(device().type, (ranks,)), {"0": style})
        y = layer(batch(3, 64, 256))
        y.square().sum().backward()
        gradient: Any = layer[0].weight.grad
        results.append([y.detach(), gradient.full_tensor() if parallel else gradient])
    return {"ok": all(torch.equal(a, b) for a, b in zip(*results, strict=True))}


def alarms() -> dict[str, Any]:
    """A NaN that the last rank alone saw is None, never a finite amax, on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = convert(stack(64, 1), "mxfp8")
    x = batch(rank, 32, 64)
    if rank == ranks - 1:
        x[3, 5] = torch.nan
    with lowprec.watch(model, every=1) as watch:
        model(x).square().mean().backward()
        stats = watch.over_ranks()["0"]["fprop"]["x"]
    return {"nonfinite": stats.nonfinite, "ok": stats.amax is None}


def grouped() -> dict[str, Any]:
    """Experts in one native grouped product against one emulated product each."""
    rowwise = lowprec.FORMATS["fp8_rowwise"]
    refused = native_refusal(rowwise, rowwise, current())
    if refused:
        return {"skipped": refused, "ok": True}
    torch.manual_seed(0)
    layers = [GroupedLinear(4, 512, 256, policy=policy_of("fp8_rowwise"), native=n).to(device())
              for n in (False, True)]  # fmt: skip
    layers[1].load_state_dict(layers[0].state_dict())
    counts, results = [100, 0, 37, 119], []
    for layer in layers:
        x = batch(7, sum(counts), 512).requires_grad_()
        y = layer(x, counts)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, layer.weight.grad])
    apart = [
        float((a - b).norm() / a.norm()) for a, b in zip(*results, strict=True) if a is not None
    ]
    return {"relative_difference": apart, "ok": max(apart) < 4e-3}


def memory() -> dict[str, Any]:
    """Bytes that each further layer holds, built, after one step and after three."""
    if not GPU:
        return {"skipped": "no GPU", "ok": True}
    found = {}
    for name, sharded in (("bf16", bf16_fsdp), ("codes", codes_fsdp)):
        # The first time for what the libraries keep themselves.
        _, two, six = (held(sharded, layers, name == "codes") for layers in (2, 2, 6))
        found[name] = [(a - b) / 4 for a, b in zip(six, two, strict=True)]
    within = all(a <= b for a, b in zip(found["codes"], found["bf16"], strict=True))
    return {"bytes_a_layer": found, "ok": within and found["codes"][1] == found["codes"][2]}


def held(sharded: Callable[[nn.Module], nn.Module], layers: int, quantized: bool) -> list[int]:
    """Bytes over those before the model: built, after one step, after three."""
    before, bytes_held = allocated(), []
    model = stack(1024, layers)
    model = sharded(convert(model, "mxfp8") if quantized else model)
    optimizer = torch.optim.AdamW(model.parameters())
    x = batch(0, 64, 1024)
    for step in range(4):
        if step in (0, 1, 3):
            bytes_held.append(allocated() - before)
        model(x).square().mean().backward()
        optimizer.step()
    return bytes_held


def allocated() -> int:
    """Bytes that tensors hold once cycles of objects are collected."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def speed() -> dict[str, Any]:
    """Steps of FSDP2 in bf16, and of two recipes with weights gathered as codes and in bf16."""
    arms: dict[str, nn.Module] = {"bf16": bf16_fsdp(stack(WIDTH, LAYERS))}
    for recipe in ("mxfp8", "mxfp8-portable"):
        arms[f"{recipe}, codes"] = codes_fsdp(convert(stack(WIDTH, LAYERS), recipe))
        arms[f"{recipe}, bf16 gather"] = bf16_fsdp(convert(stack(WIDTH, LAYERS), recipe))
    optimizers = {k: torch.optim.SGD(arm.parameters(), lr=1e-3) for k, arm in arms.items()}
    x = batch(dist.get_rank(), ROWS, WIDTH).bfloat16()
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(STEPS + 3):
        for name, arm in arms.items():
            dist.barrier()
            synchronize()
            started = time.perf_counter()
            arm(x).float().square().mean().backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            synchronize()
            if turn >= 3:
                times[name].append(1e3 * (time.perf_counter() - started))
    slowest = torch.tensor([times[name] for name in arms], device=device())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    ms = {k: statistics.median(one) for k, one in zip(arms, slowest.tolist(), strict=True)}
    relative = {name: ms["bf16"] / one for name, one in ms.items()}
    setting = {"width": WIDTH, "layers": LAYERS, "rows": ROWS, "steps": STEPS}
    return {**setting, "ms": ms, "speed_of_bf16": relative, "ok": True}


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


CHECKS = (codes, trains, hybrid, wire, activations, tensor, alarms, grouped, memory, speed)


def main() -> int:
    warnings.simplefilter("ignore")  # of torch about itself
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    with tempfile.TemporaryDirectory() as folder:
        where = "env://" if "RANK" in os.environ else f"file://{folder}/store"
        dist.init_process_group(
            "nccl" if GPU else "gloo",
            init_method=where,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=40),
        )
        failed = run(rank, ranks)
        dist.destroy_process_group()
    return int(failed)


def run(rank: int, ranks: int) -> bool:
    """All checks; one that raises on any rank ends the session, as ranks are then out of step."""
    backend = dist.get_backend()
    head = {"ranks": ranks, "backend": backend, "torch": torch.__version__, "on": str(current())}
    failed = False
    for check in CHECKS:
        started, error = time.perf_counter(), None
        try:
            result = check()
        except Exception as caught:
            result, error = {"ok": False, "error": f"{type(caught).__name__}: {caught}"}, caught
        line = {"check": check.__name__, **head, **result}
        line["seconds"] = round(time.perf_counter() - started, 2)
        if rank == 0 or error is not None:
            print(json.dumps(line), flush=True)
        if error is not None:
            # No tidy end of the group: other ranks may wait in a collective.
            os._exit(1)
        failed |= not agreed(bool(result["ok"]))
    return failed


def agreed(ok: bool) -> bool:
    """True when every rank says so."""
    said = torch.tensor(int(ok), device=device())
    dist.all_reduce(said, dist.ReduceOp.MIN)
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
