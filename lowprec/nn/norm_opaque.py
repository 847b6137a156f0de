"""The steps of NormLinear as opaque ops for torch.compile; see lowprec.nn.opaque."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from lowprec import ops
from lowprec.formats import Cast
from lowprec.nn.norms import Norm, Parameters, gradient, keep_again, project
from lowprec.nn.products import Which, live, parts_of
from lowprec.policy import Gemm, parse_product

_TAGS: Final = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("lowprec::norm_project", mutates_args=(), tags=_TAGS)
def norm_project(
    tensors: Sequence[torch.Tensor | None],
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: Sequence[int],
    eps: float,
    centered: bool,
) -> list[torch.Tensor]:
    """See norms.project; where = [product, stage, columns, kernels or not]."""
    product, stage, columns, _ = where
    return project(live(key), Which(product, stage, columns), tensors, at, Norm(eps, centered))


@norm_project.register_fake
def _(
    tensors: Sequence[torch.Tensor | None],
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: Sequence[int],
    eps: float,
    centered: bool,
) -> list[torch.Tensor]:
    x, residual = tensors[:2]
    assert x is not None
    y = x.new_empty((x.shape[0], where[2]), dtype=torch.bfloat16)
    summed = [] if residual is None else [torch.empty_like(x)]
    count = 1 + centered if where[3] else 0
    return [y, *summed, *(x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(count))]


@torch.library.custom_op("lowprec::norm_keep", mutates_args=(), tags=_TAGS)
def norm_keep(
    tensors: Sequence[torch.Tensor | None],
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: Sequence[int],
    precision: str,
    eps: float,
) -> list[torch.Tensor]:
    """See norms.keep_again, the statistics behind the other tensors; where = [stage, centered]."""
    found = [one for one in tensors[3:] if one is not None]
    norm = Norm(eps, bool(where[1]))
    return keep_again(live(key), where[0], tensors[:3], found, at, norm)


@norm_keep.register_fake
def _(
    tensors: Sequence[torch.Tensor | None],
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: Sequence[int],
    precision: str,
    eps: float,
) -> list[torch.Tensor]:
    x, gemm = tensors[0], parse_product(precision)
    assert x is not None
    if not isinstance(gemm, Gemm):
        return [torch.empty_like(x)]
    rows = x.shape[0] if gemm.rotation is None else gemm.rotation.padded(x.shape[0])
    nearest = Cast(gemm.right.format, gemm.right.scale_rule)
    shape = x.new_empty((rows, x.shape[1]), dtype=torch.float32)
    return parts_of(ops.quantize(shape, nearest, axis=-2, backend="reference"))


@torch.library.custom_op("lowprec::norm_gradient", mutates_args=(), tags=_TAGS)
def norm_gradient(
    tensors: Sequence[torch.Tensor | None], eps: float, centered: bool
) -> list[torch.Tensor]:
    """See norms.gradient; tensors: dn, source, weight, bias, passed, the statistics."""
    dn, source, weight, bias, passed, *rest = tensors
    assert dn is not None
    assert source is not None
    statistics = [one for one in rest if one is not None]
    norm = Norm(eps, centered)
    return gradient((dn, passed), source, Parameters(weight, bias), statistics, norm)


@norm_gradient.register_fake
def _(tensors: Sequence[torch.Tensor | None], eps: float, centered: bool) -> list[torch.Tensor]:
    _, source, weight, bias, _, *statistics = tensors
    assert source is not None
    narrow = centered and not statistics
    sums = [
        one.new_empty(one.shape, dtype=one.dtype if narrow else torch.float32)
        for one in (weight, bias)
        if one is not None
    ]
    return [torch.empty_like(source), *sums]
