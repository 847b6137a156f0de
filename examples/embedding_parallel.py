"""Embedding tables over two ranks, twice: embeddings and their gradients travel in MXFP8.

As any job of several processes: torchrun --nproc-per-node 4 examples/embedding_parallel.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun

import lowprec
from lowprec.embeddings import embedding_codecs

ROWS, WIDTH, BATCH, STEPS, NAMES, CPU = 500, 64, 256, 20, list("abcd"), torch.device("cpu")


def main() -> None:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel, sharding_plan, types
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as Sharder

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    recipe = lowprec.load_recipe(Path(__file__).parent / "recipes" / "embeddings-mxfp8.toml")
    configs = [EmbeddingBagConfig(ROWS, WIDTH, one, feature_names=[one]) for one in NAMES]
    bags = EmbeddingBagCollection(configs, device=CPU)
    sharder = Sharder({"learning_rate": 50.0}, embedding_codecs(recipe, CPU))
    # TorchRec's DMPCollection sets up these groups and averages the tables, but on GPUs only.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicas, at = mesh.get_group("replicate"), 2 * mesh["replicate"].get_local_rank()
    env = types.ShardingEnv2D(mesh.get_group("shard"), replicas, dist.group.WORLD, mesh, 2, True)
    places = {n: sharding_plan.table_wise(at + i % 2, None, "fused") for i, n in enumerate(NAMES)}
    plan = sharding_plan.construct_module_sharding_plan(bags, places, sharder, 2, 4, "cpu")
    tables = DistributedModelParallel(bags, env, CPU, types.ShardingPlan({"": plan}), [sharder])
    own = [o for w in tables.state_dict().values() for o in w.to_local().local_shards()]
    top = nn.Sequential(nn.Linear(4 * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    lowprec.apply(top, lowprec.plan(top, recipe))
    ddp, optimizer = nn.parallel.DistributedDataParallel(top), torch.optim.AdamW(top.parameters())
    ids = (torch.randint(ROWS, (4, BATCH)) + dist.get_rank()) % ROWS
    features = KeyedJaggedTensor(NAMES, ids.view(-1), lengths=torch.ones_like(ids).view(-1))
    for step in range(STEPS):
        for table in own:  # both groups start from the same tables
            dist.all_reduce(table.div_(2), group=replicas)
        loss = nn.functional.mse_loss(ddp(tables(features).values()), (ids.sum(0) % 2).float())
        loss.backward()  # tables are updated here
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step in (0, STEPS - 1):
            print(f"step {step}, embeddings in {recipe.transport.embeddings}: loss {loss:.3f}")


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        main()
    else:
        torchrun(["--standalone", "--nproc-per-node=4", __file__])
