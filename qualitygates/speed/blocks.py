"""Interleaved blocks of two arms: BC CB BC CB ..., so that drift of the machine hits both alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import torch

from .machine import Sample, Sampler
from .record import ARMS, CONDITIONS, STEPS_PER_BLOCK, block_order

Step = Callable[[], None]
Block = Callable[[Step], float]


class Marks(Protocol):
    """Points in time on a device."""

    def mark(self) -> None:
        """Now."""
        ...

    def between_ms(self) -> list[float]:
        """Milliseconds from each mark to the next."""
        ...


class CpuMarks:
    """Marks of the performance counter."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def mark(self) -> None:
        """See Marks."""
        self.at.append(time.perf_counter())

    def between_ms(self) -> list[float]:
        """See Marks."""
        return [(b - a) * 1e3 for a, b in pairwise(self.at)]


class CudaMarks:
    """CUDA events on the current stream; the device is idle at the start and at the end."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self.events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """See Marks."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)

    def between_ms(self) -> list[float]:
        """See Marks."""
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(self.events)]


def new_marks(device: torch.device) -> Callable[[], Marks]:
    """CUDA events on a GPU, the performance counter elsewhere."""
    return CudaMarks if device.type == "cuda" else CpuMarks


def block_timer(device: torch.device) -> Block:
    """What times a block of STEPS_PER_BLOCK steps: the median milliseconds of one."""
    marks_of = new_marks(device)

    def block_ms(step: Step) -> float:
        marks = marks_of()
        marks.mark()
        for _ in range(STEPS_PER_BLOCK):
            step()
            marks.mark()
        return median(marks.between_ms())

    return block_ms


def interleave(
    baseline: Callable[[], float],
    candidate: Callable[[], float],
    *,
    pairs: int,
    sampler: Sampler | None,
) -> dict[str, Any]:
    """Block times of both arms, in the order of the protocol, with the clocks after every block.

    Each arm runs a block when called and returns the milliseconds of a step; both must be warm.
    Returns order, steps_per_block, baseline_ms, candidate_ms (one value a pair) and conditions,
    None when they could not be read after every block.
    """
    blocks = {"B": baseline, "C": candidate}
    times: dict[str, list[float]] = {"B": [], "C": []}
    samples: dict[str, list[Sample | None]] = {"B": [], "C": []}
    order = block_order(pairs)
    for pair in order:
        for arm in pair:
            times[arm].append(blocks[arm]())
            samples[arm].append(sampler.sample() if sampler else None)
    return {
        "order": order,
        "steps_per_block": STEPS_PER_BLOCK,
        "baseline_ms": times["B"],
        "candidate_ms": times["C"],
        "conditions": _conditions([samples["B"], samples["C"]]),
    }


def _conditions(by_arm: list[list[Sample | None]]) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for arm, samples in zip(ARMS, by_arm, strict=True):
        known = [one for one in samples if one is not None]
        if len(known) < len(samples):
            return None
        found[arm] = {key: [one[key] for one in known] for key in CONDITIONS}
    return found
