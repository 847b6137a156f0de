"""Which policies of attention run with 8-bit operands on tensor cores; imports no Triton."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from lowprec.attention_policy import AttentionGemm, AttentionPolicy, StaticCast
from lowprec.errors import UnsupportedError
from lowprec.formats import Cast

BLOCK: Final = 128
WIDEST: Final = 128
CAPABILITY: Final = (9, 0)


def refuse_native(
    policy: AttentionPolicy,
    activation: str,
    *,
    head_dim: int | None,
    capability: tuple[int, int] | None,
) -> str | None:
    """Why the 8-bit kernels do not compute a quantized policy, or None.

    A call with a bias, or a scale that is not positive, is refused when it comes.
    """
    if policy.quantizes and activation != "softmax":
        return f"8-bit products of a softmax alone, not of {activation}"
    try:
        native = Native8.of(policy)
    except UnsupportedError as error:
        return str(error)
    if native is None:
        return "nothing is quantized"
    if head_dim is not None and head_dim > WIDEST:
        return f"8-bit products with head dim {head_dim}; at most {WIDEST}"
    if capability is not None and capability < CAPABILITY:
        return f"8-bit products need sm{CAPABILITY[0]}{CAPABILITY[1]}"
    return None


class Native8(NamedTuple):
    """How a policy is quantized: one scale rule, the factor of P, what the backward pass reads.

    S of the backward pass is that of the forward pass. dp: dP casts dO and v. rounded: dQ and dK
    read k and q, and dP v, as the forward pass did. Where kernels stream, S, and dP with dp, are
    products of codes, elsewhere BF16 products of what codes say.
    """

    rule: str
    factor: float
    dp: bool
    rounded: bool = False

    @classmethod
    def of(cls, policy: AttentionPolicy) -> Native8 | None:
        """What the kernels compute of a policy; None where all products are BF16.

        Raises UnsupportedError with the reason for any other.
        """
        if not policy.quantizes:
            return None
        qk, pv = policy.qk, policy.pv
        if not isinstance(qk, AttentionGemm) or not isinstance(pv, AttentionGemm):
            raise UnsupportedError("qk and pv are quantized both or neither")
        dp, backward = _backward_casts(policy)
        if not isinstance(pv.left, StaticCast) or pv.left.element.name != "e4m3":
            raise UnsupportedError("P must be e4m3 by a fixed factor, such as e4m3*256")
        casts = [qk.left, qk.right, pv.right, *backward]
        rules = {str(one.scale_rule) for one in casts if isinstance(one, Cast)}
        if not all(isinstance(one, Cast) and tiled(one) for one in casts) or len(rules) != 1:
            raise UnsupportedError("operands must all be cast alike, fp8_128x128 or mxfp8_128x128")
        rounded = isinstance(policy.dq, AttentionGemm)
        return cls(rules.pop(), pv.left.factor, dp, rounded)


def _backward_casts(policy: AttentionPolicy) -> tuple[bool, list[Any]]:
    """Whether dP casts dO, and the casts of the backward products."""
    found = {
        name: product.casts if isinstance(product, AttentionGemm) else (None, None)
        for name, product in policy.items()
    }
    if any(found["dv"]) or found["dq"][0] or found["dk"][0]:
        raise UnsupportedError("dv, dq and dk are BF16 in these kernels, but for casts of k and q")
    dp, of_dq_and_dk = found["dp"], [found["dq"][1], found["dk"][1]]
    if dp[0] and not dp[1]:
        raise UnsupportedError("dp casts dO only together with v")
    if any(of_dq_and_dk) and not (dp[1] and all(of_dq_and_dk)):
        raise UnsupportedError("dp, dq and dk cast v, k and q, all three or none")
    if not any(of_dq_and_dk) and bool(dp[0]) != bool(dp[1]):
        raise UnsupportedError("dp casts v alone where dq and dk cast k and q")
    return bool(dp[0]), [one for one in (*dp, *of_dq_and_dk) if one]


def tiled(cast: Cast) -> bool:
    """Whether a cast gives E4M3 with one power of two for each 128 tokens of a head."""
    fmt = cast.format
    whole = fmt.block == (BLOCK, BLOCK) and fmt.element.name == "e4m3"
    return whole and fmt.power_of_two and not fmt.outer and not cast.stochastic
