"""Rows of many runs, sorted out by run on disk: one file a field, read back a run at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import GateError
from .predictions import Chunk, RunKey

Array = NDArray[Any]
_BLOCK = 1 << 18


class Spill:
    """Fields of rows by run, in files under `folder`; names of files hold nothing from the data."""

    def __init__(self, folder: Path, fields: Mapping[str, str]) -> None:
        self.folder = folder
        self.fields = dict(fields)
        self.rows: dict[RunKey, int] = {}
        # Which sources (by index) gave rows to a run.
        self.sources: dict[RunKey, set[int]] = {}
        self._numbers: dict[RunKey, int] = {}

    def add(self, chunk: Chunk, *, source: int) -> None:
        """Append the rows of a chunk, keeping their order; raises GateError for a full disk."""
        fields, bounds = chunk.fields, [0, len(chunk.which)]
        if len(chunk.runs) > 1:
            order = np.argsort(chunk.which, kind="stable")
            fields = {name: values[order] for name, values in fields.items()}
            counts = np.bincount(chunk.which, minlength=len(chunk.runs))
            bounds = [0, *np.cumsum(counts).tolist()]
        for index, run in enumerate(chunk.runs):
            start, end = bounds[index], bounds[index + 1]
            number = self._numbers.setdefault(run, len(self._numbers))
            self.rows[run] = self.rows.get(run, 0) + end - start
            self.sources.setdefault(run, set()).add(source)
            for field, (name, dtype) in enumerate(self.fields.items()):
                self._append(number, field, fields[name][start:end].astype(dtype, copy=False))

    def _append(self, number: int, field: int, values: Array) -> None:
        try:
            with self._path(number, field).open("ab") as stream:
                stream.write(values.tobytes())
        except OSError as error:
            raise GateError(
                f"{self.folder}: rows cannot be sorted out by run: {error.strerror or error}; the "
                "folder needs room for the columns that the gate reads, 8 bytes a value"
            ) from error

    def column(self, run: RunKey, name: str) -> Array:
        """One field of one run, in the order of its rows."""
        field = list(self.fields).index(name)
        return np.fromfile(self._path(self._numbers[run], field), self.fields[name])

    def blocks(self, run: RunKey, name: str) -> Iterator[Array]:
        """The same in pieces of a fixed number of rows."""
        field, dtype = list(self.fields).index(name), np.dtype(self.fields[name])
        path = self._path(self._numbers[run], field)
        for start in range(0, self.rows[run], _BLOCK):
            yield np.fromfile(path, dtype, count=_BLOCK, offset=start * dtype.itemsize)

    def _path(self, number: int, field: int) -> Path:
        return self.folder / f"{number}-{field}"
