"""The kernels around attention, and those for short keys, compile without a GPU and without spills.

What streams must keep bytes in flight: loads that the pipeline issues ahead, and as many programs
on a multiprocessor as registers and shared memory allow.
"""

from __future__ import annotations

import collections
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lowprec.attention_call import AttentionCall, Mask
from lowprec.attention_front import Front
from lowprec.rotary import Rotary
from tests.core.attention_kernel_cases import NATIVE
from tests.core.test_triton_attention_codegen import complaints
from tests.core.test_triton_codegen import Recorder, disassembled, stale

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler",
)
SLOW = pytest.mark.slow
# Of a multiprocessor of sm90.
REGISTERS, SHARED = 65536, 227 * 1024
IN_FLIGHT = 32 * 1024
FORMS = {
    "halves": Front(1e-6, Rotary()),
    "neighbours": Front(1e-6, Rotary(interleaved=True)),
    "some": Front(1e-6, Rotary(dims=32)),
    "norm": Front(1e-6, None),
}


def given(tokens: int, keys: int, width: int, activation: Any = "softmax") -> Any:
    from lowprec.backends.triton_kernels.attention_native import Native8
    from lowprec.backends.triton_kernels.attention_ops import Given

    q = torch.empty(tokens, 8, width, dtype=torch.bfloat16)
    k = torch.empty(keys, 8, width, dtype=torch.bfloat16)
    cu = torch.empty(9, dtype=torch.int32)
    call = AttentionCall(activation, Mask(), 0.125)
    return Given(q, k, k, cu, cu.clone(), None, call, Native8.of(NATIVE))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """Kernels by name, which keep what they are launched with; nothing runs."""
    from lowprec.backends.triton_kernels import (
        attention,
        attention_blocks,
        attention_cross,
        attention_fp8,
        attention_project,
        attention_project_ops,
        attention_schedule,
    )

    found = {}
    for module, name in (
        (attention, "attend"),
        (attention, "combine"),
        (attention_blocks, "attend_blocks"),
        (attention_cross, "attend_cross"),
        (attention_fp8, "attend_fp8"),
        (attention_project, "project"),
        (attention_project, "project_backward"),
        (attention_fp8, "encode_pair"),
        (attention_schedule, "fill_apart"),
        (attention_schedule, "fill_schedule"),
    ):
        found[name] = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, found[name])

    def start(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        kernel[(programs,)](*arguments, **constants)

    monkeypatch.setattr(attention_project_ops, "start", start)
    return found


def held(kernel: Recorder, folder: Path, capability: int = 90) -> tuple[Any, dict[str, int]]:
    """The kernel compiled, without spills, and what it uses."""
    compiled = kernel.compile(capability)
    _, resources = disassembled(compiled, folder)
    assert resources["LOCAL"] == 0
    if capability == 90:
        assert resources["STACK"] == 0
        assert complaints(compiled.asm["ptx"], folder) == []
    return compiled, resources


def resident(kernel: Recorder, compiled: Any, resources: dict[str, int]) -> int:
    """Programs on a multiprocessor at once."""
    threads = 32 * kernel.options["num_warps"]
    registers = -(-resources["REG"] // 8) * 8 * threads
    return min(REGISTERS // registers, SHARED // (compiled.metadata.shared + 1024))


def order_of_sums(compiled: Any) -> set[str]:
    """How the threads of a warp share the tiles of which rows are added up."""
    source = compiled.asm["ttgir"]
    sums = re.findall(r"\(tensor<\d+x\d+xf32, (#\w+)>\) -> tensor<\d+xf32, #ttg\.slice", source)
    shared = r"sizePerThread = \[\d+, \d+\], threadsPerWarp = \[\d+, \d+\]"
    layouts = dict(re.findall(rf"(#\w+) = #ttg\.blocked<\{{({shared})", source))
    return {layouts[name] for name in sums}


@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=SLOW)])
@pytest.mark.parametrize(
    ("form", "width"),
    [
        ("halves", 128),
        ("neighbours", 64),
        *[
            pytest.param(form, width, marks=SLOW)
            for form in FORMS
            for width in (16, 48, 64, 80, 96, 128, 256)
            if (form, width) not in (("halves", 128), ("neighbours", 64), ("some", 16))
        ],
    ],
)
@pytest.mark.parametrize("norm", [True, pytest.param(False, marks=SLOW)])
def test_the_pass_before_attention(
    form: str,
    width: int,
    norm: bool,
    capability: int,
    kernels: dict[str, Recorder],
    tmp_path: Path,
) -> None:
    from lowprec.backends.triton_kernels import attention_project_ops

    if form == "norm" and not norm:
        pytest.skip("nothing to compute")
    weights: Any = (torch.empty(width), torch.empty(width)) if norm else (None, None)
    one = given(4096, 4096, width)
    attention_project_ops.fronted(one, FORMS[form], weights)
    compiled, resources = held(kernels["project"], tmp_path, capability)
    order = order_of_sums(compiled)
    if capability == 90 and form == "halves" and width >= 64:
        ahead = (attention_project_ops.WRITE[128].stages - 1) * 32 * min(width, 128) * 2
        assert resident(kernels["project"], compiled, resources) * ahead >= IN_FLIGHT
    attention_project_ops.gradients(one, (one.q, one.k), FORMS[form], weights)
    held(kernels["project_backward"], tmp_path, capability)
    if width <= 128:
        attention_project_ops.encoded(one, FORMS[form], weights, "rceil")
        compiled, _ = held(kernels["project"], tmp_path, capability)
        assert order_of_sums(compiled) == order or width < 48


