"""Cluster keys and slices: buckets, blocks, deciles."""

from __future__ import annotations

import numpy as np
import pytest

from qualitygates.errors import DataError
from qualitygates.grouping import BUCKETS, blocks, crossed, hash_buckets, score_deciles


def test_buckets_keep_equal_keys_together_and_spread_the_others() -> None:
    keys = np.repeat(np.arange(100_000, dtype=np.int64) * 4096, 2)
    found = hash_buckets(keys)
    assert found.min() == 0
    assert found.max() == BUCKETS - 1
    assert (found[::2] == found[1::2]).all()
    # 100,000 keys into 4,096 buckets: 24.4 a bucket, sd 4.9; `key % 4096` would use one bucket.
    counts = np.bincount(found[::2], minlength=BUCKETS)
    assert counts.max() < 24.4 + 6 * 4.9
    assert counts.std() == pytest.approx(4.94, rel=0.1)


def test_negative_and_extreme_keys_have_a_bucket() -> None:
    keys = np.array([-1, -(2**63), 2**63 - 1, 0], np.int64)
    assert ((hash_buckets(keys, buckets=7) >= 0) & (hash_buckets(keys, buckets=7) < 7)).all()


def test_a_block_is_a_combination_and_its_order_matters() -> None:
    day = np.repeat(np.arange(30), 100)
    user = np.tile(np.arange(100), 30)
    found = blocks([day, user])
    assert len(np.unique(found)) == 3000
    assert not np.array_equal(found, blocks([user, day]))
    again = blocks([np.array([3, 3]), np.array([7, 7])])
    assert again[0] == again[1] == found[3 * 100 + 7]
    with pytest.raises(DataError, match="no column given"):
        blocks([])


def test_the_name_of_a_block_lists_its_columns() -> None:
    assert crossed("day x user") == ("day", "user")
    assert crossed("user") == ("user",)
    assert crossed("tax") == ("tax",)


def test_deciles_are_tenths_of_the_given_score_and_ties_stay_together() -> None:
    score = np.random.default_rng(0).permutation(1000) / 7.0
    found = score_deciles(score)
    assert list(found) == [f"score decile {i}" for i in range(1, 11)]
    assert [int(mask.sum()) for mask in found.values()] == [100] * 10
    assert score[found["score decile 1"]].max() < score[found["score decile 2"]].min()
    tied = score_deciles(np.repeat([1.0, 2.0], 500))
    assert tied["score decile 1"].sum() == 500
    assert sum(int(mask.sum()) for mask in tied.values()) == 1000
    with pytest.raises(DataError, match="must be finite"):
        score_deciles([1.0, np.nan])
