"""Tensor parallelism of converted layers: each rank casts its part, with the codes of the whole.

Dimensions: M rows (tokens), K in_features, N out_features. ColwiseParallel cuts a weight [N, K]
along N, RowwiseParallel along K. A layer that would get another scale than the whole weight's is
refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from lowprec.errors import PlanError, UnsupportedError
from lowprec.formats import ALL, Format
from lowprec.nn import Linear
from lowprec.policy import PRODUCTS, Gemm

# What the rows of each operand are, and what it contracts, as it enters its product.
_OPERANDS: Final = {
    "fprop": (("x", "M", "K"), ("w", "N", "K")),
    "dgrad": (("dy", "M", "N"), ("w", "K", "N")),
    "wgrad": (("dy", "N", "M"), ("x", "K", "M")),
}
_CUT: Final = ((ColwiseParallel, "N"), (RowwiseParallel, "K"))


def parallelize_quantized(
    model: torch.nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]
) -> torch.nn.Module:
    """torch's parallelize_module for a model that `lowprec.apply` converted, in place.

    mesh: one dimension. styles: by module name, as torch takes them; a lowprec.Linear takes
    ColwiseParallel and RowwiseParallel. Each rank's codes are those of the whole weight; a rank's
    part of a sum over ranks is rounded to bfloat16 before it is added. fully_shard may follow, and
    gathers these weights unquantized. Raises PlanError, with nothing changed, for a layer whose
    casts do not fit the cut, with the reason.
    """
    if mesh.ndim != 1:
        raise PlanError(f"parallelize_quantized: the mesh has {mesh.ndim} dimensions; it takes one")
    layers = list(_chosen(model, styles))
    for name, layer, letter in layers:
        if reason := refusal(layer, letter, mesh.size()):
            raise PlanError(
                f"parallelize_quantized: layer {name!r} cut along {letter} over {mesh.size()} "
                f"ranks: {reason}; leave it out of the recipe or of the styles"
            )
    parallelize_module(model, mesh, dict(styles))
    for _, layer, _ in layers:
        layer.__class__ = TensorParallelLinear
    return model


def _chosen(
    model: torch.nn.Module, styles: Mapping[str, ParallelStyle]
) -> Iterator[tuple[str, Linear, str]]:
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear):
            continue
        for pattern, style in styles.items():
            if not _matches(name, pattern):
                continue
            if type(layer.weight) is not torch.nn.Parameter:
                raise PlanError(f"parallelize_quantized: layer {name!r} is sharded already")
            letters = [letter for kind, letter in _CUT if isinstance(style, kind)]
            if not letters:
                raise PlanError(
                    f"parallelize_quantized: layer {name!r} got {type(style).__name__}; a "
                    "lowprec.Linear takes ColwiseParallel and RowwiseParallel"
                )
            yield name, layer, letters[0]


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def refusal(layer: Linear, letter: str, ranks: int) -> str | None:
    """Why a layer cannot be cut along "N" or "K" with the codes of the whole, or None."""
    size = {"N": layer.out_features, "K": layer.in_features}[letter]
    if size % ranks:
        return f"{letter}={size} does not divide by {ranks}"
    products = layer.lowprec_products
    for stage in products.stages[products.first :]:
        if stage.policy.random:
            return "random bits follow the place in the whole weight"
        for name in PRODUCTS:
            gemm = getattr(stage.policy, name)
            if isinstance(gemm, Gemm) and (reason := _misfit(name, gemm, letter, size // ranks)):
                return reason
    return None


def _misfit(product: str, gemm: Gemm, letter: str, size: int) -> str | None:
    for (operand, rows, along), how in zip(
        _OPERANDS[product], (gemm.left, gemm.right), strict=True
    ):
        if letter not in (rows, along):
            continue
        block = _block(how.format, contracted=letter == along)
        if letter == along and gemm.rotation is not None and block is not None:
            block = max(block, gemm.rotation.size)
        if block is None:
            name = how.format.name
            return f"in {product} a scale of {name} reaches over the ranks' parts of {operand}"
        if size % block:
            return f"in {product} {size} values a rank are not a multiple of {block}"
    return None


def _block(fmt: Format, *, contracted: bool) -> int | None:
    """Values that share a scale along a dimension; None for all of them."""
    block = fmt.block[1 if contracted else 0]
    return None if fmt.outer or block == ALL else block


class TensorParallelLinear(Linear):
    """A lowprec.Linear that holds its part of the weight as a DTensor, cut along N or K.

    Takes and returns DTensors, as torch's parallel styles hand them over; a graph break under
    torch.compile. Made by `parallelize_quantized`.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # nn.Linear's own name
        """Multiply this rank's part; along K the results of all ranks are still to be added."""
        weight = self.weight
        if not isinstance(input, DTensor) or not isinstance(weight, DTensor):
            raise UnsupportedError(
                f"layer {self.lowprec_products.layer!r} is tensor parallel: its input and weight "
                f"are DTensors, not {type(input).__name__} and {type(weight).__name__}"
            )
        mesh, by_rows = weight.device_mesh, weight.placements[0] == Shard(0)
        last = Shard(input.ndim - 1)
        placed: Placement = Replicate() if by_rows else last
        # The gradient of an input that every rank read is a sum over ranks.
        gradient: Placement = Partial() if by_rows else last
        x = input.redistribute(placements=[placed]).to_local(grad_placements=[gradient])
        bias = self._own_bias(first=by_rows or mesh.get_local_rank() == 0, whole=not by_rows)
        y = Linear.forward(self._own(weight.to_local(), bias), _Arrived.of(x))
        return DTensor.from_local(y, mesh, [last if by_rows else Partial()], run_check=False)

    def _own_bias(self, *, first: bool, whole: bool) -> torch.Tensor | None:
        """This rank's part; along K the first rank adds the whole bias, the others zeros."""
        bias: Any = self.bias
        if bias is None:
            return None
        if not whole:
            return cast(torch.Tensor, bias.to_local())
        mine: torch.Tensor = bias.to_local(grad_placements=[Partial()])
        return mine if first else mine * 0.0

    def _own(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A layer of this rank's part alone, with this layer's plan and counts."""
        own = Linear.__new__(Linear)
        torch.nn.Module.__init__(own)
        own._parameters.update(weight=cast(Any, weight), bias=cast(Any, bias))
        own.out_features, own.in_features = weight.shape
        own.lowprec_products, own.lowprec_applied = self.lowprec_products, False
        return own


class _Arrived(torch.autograd.Function):
    """A tensor that a collective is still filling, once it is there."""

    @staticmethod
    def of(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, AsyncCollectiveTensor):
            return x
        return cast(torch.Tensor, _Arrived.apply(x))  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> torch.Tensor:
        return x.wait()

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
        return dx
