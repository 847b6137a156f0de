"""The products of a layer as opaque ops for torch.compile: each runs the eager code when called.

`key` is the 0-d tensor that stands for the layer's Products; shapes alone are known while tracing.
"""

from __future__ import annotations

from typing import Final

import torch

from lowprec import ops
from lowprec.formats import Cast
from lowprec.nn.products import WGRAD, Which, live, parts_of
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
    """One product: see Products.run; where = [product, stage, columns, float64 result or not]."""
    return live(key).run_now(Which(*where[:3]), left, right, bias=bias, at=at)


@product.register_fake
def _(
    left: torch.Tensor,
    right: list[torch.Tensor],
    bias: torch.Tensor | None,
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: list[int],
) -> torch.Tensor:
    product_index, _, columns, wide = where
    rows = left.shape[1] if product_index == WGRAD else left.shape[0]
    return left.new_empty((rows, columns), dtype=torch.float64 if wide else torch.bfloat16)


@torch.library.custom_op("lowprec::keep", mutates_args=(), tags=_TAGS)
def keep(
    x: torch.Tensor, at: torch.Tensor | None, key: torch.Tensor, stage: int, precision: str
) -> list[torch.Tensor]:
    """What backward needs of x: see Products.keep."""
    return live(key).keep_now(x, at, stage)


@keep.register_fake
def _(
    x: torch.Tensor, at: torch.Tensor | None, key: torch.Tensor, stage: int, precision: str
) -> list[torch.Tensor]:
    gemm = parse_product(precision)
    assert isinstance(gemm, Gemm)
    rows = x.shape[0] if gemm.rotation is None else gemm.rotation.padded(x.shape[0])
    nearest = Cast(gemm.right.format, gemm.right.scale_rule)
    shape = x.new_empty((rows, x.shape[1]), dtype=torch.float32)
    return parts_of(ops.quantize(shape, nearest, axis=-2, backend="reference"))
