"""What one attention call computes, apart from its tensors: activation, mask and scale.

Backends compute it by two functions, over sequences laid end to end (B of them, jagged):

    attention_forward(q, k, v, cu_q, cu_k, *, call, policy, bias) -> (o, lse)
    attention_backward(do, q, k, v, o, lse, cu_q, cu_k, *, call, policy, bias)
        -> (dq, dk, dv, dbias or None)

q, o, do, dq [Tq, H, D]; k, v, dk, dv [Tk, Hkv, D], query head h reads key head h // (H // Hkv);
all of one dtype, bfloat16, float32 or float64. cu_q, cu_k int32 [B + 1], on the same device:
sequence b owns rows cu[b] to cu[b + 1]. lse float32 (float64 for float64 inputs) [H, Tq]: natural
logarithm of a row's sum of exponentials, scale and bias included, -inf for a row without keys; for
gelu and silu an empty tensor [0]. bias: None or any float dtype, [H, max_q, max_k] or
[1, max_q, max_k], added to scale * q k^T; row i and key j of every sequence read bias[:, i, j].
dbias has the shape and dtype of bias and is summed over the sequences (and heads, where there is
one plane for all); None where the call does not want it.
    softmax:     O = softmax(scale * Q K^T + bias) V
    gelu, silu:  O = act(scale * Q K^T + bias) V, without row maximum, row sum or a 1/length factor;
                 gelu is the exact one, x * Phi(x). Masked keys contribute zero.
A row that sees no key gives zeros, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from lowprec.errors import UnsupportedError
from lowprec.formats import nearest_names

ACTIVATIONS: Final = ("softmax", "gelu", "silu")
MASKS: Final = ("none", "causal", "window", "blocks")


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees; with p = i + (Lk - Lq), so that the last query meets the last key.

    none: all keys of its sequence. causal: keys up to p. window: keys p - left to p + right.
    blocks: query i sees the keys of its own block, i // size. Causal, window and blocks need
    at least as many keys as queries in each sequence, blocks equal lengths. Raises
    UnsupportedError for an unknown kind and for sizes that are no whole numbers of at least 0
    (size: 1).
    """

    kind: Literal["none", "causal", "window", "blocks"] = "none"
    left: int = 0
    right: int = 0
    size: int = 64

    def __post_init__(self) -> None:
        if self.kind not in MASKS:
            raise UnsupportedError(f"unknown mask {self.kind!r}; {nearest_names(self.kind, MASKS)}")
        for name, least in (("left", 0), ("right", 0), ("size", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**31:
                raise UnsupportedError(
                    f"mask {self.kind}: {name} is a number of tokens, a whole number of at least "
                    f"{least} and below 2^31, not {value!r}"
                )

    def __str__(self) -> str:
        if self.kind == "window":
            return f"window {self.left} back, {self.right} ahead"
        return f"blocks of {self.size}" if self.kind == "blocks" else self.kind


NO_MASK: Final = Mask()


@dataclass(frozen=True)
class AttentionCall:
    """Activation, mask and scale of a call; scale multiplies q k^T before bias and activation.

    wants_dbias: whether the backward pass shall compute the gradient of the bias.
    """

    activation: Literal["softmax", "gelu", "silu"]
    mask: Mask = NO_MASK
    scale: float = 1.0
    wants_dbias: bool = True

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise UnsupportedError(
                f"unknown activation {self.activation!r}; "
                f"{nearest_names(str(self.activation), ACTIVATIONS)}"
            )
