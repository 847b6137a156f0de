"""Kernels in Triton, and in Gluon where plain Triton cannot reach memory speed.

A plan chooses them for the casts in PROVEN alone. Triton is imported by the first call of an op,
never by importing this package.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from importlib import import_module
from typing import Any, Final

import torch

from lowprec.backends.facts import Facts
from lowprec.backends.triton_kernels.proven import PROVEN
from lowprec.backends.triton_kernels.views import NEAREST, View, in_memory_order
from lowprec.blocks import Matrix
from lowprec.errors import UnsupportedError
from lowprec.formats import ALL, Cast, Format
from lowprec.rng import RandomStream
from lowprec.tensor import QuantizedTensor

OLDEST: Final = (3, 6)
_CAPABILITY: Final = {"e4m3": (8, 9), "e5m2": (8, 9)}


@cache
def missing() -> str | None:
    """Why Triton cannot be used here at all, or None."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "Triton is not installed"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"Triton {version} is too old; needs {OLDEST[0]}.{OLDEST[1]}"
    return None


def refuse(op: str, facts: Facts) -> str | None:
    """Casts that are proven on a GPU, to formats without an outer scale; no products."""
    reason = cannot(op, facts)
    if reason is None:
        unproven = [c for c in (facts.left, facts.right) if c and str(c) not in PROVEN]
        if unproven:
            return f"the kernel that casts to {unproven[0]} is not proven on a GPU yet"
    return reason


def cannot(op: str, facts: Facts) -> str | None:
    """What the kernels cannot do at all, proven or not."""
    if op == "matmul":
        return "no products in these kernels"
    if facts.hardware.capability is None:
        return f"needs a CUDA device, this is {facts.hardware.name}"
    if reason := missing():
        return reason
    for cast in (facts.left, facts.right):
        if cast is None:
            continue
        if reason := _no_kernel(cast):
            return reason
        needed = _CAPABILITY.get(cast.format.element.name, (8, 0))
        if facts.hardware.capability < needed:
            return f"needs sm{needed[0]}{needed[1]}, this is {facts.hardware}"
    return None


def _no_kernel(cast: Cast) -> str | None:
    if cast.format.outer:
        return f"no cast to {cast.format.name}: its scale needs the whole tensor first"
    if cast.stochastic and ALL in cast.format.block:
        return f"no stochastic rounding in the cast to {cast.format.name}"
    return None


def quantize(
    x: torch.Tensor, cast: Cast, *, axis: int, stream: RandomStream | None = None
) -> QuantizedTensor:
    """Cast `x` along `axis`; codes are contiguous along the contraction, whatever x's strides."""
    _check(x, cast)
    view = View.of(x, cast, axis)
    text = cast.text
    ops = _ops(view.data)
    if ALL in cast.format.block:
        codes, scales = ops.cast_spans(view.data, text, view.by_column)
        turned = view.by_column and cast.format.block != (ALL, ALL)
    else:
        row, column = ("", text) if view.by_column else (text, "")
        if stream is None:
            codes, scales = ops.cast_tiles(view.data, row, column)
        else:
            both = [view.draws(stream, x), NEAREST]
            first, second = both[::-1] if view.by_column else both
            drawn = (*first.flat(), *second.flat())
            codes, scales = ops.cast_tiles_random(view.data, row, column, *drawn)
        turned = view.by_column
    return view.result(codes, scales, turned=turned, scales_turned=False)


