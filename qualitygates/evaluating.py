"""The evaluation set as one model sees it, and its reduction to one Evaluation a form and task."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from .errors import DataError
from .faults import noisy
from .metrics import evaluate, recalibrated
from .running.places import on_device
from .seeding import stream_seed
from .workload import Batch, EvaluationBatch, Workload, tasks_of

# As trained, and the same weights served unquantized.
EVALUATION_FORMS: Final = ("trained", "bf16")
EVALUATION_BATCH: Final = 8192

Floats = NDArray[np.floating[Any]]


def evaluation_names(workload: Workload) -> list[str]:
    """What a run record holds under "evaluations": `form`, or `form:task` for several tasks."""
    tasks = tasks_of(workload) or ("",)
    return [evaluation_name(form, task) for form in EVALUATION_FORMS for task in tasks]


def evaluation_name(form: str, task: str) -> str:
    """`form:task`, or the form alone for a workload of one task without a name."""
    return f"{form}:{task}" if task else form


@dataclass(frozen=True)
class Task:
    """Logits, labels and weights of one task, each [N]; `name` is empty when there is only one."""

    name: str
    logits: Floats
    labels: NDArray[np.float32]
    weights: NDArray[np.float32]


@dataclass(frozen=True)
class Examples:
    """The evaluation set as one model sees it: the tasks' predictions beside what the verdict
    needs.
    """

    tasks: tuple[Task, ...]
    clusters: dict[str, NDArray[np.int64]]
    groups: NDArray[np.int64] | None
    slices: dict[str, NDArray[np.bool_]]
    hash: str

    @classmethod
    def of(cls, model: nn.Module, workload: Workload, *, sampling_rate: float) -> Examples:
        """Predict all evaluation batches; logits are recalibrated for negatives that training
        kept at `sampling_rate`.
        """
        model.eval()
        device = next(model.parameters()).device
        predict = getattr(workload, "predict", nn.Module.__call__)
        logits, batches = [], []
        digest = hashlib.sha256()
        with torch.no_grad():
            for batch in workload.evaluation_batches(batch_size=EVALUATION_BATCH):
                found = predict(model, on_device(batch.features, device)).float().cpu()
                check_shapes(found, batch, where="evaluation")
                logits.append(found.numpy())
                digest.update(hash_tensors((batch.ids, batch.labels, batch.weights)).encode())
                batches.append(_kept(batch))
        if not batches:
            raise DataError("the evaluation set is empty")
        labels, weights, clusters, groups, slices = zip(*batches, strict=True)
        columns = _columns(tasks_of(workload), *map(np.concatenate, (logits, labels, weights)))
        return cls(
            tasks=tuple(
                Task(task.name, recalibrated(task.logits, sampling_rate), task.labels, task.weights)
                for task in columns
            ),
            clusters={name: _dense([c[name] for c in clusters]) for name in clusters[0]},
            groups=None if groups[0] is None else _dense(groups),
            slices={name: np.concatenate([s[name] for s in slices]) for name in slices[0]},
            hash=digest.hexdigest(),
        )

    def measure(self, form: str, noise: Mapping[str, float], *, seed: int) -> dict[str, Any]:
        """One Evaluation a task by evaluation name, with Gaussian logit noise of sd noise[task]."""
        found = {}
        for task in self.tasks:
            stream = f"fault:{task.name}" if task.name else "fault"
            name = evaluation_name(form, task.name)
            logits = noisy(task.logits, noise[task.name], seed=stream_seed(seed, stream))
            try:
                found[name] = evaluate(
                    logits,
                    task.labels,
                    weights=task.weights,
                    clusters=self.clusters,
                    groups=self.groups,
                    slices=self.slices,
                )
            except DataError as error:
                raise DataError(f"{name} evaluation: {error}") from error
        return found


def mean_task_loss(
    logits: torch.Tensor, batch: Any, *, where: str, whole: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean over the tasks of the weighted binary cross-entropy (nats) of a training batch.

    `whole` holds the weights of the whole batch when these rows are a part of it: the losses of all
    parts add up to that of the whole. A task without weight in it adds 0; DataError when no task
    has any.
    """
    check_shapes(logits, batch, where=where)
    losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
    weights = _by_task(batch.weights, like=losses)
    all_weights = weights if whole is None else _by_task(whole, like=losses)
    total = all_weights.sum(0).to(losses.device)
    if not bool((total > 0).any()):
        raise DataError(f"{where}: all weights of the batch are zero; leave such rows out")
    sums = (losses * weights).sum(0)
    return (sums / torch.where(total > 0, total, torch.ones_like(total))).mean()


def check_shapes(logits: torch.Tensor, batch: Any, *, where: str) -> None:
    """DataError unless logits and labels are both [B] or [B, tasks], and weights fit them."""
    labels, weights = batch.labels.shape, batch.weights.shape
    fits = logits.shape == labels and weights in (labels, labels[:1])
    if not fits or len(labels) not in (1, 2):
        raise DataError(
            f"{where}: logits {tuple(logits.shape)}, labels {tuple(labels)}, weights "
            f"{tuple(weights)}; logits and labels are [rows] or [rows, tasks], weights [rows] or "
            "as the labels"
        )


def hash_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of the bytes of all tensors in order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class OrderHash:
    """Hashes of what was trained on: all batches in order, the first and the last."""

    def __init__(self) -> None:
        self.all = hashlib.sha256()
        self.first = self.last = ""

    def add(self, batch: Batch) -> None:
        self.note(hash_tensors((batch.ids, batch.labels, batch.weights)))

    def note(self, one: str) -> None:
        self.all.update(one.encode())
        self.first, self.last = self.first or one, one

    def hashes(self) -> dict[str, str]:
        return {
            "batches_hash": self.all.hexdigest(),
            "first_batch_hash": self.first,
            "last_batch_hash": self.last,
        }


def _kept(batch: EvaluationBatch) -> tuple[Any, ...]:
    labels, weights = batch.labels.cpu(), batch.weights.cpu()
    weights = _by_task(weights, like=labels)
    return labels.numpy(), weights.numpy(), batch.clusters, batch.groups, batch.slices


def _by_task(weights: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    if weights.ndim == like.ndim:
        return weights
    return weights.unsqueeze(1).expand(-1, like.shape[1])


def _columns(
    names: tuple[str, ...],
    logits: NDArray[np.float32],
    labels: NDArray[np.float32],
    weights: NDArray[np.float32],
) -> list[Task]:
    found = 0 if labels.ndim == 1 else labels.shape[1]
    if found != len(names):
        raise DataError(
            f"workload: it names {len(names)} tasks ({', '.join(names) or 'none'}), its labels "
            f"have {found} task columns; give `tasks` one name a column, or labels [rows] and none"
        )
    if not names:
        return [Task("", logits, labels, weights)]
    return [
        Task(name, *(np.ascontiguousarray(one[:, i]) for one in (logits, labels, weights)))
        for i, name in enumerate(names)
    ]


def _dense(parts: Any) -> NDArray[np.int64]:
    """Keys as ids 0 .. U-1 in sorted order, the same for every run on the same examples."""
    return np.unique(np.concatenate(parts), return_inverse=True)[1].astype(np.int64)
