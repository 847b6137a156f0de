"""Training that the user's own loop drives, and what it must tell the gate while it runs."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

import lowprec

from .errors import DataError
from .evaluating import hash_tensors

_WHY = "the gate pairs runs by what they trained on"


class LoopReport:
    """What a training loop tells the gate: each batch before its forward pass, each step's loss.

    `batch` fixes the step that random bits and schedules follow and hashes what is trained on;
    `step` records loss and gradient norm. A loop that leaves one out is refused, not judged.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: int,
        order: Callable[[str], None],
        record: Callable[[float, float], None],
    ) -> None:
        self._model, self._steps = model, steps
        self._order, self._record = order, record
        self._done = self._batches = 0
        self._norm: float | None = None

    def batch(self, data: Any) -> None:
        """Say what the next forward pass trains on; call it again for each micro-batch of a step.

        data: tensors, arrays, numbers, text, and containers or dataclasses of them. Raises
        DataError for anything else, and for a batch after the last step.
        """
        if self._done == self._steps:
            raise DataError(
                f"the training loop goes on after step {self._steps}, the last one; it must take "
                "exactly the `steps` it is given"
            )
        self._order(batch_hash(data))
        lowprec.set_step(self._model, self._done, micro_batch=self._batches)
        self._batches += 1

    def gradients(self) -> None:
        """Note the gradient norm of this step; `step` does it where the gradients still exist.

        Call it after the last backward pass of the step, before clipping.
        """
        grads = [one.grad for one in self._model.parameters() if one.grad is not None]
        if not grads:
            raise DataError(
                f"training step {self._done}: the model has no gradient; call report.step after "
                "loss.backward() and before optimizer.zero_grad(), and train the model that the "
                "gate handed over, not a copy"
            )
        self._norm = float(torch.nn.utils.get_total_norm(grads))

    def step(self, loss: torch.Tensor | float) -> None:
        """End a step with its loss, a number; raises DataError when no batch was told."""
        if self._batches == 0:
            raise DataError(
                f"training step {self._done}: no batch was told before its loss; call "
                f"report.batch(...) before each forward pass ({_WHY})"
            )
        if self._norm is None:
            self.gradients()
        assert self._norm is not None
        value = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._record(float(value), self._norm)
        self._done, self._batches, self._norm = self._done + 1, 0, None

    def check_complete(self) -> None:
        """Raise DataError unless exactly the steps asked for were told."""
        if self._done != self._steps or self._batches:
            raise DataError(
                f"the training loop told {self._done} finished steps, the experiment asks for "
                f"{self._steps}; call report.step(loss) once a step"
            )


def drive(
    train: Callable[..., Any], model: nn.Module, report: LoopReport, *, seed: int, batch_size: int
) -> None:
    """Let the user's loop train `model`, with every common random stream seeded, and check it.

    seed: 31 bits, which every library takes. Raises DataError for a loop that leaves steps out.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model.train()
    train(model, seed=seed, steps=report._steps, batch_size=batch_size, report=report)
    report.check_complete()


def batch_hash(data: Any) -> str:
    """SHA-256 of everything in a batch, in order; DataError for what has no bytes to hash."""
    digest = hashlib.sha256()
    _feed(digest, data)
    return digest.hexdigest()


def _feed(digest: Any, data: Any) -> None:
    if isinstance(data, torch.Tensor):
        digest.update(f"{data.dtype}{list(data.shape)}{hash_tensors([data])};".encode())
    elif isinstance(data, np.ndarray) and data.dtype != object:
        digest.update(f"{data.dtype}{data.shape};".encode() + np.ascontiguousarray(data).tobytes())
    elif isinstance(data, Mapping):
        _feed(digest, [one for key in data for one in (str(key), data[key])])
    elif isinstance(data, (list, tuple)):
        digest.update(f"({len(data)}".encode())
        for one in data:
            _feed(digest, one)
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        _feed(digest, [getattr(data, one.name) for one in dataclasses.fields(data)])
    elif data is None or isinstance(data, (bool, int, float, str, bytes, np.generic)):
        digest.update(f"{data!r};".encode())
    else:
        raise DataError(
            f"report.batch: cannot hash a {type(data).__qualname__}; {_WHY}: tell it the tensors, "
            "arrays, numbers or text of the batch"
        )
