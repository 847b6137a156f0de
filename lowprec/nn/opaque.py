"""The products of a layer as opaque ops for torch.compile: each runs the eager code when called.

`key` is the 0-d tensor that stands for the layer's Products; shapes alone are known while tracing.
"""

from __future__ import annotations

from typing import Final

import torch

from lowprec import ops
from lowprec.formats import Cast
from lowprec.nn.operands import WGRAD, Which, parts_of
from lowprec.nn.products import live
from lowprec.policy import Gemm, parse_product

# CUDA graphs would replay the products without the Python that counts and keys them.
_TAGS: Final = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("lowprec::moment", mutates_args=(), tags=_TAGS)
def moment(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The moment of a forward call: see Products.now."""
    return torch.tensor(live(key).position.now(), dtype=torch.int64, device="cpu")


@moment.register_fake
def _(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key.new_empty(3)


@torch.library.custom_op("lowprec::product", mutates_args=(), tags=_TAGS)
def product(
    left: torch.Tensor,
    right: list[torch.Tensor],
    bias: torch.Tensor | None,
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: list[int],
) -> torch.Tensor:
    """One product: see Products.run; where = [*which, float64 result or not]."""
    return live(key).run_now(Which.read(where), left, right, bias=bias, at=at)


@product.register_fake
def _(
    left: torch.Tensor,
    right: list[torch.Tensor],
    bias: torch.Tensor | None,
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: list[int],
) -> torch.Tensor:
    product_index, _, columns, _, wide = where
    rows = left.shape[1] if product_index == WGRAD else left.shape[0]
    return _result(left, rows, columns, wide)


def _result(like: torch.Tensor, rows: int, columns: int, wide: int) -> torch.Tensor:
    return like.new_empty((rows, columns), dtype=torch.float64 if wide else torch.bfloat16)


@torch.library.custom_op("lowprec::project", mutates_args=(), tags=_TAGS)
def project(
    operands: list[torch.Tensor],
    bias: torch.Tensor | None,
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: list[int],
    precision: str,
) -> list[torch.Tensor]:
    """y and what wgrad needs of x: see Products.project; operands x and w, precision of wgrad."""
    x, weight = operands
    which = Which.read(where)
    y_MN, kept = live(key).project_now(which, x, weight, bias=bias, at=at)
    return [y_MN, *as_promised(kept, turned=bool(where[5]))]


@project.register_fake
def _(
    operands: list[torch.Tensor],
    bias: torch.Tensor | None,
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: list[int],
    precision: str,
) -> list[torch.Tensor]:
    x = operands[0]
    kept = kept_like(x, precision, turned=bool(where[5]))
    return [_result(x, x.shape[0], where[2], where[4]), *kept]


def as_promised(kept: list[torch.Tensor], *, turned: bool) -> list[torch.Tensor]:
    """What wgrad keeps of x in the order of memory that tracing was told; mostly as it is."""
    codes, *scales = kept
    turned = turned and codes.ndim == 2
    codes = codes.mT.contiguous().mT if turned else codes.contiguous()
    return [codes, *(one.contiguous() for one in scales)]


def kept_like(x: torch.Tensor, precision: str, *, turned: bool) -> list[torch.Tensor]:
    """Shapes, dtypes and order of memory of what a quantized wgrad keeps of x.

    turned: codes lie along the rows of x, as kernels that cast by column write them.
    """
    gemm = parse_product(precision)
    assert isinstance(gemm, Gemm)
    rows = x.shape[0] if gemm.rotation is None else gemm.rotation.padded(x.shape[0])
    nearest = Cast(gemm.right.format, gemm.right.scale_rule)
    shape = x.new_empty((rows, x.shape[1]), dtype=torch.float32)
    codes, *scales = parts_of(ops.quantize(shape, nearest, axis=-2, backend="reference"))
    if turned and codes.ndim == 2:
        codes = codes.new_empty((codes.shape[1], codes.shape[0])).mT
    return [codes, *scales]


@torch.library.custom_op("lowprec::gradients", mutates_args=(), tags=_TAGS)
def gradients(
    dy: torch.Tensor,
    weight: torch.Tensor,
    kept: list[torch.Tensor],
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """See Products.gradients; where = [dgrad, stage, columns, float64 dx or not, float64 dw]."""
    return live(key).gradients_now(Which.read(where), dy, weight, kept, at=at)


@gradients.register_fake
def _(
    dy: torch.Tensor,
    weight: torch.Tensor,
    kept: list[torch.Tensor],
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = where[2]
    dx = _result(dy, dy.shape[0], columns, where[4])
    return dx, _result(dy, dy.shape[1], columns, where[5])
