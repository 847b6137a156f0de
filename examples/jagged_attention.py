"""Train on jagged histories: self attention, pooled attention and cross attention in MXFP8."""

import torch
from torch import Tensor, nn

import lowprec

torch.manual_seed(0)
torch.set_num_threads(1)
ITEMS, WIDTH, HEADS, POOLED, USERS = 20, 32, 2, 4, 16


class Block(nn.Module):
    """One attention between its projections; queries look at keys."""

    def __init__(self, mask: lowprec.Mask) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.attention = lowprec.Attention(mask=mask, qk_norm=WIDTH // HEADS)

    def forward(self, queries: Tensor, keys: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        q = self.q(queries).unflatten(-1, (HEADS, -1))
        k, v = self.kv(keys).unflatten(-1, (2, HEADS, -1)).unbind(1)
        mixed: Tensor = queries + self.attention(q, k, v, cu_q, cu_k).flatten(1)
        return mixed


items, head = nn.Embedding(ITEMS, WIDTH), nn.Linear(WIDTH, 1)
seeds = nn.Parameter(torch.randn(POOLED, WIDTH))
history, pool, cross = Block(lowprec.Mask("window", left=8)), *map(Block, [lowprec.Mask()] * 2)
model = nn.ModuleDict(
    {"embed": items, "history": history, "pooled": pool, "cross": cross, "head": head}
)
plan = lowprec.plan(model, lowprec.load_recipe("mxfp8-attention"))
print(plan)
lowprec.apply(model, plan)

optimizer = torch.optim.Adam([*model.parameters(), seeds], lr=1e-2)
users = torch.arange(USERS + 1, dtype=torch.int32)
for step in range(40):
    lengths = torch.randint(0, 12, (USERS,))  # an empty history is one, too
    cu = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    seen, candidates = torch.randint(ITEMS, (int(cu[-1]),)), torch.randint(ITEMS, (USERS, 4))
    owner = torch.repeat_interleave(torch.arange(USERS), lengths)
    was_seen = torch.zeros(USERS, ITEMS).index_put((owner, seen), torch.tensor(1.0))

    x = items(seen)
    x = history(x, x, cu, cu)
    pooled = pool(seeds.repeat(USERS, 1), x, users * POOLED, cu)
    y = cross(items(candidates).flatten(0, 1), pooled, users * 4, users * POOLED)
    labels = was_seen.gather(1, candidates).flatten()
    loss = nn.functional.binary_cross_entropy_with_logits(head(y).squeeze(1), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 13 == 0:
        print(f"step {step:2d}  {len(seen):3d} tokens  loss {loss.item():.4f}")
print("self attention ran:", lowprec.observe(model).gemms["history.attention"])
