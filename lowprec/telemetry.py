"""What the run really did: executed products by layer and precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowprec.nn import Linear
from lowprec.policy import PRODUCTS


@dataclass(frozen=True)
class Observation:
    """Executed products since `apply`: gemms[layer][product] -> {precision: count}.

    A precision that never ran is absent; `float64` counts unquantized products of float64 inputs.
    """

    gemms: dict[str, dict[str, dict[str, int]]]


def observe(model: torch.nn.Module) -> Observation:
    """Read the counts of every wrapped layer of `model`."""
    gemms: dict[str, dict[str, dict[str, int]]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Linear):
            continue
        counts = module.lowprec_products.counts
        gemms[name] = {key: dict(ran) for key, ran in zip(PRODUCTS, counts, strict=True)}
    return Observation(gemms)
