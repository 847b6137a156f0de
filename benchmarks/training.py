"""A whole training run by recipe against BF16: loss curves, final NE, step time and its parts.

    python benchmarks/training.py [--tiny] [--arms NAME ...] [--steps N] [--rows N] [--out FILE]

A click model of about 100M parameters: embeddings of categorical fields and dense features, six
pre-norm gated MLP blocks, one logit. Labels are drawn by a fixed teacher from interactions between
fields, so the entropy of the clicks is known to be beatable. Every arm starts from the same weights
and sees the same batches; "bf16, other seed" starts from others and shows what a difference in NE
means. Weights are bfloat16 with float32 masters that AdamW updates. One JSON line an arm: the loss
every 10 steps, NE over batches that no step has seen and its difference to BF16 in percent, ms of
a step (20th, 50th, 80th percentile over spans of 10 steps, host included), the speed-up over BF16,
and the kernel time of a step by class. --tiny is a model of toy size that runs on a CPU, where no
time means anything. On an H200 the whole takes less than 100 seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))

import lowprec
from benchmarks.casts import machine
from benchmarks.modules import is_product, kernels
from qualitygates.metrics import normalized_entropy

ARMS: Final = ("bf16", "mxfp8-portable", "mxfp8", "bf16, other seed")
SPAN: Final = 10
SETTLED: Final = 5
"""Spans that are not timed: kernels are compiled in them."""
CLASSES: Final = {
    "norm": ("norm", "gammabeta"),
    "conversion": (
        "cast_tiles",
        "cast_whole_rows",
        "encode_spans",
        "decode_tiles",
        "round_trip_tiles",
        "partial_maxima",
        "whole_maximum",
        "rotate_tiles",
        "fill_words",
    ),
    "activation": ("gate", "silu"),
    "optimizer": ("adam", "multi_tensor"),
}


@dataclass(frozen=True)
class Scale:
    """Sizes of the model and of the run."""

    fields: int = 26
    vocabulary: int = 1000
    embedding: int = 16
    dense: int = 32
    width: int = 2048
    hidden: int = 2560
    blocks: int = 6
    rows: int = 16384
    steps: int = 500
    evaluation: int = 20
    rate: float = 3e-4


TINY: Final = Scale(
    fields=6, vocabulary=20, embedding=8, dense=16, width=64, hidden=96, blocks=1,
    rows=256, steps=60, evaluation=8, rate=5e-3,
)  # fmt: skip


class Block(nn.Module):
    """x + down(silu(gate) * up), gate and up of the normalized x, by the layers that fuse."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = lowprec.NormLinear(
            nn.RMSNorm(width, eps=1e-6), nn.Linear(width, 2 * hidden, bias=False)
        )
        self.down = lowprec.GatedLinear(nn.Linear(hidden, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        y: Tensor = x + self.down(self.up(x))
        return y


class Clicks(nn.Module):
    """Logits [rows] of ids [rows, fields] and dense features [rows, dense]."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.tables = nn.Embedding(scale.fields * scale.vocabulary, scale.embedding)
        inputs = scale.fields * scale.embedding + scale.dense
        self.project = nn.Linear(inputs, scale.width)
        self.blocks = nn.Sequential(
            *(Block(scale.width, scale.hidden) for _ in range(scale.blocks))
        )
        self.norm = nn.RMSNorm(scale.width, eps=1e-6)
        self.head = nn.Linear(scale.width, 1)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """ids count through the tables of all fields."""
        x = torch.cat((self.tables(ids).flatten(1), dense), 1)
        y: Tensor = self.head(self.norm(self.blocks(self.project(x))))
        return y[:, 0]


class Teacher:
    """Draws batches: clicks depend on each id, on pairs of fields, and on the dense features."""

    def __init__(self, scale: Scale, device: str) -> None:
        random = torch.Generator().manual_seed(7)
        self.scale, self.device = scale, device
        shape = (scale.fields * scale.vocabulary, 4)
        self.hidden = torch.randn(shape, generator=random).to(device)
        self.alone = torch.randn(shape[0], generator=random).to(device) / scale.fields**0.5
        self.mix = torch.randn(scale.dense, 4, generator=random).to(device) / scale.dense**0.5

    def batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """ids, dense features (bfloat16) and labels of one batch, by its number alone."""
        scale = self.scale
        random = torch.Generator(self.device).manual_seed(1000 + number)
        drawn: dict[str, Any] = {"generator": random, "device": self.device}
        ids = torch.randint(scale.vocabulary, (scale.rows, scale.fields), **drawn)
        ids += torch.arange(scale.fields, device=self.device) * scale.vocabulary
        dense = torch.randn(scale.rows, scale.dense, **drawn)
        pairs = self.hidden[ids].unflatten(1, (2, -1))
        together = (pairs[:, 0] * pairs[:, 1]).sum((1, 2)) / scale.fields**0.5
        score = self.alone[ids].sum(1) + together + (dense @ self.mix).tanh().sum(1) - 1.5
        labels = torch.rand(scale.rows, **drawn) < score.sigmoid()
        return ids, dense.bfloat16(), labels.float()


class Masters:
    """AdamW on float32 copies of bfloat16 parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter], rate: float) -> None:
        self.parameters = list(parameters)
        self.copies = [nn.Parameter(one.detach().float()) for one in self.parameters]
        fused = self.copies[0].is_cuda
        self.optimizer = torch.optim.AdamW(self.copies, lr=rate, weight_decay=0.0, fused=fused)

    def step(self) -> None:
        """Update the copies from the gradients, then the parameters; gradients are freed."""
        for one, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = None if one.grad is None else one.grad.float()
            one.grad = None
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([*self.parameters], [*self.copies])


