"""Data and comparisons for the tests of the attention kernels, in the interpreter or on a GPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from lowprec.attention_call import AttentionCall, Mask
from lowprec.attention_policy import ATTENTION_BF16, AttentionPolicy
from lowprec.backends import attention_reference, reference
from lowprec.formats import Cast
from tests.core import attention_cases

Tensors = list[torch.Tensor]


def cu(lengths: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def drawn(
    queries: list[int],
    keys: list[int],
    heads: tuple[int, int],
    width: int,
    device: str,
) -> Tensors:
    """q, k, v, do in bf16 and both cu."""
    generator = torch.Generator(device).manual_seed(sum(queries) + width)

    def one(rows: int, count: int) -> torch.Tensor:
        return torch.randn(rows, count, width, device=device, generator=generator).bfloat16()

    tq, tk = sum(queries), sum(keys)
    tensors = [one(tq, heads[0]), one(tk, heads[1]), one(tk, heads[1]), one(tq, heads[0])]
    return [*tensors, cu(queries, device), cu(keys, device)]


def run(
    module: Any,
    tensors: Tensors,
    call: AttentionCall,
    bias: torch.Tensor | None = None,
    policy: AttentionPolicy = ATTENTION_BF16,
) -> dict[str, torch.Tensor]:
    """o, lse and gradients by a backend."""
    q, k, v, do, cu_q, cu_k = tensors
    how: dict[str, Any] = {"call": call, "policy": policy, "bias": bias}
    o, lse = module.attention_forward(q, k, v, cu_q, cu_k, **how)
    grads = module.attention_backward(do, q, k, v, o, lse, cu_q, cu_k, **how)
    return dict(zip(("o", "lse", "dq", "dk", "dv", "dbias"), (o, lse, *grads), strict=True))


def kernels(
    tensors: Tensors, call: AttentionCall, bias: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    from lowprec.backends.triton_kernels import attention_ops

    return run(attention_ops, tensors, call, bias)


def law(
    tensors: Tensors, call: AttentionCall, bias: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """In float64 throughout."""
    wide = [t.double() for t in tensors[:4]]
    return run(attention_reference, [*wide, *tensors[4:]], call, bias)


def eager(
    tensors: Tensors, call: AttentionCall, bias: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Plain PyTorch with every intermediate result in bf16, sequence by sequence."""
    q, k, v, do, cu_q, cu_k = tensors
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    parts = []
    for b in range(len(cu_q) - 1):
        rows, cols = (slice(int(c[b]), int(c[b + 1])) for c in (cu_q, cu_k))
        q_, k_, v_ = (
            t[part].transpose(0, 1) for t, part in zip(leaves, (rows, cols, cols), strict=True)
        )
        k_, v_ = k_.repeat_interleave(group, 0), v_.repeat_interleave(group, 0)
        s = q_ @ k_.mT * call.scale
        if bias is not None:
            s = s + bias[:, : s.shape[1], : s.shape[2]].to(s.dtype)
        i = torch.arange(s.shape[1], device=q.device).unsqueeze(1)
        j = torch.arange(s.shape[2], device=q.device)
        mask, p = call.mask, i + s.shape[2] - s.shape[1]
        seen = {
            "none": j >= 0,
            "causal": j <= p,
            "window": (j >= p - mask.left) & (j <= p + mask.right),
            "blocks": i // mask.size == j // mask.size,
        }[mask.kind]
        if call.activation == "softmax":
            w = s.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0)
        else:
            w = getattr(torch.nn.functional, call.activation)(s).masked_fill(~seen, 0)
        parts.append((w @ v_).transpose(0, 1))
    o = torch.cat(parts)
    grads = torch.autograd.grad(o, leaves, do)
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=True))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-9))


def assert_close(tensors: Tensors, call: AttentionCall, bias: torch.Tensor | None = None) -> None:
    got, want = kernels(tensors, call, bias), law(tensors, call, bias)
    plain = eager(tensors, call, bias)
    for name in ("o", "dq", "dk", "dv"):
        assert got[name].isfinite().all(), name
        assert error(got[name], want[name]) <= 2 * error(plain[name], want[name]), name
    if call.activation == "softmax":
        both = got["lse"].double(), want["lse"].double()
        torch.testing.assert_close(*both, atol=1e-4, rtol=1e-5)
    if got["dbias"] is not None:
        assert error(got["dbias"], want["dbias"]) <= 1e-2


