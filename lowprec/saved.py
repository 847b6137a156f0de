"""saved_activations: what autograd keeps for the backward pass, kept quantized.

An activation is a floating tensor that gradient flows through and that depends on data. Both are
read off the tensor that autograd hands over, which carries its history:

- No gradient, no activation. That leaves alone the batch, masks (an additive one holds -inf),
  buffers, frozen weights with their views and the copies that autocast makes of them, the
  log-sum-exp of attention and the statistics of norms: values that somebody else keeps, or that
  must be exact.
- A Parameter, or a tensor whose whole history starts at Parameters (a transpose, autocast's copy,
  a weight norm), is a weight. Data shows in a history as an input without gradient, and for a
  lookup as the lookup itself.
- Inputs of fused attention stay exact. Its backward recomputes exp(q k^T - lse) against the exact
  log-sum-exp, so an error in q or k does not cancel but grows exponentially with the scores. The
  node shows only when its output is saved, after the inputs: those are then kept after all.

None of this needs a mode around every call or a list of storages, so it holds in every thread and
around compiled code.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lowprec import ops
from lowprec.errors import UnsupportedError
from lowprec.formats import Cast
from lowprec.packing import pack_codes, unpack_codes
from lowprec.tensor import QuantizedTensor

MIN_ELEMENTS: Final = 1024
"""Smaller tensors are kept as they are."""
MIN_ROW: Final = 8
"""Tensors with shorter rows are kept as they are: a scale for so few values saves little."""

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
# Their backward takes exp() of the result: an error e there is a factor exp(e) in the gradient.
_EXPONENTIATED: Final = frozenset({"logsoftmax", "logsumexp", "logcumsumexp"})
# Their backward takes exp() of an input less a result that is exact; parts of lower-case names.
_EXPONENTIATING: Final = ("attention", "attn", "mha", "logsumexp")
# Integer indices are data, but leave no trace among the inputs of a node.
_LOOKUPS: Final = ("embedding", "index", "gather", "take", "maskedselect")
_WEIGHT_NODES: Final = 16
_RECENT: Final = 8


class saved_activations:
    """Context manager under which autograd keeps activations quantized to `format`.

    format: a Cast or its text (`mxfp8`, `mxfp4:even`, any name in FORMATS). Forward passes run
    inside it, backward passes anywhere; outputs do not change, gradients come from the dequantized
    activations. Tensors are quantized along their last axis in memory when they are saved, and come
    back with their dtype, shape and device; a block with Inf or NaN comes back NaN. Weights,
    tensors without gradient, float64 and small tensors are kept as they are. The innermost of
    nested contexts applies; one object may be entered again, and from several threads.

    Raises UnsupportedError for an unknown or stochastic cast (recomputation could not repeat its
    bits), when it is entered while gradients are disabled, and inside a function that
    torch.compile traces; and in the backward pass, as a RuntimeError also, when a tensor that was
    kept as it is has been changed in place.
    """

    def __init__(self, format: Cast | str) -> None:
        _refuse_tracing()
        cast = Cast.parse(format) if isinstance(format, str) else format
        if not isinstance(cast, Cast):
            raise UnsupportedError(
                f"saved_activations takes a Cast or its text such as 'mxfp8', not {format!r}"
            )
        if cast.stochastic:
            raise UnsupportedError(
                f"saved_activations({str(cast)!r}): stochastic rounding could not be repeated by "
                "activation checkpointing; use the same format without ':sr'"
            )
        self.cast = cast
        self._packed: weakref.WeakValueDictionary[Any, _Packed] = weakref.WeakValueDictionary()
        self._here = _Here()

    def __enter__(self) -> Self:
        _refuse_tracing()
        if not torch.is_grad_enabled():
            raise UnsupportedError(
                "saved_activations was entered while gradients are disabled, where autograd saves "
                "nothing; leave torch.no_grad or inference_mode first, or drop the context for "
                "evaluation (a function given to checkpoint(use_reentrant=True) runs without "
                "gradients: enter the context around the call of checkpoint)"
            )
        pack: Any = self._pack
        unpack: Any = _unpack
        # Only where it is loaded: importing the compiler takes longer than it could ever save.
        if "torch._dynamo" in sys.modules:
            pack, unpack = torch.compiler.disable(pack), torch.compiler.disable(unpack)
        hooks = saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        self._here.hooks.append(hooks)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._here.hooks.pop().__exit__(kind, error, trace)

    def _pack(self, x: torch.Tensor) -> _Kept | _Saved:
        if any(part in _name(x) for part in _EXPONENTIATING):
            self._here.keep_inputs_of(x)
        if not _is_activation(x) or self._here.is_input(x):
            return _Kept.of(x)
        layout = _Layout.of(x)
        rows = x.permute(layout.order)
        if rows.shape[-1] < MIN_ROW or self._bytes(x) >= x.untyped_storage().nbytes():
            return _Kept.of(x)
        if rows.is_contiguous():
            rows = rows.view(-1, rows.shape[-1])
        # The weak reference keeps the address of a freed storage from being given out again, so a
        # key can only ever match the storage that it was made for.
        where = StorageWeakRef(x.untyped_storage())
        key = (where, x.storage_offset(), rows.shape, rows.stride(), x.dtype, x._version)
        packed = self._packed.get(key)
        if packed is None:
            packed = _Packed.of(rows.reshape(-1, rows.shape[-1]), self.cast)
            self._packed[key] = packed
        saved = _Saved(_Quantized(packed, layout, x.dtype))
        self._here.remember(x, saved)
        return saved

    def _bytes(self, x: torch.Tensor) -> float:
        return x.numel() * self.cast.format.bits_per_value / 8


@dataclass(frozen=True, eq=False)
class _Kept:
    """A tensor kept as it is, with the version that it had when it was saved."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, x: torch.Tensor) -> _Kept:
        # Detached, because an output that its own node holds would never be freed. The storage and
        # the version counter stay shared.
        return cls(x.detach(), x._version)

    def unpack(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise _ChangedInPlaceError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self.tensor.dtype} of shape {tuple(self.tensor.shape)} is at "
                f"version {self.tensor._version}, but was saved at version {self.version}; change "
                "it after the backward pass, or save a clone"
            )
        return self.tensor


