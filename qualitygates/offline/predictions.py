"""Prediction files (Parquet, CSV, JSONL) -> chunks of rows, each with the run it belongs to.

Only a chunk of rows is in memory at a time, and only the columns that the gate names.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, GateError
from . import columns
from .columns import ColumnError

CHUNK_ROWS: Final = 1 << 17
_BLOCK: Final = 8 << 20
# A record longer than this is no prediction; without a limit one line could fill the memory.
_LONGEST_LINE: Final = 1 << 20

Array = NDArray[Any]
# Arm, seed, evaluation name.
RunKey = tuple[str, int, str]


@dataclass(frozen=True)
class Layout:
    """Which fields a row has, and what arms, seeds, forms and tasks may be called in the data."""

    arms: Mapping[str, str]
    seeds: tuple[int, ...]
    forms: tuple[str, ...]
    tasks: tuple[str, ...]
    probability: bool
    weighted: bool
    keys: tuple[str, ...]
    flags: tuple[str, ...]
    categories: tuple[str, ...]

    @property
    def fields(self) -> dict[str, str]:
        """Field -> dtype, in the order in which fields are compared between arms."""
        found = {f"key:{name}": "<i8" for name in self.keys}
        found |= {"label": "<f8"} | ({"weight": "<f8"} if self.weighted else {})
        found |= {f"flag:{name}": "|b1" for name in self.flags}
        found |= {f"category:{name}": "<i4" for name in self.categories}
        return {**found, "logit": "<f8"}

    def evaluation(self, form: int, task: int) -> str:
        """The name of an evaluation from the indices of its form and task."""
        return f"{self.forms[form]}:{self.tasks[task]}" if self.tasks else self.forms[form]


@dataclass(frozen=True)
class PredictionFile:
    """One file: what messages call it, what holds for all of its rows, and its column by role."""

    path: Path
    label: str
    fixed: Mapping[str, Any]
    columns: Mapping[str, str]

    def column(self, name: str) -> str:
        """The column of a role, or of a cluster, flag or category, which are columns themselves."""
        return self.columns.get(name, name)


@dataclass
class Chunk:
    """Rows of one file: `runs` that occur, the index [N] of each row's run, and the fields [N]."""

    runs: list[RunKey]
    which: NDArray[np.int64]
    fields: dict[str, Array]


@dataclass
class Reader:
    """Reads files in the layout; `vocabularies` holds the values of every category so far."""

    layout: Layout
    vocabularies: dict[str, dict[str, int]] = field(default_factory=dict)

    def chunks(self, file: PredictionFile) -> Iterator[Chunk]:
        """The rows of a file; raises DataError that names the file, the column and the row."""
        first = 0
        for batch in batches(file, self._needed(file)):
            size = len(next(iter(batch.values())))
            if size:
                yield self._chunk(file, batch, first=first, size=size)
            first += size

    def spelled(self, file: PredictionFile, name: str, key: int) -> str | None:
        """How the file writes the value of a key field, or None when it does not hold it."""
        column = file.column(name)
        for batch in batches(file, {column: "key"}):
            rows = np.flatnonzero(columns.keys(batch[column]) == key)
            if rows.size:
                return f"{batch[column][int(rows[0])].as_py()!r:.100}"
        return None

    def _needed(self, file: PredictionFile) -> dict[str, str]:
        """Column -> "number" or "key": how a text format must read it."""
        layout = self.layout
        value = "probability" if layout.probability else "logit"
        texts = (*layout.keys, *layout.flags, *layout.categories, *_placed(layout, file))
        found = {file.column(name): "key" for name in texts}
        numbers = [value, "label", *(["weight"] if layout.weighted else [])]
        return found | {file.column(role): "number" for role in numbers}

    def _chunk(
        self, file: PredictionFile, batch: Mapping[str, Any], *, first: int, size: int
    ) -> Chunk:
        layout = self.layout

        def read(name: str, convert: Callable[[Any], Array]) -> Array:
            column = file.column(name)
            try:
                return convert(batch[column])
            except ColumnError as error:
                row = "" if error.row is None else f" of row {first + error.row + 1}"
                raise DataError(f"{file.label}: column {column!r}{row} {error}") from error

        found: dict[str, Array] = {f"key:{name}": read(name, columns.keys) for name in layout.keys}
        found["label"] = read("label", _labels)
        if layout.weighted:
            found["weight"] = read("weight", _weights)
        found |= {f"flag:{name}": read(name, columns.flags) for name in layout.flags}
        for name in layout.categories:
            known = self.vocabularies.setdefault(name, {})
            convert = partial(columns.categories, vocabulary=known)
            found[f"category:{name}"] = read(name, convert)
        if layout.probability:
            found["logit"] = read("probability", columns.logits_of_probabilities)
        else:
            found["logit"] = read("logit", columns.floats)
        return _split(layout, file, found, size=size, read=read)


def _labels(array: Any) -> Array:
    return columns.numbers(array, low=0.0, high=1.0, what="a label lies in [0, 1]")


def _weights(array: Any) -> Array:
    what = "a weight is finite and not negative"
    return columns.numbers(array, low=0.0, high=np.inf, what=what)


def _placed(layout: Layout, file: PredictionFile) -> list[str]:
    """The roles whose column says to which run a row belongs."""
    roles = ["arm", "seed"]
    roles += ["form"] if len(layout.forms) > 1 or "form" in file.columns else []
    roles += ["task"] if layout.tasks else []
    return [role for role in roles if role not in file.fixed]


