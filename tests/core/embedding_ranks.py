"""What every rank does in tests/core/test_embedding_transport.py; results go to one file a rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lowprec.embeddings import embedding_codecs
from lowprec.recipe import Recipe, Transport

TABLES, ROWS, WIDTH, BATCH, STEPS = 4, 50, 64, 32, 4
NAMES = [f"table{i}" for i in range(TABLES)]
CPU = torch.device("cpu")


def recipe(embeddings: str | None) -> Recipe:
    return Recipe("test", "test", (), transport=Transport(embeddings, None, "test"))


def bags() -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    torch.manual_seed(0)
    configs = [EmbeddingBagConfig(ROWS, WIDTH, one, feature_names=[one]) for one in NAMES]
    return EmbeddingBagCollection(configs, device=CPU)


def features(rank: int) -> Any:
    from torchrec import KeyedJaggedTensor

    draw = torch.Generator().manual_seed(rank)
    lengths = torch.randint(3, (TABLES * BATCH,), generator=draw)
    ids = torch.randint(ROWS, (int(lengths.sum()),), generator=draw)
    return KeyedJaggedTensor(NAMES, ids, lengths=lengths)


def in_order(pooled: Any) -> torch.Tensor:
    """[batch, tables x width]; TorchRec puts the tables of a rank side by side."""
    return torch.cat([pooled[name] for name in NAMES], dim=1)


def sharded(codecs: Any, *, groups: int, ranks: int) -> tuple[Any, list[torch.Tensor], Any]:
    """Tables over the ranks of a group, in every group; what this rank holds; replicas."""
    from torchrec.distributed import DistributedModelParallel, sharding_plan, types
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    module = bags()
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 0.5}, codecs)
    size = ranks // groups
    mesh = init_device_mesh("cpu", (groups, size), mesh_dim_names=("replicate", "shard"))
    replicas, shards = mesh.get_group("replicate"), mesh.get_group("shard")
    env = types.ShardingEnv2D(shards, replicas, dist.group.WORLD, mesh, size, True)
    first = size * mesh["replicate"].get_local_rank()
    wise = sharding_plan.table_wise
    places = {name: wise(first + i % size, None, "fused") for i, name in enumerate(NAMES)}
    plan = sharding_plan.construct_module_sharding_plan(module, places, sharder, size, ranks, "cpu")
    plan = types.ShardingPlan({"": plan})
    tables = DistributedModelParallel(module, env, CPU, plan, [sharder])
    own, whole = [], bags().state_dict()
    for name, weight in tables.state_dict().items():  # TorchRec draws new ones
        for shard in weight.to_local().local_shards():
            own.append(shard.copy_(whole[name]))
    return tables, own, replicas


class Counting:
    """Bytes that enter the all-to-alls of floats and codes while it is open."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def __enter__(self) -> list[int]:
        self.exchange = dist.all_to_all_single

        def counted(output: Any, input: Any, *rest: Any, **more: Any) -> Any:
            if input.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8):
                self.sent.append(input.nbytes)
            return self.exchange(output, input, *rest, **more)

        dist.all_to_all_single = counted
        return self.sent

    def __exit__(self, *_: Any) -> None:
        dist.all_to_all_single = self.exchange


def trained(codecs: Any, rank: int, ranks: int, *, groups: int) -> dict[str, Any]:
    """What the tables gave first, losses, and the bytes sent in each direction of a step."""
    tables, own, replicas = sharded(codecs, groups=groups, ranks=ranks)
    torch.manual_seed(1)
    top = nn.Linear(TABLES * WIDTH, 1)
    first, losses = None, []
    for _ in range(STEPS):
        with Counting() as sent:
            pooled = in_order(tables(features(rank)))
            loss = (top(pooled).squeeze(1) - 1).square().mean()
            loss.backward()
        first = pooled.detach() if first is None else first
        losses.append(loss.item())
        for table in own:
            dist.all_reduce(table.div_(groups), group=replicas)
    return {
        "first": first,
        "losses": losses,
        "bytes": sent,
        "own": [one.clone() for one in own],
    }


def exchanged(rank: int, ranks: int) -> dict[str, Any]:
    return {
        str(name): trained(embedding_codecs(recipe(name), "cpu"), rank, ranks, groups=1)
        for name in (None, "bf16", "mx4", "mxfp8", "mxfp4")
    }


def two_dimensional(rank: int, ranks: int) -> dict[str, Any]:
    codecs = embedding_codecs(recipe("mxfp8"), "cpu")
    return trained(codecs, rank, ranks, groups=2)


def worker(rank: int, ranks: int, folder: str, task: Any) -> None:
    warnings.simplefilter("ignore")  # of TorchRec and FBGEMM about their own imports
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    torch.save(task(rank, ranks), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
