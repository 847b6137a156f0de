"""Time of a layer's forward and backward from a calibration: its products and the casts it runs.

Dimensions: M rows (tokens), K in_features, N out_features. A layer runs three products and, for
each operand that two of them take in low precision, one cast that reads it once for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from lowprec.backends import triton_kernels
from lowprec.calibration import Calibration, Rates
from lowprec.formats import Cast
from lowprec.grids import Estimate
from lowprec.policy import ALL_BF16, BF16, PRODUCTS, SKIP, Gemm, LinearPolicy, parse_product
from lowprec.stages import Stage, same_weight_values

GEMM, CAST, NORM = "gemm", "cast", "norm"
# By operand, the products that read it by row and by column, and its side in each.
_USES: Final = {
    "x": (("fprop", 0), ("wgrad", 1)),
    "w": (("fprop", 1), ("dgrad", 1)),
    "dy": (("dgrad", 0), ("wgrad", 0)),
}
_SCALES: Final = 1.03  # bytes of codes and scales over bytes of codes


class Kernel(NamedTuple):
    """One kernel of a layer: what a calibration calls it, its sizes, and what it counts as."""

    op: str
    what: str
    sizes: tuple[int, ...]
    part: str
    share: float = 1.0


class Work(NamedTuple):
    """What is predicted: shape (N, K), rows M of one forward call, and how it is run.

    norm: a norm in front that is one step with the layer. micro_batches: forward calls between two
    optimizer steps; the weight is cast once for all of them.
    """

    shape: tuple[int, int]
    rows: int
    norm: bool = False
    micro_batches: int = 1


@dataclass(frozen=True)
class Prediction:
    """Predicted forward and backward of a layer: microseconds, and bytes kept until backward.

    casts_us: conversions, those that a fused norm hides not counted. saved_us: GEMM time saved.
    native: every quantized product runs on low-precision units. extrapolated: some size lies
    outside of what was measured.
    """

    rows: int
    norm: bool
    bf16_us: float
    us: float
    casts_us: float
    saved_us: float
    bf16_bytes: int
    bytes: int
    native: bool
    extrapolated: bool

    @property
    def speedup(self) -> float:
        """BF16's time over this one."""
        return self.bf16_us / self.us

    @property
    def keeps_bf16(self) -> bool:
        """Whether the layer would not gain; emulated products never gain and are not judged."""
        return self.native and self.us >= self.bf16_us

    @property
    def tax(self) -> float | None:
        """Conversion time over GEMM time saved, or None when no GEMM time is saved."""
        return self.casts_us / self.saved_us if self.saved_us > 0 else None


def predict(stage: Stage, work: Work, calibration: Calibration) -> Prediction | str:
    """Time of a layer under the policy of `stage`, and under BF16; or why it is not known."""
    reference = Stage(0, ALL_BF16, {})
    totals: list[dict[str, float]] = []
    extrapolated = False
    for one in (reference, stage):
        parts = dict.fromkeys((GEMM, CAST, NORM), 0.0)
        for kernel in kernels(one, work):
            found = estimate(calibration, kernel)
            if found is None:
                return f"{kernel.op} of {kernel.what} was not calibrated on {calibration.gpu}"
            parts[kernel.part] += kernel.share * found.us
            extrapolated = extrapolated or found.extrapolated
        totals.append(parts)
    bf16, low = totals
    return Prediction(
        rows=work.rows,
        norm=work.norm,
        bf16_us=sum(bf16.values()),
        us=sum(low.values()),
        casts_us=low[CAST] + low[NORM] - bf16[NORM],
        saved_us=bf16[GEMM] - low[GEMM],
        bf16_bytes=_kept_bytes(ALL_BF16, work),
        bytes=_kept_bytes(stage.runs, work),
        native=is_native(stage),
        extrapolated=extrapolated,
    )


def is_native(stage: Stage) -> bool:
    """Whether every quantized product of a stage runs on low-precision units."""
    return all(
        stage.backends[name].native for name, p in stage.policy.items() if isinstance(p, Gemm)
    )


def kernels(stage: Stage, work: Work) -> Iterator[Kernel]:
    """Every kernel of forward and backward, the bias and its gradient left out."""
    for name, product in stage.runs.items():
        if product is not SKIP:
            native = isinstance(product, Gemm) and stage.backends[name].native
            what = str(product) if native else str(BF16)
            yield _gemm(name, what, work)
    fused = work.norm and _norm_casts(stage)
    if work.norm:
        yield from _norm(stage, work, fused=bool(fused))
    for operand in _USES:
        if not (operand == "x" and fused):
            yield from _casts(operand, stage, work)


def _gemm(name: str, what: str, work: Work) -> Kernel:
    (n, k), rows = work.shape, work.rows
    sizes = {"fprop": (rows, n, k), "dgrad": (rows, k, n), "wgrad": (rows, n, k)}[name]
    # Low-precision operands have the contraction last in both: one kernel for fprop and dgrad.
    op = "fprop" if name == "dgrad" and what != str(BF16) else name
    return Kernel(op, what, sizes, GEMM)


