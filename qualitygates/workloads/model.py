"""A ranking network of the usual parts: hashed embeddings, jagged history, cross layers, MLP.

Shapes: B rows, D dense values, C categorical columns, T history entries of all rows together.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of the network; `buckets` holds one table size a categorical column.

    A network without dense values has `dense` = 0, one without categorical columns `buckets` = ().

    `history_buckets` is the table size of the history's ids, 0 for a network without history;
    `history_dense` counts the values that come with each history entry.
    """

    dense: int
    buckets: tuple[int, ...]
    history_buckets: int
    history_dense: int
    embedding: int = 16
    width: int = 192
    hidden: tuple[int, ...] = (384, 384, 192)


class PreNorm(nn.Sequential):
    """LayerNorm, then Linear, then ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.LayerNorm(inputs), nn.Linear(inputs, outputs), nn.ReLU())


class LogitHead(nn.Module):
    """Dot product with one weight vector in float32.

    A bf16 logit takes some 400 distinct values over a whole evaluation set, which ranks badly; a
    vector product has no low-precision gain to lose.
    """

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs) * inputs**-0.5 * 0.1)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, inputs] to float32 logits [B]."""
        return (x.float() * self.weight).sum(-1) + self.bias


class History(nn.Module):
    """Jagged history to [B, 2 * embedding]: mean of all entries beside the latest entry."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.table = nn.Embedding(sizes.history_buckets, sizes.embedding)
        self.values = (
            nn.Linear(sizes.history_dense, sizes.embedding) if sizes.history_dense else None
        )
        nn.init.normal_(self.table.weight, std=0.05)

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        """history_ids [T], history_values [T, H], history_offsets [B + 1]; oldest entry first."""
        offsets = features["history_offsets"]
        entries_TE = self.table(features["history_ids"])
        if self.values is not None:
            entries_TE = torch.relu(entries_TE + self.values(features["history_values"]))
        lengths = offsets.diff()
        rows = torch.arange(len(lengths), device=offsets.device).repeat_interleave(lengths)
        total_BE = entries_TE.new_zeros(len(lengths), entries_TE.shape[1])
        total_BE = total_BE.index_add(0, rows, entries_TE)
        mean_BE = total_BE / lengths.clamp(min=1).unsqueeze(1)
        # A row without history points at a zero row put in front.
        padded = torch.cat([entries_TE.new_zeros(1, entries_TE.shape[1]), entries_TE])
        last = torch.where(lengths > 0, offsets[1:], torch.zeros_like(lengths))
        return torch.cat([mean_BE, padded[last]], dim=1)


class RankingModel(nn.Module):
    """DLRM-like network with DCN-v2 cross layers and a pre-norm MLP; logits float32 [B].

    features: dense [B, D] float32, categorical [B, C] int64 (bucket numbers), and the history of
    `History` when the sizes have one.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.table = nn.Embedding(sum(sizes.buckets), sizes.embedding) if sizes.buckets else None
        if self.table is not None:
            nn.init.normal_(self.table.weight, std=0.05)
        first = torch.tensor((0, *sizes.buckets))[: len(sizes.buckets)].cumsum(0)
        self.register_buffer("first", first, persistent=False)
        self.bottom = (
            nn.Sequential(nn.Linear(sizes.dense, 128), nn.ReLU(), PreNorm(128, 2 * sizes.embedding))
            if sizes.dense
            else None
        )
        self.history = History(sizes) if sizes.history_buckets else None
        parts = len(sizes.buckets) + 2 * sum(p is not None for p in (self.bottom, self.history))
        self.project = PreNorm(parts * sizes.embedding, sizes.width)
        self.cross_norm = nn.ModuleList(nn.LayerNorm(sizes.width) for _ in range(2))
        self.cross = nn.ModuleList(nn.Linear(sizes.width, sizes.width) for _ in range(2))
        widths = (sizes.width, *sizes.hidden)
        self.mlp = nn.Sequential(*(PreNorm(a, b) for a, b in itertools.pairwise(widths)))
        self.head_norm = nn.LayerNorm(widths[-1])
        self.head = LogitHead(widths[-1])

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits of a batch of any size, rows without history included."""
        parts = []
        if self.table is not None:
            first: torch.Tensor = self.get_buffer("first")
            parts.append(self.table(features["categorical"] + first).flatten(1))
        if self.bottom is not None:
            parts.append(self.bottom(features["dense"]))
        if self.history is not None:
            parts.append(self.history(features))
        start = self.project(torch.cat(parts, dim=1))
        x = start
        for norm, linear in zip(self.cross_norm, self.cross, strict=True):
            x = start * linear(norm(x)) + x
        logits: torch.Tensor = self.head(self.head_norm(self.mlp(x)))
        return logits


def adam_with_warmup(
    model: nn.Module, *, steps: int, learning_rate: float
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Adam; its rate rises for a tenth of the steps, then falls along a cosine to zero.

    A rate that ends above zero leaves the bias, and so the calibration, wandering to the last step.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    warmup = max(steps // 10, 1)

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)
