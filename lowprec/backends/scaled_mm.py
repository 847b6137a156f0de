"""Native products: torch.nn.functional.scaled_mm where the GPU multiplies these codes itself.

sm90: FP8 with scales a tensor, a row, 1x128 blocks and 128x128 tiles, where E8M0 scales become
float32 ones of the same value. sm100: MXFP8 (blocks of any multiple of 32, each scale repeated) and
NVFP4, with swizzled scales; these are dispatched, and no time is claimed for them. Accumulation is
always the precise one. A bfloat16 bias under a bfloat16 result is added before the one rounding by
the product itself; any other bias to a float32 product, which is then rounded.
Sources: torch.nn.functional.scaled_mm (2.11 to 2.14), its checks in ATen's ScaledBlas.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import torch
from torch.nn import functional

from lowprec.backends import scale_storage
from lowprec.backends.facts import Facts
from lowprec.errors import UnsupportedError
from lowprec.formats import ALL, E2M1, E5M2, FORMATS, Format
from lowprec.hardware import Hardware, short_name
from lowprec.tensor import QuantizedTensor

Kind = Literal["tensor", "row", "blocks", "tiles", "mx", "nv"]
"""How the scales of an operand reach the product."""

_PAIRS: Final[frozenset[tuple[Kind, Kind]]] = frozenset(
    {
        ("tensor", "tensor"),
        ("row", "row"),
        ("blocks", "tiles"),
        ("tiles", "blocks"),
        ("blocks", "blocks"),
        ("mx", "mx"),
        ("nv", "nv"),
    }
)
_CUDA: Final = {"blocks": (12, 9), "tiles": (12, 9), "mx": (12, 8), "nv": (12, 8)}
"""The oldest CUDA whose library has these products; asked only of a torch built with CUDA."""


def refuse(op: str, facts: Facts) -> str | None:
    """Products alone, of formats that the GPU's own units multiply."""
    if op != "matmul":
        return "products only, no casts"
    if facts.left is None or facts.right is None:
        return "an operand stays unquantized"
    found = _kinds(facts.hardware, facts.left.format, facts.right.format)
    return found if isinstance(found, str) else None


def _kinds(hardware: Hardware, left: Format, right: Format) -> tuple[Kind, Kind] | str:
    """How the scales of both operands reach the product on `hardware`, or why it has none."""
    if hardware.capability is None:
        return f"needs a CUDA device, this is {hardware.name}"
    major = hardware.capability[0]
    if major not in (9, 10):
        return f"needs sm90 or sm100, this is {hardware}"
    if left.element == right.element == E5M2:
        return "E5M2 by E5M2 is native nowhere; cast one operand to E4M3"
    kinds: list[Kind] = []
    for fmt in (left, right):
        kind = _kind(major, fmt)
        if kind is None:
            return f"{fmt.name} is not native on {hardware}{_instead(major, fmt)}"
        if reason := _cuda_too_old(kind):
            return reason
        kinds.append(kind)
    if kinds == ["tiles", "tiles"]:  # a tile's scale is also the scale of each of its rows
        kinds = ["blocks", "tiles"]
    pair = kinds[0], kinds[1]
    if pair not in _PAIRS:
        return f"{left.name} by {right.name} is not native on {hardware}: scales of two kinds"
    return pair


def _kind(major: int, fmt: Format) -> Kind | None:
    across, along = fmt.block
    if fmt.outer:
        return "nv" if major == 10 and fmt.element == E2M1 else None
    if fmt.element.torch_dtype is None:
        return None
    if along == ALL and not fmt.power_of_two:
        return "tensor" if across == ALL else "row"
    if not fmt.power_of_two:
        return None
    if major == 10:
        return "mx" if along % 32 == 0 and across != ALL else None
    if along != scale_storage.TILE:
        return None
    return "blocks" if across == 1 else "tiles" if across == scale_storage.TILE else None


def _instead(major: int, fmt: Format) -> str:
    if major != 9 or fmt.element.torch_dtype is None:
        return ""
    return ", which multiplies FP8 with scales a tensor, a row, 1x128 or 128x128; 1x32 needs sm100"


