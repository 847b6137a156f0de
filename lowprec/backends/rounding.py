"""From float32 to codes and back in few passes, for any element; the bits are the reference's.

`values` are overwritten: fresh memory costs more than the arithmetic.
"""

from __future__ import annotations

import torch

from lowprec.formats import Element

_FRACTION = 23  # bits, float32
_SUBNORMAL_BITS = 28  # of the random word that decide a subnormal value


def encode(out: torch.Tensor, values: torch.Tensor, element: Element) -> None:
    """Write the codes (uint8) of float32 `values`: nearest, ties to even, saturating.

    For widths that torch cannot cast: v plus 2^(e + 23 - mantissa bits), with e the exponent of v
    or at least emin, is rounded by the adder to what the element can hold, and its lowest bits
    count the quanta 2^(e - mantissa bits) in v. NaN gives an arbitrary code.
    """
    values.clamp_(-element.max, element.max)
    if element.torch_dtype is not None:
        out.view(element.torch_dtype).copy_(values)
        return
    shift = _FRACTION - element.mantissa_bits
    bits = values.view(torch.int32)
    adder = (bits & 0x7F800000).clamp_(min=_lowest_normal(element)).add_(shift << _FRACTION)
    code = (values.abs().add_(adder.view(torch.float32))).view(torch.int32)
    # Bits above the eighth are lost in uint8, the exponent of the sum among them.
    code.add_(adder.bitwise_right_shift_(shift))
    # What the adder's exponent is for a subnormal value, whose code is the count itself.
    code.sub_((_lowest_normal(element) + (shift << _FRACTION)) >> shift)
    out.copy_(code.add_(_sign(bits, element)))


def encode_stochastic(
    out: torch.Tensor, values: torch.Tensor, element: Element, words: torch.Tensor
) -> None:
    """Write the codes (uint8) of float32 `values`, up or down by `words` (int32), saturating.

    A code counts steps up from 0: those to min(|v|, 2^emin), all of one quantum, rounded by the
    upper 28 bits of the word, and those from 2^emin to max(|v|, 2^emin), rounded by its lower bits.
    One of the two parts is exact, so a word is used once. NaN gives an arbitrary code.
    """
    shift = _FRACTION - element.mantissa_bits
    values.clamp_(-element.max, element.max)
    size, bits = values.abs(), values.view(torch.int32)
    code = size.view(torch.int32).clamp(min=_lowest_normal(element))
    code.add_(words & ((1 << shift) - 1)).bitwise_right_shift_(shift)
    quanta = size.clamp_(max=2.0**element.emin).mul_(1 / element.quantum)
    code.add_(quanta.int())
    fraction = quanta.frac_().mul_(2.0**_SUBNORMAL_BITS).int()
    chance = (words >> (32 - _SUBNORMAL_BITS)).bitwise_and_((1 << _SUBNORMAL_BITS) - 1)
    code.add_(fraction.add_(chance).bitwise_right_shift_(_SUBNORMAL_BITS))
    code.sub_(_lowest_normal(element) >> shift).add_(_sign(bits, element))
    out.copy_(code)


def decode(out: torch.Tensor, codes: torch.Tensor, element: Element) -> None:
    """Write the values (float32) of codes (uint8); NaN codes excepted, which a cast never writes.

    Every element fits float16, whose fields a code reaches by shifts, the copies of the sign masked
    off. Unlike float32's, its subnormal numbers convert at full speed, and whatever the process
    does about flushing subnormal numbers.
    """
    missing = 5 - element.exponent_bits
    half = codes.short().bitwise_left_shift_(16 - element.bits)
    if missing:
        copies = ((1 << missing) - 1) << element.exponent_bits + 10
        half.bitwise_right_shift_(missing).bitwise_and_(~copies)
    out.copy_(half.view(torch.float16))
    if element.bias != 15:
        out.mul_(2.0 ** (15 - element.bias))


def _lowest_normal(element: Element) -> int:
    return (element.emin + 127) << _FRACTION


def _sign(bits: torch.Tensor, element: Element) -> torch.Tensor:
    return bits.bitwise_right_shift_(32 - element.bits).bitwise_and_(1 << (element.bits - 1))
