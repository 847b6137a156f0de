"""Attention by Triton kernels: what lowprec.attention_call says of backends.

Scores and sums are float32; operands are bf16, or E4M3 where attention_native takes the policy.
Launch shapes follow from the head dim, the mask and the activation; where the totals of a batch
choose, no sum changes, and keys are split by the lengths of their own sequence: a sequence's bits
do not depend on its neighbours. Nothing here reads a length on the host; the backend's callers
trace it as one op.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton

from lowprec.attention_call import AttentionCall
from lowprec.attention_policy import AttentionPolicy
from lowprec.backends.triton_kernels import (
    attention,
    attention_bias,
    attention_block_ops,
    attention_cross_ops,
    attention_fp8_ops,
    attention_gradients,
    attention_round_ops,
    attention_stream_ops,
    launch,
)
from lowprec.backends.triton_kernels.attention_native import Native8, refuse_native
from lowprec.backends.triton_kernels.attention_schedule import (
    Apart,
    List,
    schedule,
    schedule_apart,
    slots,
)
from lowprec.backends.triton_kernels.launch import stored_as
from lowprec.errors import UnsupportedError


class Shape(NamedTuple):
    """Tile of queries and of keys, stages of the pipeline, warps."""

    tile_q: int
    tile_k: int
    stages: int
    warps: int

    def options(self) -> dict[str, int]:
        """As the kernels are launched with."""
        return {
            "TILE_Q": self.tile_q,
            "TILE_K": self.tile_k,
            "STAGES": self.stages,
            "num_warps": self.warps,
        }


# By the power of two that holds the head dim. Each compiles without a spill, and without ptxas
# putting one product after the other, for every mask and activation.
FORWARD: Final = {
    16: Shape(128, 64, 3, 4),
    32: Shape(128, 64, 3, 4),
    64: Shape(128, 64, 3, 4),
    128: Shape(128, 64, 3, 8),
    256: Shape(128, 32, 2, 8),
}
KEYS: Final = {
    16: Shape(64, 64, 2, 4),
    32: Shape(64, 64, 2, 4),
    64: Shape(64, 128, 2, 8),
    128: Shape(64, 128, 2, 8),
    256: Shape(32, 32, 2, 8),
}
QUERIES: Final = {
    16: Shape(64, 64, 2, 4),
    32: Shape(64, 64, 2, 4),
    64: Shape(128, 128, 2, 8),
    128: Shape(128, 64, 2, 8),
    256: Shape(64, 32, 2, 8),
}
# Batches of at most FEW queries a sequence have smaller tiles, by which no bit changes. A sequence
# of at most FEW queries with more than CHUNK keys has these split over programs; what they leave is
# a sixteenth of k and v at most, where each query head has its key head.
FEW: Final = 64
CHUNK: Final = 2048
_FEW: Final = {width: Shape(64, 64, 3, 4) for width in (16, 32, 64)}
FORWARD_FEW: Final = FORWARD | _FEW | {128: Shape(64, 64, 3, 4)}
QUERIES_FEW: Final = QUERIES | _FEW
# Slopes of activations, and operands read in two ways, need registers.
MORE_KEYS: Final = KEYS | {128: Shape(32, 128, 2, 8)}
_INTERPRETED: Final = Shape(32, 32, 1, 1)
"""In the interpreter, so that short sequences have several tiles."""


class Given(NamedTuple):
    """A call with its tensors; q, k, v lined up as the kernels read them.

    of_s, codes: q and k once more, as S of the backward pass reads them: what codes say, or codes;
    see attention_round_ops.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    bias: torch.Tensor | None
    call: AttentionCall
    native: Native8 | None = None
    of_s: tuple[torch.Tensor, torch.Tensor] | None = None
    codes: attention_round_ops.Operands8 | None = None

    @property
    def tokens(self) -> int:
        """Queries of all sequences."""
        return self.q.shape[0]

    @property
    def width(self) -> int:
        """The head dim."""
        return self.q.shape[2]

    @property
    def few(self) -> bool:
        """Whether sequences have few queries, on average over the batch."""
        return self.tokens <= FEW * (self.cu_q.shape[0] - 1)

    @property
    def chunk(self) -> int:
        """Keys that a program takes of sequences with few queries; 0 where none has more."""
        return CHUNK if self.k.shape[0] > CHUNK else 0

    @property
    def kind(self) -> str:
        """The form of scores that the kernels take; see attention.scores."""
        if self.call.activation != "softmax":
            return self.call.activation
        return "softmax" if self.bias is None and self.call.scale > 0 else "softmax, scaled"

    def shape(self, table: dict[int, Shape]) -> Shape:
        """The tiles; blocks of keys take small ones, so that fewer scores are masked."""
        if launch.INTEGER:
            return _INTERPRETED
        padded = triton.next_power_of_2(self.width)
        if self.call.mask.kind == "blocks" and padded <= 128:
            return Shape(64, 64, 1, 4 if padded <= 64 else 8)
        return table[padded]

    def operands(self) -> list[torch.Tensor | None]:
        """q, k and v as the kernels read them."""
        return [stored(one) for one in (self.q, self.k, self.v)]

    def numbers(self, heads: int, *more: torch.Tensor) -> list[Any]:
        """The arguments after the tensors: bias, extents, strides of rows and heads, mask."""
        strides = [s for one in (self.q, self.k, self.v, *more) for s in one.stride()[:2]]
        plane = [0, 0]
        if self.bias is not None:
            plane = [self.bias.stride(0) if self.bias.shape[0] > 1 else 0, self.bias.stride(1)]
        group, mask = self.q.shape[1] // self.k.shape[1], self.call.mask
        batch = self.cu_q.shape[0] - 1
        sizes = [self.call.scale, mask.left, mask.right, mask.size]
        return [self.bias, batch, self.tokens, heads, group, *strides, *plane, *sizes]

    def constants(self, shape: Shape) -> dict[str, Any]:
        """What the kernels are compiled for."""
        return {
            "MASK": self.call.mask.kind,
            "KIND": self.kind,
            "WIDTH": self.width,
            "D": triton.next_power_of_2(self.width),
            "INTEGER": launch.INTEGER,
            **shape.options(),
        }


