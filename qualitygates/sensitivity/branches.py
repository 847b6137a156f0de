"""Branch runs: from one BF16 checkpoint train the same batches on, with some products lowered.

A branch and the BF16 branch beside it share weights, optimizer state, batches, dropout and
evaluation rows, so their difference is the effect of the lowered products alone. Checkpoints are
kept in memory by the process that trained them, never on disk. A whole training is the branch that
starts at step 0: it is built anew each time, and its batches are not kept.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import lowprec

from ..errors import DataError, ExperimentError, GateError
from ..evaluating import mean_task_loss
from ..experiment import Experiment
from ..grouping import BUCKETS
from ..metrics import recalibrated
from ..records import content_hash
from ..running.places import Place, on_device
from ..runs import code_hash
from ..seeding import stream_seed
from ..workload import Batch, EvaluationBatch, Workload
from ..workloads.part import Part, source_hash
from .options import ALL_BF16

Arm = Mapping[str, str]
"""Layer -> policy text; layers that are not named run in BF16."""
_EVALUATION_BATCH = 8192


@dataclass(frozen=True)
class Setting:
    """Everything that the branches of a sweep share; `part` are the options of its workload part.

    start, window: steps before and in a branch.
    """

    experiment: Experiment
    part: Mapping[str, Any]
    rows: int
    start: int
    window: int


@dataclass(frozen=True)
class BranchJob:
    """The arms of one seed that one process trains from one checkpoint."""

    setting: Setting
    seed: int
    arms: tuple[Arm, ...]


def branch_inputs(setting: Setting, seed: int, arm: Arm) -> dict[str, Any]:
    """Everything that determines the result of one branch; its hash is the record's key."""
    experiment = setting.experiment
    return {
        "workload": experiment.workload,
        "workload_source": source_hash(experiment.workload, experiment.folder),
        "options": dict(experiment.options),
        "steps": experiment.steps,
        "batch_size": experiment.batch_size,
        "device": experiment.device,
        "negative_sampling_rate": experiment.negative_sampling_rate,
        "part": {key: setting.part[key] for key in sorted(setting.part)},
        "rows": setting.rows,
        "start": setting.start,
        "window": setting.window,
        "seed": seed,
        "arm": dict(sorted(arm.items())),
        "code": sweep_code_hash(),
        "torch": torch.__version__,
    }


@cache
def sweep_code_hash() -> str:
    """SHA-256 of the sources that a measurement depends on."""
    here = Path(__file__).parent
    digest = hashlib.sha256(code_hash().encode())
    for name in ("branches.py", "screen.py", "probes.py"):
        digest.update((here / name).read_bytes())
    return digest.hexdigest()


def run_branches(job: BranchJob) -> list[dict[str, Any]]:
    """Train the arms of a job and return one result each, in their order.

    An error of the model or of the arithmetic is a result that says so; errors about the input
    (GateError, LowprecError) are raised.
    """
    checkpoint = _checkpoint(job.setting, job.seed)
    return [checkpoint.branch(arm) for arm in job.arms]


_loaded: tuple[str, Part] | None = None
_kept: tuple[str, Checkpoint] | None = None


def sweep_part(setting: Setting) -> Part:
    """The workload, evaluated on the sweep's own part; loaded once a process."""
    global _loaded
    experiment = setting.experiment
    key = content_hash([experiment.hash, str(experiment.folder), dict(setting.part)])
    if _loaded is None or _loaded[0] != key:
        from ..workload import load_workload

        inner = load_workload(experiment.workload, experiment.options, folder=experiment.folder)
        refuse_own_loop(inner, experiment)
        share = (setting.part["first"], setting.part["last"])
        _loaded = (key, Part(inner, share, clusters=setting.part["clusters"]))
    return _loaded[1]


def refuse_own_loop(workload: Workload, experiment: Experiment) -> None:
    """ExperimentError for a workload whose own loop trains: it cannot stop at a checkpoint."""
    if hasattr(workload, "train"):
        raise ExperimentError(
            f"workload {experiment.workload}: its own training loop cannot be continued from a "
            "checkpoint; a sweep needs training_batches and optimizer"
        )


def _checkpoint(setting: Setting, seed: int) -> Checkpoint:
    global _kept
    key = content_hash([branch_inputs(setting, seed, {}), str(setting.experiment.folder)])
    if _kept is None or _kept[0] != key:
        _kept = None
        _kept = (key, Checkpoint(setting, seed, sweep_part(setting)))
    return _kept[1]


