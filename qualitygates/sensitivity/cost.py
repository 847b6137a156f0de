"""Time of a linear layer's step by policy, from a few rates: which layers can gain at all.

Model of three GEMMs and up to six casts: a GEMM takes the larger of its arithmetic and its bytes, a
cast its bytes at 0.9 of copy bandwidth, each launch 3 us. With the H200 rates below it gives the
table of break-even ratios in the tests to within 1 % (a test holds that). It ranks fusions well and
shapes roughly: measured rates belong in a calibration file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import lowprec

from ..errors import ExperimentError
from ..experiment import nearest
from .options import BF16, PRODUCTS, Option, products_of
from .reader import Reader, read_toml

# Where the casts run: as kernels of their own, one kernel for both directions, x inside the norm
# before it, or all inside the kernels that produce the operands.
CASTS: Final = {
    "separate": "a cast kernel for each use",
    "dual": "one cast kernel for both uses of an operand",
    "norm": "x cast inside its norm, dy and w by dual kernels",
    "fused": "x and dy cast inside the kernels that produce them, w by a dual kernel",
}
_USES: Final = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}
_OPERANDS: Final = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
# Share of copy bandwidth that a cast reaches: plain, rotated, stochastic.
_PLAIN, _ROTATED, _STOCHASTIC = 0.9, 0.88, 0.65
_SCALES: Final = 1.03  # bytes of codes and scales over bytes of codes


@dataclass(frozen=True)
class Rates:
    """flop/s by element width (fp4 0: no such units), bytes/s of a copy, seconds a launch.

    mx: whether 1x32 E8M0 and NVFP4 blocks are native.
    """

    bf16: float
    fp8: float
    fp4: float
    copy: float
    launch: float
    mx: bool


# Published and measured by others: GEMM rates at large shapes; b200 fp4 is the ratio of peaks.
PUBLISHED: Final = {
    "h100": Rates(600e12, 1150e12, 0.0, 3.0e12, 3e-6, mx=False),
    "h200": Rates(770e12, 1230e12, 0.0, 4.3e12, 3e-6, mx=False),
    "b200": Rates(1550e12, 2560e12, 5120e12, 8.0e12, 3e-6, mx=True),
}


@dataclass(frozen=True)
class SpeedFacts:
    """What the speed stage assumes; `hardware` none makes every layer a candidate.

    rows: of a training step on the target. width: how many times wider its layers are than those of
    the model that the sweep trains.
    """

    hardware: str
    rows: int
    casts: str
    width: float
    rates: Rates | None
    source: str

    @classmethod
    def of(
        cls, *, hardware: str, rows: int, casts: str, width: float, calibration: Path | None
    ) -> SpeedFacts:
        """Facts from a calibration file, else from the published rates of named hardware."""
        if calibration is not None:
            rates, hardware, source = _calibrated(calibration)
            return cls(hardware, rows, casts, width, rates, source)
        if hardware == "none":
            return cls(hardware, rows, casts, width, None, "no speed stage: hardware = 'none'")
        if hardware not in PUBLISHED:
            raise ExperimentError(
                f"[speed] hardware = {hardware!r}; {nearest(hardware, (*PUBLISHED, 'none'))}; "
                "other machines need [speed] calibration, a file with measured rates"
            )
        source = f"predicted from published rates of {hardware}, not measured"
        return cls(hardware, rows, casts, width, PUBLISHED[hardware], source)

    def to_dict(self) -> dict[str, str | int | float]:
        """The facts as JSON data."""
        return {
            "hardware": self.hardware,
            "rows": self.rows,
            "casts": self.casts,
            "width": self.width,
            "source": self.source,
        }

    def seconds(self, shape: tuple[int, int], policy: str) -> float:
        """Time of forward and backward of a layer (N, K) in a step, s; 0 without a speed stage."""
        if self.rates is None:
            return 0.0
        n, k = (round(size * self.width) for size in shape)
        return layer_seconds(self.rates, (self.rows, n, k), products_of(policy), casts=self.casts)

    def refusal(self, product: str) -> str | None:
        """Why a product gains nothing on this hardware whatever its size, or None."""
        if self.rates is None or product == BF16 or _native(self.rates, Option.parse(product)):
            return None
        return f"{product} has no native product on {self.hardware}: it would be emulated"


def _calibrated(path: Path) -> tuple[Rates, str, str]:
    try:
        data = read_toml(path)
        if "checksum" in data:  # as python -m lowprec calibrate writes it
            return _measured(path)
        table = Reader(
            data,
            (
                *("schema", "hardware", "source", "bf16_tflops", "fp8_tflops", "fp4_tflops"),
                *("copy_tbytes", "launch_us", "mx"),
            ),
        )
        top = 1e6
        rates = Rates(
            bf16=1e12 * table.number("bf16_tflops", low=0, high=top),
            fp8=1e12 * table.number("fp8_tflops", low=0, high=top),
            fp4=1e12 * table.number("fp4_tflops", 1e-12, low=0, high=top),
            copy=1e12 * table.number("copy_tbytes", low=0, high=top),
            launch=1e-6 * table.number("launch_us", low=0, high=top),
            mx=table.boolean("mx", default=False),
        )
        if "fp4_tflops" not in table.table:
            rates = Rates(rates.bf16, rates.fp8, 0.0, rates.copy, rates.launch, rates.mx)
        return rates, table.text("hardware"), f"rates from {path.name}: {table.text('source')}"
    except ExperimentError as error:
        raise ExperimentError(f"[speed] calibration {path}: {error}") from error


def _measured(path: Path) -> tuple[Rates, str, str]:
    """Rates from a calibration of lowprec's: of each width, the best that it found for fprop."""
    try:
        found = lowprec.load_calibration(path)
    except lowprec.LowprecError as error:
        raise ExperimentError(str(error)) from error
    best = {16: 0.0, 8: 0.0, 4: 0.0}
    if found.rates is not None:
        best = {16: found.rates.bf16_tflops, 8: found.rates.fp8_tflops, 4: found.rates.fp4_tflops}
    for table in found.tables:
        if table.op == "fprop":
            bits = 16 if table.what == BF16 else Option.parse(table.what).bits
            width = 8 if 4 < bits < 16 else bits
            rates = (2e-6 * math.prod(at) / us for at, us in table.points())
            best[width] = max(best[width], *rates)
    if not best[8]:
        raise ExperimentError(f"{found.gpu} has no native low-precision products to calibrate by")
    facts = Rates(
        bf16=1e12 * best[16],
        fp8=1e12 * best[8],
        fp4=1e12 * best[4],
        copy=1e12 * found.copy_tbytes,
        launch=1e-6 * found.launch_us,
        mx=found.capability[0] == 10,
    )
    return facts, found.gpu, f"rates from {path.name}: {found.text}"


