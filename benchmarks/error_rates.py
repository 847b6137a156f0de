"""The full-size simulations behind docs/statistics.md; writes docs/records/error-rates.jsonl.

    PYTHONPATH=. python benchmarks/error_rates.py [PART ...]

They are the checks of the tests at a larger size, through the code that judges real gates. Every
part replaces its own lines of the record as soon as it is done, and only when its checks hold.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import scipy

from qualitygates.records import write_text_atomic
from tests.gates import test_error_rates as rates
from tests.gates import test_sequence as sequence
from tests.gates import test_slice_error_rates as slices

RECORD = Path(__file__).parent.parent / "docs" / "records" / "error-rates.jsonl"

Part = tuple[Callable[[], None], list[dict[str, Any]], int]
# The checks of a part, where they report, and the replications behind each line.
PARTS: dict[str, Part] = {
    **{
        name: (partial(check, reps), rates.REPORTED, reps)
        for name, (check, reps) in rates.FULL_SIZE.items()
    },
    "slices": (partial(slices.check_slices, slices.FULL), slices.REPORTED, slices.FULL),
    "sequence": (partial(sequence.check_aborts, sequence.FULL), sequence.REPORTED, sequence.FULL),
}


def main(names: list[str]) -> None:
    for name in names or list(PARTS):
        check, reported, replications = PARTS[name]
        reported.clear()
        check()
        replace(name, reported, replications)


def replace(part: str, reported: list[dict[str, Any]], replications: int) -> None:
    """Write the lines of a part in place of those that it wrote before."""
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
    }
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []
    kept = [line for line in lines if json.loads(line).get("part") != part]
    shared = {"part": part, "replications": replications}
    new = [json.dumps({**shared, **one, **facts}) for one in reported]
    write_text_atomic(RECORD, "\n".join([*kept, *new]) + "\n")
    print(f"{part}: {len(new)} lines in {RECORD}")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main(sys.argv[1:])
