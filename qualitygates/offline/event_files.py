"""TensorBoard event files -> scalars, each record checked; a torn end is where the writer died."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final

from ..errors import DataError, GateError

# Images and histograms may be large and are skipped; a scalar is a hundred bytes.
_LARGEST: Final = 1 << 20


def scalars(path: Path, *, label: str) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value) of every scalar in an event file, or in the event files of a folder.

    Files of a folder come in the order of their names, which begin with their times. Raises
    DataError for a damaged file, GateError without the tensorboard package.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as error:
        raise GateError(
            "reading event files needs tensorboard, which is not installed: "
            "pip install 'lowprec[tensorboard]'"
        ) from error
    files = [path]
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if "tfevents" in one.name)
    if not files:
        raise DataError(f"{label}: no event file (*tfevents*) in this folder")
    for file in files:
        try:
            with file.open("rb") as stream:
                for record in _records(stream, label=f"{label} ({file.name})"):
                    yield from _values(Event, record, label=label)
        except OSError as error:
            raise DataError(f"{label}: cannot be read: {error.strerror or error}") from error


def _records(stream: BinaryIO, *, label: str) -> Iterator[bytes]:
    while len(head := stream.read(12)) == 12:
        length, check = struct.unpack("<QI", head)
        if _masked_crc(head[:8]) != check:
            raise DataError(f"{label}: not an event file, or damaged at byte {stream.tell() - 12}")
        if length > _LARGEST:
            stream.seek(length + 4, 1)
            continue
        record, end = stream.read(length), stream.read(4)
        if len(end) < 4:
            return
        if _masked_crc(record) != struct.unpack("<I", end)[0]:
            raise DataError(f"{label}: damaged at byte {stream.tell() - length - 4}")
        yield record


def _values(event: Any, record: bytes, *, label: str) -> Iterator[tuple[str, int, float]]:
    from google.protobuf.message import DecodeError
    from tensorboard.util import tensor_util

    try:
        found = event.FromString(record)
    except DecodeError as error:
        raise DataError(f"{label}: holds a record that is no event") from error
    for value in found.summary.value:
        kind = value.WhichOneof("value")
        if kind == "simple_value":
            yield value.tag, found.step, float(value.simple_value)
        elif kind == "tensor" and not value.tensor.string_val:
            array = tensor_util.make_ndarray(value.tensor)
            if array.size == 1 and array.dtype.kind in "fiu":
                yield value.tag, found.step, float(array.reshape(-1)[0])


@cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


def _masked_crc(data: bytes) -> int:
    """CRC-32C as TFRecord files mask it (tensorflow/core/lib/hash/crc32c.h)."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
