"""Random bits: published answers, and the same word for an element however it is asked for."""

import json
from pathlib import Path

import pytest
import torch

from lowprec.errors import UnsupportedError
from lowprec.rng import RandomStream, philox

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rounding.json").read_text())
CPU = torch.device("cpu")


@pytest.mark.parametrize("case", GOLDEN["philox4x32_10"]["cases"])
def test_philox_known_answers_for_integers_and_tensors(case: dict) -> None:
    counter, key, out = (
        [int(word, 16) for word in case[name]] for name in ("counter", "key", "out")
    )
    assert list(philox(tuple(counter), tuple(key))) == out
    tensors = tuple(torch.tensor([word]) for word in counter)
    assert [int(word) for word in philox(tensors, tuple(key))] == out


def word_by_hand(stream: RandomStream, index: int) -> int:
    call, place = divmod(index, 16)
    word = philox((call & 0xFFFFFFFF, call >> 32, 0, 0), stream.key)[place // 4]
    turn = 8 * (place % 4)
    return ((word >> turn) | (word << (32 - turn))) & 0xFFFFFFFF


@pytest.mark.parametrize("first_row", [0, 5, 2**40])
def test_each_element_has_its_own_rotated_word(first_row: int) -> None:
    stream = RandomStream(2**64 - 1, "fc", "wgrad.dy", 7, 2, first_row)
    rows, columns = 3, 39
    words = stream.words(rows, columns, device=CPU)
    assert words.dtype == torch.int32
    expected = [word_by_hand(stream, first_row * columns + i) for i in range(rows * columns)]
    assert (words.flatten().long() & 0xFFFFFFFF).tolist() == expected


def test_bits_do_not_depend_on_how_rows_are_split() -> None:
    whole = RandomStream(1, "a", "b").words(100, 39, device=CPU)
    for size in (1, 7, 50):
        parts = [
            RandomStream(1, "a", "b", first_row=start).words(min(size, 100 - start), 39, device=CPU)
            for start in range(0, 100, size)
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_offsets_beyond_two_to_the_31_elements() -> None:
    """Row 2^20 of a tensor with 2^13 columns starts at element 2^33: asked for, not allocated."""
    stream = RandomStream(0, first_row=2**20)
    words = stream.words(1, 2**13, device=CPU)[0]
    for column in (0, 1, 8191):
        assert int(words[column]) & 0xFFFFFFFF == word_by_hand(stream, 2**33 + column)
    near = RandomStream(0).words(1, 2**13, device=CPU)[0]
    assert not torch.equal(words, near)


def test_streams_differ_in_every_part_of_their_key() -> None:
    parts = {"seed": 1, "layer": "x", "role": "y", "step": 1, "micro_batch": 1}
    base = RandomStream(0).words(8, 16, device=CPU)
    seen = [base]
    for name, value in parts.items():
        other = RandomStream(**{"seed": 0, name: value}).words(8, 16, device=CPU)
        assert all((other != one).float().mean() > 0.99 for one in seen), name
        seen.append(other)


def test_words_are_uniform_and_neighbours_nearly_independent() -> None:
    words = RandomStream(3).words(2**14, 64, device=CPU).long() & 0xFFFFFFFF
    n = words.numel()
    for bit in range(32):
        share = ((words >> bit) & 1).double().mean()
        assert abs(share - 0.5) < 4.89 * 0.5 / n**0.5, bit
    flat = words.flatten().view(-1, 16)
    # The window that rounding reads ends at bit 19 (E4M3), 20 (E5M2) or 21 (E2M1).
    for top in (20, 21, 22):
        up = (flat & ((1 << top) - 1)).double() < 0.3 * (1 << top)
        centred = up.double() - up.double().mean(0)
        correlation = centred.T @ centred / len(flat)
        correlation /= correlation.diagonal().mean()
        worst = (correlation - torch.eye(16)).abs().max()
        assert worst < 5 / len(flat) ** 0.5 + 2**-8, top


def test_signs_are_those_of_the_bits() -> None:
    stream = RandomStream(9, "layer", "wgrad.signs")
    words = philox((0, 0, 0, 0), stream.key)
    expected = [-1 if words[i // 32] >> (i % 32) & 1 else 1 for i in range(128)]
    assert list(stream.signs(128)) == expected
    assert stream.signs(16) == stream.signs(128)[:16]
    assert len(stream.signs(300)) == 300


def test_torch_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    RandomStream(0).words(10, 10, device=CPU)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", -1), ("seed", 2**64), ("step", 2**32), ("step", 1.0), ("micro_batch", True)],
)
def test_numbers_out_of_range(name: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} must be an integer from 0 to 2"):
        RandomStream(**{"seed": 0, name: value})  # type: ignore[arg-type]
