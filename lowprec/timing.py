"""Kernels on a CUDA device, built and timed for a calibration; random data, medians of events."""

from __future__ import annotations

import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn import functional

from lowprec import ops
from lowprec.backends import choose_gemm, triton_kernels
from lowprec.calibrating import Case, Machine
from lowprec.errors import LowprecError, UnsupportedError
from lowprec.formats import Cast
from lowprec.hardware import Hardware, current
from lowprec.policy import Gemm, parse_product
from lowprec.tensor import QuantizedTensor

REPETITIONS: Final = 5
_LEAST_US, _MOST_REPEATS = 150.0, 16
_TOGETHER: Final = 12  # cases that fit in the launch queue with all their repeats
_CYCLES: Final = 2.0e9  # a second of the GPU's clock, about
_SHORT, _LONG = 5e-4, 0.1  # seconds: longer than the host needs for a kernel, and for a round
_FULL: Final = ("out of memory", "ALLOC_FAILED")

Run = Callable[[], object]


def machine() -> Machine:
    """This machine's GPU and versions; raises UnsupportedError without a GPU."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "not measurable here: this machine has no CUDA device that torch can use; run "
            "python -m lowprec calibrate on the machine that trains, or plan with a shipped "
            "calibration"
        )
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    version, cuda = torch.__version__.partition("+")[0], torch.version.cuda or "none"
    return Machine(current(), torch.cuda.get_device_name(), version, triton, cuda)


class CudaBench:
    """Builds the kernels that cases name and times them on the current device."""

    def __init__(self, hardware: Hardware, *, device: str = "cuda") -> None:
        self.hardware = hardware
        self.device = device
        self._noise = torch.empty(0)

    def time(self, cases: Sequence[Case]) -> list[float]:
        """Median microseconds of each in a full queue, interleaved over repetitions."""
        try:
            return [
                us
                for at in range(0, len(cases), _TOGETHER)
                for us in timed([self.build(case) for case in cases[at : at + _TOGETHER]])
            ]
        except LowprecError:
            raise
        except Exception as error:  # of CUDA, its libraries, Triton
            if isinstance(error, torch.OutOfMemoryError) or any(t in str(error) for t in _FULL):
                torch.cuda.empty_cache()
                raise MemoryError from error
            names = ", ".join(sorted({f"{case.op} of {case.what}" for case in cases}))
            raise UnsupportedError(
                f"calibration failed at {cases[0].sizes} ({names}): {error}; nothing was written"
            ) from error

    def constants(self) -> tuple[float, float]:
        """Microseconds of the least kernel in a full queue, and TB/s of a copy of 1 GiB or less."""
        small = torch.zeros(1, device="cuda")
        size = min(2**30, torch.cuda.mem_get_info()[0] // 4)
        source = torch.empty(size, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        launch, copy = timed([lambda: small.zero_(), lambda: target.copy_(source)])
        return launch, 2e-6 * size / copy

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] of normal bf16 numbers; the same memory for all that are asked for."""
        if self._noise.numel() < rows * columns:
            self._noise = torch.empty(0)
            generator = torch.Generator(self.device).manual_seed(0)
            self._noise = torch.empty(rows * columns, dtype=torch.bfloat16, device=self.device)
            self._noise.normal_(generator=generator)
        return self._noise[: rows * columns].view(rows, columns)

    def build(self, case: Case) -> Run:
        """What runs the kernel of a case once, its operands made."""
        if case.op in ("fprop", "dgrad", "wgrad"):
            product = parse_product(case.what)
            if isinstance(product, Gemm):
                return self._gemm(case, product)
            return self._bf16(case)
        x = self._random(*case.sizes)
        if case.op == "round trip":
            return _round_trip(x, -1 if case.what == "row" else -2)
        if case.op == "cast":
            row, column = _casts(case.what)
            return lambda: cast_both(x, row, column)
        return _norm(x, case)

    def _bf16(self, case: Case) -> Run:
        m, n, k = case.sizes
        if case.op == "wgrad":
            dy, x = self._random(m, n), self._random(m, k)
            return lambda: torch.mm(dy.mT, x)
        if case.op == "fprop":
            x, w = self._random(m, k), self._random(n, k)
            return lambda: functional.linear(x, w)
        dy, w = self._random(m, k), self._random(k, n)
        return lambda: torch.mm(dy, w)

    def _gemm(self, case: Case, gemm: Gemm) -> Run:
        m, n, k = case.sizes
        if case.op == "wgrad":
            # As a layer has them, from one read for both its products: codes by column lie along
            # the contraction, also those of one scale for the tensor.
            first = cast_both(self._random(m, n), gemm.left, gemm.left)[1]
            second = cast_both(self._random(m, k), gemm.right, gemm.right)[1]
            a, b = first.mT, second.mT
        else:
            (a,) = cast_both(self._random(m, k), gemm.left, None)
            (b,) = cast_both(self._random(n, k), gemm.right, None)
        backend = choose_gemm(gemm.left, gemm.right, self.hardware).product
        return lambda: ops.matmul(a, b, backend=backend)


