"""Rows of a table -> the tensors of a RankingModel: hashing, scaling, jagged histories.

Shapes: n rows, D dense columns, C categorical columns, T history entries of all rows together.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import DataError
from .tables import Chunk

# A row's id is its file's number above this bit and its place in the file below.
FILE_BIT: Final = 40

Ints = NDArray[np.int64]
Small = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Schema:
    """Which columns mean what; `log` names the dense columns that are taken as log(1 + x).

    A negative value in a `log` column is an error, or 0 with `clip_negative`.
    """

    label: str
    weight: str | None
    dense: tuple[str, ...]
    log: tuple[str, ...]
    categorical: tuple[str, ...]
    history: str | None
    separator: str
    history_length: int
    buckets: int
    clip_negative: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that training reads."""
        single = (self.label, self.weight, self.history)
        return (*(name for name in single if name), *self.dense, *self.categorical)


@dataclass(frozen=True)
class Rows:
    """n encoded rows: labels, weights float32; ids int64; dense float32 [n, D], NaN where missing;
    categorical int32 [n, C]; length int32, the number of history entries; history int32 [T].
    """

    labels: Floats
    weights: Floats
    ids: Ints
    dense: Floats
    categorical: Small
    length: Small
    history: Small

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Ints) -> Rows:
        """The rows at these positions."""
        start = (self.length.cumsum() - self.length)[rows]
        length = self.length[rows]
        at = np.repeat(start - (length.cumsum() - length), length) + np.arange(length.sum())
        taken = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "history"}
        return Rows(**taken, history=self.history[at])

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """One after the other."""
        names = [one.name for one in fields(Rows)]
        return Rows(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


def encode(chunk: Chunk, schema: Schema, *, file: int) -> Rows:
    """Check and encode the rows of a chunk of file number `file`; raises DataError."""
    labels = chunk.numbers(schema.label)
    rule = "a label is a number from 0 to 1"
    # Negated, so that NaN counts as outside.
    chunk.refuse(schema.label, ~((labels >= 0) & (labels <= 1)), rule)
    weights = np.ones(chunk.rows)
    if schema.weight is not None:
        weights = chunk.numbers(schema.weight)
        bad = ~((weights >= 0) & np.isfinite(weights))
        chunk.refuse(schema.weight, bad, "a weight is a finite number, 0 or more")
    length, history = _history(chunk, schema)
    columns = [hashed(chunk.texts(name), schema.buckets) for name in schema.categorical]
    return Rows(
        labels=labels.astype(np.float32),
        weights=weights.astype(np.float32),
        ids=(file << FILE_BIT) + chunk.first + np.arange(chunk.rows),
        dense=_stacked([_dense(chunk, name, schema) for name in schema.dense], chunk, np.float32),
        categorical=_stacked(columns, chunk, np.int32),
        length=length,
        history=history,
    )


def _stacked(columns: list[NDArray[Any]], chunk: Chunk, dtype: type) -> NDArray[Any]:
    table: NDArray[Any] = np.empty((chunk.rows, len(columns)), dtype)
    for number, column in enumerate(columns):
        table[:, number] = column
    return table


def _dense(chunk: Chunk, name: str, schema: Schema) -> NDArray[np.float64]:
    values = chunk.numbers(name)
    chunk.refuse(name, np.isinf(values), "a dense value is finite; a missing one is left empty")
    if name not in schema.log:
        return values
    if schema.clip_negative:
        return np.log1p(np.maximum(values, 0))
    chunk.refuse(name, values < 0, "a column of `log` holds no negative number")
    return np.log1p(values)


def _history(chunk: Chunk, schema: Schema) -> tuple[Small, Small]:
    """Lengths and bucket numbers of the latest `history_length` entries; empty ones are dropped."""
    import pyarrow as arrow
    import pyarrow.compute as compute

    if schema.history is None:
        return np.zeros(chunk.rows, np.int32), np.empty(0, np.int32)
    column = chunk.columns[schema.history]
    if arrow.types.is_list(column.type) or arrow.types.is_large_list(column.type):
        entries = compute.list_flatten(column)
        parents = compute.list_parent_indices(column)
        texts = compute.fill_null(compute.cast(entries, arrow.string()), "")
    else:
        split = compute.split_pattern(chunk.texts(schema.history), schema.separator)
        texts, parents = compute.list_flatten(split), compute.list_parent_indices(split)
    kept = compute.not_equal(texts, "").to_numpy(zero_copy_only=False)
    rows = parents.to_numpy(zero_copy_only=False)[kept]
    count = np.bincount(rows, minlength=chunk.rows)
    # Place of each entry counted from the end of its row: 1 is the latest.
    from_end = count.cumsum()[rows] - np.arange(len(rows))
    latest = from_end <= schema.history_length
    ids = hashed(texts.filter(arrow.array(kept)), schema.buckets)[latest]
    return np.minimum(count, schema.history_length).astype(np.int32), ids


def hashed(texts: Any, buckets: int) -> Small:
    """CRC-32 of each text modulo `buckets`, the same on every machine; int32 [n]."""
    return _mapped(texts, lambda text: zlib.crc32(text.encode()) % buckets, np.int32)


def keys(texts: Any) -> Ints:
    """63-bit key of each text (BLAKE2b), so that two texts never share one; int64 [n]."""

    def key(text: str) -> int:
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    return _mapped(texts, key, np.int64)


def _mapped(texts: Any, function: Callable[[str], int], dtype: type) -> NDArray[Any]:
    coded = texts.dictionary_encode()
    values: NDArray[Any] = np.array(
        [function(text) for text in coded.dictionary.to_pylist()], dtype
    )
    places: NDArray[Any] = coded.indices.to_numpy(zero_copy_only=False)
    return values[places] if len(values) else np.empty(0, dtype)


@dataclass(frozen=True)
class Survey:
    """What the first training rows say: how many, their mean label, dense means and spreads."""

    rows: int
    rate: float
    mean: NDArray[np.float64]
    spread: NDArray[np.float64]

    @staticmethod
    def of(parts: Iterable[Rows], *, rows: int) -> Survey:
        """Statistics of the first `rows` rows, missing values left out.

        Raises DataError when they carry no weight or are all of one class.
        """
        count, weight, label = 0, 0.0, 0.0
        known, total, square = np.zeros(1), np.zeros(1), np.zeros(1)
        for part in parts:
            taken = part.take(np.arange(min(len(part), rows - count)))
            values = taken.dense.astype(np.float64)
            finite = np.isfinite(values)
            values = np.where(finite, values, 0.0)
            known = known + finite.sum(0)
            total, square = total + values.sum(0), square + (values**2).sum(0)
            weight += float(taken.weights.sum(dtype=np.float64))
            label += float((taken.weights * taken.labels).sum(dtype=np.float64))
            count += len(taken)
            if count >= rows:
                break
        if not 0 < label < weight:
            what = "have the same label" if weight > 0 else "have weight zero"
            raise DataError(
                f"the first {count} training rows all {what}; a model learns nothing from them: "
                "shuffle the file, or check the label and weight columns"
            )
        mean = total / np.maximum(known, 1)
        variance = np.maximum(square / np.maximum(known, 1) - mean**2, 0)
        return Survey(count, label / weight, mean, np.maximum(variance**0.5, 1e-6))

    def tensors(self, rows: Rows, *, history: bool) -> dict[str, Any]:
        """The fields of a Batch: dense values standardised and clipped to 5, missing ones 0 and
        flagged in a second half of the columns.
        """
        known = np.isfinite(rows.dense)
        scaled = np.where(known, (rows.dense - self.mean) / self.spread, 0.0).clip(-5, 5)
        dense = np.concatenate([scaled, ~known], axis=1).astype(np.float32)
        features = {
            "dense": torch.from_numpy(dense),
            "categorical": torch.from_numpy(rows.categorical.astype(np.int64)),
        }
        if history:
            offsets = np.concatenate([[0], rows.length.cumsum(dtype=np.int64)])
            features["history_ids"] = torch.from_numpy(rows.history.astype(np.int64))
            features["history_offsets"] = torch.from_numpy(offsets)
        return {
            "features": features,
            "labels": torch.from_numpy(rows.labels),
            "weights": torch.from_numpy(rows.weights),
            "ids": torch.from_numpy(rows.ids),
        }


def shuffled(parts: Iterable[Rows], *, window: int, rng: np.random.Generator) -> Iterator[Rows]:
    """The same rows in random order, drawn from a pool of `window` to twice `window` rows.

    `window` = 0 leaves the order as it is.
    """
    if not window:
        yield from parts
        return
    pool: list[Rows] = []
    held = 0
    for part in parts:
        pool.append(part)
        held += len(part)
        if held >= 2 * window:
            mixed = Rows.joined(pool).take(rng.permutation(held))
            yield mixed.take(np.arange(held - window))
            pool = [mixed.take(np.arange(held - window, held))]
            held = window
    if held:
        yield Rows.joined(pool).take(rng.permutation(held))


def cut(parts: Iterator[Rows], *, size: int) -> Iterator[Rows]:
    """Pieces of exactly `size` rows; what is left when the parts end is dropped."""
    pool: list[Rows] = []
    held = 0
    for part in parts:
        pool.append(part)
        held += len(part)
        if held < size:
            continue
        whole = Rows.joined(pool)
        stops = range(size, held + 1, size)
        for stop in stops:
            yield whole.take(np.arange(stop - size, stop))
        pool = [whole.take(np.arange(stops[-1], held))]
        held -= stops[-1]
