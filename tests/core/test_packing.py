"""Packing: exact round trips of every width, shape and layout; eager, traced and fake."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lowprec
from lowprec.errors import UnsupportedError
from lowprec.formats import FORMATS
from lowprec.packing import pack_codes, packed_bytes, unpack_codes

BITS = (4, 6, 8)
SHAPES = [(), (0,), (1,), (2,), (3,), (63,), (0, 7), (5, 0), (7, 39), (2, 3, 5), (64, 64), (1, 1)]


def random_codes(bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits + len(shape))
    return torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_round_trip_is_exact_and_dense(bits: int, shape: tuple[int, ...]) -> None:
    codes = random_codes(bits, shape)
    before = codes.clone()
    packed = pack_codes(codes, bits)
    assert torch.equal(codes, before)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packed_bytes(codes.numel(), bits)
    assert packed.untyped_storage().nbytes() == packed.numel()
    assert packed.numel() <= math.ceil(codes.numel() * bits / 8) + 2
    assert torch.equal(unpack_codes(packed, bits, shape), codes)


@pytest.mark.parametrize("bits", BITS)
def test_every_code_survives_in_every_place(bits: int) -> None:
    every = torch.arange(1 << bits, dtype=torch.uint8)
    for shift in range(4):
        codes = torch.cat((torch.zeros(shift, dtype=torch.uint8), every))
        assert torch.equal(unpack_codes(pack_codes(codes, bits), bits, codes.shape), codes)


def test_bytes_of_known_codes() -> None:
    four = torch.tensor([1, 2, 15, 9], dtype=torch.uint8)
    assert pack_codes(four, 4).tolist() == [0xF1, 0x92]
    six = torch.tensor([0b110101, 0b011011, 0b100110, 0b111000], dtype=torch.uint8)
    assert pack_codes(six, 6).tolist() == [0b11110101, 0b01100110, 0b11100010]


@pytest.mark.parametrize("bits", BITS)
def test_strided_views(bits: int) -> None:
    base = random_codes(bits, (12, 10))
    row = base[:1].expand(4, 10)
    for view in (base.mT, base[1::3, 3:], base[:, 1], row, base.view(3, 4, 10).movedim(0, 2)):
        packed = pack_codes(view, bits)
        assert torch.equal(unpack_codes(packed, bits, view.shape), view)


def test_eight_bits_are_not_copied() -> None:
    codes = random_codes(8, (6, 5)).mT
    assert pack_codes(codes, 8) is codes
    assert unpack_codes(codes, 8, codes.shape).data_ptr() == codes.data_ptr()
    assert torch.equal(unpack_codes(codes, 8, (30,)), codes.reshape(30))


@pytest.mark.parametrize("name", FORMATS)
def test_codes_of_every_format(name: str) -> None:
    x = torch.randn(33, 70, generator=torch.Generator().manual_seed(1))
    codes = lowprec.quantize(x, name).codes
    bits = FORMATS[name].element.bits
    packed = pack_codes(codes, bits)
    assert packed.numel() <= math.ceil(codes.numel() * bits / 8) + 2
    assert torch.equal(unpack_codes(packed, bits, codes.shape), codes)


@pytest.mark.parametrize("bits", BITS)
def test_traced_with_sizes_that_change(bits: int) -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def there_and_back(codes: torch.Tensor) -> torch.Tensor:
        return unpack_codes(pack_codes(codes, bits), bits, codes.shape) + 0

    for shape in ((8, 16), (12, 20), (5, 7)):
        codes = random_codes(bits, shape)
        assert torch.equal(there_and_back(codes), codes)


@pytest.mark.parametrize("bits", BITS)
def test_fake_tensors_have_the_shapes_of_real_ones(bits: int) -> None:
    with FakeTensorMode():
        codes = torch.empty(7, 39, dtype=torch.uint8)
        packed = pack_codes(codes, bits)
        assert packed.numel() == packed_bytes(7 * 39, bits)
        assert unpack_codes(packed, bits, (7, 39)).shape == (7, 39)


@pytest.mark.parametrize("bits", [0, 3, 5, 16])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(UnsupportedError, match="allowed: 4, 6, 8"):
        pack_codes(torch.zeros(4, dtype=torch.uint8), bits)


def test_wrong_dtype_and_wrong_shape_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"uint8, got torch\.int32"):
        pack_codes(torch.zeros(4, dtype=torch.int32), 4)
    packed = pack_codes(torch.zeros(4, dtype=torch.uint8), 4)
    with pytest.raises(UnsupportedError, match=r"2 bytes .* shape \(7,\): that takes 4"):
        unpack_codes(packed, 4, (7,))
    with pytest.raises(UnsupportedError, match="uint8"):
        unpack_codes(packed.int(), 4, (4,))