NATIVE = AttentionPolicy.parse(
    "fp8_128x128 / e4m3*256 x fp8_128x128 / fp8_128x128 / bf16 / bf16 / bf16"
)
BF16_DP = AttentionPolicy.parse(
    "mxfp8_128x128 / e4m3*256 x mxfp8_128x128 / bf16 / bf16 / bf16 / bf16"
)
ROUNDED = AttentionPolicy.parse(attention_cases.ROUNDED)
ROUNDED_DP = AttentionPolicy.parse(attention_cases.ROUNDED_DP)


def snr(got: torch.Tensor, want: torch.Tensor) -> float:
    """Signal to noise, dB."""
    return -20 * math.log10(max(error(got, want), 1e-12))


def assert_as_the_reference(
    tensors: Tensors, call: AttentionCall, policy: AttentionPolicy, *, close: float
) -> None:
    """8-bit kernels: at most 0.5 dB below the reference's signal to noise, and `close` to it."""
    from lowprec.backends.triton_kernels import attention_ops

    got = run(attention_ops, tensors, call, policy=policy)
    want = run(attention_reference, tensors, call, policy=policy)
    exact = law(tensors, call)
    for name in ("o", "dq", "dk", "dv"):
        assert got[name].isfinite().all(), name
        assert error(got[name], want[name]) <= close, name
        floor = snr(want[name], exact[name]) - 0.5
        assert snr(got[name], exact[name]) >= floor, name
    torch.testing.assert_close(got["lse"].double(), want["lse"].double(), atol=1e-3, rtol=1e-4)