class Checkpoint:
    """A model trained in BF16 up to a step, the batches that follow, and the evaluation rows."""

    def __init__(self, setting: Setting, seed: int, workload: Part) -> None:
        self.setting, self.seed = setting, seed
        experiment = setting.experiment
        self.place, self.workload = Place(device=experiment.device), workload
        state, batches = self._begin(), self._drawn()
        torch.manual_seed(stream_seed(seed, "dropout"))
        for step in range(setting.start):
            _step(*state, self._next(batches, step), step)
        self.model, self.optimizer, self.scheduler = state
        end = setting.start + setting.window
        steps = range(setting.start, end if setting.start else 0)
        self.batches = [self._next(batches, step) for step in steps]
        self.evaluation = _evaluation_rows(workload, setting.rows)

    def _begin(self) -> tuple[nn.Module, Any, Any]:
        """Model in BF16, optimizer and scheduler before the first step."""
        experiment = self.setting.experiment
        torch.manual_seed(stream_seed(self.seed, "init"))
        model = self.workload.model()
        self.plan = lowprec.plan(model, lowprec.load_recipe("bf16"), steps=experiment.steps)
        lowprec.apply(model.to(experiment.device), self.plan)
        optimizer, scheduler = self.workload.optimizer(model, steps=experiment.steps)
        return model.train(), optimizer, scheduler

    def _drawn(self) -> Iterator[Batch]:
        experiment = self.setting.experiment
        return self.workload.training_batches(
            seed=stream_seed(self.seed, "data"),
            steps=experiment.steps,
            batch_size=experiment.batch_size,
        )

    def _window(self) -> Iterator[Batch]:
        """The batches of a branch: those kept, or, from step 0 on, drawn anew."""
        if self.setting.start:
            yield from self.batches
        else:
            batches = self._drawn()
            for step in range(self.setting.window):
                yield self._next(batches, step)

    def _next(self, batches: Any, step: int) -> Batch:
        try:
            return self.place.part(next(batches))
        except StopIteration as error:
            raise DataError(
                f"workload {self.setting.experiment.workload}: gave {step} training batches, the "
                f"experiment asks for {self.setting.experiment.steps}"
            ) from error

    def lowered(self, arm: Arm) -> lowprec.Plan:
        """The BF16 plan with the policies of an arm."""
        plan = self.plan
        for layer, policy in sorted(arm.items()):
            if policy != ALL_BF16:
                plan = plan.with_layer(layer, policy, why="tried by a sweep")
        return plan

    def branch(self, arm: Arm) -> dict[str, Any]:
        """Train a copy for the window with an arm's products lowered, and evaluate it as trained.

        Losses are nats; `clusters` has the weighted loss of every cluster of the evaluation rows.
        """
        kept = (self.model, self.optimizer, self.scheduler)
        # A scheduler that has not stepped yet warns about the step of a copied optimizer.
        state = copy.deepcopy(kept) if self.setting.start else self._begin()
        model, optimizer, scheduler = state
        lowprec.apply(model, self.lowered(arm))
        torch.manual_seed(stream_seed(self.seed, "branch"))
        loss: list[float | None] = []
        try:
            for step, batch in enumerate(self._window(), start=self.setting.start):
                value = _step(model, optimizer, scheduler, batch, step)
                loss.append(value if math.isfinite(value) else None)
            found = _evaluated(model, self.evaluation, self.setting.experiment)
        except (GateError, lowprec.LowprecError, OSError, MemoryError):
            raise
        except Exception as error:
            return {"loss": loss, "crashed": f"{type(error).__name__}: {error}"}
        return {"loss": loss, "crashed": None, **found}


def _step(model: nn.Module, optimizer: Any, scheduler: Any, batch: Batch, step: int) -> float:
    lowprec.set_step(model, step)
    optimizer.zero_grad(set_to_none=True)
    loss = mean_task_loss(model(batch.features), batch, where=f"training step {step}")
    torch.autograd.backward(loss)
    optimizer.step()
    scheduler.step()
    return loss.item()


@dataclass(frozen=True)
class _Rows:
    batches: Sequence[EvaluationBatch]
    clusters: Sequence[np.ndarray[Any, Any]]
    count: int


def _evaluation_rows(workload: Part, most: int) -> _Rows:
    """The first evaluation batches of the part, about `most` rows with weight, as dense clusters.

    More than 4096 clusters are put into as many buckets.
    """
    batches, seen = [], 0
    for batch in workload.evaluation_batches(batch_size=min(_EVALUATION_BATCH, most)):
        batches.append(batch)
        weights = batch.weights if batch.weights.ndim == 1 else batch.weights.sum(1)
        seen += int((weights > 0).sum())
        if seen >= most:
            break
    keys = [batch.clusters[workload.clusters] for batch in batches]
    ids = np.unique(np.concatenate(keys), return_inverse=True)[1] % BUCKETS
    parts = np.split(ids, np.cumsum([len(one) for one in keys])[:-1])
    return _Rows(batches, parts, int(ids.max()) + 1)


def _evaluated(model: nn.Module, rows: _Rows, experiment: Experiment) -> dict[str, Any]:
    model.eval()
    device, rate = experiment.device, experiment.negative_sampling_rate
    loss, weight = np.zeros(rows.count), np.zeros(rows.count)
    predicted = labelled = 0.0
    with torch.no_grad():
        for batch, ids in zip(rows.batches, rows.clusters, strict=True):
            logits = model(on_device(batch.features, device)).float().cpu().numpy()
            logits = recalibrated(logits, rate)
            y, w = (t.numpy().astype(np.float64) for t in (batch.labels, batch.weights))
            z = logits.astype(np.float64)
            w = w if w.ndim == z.ndim else np.repeat(w[:, None], z.shape[1], axis=1)
            each = w * (np.logaddexp(0.0, z) - y * z)
            by_row = [one if one.ndim == 1 else one.sum(1) for one in (each, w)]
            loss += np.bincount(ids, by_row[0], minlength=rows.count)
            weight += np.bincount(ids, by_row[1], minlength=rows.count)
            with np.errstate(over="ignore"):
                predicted += float((w / (1.0 + np.exp(-z))).sum())
            labelled += float((w * y).sum())
    if not np.isfinite(loss).all():
        return {"clusters": None, "weight": None, "predicted": None, "labelled": labelled}
    return {
        "clusters": loss.tolist(),
        "weight": weight.tolist(),
        "predicted": predicted,
        "labelled": labelled,
    }
