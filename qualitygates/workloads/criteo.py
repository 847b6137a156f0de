"""criteo: the layout of the Criteo click logs, streamed in bounded memory.

Tab-separated lines without header: label, 13 integers, 26 hashed categoricals; missing values are
empty. The data name no user, so the evaluation rows, which are in order of time, are cut into
blocks of consecutive rows, and those are the clusters.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from ..errors import DataError, ExperimentError
from .features import Schema
from .labelled import Files, Judged, LabelledRows, hold_out
from .options import check_whole, names, paths
from .tables import Layout

INTEGERS: Final = tuple(f"I{number}" for number in range(1, 14))
CATEGORICALS: Final = tuple(f"C{number}" for number in range(1, 27))
LAYOUT: Final = Layout(delimiter="\t", names=("label", *INTEGERS, *CATEGORICALS))
BLOCKS: Final = 256
SHUFFLE_ROWS: Final = 65_536


def build(
    *,
    folder: Path,
    train: str | list[str],
    evaluate: str | list[str],
    evaluation_rows: int = 200_000,
    buckets: int = 8192,
    clusters: list[str] | tuple[str, ...] = (),
) -> LabelledRows:
    """The workload; `clusters` adds clusterings by categorical columns (C1 to C26) to the blocks.

    Raises DataError for files of another layout and for fewer evaluation rows than blocks.
    """
    check_whole(
        "criteo", evaluation_rows=(evaluation_rows, BLOCKS, 5_000_000), buckets=(buckets, 2, 10**7)
    )
    added = names("criteo", "clusters", clusters)
    for name in added:
        if name not in CATEGORICALS:
            raise ExperimentError(f"workload criteo: clusters names {name!r}; allowed: C1 to C26")
    files = Files(
        paths("criteo", "train", train, folder=folder),
        paths("criteo", "evaluate", evaluate, folder=folder),
        LAYOUT,
    )
    schema = Schema(
        label="label",
        weight=None,
        dense=INTEGERS,
        log=INTEGERS,
        categorical=CATEGORICALS,
        history=None,
        separator=" ",
        history_length=1,
        buckets=buckets,
        clip_negative=True,
    )
    held_out = hold_out(files, schema, Judged(added, None, ()), most=evaluation_rows)
    rows = len(held_out.rows)
    if rows < BLOCKS:
        raise DataError(
            f"{files.evaluate[0]}: {rows} evaluation rows; the clusters are {BLOCKS} blocks of "
            "consecutive rows, so at least as many rows are needed"
        )
    blocks = np.arange(rows) * BLOCKS // rows
    held_out = replace(held_out, clusters={"block of rows": blocks, **held_out.clusters})
    return LabelledRows("criteo", files, schema, held_out=held_out, shuffle_rows=SHUFFLE_ROWS)
