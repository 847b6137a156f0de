"""A gate around a transformers model: Hugging Face's own Trainer.train trains each arm."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import nn

from ..errors import DataError
from ..own_loop import LoopReport
from .scored import ScoredModel, library_facts

# What the gate decides: everything else among the TrainingArguments is yours.
_OURS = ("output_dir", "max_steps", "num_train_epochs", "seed", "data_seed", "use_cpu")
_BATCH = "per_device_train_batch_size"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceWorkload(ScoredModel):
    """A model that `build` makes (from a config: nothing is downloaded), and Trainer.train trains.

    dataset: the training set, rows of which are dicts that the model takes. arguments: further
    TrainingArguments, such as learning_rate or gradient_accumulation_steps. trainer: a subclass of
    transformers.Trainer that is yours, or None for theirs. options: further arguments of the
    Trainer, such as data_collator. Raises GateError without transformers and accelerate.
    """

    dataset: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trainer: Callable[..., Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = library_facts("huggingface", "transformers", "accelerate")
        object.__setattr__(self, "facts", {**found, **self.facts})

    def train(
        self, model: nn.Module, *, seed: int, steps: int, batch_size: int, report: LoopReport
    ) -> None:
        """Train for `steps` optimizer steps."""
        transformers = import_module("transformers")
        taken = [name for name in (*_OURS, _BATCH) if name in self.arguments]
        if taken:
            raise DataError(
                f"HuggingFaceWorkload(arguments=...): {', '.join(taken)} is not yours to set; "
                "steps, batch size and seeds come from the experiment"
            )
        parts = int(self.arguments.get("gradient_accumulation_steps", 1))
        if batch_size % parts:
            raise DataError(
                f"batch_size = {batch_size} is not a multiple of "
                f"gradient_accumulation_steps = {parts}"
            )
        with tempfile.TemporaryDirectory() as folder:
            quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": []}
            chosen = {**quiet, "disable_tqdm": True, **self.arguments, _BATCH: batch_size // parts}
            arguments = transformers.TrainingArguments(
                **chosen,
                output_dir=folder,
                max_steps=steps,
                seed=seed,
                data_seed=seed,
                use_cpu=not next(model.parameters()).is_cuda,
            )
            make = self.trainer or transformers.Trainer
            trainer = make(model=model, args=arguments, train_dataset=self.dataset, **self.options)
            if "disable_tqdm" not in self.arguments:
                # Without a progress bar it would print every log line into the gate's own output.
                trainer.remove_callback(transformers.PrinterCallback)
            _listen(trainer, transformers, report)
            trainer.train()


def _listen(trainer: Any, transformers: Any, report: LoopReport) -> None:
    """Tell the gate each micro-batch and, at the end of each step, its loss.

    training_step is wrapped on this trainer alone: a callback sees neither the batch nor the
    gradients before they are clipped.
    """
    theirs, losses = trainer.training_step, list[float]()

    def training_step(model: nn.Module, inputs: Any, *rest: Any, **named: Any) -> Any:
        report.batch(inputs)
        loss = theirs(model, inputs, *rest, **named)
        report.gradients()
        # What was differentiated: Trainer, or the model, has divided it among the micro-batches.
        losses.append(float(loss))
        return loss

    class Telling(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            report.step(sum(losses))
            losses.clear()

    trainer.training_step = training_step
    trainer.add_callback(Telling())