def _cuda_too_old(kind: Kind) -> str | None:
    built, needed = torch.version.cuda, _CUDA.get(kind)
    if built is None or needed is None:
        return None
    if tuple(int(part) for part in built.split(".")[:2]) >= needed:
        return None
    return f"needs CUDA {needed[0]}.{needed[1]}, this torch was built with {built}"


class Side(NamedTuple):
    """How one operand is handed over: multiples that codes are padded to, scales, their names."""

    rows: int
    depth: int
    lay_out: Callable[[QuantizedTensor, int], list[torch.Tensor]]
    scaling: list[functional.ScalingType]
    swizzle: list[functional.SwizzleType] | None


def _tensor_scale(q: QuantizedTensor, rows: int) -> list[torch.Tensor]:
    del rows
    return [q.scales.reshape(1)]


def _row_scales(q: QuantizedTensor, rows: int) -> list[torch.Tensor]:
    scales = q.scales.reshape(-1, 1)
    if missing := rows - scales.shape[0]:
        scales = functional.pad(scales, (0, 0, 0, missing))
    return [scale_storage.aligned(scales)]


def _column_scales(q: QuantizedTensor, rows: int) -> list[torch.Tensor]:
    return [_row_scales(q, rows)[0].view(1, rows)]


def _block_scales(q: QuantizedTensor, rows: int) -> list[torch.Tensor]:
    if q.format.block[0] != 1:
        return [scale_storage.tile_scales_by_row(q.scales, rows)]
    return [scale_storage.block_scales(q.scales, rows)]


def _tile_scales(q: QuantizedTensor, rows: int) -> list[torch.Tensor]:
    del rows
    return [scale_storage.tile_scales(q.scales)]