def cast_both(x: torch.Tensor, row: Cast | None, column: Cast | None) -> list[QuantizedTensor]:
    """The casts of x [R, C] that a layer runs, in one read where the kernels can."""
    if row is not None and column is not None and _by_triton(row) and _by_triton(column):
        return list(triton_kernels.quantize_both(x, row, column))
    wanted = [(row, -1), (column, -2)]
    return [ops.quantize(x, cast, axis=axis) for cast, axis in wanted if cast is not None]


def _by_triton(cast: Cast) -> bool:
    return choose_gemm(cast, cast, current()).left == "triton"


def _casts(what: str) -> tuple[Cast | None, Cast | None]:
    row, column = (None if text == "-" else Cast.parse(text) for text in what.split(" | "))
    return row, column


def _round_trip(x: torch.Tensor, axis: int) -> Run:
    cast = Cast.parse("mxfp8")
    if _by_triton(cast):
        return lambda: triton_kernels.round_trip(x, cast, axis=axis)
    return lambda: ops.dequantize(ops.quantize(x, cast, axis=axis), torch.bfloat16)


def _norm(x: torch.Tensor, case: Case) -> Run:
    weight, shape = torch.ones(x.shape[1], dtype=x.dtype, device=x.device), (x.shape[1],)
    if case.what == "bf16":
        return lambda: functional.rms_norm(x, shape, weight, 1e-6)
    if case.what == "torch":
        source, scale = x.detach().requires_grad_(), weight.requires_grad_()
        y = functional.rms_norm(source, shape, scale, 1e-6)
        return lambda: torch.autograd.grad(y, (source, scale), x, retain_graph=True)
    done = triton_kernels.normalize(x, None, weight=weight)
    if case.what == "kernel":
        return lambda: triton_kernels.normalize_backward(x, done, weight=weight)
    row, column = _casts(case.what)
    if row is None:
        return lambda: triton_kernels.normalize_again(done, column, axis=-2, weight=weight)
    if column is None:
        return lambda: triton_kernels.normalize(x, row, weight=weight)
    return lambda: triton_kernels.normalize_both(x, (row, column), weight=weight)


def timed(runs: Sequence[Run]) -> list[float]:
    """Median microseconds of each run, interleaved, the host never waited for."""
    repeats, host = [], 0.0
    for run in runs:
        run()  # compiles, chooses algorithms
        run()
        torch.cuda.synchronize()
        torch.cuda._sleep(int(_SHORT * _CYCLES))
        before = time.perf_counter()
        start, end = _marked(run, 1)
        seconds = time.perf_counter() - before
        torch.cuda.synchronize()
        count = math.ceil(_LEAST_US / max(1e3 * start.elapsed_time(end), 1.0))
        repeats.append(max(min(count, _MOST_REPEATS), 1))
        host += seconds * repeats[-1]
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(REPETITIONS):
        # The queue fills while the device waits.
        torch.cuda._sleep(int(min(1.3 * host, _LONG) * _CYCLES))
        marks = [_marked(run, count) for run, count in zip(runs, repeats, strict=True)]
        torch.cuda.synchronize()
        for one, (start, end), count in zip(found, marks, repeats, strict=True):
            one.append(1e3 * start.elapsed_time(end) / count)
    return [statistics.median(one) for one in found]


def _marked(run: Run, count: int) -> tuple[Any, Any]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    return start, end
