"""What a backward pass would need: the bytes that an autograd graph keeps alive, by storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lowprec.tensor import QuantizedTensor


def kept_storages(outputs: Iterable[torch.Tensor]) -> dict[int, tuple[int, torch.dtype]]:
    """Storages that the graph behind `outputs` keeps: address -> (bytes, dtype of one view).

    Walks every node: tensors saved by autograd or by save_for_backward, as the hooks left them
    (codes, scales, whatever object holds them), and tensors kept as attributes of a custom
    Function's context. Trainable Parameters and their views are left out: they stay without a
    graph as well.
    """
    nodes = _nodes(outputs)
    weights = {
        node.variable.untyped_storage().data_ptr()
        for node in nodes
        if isinstance(getattr(node, "variable", None), torch.nn.Parameter)
    }
    found: dict[int, tuple[int, torch.dtype]] = {}
    for node in nodes:
        for tensor in _parts(list(_saved(node)), set()):
            if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
                continue
            storage = tensor.untyped_storage()
            if not isinstance(tensor, torch.nn.Parameter) and storage.data_ptr() not in weights:
                found[storage.data_ptr()] = (storage.nbytes(), tensor.dtype)
    return found


def quantized_kept(*outputs: torch.Tensor) -> list[QuantizedTensor]:
    """The quantized tensors that the graph keeps, each once."""
    parts = [part for node in _nodes(outputs) for part in _parts(list(_saved(node)), set())]
    found = {id(part): part for part in parts if isinstance(part, QuantizedTensor)}
    return list(found.values())


def kept_bytes(*outputs: torch.Tensor, without: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of `kept_storages`, less the storages of the tensors in `without`."""
    known = {tensor.untyped_storage().data_ptr() for tensor in without}
    storages = kept_storages(outputs)
    return sum(size for address, (size, _) in storages.items() if address not in known)


def _nodes(outputs: Iterable[torch.Tensor]) -> list[Any]:
    pending: list[Any] = [output.grad_fn for output in outputs]
    seen: dict[Any, None] = {}
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen[node] = None
            pending.extend(source for source, _ in node.next_functions)
    return list(seen)


def _saved(node: Any) -> Iterator[Any]:
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            value = getattr(node, name)
            # A saved tensor that the hooks replaced gives what they returned.
            for one in value if isinstance(value, (tuple, list)) else (value,):
                yield getattr(one, "data", None)
                yield from _checkpoint(getattr(one, "unpack_hook", None))
    # Attributes that a custom Function set on its context.
    yield getattr(node, "__dict__", {})


def _checkpoint(unpack: Any) -> Iterator[Any]:
    """What a checkpoint without reentry saved of its inputs, apart from the graph.

    Older releases than torch 2.13 do not show it: count such checkpoints with 2.13.
    """
    for cell in getattr(unpack, "__closure__", None) or ():
        frame = cell.cell_contents
        if type(frame).__module__ == "torch.utils.checkpoint":
            yield from (getattr(one, "data", one) for one in frame.saved_args)


def _parts(value: Any, seen: set[int]) -> Iterator[Any]:
    """`value` and everything that it holds, other than through modules and autograd."""
    if value is None or isinstance(value, (str, bytes, int, float, type)) or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = list(value)
    else:
        slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
        parts = [*getattr(value, "__dict__", {}).values(), *slots]
    for part in parts:
        yield from _parts(part, seen)
