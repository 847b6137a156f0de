"""Arrow columns of a prediction file -> NumPy arrays of one canonical form, whatever the file type.

A key (user, id, day) becomes int64: a whole number that fits stays itself, as a number or as its
decimal text; any other text becomes 64 bits of its BLAKE2b hash. So arms may come from files of
different types and still pair.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..tables import is_line

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_VALUES: Final = 64
_WHOLE: Final = r"^(0|-?[1-9][0-9]{0,17})$"
# Ids of 19 digits may or may not fit 64 bits with sign, so they are read one by one.
_LONG: Final = re.compile(rb"-?[1-9][0-9]{18}")
_FLAGS: Final = {"true": True, "false": False, "1": True, "0": False}
# An id column given as the arm by mistake would otherwise make a million arms.
_MOST_NAMES: Final = 1000


class ColumnError(DataError):
    """A column that cannot be used; `row` is the first such row of the batch, when there is one."""

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.row = row


def floats(array: Any) -> Floats:
    """Numbers as float64 [N]; a missing value is NaN. Raises ColumnError for other types."""
    import pyarrow as pa

    array = _plain(array)
    kind = array.type
    if pa.types.is_null(kind):
        return np.full(len(array), np.nan)
    if pa.types.is_float16(kind):
        raise ColumnError(
            "holds float16; metrics need float32 or float64: cast before the last rounding"
        )
    if pa.types.is_boolean(kind):
        array = array.cast(pa.uint8())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ColumnError(f"holds {kind}, not numbers")
    values = array.cast(pa.float64()).to_numpy(zero_copy_only=False)
    # Arrow's buffers are read-only, and a batch must not live as long as one of its columns.
    return np.array(values, np.float64)


def numbers(array: Any, *, low: float, high: float, what: str) -> Floats:
    """float64 [N] without missing values, all in [low, high]; raises ColumnError with the row."""
    values = floats(array)
    bad = ~((values >= low) & (values <= high) & np.isfinite(values))
    if bad.any():
        row = int(np.argmax(bad))
        raise ColumnError(f"is {values[row]:g}, but {what}", row)
    return values


def logits_of_probabilities(array: Any) -> Floats:
    """log(p / (1 - p)) in float64 [N]; NaN stays NaN. Raises ColumnError outside (0, 1)."""
    values = floats(array)
    bad = (values <= 0) | (values >= 1)
    if bad.any():
        row = int(np.argmax(bad))
        raise ColumnError(
            f"is {values[row]:g}, which has no logit; a sigmoid in low precision saturates: write "
            "logits instead of probabilities",
            row,
        )
    return np.asarray(np.log(values) - np.log1p(-values), np.float64)


def keys(array: Any) -> Ints:
    """Ids as int64 [N] in canonical form; raises ColumnError for missing or fractional ones."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_dictionary(kind):
        _no_missing(array)
        return _taken(keys(array.dictionary), array)
    if pa.types.is_integer(kind):
        _no_missing(array)
        if pa.types.is_uint64(kind):
            return keys(array.cast(pa.string()))
        return np.array(array.cast(pa.int64()).to_numpy(zero_copy_only=False), np.int64)
    if pa.types.is_floating(kind):
        return _whole_floats(array)
    if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        _no_missing(array)
        return _hashed(array.to_pylist())
    if _is_text(kind):
        encoded = array.dictionary_encode()
        _no_missing(encoded)
        return _taken(_text_keys(encoded.dictionary), encoded)
    if pa.types.is_temporal(kind) or pa.types.is_boolean(kind):
        return keys(array.cast(pa.string()))
    raise ColumnError(f"holds {kind}; an id is a whole number or text")


def flags(array: Any) -> NDArray[np.bool_]:
    """true/false or 1/0, also as text, as bool [N]; raises ColumnError for anything else."""
    values, codes = names(array)
    lookup = np.zeros(max(1, len(values)), np.bool_)
    for index, value in enumerate(values):
        text = str(value).lower()
        if text not in _FLAGS:
            row = int(np.argmax(codes == index))
            raise ColumnError(f"is {value!r:.60}; a flag is true or false, 1 or 0", row)
        lookup[index] = _FLAGS[text]
    return lookup[codes]


def categories(array: Any, vocabulary: dict[str, int]) -> NDArray[np.int32]:
    """Codes [N] of the values as text; new values are added to `vocabulary`."""
    values, codes = names(array)
    lookup = np.zeros(max(1, len(values)), np.int32)
    for index, value in enumerate(values):
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if not is_line(text) or len(text) > 100:
            row = int(np.argmax(codes == index))
            raise ColumnError(
                f"is {text!r:.60}; the value of a slice is a printable line of at most 100 "
                "characters",
                row,
            )
        lookup[index] = vocabulary.setdefault(text, len(vocabulary))
    if len(vocabulary) > MAX_VALUES:
        raise ColumnError(
            f"has more than {MAX_VALUES} values; merge the rare ones into one value of your own"
        )
    return lookup[codes]


def names(array: Any) -> tuple[list[Any], Ints]:
    """The distinct values of a column of few values, and their indices [N]; none is missing."""
    import pyarrow as pa

    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    _no_missing(array)
    if len(array.dictionary) > _MOST_NAMES:
        raise ColumnError(f"has {len(array.dictionary)} different values in one batch of rows")
    codes = array.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return array.dictionary.to_pylist(), codes


def mapped(array: Any, known: Mapping[Any, int], *, read: Callable[[Any], Any]) -> Ints:
    """Codes [N] of a column whose values `known` lists; raises ColumnError with the row."""
    values, codes = names(array)
    lookup = np.zeros(max(1, len(values)), np.int64)
    for index, value in enumerate(values):
        code = known.get(read(value))
        if code is None:
            allowed = ", ".join(map(str, known))
            raise ColumnError(
                f"is {value!r:.60}; the gate knows: {allowed}", int(np.argmax(codes == index))
            )
        lookup[index] = code
    return lookup[codes]


def _taken(values: Ints, array: Any) -> Ints:
    codes: Ints = array.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return values[codes]


def _plain(array: Any) -> Any:
    import pyarrow as pa

    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _no_missing(array: Any) -> None:
    if array.null_count:
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise ColumnError("is missing", row)


def _whole_floats(array: Any) -> Ints:
    values = floats(array)
    bad = ~(np.abs(values) < 2**53) | (values != np.floor(values))
    if bad.any():
        row = int(np.argmax(bad))
        raise ColumnError(f"is {values[row]:g}; an id is a whole number or text", row)
    return values.astype(np.int64)


def _text_keys(values: Any) -> Ints:
    import pyarrow as pa
    import pyarrow.compute as pc

    found = np.empty(len(values), np.int64)
    whole = pc.match_substring_regex(values, _WHOLE)
    mask = whole.to_numpy(zero_copy_only=False).astype(np.bool_)
    found[mask] = values.filter(whole).cast(pa.int64()).to_numpy(zero_copy_only=False)
    if not mask.all():
        found[~mask] = _hashed(values.filter(pc.invert(whole)).cast(pa.binary()).to_pylist())
    return found


def _hashed(values: list[bytes]) -> Ints:
    return np.fromiter(map(_key_of_text, values), np.int64, len(values))


def _key_of_text(value: bytes) -> int:
    if _LONG.fullmatch(value) and -(1 << 63) <= (whole := int(value)) < 1 << 63:
        return whole
    return int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little", signed=True)