def model_of(arm: str, scale: Scale, device: str) -> nn.Module:
    """The model as an arm trains it."""
    torch.manual_seed(1 if "other seed" in arm else 0)
    model = Clicks(scale).to(device, torch.bfloat16)
    if not arm.startswith("bf16"):
        plan = lowprec.plan(model, lowprec.load_recipe(arm))
        lowprec.apply(model, plan)
    return model


def backends_of(model: nn.Module) -> list[str]:
    """Which backends the products of the converted layers run on."""
    layers = [one for one in model.modules() if isinstance(one, lowprec.Linear)]
    stages = [one.lowprec_products.stage for one in layers]
    return sorted({one.product for stage in stages for one in stage.backends.values()})


def evaluated(model: nn.Module, teacher: Teacher) -> float:
    """NE over batches that no step has seen."""
    loss, label, weight = 0.0, 0.0, 0
    with torch.no_grad():
        for number in range(teacher.scale.evaluation):
            ids, dense, labels = teacher.batch(-1 - number)
            logits = model(ids, dense).float()
            loss += functional.binary_cross_entropy_with_logits(
                logits.double(), labels.double(), reduction="sum"
            ).item()
            label += labels.sum().item()
            weight += len(labels)
    return normalized_entropy(loss, weight=weight, label=label)


def run(arm: str, scale: Scale, device: str) -> dict[str, Any]:
    """Train one arm: its record, without comparison to others."""
    teacher, model = Teacher(scale, device), model_of(arm, scale, device)
    masters = Masters(list(model.parameters()), scale.rate)

    def step(number: int) -> Tensor:
        ids, dense, labels = teacher.batch(number)
        logits = model(ids, dense).float()
        loss = functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        masters.step()
        return loss.detach()

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    losses, times = [], []
    for first in range(0, scale.steps, SPAN):
        wait()
        start = time.perf_counter()
        found = [step(number) for number in range(first, first + SPAN)]
        wait()
        times.append((time.perf_counter() - start) * 1e3 / SPAN)
        losses.append(round(torch.stack(found).mean().item(), 5))
    line: dict[str, Any] = {
        "arm": arm,
        "parameters": sum(one.numel() for one in model.parameters()),
        "rows": scale.rows,
        "steps": scale.steps,
        "backends": backends_of(model),
        "loss_every_10_steps": losses,
        "ne": round(evaluated(model, teacher), 6),
    }
    if device == "cuda":
        timed = times[SETTLED:]
        fifths = statistics.quantiles(timed, n=5)
        line["ms"] = [round(ms, 3) for ms in (fifths[0], statistics.median(timed), fifths[3])]
        line["kernel_ms"] = breakdown(lambda: step(scale.steps))
    return line


