"""What every integration shares: how a model is built and scored, apart from how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..errors import DataError, GateError
from ..workload import EvaluationBatch

Logits = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class EvaluationSet:
    """The examples on which both arms are judged, the same in every run.

    features: name -> tensor [N, ...]; labels float32 [N] in [0, 1]; clusters: name -> int64 keys
    [N] of what shares its errors (users, days); groups: keys of the ranking groups for GAUC, or
    None; slices: name -> bool [N]; weights: float32 [N] >= 0, or None for ones.
    """

    features: Mapping[str, torch.Tensor]
    labels: torch.Tensor
    clusters: Mapping[str, NDArray[np.int64]]
    groups: NDArray[np.int64] | None = None
    slices: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    weights: torch.Tensor | None = None

    def __post_init__(self) -> None:
        columns: dict[str, Any] = {**self.features, **self.clusters, **self.slices}
        optional = {"groups": self.groups, "weights": self.weights}
        columns |= {name: one for name, one in optional.items() if one is not None}
        for name, column in columns.items():
            if len(column) != len(self.labels):
                raise DataError(
                    f"evaluation set: {name!r} has {len(column)} rows, labels {len(self.labels)}"
                )
        if not self.clusters:
            raise DataError(
                "evaluation set: clusters is empty; name what shares its errors, such as the user "
                "or the day of each row"
            )

    def batches(self, *, batch_size: int) -> Iterator[EvaluationBatch]:
        """The set in order, at most `batch_size` rows at a time."""
        rows = len(self.labels)
        weights = torch.ones(rows) if self.weights is None else self.weights
        for start in range(0, rows, batch_size):
            part = slice(start, start + batch_size)
            yield EvaluationBatch(
                features={name: one[part] for name, one in self.features.items()},
                labels=self.labels[part].float(),
                weights=weights[part].float(),
                ids=torch.arange(rows)[part],
                clusters={name: one[part] for name, one in self.clusters.items()},
                groups=None if self.groups is None else self.groups[part],
                slices={name: one[part] for name, one in self.slices.items()},
            )


@dataclass(frozen=True, kw_only=True)
class ScoredModel:
    """A model under its own name: built by `build`, scored by `logits(model, features)`.

    build: a fresh model under torch's seeded RNG. logits: float32 [N], the log-odds of label 1.
    Layers keep the names they have in your training, so that the plan and the acceptance fit it.
    """

    name: str
    build: Callable[[], nn.Module]
    evaluation: EvaluationSet
    logits: Logits
    facts: dict[str, str | int | float] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """A fresh model."""
        return self.build()

    def evaluation_batches(self, *, batch_size: int) -> Iterator[EvaluationBatch]:
        """The evaluation set."""
        return self.evaluation.batches(batch_size=batch_size)

    def predict(self, model: nn.Module, features: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits of one evaluation batch."""
        return self.logits(model, features)


def library_facts(extra: str, *names: str) -> dict[str, str]:
    """Versions of installed distributions, for gate.json: a gate goes on with the library it began.

    Asks the package index of this environment, so it imports nothing. Raises GateError when one is
    absent.
    """
    try:
        return {name: version(name) for name in names}
    except PackageNotFoundError as error:
        raise GateError(f"{error.name} is not installed: pip install 'lowprec[{extra}]'") from error
