"""Whether a model trains as well with its attention in 8 bits: loss by policy, same data, on a CPU.

A ranker over jagged histories: windowed self attention, pooled attention, candidates that attend to
the pool. The label of a candidate: whether it lies among the last 12 items that the user saw,
earlier ones do not count. Linear layers run by BF16 autocast in all arms, so that attention is all
that differs. Writes docs/records/attention-training.jsonl.
Run: `python benchmarks/attention_training.py [--arms NAME ...]`; the record keeps the rows of
other arms.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowprec

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.attention_sqnr import recipe_policy
from benchmarks.sqnr import Row, write
from lowprec.recipe import Recipe, Rule

ROOT: Final = Path(__file__).parent.parent
RECORD: Final = ROOT / "docs" / "records" / "attention-training.jsonl"
ARMS: Final = ("bf16", "mxfp8-attention", "fp8-attention", "attention-safe")
SEEDS: Final = range(3)
STEPS, EVALUATION_STEPS = 400, 25
ITEMS, WIDTH, HEADS, POOLED, USERS, CANDIDATES = 24, 32, 2, 4, 16, 8
RECENT, LONGEST = 12, 100


class Block(nn.Module):
    """One attention between its projections and after a norm; queries look at keys."""

    def __init__(self, mask: lowprec.Mask, activation: Any) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.attention = lowprec.Attention(
            activation=activation, mask=mask, qk_norm=WIDTH // HEADS, rotary=lowprec.Rotary()
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
        self.history = Block(lowprec.Mask("window", left=RECENT), "silu")
        self.pool = Block(lowprec.Mask(), "softmax")
        self.cross = Block(lowprec.Mask(), "softmax")
        self.head = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, 1))

    def forward(self, history: Tensor, cu: Tensor, candidates: Tensor) -> Tensor:
        """history [T], cu int32 [users + 1], candidates [users, n]."""
        users = len(cu) - 1
        of_user = torch.arange(users + 1, dtype=torch.int32)
        x = self.items(history)
        x = self.history(x, x, cu, cu)
        pooled = self.pool(self.queries.repeat(users, 1), x, of_user * POOLED, cu)
        asked = self.items(candidates).flatten(0, 1)
        cu_asked = of_user * candidates.shape[1]
        y: Tensor = self.head(self.cross(asked, pooled, cu_asked, of_user * POOLED))
        return y.view(candidates.shape)


def batch(random: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """History, offsets, candidates and labels; lengths are heavy-tailed, 0 among them."""
    tail = torch.rand(USERS, generator=random).clamp(min=1e-3) ** -1.0
    lengths = (4 * tail - 4).long().clamp(max=LONGEST)
    cu = functional.pad(lengths.cumsum(0), (1, 0)).int()
    history = torch.randint(ITEMS, (int(cu[-1]),), generator=random)
    candidates = torch.randint(ITEMS, (USERS, CANDIDATES), generator=random)
    owner = torch.repeat_interleave(torch.arange(USERS), lengths)
    left = cu[1:].long()[owner] - torch.arange(len(history))
    recent = left <= RECENT
    seen = torch.zeros(USERS, ITEMS)
    seen[owner[recent], history[recent]] = 1
    return history, cu, candidates, seen.gather(1, candidates)


def converted(model: nn.Module, arm: str) -> nn.Module:
    """The model with its attentions, and nothing else, by the recipe."""
    if arm == "bf16":
        return model
    rule = Rule("*", "attention", recipe_policy(arm), "attention alone")
    return lowprec.apply(model, lowprec.plan(model, Recipe(arm, "attention alone", (rule,))))


def losses(arm: str, seed: int, steps: int) -> list[float]:
    """Training loss of each step, then the mean over batches that no step has seen."""
    torch.manual_seed(seed)
    model = converted(Ranker(), arm)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    random = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        *inputs, labels = batch(random)
        with torch.autocast("cpu"):
            scores = model(*inputs)
        loss = functional.binary_cross_entropy_with_logits(scores.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    unseen = torch.Generator().manual_seed(10_000)
    with torch.no_grad(), torch.autocast("cpu"):
        held_out = [batch(unseen) for _ in range(EVALUATION_STEPS)]
        pairs = [(model(*inputs).float(), labels) for *inputs, labels in held_out]
    found.append(mean(functional.binary_cross_entropy_with_logits(*one).item() for one in pairs))
    return found


def one_run(arm: str, seed: int, steps: int = STEPS) -> Row:
    """The row of one arm and seed."""
    begun = time.perf_counter()
    *curve, final = losses(arm, seed, steps)
    tenths = [curve[i * steps // 10 : (i + 1) * steps // 10] for i in range(10)]
    return {
        "arm": arm,
        "seed": seed,
        "steps": steps,
        "train_loss_by_tenth": [round(mean(one), 4) for one in tenths],
        "held_out_loss": round(final, 5),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def summaries(runs: Sequence[Row]) -> Iterator[Row]:
    """A row an arm: its distance to bf16 over the seeds."""
    final = {(row["arm"], row["seed"]): row["held_out_loss"] for row in runs}
    for arm in ARMS[1:]:
        apart = [final[arm, seed] - final["bf16", seed] for seed in SEEDS]
        yield {
            "arm": arm,
            "held_out_minus_bf16": round(mean(apart), 5),
            "standard_error": round(stdev(apart) / len(apart) ** 0.5, 5),
            "seeds": len(apart),
        }


def main() -> None:
    """Train every arm with every seed and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=ARMS)
    arms = parser.parse_args().arms
    torch.set_num_threads(1)
    known: dict[Any, Row] = {}
    if RECORD.exists():
        rows = (json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines())
        known = {(row["arm"], row["seed"]): row for row in rows if "seed" in row}
    found: list[Row] = []
    for seed in SEEDS:
        for arm in ARMS:
            if arm in arms or (arm, seed) not in known:
                known[arm, seed] = one_run(arm, seed)
                print(json.dumps(known[arm, seed]), flush=True)
            found.append(known[arm, seed])
    found += summaries(found)
    what = "loss of a jagged ranker (window, pooled and cross attention) by attention policy"
    write(RECORD, what, found, script="benchmarks/attention_training.py")


if __name__ == "__main__":
    main()
