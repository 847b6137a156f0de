"""The two arms of the timed step, by the gate's training loop or by the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Protocol

import torch
from torch import nn

import lowprec

from ..own_loop import LoopReport, drive
from ..running.places import on_device
from ..seeding import stream_seed
from ..workload import Batch, Workload
from .blocks import Block, Marks
from .record import STEPS_PER_BLOCK


class Arm(Protocol):
    """A model that trains by blocks of steps."""

    model: nn.Module

    def one_step(self) -> None:
        """Forward and backward at least, of one step, with nothing timed."""
        ...

    def block_ms(self) -> float:
        """Train on for a block of steps; the median milliseconds of one."""
        ...


class BuiltIn:
    """The loop of the gate: set_step, forward in bfloat16 autocast, loss, backward, optimizer.

    The batches are on the device already and taken in turn; loading data is in no arm's time.
    """

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        batches: Sequence[Batch],
        *,
        last_step: int | None,
        steps: int,
        block_ms: Block,
    ) -> None:
        self.model, self.batches, self.last_step = model, batches, last_step
        self.optimizer, self.scheduler = workload.optimizer(model, steps=steps)
        self.timed, self.steps = block_ms, 0

    def block_ms(self) -> float:
        """See Arm."""
        return self.timed(self._step)

    def one_step(self) -> None:
        """See Arm."""
        batch = self.batches[self.steps % len(self.batches)]
        with torch.autocast(batch.labels.device.type, dtype=torch.bfloat16):
            logits = self.model(batch.features)
        weights = batch.weights if batch.weights.shape == batch.labels.shape else None
        if weights is None:
            weights = batch.weights.unsqueeze(-1).expand_as(batch.labels)
        # Without the checks of training: they would make the host wait for the device.
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits.float(), batch.labels, weight=weights
        )
        loss.backward()

    def _step(self) -> None:
        if self.last_step is not None:
            lowprec.set_step(self.model, min(self.steps, self.last_step))
        self.optimizer.zero_grad(set_to_none=True)
        self.one_step()
        self.optimizer.step()
        self.scheduler.step()
        self.steps += 1


class OwnLoop:
    """The user's own loop, as it is: its precision, optimizer and data loading are in the time.

    A block is one call for STEPS_PER_BLOCK + 1 steps; the first, which carries the loop's start, is
    not counted.
    """

    def __init__(
        self,
        model: nn.Module,
        workload: Any,
        *,
        last_step: int | None,
        seed: int,
        batch_size: int,
        marks: Callable[[], Marks],
    ) -> None:
        self.model, self.train, self.last_step = model, workload.train, last_step
        self.seed, self.batch_size, self.marks = seed, batch_size, marks

    def block_ms(self) -> float:
        """See Arm."""
        marks = self.marks()
        self._run(STEPS_PER_BLOCK + 1, marks.mark)
        return median(marks.between_ms())

    def one_step(self) -> None:
        """See Arm."""
        self._run(1, lambda: None)

    def _run(self, steps: int, mark: Callable[[], None]) -> None:
        report = TimedReport(self.model, steps=steps, mark=mark, last_step=self.last_step)
        drive(self.train, self.model, report, seed=self.seed, batch_size=self.batch_size)


class TimedReport(LoopReport):
    """A LoopReport that hashes and measures nothing, so that the loop runs as it would alone."""

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: int,
        mark: Callable[[], None],
        last_step: int | None,
    ) -> None:
        super().__init__(model, steps=steps, order=lambda _: None, record=lambda *_: None)
        self._mark, self._last_step = mark, last_step

    def batch(self, data: Any) -> None:
        """Set the step that random bits and schedules follow."""
        if self._last_step is not None:
            step = min(self._done, self._last_step)
            lowprec.set_step(self._model, step, micro_batch=self._batches)
        self._batches += 1

    def gradients(self) -> None:
        """Nothing: the norm would make the host wait for the device."""

    def step(self, loss: torch.Tensor | float) -> None:
        """Mark the end of a step; its loss is not read."""
        self._mark()
        self._done, self._batches = self._done + 1, 0


def batches_of(
    workload: Workload, *, first_seed: int, batch_size: int, device: torch.device
) -> list[Batch]:
    """A block's worth of training batches, on the device."""
    drawn = workload.training_batches(
        seed=stream_seed(first_seed, "data"), steps=STEPS_PER_BLOCK, batch_size=batch_size
    )
    return [
        replace(
            batch,
            features=on_device(batch.features, device),
            labels=batch.labels.to(device),
            weights=batch.weights.to(device),
        )
        for batch in drawn
    ]
