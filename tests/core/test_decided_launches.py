"""Launches that are decided once ask for what the general path asks for, tensors, tiles and all."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lowprec.backends import triton_kernels
from lowprec.formats import Cast
from lowprec.tensor import QuantizedTensor
from tests.core.kernel_cases import INTERPRETED

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is missing"),
    pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing"),
]
PAIRS = [
    ("fp8_1x128", "fp8_128x128"),
    ("fp8_128x128", "fp8_128x128"),
    ("mxfp8", "mxfp8"),
    ("fp8_tensorwise", "fp8_tensorwise"),
]
SOURCES = {
    "whole": lambda: torch.zeros(256, 384, dtype=torch.bfloat16),
    "ragged": lambda: torch.zeros(200, 328, dtype=torch.float32),
    "strided": lambda: torch.zeros(96, 512, dtype=torch.bfloat16)[:, :256],
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is launched, as on a GPU with 132 multiprocessors; nothing runs."""
    from lowprec.backends.triton_kernels import launch, matrices, pipelined, starting

    found: list[tuple[Any, ...]] = []

    def record(kernel: Any, programs: Any, arguments: Any, constants: Any) -> None:
        found.append((kernel, programs, [shown(one) for one in arguments], constants))

    def shown(one: Any) -> Any:
        if isinstance(one, starting.Tiled):
            return one.base.dtype, *one[1:]
        return (one.dtype, one.numel()) if isinstance(one, torch.Tensor) else one

    monkeypatch.setattr(starting, "_direct", False)
    monkeypatch.setattr(starting, "_through_triton", record)
    monkeypatch.setattr(launch, "may_pipeline", lambda x: True)
    monkeypatch.setattr(triton_kernels, "check_device", lambda x: None)
    monkeypatch.setattr(pipelined, "_major", lambda device: 9)
    monkeypatch.setattr(pipelined, "processors", lambda device: 132)
    decide = matrices._ready.__wrapped__
    monkeypatch.setattr(
        matrices, "_ready", lambda *key: decide(*(-1 if one is None else one for one in key))
    )
    pipelined.decided.cache_clear()
    return found


def both(x: torch.Tensor, pair: tuple[str, str]) -> tuple[QuantizedTensor, QuantizedTensor]:
    return triton_kernels.quantize_both(x, *map(Cast.parse, pair))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_the_same_launch_and_the_same_tensors(
    pair: tuple[str, str],
    source: str,
    launches: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = SOURCES[source]()
    ready = both(x, pair)
    decided = list(launches)
    launches.clear()
    monkeypatch.setattr(triton_kernels, "_at_once", lambda *arguments: None)
    general = both(x, pair)
    assert decided == launches
    assert decided
    for ours, theirs in zip(ready, general, strict=True):
        assert ours.codes.stride() == theirs.codes.stride()
        for a, b in ((ours.codes, theirs.codes), (ours.scales, theirs.scales)):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert (ours.format, ours.axis) == (theirs.format, theirs.axis)


def test_what_the_copy_engine_cannot_move_takes_the_general_path(launches: list[Any]) -> None:
    from lowprec.backends.triton_kernels import matrices

    pair = Cast.parse("mxfp8"), Cast.parse("mxfp8")
    wide = torch.zeros(64, 72, dtype=torch.bfloat16)
    assert matrices.cast_both(wide[:, :64], *pair) is not None
    assert matrices.cast_both(wide[:, 1:65], *pair) is None  # starts between 16 bytes
    assert matrices.cast_both(torch.zeros(64, 65).bfloat16(), *pair) is None  # so do its rows
    assert matrices.cast_both(torch.zeros(64, 64).half().double(), *pair) is None
    for text in ("mxfp4", "mxfp8:sr", "fp8_rowwise", "nvfp4"):
        assert matrices.cast_both(wide[:, :64], *[Cast.parse(text)] * 2) is None


def test_square_tiles_share_scales_along_each_contraction(launches: list[Any]) -> None:
    row, column = both(SOURCES["whole"](), ("fp8_128x128", "fp8_128x128"))
    assert row.scales.stride() == (3, 1)
    assert column.mT.scales.stride() == (2, 1)


def test_the_compiled_kernel_is_started_from_the_second_time_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton import JITFunction

    from lowprec.backends.triton_kernels import starting

    runs: list[tuple[Any, ...]] = []

    class Compiled:
        function, packed_metadata = "function", "metadata"

        def run(self, *arguments: Any) -> None:
            runs.append(arguments)

    first: list[Any] = []

    def compile_and_run(*call: Any) -> Compiled:
        first.append(call)
        return Compiled()

    kernel = object.__new__(JITFunction)
    kernel.__dict__.update(fn=len, arg_names=["t", "n", "WIDTH"], pre_run_hooks=[])
    monkeypatch.setattr(starting, "_direct", True)
    monkeypatch.setattr(starting, "_through_triton", compile_and_run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    ready = starting.Launch(kernel, 5, (33,), {"WIDTH": 8, "num_warps": 4}, -1)
    tensors = [torch.zeros(4) for _ in range(3)]
    for one in tensors:
        ready.start(one)
    assert [call[2] for call in first] == [(tensors[0], 33)]
    want = [(5, 1, 1, 7, "function", "metadata", None, None, None, t, 33, 8) for t in tensors[1:]]
    assert [run[:9] + run[10:] for run in runs] == [run[:9] + run[10:] for run in want]
    assert [run[9] is one for run, one in zip(runs, tensors[1:], strict=True)] == [True] * 2
    kernel.pre_run_hooks.append(print)  # somebody wants to hear of every launch
    ready.start(tensors[0])
    assert len(first) == 2
