"""A workload of labelled rows in files: training rows streamed, evaluation rows held in memory."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..errors import DataError
from ..grouping import blocks, crossed
from ..workload import Batch, EvaluationBatch
from .features import Rows, Schema, Survey, cut, encode, keys, shuffled
from .model import RankingModel, Sizes, adam_with_warmup
from .tables import Chunk, Layout, read_table

SURVEYED: Final = 100_000  # training rows that the dense statistics come from
MOST_CLUSTERS: Final = 4096

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Files:
    """Training and evaluation files and how they are cut."""

    train: tuple[Path, ...]
    evaluate: tuple[Path, ...]
    layout: Layout

    def __post_init__(self) -> None:
        both = {p.resolve() for p in self.train} & {p.resolve() for p in self.evaluate}
        if both:
            raise DataError(
                f"{min(both)} is a training file and an evaluation file; the evaluation rows must "
                "not be trained on: split them off, the latest rows are best"
            )


@dataclass(frozen=True)
class HeldOut:
    """The evaluation rows with what the verdict needs, in memory."""

    rows: Rows
    clusters: dict[str, Ints]
    groups: Ints | None
    slices: dict[str, NDArray[np.bool_]]


class LabelledRows:
    """Training rows are streamed again in every epoch; the evaluation rows are held in memory."""

    def __init__(
        self, name: str, files: Files, schema: Schema, *, held_out: HeldOut, shuffle_rows: int
    ) -> None:
        self.name, self.files, self.schema = name, files, schema
        self.held_out, self.shuffle_rows = held_out, shuffle_rows
        self.survey = Survey.of(self._epoch(), rows=SURVEYED)
        rows = held_out.rows
        self.facts: dict[str, str | int | float] = {
            "training files": ", ".join(map(_fingerprint, files.train)),
            "evaluation files": ", ".join(map(_fingerprint, files.evaluate)),
            "evaluation rows": len(rows),
            "positives, evaluation": int(
                np.count_nonzero((rows.labels > 0.5) & (rows.weights > 0))
            ),
            "mean label, evaluation": round(
                float(np.average(rows.labels, weights=rows.weights)), 6
            ),
            f"mean label, first {self.survey.rows} training rows": round(self.survey.rate, 6),
        }
        for cluster, ids in held_out.clusters.items():
            self.facts[f"clusters by {cluster}"] = len(np.unique(ids))

    def model(self) -> nn.Module:
        """The network, about 0.4 million weights in linear layers beside the embeddings."""
        schema = self.schema
        return RankingModel(
            Sizes(
                dense=2 * len(schema.dense),
                buckets=(schema.buckets,) * len(schema.categorical),
                history_buckets=schema.buckets if schema.history else 0,
                history_dense=0,
            )
        )

    def optimizer(
        self, model: nn.Module, *, steps: int
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """Adam with warmup and cosine decay."""
        return adam_with_warmup(model, steps=steps, learning_rate=2e-3)

    def training_batches(self, *, seed: int, steps: int, batch_size: int) -> Iterator[Batch]:
        """The files in order, again and again, each pass shuffled in a window by the seed."""
        rng = np.random.default_rng(seed)
        epochs = itertools.chain.from_iterable(
            shuffled(self._epoch(), window=self.shuffle_rows, rng=rng) for _ in itertools.count()
        )
        for rows in itertools.islice(cut(epochs, size=batch_size), steps):
            yield Batch(**self._tensors(rows))

    def evaluation_batches(self, *, batch_size: int) -> Iterator[EvaluationBatch]:
        """The evaluation rows in the order of their files."""
        held = self.held_out
        for start in range(0, len(held.rows), batch_size):
            part = np.arange(start, min(start + batch_size, len(held.rows)))
            yield EvaluationBatch(
                **self._tensors(held.rows.take(part)),
                clusters={name: ids[part] for name, ids in held.clusters.items()},
                groups=None if held.groups is None else held.groups[part],
                slices={name: member[part] for name, member in held.slices.items()},
            )

    def _epoch(self) -> Iterator[Rows]:
        for number, path in enumerate(self.files.train):
            for chunk in read_table(path, self.schema.columns, self.files.layout):
                yield encode(chunk, self.schema, file=number)

    def _tensors(self, rows: Rows) -> dict[str, Any]:
        return self.survey.tensors(rows, history=self.schema.history is not None)


@dataclass(frozen=True)
class Judged:
    """The columns that only the verdict reads; a slice is written `column=value`.

    A clustering is a column, or blocks of several: `day x user`.
    """

    clusters: tuple[str, ...]
    group: str | None
    slices: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """All of them."""
        group = () if self.group is None else (self.group,)
        clusters = dict.fromkeys(column for name in self.clusters for column in crossed(name))
        return (*clusters, *group, *(one.partition("=")[0] for one in self.slices))


def hold_out(files: Files, schema: Schema, judged: Judged, *, most: int) -> HeldOut:
    """Read, check and encode the first `most` evaluation rows; raises DataError."""
    parts: list[Rows] = []
    ids: dict[str, list[Ints]] = {name: [] for name in (*judged.clusters, judged.group) if name}
    masks: dict[str, list[NDArray[np.bool_]]] = {one: [] for one in judged.slices}
    columns = (*schema.columns, *judged.columns)
    for file, chunk in _evaluation_chunks(files, columns, most=most):
        parts.append(encode(chunk, schema, file=file))
        for name, found in ids.items():
            found.append(_keys(chunk, crossed(name) if name in judged.clusters else (name,)))
        for one, member in masks.items():
            column, _, value = one.partition("=")
            member.append(chunk.equal(column, value))
    rows = Rows.joined(parts)
    _check_classes(rows, files)
    held = HeldOut(
        rows=rows,
        clusters={name: bucketed(np.concatenate(ids[name])) for name in judged.clusters},
        groups=None if judged.group is None else np.concatenate(ids[judged.group]),
        slices={one: np.concatenate(member) for one, member in masks.items()},
    )
    _check_judged(held, judged, files)
    return held


def _keys(chunk: Chunk, columns: tuple[str, ...]) -> Ints:
    """The keys of one column, or of the blocks that several make."""
    found = [keys(chunk.texts(column)) for column in columns]
    return found[0] if len(found) == 1 else blocks(found)


def bucketed(ids: Ints) -> Ints:
    """The keys themselves, or their hash bucket when there are more than MOST_CLUSTERS."""
    return ids if len(np.unique(ids)) <= MOST_CLUSTERS else ids % MOST_CLUSTERS


def _evaluation_chunks(
    files: Files, columns: tuple[str, ...], *, most: int
) -> Iterator[tuple[int, Chunk]]:
    left = most
    for number, path in enumerate(files.evaluate, start=len(files.train)):
        for chunk in read_table(path, columns, files.layout):
            yield number, chunk.head(left)
            left -= chunk.rows
            if left <= 0:
                return


def _check_classes(rows: Rows, files: Files) -> None:
    where = _listed(files)
    if not rows.weights.any():
        raise DataError(f"{where}: the weights of all {len(rows)} evaluation rows are zero")
    weighed = rows.weights > 0
    for kind, mass in (("positive", rows.labels), ("negative", 1 - rows.labels)):
        if not mass[weighed].any():
            raise DataError(
                f"{where}: no {kind} label in the {len(rows)} evaluation rows; NE and AUC need "
                "both classes: raise evaluation_rows, or check the label column"
            )


def _check_judged(held: HeldOut, judged: Judged, files: Files) -> None:
    for name, member in held.slices.items():
        if not member.any():
            raise DataError(
                f"{_listed(files)}: no evaluation row has {name}; leave the slice out, or correct "
                "its value"
            )
    if held.groups is None:
        return
    name = judged.clusters[0]
    pairs = np.unique(np.stack([held.groups, held.clusters[name]]), axis=1)
    several = pairs.shape[1] - len(np.unique(held.groups))
    if several:
        raise DataError(
            f"{_listed(files)}: a group of {judged.group!r} lies in several clusters of {name!r}, "
            "so GAUC would have no interval; each group must lie in one cluster of the first name "
            f"in `clusters`: put {judged.group!r}, or what contains it, first"
        )


def _listed(files: Files) -> str:
    return ", ".join(str(path) for path in files.evaluate)


def _fingerprint(path: Path) -> str:
    """Name, size and checksum of both ends of a file, so that a resumed gate notices other data."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        ends = stream.read(1 << 16)
        stream.seek(max(size - (1 << 16), 0))
        ends += stream.read(1 << 16)
    return f"{path.name} ({size} bytes, CRC-32 of both ends {zlib.crc32(ends):08x})"
