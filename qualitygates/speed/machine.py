"""The machine that timings were taken on: clocks, power cap and temperature, and peak rates."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any, Final

from .record import CONDITIONS

Sample = dict[str, float]
Runner = Callable[[list[str]], str]

# Dense TFLOP/s (no sparsity) by the driver's full name: parts of one family differ. Data sheets.
_PEAKS: Final[dict[str, dict[int, float]]] = {
    "NVIDIA A100-SXM4-40GB": {16: 312.0},
    "NVIDIA A100-SXM4-80GB": {16: 312.0},
    "NVIDIA H100 80GB HBM3": {16: 989.4, 8: 1978.9},
    "NVIDIA H200": {16: 989.4, 8: 1978.9},
    "NVIDIA B200": {16: 2250.0, 8: 4500.0, 4: 9000.0},
}
_QUERY: Final = "clocks.sm,clocks.mem,power.limit,temperature.gpu"


def peaks(device_name: str, *, bits: int) -> dict[str, Any] | None:
    """Dense peak TFLOP/s in bf16 and at the format's code width, or None for an unknown device.

    Codes of 6 bits run at the rate of 8, and those of 4 where there are no units for them.
    """
    table = _PEAKS.get(device_name)
    if table is None:
        return None
    widths = [width for width in table if bits <= width < 16]
    found = table[min(widths)] if widths else None
    return {"bf16_tflops": table[16], "format_tflops": found, "source": "data sheet, dense"}


class Sampler:
    """Reads what nvidia-smi says about one GPU; gives None where it cannot be asked."""

    def __init__(self, gpu: str, *, run: Runner | None = None) -> None:
        """gpu: a UUID (GPU-...) or an index as nvidia-smi counts."""
        self.command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={_QUERY}"]
        self.command.append("--format=csv,noheader,nounits")
        self.run = run or _run

    def sample(self) -> Sample | None:
        """SM and memory clock in MHz, power cap in W, temperature in °C."""
        try:
            text = self.run(self.command)
        except (OSError, subprocess.SubprocessError):
            return None
        return parse(text)


def parse(text: str) -> Sample | None:
    """One line of nvidia-smi as numbers, or None when a value is not available."""
    parts = [part.strip() for part in text.strip().split(",")]
    try:
        values = [float(part) for part in parts]
    except ValueError:
        return None
    if len(values) != len(CONDITIONS) or not all(0 < value < 1e9 for value in values):
        return None
    return dict(zip(CONDITIONS, values, strict=True))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout
