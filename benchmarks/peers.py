"""How far torchao and Transformer Engine are from lowprec: codes, scales and whole layers.

Prints one JSON line a case. Casts: the share of codes and scales that differ from ours. Layers:
relative difference of y, dx, dw (norm of the difference over norm of ours) and the relative error
of both against float64. What a library refuses is printed with its reason.
Run: `python benchmarks/peers.py [cpu | cuda]` with `pip install 'lowprec[ao]'` (and `[te]`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
from torch import nn

import lowprec
from lowprec import Linear, UnsupportedError
from lowprec.backends import ao, te
from lowprec.policy import LinearPolicy

ROWS, COLUMNS = 2048, 2048
LAYER = (1024, 512, 768)  # M, N, K
BLOCKS = "mxfp8_1x128 x mxfp8_128x128"
POLICIES = (
    "fp8_tensorwise",
    "fp8_rowwise",
    "mxfp8",
    "mxfp8:floor",
    "mxfp8 / mxfp8 / bf16",
    f"{BLOCKS} / {BLOCKS} / mxfp8_1x128",
)
CASTS = ("fp8_tensorwise", "fp8_rowwise", "mxfp8", "mxfp8:floor")


def data(kind: str, device: str) -> torch.Tensor:
    """float32 [ROWS, COLUMNS]: Gaussian, or Gaussian with a scale of 2^-140 to 2^120 a block."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    if kind == "wide":
        shifts = torch.randint(-140, 121, (ROWS, COLUMNS // 32), generator=generator)
        shifts = shifts.repeat_interleave(32, 1)
        half = shifts // 2
        x = x * torch.exp2(half.float()) * torch.exp2((shifts - half).float())
    return x.to(device)


def torchao_cast(x: torch.Tensor, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8) and decoding scales (E8M0 bytes or float32) of torchao's cast."""
    from torchao.float8 import float8_scaling_utils as scaling
    from torchao.float8.config import ScalingGranularity
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    if text.startswith("mxfp8"):
        mode = ScaleCalculationMode(text.partition(":")[2] or "rceil")
        scales, codes = to_mx(x, torch.float8_e4m3fn, 32, mode)
        return codes.view(torch.uint8), scales.view(torch.uint8).reshape(x.shape[0], -1)
    row = text == "fp8_rowwise"
    q = scaling.hp_tensor_to_float8_dynamic(
        x,
        torch.float8_e4m3fn,
        scaling.LinearMMConfig(),
        scaling_granularity=ScalingGranularity("axiswise" if row else "tensorwise"),
        axiswise_dim=-1 if row else None,
    )
    return q._data.view(torch.uint8), q._scale.reciprocal().reshape(-1, 1)


def casts(device: str) -> Iterator[dict[str, Any]]:
    """Shares of codes and scales of torchao's casts that are not ours."""
    for kind in ("gaussian", "wide"):
        for dtype in (torch.float32, torch.bfloat16):
            x = data(kind, device).to(dtype)
            for text in CASTS:
                ours = lowprec.quantize(x, text)
                codes, scales = torchao_cast(x, text)
                different = ours.scales != scales.to(ours.scales.dtype)
                yield {
                    "what": "cast",
                    "library": "torchao",
                    "cast": text,
                    "data": kind,
                    "dtype": str(dtype).removeprefix("torch."),
                    "codes_differ": float(f"{(ours.codes != codes).double().mean():.3g}"),
                    "scales_differ": float(f"{different.double().mean():.3g}"),
                }


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of a - b over the norm of b."""
    return float(f"{(a.double() - b.double()).norm() / b.double().norm():.3g}")


def passes(
    layer: nn.Module, weight: nn.Parameter, x: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """y, dx and dw of one forward and backward pass."""
    x, weight.grad = x.detach().requires_grad_(), None
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    return y.detach(), x.grad, weight.grad


def layers(device: str) -> Iterator[dict[str, Any]]:
    """Both libraries' layers against ours, bf16, by policy."""
    m, n, k = LAYER
    torch.manual_seed(1)
    plain = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    x, dy = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(m, n, dtype=torch.bfloat16)
    plain, x, dy = plain.to(device), x.to(device), dy.to(device)
    w64, x64, dy64 = plain.weight.detach().double(), x.double(), dy.double()
    exact = (x64 @ w64.T, dy64 @ w64, dy64.T @ x64)
    for text in POLICIES:
        policy = LinearPolicy.parse(text)
        ours = Linear(k, n, bias=False, dtype=torch.bfloat16, device=device, policy=policy)
        ours.weight = plain.weight
        mine = passes(ours, plain.weight, x, dy)
        for name, build in (("torchao", ao.layer), ("transformer_engine", te.layer)):
            line = {"what": "layer", "library": name, "policy": text}
            try:
                peer = build(plain, policy)
            except UnsupportedError as error:
                yield {**line, "refused": str(error)}
                continue
            theirs = passes(peer, plain.weight, x, dy)
            for product, a, b, c in zip(("y", "dx", "dw"), theirs, mine, exact, strict=True):
                line[product] = {
                    "difference": relative(a, b),
                    "our_error": relative(b, c),
                    "their_error": relative(a, c),
                }
            yield line


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main(device: str) -> None:
    """Print the environment and every case."""
    packages = {name: version(name) for name in ("torch", "torchao", "transformer_engine")}
    print(json.dumps({"script": "benchmarks/peers.py", "device": device, **packages}))
    if reason := ao.LIBRARY.unusable("torchao.float8"):
        print(json.dumps({"what": "cast", "library": "torchao", "refused": reason}))
    else:
        for line in casts(device):
            print(json.dumps(line), flush=True)
    for line in layers(device):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("device", nargs="?", choices=("cpu", "cuda"), default="cpu")
    main(parser.parse_args().device)
