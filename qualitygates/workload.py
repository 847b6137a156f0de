"""The Workload protocol: a model, its training batches and a fixed evaluation set."""

from __future__ import annotations

import difflib
import importlib
import inspect
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from .errors import ExperimentError, GateError

SHIPPED: Final = {
    "flights": "flights",
    "clicks": "clicks",
    "csv": "csv_rows",
    "criteo": "criteo",
    "part": "part",
}


@dataclass(frozen=True)
class Batch:
    """Features, labels float32 [B] in [0, 1], weights float32 [B] >= 0, ids int64 [B].

    With T tasks labels are [B, T], and weights [B] or [B, T] (0 where a task has no label).
    """

    features: dict[str, torch.Tensor]
    labels: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class EvaluationBatch(Batch):
    """A batch with what the verdict needs: clusters, ranking groups and slices, each [B].

    clusters: name -> int64 keys; the verdict takes the clustering with the largest variance.
    groups: int64 keys of the ranking groups for GAUC, or None. slices: name -> bool; the same names
    in every batch.
    """

    clusters: dict[str, NDArray[np.int64]]
    groups: NDArray[np.int64] | None
    slices: dict[str, NDArray[np.bool_]]


@runtime_checkable
class Workload(Protocol):
    """What a gate trains: both arms call the same workload with the same seeds.

    A workload of several tasks has `tasks`, a tuple of their names: labels and logits are then
    [B, tasks], the loss is the mean of the tasks' losses, and every task's metrics are co-primary.

    A workload whose own loop trains has, instead of `training_batches` and `optimizer`, a method
    `train(model, *, seed, steps, batch_size, report)`: it takes exactly `steps` optimizer steps on
    `model`, all randomness from `seed`, and tells `report` (own_loop.LoopReport) each batch before
    its forward pass and each step's loss. Its model may be called otherwise than
    forward(features): a method `predict(model, features)` then gives the float32 logits.
    """

    name: str
    facts: dict[str, str | int | float]

    def model(self) -> nn.Module:
        """A fresh model under torch's seeded RNG; forward(features) gives float32 logits [B]."""
        ...

    def training_batches(self, *, seed: int, steps: int, batch_size: int) -> Iterator[Batch]:
        """Exactly `steps` batches in an order that depends on `seed` alone, never torch's RNG."""
        ...

    def evaluation_batches(self, *, batch_size: int) -> Iterator[EvaluationBatch]:
        """The evaluation set, the same in every run."""
        ...

    def optimizer(
        self, model: nn.Module, *, steps: int
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """Optimizer and schedule for a run of `steps` steps."""
        ...


def tasks_of(workload: Workload) -> tuple[str, ...]:
    """The names of the tasks in the order of their columns, () for one task without a name.

    Raises ExperimentError for names that are empty, equal, or hold ':' or '/'.
    """
    names = getattr(workload, "tasks", ())
    listed = isinstance(names, (tuple, list))
    if not listed or not all(isinstance(one, str) and _is_task(one) for one in names):
        raise ExperimentError(
            f"workload {workload.name}: tasks = {names!r}; allowed: a tuple of printable names "
            "without ':' and '/', such as ('click', 'conversion')"
        )
    if len(set(names)) != len(names):
        raise ExperimentError(f"workload {workload.name}: tasks {names!r} names one task twice")
    return tuple(names)


def _is_task(name: str) -> bool:
    return bool(name.strip()) and name.isprintable() and not set(":/") & set(name)


def load_workload(name_or_path: str, options: Mapping[str, Any], *, folder: Path) -> Workload:
    """A shipped workload by name, or `file.py:function` called with the options.

    Relative paths start at `folder`. Raises ExperimentError for an unknown name, function or
    option, and DataError from the workload when its data cannot carry a gate.
    """
    file, _, function = name_or_path.rpartition(":")
    if file:
        return _checked(name_or_path, _user_function(folder / file, function), options)
    if name_or_path not in SHIPPED:
        raise ExperimentError(
            f"unknown workload {name_or_path!r}; {_nearest(name_or_path, SHIPPED)}"
        )
    module = importlib.import_module(f"qualitygates.workloads.{SHIPPED[name_or_path]}")
    build: Callable[..., Any] = module.build
    return _checked(name_or_path, build, {**options, "folder": folder})


def _user_function(path: Path, function: str) -> Callable[..., Any]:
    if not path.is_file():
        raise ExperimentError(f"workload file {path} does not exist")
    try:
        names = runpy.run_path(str(path))
    except Exception as error:
        raise ExperimentError(
            f"workload file {path} cannot be run: {type(error).__name__}: {error}"
        ) from error
    found = names.get(function)
    if not callable(found):
        known = [name for name, value in names.items() if inspect.isfunction(value)]
        raise ExperimentError(f"{path} has no function {function!r}; {_nearest(function, known)}")
    build: Callable[..., Any] = found
    return build


def _checked(name: str, build: Callable[..., Any], options: Mapping[str, Any]) -> Workload:
    known = inspect.signature(build).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        for option in options:
            if option not in known:
                allowed = [one for one in known if one != "folder"]
                raise ExperimentError(
                    f"workload {name}: unknown option {option!r}; {_nearest(option, allowed)}"
                )
    missing = [
        key
        for key, p in known.items()
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and key not in options
    ]
    if missing:
        raise ExperimentError(f"workload {name}: option {missing[0]!r} is missing in [options]")
    try:
        workload = build(**options)
    except (GateError, OSError, MemoryError):
        raise
    except Exception as error:
        shown = ", ".join(f"{key} = {value!r}" for key, value in options.items() if key != "folder")
        raise ExperimentError(
            f"workload {name} cannot be built with {shown or 'no options'}: "
            f"{type(error).__name__}: {error}"
        ) from error
    trains = callable(getattr(workload, "train", None))
    needed = ("train",) if trains else ("training_batches", "optimizer")
    needed = ("name", "facts", "model", "evaluation_batches", *needed)
    lacking = [one for one in needed if not hasattr(workload, one)]
    if lacking:
        raise ExperimentError(f"workload {name}: what it returned lacks {', '.join(lacking)}")
    if trains:
        _check_loop(name, workload.train)
    result: Workload = workload
    return result


def _check_loop(name: str, train: Callable[..., Any]) -> None:
    try:
        inspect.signature(train).bind(None, seed=0, steps=1, batch_size=1, report=None)
    except TypeError as error:
        raise ExperimentError(
            f"workload {name}: train{inspect.signature(train)} cannot be called as train(model, "
            f"seed=..., steps=..., batch_size=..., report=...): {error}"
        ) from error


def _nearest(name: str, known: Any) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"