def rounded(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`x` [T, H, D] through fp8_128x128 by the reference, each head of each sequence by itself."""
    cast, found = Cast.parse("fp8_128x128"), torch.empty_like(x)
    for begin, end in itertools.pairwise(ends.tolist()):
        codes = reference.quantize(x[begin:end].transpose(0, 1), cast, axis=-1)
        found[begin:end] = reference.dequantize(codes, dtype=x.dtype).transpose(0, 1)
    return found


def assert_rounds_as_the_reference(tensors: Tensors) -> None:
    """q, k, v and dO as a backward pass in bf16 reads them, to the bit."""
    from lowprec.backends.triton_kernels import attention_ops, attention_round_ops

    q, k, v, do, cu_q, cu_k = tensors
    call = AttentionCall("softmax", Mask(), 0.2)
    one = attention_ops.given((q, k, v), (cu_q, cu_k), None, call, NATIVE)
    found, plain, read = attention_round_ops.rounded(one, attention_ops.lined(do))
    for got, x in ((found.q, q), (found.k, k), (plain, do)):
        assert got.is_contiguous()
        assert torch.equal(got.nan_to_num(), x.nan_to_num())
    pairs = [(found.of_s[0], q, cu_q), (found.of_s[1], k, cu_k), (found.v, v, cu_k)]
    for got, x, ends in (*pairs, (read, do, cu_q)):
        assert got.is_contiguous()
        torch.testing.assert_close(got, rounded(x, ends), rtol=0, atol=0, equal_nan=True)


def assert_codes_stand_for_what_is_read(tensors: Tensors, policy: AttentionPolicy = NATIVE) -> None:
    """Codes of q, k, v and dO times the scale of their tile, to the bit; finite where it is NaN.

    Tiles of 128 tokens start with their sequence. Exponents and delta come with the codes of dO.
    Beside codes q and k are as dQ and dK read them, v as dP does where that has no codes.
    """
    from lowprec.backends.triton_kernels import attention_ops, attention_round_ops

    q, k, v, do, cu_q, cu_k = tensors
    call = AttentionCall("softmax", Mask(), 0.2)
    one = attention_ops.given((q, k, v), (cu_q, cu_k), None, call, policy)
    found = attention_round_ops.coded(one)
    again, _, read_do = attention_round_ops.rounded(one, attention_ops.lined(do))
    codes, (s_q, s_k) = found.codes, again.of_s or (again.q, again.k)
    assert (again.of_s is None) == one.native.rounded
    for got, want in ((found.q, again.q), (found.k, again.k)):
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
    if not one.native.dp:
        assert codes.scales_v is None
        assert read_do is None
        assert torch.equal(found.v.nan_to_num(), again.v.nan_to_num())
        read_do, found = rounded(do, cu_q), found._replace(v=None)
    batch, (tokens, heads, _) = len(cu_q) - 1, q.shape
    o = attention_ops.lined(torch.randn_like(q))
    lse = torch.linspace(-9, 9, heads * tokens, device=q.device).view(heads, tokens)
    rows_of = torch.full((heads, tokens // 64 + batch + 1, 2, 64), 7.0, device=q.device)
    of_do = attention_round_ops.prepared(found, attention_ops.lined(do), o, lse, rows_of)
    assert_prepared(rows_of, read_do, o, lse, cu_q.tolist())
    for values, (code, scales), cu in (
        (s_q, codes.q, cu_q),
        (s_k, codes.k, cu_k),
        (again.v, (found.v, codes.scales_v), cu_k),
        (read_do, of_do, cu_q),
    ):
        if code is None:
            continue
        assert code.is_contiguous()
        assert code.dtype == torch.float8_e4m3fn
        assert code.float().isfinite().all()
        ends = cu.tolist()
        assert scales.shape == (values.shape[1], ends[-1] // 128 + len(ends) - 1)
        for b, (begin, end) in enumerate(itertools.pairwise(ends)):
            token = torch.arange(end - begin, device=cu.device)
            of_token = scales[:, begin // 128 + b + token // 128].T.unsqueeze(2)
            want = code[begin:end].float() * of_token
            got = values[begin:end].float()
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def assert_prepared(
    rows_of: torch.Tensor, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, ends: list[int]
) -> None:
    """Exponents and delta in places of 64 rows from a sequence's first; others are left alone."""
    delta = (do.float() * o.float()).sum(2).T
    power = lse * math.log2(math.e)
    for head, places in enumerate(rows_of.unbind(0)):
        for b, (begin, end) in enumerate(itertools.pairwise(ends)):
            first, count = begin // 64 + b, -(-(end - begin) // 64)
            got = places[first : first + count].transpose(0, 1).reshape(2, -1)
            for found, of_row, past in ((got[0], power, torch.inf), (got[1], delta, 0.0)):
                want = of_row[head, begin:end]
                torch.testing.assert_close(found[: end - begin], want, atol=1e-4, rtol=1e-4)
                assert (found[end - begin :] == past).all()
            assert (places[first + count : ends[b + 1] // 64 + b + 1] == 7).all()


def assert_reads_what_was_read(
    tensors: Tensors, call: AttentionCall, policy: AttentionPolicy
) -> None:
    """Gradients are those of the bf16 kernels, each of what its product reads, to the bit.

    Those of q and k are of dO after its cast where dP casts it, that of v of dO as it is.
    """
    from lowprec.backends.triton_kernels import attention_ops

    q, k, v, do, cu_q, cu_k = tensors
    how: dict[str, Any] = {"call": call, "bias": None}
    o, lse = attention_ops.attention_forward(q, k, v, cu_q, cu_k, policy=policy, **how)
    rest = (o, lse, cu_q, cu_k)
    found = attention_ops.attention_backward(do, q, k, v, *rest, policy=policy, **how)
    read = [rounded(x, ends) for x, ends in ((q, cu_q), (k, cu_k), (v, cu_k))]

    def plain(do: torch.Tensor) -> list[torch.Tensor]:
        return attention_ops.attention_backward(do, *read, *rest, policy=ATTENTION_BF16, **how)

    want = plain(do)[:3]
    if policy == ROUNDED_DP:
        want = [*plain(rounded(do, cu_q))[:2], want[2]]
    for a, b in zip(found[:3], want, strict=True):
        assert torch.equal(a, b)


def assert_no_queries_leave_zeros(policy: AttentionPolicy, device: str, width: int = 128) -> None:
    """Keys that no query looks at have no gradient."""
    from lowprec.backends.triton_kernels import attention_ops

    tensors = drawn([0, 0], [100, 30], (2, 2), width, device)
    got = run(attention_ops, tensors, AttentionCall("softmax", Mask(), 0.2), policy=policy)
    assert got["o"].shape == got["dq"].shape == (0, 2, width)
    for name in ("dk", "dv"):
        assert got[name].shape == (130, 2, width)
        assert (got[name] == 0).all(), name
