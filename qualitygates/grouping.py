"""Cluster keys and slices of a fixed number, however many users, days or scores there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import DataError

BUCKETS: Final = 4096
CROSS: Final = " x "
Ints = NDArray[np.int64]


def hash_buckets(keys: ArrayLike, *, buckets: int = BUCKETS) -> Ints:
    """int64 keys [N] (user ids) to buckets 0 .. buckets-1 by a 64-bit mix.

    Rows of one key share a bucket, so a bucket is a cluster as good as the key itself as long as
    there are many more keys than buckets, or fewer.
    """
    return (_mixed(np.asarray(keys, np.int64)) % np.uint64(buckets)).astype(np.int64)


def blocks(columns: Sequence[ArrayLike]) -> Ints:
    """One int64 key [N] for each combination of the columns' keys, such as day x user.

    The cluster to use where days share shocks and users do too; cut it with `hash_buckets`.
    """
    if not columns:
        raise DataError("blocks: no column given; name two or more, such as day and user")
    mixed = np.zeros(np.shape(columns[0]), np.uint64)
    for column in columns:
        mixed = _mixed((mixed ^ np.asarray(column, np.int64).view(np.uint64)).view(np.int64))
    return mixed.view(np.int64)


def crossed(name: str) -> tuple[str, ...]:
    """The columns of a clustering: "day x user" is ("day", "user"), "user" is ("user",)."""
    return tuple(part.strip() for part in name.split(CROSS))


def score_deciles(scores: ArrayLike, *, parts: int = 10) -> dict[str, NDArray[np.bool_]]:
    """Slices [N] by tenths of the *baseline's* score, lowest first; equal scores stay together.

    Both arms must be cut by the same score: a candidate's own would move rows between the slices.
    """
    values = np.asarray(scores, np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise DataError("score deciles: the baseline's scores must be finite, one a row")
    edges = np.quantile(values, np.arange(1, parts) / parts, method="inverted_cdf")
    part = np.searchsorted(edges, values, side="left")
    return {f"score decile {index + 1}": part == index for index in range(parts)}


def _mixed(keys: Ints) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): neighbouring ids land far apart."""
    x = keys.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