def test_codes_take_few_instructions(kernels: dict[str, Recorder], tmp_path: Path) -> None:
    """Loads of whole sectors, two values a conversion, and a loop that is not long for 32 values.

    Of a program of 16 warps: 32 values of a thread in each head.
    """
    from lowprec.backends.triton_kernels import attention_project_ops

    one, weights = given(4096, 4096, 128), (torch.empty(128), torch.empty(128))
    attention_project_ops.encoded(one, FORMS["halves"], weights, "rceil")
    compiled, _ = held(kernels["project"], tmp_path)
    assert kernels["project"].options["num_warps"] == 16
    counted, _ = disassembled(compiled, tmp_path)
    kinds = collections.Counter[str]()
    for name, times in counted.items():
        kinds[name.split(".")[0]] += times
    assert kinds["F2F"] == 0
    assert kinds["F2FP"] == 32
    assert sum(kinds.values()) <= 1350
    assert order_of_sums(compiled) == {"sizePerThread = [1, 8], threadsPerWarp = [4, 8]"}


@pytest.mark.parametrize(("source", "found"), [("%rs1", 1), ("%rs2", 0)])
def test_stale_words_are_found(source: str, found: int) -> None:
    ptx = f"""
    cvt.rn.satfinite.e4m3x2.f32  %rs1, %r2, %r1;
    cvt.rn.satfinite.e4m3x2.f32  %rs2, %r4, %r3;
    shr.u16 \t%rs3, {source}, 8;
    and.b16 \t%rs4, %rs3, 127;
    mov.b32 \t%r5, {{%rs1, %rs2}};
    mov.b32 \t%r6, {{%rs1, %rs4}};
    """
    assert len(stale(ptx)) == found


def test_the_turn_is_rounded_operation_by_operation(
    kernels: dict[str, Recorder], tmp_path: Path
) -> None:
    """As PyTorch rounds it: no fused multiply-add, no subnormal number taken for zero."""
    from lowprec.backends.triton_kernels import attention_project_ops

    one, front = given(4096, 4096, 64), Front(1.0, Rotary())
    attention_project_ops.fronted(one, front, (None, None))
    compiled = kernels["project"].compile(90)
    counted, _ = disassembled(compiled, tmp_path)
    assert not any("FFMA" in name for name in counted)
    assert any("FMUL" in name for name in counted)
    assert ".ftz" not in compiled.asm["ptx"]


