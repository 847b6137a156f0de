"""The cheap screen: what every format would lose in every product, in a few backward passes.

It only orders the branch runs. Nothing of the model moves: parameters, gradients, buffers, train or
eval mode, hooks and every random stream are what they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from ..errors import DataError, ExperimentError
from .options import PRODUCTS
from .probes import Operands, Probe

B = TypeVar("B")


def screen(
    model: nn.Module,
    batches: Iterable[B],
    *,
    loss: Callable[[nn.Module, B], torch.Tensor],
    options: Mapping[str, Sequence[str]],
    layers: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Proxies of every layer, product and option from one forward and backward pass a batch.

    loss: the mean loss of a batch, a scalar with a graph. options: product -> product texts.
    Returns layer -> {"calls", "batches", "products": {product: {text: proxies}}}; a layer that no
    batch called has calls 0. Raises DataError when the loss itself is not finite, and
    ExperimentError for a name that is no linear layer.
    """
    modules = dict(model.named_modules())
    for name in layers:
        if not isinstance(modules.get(name), nn.Linear):
            raise ExperimentError(f"screen: {name!r} is not a linear layer of the model")
    texts = {product: tuple(options.get(product, ())) for product in PRODUCTS}
    probes = {name: Probe(texts) for name in layers}
    count = 0
    with _untouched(model), _watching({n: modules[n] for n in layers}, probes) as current:
        for batch in batches:
            count += 1
            _one_batch(model, batch, loss, current)
    if not count:
        raise DataError("screen: no batch was given")
    return {
        name: {
            "calls": probe.calls,
            "batches": count,
            "products": {
                product: {text: sums.proxies() for text, sums in by_text.items()}
                for product, by_text in probe.sums.items()
            },
        }
        for name, probe in probes.items()
    }


def _one_batch(
    model: nn.Module, batch: B, loss: Callable[[nn.Module, B], torch.Tensor], current: list[float]
) -> None:
    with torch.enable_grad():
        value = loss(model, batch)
        if not bool(value.isfinite()):
            raise DataError(
                f"screen: the model's own loss is {value.item()} in high precision; cure that "
                "before asking which format is to blame"
            )
        current[0] = value.item()
        wanted = [one for one in model.parameters() if one.requires_grad]
        # Not backward(): that would add to the gradients of the user.
        torch.autograd.grad(value, wanted, allow_unused=True)


@contextmanager
def _watching(
    modules: Mapping[str, nn.Module], probes: Mapping[str, Probe]
) -> Iterator[list[float]]:
    """Hooks that hand every call of a layer to its probe; yields the cell for the batch's loss."""
    current = [0.0]

    def hook(name: str) -> Callable[..., None]:
        def forward(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            source = args[0] if args else kwargs["input"]
            if not output.requires_grad or not source.numel():
                return
            x = source.detach().reshape(-1, source.shape[-1])
            weight: Any = module.weight

            def backward(dy: torch.Tensor) -> None:
                flat = dy.detach().reshape(-1, dy.shape[-1])
                probes[name].saw(Operands(x, weight.detach(), flat, current[0]))

            output.register_hook(backward)

        return forward

    handles = [
        module.register_forward_hook(hook(name), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        yield current
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Put buffers, modes and every random stream back when the block ends, however it ends."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    modes = [(module, module.training) for module in model.modules()]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                module._buffers[name] = buffer
                buffer.copy_(values)


def ranking(
    screened: Mapping[str, Mapping[str, Any]], texts: Mapping[str, str]
) -> list[tuple[str, str]]:
    """(layer, product) in the order in which branches should try them: the likeliest harm first.

    fprop is ordered by its Fisher score, dgrad and wgrad by relative error; the three orders are
    interleaved. A proxy that is not finite comes first: it is where something is wrong already.
    """
    orders = []
    for product in PRODUCTS:
        key = "fisher" if product == "fprop" else "relative_error"
        scored = [
            (_score(one["products"][product].get(texts[product]), key), name)
            for name, one in screened.items()
            if one["calls"]
        ]
        orders.append([(name, product) for _, name in sorted(scored, reverse=True)])
    return [pair for rank in zip(*orders, strict=True) for pair in rank]


def _score(proxies: Mapping[str, Any] | None, key: str) -> float:
    if proxies is None:
        return -1.0
    if proxies["broken"]:
        return float("inf")
    value = proxies[key]
    return -1.0 if value is None else float(value)
