"""The examples that all runs of one evaluation share, and the logits of each run on them.

With an id column the rows of a run are joined by it, in whatever order they were written; without
one they pair by their place in the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, RecordError
from .predictions import RunKey
from .spill import Spill

Array = NDArray[Any]
Ints = NDArray[np.int64]

ID: Final = "key:id"
USER: Final = "key:user"
MAX_SLICES: Final = 64
# How a value of a field is shown in a message.
Speller = Callable[[str, Any], str]


@dataclass(frozen=True)
class Shared:
    """Labels, weights, clusters, groups and slices [N] of an evaluation; `order` sorts rows by id.

    `run` is the baseline run that they were taken from, `digest` a hash of all of them.
    """

    run: RunKey
    order: Ints | None
    labels: Array
    weights: Array
    clusters: dict[str, Ints]
    groups: Ints | None
    slices: dict[str, NDArray[np.bool_]]
    digest: str


def shared_examples(
    spill: Spill,
    run: RunKey,
    *,
    clusters: tuple[str, ...],
    buckets: int,
    vocabularies: Mapping[str, Mapping[str, int]],
    spell: Speller,
) -> Shared:
    """What `run` says about the examples; raises RecordError for an id that occurs twice."""
    order = None
    if ID in spill.fields:
        ids = spill.column(run, ID)
        order = _sorted_ids(ids, run, spell)

    def column(name: str) -> Array:
        values = spill.column(run, name)
        return values if order is None else values[order]

    labels = column("label")
    weights = column("weight") if "weight" in spill.fields else np.ones(len(labels))
    slices = _slices(spill, column, vocabularies)
    return Shared(
        run=run,
        order=order,
        labels=labels,
        weights=weights,
        clusters={name: dense(column(f"key:{name}"), buckets=buckets) for name in clusters},
        groups=dense(column(USER)) if USER in spill.fields else None,
        slices=slices,
        digest=_digest(spill, column, slices),
    )


def aligned_logits(spill: Spill, shared: Shared, run: RunKey, *, spell: Speller) -> Array:
    """The logits [N] of a run in the order of the shared examples.

    Raises RecordError with the first difference when the run's examples are not those.
    """
    order, same = shared.order, True
    if ID in spill.fields and run != shared.run:
        order, same = _joined(spill, shared, run, spell)
    elif spill.rows[run] != spill.rows[shared.run]:
        raise RecordError(
            f"{_name(run)}: {spill.rows[run]} rows, {_name(shared.run)} has "
            f"{spill.rows[shared.run]}; both must be evaluated on the same examples"
        )
    if run != shared.run:
        for name in spill.fields:
            if name not in (ID, "logit"):
                _same_field(spill, shared, run, name, order=None if same else order, spell=spell)
    logits = spill.column(run, "logit")
    return logits if order is None else logits[order]


def dense(keys: Ints, *, buckets: int | None = None) -> Ints:
    """Keys as ids 0 .. U-1 in sorted order; more than `buckets` keys are first hashed into so many.

    A whole cluster falls into one bucket, so the variance stays cluster-robust, with fewer degrees
    of freedom and a record that does not grow with the number of users.
    """
    distinct, inverse = np.unique(keys, return_inverse=True)
    if buckets is None or len(distinct) <= buckets:
        return inverse.astype(np.int64, copy=False)
    bucket = (_mixed(distinct) % np.uint64(buckets)).astype(np.int64)
    return np.unique(bucket, return_inverse=True)[1].astype(np.int64)[inverse]


def _mixed(keys: Ints) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele et al. 2014): a bijection that scatters small numbers."""
    x = keys.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def _slices(
    spill: Spill, column: Callable[[str], Array], vocabularies: Mapping[str, Mapping[str, int]]
) -> dict[str, NDArray[np.bool_]]:
    found: dict[str, NDArray[np.bool_]] = {}
    for field in spill.fields:
        kind, _, name = field.partition(":")
        if kind == "flag":
            found[name] = column(field)
        elif kind == "category":
            codes = column(field)
            for text, code in sorted(vocabularies[name].items()):
                mask = codes == code
                if mask.any():
                    found[f"{name}={text}"] = mask
    if len(found) > MAX_SLICES:
        raise DataError(
            f"{len(found)} slices; a gate judges at most {MAX_SLICES}: merge the rare values"
        )
    return found


