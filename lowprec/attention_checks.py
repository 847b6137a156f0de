"""What an attention cannot take, said before anything runs."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any, Final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lowprec.attention_call import AttentionCall, Mask
from lowprec.attention_policy import AttentionGemm, AttentionPolicy, StaticCast
from lowprec.errors import UnsupportedError

DTYPES: Final = (torch.bfloat16, torch.float32, torch.float64)
HEAD_DIMS: Final = range(16, 257, 16)

# Lengths on a GPU that were read back and found good: reading them again would wait again.
_good: Any = WeakIdKeyDictionary()


def check_tensors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Shapes, dtypes and devices of q [Tq, H, D], k and v [Tk, Hkv, D] and the bias."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 3:
            raise UnsupportedError(
                f"attention: {name} has shape {tuple(t.shape)}, not [tokens, heads, head dim]; "
                "lowprec.Attention also takes dense batches [B, L, heads, head dim]"
            )
        if t.dtype not in DTYPES or t.dtype != q.dtype:
            raise UnsupportedError(
                f"attention: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; they must have one dtype "
                f"of {', '.join(map(str, DTYPES))}"
            )
        if t.device != q.device:
            raise UnsupportedError(f"attention: q is on {q.device}, {name} on {t.device}")
    if k.shape != v.shape or k.shape[2] != q.shape[2]:
        raise UnsupportedError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: k and v must "
            "have one shape, and all three one head dim"
        )
    if q.shape[2] not in HEAD_DIMS:
        raise UnsupportedError(
            f"attention: head dim {q.shape[2]} is not a multiple of 16 from {HEAD_DIMS[0]} to "
            f"{HEAD_DIMS[-1]}; pad q, k and v with zeros, keep the scale of the true head dim, and "
            "cut the result"
        )
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise UnsupportedError(
            f"attention: {q.shape[1]} query heads do not share {k.shape[1]} key heads evenly"
        )
    if bias is not None:
        _check_bias(bias, q)


def _check_bias(bias: torch.Tensor, q: torch.Tensor) -> None:
    if bias.ndim != 3 or bias.shape[0] not in (1, q.shape[1]):
        raise UnsupportedError(
            f"attention: bias has shape {tuple(bias.shape)}, not [{q.shape[1]} or 1, longest "
            "query, longest key]: one plane a head or one for all, shared by the sequences"
        )
    if not bias.dtype.is_floating_point or bias.device != q.device:
        raise UnsupportedError(
            f"attention: bias is {bias.dtype} on {bias.device}; it must be floating, on {q.device}"
        )


def check_call(call: AttentionCall, policy: AttentionPolicy) -> None:
    """The scale, and a fixed factor on P, which only softmax bounds."""
    if not isinstance(call.scale, float) or not math.isfinite(call.scale):
        raise UnsupportedError(f"attention: scale must be a finite number, not {call.scale!r}")
    if call.activation == "softmax":
        return
    for name, product in policy.items():
        if isinstance(product, AttentionGemm) and isinstance(product.left, StaticCast):
            raise UnsupportedError(
                f"attention: {name} casts P by the fixed factor of {product.left}, but "
                f"{call.activation} gives P no bound; use blocks, such as mxfp8"
            )


def check_offsets(name: str, cu: torch.Tensor, like: torch.Tensor) -> None:
    """Form of cu_seqlens, without its values."""
    if not isinstance(cu, torch.Tensor) or cu.dtype != torch.int32 or cu.ndim != 1 or not len(cu):
        shown = f"{cu.dtype} {tuple(cu.shape)}" if isinstance(cu, torch.Tensor) else repr(cu)
        raise UnsupportedError(
            f"attention: {name} must be an int32 tensor [B + 1], 0 and then the end of each "
            f"sequence, not {shown}; lengths become it by F.pad(lengths.cumsum(0), (1, 0)).int()"
        )
    if cu.device != like.device:
        raise UnsupportedError(f"attention: {name} is on {cu.device}, q on {like.device}")


def check_dense(lengths: tuple[int, int], mask: Mask, bias: torch.Tensor | None) -> None:
    """What `check_lengths` says, for sequences that all have `lengths` (Lq, Lk)."""
    longest = None if bias is None or bias.ndim != 3 else (bias.shape[1], bias.shape[2])
    _check_sequence(0, lengths, mask, longest)


def check_lengths(
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    rows: tuple[int, int],
    mask: Mask,
    bias: torch.Tensor | None,
) -> None:
    """Values of cu_seqlens for `rows` (Tq, Tk); on a GPU read back once for each pair of tensors.

    Raises UnsupportedError where they are not offsets of these rows, where the mask is not defined
    for the lengths, and where a sequence is longer than the bias.
    """
    if cu_q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    longest = (-1, -1) if bias is None else (bias.shape[1], bias.shape[2])
    # Reading on a CPU costs nothing, and inference tensors do not say whether they were changed.
    remembers = cu_q.is_cuda and not cu_q.is_inference() and not cu_k.is_inference()
    key: tuple[Any, ...] = (id(cu_k), rows, mask, longest)
    if remembers:
        key = (*key, cu_q._version, cu_k._version)
        known = _good.get(cu_q, {}).get(key)
        if known is not None and known() is cu_k:
            return
    ends = [_ends(name, cu, n) for name, cu, n in zip("qk", (cu_q, cu_k), rows, strict=True)]
    if len(ends[0]) != len(ends[1]):
        raise UnsupportedError(
            f"attention: cu_seqlens_q has {len(ends[0]) - 1} sequences, cu_seqlens_k "
            f"{len(ends[1]) - 1}"
        )
    for b in range(len(ends[0]) - 1):
        lengths = (ends[0][b + 1] - ends[0][b], ends[1][b + 1] - ends[1][b])
        _check_sequence(b, lengths, mask, None if bias is None else longest)
    if remembers:
        _good.setdefault(cu_q, {})[key] = weakref.ref(cu_k)


def _ends(side: str, cu: torch.Tensor, rows: int) -> list[int]:
    ends: list[int] = cu.tolist()
    name = f"cu_seqlens_{side}"
    if ends[0] != 0:
        raise UnsupportedError(f"attention: {name} starts at {ends[0]}, not at 0")
    for b, (start, stop) in enumerate(itertools.pairwise(ends)):
        if stop < start:
            raise UnsupportedError(
                f"attention: {name} goes down, from {start} to {stop} at sequence {b}"
            )
    if ends[-1] != rows:
        raise UnsupportedError(
            f"attention: {name} ends at {ends[-1]}, but there are {rows} rows of {side}"
        )
    return ends


def _check_sequence(
    b: int, lengths: tuple[int, int], mask: Mask, longest: tuple[int, int] | None
) -> None:
    queries, keys = lengths
    where = f"attention: sequence {b} has {queries} queries and {keys} keys"
    if mask.kind == "blocks" and queries != keys:
        raise UnsupportedError(f"{where}; the mask {mask} needs equal lengths")
    if mask.kind in ("causal", "window") and keys < queries:
        raise UnsupportedError(
            f"{where}; the mask {mask} sets the last query on the last key, so keys may not be "
            "fewer than queries"
        )
    if longest is not None and (queries > longest[0] or keys > longest[1]):
        raise UnsupportedError(f"{where}, more than the bias, {longest[0]} x {longest[1]}, has")
