"""part: another workload evaluated on a part of its evaluation set only; training is untouched.

Rows outside the part get weight 0, so that jagged features need no cutting; batches wholly outside
are left out. The parts are ranges of a clustering's keys in sorted order: with days as clusters a
range of time. No cluster is in two parts, so what one part taught is not known about the other.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from ..errors import DataError, ExperimentError
from ..workload import Batch, EvaluationBatch, Workload, load_workload

_BATCH: Final = 8192


def build(
    *,
    folder: Path,
    of: Mapping[str, Any],
    first: float = 0.0,
    last: float = 1.0,
    clusters: str = "",
) -> Part:
    """The workload `of`, evaluated on its clusters from share `first` to share `last`.

    of: {workload, options, base, source}: name or file.py:function, its options, where relative
    paths start seen from the experiment ("."), and the SHA-256 that its file must have ("" for
    any), so that a promise made with another file is refused. clusters: the clustering that is cut,
    "" for the one with the fewest clusters.
    """
    name, options, base, source = _inner(of)
    for key, value in (("first", first), ("last", last)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value <= 1:
            raise ExperimentError(f"workload part: {key} = {value!r}; allowed: 0 to 1")
    if first >= last:
        raise ExperimentError(f"workload part: first = {first}, last = {last}: no row is left")
    folder = folder / base
    found = source_hash(name, folder)
    if source and found != source:
        raise ExperimentError(
            f"workload part: {name} is not the file that this part was made for (SHA-256 "
            f"{found[:12]}, not {source[:12]}); make the sweep again"
        )
    return Part(
        load_workload(name, options, folder=folder), (float(first), float(last)), clusters=clusters
    )


def _inner(of: Any) -> tuple[str, Mapping[str, Any], str, str]:
    given = dict(of) if isinstance(of, Mapping) else {}
    name, options = given.pop("workload", None), given.pop("options", {})
    base, source = given.pop("base", "."), given.pop("source", "")
    texts = all(isinstance(one, str) for one in (name, base, source))
    if given or not texts or not isinstance(options, Mapping):
        raise ExperimentError(
            f"workload part: of = {of!r}; it is a table with workload (text) and, if wanted, "
            "options (a table), base and source (text)"
        )
    return str(name), options, base, source


def source_hash(of: str, folder: Path) -> str:
    """SHA-256 of the file that a workload is made by, or "shipped"."""
    file = of.rpartition(":")[0]
    if not file:
        return "shipped"
    try:
        return hashlib.sha256((folder / file).read_bytes()).hexdigest()
    except OSError as error:
        raise ExperimentError(f"workload {of}: {error.strerror}") from error


class Part:
    """A workload whose evaluation weights are 0 outside of a range of clusters."""

    def __init__(self, inner: Workload, share: tuple[float, float], *, clusters: str) -> None:
        self.inner, self.share = inner, share
        self.name = inner.name
        if hasattr(inner, "tasks"):
            self.tasks = inner.tasks
        keys = _keys(inner)
        if clusters and clusters not in keys:
            raise ExperimentError(
                f"workload part: no clustering {clusters!r}; {inner.name} has {', '.join(keys)}"
            )
        self.clusters = clusters or min(keys, key=lambda name: len(keys[name]))
        every = keys[self.clusters]
        low, high = (round(end * len(every)) for end in share)
        if low == high:
            raise DataError(
                f"workload part: {share[0]:g} to {share[1]:g} of the {len(every)} clusters "
                f"{self.clusters!r} is none"
            )
        self.kept = every[low:high]
        self.facts: dict[str, str | int | float] = {
            **inner.facts,
            "evaluated on": f"clusters {low + 1} to {high} of {len(every)} of {self.clusters!r}",
        }

    def model(self) -> nn.Module:
        """The inner workload's model."""
        return self.inner.model()

    def optimizer(
        self, model: nn.Module, *, steps: int
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """The inner workload's optimizer."""
        return self.inner.optimizer(model, steps=steps)

    def training_batches(self, *, seed: int, steps: int, batch_size: int) -> Iterator[Batch]:
        """The inner workload's batches."""
        return self.inner.training_batches(seed=seed, steps=steps, batch_size=batch_size)

    def evaluation_batches(self, *, batch_size: int) -> Iterator[EvaluationBatch]:
        """The inner batches that hold rows of the part, other rows with weight 0."""
        for batch in self.inner.evaluation_batches(batch_size=batch_size):
            inside = torch.from_numpy(np.isin(batch.clusters[self.clusters], self.kept))
            if not bool(inside.any()):
                continue
            mask = inside.to(batch.weights.dtype)
            mask = mask.reshape(-1, *[1] * (batch.weights.ndim - 1))
            yield dataclasses.replace(batch, weights=batch.weights * mask)


def _keys(inner: Workload) -> dict[str, np.ndarray[Any, Any]]:
    """Distinct keys of every clustering of the evaluation set, sorted."""
    found: dict[str, list[Any]] = {}
    for batch in inner.evaluation_batches(batch_size=_BATCH):
        for name, values in batch.clusters.items():
            found.setdefault(name, []).append(np.unique(values))
    if not found:
        raise DataError(f"workload {inner.name} gives no evaluation batch to take a part of")
    return {name: np.unique(np.concatenate(parts)) for name, parts in found.items()}
