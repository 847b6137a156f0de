"""Streams the needed columns of CSV, TSV and Parquet files in bounded memory, and checks them.

A file is read in blocks; nothing but the current block is held. What cannot be read is refused with
the file, the line or row, and what to do about it.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError

BLOCK_BYTES: Final = 1 << 22
BATCH_ROWS: Final = 16_384
_SNIFFED: Final = 1 << 16
# Longest first: the mark of UTF-32-LE begins with the one of UTF-16-LE.
_MARKS: Final = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_PARQUET: Final = b"PAR1"


@dataclass(frozen=True)
class Layout:
    """How the text of a file is cut; `names` are the columns of a file without header line."""

    delimiter: str = ","
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file; `columns` holds pyarrow arrays, `first` the first row's number.

    Rows count from 0; `header_lines` of a text file stand above them, None marks a Parquet file.
    """

    path: Path
    first: int
    columns: dict[str, Any]
    rows: int
    header_lines: int | None

    def where(self, row: int) -> str:
        """The place of a row of this chunk, in the words of an error message."""
        number = self.first + row
        if self.header_lines is None:
            return f"{self.path}, row {number + 1}"
        return f"{self.path}, line {number + 1 + self.header_lines} (blank lines not counted)"

    def head(self, rows: int) -> Chunk:
        """The first `rows` rows of the chunk, or all of a shorter one."""
        count = min(rows, self.rows)
        taken = {name: column.slice(0, count) for name, column in self.columns.items()}
        return replace(self, columns=taken, rows=count)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """The column as float64 [rows], NaN where it is empty; DataError for other text."""
        arrow, compute = _pyarrow()
        column = self.columns[name]
        if arrow.types.is_string(column.type):
            column = compute.utf8_trim_whitespace(column)
        try:
            values = compute.cast(column, arrow.float64())
        except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError) as error:
            raise self._not_a_number(name, column) from error
        result: NDArray[np.float64] = values.fill_null(np.nan).to_numpy(zero_copy_only=False)
        return result

    def refuse(self, name: str, bad: NDArray[np.bool_], rule: str) -> None:
        """DataError that names the first bad row of a column, if there is one."""
        if bad.any():
            row = int(bad.argmax())
            value = self.columns[name][row].as_py()
            shown = "is empty" if value in (None, "") else f"= {value!r}"
            raise DataError(f"{self.where(row)}: column {name!r} {shown}; {rule}")

    def texts(self, name: str) -> Any:
        """The column as a pyarrow string array without nulls: an empty value is ""."""
        arrow, compute = _pyarrow()
        column = self.columns[name]
        if not arrow.types.is_string(column.type):
            column = self._cast_to_text(name, column)
        return compute.fill_null(column, "")

    def equal(self, name: str, value: str) -> NDArray[np.bool_]:
        """Where the column's text is `value`, bool [rows]."""
        _, compute = _pyarrow()
        same: NDArray[np.bool_] = compute.equal(self.texts(name), value).to_numpy(
            zero_copy_only=False
        )
        return same

    def _cast_to_text(self, name: str, column: Any) -> Any:
        arrow, compute = _pyarrow()
        try:
            return compute.cast(column, arrow.string())
        except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError) as error:
            raise DataError(
                f"{self.path}: column {name!r} of type {column.type} cannot be used as text; "
                "allowed: text, whole numbers, dates and true/false"
            ) from error

    def _not_a_number(self, name: str, column: Any) -> DataError:
        for row, value in enumerate(column.to_pylist()):
            if isinstance(value, str) and not _is_number(value):
                return DataError(
                    f"{self.where(row)}: column {name!r} = {value!r} is not a number; a missing "
                    "value is left empty"
                )
        return DataError(f"{self.path}: column {name!r} of type {column.type} is not numeric")


def _pyarrow() -> tuple[Any, Any]:
    """pyarrow and its functions on arrays, imported when a table is first read."""
    import pyarrow as arrow
    import pyarrow.compute as compute

    return arrow, compute


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text  # Python takes 1_000 for a number, pyarrow does not


def read_table(path: Path, columns: Sequence[str], layout: Layout) -> Iterator[Chunk]:
    """The named columns of one file, block by block, in the order of its rows.

    Raises DataError for a file that is missing, a folder, empty, not UTF-8 text or Parquet, ragged,
    without a row, or without one of the columns.
    """
    if find_spec("pyarrow") is None:
        raise DataError("reading a table needs pyarrow: pip install 'lowprec[data]'")
    head = _head(path)
    parts = _parquet(path, columns) if head.startswith(_PARQUET) else None
    header_lines = None
    if parts is None:
        names = layout.names or _header(path, head, layout)
        _require(path, columns, names)
        header_lines = 0 if layout.names else 1
        parts = _text(path, columns, layout)
    first = 0
    for part in parts:
        if part.num_rows:
            taken = {name: part.column(name) for name in dict.fromkeys(columns)}
            yield Chunk(path, first, taken, part.num_rows, header_lines)
            first += part.num_rows
    if not first:
        raise DataError(f"{path}: no row below the header; the file must hold labelled rows")


