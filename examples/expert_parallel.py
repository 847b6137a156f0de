"""Four experts over two ranks, twice: tokens travel in MXFP8, experts compute in MXFP8.

As any job of several processes: torchrun --nproc-per-node 4 examples/expert_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun

import lowprec
from lowprec.transport import all_to_all

EXPERTS, WIDTH, TOKENS, STEPS = 4, 64, 256, 20


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    data, expert = mesh["data"].get_group(), mesh["expert"].get_group()
    first_own = 2 * mesh["expert"].get_local_rank()
    torch.manual_seed(0)
    router, experts = nn.Linear(WIDTH, EXPERTS), [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
    own = nn.ModuleList(experts[first_own : first_own + 2])
    lowprec.apply(own, lowprec.plan(own, lowprec.load_recipe("mxfp8")))
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(TOKENS, WIDTH)
    scores = router(x) - torch.tensor([0, 0, 100, 0])  # nobody wants expert 2
    chosen, order = scores.argmax(1).sort(stable=True)
    counts = torch.bincount(chosen, minlength=EXPERTS)
    # Tokens that come here: from rank 0 to both experts of this rank, then from rank 1.
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts, group=expert)
    send, receive = counts.view(2, 2).sum(1).tolist(), coming.view(2, 2).sum(1).tolist()
    losses = []
    for step in range(STEPS):
        lowprec.set_step(own, step, data_rank=dist.get_rank())
        parts = all_to_all(x[order], send, receive, group=expert).split(coming.tolist())
        results = [own[i % 2](part) for i, part in enumerate(parts)]
        y = all_to_all(torch.cat(results), receive, send, group=expert)
        loss = (y + x[order]).square().mean()  # every expert learns to negate
        loss.backward()
        for parameter in own.parameters():
            dist.all_reduce(parameter.grad, group=data)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"tokens to each expert: {counts.tolist()}; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        main()
    else:
        torchrun(["--standalone", "--nproc-per-node=4", __file__])
