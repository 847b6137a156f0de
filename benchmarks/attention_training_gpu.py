"""A jagged ranker trained on a GPU with its attention in FP8 against BF16: losses and step times.

    python benchmarks/attention_training_gpu.py [--steps N] [--seeds N] [--out FILE]

Histories of 16 to 2000 items, heads of 128: causal self attention, attention pooled by a few
queries, and candidates that attend to the pool. The label of a candidate: whether it is among the
last 12 items that the user saw. Linear layers run by BF16 autocast in both arms. One JSON line an
arm and seed, appended as it comes, then the differences; step times are medians of wall clock,
eager. On a fresh machine kernels are compiled first, for about a minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import lowprec  # noqa: E402
from lowprec.attention_policy import ATTENTION_BF16  # noqa: E402
from lowprec.recipe import Recipe, Rule  # noqa: E402
from lowprec.timing import machine  # noqa: E402

ITEMS, WIDTH, HEADS, POOLED, USERS, CANDIDATES = 96, 512, 4, 32, 64, 16
RECENT, SHORTEST, LONGEST, HELD_OUT = 12, 16, 2000, 20
ARMS: Final = ("bf16", "fp8-attention")


class Block(nn.Module):
    """One attention between its projections and after a norm."""

    def __init__(self, mask: lowprec.Mask) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.attention = lowprec.Attention(
            mask=mask, qk_norm=WIDTH // HEADS, rotary=lowprec.Rotary()
        )
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, queries: Tensor, keys: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        """queries + attention."""
        q = self.q(self.norm(queries)).unflatten(-1, (HEADS, -1))
        k, v = self.kv(self.norm(keys)).unflatten(-1, (2, HEADS, -1)).unbind(1)
        mixed: Tensor = queries + self.out(self.attention(q, k, v, cu_q, cu_k).flatten(1))
        return mixed


class Ranker(nn.Module):
    """Scores of candidates [users, candidates] from a jagged history."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.queries = nn.Parameter(torch.randn(POOLED, WIDTH))
        self.history = Block(lowprec.Mask("causal"))
        self.pool = Block(lowprec.Mask())
        self.cross = Block(lowprec.Mask())
        self.head = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, 1))

    def forward(self, history: Tensor, cu: Tensor, candidates: Tensor) -> Tensor:
        """history [T], cu int32 [users + 1], candidates [users, n]."""
        users = len(cu) - 1
        of_user = torch.arange(users + 1, dtype=torch.int32, device=cu.device)
        x = self.items(history)
        x = self.history(x, x, cu, cu)
        pooled = self.pool(self.queries.repeat(users, 1), x, of_user * POOLED, cu)
        asked = self.items(candidates).flatten(0, 1)
        cu_asked = of_user * candidates.shape[1]
        y: Tensor = self.head(self.cross(asked, pooled, cu_asked, of_user * POOLED))
        return y.view(candidates.shape)


def batch(random: torch.Generator, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """History, offsets, candidates and labels; lengths are heavy-tailed."""
    tail = torch.rand(USERS, generator=random).clamp(min=1e-3) ** -1.0
    lengths = (60 * tail).long().clamp(SHORTEST, LONGEST)
    cu = functional.pad(lengths.cumsum(0), (1, 0)).int()
    history = torch.randint(ITEMS, (int(cu[-1]),), generator=random)
    candidates = torch.randint(ITEMS, (USERS, CANDIDATES), generator=random)
    owner = torch.repeat_interleave(torch.arange(USERS), lengths)
    recent = cu[1:].long()[owner] - torch.arange(len(history)) <= RECENT
    seen = torch.zeros(USERS, ITEMS)
    seen[owner[recent], history[recent]] = 1
    parts = (history, cu, candidates, seen.gather(1, candidates))
    return tuple(part.to(device) for part in parts)  # type: ignore[return-value]


def converted(model: nn.Module, arm: str) -> nn.Module:
    """The model with its attentions, and nothing else, by the recipe."""
    if arm == "bf16":
        policy: Any = ATTENTION_BF16
    else:
        rules = lowprec.load_recipe(arm).rules
        policy = next(rule.policy for rule in rules if rule.kind == "attention")
    recipe = Recipe(arm, "attention alone", (Rule("*", "attention", policy, "attention alone"),))
    return lowprec.apply(model, lowprec.plan(model, recipe))


def train(arm: str, seed: int, steps: int, device: str) -> dict[str, Any]:
    """The line of one arm and seed."""
    torch.manual_seed(seed)
    model = converted(Ranker().to(device), arm)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    random, curve, times = torch.Generator().manual_seed(seed), [], []
    for _ in range(steps):
        *inputs, labels = batch(random, device)
        begun = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            scores = model(*inputs)
        loss = functional.binary_cross_entropy_with_logits(scores.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())  # waits for the device
        times.append(1e3 * (time.perf_counter() - begun))
    tenths = [curve[i * steps // 10 : (i + 1) * steps // 10] for i in range(10)]
    return {
        "arm": arm,
        "seed": seed,
        "steps": steps,
        "train_loss_by_tenth": [round(statistics.mean(one), 4) for one in tenths],
        "held_out_loss": round(held_out(model, device), 5),
        "median_step_ms": round(statistics.median(times), 2),
    }


def held_out(model: nn.Module, device: str) -> float:
    """Mean loss over batches that no step has seen."""
    unseen, found = torch.Generator().manual_seed(10_000), []
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        for _ in range(HELD_OUT):
            *inputs, labels = batch(unseen, device)
            scores = model(*inputs).float()
            found.append(functional.binary_cross_entropy_with_logits(scores, labels).item())
    return statistics.mean(found)


def main() -> None:
    """Train every arm with every seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="file for the JSON lines; they are printed anyway")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = machine()._asdict() | {"hardware": str(machine().hardware)} if device == "cuda" else {}

    def write(line: dict[str, Any]) -> None:
        """At once: a run that is cut short leaves what it has."""
        text = json.dumps(line | {"machine": facts}) + "\n"
        print(text, end="", flush=True)
        if arguments.out is not None:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(text)

    apart = []
    for seed in range(arguments.seeds):
        final = {}
        for arm in ARMS:
            line = train(arm, seed, arguments.steps, device)
            final[arm] = line["held_out_loss"]
            write(line)
        apart.append(round(final[ARMS[1]] - final[ARMS[0]], 5))
    write({"held_out_minus_bf16": apart})


if __name__ == "__main__":
    main()
