"""Weights that travel as codes: FSDP2 over two ranks, twice (HSDP), gradients summed in float32.

As any job of several processes: torchrun --nproc-per-node 4 examples/sharded_weights.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.run import main as torchrun

import lowprec
from lowprec.fsdp import shard_plan, shard_quantized

WIDTH, HIDDEN, BATCH, STEPS = 64, 256, 256, 20


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(block(), block(), nn.Linear(WIDTH, 1))
    lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe("mxfp8-safe")))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plan = shard_plan(model, mesh, mp_policy=mixed)
    shard_quantized(model, mesh, blocks=[model[0], model[1]], mp_policy=mixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(BATCH, WIDTH)
    y, losses = x[:, 0] * x[:, 1], []
    for step in range(STEPS):
        lowprec.set_step(model, step, data_rank=dist.get_rank())
        loss = (model(x).squeeze(1) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(plan)
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        main()
    else:
        torchrun(["--standalone", "--nproc-per-node=4", __file__])
