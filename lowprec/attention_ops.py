"""Attention as two ops of torch.library: autograd, tracing, counting; the backends compute.

Under torch.compile they are opaque, so compiled results are the eager ones. `key` stands for a
record of what ran, `sizes` is [left, right, size of the mask, wants_dbias, check of the lengths].
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from lowprec.attention_call import AttentionCall, Mask
from lowprec.attention_checks import check_call, check_lengths
from lowprec.attention_policy import ATTENTION_PRODUCTS, AttentionGemm, AttentionPolicy
from lowprec.backends.attention import ATTENTION_MODULES, AttentionFacts, choose_attention
from lowprec.hardware import NAMED, current

# CUDA graphs would replay the products without the Python that counts them and reads the lengths.
_TAGS: Final = (torch.Tag.cudagraph_unsafe,)
_FORWARD: Final = ATTENTION_PRODUCTS[:2]
_BACKWARD: Final = ATTENTION_PRODUCTS[2:]
_numbers = itertools.count()
_live: weakref.WeakValueDictionary[int, AttentionRecord] = weakref.WeakValueDictionary()


class AttentionRecord:
    """What ran in one attention: counts[product] -> {precision: count}."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {name: {} for name in ATTENTION_PRODUCTS}
        self._register()

    def _register(self) -> None:
        number = next(_numbers)
        _live[number] = self
        # A tensor, because an integer would make torch.compile build one graph for each layer.
        self.key = torch.tensor(number, dtype=torch.int64, device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        return {"counts": {name: dict(count) for name, count in self.counts.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()


_parsed = lru_cache(maxsize=256)(AttentionPolicy.parse)


def _call(activation: str, mask: str, sizes: Sequence[int], scale: float) -> AttentionCall:
    left, right, size, wants_dbias, _ = sizes
    kind: Any = mask
    which: Any = activation
    return AttentionCall(which, Mask(kind, left, right, size), scale, bool(wants_dbias))


@lru_cache(maxsize=256)
def _chosen(
    device: str,
    policy: str,
    kinds: tuple[str, str],
    head_dim: int,
    dtype: torch.dtype,
    *,
    plain: bool,
) -> str:
    hardware = current() if device == "cuda" else NAMED["cpu"]
    facts = AttentionFacts(hardware, _parsed(policy), *kinds, head_dim, dtype, plain)
    return choose_attention(facts).backend


def _module(
    q: torch.Tensor, call: AttentionCall, bias: torch.Tensor | None, policy: str, backend: str
) -> Any:
    """The backend named, or the first that does not refuse what arrives."""
    name = backend or _chosen(
        q.device.type,
        policy,
        (call.activation, call.mask.kind),
        q.shape[2],
        q.dtype,
        plain=bias is None and call.scale > 0,
    )
    return ATTENTION_MODULES[name]


def _count(
    key: torch.Tensor | None, names: Sequence[str], policy: AttentionPolicy, dtype: torch.dtype
) -> None:
    record = None if key is None else _live.get(int(key))
    for name, product in policy.items():
        if record is None or name not in names:
            continue
        wide = dtype == torch.float64 and not isinstance(product, AttentionGemm)
        text = "float64" if wide else str(product)
        record.counts[name][text] = record.counts[name].get(text, 0) + 1


@torch.library.custom_op("lowprec::attention", mutates_args=(), tags=_TAGS)
def forward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    bias: torch.Tensor | None,
    key: torch.Tensor | None,
    activation: str,
    mask: str,
    sizes: Sequence[int],
    scale: float,
    policy: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse; see lowprec.attention_call."""
    call, parsed = _call(activation, mask, sizes, scale), _parsed(policy)
    check_call(call, parsed)
    if sizes[-1]:
        check_lengths(cu_q, cu_k, (q.shape[0], k.shape[0]), call.mask, bias)
    module = _module(q, call, bias, policy, backend)
    with torch.autocast(q.device.type, enabled=False):
        found = module.attention_forward(q, k, v, cu_q, cu_k, call=call, policy=parsed, bias=bias)
    _count(key, _FORWARD, parsed, q.dtype)
    o, lse = found
    return o, lse


@forward_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    bias: torch.Tensor | None,
    key: torch.Tensor | None,
    activation: str,
    mask: str,
    sizes: Sequence[int],
    scale: float,
    policy: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (q.shape[1], q.shape[0]) if activation == "softmax" else (0,)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(rows, dtype=wide)


@torch.library.custom_op("lowprec::attention_backward", mutates_args=(), tags=_TAGS)
def backward_op(
    do: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    key: torch.Tensor | None,
    activation: str,
    mask: str,
    sizes: Sequence[int],
    scale: float,
    policy: str,
    backend: str,
) -> list[torch.Tensor]:
    """dq, dk, dv and, where wanted, dbias; tensors = q, k, v, o, lse, cu_q, cu_k."""
    call, parsed = _call(activation, mask, sizes, scale), _parsed(policy)
    q = tensors[0]
    module = _module(q, call, bias, policy, backend)
    with torch.autocast(q.device.type, enabled=False):
        found = module.attention_backward(do, *tensors, call=call, policy=parsed, bias=bias)
    _count(key, _BACKWARD, parsed, q.dtype)
    return [one for one in found if one is not None]


@backward_op.register_fake
def _(
    do: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    key: torch.Tensor | None,
    activation: str,
    mask: str,
    sizes: Sequence[int],
    scale: float,
    policy: str,
    backend: str,
) -> list[torch.Tensor]:
    found = [t.new_empty(t.shape) for t in tensors[:3]]
    return found if bias is None or not sizes[3] else [*found, bias.new_empty(bias.shape)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_q, cu_k, bias, key, *ctx.how = inputs
    # exp(s - lse) needs lse exact; lowprec.saved_activations leaves alone what has no gradient.
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k, bias, key)


def _gradients(ctx: Any, do: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    *tensors, bias, key = ctx.saved_tensors
    found = backward_op(do.contiguous(), tensors, bias, key, *ctx.how)
    dq, dk, dv, *rest = found
    dbias = rest[0] if rest else None
    return dq, dk, dv, None, None, dbias, None, *[None] * len(ctx.how)


forward_op.register_autograd(_gradients, setup_context=_keep)


class How(NamedTuple):
    """An attention without its tensors: the call, texts of policy and backend ("" chooses one).

    key: of an AttentionRecord, or None. check: whether the values of cu_seqlens are looked at.
    """

    call: AttentionCall
    policy: str
    backend: str = ""
    key: torch.Tensor | None = None
    check: bool = True


def attend(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    bias: torch.Tensor | None,
    how: How,
) -> torch.Tensor:
    """o [Tq, H, D] of q, k, v that are checked already, differentiable in them and in the bias."""
    call, mask = how.call, how.call.mask
    sizes = [mask.left, mask.right, mask.size, int(call.wants_dbias), int(how.check)]
    o: torch.Tensor = forward_op(
        *qkv,
        cu_q,
        cu_k,
        bias,
        how.key,
        call.activation,
        mask.kind,
        sizes,
        call.scale,
        how.policy,
        how.backend,
    )[0]
    return o
