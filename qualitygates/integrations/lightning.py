"""A gate around a LightningModule: Lightning's own Trainer.fit trains each arm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn

from ..errors import DataError
from ..own_loop import LoopReport
from .scored import ScoredModel, library_facts

# What the gate decides: everything else about the Trainer is yours.
_OURS = ("max_steps", "max_epochs", "accelerator", "devices", "num_nodes", "strategy")


@dataclass(frozen=True, kw_only=True)
class LightningWorkload(ScoredModel):
    """A LightningModule that `build` makes, trained by `Trainer.fit` with its own training_step.

    data: `data(seed=, batch_size=)` gives the training DataLoader, shuffled by `seed` alone.
    trainer: further arguments of the Trainer, such as precision or accumulate_grad_batches. Each
    module must train by automatic optimization with one optimizer. Raises GateError without
    lightning or pytorch_lightning.
    """

    data: Callable[..., Any]
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Either of the two names under which it is published.
        alone = find_spec("lightning") is None and find_spec("pytorch_lightning") is not None
        name = "pytorch-lightning" if alone else "lightning"
        found = library_facts("lightning", name)
        object.__setattr__(self, "facts", {**found, **self.facts})

    def train(
        self, model: nn.Module, *, seed: int, steps: int, batch_size: int, report: LoopReport
    ) -> None:
        """Fit for `steps` optimizer steps."""
        lightning = _lightning(model)
        parts = int(self.trainer.get("accumulate_grad_batches", 1))
        if batch_size % parts:
            raise DataError(
                f"batch_size = {batch_size} is not a multiple of accumulate_grad_batches = {parts}"
            )
        with _quiet(lightning.__name__):
            trainer = lightning.Trainer(**self._arguments(model, lightning, report, steps=steps))
            trainer.fit(model, self.data(seed=seed, batch_size=batch_size // parts))

    def _arguments(
        self, model: nn.Module, lightning: Any, report: LoopReport, *, steps: int
    ) -> dict[str, Any]:
        taken = [name for name in _OURS if name in self.trainer]
        if taken:
            raise DataError(
                f"LightningWorkload(trainer=...): {', '.join(taken)} is not yours to set; steps "
                "come from the experiment, and a gate trains each run on one device"
            )
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        callbacks = [*self.trainer.get("callbacks", []), _telling(lightning, report)]
        return {
            **dict.fromkeys(quiet, False),
            "limit_val_batches": 0,
            **self.trainer,
            "callbacks": callbacks,
            "max_steps": steps,
            "max_epochs": -1,
            "accelerator": "gpu" if next(model.parameters()).is_cuda else "cpu",
            "devices": 1,
        }


@contextmanager
def _quiet(package: str) -> Iterator[None]:
    """Keep what the Trainer says about itself, once a run, out of the gate's own output."""
    logger = logging.getLogger(f"{package}.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _lightning(model: nn.Module) -> Any:
    """The package that the module is from: `lightning` and `pytorch_lightning` do not mix."""
    sources = {one.__module__.partition(".")[0] for one in type(model).__mro__}
    name = "pytorch_lightning" if "pytorch_lightning" in sources else "lightning.pytorch"
    return import_module(name)


def _telling(lightning: Any, report: LoopReport) -> Any:
    """The callback that tells the gate about batches, gradients and losses."""

    class Telling(lightning.Callback):  # type: ignore[misc]
        loss, gradients = 0.0, False

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            report.batch(batch)

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            # Here the gradients of all micro-batches are summed and not yet clipped.
            report.gradients()
            self.gradients = True

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
        ) -> None:
            # Lightning has divided the loss by the number of micro-batches already.
            self.loss += float(outputs["loss"]) if outputs else 0.0
            if self.gradients:
                report.step(self.loss)
                self.loss, self.gradients = 0.0, False

    return Telling()