def _split(
    layout: Layout,
    file: PredictionFile,
    fields: dict[str, Array],
    *,
    size: int,
    read: Callable[[str, Callable[[Any], Array]], Array],
) -> Chunk:
    known: dict[str, dict[Any, int]] = {
        "arm": {name: index for index, name in enumerate(layout.arms)},
        "seed": {seed: index for index, seed in enumerate(layout.seeds)},
        "form": {name: index for index, name in enumerate(layout.forms)},
        "task": {name: index for index, name in enumerate(layout.tasks or ("",))},
    }
    placed = _placed(layout, file)
    code = np.zeros(size, np.int64)
    for role, values in known.items():
        code *= len(values)
        if role in placed:
            as_read: Callable[[Any], Any] = _seed if role == "seed" else str
            code += read(role, partial(columns.mapped, known=values, read=as_read))
        elif role in file.fixed:
            code += _known(file, role, values)
    distinct, which = np.unique(code, return_inverse=True)
    runs = []
    for one in distinct.tolist():
        rest, task = divmod(one, len(known["task"]))
        rest, form = divmod(rest, len(known["form"]))
        arm, seed = divmod(rest, len(known["seed"]))
        name = layout.evaluation(form, task)
        runs.append((list(layout.arms.values())[arm], layout.seeds[seed], name))
    return Chunk(runs, which.astype(np.int64), fields)


def _known(file: PredictionFile, role: str, values: Mapping[Any, int]) -> int:
    if file.fixed[role] not in values:
        allowed = ", ".join(map(str, values))
        raise DataError(
            f"{file.label}: its entry says {role} = {file.fixed[role]!r}; the gate knows: {allowed}"
        )
    return values[file.fixed[role]]


def _seed(value: Any) -> Any:
    text = str(value)
    return int(text) if len(text) < 20 and text.isascii() and text.isdecimal() else value


def batches(file: PredictionFile, needed: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The needed columns of a file as Arrow arrays, a bounded number of rows at a time."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise GateError(
            "reading predictions needs pyarrow, which is not installed: pip install 'lowprec[data]'"
        ) from error
    kinds = {".parquet": _parquet, ".csv": _csv, ".jsonl": _jsonl, ".ndjson": _jsonl}
    read = kinds.get(file.path.suffix.lower())
    if read is None:
        raise DataError(f"{file.label}: unknown type; allowed: {', '.join(kinds)}, uncompressed")
    try:
        yield from read(file, needed)
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError, csv.Error) as error:
        text = " ".join(str(error).split())[:300]
        kind = file.path.suffix[1:]
        raise DataError(f"{file.label}: not readable as {kind}: {text}") from error


def _parquet(file: PredictionFile, needed: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    # A buffered stream keeps a page of each column in memory instead of a whole row group.
    with pq.ParquetFile(file.path, buffer_size=1 << 20, pre_buffer=False) as source:
        _check_columns(file, source.schema_arrow.names, needed)
        for batch in source.iter_batches(CHUNK_ROWS, columns=list(needed), use_threads=False):
            yield {name: batch.column(name) for name in needed}


def _csv(file: PredictionFile, needed: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.csv as pc

    with file.path.open("rb") as stream:
        head = stream.readline(_LONGEST_LINE).decode("utf-8-sig")
    _check_columns(file, next(csv.reader([head]), []), needed)
    types = {n: pa.float64() if kind == "number" else pa.string() for n, kind in needed.items()}
    convert = pc.ConvertOptions(
        column_types=types, include_columns=list(needed), strings_can_be_null=True
    )
    reading = pc.ReadOptions(block_size=_BLOCK, use_threads=False)
    with pc.open_csv(file.path, read_options=reading, convert_options=convert) as reader:
        for batch in reader:
            yield {name: batch.column(name) for name in needed}


def _jsonl(file: PredictionFile, needed: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.json as pj

    with file.path.open("rb") as stream:
        first = stream.readline(_LONGEST_LINE)
        stream.seek(0)
        schema = pa.schema(_json_types(file, first, needed))
        # What the gate does not name is skipped unread: nested values could exhaust the stack.
        parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        while block := stream.read(_BLOCK):
            block += stream.readline(_LONGEST_LINE)
            if not block.endswith(b"\n") and stream.read(1):
                raise DataError(f"{file.label}: a line is longer than {_LONGEST_LINE} bytes")
            if not block.strip():
                continue
            reading = pj.ReadOptions(block_size=len(block) + 1, use_threads=False)
            table = pj.read_json(io.BytesIO(block), read_options=reading, parse_options=parse)
            for batch in table.combine_chunks().to_batches():
                yield {name: batch.column(name) for name in needed}


def _json_types(
    file: PredictionFile, line: bytes, needed: Mapping[str, str]
) -> list[tuple[str, Any]]:
    """Types of the needed columns, those of keys as in the first line."""
    import pyarrow as pa

    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.label}: its first line is not a JSON object") from error
    if not isinstance(record, dict):
        raise DataError(f"{file.label}: its first line is not a JSON object")
    _check_columns(file, list(record), needed)
    kinds: dict[type, Any] = {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    return [
        (n, pa.float64() if kind == "number" else kinds.get(type(record[n]), pa.string()))
        for n, kind in needed.items()
    ]


def _check_columns(file: PredictionFile, found: list[str], needed: Mapping[str, str]) -> None:
    for name in needed:
        if found.count(name) != 1:
            many = "is there twice" if name in found else "is missing"
            shown = ", ".join(f"{one!r:.60}" for one in found[:30]) or "none"
            raise DataError(f"{file.label}: column {name!r} {many}; it has: {shown}")
