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
from lowprec.attention_policy import ATTENTION_BF16
from tests.core.attention_kernel_cases import NATIVE
from tests.core.test_triton_attention_codegen import complaints
from tests.core.test_triton_codegen import Recorder, disassembled

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler",
)
SLOW = pytest.mark.slow
# Bytes a thread that wait on the stack between tiles, outside of the loops over keys or queries.
STACK = {"attend_stream": 32, "keys_stream": 64, "queries_stream": 24}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """Kernels by name, which keep what they are launched with; nothing runs."""
    from lowprec.backends.triton_kernels import (
        attention_fp8,
        attention_gradients,
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
        (attention_schedule, "fill_schedule"),
        (attention_stream, "attend_stream"),
        (attention_stream_gradients, "keys_stream"),
        (attention_stream_gradients, "queries_stream"),
    ):
        found[name] = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, found[name])
    return found


def launched(width: int, mask: str, activation: Any, *, eight: bool) -> None:
    """Forward, and backward where there is one, of eight sequences with two heads to a key head."""
    from lowprec.backends.triton_kernels import attention_stream_ops
    from lowprec.backends.triton_kernels.attention_native import Native8
    from lowprec.backends.triton_kernels.attention_ops import Given

    q = torch.empty(4096, 8, width, dtype=torch.bfloat16)
    k, cu = q[:, :4].contiguous(), torch.empty(9, dtype=torch.int32)
    native = Native8.of(NATIVE if eight else ATTENTION_BF16)
    call = AttentionCall(activation, Mask(mask), 0.125)  # type: ignore[arg-type]
    one = Given(q, k, k, cu, cu.clone(), None, call, native)
    o, lse = torch.empty_like(q), torch.empty(8, 4096)
    attention_stream_ops.forward(one, native, o, lse)
    if not eight:
        grads = [torch.empty_like(t) for t in (q, k, k)]
        attention_stream_ops.backward(one, torch.empty_like(q), o, lse, grads)


def held(kernel: Recorder, name: str, folder: Path) -> Any:
    """Instructions of the kernel compiled, within its budget."""
    compiled = kernel.compile(90)
    counted, resources = disassembled(compiled, folder)
    assert resources["LOCAL"] == 0
    assert resources["STACK"] <= STACK.get(name, 0)
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
    ("width", "mask"),
    [
        pytest.param(128, "causal"),
        *[pytest.param(*one, marks=SLOW) for one in ((128, "none"), (64, "none"), (64, "causal"))],
    ],
)
def test_backward(
    kernels: dict[str, Recorder], tmp_path: Path, width: int, mask: str, name: str
) -> None:
    launched(width, mask, "softmax", eight=False)
    counted = held(kernels[name], name, tmp_path)
    assert any("HGMMA" in one for one in counted)
    assert not any(one.startswith(("RED", "ATOM")) for one in counted)
