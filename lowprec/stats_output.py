"""Where statistics go: a file of JSON lines, TensorBoard."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from lowprec.errors import UnsupportedError
from lowprec.operand_stats import OperandStats

SCHEMA: Final = 1
_OWN: Final = ("amax", "mean_square", "rms", "nonfinite", "sqnr_db", "underflow", "saturation")
_SCALES: Final = ("scale_min", "scale_max", "scales_distinct", "nonfinite_blocks")
_LOSS: Final = ("sqnr_db", "underflow", "saturation")


class Output(Protocol):
    """Takes samples as they are made."""

    def write(self, layer: str, product: str, operand: str, stats: OperandStats) -> None:
        """One sample of one operand."""

    def close(self) -> None:
        """Flush and let go."""


class JsonLines:
    """Append samples to a file, each as one whole line in one write.

    An existing file of statistics is continued: a new header line, then new samples; a last line
    that a full disk cut short is removed. Raises UnsupportedError for a file that holds anything
    else and for one that cannot be written.
    """

    def __init__(self, path: str, facts: Mapping[str, Any]) -> None:
        try:
            self._file = _open(Path(path))
            self._line({"kind": "header", "schema": SCHEMA, **_environment(), **facts})
        except OSError as error:
            raise UnsupportedError(
                f"watch: {path} cannot be written: {error.strerror or error}; give a file in a "
                "folder that exists"
            ) from error

    def write(self, layer: str, product: str, operand: str, stats: OperandStats) -> None:
        """Append one line."""
        what_if = {
            cast: {name: getattr(loss, name) for name in _LOSS}
            for cast, loss in stats.what_if.items()
        }
        place = {"layer": layer, "product": product, "operand": operand}
        numbers = {name: getattr(stats, name) for name in (*_OWN, *_SCALES)}
        about = {"step": stats.step, "call": stats.call, "cast": stats.cast}
        self._line(
            {"kind": "sample", **about, **place, "elements": stats.elements}
            | numbers
            | {"what_if": what_if}
        )

    def _line(self, content: Mapping[str, Any]) -> None:
        line = json.dumps(_plain(content), allow_nan=False).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError("only a part of a line could be written")

    def close(self) -> None:
        """Close the file; every line is in it already."""
        self._file.close()


def _open(path: Path) -> Any:
    """The file, unbuffered, at its end; checked to be one of ours when it has content."""
    if path.is_file() and path.stat().st_size:
        with path.open("r+b") as file:
            if not _is_header(file.readline()):
                raise UnsupportedError(
                    f"watch: {path} exists and does not start with a header of schema {SCHEMA}; "
                    "statistics are only ever appended to a file of statistics, so give another "
                    "path"
                )
            content = b"\n" + file.read()
            whole = content.rfind(b"\n") + 1
            file.truncate(path.stat().st_size - (len(content) - whole))
    return path.open("ab", buffering=0)


def _is_header(line: bytes) -> bool:
    try:
        header = json.loads(line)
    except ValueError:
        return False
    found = isinstance(header, dict) and header.get("kind") == "header"
    return found and header.get("schema") == SCHEMA and line.endswith(b"\n")


def _environment() -> dict[str, Any]:
    from importlib import metadata

    try:
        version: str | None = metadata.version("lowprec")
    except metadata.PackageNotFoundError:  # run from its source
        version = None
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"lowprec": version, **versions, "time": now}


def _plain(value: Any) -> Any:
    """The value without what JSON has no word for: NaN and infinities become null."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Write samples as scalars under LAYER/PRODUCT/OPERAND/STATISTIC.

    `target` is a folder, for a writer of our own, or a writer (anything with add_scalar), which
    stays open. What-if statistics are under LAYER/PRODUCT/OPERAND/CAST/STATISTIC; undefined and
    infinite ones are left out. Raises UnsupportedError when TensorBoard is not installed.
    """

    def __init__(self, target: Any) -> None:
        self._own = not hasattr(target, "add_scalar")
        self._writer = _writer(target) if self._own else target

    def write(self, layer: str, product: str, operand: str, stats: OperandStats) -> None:
        """Add the scalars of one sample."""
        tag = f"{layer}/{product}/{operand}"
        for name in (*_OWN, *_SCALES):
            self._scalar(f"{tag}/{name}", getattr(stats, name), stats.step)
        for cast, loss in stats.what_if.items():
            for name in _LOSS:
                self._scalar(f"{tag}/{cast}/{name}", getattr(loss, name), stats.step)

    def _scalar(self, tag: str, value: float | None, step: int) -> None:
        if value is not None and math.isfinite(value):
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Close the writer when it is our own, else flush it."""
        if self._own:
            self._writer.close()
        elif hasattr(self._writer, "flush"):
            self._writer.flush()


def _writer(target: Any) -> Any:
    if not isinstance(target, (str, os.PathLike)):
        raise UnsupportedError(
            f"watch: tensorboard={target!r} is neither a folder nor a writer with add_scalar"
        )
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UnsupportedError(
            "watch: writing for TensorBoard needs the tensorboard package: "
            "pip install 'lowprec[tensorboard]'"
        ) from error
    return SummaryWriter(os.fspath(target))