def given(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cu: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    call: AttentionCall,
    policy: AttentionPolicy,
) -> Given:
    """The call, checked: raises UnsupportedError for what these kernels do not compute."""
    q, k, v = qkv
    if policy.quantizes:
        reason = refuse_native(policy, call.activation, head_dim=q.shape[2], capability=None)
        if reason is None and (bias is not None or call.scale <= 0):
            reason = "8-bit products take no bias, and a positive scale"
        if reason:
            raise UnsupportedError(f"triton: attention with {policy}: {reason}; use the emulation")
    if q.dtype != torch.bfloat16:
        raise UnsupportedError(f"triton: attention of {q.dtype}; its kernels take bfloat16")
    if not q.is_cuda and not launch.INTEGER:
        raise UnsupportedError(
            f"triton: the tensors are on {q.device}, its kernels run on CUDA devices; plan again "
            "on the machine that runs, or use the reference"
        )
    if bias is not None:
        bias = bias.float() if bias.dtype == torch.float64 else bias
        bias = bias if bias.stride(-1) == 1 else bias.contiguous()
    return Given(lined(q), lined(k), lined(v), *cu, bias, call, Native8.of(policy))


def stored(t: torch.Tensor | None) -> torch.Tensor | None:
    """`t` as the kernels read it."""
    return stored_as(t, integer=launch.INTEGER)


def lined(x: torch.Tensor) -> torch.Tensor:
    """`x` [T, H, D] with unit stride along D and rows that start at 16 bytes."""
    apart = all(s % 8 == 0 for s in x.stride()[:2]) and x.data_ptr() % 16 == 0
    return x if x.stride(-1) == 1 and apart else x.contiguous()


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    call: AttentionCall,
    policy: AttentionPolicy,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse; see lowprec.attention_call."""
    one = given((q, k, v), (cu_q, cu_k), bias, call, policy)
    tokens, heads, _ = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows = (heads, tokens) if call.activation == "softmax" else (0,)
    lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    if q.numel() and attention_stream_ops.takes(one):
        _forward_apart(one, o, lse)
    elif q.numel() and one.native:
        attention_fp8_ops.forward(one, one.native, o, lse)
    elif q.numel() and attention_block_ops.takes(one):
        attention_block_ops.forward(one, o, lse)
    elif q.numel() and attention_cross_ops.takes(one):
        attention_cross_ops.forward(one, o, lse)
    elif q.numel():
        _forward(one, o, lse)
    return o, lse


def _forward_apart(one: Given, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Write o and lse by the kernel that streams; of sequences that split or have short keys by
    those that are made for them. Their bits differ, so lengths of a sequence alone choose.
    """
    ready = one.call.mask.kind == "none" and attention_cross_ops.ready(one.width)
    short = attention_cross_ops.TILE_K if ready else 0
    if one.native or not (short or one.chunk):
        attention_stream_ops.forward(one, one.native, o, lse)
        return
    tile = one.shape(FORWARD_FEW).tile_q
    apart = Apart(min(FEW, tile), one.chunk, short, one.k.shape[0])
    tiles = (tile, attention_cross_ops.tile(one.width), attention_stream_ops.TILE_Q)
    lists = schedule_apart(one.cu_q, one.cu_k, one.tokens, tiles, apart)
    attention_stream_ops.forward(one, None, o, lse, lists[2])
    if short:
        attention_cross_ops.forward(one, o, lse, lists[1])
    if one.chunk:
        _forward(one, o, lse, lists[0])


