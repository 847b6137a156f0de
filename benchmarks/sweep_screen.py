"""What the screen of 100 layers in 5 formats costs, in plain training steps a batch.

`python benchmarks/sweep_screen.py` times, in turns, plain BF16-free steps (forward, backward, Adam)
of 100 linear layers of 512 x 512 on 1024 rows and the screen of the same model on one batch, CPU
time of one thread. Prints one JSON line; docs/records/sweep-screen.jsonl has one run.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import nn

from qualitygates.sensitivity.screen import screen

FORMATS = ("mxfp4", "nvfp4", "mxfp8", "fp8_1x128 x fp8_128x128", "mxfp6_e2m3")
PRODUCTS = ("fprop", "dgrad", "wgrad")


def model_of(layers: int, width: int) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 1))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    logits = model(batch[0]).squeeze(-1)
    return nn.functional.binary_cross_entropy_with_logits(logits, batch[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", type=int, nargs="?", default=100)
    parser.add_argument("width", type=int, nargs="?", default=512)
    parser.add_argument("rows", type=int, nargs="?", default=1024)
    given = parser.parse_args()
    layers, width, rows = given.layers, given.width, given.rows
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = model_of(layers, width)
    optimizer = torch.optim.Adam(model.parameters())
    batch = (torch.randn(rows, width), torch.rand(rows).round())
    names = [name for name, one in model.named_modules() if isinstance(one, nn.Linear)][:layers]
    options = dict.fromkeys(PRODUCTS, FORMATS)
    steps, screens = [], []
    for turn in range(4):
        started = time.process_time()
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        between = time.process_time()
        screen(model, [batch], loss=loss, options=options, layers=names)
        if turn:  # the first turn warms up
            steps.append(between - started)
            screens.append(time.process_time() - between)
    ratios = sorted(one / step for one, step in zip(screens, steps, strict=True))
    print(
        json.dumps(
            {
                "layers": layers,
                "formats": FORMATS,
                "width": width,
                "rows": rows,
                "step_cpu_seconds": steps,
                "screen_cpu_seconds": screens,
                "ratio": ratios[len(ratios) // 2],
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
