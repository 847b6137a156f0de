"""The steps of GatedLinear as opaque ops for torch.compile; see lowprec.nn.opaque."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from lowprec.nn.gates import Activation, gradient, keep_again, project
from lowprec.nn.opaque import as_promised, kept_like
from lowprec.nn.operands import Which
from lowprec.nn.products import live
from lowprec.policy import Gemm, parse_product

_TAGS: Final = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("lowprec::gate_project", mutates_args=(), tags=_TAGS)
def gate_project(
    tensors: Sequence[torch.Tensor | None],
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: Sequence[int],
    precision: str,
    kind: str,
) -> list[torch.Tensor]:
    """See gates.project; where = [*which, keeps codes, turned, gated or not]."""
    keep, turned, gated = (bool(one) for one in where[4:])
    x, weight, bias = tensors
    assert x is not None
    assert weight is not None
    three = (x, weight, bias)
    which, activation = Which.read(where), Activation(kind, gated)
    y_MN, *kept = project(live(key), which, three, at, activation, keep=keep)
    return [y_MN, *as_promised(kept, turned=turned)] if keep else [y_MN]


@gate_project.register_fake
def _(
    tensors: Sequence[torch.Tensor | None],
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: Sequence[int],
    precision: str,
    kind: str,
) -> list[torch.Tensor]:
    x = tensors[0]
    assert x is not None
    keep, turned, gated = (bool(one) for one in where[4:])
    y = x.new_empty((x.shape[0], where[2]), dtype=torch.bfloat16)
    return [y, *(kept_like(_activation(x, gated), precision, turned=turned) if keep else [])]


def _activation(x: torch.Tensor, gated: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2 if gated else x.shape[1]))


@torch.library.custom_op("lowprec::gate_keep", mutates_args=(), tags=_TAGS)
def gate_keep(
    x: torch.Tensor,
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: Sequence[int],
    precision: str,
    kind: str,
) -> list[torch.Tensor]:
    """See gates.keep_again; where = [stage, turned, gated or not]."""
    kept = keep_again(live(key), where[0], x, at, Activation(kind, bool(where[2])))
    quantized = isinstance(parse_product(precision), Gemm)
    return as_promised(kept, turned=bool(where[1])) if quantized else kept


@gate_keep.register_fake
def _(
    x: torch.Tensor,
    at: torch.Tensor | None,
    key: torch.Tensor,
    where: Sequence[int],
    precision: str,
    kind: str,
) -> list[torch.Tensor]:
    values = _activation(x, where[2])
    if not isinstance(parse_product(precision), Gemm):
        return [values]
    return kept_like(values, precision, turned=bool(where[1]))


@torch.library.custom_op("lowprec::gate_gradient", mutates_args=(), tags=_TAGS)
def gate_gradient(
    da: torch.Tensor, x: torch.Tensor, kind: str, gated: bool, by_kernel: bool
) -> torch.Tensor:
    """See gates.gradient."""
    return gradient(da, x, Activation(kind, gated), by_kernel=by_kernel)


@gate_gradient.register_fake
def _(da: torch.Tensor, x: torch.Tensor, kind: str, gated: bool, by_kernel: bool) -> torch.Tensor:
    return x.new_empty(x.shape)
