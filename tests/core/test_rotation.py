"""Rotation: the published transform, an unchanged product, padding, and the same bits anywhere."""

import json
from pathlib import Path

import pytest
import torch

from lowprec.errors import UnsupportedError
from lowprec.policy import parse_product
from lowprec.rng import RandomStream
from lowprec.rotation import FIXED_SIGNS, SIZES, Rotation, Signs, rotate

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "rounding.json").read_text())["rht16"]
STREAM = RandomStream(5, "fc", "wgrad.signs", 3)
EVERY = [Rotation(size, signs) for size in SIZES for signs in Signs]


def sylvester(size: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
    return h


def test_golden_16() -> None:
    x, y = (torch.tensor(GOLDEN[name]) for name in "xy")
    assert list(FIXED_SIGNS[:16]) == GOLDEN["sign"]
    for side in ("left", "right"):
        assert torch.equal(rotate(x[None], Rotation(16), axis=-1, side=side)[0], y)
        assert torch.equal(rotate(x[:, None], Rotation(16), axis=-2, side=side)[:, 0], y)


@pytest.mark.parametrize("rotation", EVERY, ids=str)
def test_equals_the_matrix(rotation: Rotation) -> None:
    size, generator = rotation.size, torch.Generator().manual_seed(1)
    x = torch.randn(6, 2 * size, dtype=torch.float64, generator=generator)
    signs = rotation.sign_values(STREAM) or (1,) * size
    matrix = sylvester(size) * torch.tensor(signs, dtype=torch.float64)
    exact = torch.cat([part @ matrix.T for part in x.split(size, dim=1)], dim=1)
    power = size.bit_length() - 1
    for side, exponent in (("left", power // 2), ("right", power - power // 2)):
        got = rotate(x, rotation, axis=-1, side=side, stream=STREAM)
        assert torch.allclose(got, exact * 2.0**-exponent, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("rotation", EVERY, ids=str)
@pytest.mark.parametrize("length", [1, 39, 64, 100, 256])
def test_rotating_both_sides_leaves_the_product(rotation: Rotation, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    a, b = (torch.randn(n, length, dtype=torch.float64, generator=generator) for n in (7, 5))
    left = rotate(a, rotation, axis=-1, side="left", stream=STREAM)
    right = rotate(b.T, rotation, axis=-2, side="right", stream=STREAM).T
    assert left.shape == (7, rotation.padded(length))
    exact = a @ b.T
    assert (left @ right.T - exact).abs().max() <= 1e-12 * exact.abs().max()


def test_axes_views_and_dtypes_give_the_same_bits() -> None:
    x = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    rotation = Rotation(32)
    want = rotate(x, rotation, axis=-1, side="left")
    assert torch.equal(rotate(x.T.contiguous(), rotation, axis=-2, side="left").T, want)
    assert torch.equal(rotate(x.T, rotation, axis=-2, side="left").T, want)
    narrow = x.bfloat16()
    got = rotate(narrow, rotation, axis=-1, side="left")
    assert got.dtype == torch.float32
    assert torch.equal(got, rotate(narrow.float(), rotation, axis=-1, side="left"))


def test_empty_and_poisoned() -> None:
    assert rotate(torch.zeros(0, 32), Rotation(16), axis=-1, side="left").shape == (0, 32)
    assert rotate(torch.zeros(0, 5), Rotation(16), axis=-2, side="left").shape == (0, 5)
    x = torch.zeros(2, 64)
    x[1, 40] = float("inf")
    bad = ~rotate(x, Rotation(32), axis=-1, side="left").isfinite()
    assert bad[1, 32:].all()
    assert bad.sum() == 32


def test_outlier_is_spread_over_its_block() -> None:
    x = torch.zeros(1, 64)
    x[0, 3] = 32.0
    y = rotate(x, Rotation(32), axis=-1, side="left")
    assert (y[0, :32].abs() == 8).all()
    assert (y[0, 32:] == 0).all()


@pytest.mark.parametrize(
    ("text", "canonical"),
    [("rht16", "rht16"), ("rht32:fixed", "rht32"), ("rht64:none", "rht64:none")],
)
def test_text_round_trip(text: str, canonical: str) -> None:
    assert str(Rotation.parse(text)) == canonical
    product = parse_product(f"mxfp4:sr x mxfp4 + {text}")
    assert str(product) == f"mxfp4:sr x mxfp4 + {canonical}"
    assert parse_product(str(product)) == product


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mxfp4 + rht24", "unknown rotation 'rht24'; did you mean rht"),
        ("mxfp4 + rht32:fxed", "unknown signs 'fxed'.*did you mean fixed"),
        ("mxfp4 + ", "cannot read the product"),
        ("bf16 + rht32", "a product in bf16 is written 'bf16', and rotates nothing"),
        ("skip + rht32", "skip stands alone"),
    ],
)
def test_bad_rotations(text: str, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        parse_product(text)


def test_what_cannot_be_rotated() -> None:
    x = torch.zeros(3, 40)
    with pytest.raises(UnsupportedError, match="length 40 along axis -1 is not a multiple of 32"):
        rotate(x, Rotation(32), axis=-1, side="left", pad=False)
    with pytest.raises(UnsupportedError, match="axis -1 or -2, not 0"):
        rotate(x, Rotation(32), axis=0, side="left")
    with pytest.raises(UnsupportedError, match="seeded signs need a RandomStream"):
        rotate(x, Rotation(32, Signs.SEEDED), axis=-1, side="left")
    with pytest.raises(UnsupportedError, match="block 24 is not one of 16, 32, 64, 128"):
        Rotation(24)
