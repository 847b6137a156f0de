"""Attention as two ops of torch.library: autograd, tracing, counting; the backends compute.

Under torch.compile they are opaque, so compiled results are the eager ones. `key` stands for a
record of what ran, `sizes` is [left, right, size of the mask, wants_dbias, check of the lengths],
`front` the numbers of a lowprec.attention_front.Front, or none.
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
from lowprec.attention_front import Front
from lowprec.attention_policy import ATTENTION_PRODUCTS, AttentionPolicy
from lowprec.backends.attention import AttentionFacts, choose_attention
from lowprec.backends.attention_fronts import Fronted
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


def _fronted(
    q: torch.Tensor,
    call: AttentionCall,
    bias: torch.Tensor | None,
    names: tuple[str, str],
    front: Sequence[float],
) -> Fronted:
    """The backend named, or the first that does not refuse what arrives."""
    policy, backend = names
    name = backend or _chosen(
        q.device.type,
        policy,
        (call.activation, call.mask.kind),
        q.shape[2],
        q.dtype,
        plain=bias is None and call.scale > 0,
    )
    return Fronted(name, Front.of(front), call, _parsed(policy), bool(backend))


def _count(
    key: torch.Tensor | None, names: Sequence[str], policy: AttentionPolicy, dtype: torch.dtype
) -> None:
    record = None if key is None else _live.get(int(key))
    for name, product in policy.items():
        if record is None or name not in names:
            continue
        text = str(product)
        if dtype == torch.float64:
            text = text.replace("bf16", "float64")
        record.counts[name][text] = record.counts[name].get(text, 0) + 1


@torch.library.custom_op("lowprec::attention", mutates_args=(), tags=_TAGS)
def forward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    bias: torch.Tensor | None,
    weight_q: torch.Tensor | None,
    weight_k: torch.Tensor | None,
    key: torch.Tensor | None,
    activation: str,
    mask: str,
    sizes: Sequence[int],
    scale: float,
    policy: str,
    backend: str,
    front: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse; see lowprec.attention_call."""
    call = _call(activation, mask, sizes, scale)
    one = _fronted(q, call, bias, (policy, backend), front)
    check_call(call, one.policy)
    if sizes[-1]:
        check_lengths(cu_q, cu_k, (q.shape[0], k.shape[0]), call.mask, bias)
    with torch.autocast(q.device.type, enabled=False):
        found = one.forward((q, k, v, cu_q, cu_k), (weight_q, weight_k), bias)
    _count(key, _FORWARD, one.policy, q.dtype)
    return found


@forward_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    bias: torch.Tensor | None,
    weight_q: torch.Tensor | None,
    weight_k: torch.Tensor | None,
    key: torch.Tensor | None,
    activation: str,
    mask: str,
    sizes: Sequence[int],
    scale: float,
    policy: str,
    backend: str,
    front: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (q.shape[1], q.shape[0]) if activation == "softmax" else (0,)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(rows, dtype=wide)


@torch.library.custom_op("lowprec::attention_backward", mutates_args=(), tags=_TAGS)
def backward_op(
    do: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    weight_q: torch.Tensor | None,
    weight_k: torch.Tensor | None,
    key: torch.Tensor | None,
    activation: str,
    mask: str,
    sizes: Sequence[int],
    scale: float,
    policy: str,
    backend: str,
    front: Sequence[float],
) -> list[torch.Tensor]:
    """dq, dk, dv, then of bias and weights where wanted; tensors = q, k, v, o, lse, cu_q, cu_k."""
    q = tensors[0]
    call = _call(activation, mask, sizes, scale)
    one = _fronted(q, call, bias, (policy, backend), front)
    with torch.autocast(q.device.type, enabled=False):
        found = one.backward((do, *tensors), (weight_q, weight_k), bias)
    _count(key, _BACKWARD, one.policy, q.dtype)
    return [gradient for gradient in found if gradient is not None]


@backward_op.register_fake
def _(
    do: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    weight_q: torch.Tensor | None,
    weight_k: torch.Tensor | None,
    key: torch.Tensor | None,
    activation: str,
    mask: str,
    sizes: Sequence[int],
    scale: float,
    policy: str,
    backend: str,
    front: Sequence[float],
) -> list[torch.Tensor]:
    more = [None if bias is None or not sizes[3] else bias, weight_q, weight_k]
    return [t.new_empty(t.shape) for t in (*tensors[:3], *more) if t is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_q, cu_k, bias, weight_q, weight_k, key, *ctx.how = inputs
    # exp(s - lse) needs lse exact; lowprec.saved_activations leaves alone what has no gradient.
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k, bias, weight_q, weight_k, key)


def _gradients(ctx: Any, do: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    *tensors, bias, weight_q, weight_k, key = ctx.saved_tensors
    found = iter(backward_op(do.contiguous(), tensors, bias, weight_q, weight_k, key, *ctx.how))
    dq, dk, dv = (next(found) for _ in range(3))
    wants_dbias = ctx.how[2][3]
    wanted = (bias if wants_dbias else None, weight_q, weight_k)
    more = [None if one is None else next(found) for one in wanted]
    return dq, dk, dv, None, None, *more, None, *[None] * len(ctx.how)


forward_op.register_autograd(_gradients, setup_context=_keep)


class How(NamedTuple):
    """An attention without its tensors: the call, texts of policy and backend ("" chooses one).

    key: of an AttentionRecord, or None. check: whether the values of cu_seqlens are looked at.
    front: what comes before, with the weights of the norms of q and k, if they have them.
    """

    call: AttentionCall
    policy: str
    backend: str = ""
    key: torch.Tensor | None = None
    check: bool = True
    front: Front | None = None
    weights: tuple[torch.Tensor, torch.Tensor] | None = None


def attend(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    bias: torch.Tensor | None,
    how: How,
) -> torch.Tensor:
    """o [Tq, H, D] of q, k, v that are checked already, differentiable in them and in the bias."""
    call, mask = how.call, how.call.mask
    if how.front is not None and how.front.rotary is not None:
        how.front.rotary.turning(qkv[0].shape[2])
    sizes = [mask.left, mask.right, mask.size, int(call.wants_dbias), int(how.check)]
    o: torch.Tensor = forward_op(
        *qkv,
        cu_q,
        cu_k,
        bias,
        *(how.weights or (None, None)),
        how.key,
        call.activation,
        mask.kind,
        sizes,
        call.scale,
        how.policy,
        how.backend,
        [] if how.front is None else how.front.numbers,
    )[0]
    return o