def quantize_both(
    x: torch.Tensor,
    row_cast: Cast,
    column_cast: Cast,
    *,
    streams: tuple[RandomStream | None, RandomStream | None] = (None, None),
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Cast `x` [..., R, C] along its last axis and along the one before, in one read of `x`."""
    if streams == (None, None) and x.ndim == 2 and x.stride(1) == 1:
        ready = _at_once(x, row_cast, column_cast)
        if ready is not None:
            return ready
    if x.ndim == 2 and row_cast.format.block == (ALL, ALL) and row_cast == column_cast:
        return _tensor_both(x, row_cast)
    if streams == (None, None) and x.ndim == 2 and x.stride(1) == 1:
        return _matrix_both(x, row_cast, column_cast)
    if x.ndim < 2 or ALL in (*row_cast.format.block, *column_cast.format.block):
        return (
            quantize(x, row_cast, axis=-1, stream=streams[0]),
            quantize(x, column_cast, axis=-2, stream=streams[1]),
        )
    _check(x, row_cast, column_cast)
    row, column = View.of(x, row_cast, -1, merge=False), View.of(x, column_cast, -2, merge=False)
    # Where x lies transposed in memory, the cast along its last axis runs down the columns.
    turned = row.by_column
    across, down = (column, row) if turned else (row, column)
    texts = str(across.cast), str(down.cast)
    if streams == (None, None):
        found = _ops(row.data).cast_tiles(row.data, *texts)
    else:
        drawn = [NEAREST if s is None else row.draws(s, x) for s in streams]
        drawn = drawn[::-1] if turned else drawn
        found = _ops(row.data).cast_tiles_random(
            row.data, *texts, *drawn[0].flat(), *drawn[1].flat()
        )
    first = across.result(found[0], found[1], turned=False, scales_turned=True)
    second = down.result(found[2], found[3], turned=True, scales_turned=False)
    return (second, first) if turned else (first, second)


def _at_once(
    x: torch.Tensor, row_cast: Cast, column_cast: Cast
) -> tuple[QuantizedTensor, QuantizedTensor] | None:
    """`quantize_both` to nearest by a launch that is decided already, where there is one."""
    if torch.compiler.is_compiling() or missing() is not None:
        return None
    from lowprec.backends.triton_kernels import launch

    if not launch.may_pipeline(x) or not launch.is_direct(x):
        return None
    from lowprec.backends.triton_kernels import matrices

    return matrices.cast_both(x, row_cast, column_cast)


def _matrix_both(
    x: torch.Tensor, row_cast: Cast, column_cast: Cast
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """`quantize_both` to nearest of [R, C] with unit stride along C, without the general views."""
    if ALL in row_cast.format.block or ALL in column_cast.format.block:
        return quantize(x, row_cast, axis=-1), quantize(x, column_cast, axis=-2)
    _check(x, row_cast, column_cast)
    x = x.detach()
    x = x.float() if x.dtype == torch.float64 else x
    rows, cols = x.shape
    codes, scales, codes_t, scales_t = _ops(x).cast_tiles(x[None], row_cast.text, column_cast.text)
    return (
        QuantizedTensor(codes[0, :, :cols], scales[0].mT, row_cast.format, -1),
        QuantizedTensor(codes_t[0, :, :rows].mT, scales_t[0], column_cast.format, -2),
    )


def _tensor_both(x: torch.Tensor, cast: Cast) -> tuple[QuantizedTensor, QuantizedTensor]:
    """The codes of a matrix under one scale, contiguous along its last axis and its first."""
    _check(x, cast)
    data = x.detach()
    turned = data.stride(-1) != 1 and data.stride(0) == 1
    data = data.mT if turned else data if data.stride(-1) == 1 else data.contiguous()
    codes, codes_t, scale = _ops(data).cast_tensor_both(data[None], str(cast))
    rows, cols = data.shape
    codes, codes_t, scale = codes[0, :, :cols], codes_t[0, :, :rows].mT, scale[0]
    if turned:
        codes, codes_t = codes_t.mT, codes.mT
    return (
        QuantizedTensor(codes, scale, cast.format, -1),
        QuantizedTensor(codes_t, scale, cast.format, -2),
    )


def _check(x: torch.Tensor, *casts: Cast) -> None:
    for cast in casts:
        if reason := _no_kernel(cast):
            raise UnsupportedError(f"triton: {reason}; use the reference")
    check_device(x)


def check_device(x: torch.Tensor) -> None:
    """Raise UnsupportedError for a tensor where these kernels do not run."""
    from lowprec.backends.triton_kernels import launch

    if not x.is_cuda and not launch.INTEGER:
        raise UnsupportedError(
            f"triton: the tensor is on {x.device}, its kernels run on CUDA devices; plan again on "
            "the machine that runs, or use the reference"
        )


def dequantize(q: QuantizedTensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Values of `q` in `dtype`, in the order of memory that the codes have."""
    if q.outer is not None:
        raise UnsupportedError(f"triton: no values of {q.format.name}; use the reference")
    check_device(q.codes)
    codes, scales = Matrix.of(q.codes, q.format, q.axis), Matrix.of(q.scales, q.format, q.axis)
    data, by_column, flipped = in_memory_order(codes.data, codes.axis)
    scale = scales.data.mT if flipped else scales.data
    scale = scale.reshape(data.shape[0], *scale.shape[-2:]).contiguous()
    narrow = torch.float32 if dtype == torch.float64 else dtype
    out = _ops(data).decode_tiles(data, scale, q.format.name, by_column, narrow)
    out = (out.mT if flipped else out).reshape(codes.data.shape)
    return codes.restore(out, is_scale=False).to(dtype)


def round_trip(
    x: torch.Tensor, cast: Cast, *, axis: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The values that `x` has after a cast along `axis`, in one pass and in x's order of memory.

    For products that are emulated. Raises UnsupportedError for scales that span a whole extent.
    """
    if ALL in cast.format.block or cast.format.outer:
        raise UnsupportedError(f"triton: no one-pass round trip through {cast.format.name}")
    check_device(x)
    view = View.of(x, cast, axis)
    out = _ops(view.data).round_trip(view.data, cast.text, view.by_column, dtype)
    return view.restore(out, turned=False, is_scale=False)


def _ops(x: torch.Tensor) -> Any:
    # These register the ops.
    from lowprec.backends.triton_kernels import launch, span_ops, value_ops

    del span_ops, value_ops
    return launch.ops_for(x)


def fits_values(fmt: Format) -> bool:
    """Whether a kernel decodes this format: blocks of a fixed extent, one level of scales."""
    blocks = ALL not in fmt.block and not fmt.outer
    return blocks and "values + " + fmt.name in PROVEN and missing() is None


def fits_round_trip(cast: Cast) -> bool:
    """Whether a kernel gives the values after a cast in one pass: to nearest, and proven."""
    return not cast.stochastic and fits_values(cast.format) and cast.text in PROVEN


def fits_rotation(cast: Cast) -> bool:
    """Whether a kernel rotates and casts: blocks of one row, power-of-two scales, and proven."""
    return _one_row(cast) and cast.format.block[1] % 32 == 0 and "rotation + " + cast.text in PROVEN


def fits_norm(cast: Cast, *, again: bool = False) -> bool:
    """Whether a kernel normalizes and casts, to nearest: blocks of one row as for a rotation.

    `again`, from statistics that are known, blocks may have any extent.
    """
    blocks = ALL not in cast.format.block and cast.format.power_of_two if again else _one_row(cast)
    return blocks and not cast.stochastic and "norm + " + cast.text in PROVEN


def fits_norm_whole(cast: Cast) -> bool:
    """Whether kernels normalize and cast both ways with one scale for the whole tensor."""
    whole = cast.format.block == (ALL, ALL) and not cast.stochastic
    return whole and "norm + " + cast.text in PROVEN


def fits_gate(cast: Cast) -> bool:
    """Whether a kernel applies an activation and casts its result, to nearest, by row."""
    return _one_row(cast) and not cast.stochastic and "gate + " + cast.text in PROVEN


def _one_row(cast: Cast) -> bool:
    across, along = cast.format.block
    return across == 1 and along > 0 and cast.format.power_of_two


# The fused ops and where they are, so that Triton is not imported before one is asked for.
_LATER: Final = {
    "activate": "fused",
    "activate_backward": "fused",
    "activate_halves_backward": "fused",
    "normalize": "fused",
    "normalize_again": "fused",
    "normalize_backward": "fused",
    "normalize_both": "fused",
    "normalize_whole": "fused",
    "normalized": "fused",
    "rotate_quantize": "rotated",
    "from_swizzled": "scale_layouts",
    "to_swizzled": "scale_layouts",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
