"""TorchRec's DMPCollection on four gloo ranks, for tests/core/test_embedding_transport.py.

python -O tests/core/dmp_collection.py FOLDER     a file of results for each rank

It asserts that it has GPUs, which -O leaves out, and names devices by their number, which a CPU
has none of; all else of it runs as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from lowprec.embeddings import embedding_codecs
from tests.core import embedding_ranks as they

RANKS, SIZE = 4, 2


def collection(sent: str) -> Any:
    """Tables over two ranks, twice."""
    from torchrec.distributed import sharding_plan, types
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DMPCollection, _remote_device

    class OnCpu(DMPCollection):  # type: ignore[misc]
        def _remap_sharding_plan(self, plan: Any, *args: Any, **more: Any) -> None:
            super()._remap_sharding_plan(plan, *args, **more)
            for module in plan.plan.values():
                for parameter in module.values():
                    for shard in parameter.sharding_spec.shards:
                        rank = shard.placement.rank()
                        shard.placement = _remote_device(f"rank:{rank}/cpu")

    module = they.bags()
    sharder = EmbeddingBagCollectionSharder(
        {"learning_rate": 0.5}, embedding_codecs(they.recipe(sent), "cpu")
    )
    wise = sharding_plan.table_wise
    places = {name: wise(i % SIZE, None, "fused") for i, name in enumerate(they.NAMES)}
    plan = sharding_plan.construct_module_sharding_plan(module, places, sharder, SIZE, SIZE, "cpu")
    world = dist.group.WORLD
    plan = types.ShardingPlan({"": plan})
    return OnCpu(module, they.CPU, plan, RANKS, SIZE, world, sharders=[sharder])


def trained(rank: int, ranks: int) -> dict[str, Any]:
    tables = collection("mxfp8")
    replicas = tables.device_mesh.get_group("replicate")

    def mean(weights: list[torch.Tensor]) -> None:
        for weight in weights:  # gloo has no average
            dist.all_reduce(weight.div_(RANKS // SIZE), group=replicas)

    tables.set_all_reduce_hook(mean)
    torch.manual_seed(1)
    top = nn.Linear(they.TABLES * they.WIDTH, 1)
    losses, entered = [], []
    for _ in range(they.STEPS):
        with they.Counting() as sent:
            pooled = they.in_order(tables(they.features(rank)))
            loss = (top(pooled).squeeze(1) - 1).square().mean()
            loss.backward()
        entered.append(sum(sent))
        tables.sync()
        losses.append(loss.item())
    state = tables.state_dict().values()
    own = [one.clone() for weight in state for one in weight.to_local().local_shards()]
    return {"losses": losses, "bytes": entered, "own": own}


if __name__ == "__main__":
    mp.spawn(they.worker, (RANKS, str(Path(sys.argv[1])), trained), nprocs=RANKS)
