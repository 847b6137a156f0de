"""Norms with a cast that has one scale for the whole tensor, as a torch.library op."""

from __future__ import annotations

import torch

from lowprec.backends.triton_kernels import launch, span_ops, streamed
from lowprec.backends.triton_kernels.launch import LIBRARY
from lowprec.backends.triton_kernels.norm_ops import norm_cast, norm_outputs
from lowprec.backends.triton_kernels.starting import repeated

LIBRARY.define(
    "norm_whole(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centered,"
    " str cast) -> Tensor[]"
)


def _norm_whole_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    cast: str,
) -> list[torch.Tensor]:
    """rstd, mean if centered, x + residual if there is one; codes both ways and their scale."""
    kept = norm_outputs(x, residual, centered, "")[:-1]
    return kept + [one[0] for one in span_ops.both_outputs(x[None], cast)]


def norm_whole(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    cast: str,
) -> list[torch.Tensor]:
    """A norm and its cast with one scale for the tensor.

    The result is never written: its largest magnitude is found first, then it is made again inside
    of the cast. Elsewhere it is.
    """
    if streamed.takes_whole(x, residual, (weight, bias), cast):
        amax = torch.zeros(1, dtype=torch.int32, device=x.device)
        return _norm_twice(x, residual, weight, bias, amax, eps, centered, cast)
    *kept, y = norm_cast(x, residual, weight, bias, eps, centered, "")
    return [*kept, *(one[0] for one in span_ops.cast_tensor_both(y[None], cast))]


@repeated
def _norm_twice(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    amax: torch.Tensor,
    eps: float,
    centered: bool,
    cast: str,
) -> list[torch.Tensor]:
    from lowprec.backends.triton_kernels import pipelined

    out = _norm_whole_fake(x, residual, weight, bias, eps, centered, cast)
    rstd, mean = out[0], out[1] if centered else None
    source = x if residual is None else out[1 + centered]
    targets = [None if residual is None else source, None, None, None, mean, rstd]
    streamed.normalize([x, residual, weight, bias], targets, eps, None, amax=amax)
    codes, codes_t, scale = (one[None] for one in out[-3:])
    affine = pipelined.Affine(weight, bias, mean, rstd)
    every = [codes, scale, codes_t, scale]
    pipelined.cast(source[None], cast, cast, every, norm=affine, amax=amax)
    return out


launch.register({"norm_whole": (norm_whole, _norm_whole_fake)})
