"""What the run really did: executed products by layer and precision, and sampled numerics."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lowprec.nn import AttentionProducts, Linear
from lowprec.policy import PRODUCTS
from lowprec.watching import LayerMonitor, Stats


@dataclass(frozen=True)
class Observation:
    """Executed products since `apply`, and the latest samples of a running `watch`.

    gemms[layer][product] -> {precision: count}; a precision that never ran is absent; `float64`
    counts unquantized products of float64 inputs. stats[layer][product][operand] -> OperandStats;
    attentions have six products and are not watched;
    layers that are not watched, or have no sample yet, are absent.
    """

    gemms: dict[str, dict[str, dict[str, int]]]
    stats: Stats = field(default_factory=dict)


def observe(model: torch.nn.Module) -> Observation:
    """Read the counts and the latest samples of every wrapped layer of `model`."""
    gemms: dict[str, dict[str, dict[str, int]]] = {}
    stats: Stats = {}
    for name, module in model.named_modules():
        if "lowprec_attention" in module.__dict__:
            attention: AttentionProducts = module.__dict__["lowprec_attention"]
            gemms[name] = {key: dict(ran) for key, ran in attention.record.counts.items()}
        if not isinstance(module, Linear):
            continue
        products = module.lowprec_products
        gemms[name] = {key: dict(ran) for key, ran in zip(PRODUCTS, products.counts, strict=True)}
        if isinstance(products.monitor, LayerMonitor) and products.monitor.latest:
            stats[name] = {key: dict(one) for key, one in products.monitor.latest.items()}
    return Observation(gemms, stats)
