"""Rotation along the contraction and the cast of its result, in one read of the source."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from lowprec.backends.triton_kernels.views import NEAREST, Draws, View, random_words
from lowprec.errors import UnsupportedError
from lowprec.formats import Cast
from lowprec.rng import ELEMENTS_PER_CALL, RandomStream
from lowprec.rotation import Rotation, Side
from lowprec.tensor import QuantizedTensor


def rotate_quantize(
    x: torch.Tensor,
    rotation: Rotation,
    cast: Cast,
    *,
    axis: int,
    side: Side,
    streams: tuple[RandomStream | None, RandomStream | None] = (None, None),
) -> QuantizedTensor:
    """`x` rotated along `axis` (-1 or -2) as an operand of a product, and cast along it.

    The same codes as lowprec.rotation.rotate followed by a cast, padded to whole rotation blocks.
    streams: of the signs and of the roundings. Raises UnsupportedError for float64, for another
    axis, and for a cast whose scales span more than one row or a whole one.
    """
    across, along = cast.format.block
    if across != 1 or along % 32 or not cast.format.power_of_two:
        raise UnsupportedError(
            f"triton: no rotation fused with a cast to {cast.format.name}: only with blocks of one "
            "row and power-of-two scales"
        )
    if axis not in (-1, -2) or x.ndim < -axis or x.dtype == torch.float64:
        raise UnsupportedError(
            f"triton: no fused rotation along axis {axis} of {x.ndim}-D {x.dtype}"
        )
    ops = _ops(x)
    if x.ndim == 1:
        q = rotate_quantize(x[None], rotation, cast, axis=-1, side=side, streams=streams)
        return QuantizedTensor(q.codes[0], q.scales[0], q.format, -1)
    view = View.of(x, cast, axis)
    values = rotation.sign_values(streams[0])
    make = _signs if torch.compiler.is_compiling() else _kept_signs
    signs = None if values is None else make(values, x.device)
    power = rotation.size.bit_length() - 1
    factor = 2.0 ** -(power // 2 if side == "left" else power - power // 2)
    drawn = NEAREST if streams[1] is None else _draws(view, x, rotation, streams[1])
    codes, scales = ops.rotate_cast(
        view.data, signs, rotation.size, factor, str(cast), view.by_column, *drawn.flat()
    )
    return QuantizedTensor(
        codes=view.restore(codes, turned=view.by_column, is_scale=False),
        scales=view.restore(scales, turned=False, is_scale=True),
        format=cast.format,
        axis=axis,
    )


def _signs(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def _kept_signs(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Signs that are on the device already: most are the same in every call."""
    return _signs(values, device)


def _draws(view: View, x: torch.Tensor, rotation: Rotation, stream: RandomStream) -> Draws:
    """The words of the rotated tensor, whose elements are counted in its own shape."""
    shape = list(x.shape)
    axis = view.matrix.source_axis
    shape[axis] = rotation.padded(shape[axis])
    call = stream.first_row * shape[-1] // ELEMENTS_PER_CALL
    if axis == -1:
        return Draws.of("inner", call, stream)
    if shape[-1] % ELEMENTS_PER_CALL == 0:
        return Draws.of("outer", call, stream)
    words = random_words(stream, torch.Size(shape), x.device).mT
    words = words.reshape(-1, *words.shape[-2:]).contiguous()
    return Draws.of("stored", 0, stream, words)


def _ops(x: torch.Tensor) -> Any:
    # These register the ops.
    from lowprec.backends.triton_kernels import launch, rotate_ops

    del rotate_ops
    return launch.ops_for(x)
