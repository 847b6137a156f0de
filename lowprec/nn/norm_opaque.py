"""The steps of NormLinear as opaque ops for torch.compile; see lowprec.nn.opaque."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from lowprec.nn.norms import Norm, Parameters, gradient, keep_again, project
from lowprec.nn.opaque import as_promised, kept_like
from lowprec.nn.operands import Which
from lowprec.nn.products import live
from lowprec.policy import Gemm, parse_product

_TAGS: Final = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("lowprec::norm_project", mutates_args=(), tags=_TAGS)
def norm_project(
    tensors: Sequence[torch.Tensor | None],
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: Sequence[int],
    precision: str,
    eps: float,
) -> list[torch.Tensor]:
    """See norms.project; where = [*which, statistics, keeps codes, turned, centered or not]."""
    count, keeps, turned, centered = where[4:]
    which, norm = Which.read(where), Norm(eps, bool(centered))
    found = project(live(key), which, tensors, at, norm, keep=bool(keeps))
    if not keeps:
        return found
    first = 1 + (tensors[1] is not None) + count
    return [*found[:first], *as_promised(found[first:], turned=bool(turned))]


@norm_project.register_fake
def _(
    tensors: Sequence[torch.Tensor | None],
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: Sequence[int],
    precision: str,
    eps: float,
) -> list[torch.Tensor]:
    x, residual = tensors[:2]
    assert x is not None
    y = x.new_empty((x.shape[0], where[2]), dtype=torch.bfloat16)
    summed = [] if residual is None else [torch.empty_like(x)]
    count, keeps, turned, _ = where[4:]
    statistics = [x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(count)]
    kept = kept_like(x, precision, turned=bool(turned)) if keeps else []
    return [y, *summed, *statistics, *kept]


@torch.library.custom_op("lowprec::norm_keep", mutates_args=(), tags=_TAGS)
def norm_keep(
    tensors: Sequence[torch.Tensor | None],
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: Sequence[int],
    precision: str,
    eps: float,
) -> list[torch.Tensor]:
    """See norms.keep_again, the statistics behind the other tensors.

    where = [stage, centered or not, turned or not].
    """
    found = [one for one in tensors[3:] if one is not None]
    norm = Norm(eps, bool(where[1]))
    kept = keep_again(live(key), where[0], tensors[:3], found, at, norm)
    quantized = isinstance(parse_product(precision), Gemm)
    return as_promised(kept, turned=bool(where[2])) if quantized else kept


@norm_keep.register_fake
def _(
    tensors: Sequence[torch.Tensor | None],
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: Sequence[int],
    precision: str,
    eps: float,
) -> list[torch.Tensor]:
    x = tensors[0]
    assert x is not None
    if not isinstance(parse_product(precision), Gemm):
        return [torch.empty_like(x)]
    return kept_like(x, precision, turned=bool(where[2]))


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