@pytest.mark.parametrize("width", [128, pytest.param(64, marks=SLOW)])
def test_attention_from_codes(width: int, kernels: dict[str, Recorder], tmp_path: Path) -> None:
    from lowprec.backends.triton_kernels import attention_fp8_ops, attention_project_ops

    one = given(4096, 4096, width)
    codes = attention_project_ops.encoded(one, FORMS["halves"], (None, None), "rceil")
    o, lse = torch.empty_like(one.q), torch.empty(8, 4096)
    attention_fp8_ops.forward(one, one.native, o, lse, codes)
    compiled = kernels["attend_fp8"].compile(90)
    counted, resources = disassembled(compiled, tmp_path)
    assert resources["STACK"] == resources["LOCAL"] == 0
    assert resources["REG"] <= 248
    assert complaints(compiled.asm["ptx"], tmp_path) == []
    assert any("QGMMA" in name for name in counted)


@pytest.mark.parametrize("activation", ["softmax", pytest.param("gelu", marks=SLOW)])
@pytest.mark.parametrize("width", [64, *[pytest.param(w, marks=SLOW) for w in (16, 32, 96, 128)]])
def test_short_keys_stream(
    width: int, activation: Any, kernels: dict[str, Recorder], tmp_path: Path
) -> None:
    from lowprec.backends.triton_kernels import attention_cross_ops

    one = given(4096, 64, width, activation)
    o, lse = torch.empty_like(one.q), torch.empty(8, 4096)
    attention_cross_ops.forward(one, o, lse)
    compiled, resources = held(kernels["attend_cross"], tmp_path)
    assert "cp.async" in compiled.asm["ptx"]
    shape = kernels["attend_cross"].options
    ahead = (shape["STAGES"] - 1) * shape["TILE_Q"] * width * 2
    if width >= 64:
        assert resident(kernels["attend_cross"], compiled, resources) * ahead >= IN_FLIGHT


@pytest.mark.parametrize("width", [64, pytest.param(128, marks=SLOW)])
def test_blocks_and_pooled_keys_stream(
    width: int, kernels: dict[str, Recorder], tmp_path: Path
) -> None:
    from lowprec.backends.triton_kernels import (
        attention_block_ops,
        attention_ops,
        attention_schedule,
    )

    one = given(4096, 4096, width)._replace(native=None)
    one = one._replace(cu_k=one.cu_q, call=AttentionCall("softmax", Mask("blocks"), 0.125))
    o, lse = torch.empty_like(one.q), torch.empty(8, 4096)
    attention_block_ops.forward(one, o, lse)
    compiled, resources = held(kernels["attend_blocks"], tmp_path)
    ahead = (attention_block_ops.STAGES - 1) * 3 * 64 * width * 2
    assert resident(kernels["attend_blocks"], compiled, resources) * ahead >= IN_FLIGHT
    few = given(256, 65536, width)._replace(native=None)
    attention_ops._forward(few, torch.empty_like(few.q), torch.empty(8, 256))
    compiled, resources = held(kernels["attend"], tmp_path)
    ahead = (attention_ops.FORWARD_FEW[width].stages - 1) * 2 * 64 * width * 2
    assert resident(kernels["attend"], compiled, resources) * ahead >= IN_FLIGHT
    held(kernels["combine"], tmp_path)
    lists = attention_schedule.schedule_apart(
        few.cu_q, few.cu_k, 256, (64, 64, 128), attention_schedule.Apart(64, 2048, 64, 65536)
    )
    held(kernels["fill_apart"], tmp_path)
    attention_ops._forward(few, torch.empty_like(few.q), torch.empty(8, 256), lists[0])
    held(kernels["combine"], tmp_path)