def class_of(name: str) -> str:
    """What a kernel does, by its name."""
    if is_product(name):
        return "gemm"
    lower = name.lower()
    for found, words in CLASSES.items():
        if any(word in lower for word in words):
            return found
    return "rest"


def breakdown(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of kernels in a step, by class; the batch is drawn inside, as `rest`."""
    found: dict[str, float] = {}
    for name, us, _ in kernels(step):
        what = class_of(name)
        found[what] = found.get(what, 0.0) + us / 1e3
    return {what: round(ms, 3) for what, ms in sorted(found.items())}


def compared(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with NE and step time against the first, BF16."""
    base = lines[0]
    for line in lines:
        line["ne_change_percent"] = round(100 * (line["ne"] / base["ne"] - 1), 4)
        if "ms" in line:
            line["step_speedup"] = round(base["ms"][1] / line["ms"][1], 3)
            total = [sum(one["kernel_ms"].values()) for one in (base, line)]
            line["kernel_speedup"] = round(total[0] / total[1], 3)
    return lines


def row(line: dict[str, Any]) -> str:
    """One arm as a line of text."""
    text = f"{line['arm']:<18} NE {line['ne']:.5f} ({line['ne_change_percent']:+.3f} %)"
    text += f"  loss {line['loss_every_10_steps'][0]:.4f} -> {line['loss_every_10_steps'][-1]:.4f}"
    if "ms" not in line:
        return text + "  no time: not a GPU"
    parts = ", ".join(f"{what} {ms:.2f}" for what, ms in line["kernel_ms"].items())
    text += f"  {line['ms'][1]:.2f} ms a step, {line['step_speedup']:.2f}x"
    return text + f" (kernels {line['kernel_speedup']:.2f}x: {parts})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train every arm, print a table and append JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiny", action="store_true", help="toy size, on a CPU")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="bf16 first")
    parser.add_argument("--steps", type=int, help=f"a multiple of {SPAN}")
    parser.add_argument("--rows", type=int, help="examples of a step")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    chosen = parser.parse_args(arguments)
    if not chosen.tiny and not torch.cuda.is_available():
        sys.exit("not measurable here: this machine has no CUDA device; --tiny runs on a CPU")
    if chosen.arms[0] != "bf16" or (chosen.steps or SPAN) % SPAN:
        parser.error(f"the first arm must be bf16, and --steps a multiple of {SPAN}")
    if not chosen.tiny and (chosen.steps or SPAN * SETTLED * 2) < SPAN * SETTLED * 2:
        parser.error(f"--steps must be at least {SPAN * SETTLED * 2}: the first compile kernels")
    given = {key: getattr(chosen, key) for key in ("steps", "rows") if getattr(chosen, key)}
    scale = TINY if chosen.tiny else Scale()
    scale = Scale(**{**scale.__dict__, **given})
    device, facts = ("cpu", {"device": "cpu"}) if chosen.tiny else ("cuda", machine())
    lines = []
    for arm in chosen.arms:
        lines.append(run(arm, scale, device))
        print(row(compared(lines)[-1]), flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    if chosen.out:
        with chosen.out.open("a") as file:
            file.writelines(json.dumps(line | facts) + "\n" for line in lines)


if __name__ == "__main__":
    main()