@dataclass(frozen=True)
class _Layout:
    """Shape of a tensor, and its dimensions from the outermost in memory to the innermost."""

    shape: torch.Size
    order: tuple[int, ...]

    @classmethod
    def of(cls, x: torch.Tensor) -> _Layout:
        stride = x.stride()
        return cls(x.shape, tuple(sorted(range(x.ndim), key=lambda dim: -stride[dim])))

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, values] back to the shape of the source, with the same order in memory."""
        inverse = sorted(range(len(self.order)), key=lambda dim: self.order[dim])
        return rows.view([self.shape[dim] for dim in self.order]).permute(inverse)


@dataclass(frozen=True, eq=False)
class _Packed:
    """Codes (dense) and scales of one storage, shared by everything that saved it."""

    quantized: QuantizedTensor
    shape: torch.Size

    @classmethod
    def of(cls, rows: torch.Tensor, cast: Cast) -> _Packed:
        q = ops.quantize(rows, cast, axis=-1)
        codes = pack_codes(q.codes, cast.format.element.bits)
        if codes.untyped_storage().nbytes() > codes.numel():
            codes = codes.clone(memory_format=torch.contiguous_format)  # without the cast's padding
        return cls(QuantizedTensor(codes, q.scales, q.format, q.axis, q.outer), rows.shape)

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """Values [rows, values]."""
        q = self.quantized
        codes = unpack_codes(q.codes, q.format.element.bits, self.shape)
        return ops.dequantize(QuantizedTensor(codes, q.scales, q.format, q.axis, q.outer), dtype)


@dataclass(frozen=True, eq=False)
class _Quantized:
    """One saved activation: where its values are, and the tensor that they become again."""

    packed: _Packed
    layout: _Layout
    dtype: torch.dtype

    def unpack(self) -> torch.Tensor:
        # Rounding to fewer bits may pass the largest value of the dtype; finite stays finite.
        largest = torch.finfo(self.dtype).max
        values = self.packed.unpack(self.dtype).clamp_(-largest, largest)
        return self.layout.restore(values.contiguous())


@dataclass(eq=False)
class _Saved:
    """What autograd holds for an activation; it may still turn out to need exact values."""

    content: _Quantized | _Kept

    def unpack(self) -> torch.Tensor:
        return self.content.unpack()


class _Here(threading.local):
    """The state of one thread: entered hooks, and what was saved last, weakly."""

    def __init__(self) -> None:
        self.hooks: list[saved_tensors_hooks] = []
        self._recent: deque[tuple[Any, int, Any]] = deque(maxlen=_RECENT)
        self._output: Any = None

    def remember(self, x: torch.Tensor, saved: _Saved) -> None:
        self._recent.append((weakref.ref(x), x._version, weakref.ref(saved)))

    def keep_inputs_of(self, output: torch.Tensor) -> None:
        """Give exact values back to the inputs of the node that computed `output`."""
        self._output = weakref.ref(output)
        for x_ref, version, saved_ref in self._recent:
            x, saved = x_ref(), saved_ref()
            if x is not None and saved is not None and x._version == version and self.is_input(x):
                saved.content = _Kept.of(x)

    def is_input(self, x: torch.Tensor) -> bool:
        """True for an input of the last node that `keep_inputs_of` was told of."""
        output = self._output and self._output()
        if output is None or output.grad_fn is None:
            return False
        edge = get_gradient_edge(x)
        return any(
            node is edge.node and number == edge.output_nr
            for node, number in output.grad_fn.next_functions
        )


class _ChangedInPlaceError(UnsupportedError, RuntimeError):
    """A RuntimeError as well, which is what autograd raises for this without hooks."""


def _unpack(saved: _Kept | _Saved) -> torch.Tensor:
    return saved.unpack()


def _is_activation(x: torch.Tensor) -> bool:
    """True for a tensor worth quantizing by its role; the module docstring gives the rules."""
    if not x.requires_grad or x.dtype not in _DTYPES or x.numel() < MIN_ELEMENTS:
        return False
    if type(x) is not torch.Tensor or x.layout != torch.strided or x.is_neg():
        return False
    if x.grad_fn is None:
        return True
    name = _name(x)
    statistic = name == "nativegroupnorm" and x.output_nr > 0
    return not statistic and name not in _EXPONENTIATED and not _is_weight(x.grad_fn)


def _name(x: torch.Tensor) -> str:
    """The op that computed x, in lower case: `nativegroupnorm` of NativeGroupNormBackward0."""
    if x.grad_fn is None:
        return ""
    return x.grad_fn.name().lower().rstrip("0123456789").removesuffix("backward")


def _is_weight(history: torch.autograd.graph.Node) -> bool:
    """True when everything behind a tensor is Parameters; weights have a short history."""
    nodes: list[Any] = [history]
    for _ in range(_WEIGHT_NODES):
        if not nodes:
            return True
        node = nodes.pop()
        if node is None or any(lookup in node.name().lower() for lookup in _LOOKUPS):
            return False
        if node.name() == "torch::autograd::AccumulateGrad":
            if not isinstance(node.variable, torch.nn.Parameter):
                return False
        else:
            nodes += [source for source, _ in node.next_functions]
    return not nodes


def _refuse_tracing() -> None:
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "saved_activations cannot be entered inside a function that torch.compile traces; "
            "enter it around the call of the compiled function"
        )