def _digest(
    spill: Spill, column: Callable[[str], Array], slices: Mapping[str, NDArray[np.bool_]]
) -> str:
    digest = hashlib.sha256()
    for field in spill.fields:
        if field != "logit" and not field.startswith(("flag:", "category:")):
            digest.update(field.encode() + b"\0" + np.ascontiguousarray(column(field)).tobytes())
    for name, mask in sorted(slices.items()):
        digest.update(name.encode() + b"\0" + np.packbits(mask).tobytes())
    return digest.hexdigest()


def _sorted_ids(ids: Ints, run: RunKey, spell: Speller) -> Ints:
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    if again.size:
        first, second = order[again[0]], order[again[0] + 1]
        raise RecordError(
            f"{_name(run)}: id {spell(ID, ids[first])} is there twice (its rows {first + 1} and "
            f"{second + 1}); an example counts once in a run"
        )
    return order


def _joined(spill: Spill, shared: Shared, run: RunKey, spell: Speller) -> tuple[Ints | None, bool]:
    """The order that sorts the run's rows by id, and whether it is the reference's own."""
    ours, theirs = spill.column(shared.run, ID), spill.column(run, ID)
    if np.array_equal(ours, theirs):
        return shared.order, True
    order = _sorted_ids(theirs, run, spell)
    ours, theirs = ours[shared.order], theirs[order]
    both = min(len(ours), len(theirs))
    if len(ours) == len(theirs) and np.array_equal(ours, theirs):
        return order, False
    differ = np.flatnonzero(ours[:both] != theirs[:both])
    at = int(differ[0]) if differ.size else both
    lacks = at == len(theirs) or (at < len(ours) and ours[at] < theirs[at])
    which = spell(ID, ours[at] if lacks else theirs[at])
    here, there = (run, shared.run) if lacks else (shared.run, run)
    raise RecordError(
        f"{_name(here)}: no example with id {which}, which {_name(there)} has ({len(theirs)} rows "
        f"against {len(ours)}); both must be evaluated on the same examples"
    )


def _same_field(
    spill: Spill,
    shared: Shared,
    run: RunKey,
    name: str,
    *,
    order: Ints | None,
    spell: Speller,
) -> None:
    """Raise RecordError at the first example whose field differs; `order` sorts the run's rows
    when they were written in another order than the reference's.
    """
    if order is not None:
        ours = spill.column(shared.run, name)[shared.order]
        pairs = [(ours, spill.column(run, name)[order])]
    else:
        pairs = []
    start = 0
    blocks = zip(spill.blocks(shared.run, name), spill.blocks(run, name), strict=True)
    for ours, theirs in pairs or blocks:
        differ = np.flatnonzero(ours != theirs)
        if differ.size:
            at = int(differ[0])
            where = _place(spill, run, start + at, order, spell)
            raise RecordError(
                f"{_name(run)}, {where}: {name.partition(':')[2] or name} is "
                f"{spell(name, theirs[at])}, in {_name(shared.run)} it is {spell(name, ours[at])} "
                "(the first difference); both must be evaluated on the same examples, labels and "
                "weights"
            )
        start += len(ours)


def _place(spill: Spill, run: RunKey, at: int, order: Ints | None, spell: Speller) -> str:
    row = at if order is None else int(order[at])
    if ID not in spill.fields:
        return f"row {row + 1}"
    return f"id {spell(ID, spill.column(run, ID)[row])}"


def _name(run: RunKey) -> str:
    return f"{run[0]} seed {run[1]} ({run[2]})"
