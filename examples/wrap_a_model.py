"""Wrap a model you already have, train it as before, and see what really ran."""

import torch
from torch import nn

import lowprec

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(39, 256),
    nn.ReLU(),
    nn.LayerNorm(256),
    nn.Linear(256, 256),
    nn.ReLU(),
    nn.Linear(256, 1),
)

plan = lowprec.plan(model, lowprec.load_recipe("mxfp8"))
print(plan)
lowprec.apply(model, plan)

optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
features = torch.randn(512, 39)
labels = (features[:, 0] > 0).float()
for step in range(20):
    loss = nn.functional.binary_cross_entropy_with_logits(model(features).squeeze(-1), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}")

print("\nexecuted products:")
for layer, products in lowprec.observe(model).gemms.items():
    print(f"  {layer}: {products}")

lowprec.restore(model)
print("\nrestored:", type(model[0]).__name__, "with the trained weights")
