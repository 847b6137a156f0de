"""Random bits that depend on who asks and when, never on how: Philox 4x32-10, counter-based.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011). One call gives 128
bits for 16 neighbouring elements. Each element has a whole uniform 32-bit word: word (i // 4) % 4
of the call, rotated right by 8 (i % 4) bits. Four elements that share a word thus have disjoint
leading bytes, so that their roundings are independent up to 2^-8.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch

from lowprec.errors import UnsupportedError

ROUNDS: Final = 10
ELEMENTS_PER_CALL: Final = 16
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_MASK: Final = 0xFFFFFFFF
_CALLS_AT_ONCE: Final = 1 << 16  # on a CPU: what fits its cache


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Four 32-bit words from a counter of four and a key of two, least significant word first.

    Words are Python integers or int64 tensors in 0 .. 2^32 - 1; results are of the same kind.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product of two words fills 64 bits: as int64 it wraps, and its bits stay right.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = _mixed(second, c1, k0), _mixed(first, c3, k1)
        c1, c3 = second, first  # only the low words count until the end
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def _mixed(product: Any, word: Any, key: int) -> Any:
    """High word of `product` xor the low word of `word` xor `key`."""
    high = product >> 32
    high ^= word  # in place for tensors, as below: fresh memory costs more than the arithmetic
    high ^= key
    high &= _MASK
    return high


@dataclass(frozen=True)
class RandomStream:
    """The random words of one cast: by seed, layer, role (product and operand), step, micro-batch.

    `first_row` is the index of the tensor's first row in the whole batch, so that a rank that holds
    rows 512 .. 1023 rounds them with the bits that one process holding all rows would use. Raises
    UnsupportedError for numbers outside 0 .. 2^32 - 1 (seed: 0 .. 2^64 - 1).
    """

    seed: int
    layer: str = ""
    role: str = ""
    step: int = 0
    micro_batch: int = 0
    first_row: int = 0

    def __post_init__(self) -> None:
        limits = {"seed": 64, "step": 32, "micro_batch": 32, "first_row": 48}
        for name, bits in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 1 << bits:
                raise UnsupportedError(
                    f"random bits: {name} must be an integer from 0 to 2^{bits} - 1, not {value!r}"
                )

    @cached_property
    def key(self) -> tuple[int, int]:
        """The Philox key of this stream: itself a Philox word pair, so that streams differ."""
        digest = hashlib.sha256(f"{self.layer}\0{self.role}".encode()).digest()
        who = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
        words = philox((self.step, self.micro_batch, *who), (self.seed & _MASK, self.seed >> 32))
        return words[0], words[1]

    def words(self, rows: int, columns: int, *, device: torch.device) -> torch.Tensor:
        """Uniform 32-bit words, int32 [rows, columns], one for each element of a matrix.

        The word of an element depends on the stream and on (first_row + row) x columns + column.
        """
        start, skip = divmod(self.first_row * columns, ELEMENTS_PER_CALL)
        calls = -(-(skip + rows * columns) // ELEMENTS_PER_CALL)
        out = torch.empty((calls, 4, 4), dtype=torch.int32, device=device)
        at_once = _CALLS_AT_ONCE if device.type == "cpu" else max(calls, 1)
        for done in range(0, calls, at_once):
            part = out[done : done + at_once]
            first = start + done
            index = torch.arange(first, first + len(part), dtype=torch.int64, device=device)
            for place, word in enumerate(philox((index & _MASK, index >> 32, 0, 0), self.key)):
                # Conversion to int32 keeps the low half of word:word shifted, the rotated word.
                twice = word | (word << 32)
                for rotation in range(4):
                    part[:, place, rotation] = twice
                    twice >>= 8
        return out.view(-1)[skip : skip + rows * columns].view(rows, columns)

    def words_like(self, x: torch.Tensor) -> torch.Tensor:
        """One word for each element of `x`, rows being all dimensions but the last."""
        columns = x.shape[-1] if x.ndim else 1
        rows = x.shape[:-1].numel()
        return self.words(rows, columns, device=x.device).view(x.shape)

    def signs(self, count: int) -> tuple[int, ...]:
        """`count` random signs, +1 or -1, from the first bits of the stream."""
        return signs_of(self.key, count)


def signs_of(key: tuple[int, int], count: int) -> tuple[int, ...]:
    """`count` signs from the bits of Philox under `key`, lowest bit first; a set bit is -1."""
    bits = 0
    for call in range(-(-count // 128)):
        for place, word in enumerate(philox((call, 0, 0, 0), key)):
            bits |= word << (128 * call + 32 * place)
    return tuple(-1 if bits >> i & 1 else 1 for i in range(count))
