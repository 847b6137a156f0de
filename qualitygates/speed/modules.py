"""The module rung: each quantized layer alone, forward and backward, on what the model feeds it.

Layers that do the same work (shape, rows, dtype, precisions) are timed once, and all are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import lowprec

from ..errors import GateError
from .blocks import Block, Step
from .record import STEPS_PER_BLOCK

UNQUANTIZED = ("bf16", "skip")
# How each operand of a product lies in memory, and the axis that the product contracts.
_OPERANDS = {
    "fprop": (("x", -1), ("w", -1)),
    "dgrad": (("dy", -1), ("w", -2)),
    "wgrad": (("dy", -2), ("x", -2)),
}


@dataclass
class Group:
    """Layers that do the same work, and the input of the first of them."""

    layers: list[str]
    planned: Any
    x: torch.Tensor
    needs_dx: bool
    autocast: torch.dtype | None
    label: str

    @property
    def dtype(self) -> str:
        """What the baseline multiplies in, "bfloat16" where it trains in BF16."""
        return str(self.autocast or self.x.dtype).removeprefix("torch.")

    def context(self) -> AbstractContextManager[Any]:
        """The autocast that the model ran the layer under."""
        return torch.autocast(
            self.x.device.type, dtype=self.autocast, enabled=self.autocast is not None
        )


def quantized(plan: lowprec.Plan) -> list[Any]:
    """The layers of a plan with a quantized product at its start."""
    return [layer for layer in plan.layers if layer.converted and quantized_products(layer)]


def quantized_products(layer: Any) -> list[str]:
    """The names of the quantized products of a planned layer."""
    return [name for name, product in layer.policy.items() if str(product) not in UNQUANTIZED]


def capture(
    model: nn.Module, layers: Sequence[Any], forward_backward: Callable[[], None]
) -> list[Group]:
    """Groups of planned layers with the inputs that one training step of `model` gives them.

    A layer that the step never calls is in no group; of one that it calls twice the first counts.
    """
    groups: dict[tuple[Any, ...], Group] = {}
    seen: set[str] = set()

    def note(planned: Any, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if planned.name in seen:
            return
        seen.add(planned.name)
        x, device = inputs[0], inputs[0].device.type
        rows = x.shape[:-1].numel()
        enabled = torch.is_autocast_enabled(device)
        autocast = torch.get_autocast_dtype(device) if enabled else None
        precisions = tuple(str(product) for _, product in planned.policy.items())
        needs = (x.requires_grad, module.weight.requires_grad, module.bias is not None)
        key = (planned.shape, rows, x.dtype, module.weight.dtype, autocast, precisions, needs)
        if key not in groups:
            n, k = planned.shape
            groups[key] = Group(
                layers=[],
                planned=planned,
                x=x.detach().clone(),
                needs_dx=x.requires_grad,
                autocast=autocast,
                label=f"{rows} x {n} x {k}",
            )
        groups[key].layers.append(planned.name)

    handles = [
        model.get_submodule(layer.name).register_forward_pre_hook(partial(note, layer))
        for layer in layers
    ]
    try:
        forward_backward()
    finally:
        for handle in handles:
            handle.remove()
    return list(groups.values())


def module_step(layer: nn.Module, group: Group, *, compiled: bool) -> Step:
    """Forward and backward of one layer as in training: every cast runs, the weight's too."""
    call: Callable[[torch.Tensor], torch.Tensor] = torch.compile(layer) if compiled else layer
    weight = layer.weight
    if not isinstance(weight, torch.Tensor):
        raise GateError(f"layer {group.layers[0]}: its weight is no tensor and cannot be timed")
    with group.context():
        dy = torch.randn_like(layer(group.x).detach())

    def step() -> None:
        for parameter in layer.parameters():
            parameter.grad = None
        # A new version of the same numbers, as after an optimizer step: no cast of the weight that
        # an earlier step made may be used again.
        weight.detach()[:0].zero_()
        x = group.x.detach().requires_grad_(group.needs_dx)
        with group.context():
            y = call(x)
        if y.requires_grad:
            y.backward(dy)

    return step


def conversion_ms(layer: nn.Module, group: Group, *, block_ms: Block) -> float | None:
    """Milliseconds of the casts of one step, each alone; what is fused in training costs less.

    None where a rotation is part of the conversion: it cannot be timed apart.
    """
    planned = group.planned
    weight = layer.weight
    if not isinstance(weight, torch.Tensor):
        return None
    x = group.x.reshape(-1, group.x.shape[-1])
    dy = torch.randn(x.shape[0], planned.shape[0], dtype=torch.bfloat16, device=x.device)
    sources = {"x": x, "w": weight.detach(), "dy": dy}
    total = 0.0
    for cast, operand, axis, backend in _casts(planned, needs_dx=group.needs_dx):
        if cast is None:
            return None
        stream = lowprec.RandomStream(0, planned.name, operand) if cast.stochastic else None
        convert = partial(
            lowprec.quantize, sources[operand], cast, axis=axis, generator=stream, backend=backend
        )
        for _ in range(STEPS_PER_BLOCK):
            convert()
        total += block_ms(_nothing_returned(convert))
    return total


def _casts(planned: Any, *, needs_dx: bool) -> Iterator[tuple[Any, str, int, str]]:
    """Each different cast of a step as (cast, operand, axis, backend); None for a rotated one."""
    done = set()
    for name in quantized_products(planned):
        if name == "dgrad" and not needs_dx:
            continue
        product, backends = getattr(planned.policy, name), planned.backends[name]
        sides = ((product.left, backends.left), (product.right, backends.right))
        for (cast, backend), (operand, axis) in zip(sides, _OPERANDS[name], strict=True):
            if product.rotation is not None:
                yield None, operand, axis, backend
            elif (str(cast), operand, axis) not in done:
                done.add((str(cast), operand, axis))
                yield cast, operand, axis, backend


def _nothing_returned(convert: Callable[[], Any]) -> Step:
    def step() -> None:
        convert()

    return step