def _casts(operand: str, stage: Stage, work: Work) -> Iterator[Kernel]:
    (n, k), rows = work.shape, work.rows
    sizes = {"x": (rows, k), "w": (n, k), "dy": (rows, n)}[operand]
    share = 1 / work.micro_batches if operand == "w" else 1.0
    if operand == "w" and same_weight_values(stage):
        yield Kernel("round trip", "row", sizes, CAST, share)
        return
    texts = []
    for place, (name, side) in zip(("row", "column"), _USES[operand], strict=True):
        product = getattr(stage.runs, name)
        text = "-"
        if isinstance(product, Gemm) and not stage.backends[name].native:
            yield Kernel("round trip", place, sizes, CAST, share)
        elif isinstance(product, Gemm):
            text = str((product.left, product.right)[side])
            text += "" if product.rotation is None else f" + {product.rotation}"
        texts.append(text)
    if texts != ["-", "-"]:
        yield Kernel("cast", " | ".join(texts), sizes, CAST, share)


def _norm(stage: Stage, work: Work, *, fused: bool) -> Iterator[Kernel]:
    sizes = (work.rows, work.shape[1])
    if fused:
        row, column = _norm_casts(stage)
        yield Kernel("norm", f"{row} | -", sizes, NORM)
        yield Kernel("norm again", f"- | {column}", sizes, NORM)
        yield Kernel("norm backward", "kernel", sizes, NORM)
        return
    if _whole_norm(stage):
        # Its pass for the largest magnitude stands for the one that the cast is priced with.
        yield Kernel("norm backward", "kernel", sizes, NORM)
        return
    yield Kernel("norm", "bf16", sizes, NORM)
    if stage.policy.quantizes:  # what a converted NormLinear does not keep, it makes again
        yield Kernel("norm", "bf16", sizes, NORM)
    yield Kernel("norm backward", "torch", sizes, NORM)


def _norm_casts(stage: Stage) -> tuple[Cast, ...]:
    """The casts of x for fprop and wgrad where the norm's kernels make both, else nothing."""
    found = _kernel_casts(stage)
    fits = [triton_kernels.fits_norm(one, again=at > 0) for at, one in enumerate(found)]
    return found if all(fits) else ()


def _whole_norm(stage: Stage) -> bool:
    """Whether the norm is made inside a cast with one scale for the tensor, and never written."""
    found = _kernel_casts(stage)
    return len(set(found)) == 1 and triton_kernels.fits_norm_whole(found[0])


def _kernel_casts(stage: Stage) -> tuple[Cast, ...]:
    """The casts of x for fprop and wgrad where our kernels make both for native products."""
    found = []
    for name, side in _USES["x"]:
        gemm = getattr(stage.runs, name)
        if not isinstance(gemm, Gemm) or gemm.rotation is not None:
            return ()
        backends = stage.backends[name]
        by_triton = (backends.left, backends.right)[side] == "triton"
        if not (backends.native and by_triton):
            return ()
        found.append((gemm.left, gemm.right)[side])
    return tuple(found)


def _kept_bytes(policy: LinearPolicy, work: Work) -> int:
    """Bytes that forward leaves for backward: x for wgrad, and a cast weight, as codes for fprop
    and dgrad or, of square blocks in emulated products, as bf16 values for both: as many bytes.
    """
    (n, k), total = work.shape, 0.0
    wgrad: Any = policy.wgrad
    converted = policy.quantizes
    if work.norm:
        # BF16 keeps the input of the norm and of the layer; a converted one only the former.
        total += work.rows * k * (2 if converted else 4)
    elif wgrad is not SKIP:
        bits = wgrad.right.format.bits_per_value if isinstance(wgrad, Gemm) else 16
        total += work.rows * k * bits / 8
    for name in PRODUCTS[:2]:
        product: Any = getattr(policy, name)
        if isinstance(product, Gemm):
            total += n * k * product.right.format.bits_per_value / 8
    return round(total)


def estimate(calibration: Calibration, kernel: Kernel) -> Estimate | None:
    """Time of one kernel, from its table or from published rates; None when neither has it."""
    if calibration.rates is not None:
        us = _by_rates(calibration, calibration.rates, kernel)
        return None if us is None else Estimate(us, extrapolated=False)
    table = calibration.table(kernel.op, kernel.what)
    return None if table is None else table.at(kernel.sizes)


def _by_rates(calibration: Calibration, rates: Rates, kernel: Kernel) -> float | None:
    """The larger of arithmetic and bytes at copy bandwidth, and a launch."""
    copy = 1e6 * calibration.copy_tbytes  # bytes a microsecond
    if kernel.part == GEMM:
        m, n, k = kernel.sizes
        product = parse_product(kernel.what)
        bits = 16 if not isinstance(product, Gemm) else _bits(product.left, product.right)
        rate = {16: rates.bf16_tflops, 4: rates.fp4_tflops}.get(bits, rates.fp8_tflops)
        if not rate:
            return None
        # In wgrad the rows are contracted, in the others they are kept.
        rows, weight, result = m * k, n * k, m * n
        first, second, result = (
            (result, rows, weight) if kernel.op == "wgrad" else (rows, weight, result)
        )
        moved = bits / 8 * (first + second) + 2 * result
        return max(2e-6 * m * n * k / rate, moved / copy) + calibration.launch_us
    elements = kernel.sizes[0] * kernel.sizes[1]
    values = 6.0 if kernel.op == "norm backward" else 4.0
    if kernel.op in ("cast", "norm", "norm again") and kernel.what != "bf16":
        written = [text.partition(" + ")[0] for text in kernel.what.split(" | ") if text != "-"]
        values = 2 + sum(_SCALES * Cast.parse(text).format.element.bits / 8 for text in written)
    return elements * values / (1e6 * rates.cast_tbytes) + calibration.launch_us


def _bits(*casts: Cast) -> int:
    return max(cast.format.element.bits for cast in casts)
