"""python -m lowprec calibrate: the kernels that predictions need, timed by shape on this GPU."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from lowprec.calibration import MEASURED, Calibration
from lowprec.errors import UnsupportedError
from lowprec.grids import SKIPPED, Table
from lowprec.hardware import Hardware
from lowprec.policy import ALL_BF16
from lowprec.predicting import GEMM, Work, kernels
from lowprec.recipe import load_recipe, shipped_recipes
from lowprec.stages import Stage
from lowprec.version import __version__

_ALWAYS: Final = (("round trip", "row"), ("round trip", "column"))


class Case(NamedTuple):
    """One kernel at one size, to be timed."""

    op: str
    what: str
    sizes: tuple[int, ...]


class Bench(Protocol):
    """What times cases on a GPU."""

    def time(self, cases: Sequence[Case]) -> list[float]:
        """Median microseconds of each, interleaved; raises MemoryError when they do not fit."""

    def constants(self) -> tuple[float, float]:
        """Microseconds of the least kernel in a full queue, and TB/s of a copy."""


class Machine(NamedTuple):
    """The GPU and the versions that times depend on."""

    hardware: Hardware
    device: str
    torch: str
    triton: str
    cuda: str


@dataclass(frozen=True)
class Grid:
    """Sizes to measure: rows and features of products, rows and columns of casts and norms."""

    rows: tuple[int, ...] = tuple(4096 << n for n in range(6))
    features: tuple[int, ...] = (256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
    cast_rows: tuple[int, ...] = tuple(256 << n for n in range(10))

    def axes(self, part: str) -> tuple[tuple[int, ...], ...]:
        """The axes of a table."""
        if part == GEMM:
            return (self.rows, self.features, self.features)
        return (self.cast_rows, self.features)


def needed(hardware: Hardware) -> dict[tuple[str, str], str]:
    """(op, what) of every kernel to time and its part: BF16, and the native products of recipes.

    Random and rotated casts are left out: layers with them are not predicted.
    """
    found: dict[tuple[str, str], str] = dict.fromkeys(_ALWAYS, "")
    rules = [rule for name in shipped_recipes() for rule in load_recipe(name).rules]
    policies = {rule.linear for rule in rules if rule.kind == "linear"}
    for policy in (ALL_BF16, *sorted(policies, key=str)):
        stage = Stage.of(policy, hardware)
        for norm in (False, True):
            for kernel in kernels(stage, Work((1, 1), 1, norm=norm)):
                if ":sr" not in kernel.what and " + " not in kernel.what:
                    found[kernel.op, kernel.what] = kernel.part
    return found


def calibrate(
    bench: Bench, machine: Machine, *, grid: Grid, say: Callable[[str], None]
) -> Calibration:
    """Time every kernel over the grid; a shape that does not fit in memory is skipped and noted.

    say: takes a line of progress. Raises UnsupportedError when a kernel fails for another reason.
    """
    tables = needed(machine.hardware)
    gemms = [key for key, part in tables.items() if part == GEMM]
    others = [key for key in tables if key not in gemms]
    launch_us, copy_tbytes = bench.constants()
    say(f"{machine.device}: copy {copy_tbytes:.2f} TB/s, launch {launch_us:.1f} us")
    times: dict[Case, float] = {}
    for keys, name, part in ((gemms, "products", GEMM), (others, "casts and norms", "")):
        sizes = list(itertools.product(*grid.axes(part)))
        for number, size in enumerate(sizes, start=1):
            cases = [Case(*key, size) for key in keys]
            times.update(zip(cases, _timed(bench, cases), strict=True))
            if number % -(-len(sizes) // 10) == 0 or number == len(sizes):
                say(f"{name}: {number} of {len(sizes)} shapes, {len(keys)} kernels each")
    found = tuple(_tables(tables, times, grid))
    skipped = tuple(_notes(times))
    for note in skipped:
        say(note)
    return Calibration(
        kind=MEASURED,
        gpu=machine.hardware.name,
        device=machine.device,
        capability=machine.hardware.capability or (0, 0),
        torch=machine.torch,
        triton=machine.triton,
        cuda=machine.cuda,
        lowprec=__version__,
        date=datetime.now(UTC).date().isoformat(),
        source="python -m lowprec calibrate",
        launch_us=launch_us,
        copy_tbytes=copy_tbytes,
        notes=skipped,
        tables=found,
    )


def _timed(bench: Bench, cases: Sequence[Case]) -> list[float]:
    """Times of cases together; one by one where they do not fit in memory together."""
    try:
        return [round(us, 3) for us in bench.time(cases)]
    except MemoryError:
        if len(cases) == 1:
            return [SKIPPED]
    return [us for case in cases for us in _timed(bench, [case])]


def _tables(
    keys: dict[tuple[str, str], str], times: dict[Case, float], grid: Grid
) -> Iterator[Table]:
    for (op, what), part in keys.items():
        axes = grid.axes(part)
        us = tuple(times[Case(op, what, size)] for size in itertools.product(*axes))
        if not any(us):
            raise UnsupportedError(
                f"calibration: {op} of {what} fits in the GPU's memory at no size; free memory "
                "(another process may hold it) and run it again; nothing was written"
            )
        yield Table(op, what, axes, us)


def _notes(times: dict[Case, float]) -> Iterator[str]:
    skipped: dict[tuple[int, ...], int] = {}
    for case, us in times.items():
        if us == SKIPPED:
            skipped[case.sizes] = skipped.get(case.sizes, 0) + 1
    for sizes, count in skipped.items():
        yield f"skipped {'x'.join(map(str, sizes))}: out of memory ({count} kernels)"


def measure(out: Path, *, say: Callable[[str], None]) -> Calibration:
    """Calibrate this machine's GPU and write the file, whole or not at all.

    Raises UnsupportedError without a GPU, and for a file that cannot be written before measuring.
    """
    from lowprec.timing import CudaBench, machine

    here = machine()
    _check_writable(out)
    try:
        found = calibrate(CudaBench(here.hardware), here, grid=Grid(), say=say)
    except KeyboardInterrupt as error:
        raise UnsupportedError("calibration was interrupted; nothing was written") from error
    except (RuntimeError, MemoryError) as error:  # the GPU itself, before any shape
        raise UnsupportedError(f"calibration failed: {error}; nothing was written") from error
    write(out, found)
    return found


def write(out: Path, calibration: Calibration) -> None:
    """Write a calibration whole or not at all; raises UnsupportedError when it cannot be."""
    try:
        descriptor, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(calibration.to_toml())
            os.chmod(name, 0o644)
            os.replace(name, out)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise UnsupportedError(f"{out} cannot be written: {error.strerror}") from error


def _check_writable(out: Path) -> None:
    if out.suffix != ".toml":
        raise UnsupportedError(f"{out}: a calibration is a TOML file; name it with .toml")
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise UnsupportedError(f"{out} cannot be written: choose a file in a folder that can be")
