"""The attention kernels compile without a GPU: no spills, products that overlap, few registers.

ptxas says when it puts one product after another (C7510 to C7515): such a kernel loses a third of
its speed, and nothing else shows it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from lowprec.attention_call import AttentionCall, Mask
from lowprec.attention_policy import ATTENTION_BF16
from tests.core.attention_kernel_cases import NATIVE, ROUNDED
from tests.core.test_triton_codegen import Recorder, disassembled

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler",
)

SHARED = 227 * 1024
"""Bytes of shared memory that a program of sm90 may have."""
MASKS = {
    "none": Mask(),
    "causal": Mask("causal"),
    "window": Mask("window", left=100),
    "blocks": Mask("blocks"),
}
KERNELS = {
    "attend": "attention",
    "keys_backward": "attention_gradients",
    "queries_backward": "attention_gradients",
}
# Of calls with few queries a sequence, with a bias, or beside the products.
OTHERS = {"combine": "attention", "prepare": "attention_gradients"}
OTHERS |= {"bias_backward": "attention_bias", "fill_schedule": "attention_schedule"}
OTHERS |= dict.fromkeys(("attend_fp8", "encode_pair"), "attention_fp8")
OTHERS |= dict.fromkeys(("attend_blocks", "blocks_backward"), "attention_blocks")
OTHERS |= {"round_pair": "attention_round"}
WITHOUT = ("combine", "prepare", "fill_schedule", "encode_pair", "round_pair")
# kernel, head dim, activation, mask: registers a thread at most, on sm90 with Triton 3.6 to 3.8.
BUDGET = {
    ("attend", 128, "softmax", "none"): 208,
    ("keys_backward", 128, "softmax", "none"): 255,
    ("queries_backward", 128, "softmax", "none"): 224,
    ("attend", 64, "softmax", "blocks"): 160,
    ("attend", 64, "softmax", "none"): 255,
    ("keys_backward", 64, "softmax", "none"): 240,
    ("queries_backward", 64, "softmax", "none"): 232,
    ("keys_backward", 64, "softmax", "blocks"): 255,
    ("queries_backward", 64, "softmax", "blocks"): 176,
    ("attend, few", 64, "softmax", "none"): 160,
    ("combine, few", 64, "softmax", "none"): 160,
    ("queries_backward, few", 64, "softmax", "none"): 200,
    ("bias_backward", 64, "softmax", "none"): 255,
    ("bias_backward", 128, "softmax", "causal"): 255,
    ("prepare", 64, "softmax", "none"): 128,
    ("attend_blocks", 64, "softmax", "blocks"): 152,
    ("blocks_backward", 64, "softmax", "blocks"): 255,
    ("attend_blocks", 128, "gelu", "blocks"): 192,
    ("blocks_backward", 128, "softmax", "blocks"): 248,
    ("attend_fp8", 128, "softmax", "none"): 248,
    ("attend_fp8", 64, "softmax", "causal"): 200,
    ("keys_backward, 8 bits", 128, "softmax", "none"): 255,
    ("keys_backward, 8 bits", 128, "softmax", "window"): 255,
    ("queries_backward, 8 bits", 128, "softmax", "window"): 255,
    ("blocks_backward, 8 bits", 64, "softmax", "blocks"): 255,
    ("blocks_backward, 8 bits", 128, "softmax", "blocks"): 255,
    ("encode_pair", 128, "softmax", "none"): 176,
    ("fill_schedule", 64, "softmax", "none"): 128,
    ("round_pair", 128, "softmax", "none"): 255,
    ("round_pair", 64, "softmax", "none"): 128,
    ("round_pair", 96, "softmax", "none"): 255,
}
MORE = [
    (kernel, width, activation, mask)
    for kernel in KERNELS
    for width in (16, 32, 48, 64, 96, 128, 256)
    for activation in ("softmax", "gelu", "silu")
    for mask in MASKS
    if width in (64, 128, 256) or (activation, mask) == ("softmax", "causal")
]
QUICK = [*list(BUDGET)[:3], ("attend_fp8", 128, "softmax", "none")]
QUICK += [("attend_blocks", 64, "softmax", "blocks"), ("round_pair", 64, "softmax", "none")]
CASES = [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in BUDGET]
CASES += [pytest.param(*one, marks=pytest.mark.slow) for one in MORE if one not in BUDGET]


def recorded(kernel: str, call: AttentionCall, width: int, monkeypatch: Any) -> Recorder:
    """What the backend launches the kernel with ("..., few": of few queries); nothing runs."""
    from lowprec.backends.triton_kernels import attention_ops
    from lowprec.backends.triton_kernels.attention_native import Native8

    found = {}
    for name, module_name in (KERNELS | OTHERS).items():
        module = importlib.import_module(f"lowprec.backends.triton_kernels.{module_name}")
        found[name] = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, found[name])
    monkeypatch.setattr(
        attention_ops,
        "given",
        lambda qkv, cu, bias, call, policy: attention_ops.Given(
            *qkv, *cu, bias, call, Native8.of(policy)
        ),
    )
    name, _, form = kernel.partition(", ")
    tokens = 256 if form == "few" else 4096
    eight = form == "8 bits" or OTHERS.get(name) == "attention_fp8"
    x, cu = torch.empty(tokens, 8, width, dtype=torch.bfloat16), torch.empty(9, dtype=torch.int32)
    # Lengths in one tensor are those of queries and keys alike.
    other = cu if OTHERS.get(name) == "attention_blocks" else cu.clone()
    lse = torch.empty(8, tokens)
    bias = torch.empty(8, 512, 512) if name == "bias_backward" else None
    how: dict[str, Any] = {
        "call": call,
        "policy": NATIVE if eight else ATTENTION_BF16,
        "bias": bias,
    }
    if name == "round_pair":
        how["policy"] = ROUNDED
    keys = x.new_empty(16 * tokens, 8, width) if form == "few" else x
    attention_ops.attention_forward(x, keys, keys, cu, other, **how)
    attention_ops.attention_backward(x, x, x, x, x, lse, cu, other, **how)
    return found[name]


def complaints(ptx: str, folder: Path) -> list[str]:
    """Lines in which ptxas says that products are serialized."""
    import triton.backends.nvidia as nvidia

    tool, source = Path(nvidia.__file__).parent / "bin" / "ptxas", folder / "kernel.ptx"
    source.write_text(ptx)
    command = [tool, "-v", "--gpu-name=sm_90a", source, "-o", folder / "kernel.again"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in done.stderr.splitlines() if "Performance Loss" in line]


@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kernel", "width", "activation", "mask"), CASES)
def test_kernels_stay_within_their_budget(
    kernel: str,
    width: int,
    activation: Any,
    mask: str,
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = AttentionCall(activation, MASKS[mask], 0.125)
    recorder = recorded(kernel, call, width, monkeypatch)
    compiled = recorder.compile(capability)
    counted, resources = disassembled(compiled, tmp_path)
    assert resources["LOCAL"] == 0
    if capability == 90:
        assert compiled.metadata.shared <= SHARED
        assert resources["STACK"] == 0
        assert resources["REG"] <= BUDGET.get((kernel, width, activation, mask), 255)
        assert complaints(compiled.asm["ptx"], tmp_path) == []
        products = [name for name in counted if "GMMA" in name or "HMMA" in name]
        assert bool(products) == (kernel.partition(",")[0] not in WITHOUT)
        eight = any("QGMMA" in name for name in counted)
        assert eight == (kernel == "attend_fp8")
        if kernel == "round_pair":
            # 2 bytes in, 2 out of each element: time for some 20 instructions.
            warps = recorder.options["num_warps"]
            assert sum(counted.values()) * 32 * warps <= 20 * 2 * 128 * width
