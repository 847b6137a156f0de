"""The attention kernels in Gluon compile for sm90: products that overlap, next to no spills.

They cannot run without the GPU that they are for: tests/gpu has their numbers.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lowprec.attention_call import AttentionCall, Mask
from lowprec.attention_policy import ATTENTION_BF16, AttentionPolicy
from tests.core.attention_kernel_cases import NATIVE, ROUNDED
from tests.core.test_triton_attention_codegen import SHARED, complaints
from tests.core.test_triton_codegen import Recorder, disassembled

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler",
)
SLOW = pytest.mark.slow
PRODUCTS = ("HGMMA", "QGMMA")
# Bytes a thread that wait on the stack between tiles, outside of the loops over keys or queries.
STACK = {"attend_stream": 32, "keys_stream": 64, "queries_stream": 24}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """Kernels by name, which keep what they are launched with; nothing runs."""
    from lowprec.backends.triton_kernels import (
        attention_fp8,
        attention_gradients,
        attention_round,
        attention_schedule,
        attention_stream,
        attention_stream_gradients,
        attention_stream_ops,
    )

    monkeypatch.setattr(attention_stream_ops, "processors", lambda device: 132)
    found = {}
    for module, name in (
        (attention_fp8, "encode_pair"),
        (attention_gradients, "prepare_tiles"),
        (attention_round, "round_pair"),
        (attention_round, "prepare_codes"),
        (attention_schedule, "fill_schedule"),
        (attention_stream, "attend_stream"),
        (attention_stream_gradients, "keys_stream"),
        (attention_stream_gradients, "queries_stream"),
    ):
        found[name] = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, found[name])
    return found


def launched(
    width: int, mask: str, activation: Any, *, eight: bool, policy: AttentionPolicy = ROUNDED
) -> None:
    """Forward, and backward where there is one, of eight sequences with two heads to a key head."""
    from lowprec.backends.triton_kernels import attention_round_ops, attention_stream_ops
    from lowprec.backends.triton_kernels.attention_native import Native8
    from lowprec.backends.triton_kernels.attention_ops import Given

    q = torch.empty(4096, 8, width, dtype=torch.bfloat16)
    k, cu = q[:, :4].contiguous(), torch.empty(9, dtype=torch.int32)
    native = Native8.of(policy if eight else ATTENTION_BF16)
    call = AttentionCall(activation, Mask(mask), 0.125)  # type: ignore[arg-type]
    one = Given(q, k, k, cu, cu.clone(), None, call, native)
    o, lse = torch.empty_like(q), torch.empty(8, 4096)
    attention_stream_ops.forward(one, native, o, lse)
    if activation == "softmax":
        read = attention_round_ops.coded(one) if eight else one
        grads = [torch.empty_like(t) for t in (q, k, k)]
        attention_stream_ops.backward(read, torch.empty_like(q), o, lse, grads)


def held(kernel: Recorder, name: str, folder: Path) -> Any:
    """Instructions of the kernel compiled, within its budget."""
    compiled = kernel.compile(90)
    counted, resources = disassembled(compiled, folder)
    assert resources["LOCAL"] == 0
    assert resources["STACK"] <= STACK.get(name, 0)
    assert compiled.metadata.shared <= SHARED
    assert complaints(compiled.asm["ptx"], folder) == []
    return counted


@pytest.mark.parametrize(
    ("width", "mask", "activation", "eight"),
    [
        (128, "none", "softmax", True),
        *[
            pytest.param(width, mask, activation, eight, marks=SLOW)
            for width in (64, 128)
            for mask in ("none", "causal")
            for activation in ("softmax", "gelu", "silu")
            for eight in (False, True)
            if activation == "softmax" or not (eight or (mask, width) == ("causal", 128))
            if (width, mask, eight) != (128, "none", True)
        ],
    ],
)
def test_forward(
    kernels: dict[str, Recorder],
    tmp_path: Path,
    width: int,
    mask: str,
    activation: str,
    eight: bool,
) -> None:
    launched(width, mask, activation, eight=eight)
    counted = held(kernels["attend_stream"], "attend_stream", tmp_path)
    found = {name.split(".")[0] for name in counted if "GMMA" in name}
    assert found == ({"QGMMA"} if eight else {"HGMMA"})
    # Codes of P stay where the first product left P: no thread hands a value to another.
    shuffles = sum(n for name, n in counted.items() if name.startswith("SHFL"))
    assert shuffles <= (48 if activation == "softmax" else 0)


@pytest.mark.parametrize("name", ["keys_stream", "queries_stream"])
@pytest.mark.parametrize(
    ("width", "mask", "eight"),
    [
        pytest.param(width, mask, eight, marks=[] if (width, mask) == (128, quick) else SLOW)
        for eight, quick in (("", "causal"), ("S", "none"), ("S and dP", "none"))
        for width in (64, 128)
        for mask in ("none", "causal")
    ],
)
def test_backward(
    kernels: dict[str, Recorder], tmp_path: Path, width: int, mask: str, eight: str, name: str
) -> None:
    """A product of codes has half the instructions, and costs each step one multiplication."""
    policy = NATIVE if "dP" in eight else ROUNDED
    launched(width, mask, "softmax", eight=bool(eight), policy=policy)
    found = held(kernels[name], name, tmp_path)
    products = {kind: sum(n for one, n in found.items() if kind in one) for kind in PRODUCTS}
    # Of both groups of warps; 16 columns of a bf16 operand are one instruction.
    of_s = 2 * width // 16
    sums = 4 * 64 // 16 if name == "keys_stream" else 2 * 128 // 16
    in_codes = {"": 0, "S": 1, "S and dP": 2}[eight]
    assert products["HGMMA"] == sums + of_s * (2 - in_codes)
    assert products["QGMMA"] == of_s // 2 * in_codes
    # Scores and slopes are operands in the threads that computed them.
    assert not any(one.startswith(("RED", "ATOM", "SHFL")) for one in found)


def test_codes_are_written_beside_what_they_stand_for(
    kernels: dict[str, Recorder], tmp_path: Path
) -> None:
    launched(128, "none", "softmax", eight=True)
    found = held(kernels["round_pair"], "round_pair", tmp_path)
    # 2 bytes in, 3 out of each element of keys: time for some 20 instructions.
    threads = 32 * kernels["round_pair"].options["num_warps"]
    assert sum(found.values()) * threads <= 20 * 2 * 128 * 128


def test_codes_of_the_gradient_are_written_with_delta(
    kernels: dict[str, Recorder], tmp_path: Path
) -> None:
    launched(128, "none", "softmax", eight=True, policy=NATIVE)
    found = held(kernels["prepare_codes"], "prepare_codes", tmp_path)
    # 4 bytes in, 1 out of each element of queries: time for some 24 instructions.
    threads = 32 * kernels["prepare_codes"].options["num_warps"]
    assert sum(found.values()) * threads <= 24 * 128 * 128