def _head(path: Path) -> bytes:
    """The first bytes of a file (decompressed), after checking that they can be read as a table."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a CSV or Parquet file (a list names several)")
    if not path.is_file():
        raise DataError(f"{path} does not exist; a relative path starts at the experiment's folder")
    try:
        with _opened(path) as stream:
            head: bytes = stream.read(_SNIFFED)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not head.strip():
        raise DataError(f"{path} is empty; it must hold labelled rows")
    if head.startswith(_PARQUET):
        return head
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            raise DataError(_convert(path, encoding))
    if head.count(b"\0") * 4 >= len(head):
        raise DataError(_convert(path, "UTF-16"))
    if b"\0" in head:
        at = head.index(b"\0")
        raise DataError(
            f"{path} is a binary file (a NUL byte at byte {at}); allowed: UTF-8 text or Parquet"
        )
    return head


def _convert(path: Path, encoding: str) -> str:
    return (
        f"{path} is {encoding} text; allowed: UTF-8. Convert it: "
        f"iconv -f {encoding} -t UTF-8 {path.name} > utf8-{path.name}"
    )


def _opened(path: Path) -> Any:
    """The bytes of a file, decompressed when its name says so (.gz, .bz2, .zst)."""
    import pyarrow as arrow

    return arrow.input_stream(str(path), compression="detect")


def _header(path: Path, head: bytes, layout: Layout) -> tuple[str, ...]:
    try:
        text = head.splitlines()[0].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(path, " in the header line")) from error
    names = next(csv.reader([text], delimiter=layout.delimiter), [])
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(f"{path}: two columns are named {twice[0]!r}; rename one of them")
    return tuple(names)


def _not_utf8(path: Path, where: str) -> str:
    return (
        f"{path}: not UTF-8 text{where}; allowed: UTF-8 text or Parquet. If it is Latin-1: "
        f"iconv -f LATIN1 -t UTF-8 {path.name} > utf8-{path.name}"
    )


def _require(path: Path, columns: Iterable[str], names: Sequence[str]) -> None:
    for column in columns:
        if column not in names:
            close = difflib.get_close_matches(column, names, n=3, cutoff=0.5)
            nearest = f"nearest: {', '.join(close)}" if close else f"has: {', '.join(names[:20])}"
            if len(names) == 1:
                nearest = f"its only column is {names[0]!r}: is `delimiter` right?"
            raise DataError(f"{path}: no column {column!r}; {nearest}")


def _text(path: Path, columns: Sequence[str], layout: Layout) -> Iterator[Any]:
    import pyarrow as arrow
    import pyarrow.csv as reader

    needed = list(dict.fromkeys(columns))
    try:
        with _opened(path) as stream:
            yield from reader.open_csv(
                stream,
                # One thread: only then does an error know its line.
                read_options=reader.ReadOptions(
                    use_threads=False, block_size=BLOCK_BYTES, column_names=layout.names or None
                ),
                parse_options=reader.ParseOptions(delimiter=layout.delimiter),
                convert_options=reader.ConvertOptions(
                    include_columns=needed,
                    column_types=dict.fromkeys(needed, arrow.string()),
                    strings_can_be_null=True,
                    null_values=[""],
                ),
            )
    except (arrow.ArrowInvalid, OSError) as error:
        raise DataError(_explained(path, str(error))) from error


def _explained(path: Path, message: str) -> str:
    """pyarrow's message about a text file in terms of what its owner can do."""
    ragged = re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", message)
    if ragged:
        line, expected, found = ragged.groups()
        return (
            f"{path}, line {line} (blank lines not counted): {found} values where {expected} are "
            "expected; repair the line (a delimiter inside a value needs quotes around the value)"
        )
    if "invalid UTF8" in message:
        found_line = re.search(r"Row #(\d+)", message)
        return _not_utf8(path, f" in line {found_line[1]}" if found_line else "")
    if "cannot infer number of columns" in message or "Empty CSV" in message:
        return f"{path}: no row below the header; the file must hold labelled rows"
    if "straddl" in message:
        return (
            f"{path}: a row is longer than {BLOCK_BYTES >> 20} MiB; an opening quote without a "
            "closing one, or not a table of this delimiter"
        )
    return f"{path} cannot be read: {message}"


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    needed = list(dict.fromkeys(columns))
    try:
        # Without pre-buffering a row group is decoded as it is consumed, whatever its size.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            _require(path, needed, file.schema_arrow.names)
            yield from file.iter_batches(batch_size=BATCH_ROWS, columns=needed)
    except (arrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: damaged Parquet file: {error}") from error