def _swizzled(q: QuantizedTensor, rows: int) -> list[torch.Tensor]:
    del rows  # the layout rounds rows up by itself
    (count, depth), (across, along) = q.codes.shape, q.format.block
    scales = scale_storage.e8m0_of(q.scales)
    flat = scale_storage.swizzled_scales(scales, count, -(-depth // 32), (across, along // 32))
    return [flat.view(torch.float8_e8m0fnu)]


def _two_scales(q: QuantizedTensor, rows: int) -> list[torch.Tensor]:
    del rows
    assert q.outer is not None
    (count, depth), (across, along) = q.codes.shape, q.format.block
    flat = scale_storage.swizzled_scales(q.scales, count, -(-depth // along), (across, 1))
    return [flat.view(torch.float8_e4m3fn), q.outer.reshape(1)]


def _side(kind: Kind, *, right: bool) -> Side:
    # Enums by name, because torch 2.14 numbers them anew. Rows of the right operand are columns of
    # the result, in multiples of 16; 1x128 scales lie along rows, in multiples of 16 bytes.
    scaling, swizzle = functional.ScalingType, functional.SwizzleType
    rows = 16 if right else 1
    if kind == "tensor":
        return Side(rows, 16, _tensor_scale, [scaling.TensorWise], None)
    if kind == "row":
        lay_out = _column_scales if right else _row_scales
        return Side(rows, 16, lay_out, [scaling.RowWise], None)
    if kind == "blocks":
        return Side(max(rows, 4), 16, _block_scales, [scaling.BlockWise1x128], None)
    if kind == "tiles":
        return Side(max(rows, 4), 16, _tile_scales, [scaling.BlockWise128x128], None)
    tiled = swizzle.SWIZZLE_32_4_4
    if kind == "mx":
        return Side(rows, 32, _swizzled, [scaling.BlockWise1x32], [tiled])
    both = [scaling.BlockWise1x16, scaling.TensorWise]
    return Side(rows, 32, _two_scales, both, [tiled, swizzle.NO_SWIZZLE])


def matmul(
    a: torch.Tensor | QuantizedTensor,
    b: torch.Tensor | QuantizedTensor,
    *,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a [M, K] times b [N, K] transposed, on the GPU's low-precision units: [M, N], rounded once.

    Rows and columns are any number; ragged dimensions are padded with zero codes. Raises
    UnsupportedError for tensors that are not on a GPU with these units, as under a plan that was
    made for another machine.
    """
    if not isinstance(a, QuantizedTensor) or not isinstance(b, QuantizedTensor):
        raise UnsupportedError("scaled_mm: an operand is not quantized; use the backend emulated")
    device = a.codes.device
    rows, columns = a.codes.shape[0], b.codes.shape[0]
    if device.type == "meta":
        return a.codes.new_empty((rows, columns), dtype=out_dtype)
    left, right = _sides(device, a.format.name, b.format.name)
    if rows == 0 or columns == 0 or a.codes.shape[1] == 0:
        return _no_sums(a, rows, columns, bias, out_dtype)
    inside = bias is not None and bias.dtype == out_dtype == torch.bfloat16
    a_codes, b_codes = _codes(a, left), _codes(b, right)
    a_rows, b_rows = a_codes.shape[0], b_codes.shape[0]
    narrow = out_dtype == torch.bfloat16 and (inside or bias is None)
    product: torch.Tensor = functional.scaled_mm(
        a_codes,
        b_codes.mT,
        left.lay_out(a, a_rows),
        left.scaling,
        right.lay_out(b, b_rows),
        right.scaling,
        swizzle_a=left.swizzle,
        swizzle_b=right.swizzle,
        bias=_vector(bias, b_rows) if inside and bias is not None else None,
        output_dtype=torch.bfloat16 if narrow else torch.float32,
        use_fast_accum=False,
    )
    if a_rows != rows or b_rows != columns:
        product = product[:rows, :columns].contiguous()
    return _finished(product, None if inside else bias, out_dtype)


def _vector(bias: torch.Tensor, length: int) -> torch.Tensor:
    bias = bias.detach()
    if missing := length - bias.shape[0]:
        return functional.pad(bias, (0, missing))
    return scale_storage.aligned(bias.contiguous())


def _finished(
    product: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """`product`, fresh memory of this call, plus what is left to add, in `out_dtype`."""
    if bias is None:
        return product if product.dtype == out_dtype else product.to(out_dtype)
    bias = bias.detach().to(product.dtype)
    if out_dtype == product.dtype:
        return product.add_(bias)
    # One pass: the sum is float32 and is rounded as it is stored.
    return torch.add(product, bias, out=torch.empty_like(product, dtype=out_dtype))


def _no_sums(
    a: QuantizedTensor, rows: int, columns: int, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    out = torch.zeros((rows, columns), dtype=out_dtype, device=a.codes.device)
    return out if bias is None else out.copy_(bias.detach().expand(rows, columns))


def _codes(q: QuantizedTensor, side: Side) -> torch.Tensor:
    """Codes [rows, K] in the element's dtype, padded; copied only where they do not lie right."""
    codes = q.codes
    rows, depth = codes.shape
    pitch, unit = codes.stride()
    if depth % side.depth or rows % side.rows:
        codes = functional.pad(codes, (0, -depth % side.depth, 0, -rows % side.rows))
    elif unit != 1 or pitch % 16 or pitch < depth or codes.data_ptr() % 16:
        codes = codes.clone(memory_format=torch.contiguous_format)
    dtype = q.format.element.torch_dtype
    if dtype is not None:
        return codes.view(dtype)
    return fp4_pairs(codes)


def fp4_pairs(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 codes uint8 [R, K] as float4_e2m1fn_x2 [R, K / 2]: the first of two in the low bits."""
    pairs = codes[:, ::2] | (codes[:, 1::2] << 4)
    return pairs.view(torch.float4_e2m1fn_x2)


@lru_cache(maxsize=256)
def _sides(device: torch.device, left: str, right: str) -> tuple[Side, Side]:
    """How to hand over operands of the named formats; raises UnsupportedError where it is native
    nowhere on this device."""
    if device.type != "cuda":
        raise UnsupportedError(
            f"scaled_mm: the tensors are on {device}, native products run on CUDA devices; make "
            "the plan for the machine that runs (lowprec.plan without hardware, or hardware='cpu')"
        )
    name = short_name(torch.cuda.get_device_name(device))
    hardware = Hardware(name, "cuda", torch.cuda.get_device_capability(device))
    kinds = _kinds(hardware, FORMATS[left], FORMATS[right])
    if isinstance(kinds, str):
        raise UnsupportedError(f"scaled_mm: {kinds}; plan again on the machine that runs")
    return _side(kinds[0], right=False), _side(kinds[1], right=True)
