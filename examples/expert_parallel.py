"""Four experts over two ranks, twice: tokens travel in MXFP8, grouped products are MXFP8.

As any job of several processes: torchrun --nproc-per-node 4 examples/expert_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun

from lowprec.nn.grouped import GroupedLinear
from lowprec.policy import LinearPolicy
from lowprec.transport import all_to_all

EXPERTS, WIDTH, TOKENS, STEPS = 4, 64, 256, 20
POLICY = "mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8"


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    data, expert = mesh["data"].get_group(), mesh["expert"].get_group()
    torch.manual_seed(mesh["expert"].get_local_rank())  # other experts, the same in every group
    own = GroupedLinear(2, WIDTH, WIDTH, policy=LinearPolicy.parse(POLICY))
    torch.manual_seed(0)
    router = nn.Linear(WIDTH, EXPERTS)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(TOKENS, WIDTH)
    scores = router(x) - torch.tensor([0, 0, 100, 0])  # nobody wants expert 2
    chosen, order = scores.argmax(1).sort(stable=True)
    counts = torch.bincount(chosen, minlength=EXPERTS)
    # Tokens that come here: from rank 0 to both experts of this rank, then from rank 1.
    coming, by_expert = torch.empty_like(counts), [0, 2, 1, 3]
    dist.all_to_all_single(coming, counts, group=expert)
    send, receive = counts.view(2, 2).sum(1).tolist(), coming.view(2, 2).sum(1).tolist()
    losses = []
    for _ in range(STEPS):
        parts = all_to_all(x[order], send, receive, group=expert).split(coming.tolist())
        tokens = torch.cat([parts[i] for i in by_expert])
        parts = own(tokens, coming.view(2, 2).sum(0).tolist()).split(coming[by_expert].tolist())
        y = all_to_all(torch.cat([parts[i] for i in by_expert]), receive, send, group=expert)
        loss = (y + x[order]).square().mean()  # every expert learns to negate
        loss.backward()
        dist.all_reduce(own.weight.grad, group=data)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"tokens to each expert: {counts.tolist()}; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        main()
    else:
        torchrun(["--standalone", "--nproc-per-node=4", __file__])