def _native(rates: Rates, option: Option) -> bool:
    for fmt in option.formats:
        microscaled = fmt.outer or (fmt.scale == "e8m0" and fmt.block[1] in (16, 32))
        if microscaled and not rates.mx:
            return False
        if fmt.element.bits == 4 and not rates.fp4:
            return False
    return True


def layer_seconds(
    rates: Rates, shape: tuple[int, int, int], products: Mapping[str, str], *, casts: str
) -> float:
    """Time of the three products of a layer (M rows, N, K) with every cast inside, s."""
    m, n, k = shape
    elements = {"x": m * k, "w": n * k, "dy": m * n}
    results = {"fprop": m * n, "dgrad": m * k, "wgrad": n * k}
    options = {
        name: None if products[name] == BF16 else Option.parse(products[name]) for name in PRODUCTS
    }
    total = 0.0
    for name, option in options.items():
        rate, width = rates.bf16, 2.0
        if option is not None and _native(rates, option):
            four = option.bits == 4
            rate, width = (rates.fp4 if four else rates.fp8), option.bits / 8
        left, right = _OPERANDS[name]
        moved = width * (elements[left] + elements[right]) + 2 * results[name]
        total += max(2 * m * n * k / rate, moved / rates.copy) + rates.launch
    return total + sum(
        _cast_seconds(rates, operand, count, options, casts) for operand, count in elements.items()
    )


def _cast_seconds(
    rates: Rates, operand: str, elements: int, options: Mapping[str, Option | None], casts: str
) -> float:
    """Time of the casts of one operand for both of its uses, s."""
    used = [option for name in _USES[operand] if (option := options[name]) is not None]
    inside = {"norm": ("x",), "fused": ("x", "dy")}.get(casts, ())
    if not used or operand in inside:
        return 0.0
    writes = sum(_SCALES * option.bits / 8 for option in used)
    kernels = len(used) if casts == "separate" else 1
    moved = elements * (2 * kernels + writes)
    return moved / (rates.copy * min(map(_efficiency, used))) + kernels * rates.launch


def _efficiency(option: Option) -> float:
    if ":sr" in f"{option.left} {option.right}":
        return _STOCHASTIC
    return _ROTATED if option.rotation else _PLAIN
