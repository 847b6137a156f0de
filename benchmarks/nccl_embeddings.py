"""Embedding tables over groups of GPUs with TorchRec: bytes of the all-to-all, in JSON lines.

torchrun --standalone --nproc-per-node N benchmarks/nccl_embeddings.py    (N even, two groups)

On GPUs the groups are TorchRec's DMPCollection, in its default and its fully sharded form, and FP8
is FBGEMM's. Without GPUs the same groups are set up by hand over gloo, to try the script itself:
DMPCollection, full sharding and FBGEMM's FP8 exist on GPUs only. Ratios are to 16 bits a value.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lowprec.embeddings import embedding_codecs
from lowprec.recipe import Recipe, Transport

GPU = torch.cuda.is_available()
TABLES, ROWS, WIDTH, BATCH, STEPS = 4, 10_000, 128, 512, 5
NAMES = [f"table{i}" for i in range(TABLES)]
MOST = {"bf16": 1.0, "fp8": 0.55, "mxfp8": 0.55, "mx4": 0.32, "mxfp4": 0.32}
VALUES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if GPU else torch.device("cpu")


def sharded(sent: str, strategy: str, size: int) -> tuple[nn.Module, Any]:
    """Tables over the `size` ranks of each group, and what makes the groups agree after a step."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import DistributedModelParallel, sharding_plan, types
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DMPCollection

    torch.manual_seed(0)
    ranks = dist.get_world_size()
    configs = [EmbeddingBagConfig(ROWS, WIDTH, one, feature_names=[one]) for one in NAMES]
    bags = EmbeddingBagCollection(configs, device=device())
    recipe = Recipe("benchmark", "benchmark", (), transport=Transport(sent, None, "benchmark"))
    codecs = embedding_codecs(recipe, device())
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 50.0}, codecs)
    kind = device().type
    if not GPU:
        mesh = init_device_mesh("cpu", (2, size), mesh_dim_names=("replicate", "shard"))
        first = size * mesh["replicate"].get_local_rank()
    else:
        first = 0  # DMPCollection moves the plan of one group to the others
    places = {
        name: sharding_plan.table_wise(first + i % size, compute_kernel="fused")
        for i, name in enumerate(NAMES)
    }
    world = size if GPU else ranks
    placed = sharding_plan.construct_module_sharding_plan(bags, places, sharder, size, world, kind)
    plan = types.ShardingPlan({"": placed})
    if GPU:
        tables = DMPCollection(
            bags,
            device(),
            plan,
            ranks,
            size,
            dist.group.WORLD,
            types.ShardingStrategy[strategy],
            sharders=[sharder],
        )
        return tables, tables.sync if strategy == "DEFAULT" else lambda: None
    replicas = mesh.get_group("replicate")
    env = types.ShardingEnv2D(mesh.get_group("shard"), replicas, dist.group.WORLD, mesh, size, True)
    tables = DistributedModelParallel(bags, env, device(), plan, [sharder])
    own = [one for w in tables.state_dict().values() for one in w.to_local().local_shards()]
    return tables, lambda: [dist.all_reduce(one.div_(2), group=replicas) for one in own]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of values and codes that enter the all-to-alls."""
    exchange, sent = dist.all_to_all_single, []

    def counting(output: Any, input: Any, *rest: Any, **more: Any) -> Any:
        if input.dtype in VALUES:
            sent.append(input.nbytes)
        return exchange(output, input, *rest, **more)

    dist.all_to_all_single = counting
    try:
        yield sent
    finally:
        dist.all_to_all_single = exchange


def measured(sent: str, strategy: str) -> dict[str, Any]:
    from torchrec import KeyedJaggedTensor

    rank, size = dist.get_rank(), dist.get_world_size() // 2
    tables, agree = sharded(sent, strategy, size)
    torch.manual_seed(1)
    top = nn.Linear(TABLES * WIDTH, 1).to(device())
    draw = torch.Generator().manual_seed(rank)
    ids = torch.randint(ROWS, (TABLES * BATCH,), generator=draw).to(device())
    features = KeyedJaggedTensor(NAMES, ids, lengths=torch.ones_like(ids))
    losses = []
    for _ in range(STEPS):
        with counted() as entered:
            loss = (top(tables(features).values()).squeeze(1) - 1).square().mean()
            loss.backward()
        agree()
        losses.append(loss.item())
    wide = 2 * 2 * BATCH * TABLES * WIDTH  # forward and backward, two bytes each
    ratio = sum(entered) / wide
    return {"ratio": ratio, "losses": losses, "ok": ratio <= MOST[sent] and losses[-1] < losses[0]}


def main() -> int:
    warnings.simplefilter("ignore")  # of TorchRec and FBGEMM about their own imports
    rank = int(os.environ["RANK"])
    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if GPU else "gloo", timeout=timedelta(seconds=60))
    failed = False
    for strategy in ("DEFAULT", "FULLY_SHARDED") if GPU else ("DEFAULT",):
        for sent in MOST if GPU else [one for one in MOST if one != "fp8"]:
            try:
                result = measured(sent, strategy)
            except Exception as error:
                line = {"embeddings": sent, "strategy": strategy, "rank": rank, "ok": False}
                print(json.dumps({**line, "error": f"{type(error).__name__}: {error}"}), flush=True)
                # No tidy end of the group: other ranks may wait in a collective.
                os._exit(1)
            head = {"embeddings": sent, "strategy": strategy, "ranks": dist.get_world_size()}
            if rank == 0:
                print(json.dumps({**head, "backend": dist.get_backend(), **result}), flush=True)
            failed |= not result["ok"]
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
