"""Records of a sweep on disk: sealed, written whole or not at all, of a kind that no gate reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import RecordError
from ..records import content_hash, seal, write_json_atomic

Record = dict[str, Any]
KINDS: Final = ("sweep-screen", "sweep-branch")
SCHEMA: Final = 1


class SweepStore:
    """The folder of a sweep: one file a screen or branch result, named by the hash of its inputs.

    Nothing here is a run record: `judge` reads files of kind "run" only and refuses these.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, kind: str, key: str) -> Path:
        """Where the result with these inputs is kept."""
        return self.folder / "measured" / f"{kind}-{key[:24]}.json"

    def save(self, kind: str, inputs: Mapping[str, Any], result: Mapping[str, Any]) -> Record:
        """Seal and write one result; returns it as it will be read."""
        key = content_hash(inputs)
        record = seal(
            {"schema": SCHEMA, "kind": kind, "key": key, "inputs": inputs, "result": result}
        )
        write_json_atomic(self.path(kind, key), record)
        return record

    def load(self, kind: str, inputs: Mapping[str, Any]) -> Record | None:
        """The result with these inputs, None when there is none; a damaged one is set aside."""
        key = content_hash(inputs)
        path = self.path(kind, key)
        if not path.exists():
            return None
        try:
            record: Record = json.loads(path.read_text(encoding="utf-8"))
            whole = seal(record)["checksum"] == record["checksum"] and record["kind"] == kind
            if whole and record["key"] == key == content_hash(record["inputs"]):
                return record
        except (OSError, ValueError, KeyError, TypeError, RecordError):
            pass
        try:
            path.replace(path.with_name(path.name + ".damaged"))
        except OSError as error:
            raise RecordError(f"{path}: damaged, and cannot be set aside: {error}") from error
        return None
