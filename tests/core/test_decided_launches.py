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
    from lowprec.backends.triton_kernels import launch, pipelined, starting

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


@pytest.mark.parametrize(("first", "streamed"), [(0, True), (1, False), (2, True)])
def test_threads_bring_only_what_the_compiler_knows_to_be_aligned(
    first: int, streamed: bool, launches: list[Any]
) -> None:
    # Rows of 200 bytes: the second starts at 8 bytes, of which Triton tells its compiler nothing.
    x = torch.zeros(64, 100, dtype=torch.bfloat16)[first:]
    both(x, ("mxfp8", "mxfp8"))
    assert [one[0].__name__ == "cast_tiles_pipelined" for one in launches] == [streamed]


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