def _forward(one: Given, o: torch.Tensor, lse: torch.Tensor, split: List | None = None) -> None:
    """Write o and lse; where keys may be split, a second launch adds what the chunks left.

    split: the list of the sequences whose keys are split, and of no others.
    """
    heads, chunk, device = one.q.shape[1], one.chunk, o.device
    shape = one.shape(FORWARD_FEW if one.few or split else FORWARD)
    few = min(FEW, shape.tile_q)
    apart = Apart(few, chunk, 0, one.k.shape[0])
    starts, owners = split or schedule(one.cu_q, one.cu_k, one.tokens, shape.tile_q, apart=apart)
    parts = sums = None
    if chunk:
        left = (slots(one.k.shape[0], chunk), heads)
        parts = torch.empty((*left, few, one.width), dtype=torch.float32, device=device)
        sums = torch.empty((*left, 2, few), dtype=torch.float32, device=device)
    constants = one.constants(shape) | {"FEW": few, "CHUNK": chunk}
    attention.attend[(owners.shape[0] * heads,)](
        *one.operands(),
        *(stored(o), lse, one.cu_q, one.cu_k, starts, owners, parts, sums),
        *one.numbers(heads),
        **constants,
    )
    if chunk:
        mask, batch = one.call.mask, one.cu_q.shape[0] - 1
        for name in ("STAGES", "TILE_Q"):
            del constants[name]
        places = (starts, owners) if split else (None, None)
        attention.combine[((owners.shape[0] if split else batch) * heads,)](
            *(parts, sums, stored(o), lse, one.cu_q, one.cu_k, *places, batch, one.tokens, heads),
            *(mask.left, mask.right, mask.size),
            **constants,
        )


def _prepared(
    do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponents and delta, float32 [H, Tq]; see attention_gradients.prepare."""
    delta, exponents = torch.empty_like(lse), torch.empty_like(lse)
    if lse.numel():
        tokens, heads, width = o.shape
        tile = 32 if launch.INTEGER else 64
        attention_gradients.prepare[(-(-tokens // tile), heads)](
            stored(do),
            stored(o),
            *(lse, delta, exponents),
            tokens,
            *do.stride()[:2],
            *o.stride()[:2],
            WIDTH=width,
            D=triton.next_power_of_2(width),
            TILE=tile,
        )
    return exponents, delta


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    call: AttentionCall,
    policy: AttentionPolicy,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv and dbias; see lowprec.attention_call."""
    one = given((q, k, v), (cu_q, cu_k), bias, call, policy)
    do, do_read = lined(do), None
    if one.native and q.numel() and attention_stream_ops.takes_backward_of_codes(one):
        one = attention_round_ops.coded(one)
    elif one.native:
        one, do, do_read = attention_round_ops.rounded(one, do)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if q.numel() and attention_block_ops.takes_backward(one):
        attention_block_ops.backward(one, do, do_read, lined(o), lse, [dq, dk, dv])
        return dq, dk, dv, None
    if q.numel() and attention_stream_ops.takes_backward(one):
        attention_stream_ops.backward(one, do, lined(o), lse, [dq, dk, dv])
        return dq, dk, dv, None
    # S reads queries and keys, dP dO; what the other products read is beside them.
    s_q, s_k = one.of_s or (one.q, one.k)
    dp_do = do if do_read is None else do_read
    rest = [*_prepared(dp_do, lined(o), lse.contiguous()), cu_q, cu_k]
    if k.numel():
        alike = one.of_s is None and do_read is None
        shape = one.shape(KEYS if call.activation == "softmax" and alike else MORE_KEYS)
        starts, owners = schedule(cu_k, cu_q, k.shape[0], shape.tile_k)
        attention_gradients.keys_backward[(owners.shape[0] * k.shape[1],)](
            *map(stored, (one.q, s_k, one.v, do, s_q if one.of_s else None, do_read)),
            *(stored(dk), stored(dv), *rest, starts, owners),
            *one.numbers(k.shape[1], do),
            **one.constants(shape),
        )
    if q.numel():
        shape = one.shape(QUERIES_FEW if one.few else QUERIES)
        starts, owners = schedule(cu_q, cu_k, q.shape[0], shape.tile_q)
        attention_gradients.queries_backward[(owners.shape[0] * q.shape[1],)](
            *map(stored, (s_q, one.k, one.v, dp_do, s_k if one.of_s else None)),
            *(stored(dq), *rest, starts, owners),
            *one.numbers(q.shape[1], do),
            **one.constants(shape),
        )
    dbias = None
    if one.bias is not None and bias is not None and call.wants_dbias:
        operands = [*one.operands(), stored(do)]
        dbias = _bias_gradient(one, one.bias, operands, rest, do).to(bias.dtype)
    return dq, dk, dv, dbias


def _bias_gradient(
    one: Given,
    bias: torch.Tensor,
    operands: list[Any],
    rest: list[torch.Tensor],
    do: torch.Tensor,
) -> torch.Tensor:
    """dbias, float32; see attention_bias.bias_backward."""
    if not one.tokens:
        return torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    dbias = torch.empty(bias.shape, dtype=torch.float32, device=bias.device)
    planes, longest_q, longest_k = bias.shape
    tile = 32 if launch.INTEGER or one.width > 128 else 64
    if dbias.numel():
        constants = one.constants(Shape(tile, tile, 1, 8))
        del constants["STAGES"]
        attention_bias.bias_backward[(-(-longest_q // tile), -(-longest_k // tile), planes)](
            *operands,
            dbias,
            *rest,
            *one.numbers(one.q.shape[1], do),
            longest_q,
            longest_k,
            **constants,
        )
    return dbias
