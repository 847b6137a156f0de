"""What benchmarks/casts.py times: our kernels, and the peers of each at the same input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from lowprec.backends import emulated, reference, triton_kernels
from lowprec.backends.triton_kernels import fused
from lowprec.formats import Cast
from lowprec.rng import RandomStream
from lowprec.rotation import Rotation, rotate
from lowprec.tensor import QuantizedTensor

MX, TILE = Cast.parse("mxfp8"), Cast.parse("mxfp8_32x32")
RANDOM = Cast.parse("mxfp8:sr")
STREAM = RandomStream(7, layer="layer", role="wgrad.dy")
TURN = Rotation(32)


@dataclass
class Case:
    """One op at one input: what to run, and the bytes that it must read and write.

    bar: the least share of the copy bandwidth that the project asks for, at 2^26 elements or more.
    """

    op: str
    direction: str
    format: str
    run: Callable[[], Any]
    bytes: int
    backend: str = "triton"
    bar: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What a case has in common with its peers."""
        return self.op, self.direction, self.format


def size(found: Any) -> int:
    """Bytes of the tensors that an op returned, without padding."""
    if isinstance(found, QuantizedTensor):
        return sum(t.numel() * t.element_size() for t in (found.codes, found.scales))
    if isinstance(found, torch.Tensor):
        return found.numel() * found.element_size()
    if isinstance(found, fused.Normalized):
        return size(found.result) + size(found.rstd) + size(found.mean)
    return sum(size(one) for one in found) if isinstance(found, (tuple, list)) else 0


def same(got: QuantizedTensor, want: QuantizedTensor, what: str) -> None:
    """End the run unless codes and scales are equal."""
    if not (torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales)):
        sys.exit(f"{what}: codes or scales differ from the reference; nothing is timed")


def checked(x: torch.Tensor, name: str) -> None:
    """Compare the casts of x with the reference on its first 4096 rows and 128 columns."""
    cast = Cast.parse(name)
    row, column = triton_kernels.quantize_both(x, cast, cast)
    head, left = x[:4096], x[:, :128]
    alone = triton_kernels.quantize(x, cast, axis=-1)
    down = triton_kernels.quantize(x, cast, axis=-2)
    law_r, law_c = (reference.quantize(t, cast, axis=a) for t, a in ((head, -1), (left, -2)))
    for one in (row, alone):
        scales = one.scales[: len(law_r.scales)]
        same(QuantizedTensor(one.codes[:4096], scales, cast.format, -1), law_r, f"{name} by row")
    for one in (column, down):
        scales = one.scales[:, : law_c.scales.shape[1]]
        part = QuantizedTensor(one.codes[:, :128], scales, cast.format, -2)
        same(part, law_c, f"{name} by column")
    if cast == MX:
        for turned, stream in ((MX, None), (RANDOM, STREAM)):
            rotated = rotate(head, TURN, axis=-1, side="left")
            want = reference.quantize(rotated, turned, axis=-1, stream=stream)
            streams = (None, stream)
            got = triton_kernels.rotate_quantize(
                head, TURN, turned, axis=-1, side="left", streams=streams
            )
            same(got, want, f"rotation and {turned}")


def casts_of(x: torch.Tensor) -> Iterator[Case]:
    """The casts of x [rows, columns], with and without rotation and random rounding."""

    def alone(cast: Cast, axis: int, stream: RandomStream | None = None) -> Callable[[], Any]:
        return lambda: triton_kernels.quantize(x, cast, axis=axis, stream=stream)

    def both(cast: Cast, **options: Any) -> Callable[[], Any]:
        return lambda: triton_kernels.quantize_both(x, cast, cast, **options)

    def turned(cast: Cast, axis: int, stream: RandomStream | None = None) -> Callable[[], Any]:
        streams = (None, stream)
        return lambda: triton_kernels.rotate_quantize(
            x, TURN, cast, axis=axis, side="left", streams=streams
        )

    wide, square = Cast.parse("mxfp8_1x128"), Cast.parse("mxfp8_128x128")
    rows: list[tuple[str, str, Cast, Callable[[], Any], float | None]] = [
        ("cast", "row", MX, alone(MX, -1), 0.93),
        ("cast", "column", MX, alone(MX, -2), None),
        ("cast", "both", MX, both(MX), 0.80),
        ("cast", "row", TILE, alone(TILE, -1), None),
        ("cast", "both", TILE, both(TILE), 0.88),
        ("cast", "both", wide, both(wide), None),
        ("cast", "both", square, both(square), None),
        ("cast", "row", Cast.parse("fp8_rowwise"), alone(Cast.parse("fp8_rowwise"), -1), None),
        ("cast", "row", RANDOM, alone(RANDOM, -1, STREAM), None),
        ("cast", "both", RANDOM, both(RANDOM, streams=(STREAM, STREAM)), None),
        ("rht32 + cast", "row", MX, turned(MX, -1), 0.85),
        ("rht32 + cast", "row", RANDOM, turned(RANDOM, -1, STREAM), 0.60),
        ("rht32 + cast", "column", MX, turned(MX, -2), None),
        ("round trip", "row", MX, lambda: triton_kernels.round_trip(x, MX, axis=-1), None),
    ]
    for op, direction, cast, run, bar in rows:
        written = run()
        # The scales of a tile serve both directions.
        shared = size(written[0].scales) if direction == "both" and cast is TILE else 0
        total = size(x) + size(written) - shared
        yield Case(op, direction, str(cast), run, total, bar=bar)
    held = triton_kernels.quantize(x, MX, axis=-1)
    scales = held.scales.view(len(x), -1)
    run = lambda: triton_kernels.dequantize(held, dtype=torch.bfloat16)  # noqa: E731
    yield Case("dequantize", "row", "mxfp8", run, size(held) + size(x))
    swizzled = triton_kernels.to_swizzled(scales)
    total = size(scales) + size(swizzled)
    yield Case("swizzle", "", "mxfp8", lambda: triton_kernels.to_swizzled(scales), total)


def fused_of(x: torch.Tensor) -> Iterator[Case]:
    """Norms and activations with the cast, and their backward."""
    cols = x.shape[1]
    weight, bias = (torch.randn(cols, device=x.device).bfloat16() for _ in range(2))
    other, third = torch.randn_like(x), torch.randn_like(x)
    rms = fused.normalize(x, MX, weight=weight)
    layer = fused.normalize(x, MX, weight=weight, bias=bias, centered=True)
    for done, centered in ((rms, False), (layer, True)):
        affine = {"weight": weight, "bias": bias if centered else None}
        plain = fused.normalize(x, None, centered=centered, **affine)
        same(done.result, reference.quantize(plain.result, MX, axis=-1), "norm")  # type: ignore[arg-type]
        both, column = fused.normalize_both(x, (MX, MX), centered=centered, **affine)
        again = fused.normalize_again(both, None, **affine)
        for got, axis in ((both.result, -1), (column, -2)):
            same(got, reference.quantize(again, MX, axis=axis), "norm, both")  # type: ignore[arg-type]
    gated = fused.activate(x, other, None)
    same(fused.activate(x, other, MX), reference.quantize(gated, MX, axis=-1), "gate")  # type: ignore[arg-type]
    affine = {"weight": weight, "bias": bias}
    rows: list[tuple[str, str, Callable[[], Any], int, float | None]] = [
        ("rmsnorm", "row", lambda: fused.normalize(x, MX, weight=weight), 1, 0.90),
        ("layernorm", "row", lambda: fused.normalize(x, MX, centered=True, **affine), 1, 0.90),
        ("rmsnorm", "both", lambda: fused.normalize_both(x, (MX, MX), weight=weight), 1, 0.75),
        (
            "layernorm",
            "both",
            lambda: fused.normalize_both(x, (MX, MX), centered=True, **affine),
            1,
            None,
        ),
        (
            "rmsnorm again",
            "column",
            lambda: fused.normalize_again(rms, MX, axis=-2, weight=weight),
            1,
            None,
        ),
        (
            "rmsnorm + residual",
            "row",
            lambda: fused.normalize(x, MX, weight=weight, residual=other),
            2,
            None,
        ),
        (
            "rmsnorm backward",
            "",
            lambda: fused.normalize_backward(other, rms, weight=weight),
            2,
            None,
        ),
        (
            "layernorm backward",
            "",
            lambda: fused.normalize_backward(other, layer, weight=weight, has_bias=True),
            2,
            None,
        ),
        ("silu gate", "row", lambda: fused.activate(x, other, MX), 2, 0.85),
        ("gelu", "row", lambda: fused.activate(x, None, MX, kind="gelu"), 1, None),
        ("silu gate backward", "", lambda: fused.activate_backward(third, x, other), 3, None),
    ]
    for op, direction, run, reads, bar in rows:
        extra = size(x) if "residual" in op else 0
        total = reads * size(x) + size(run()) + extra
        yield Case(op, direction, "mxfp8" if direction else "", run, total, bar=bar)


def peers_of(x: torch.Tensor) -> Iterator[Case]:
    """The same results by others: torchao's compiled cast if it is installed, else our own."""
    # Each shape compiles for itself: past a limit of recompilations eager code would be timed.
    torch._dynamo.reset()
    name, cast = _compiled_cast()
    weight = torch.ones(x.shape[1], device=x.device, dtype=x.dtype)

    def row(t: torch.Tensor) -> Any:
        return cast(t)

    def column(t: torch.Tensor) -> Any:
        return cast(t.mT.contiguous())

    row, column = torch.compile(row), torch.compile(column)
    turn = torch.compile(lambda t: cast(rotate(t, TURN, axis=-1, side="left")))
    normed = (lambda: functional.rms_norm(x, (x.shape[1],), weight, 1e-6), "rmsnorm")
    layered = (lambda: functional.layer_norm(x, (x.shape[1],), weight), "layernorm")
    yield Case("cast", "row", "mxfp8", lambda: row(x), 0, name)
    yield Case("cast", "both", "mxfp8", lambda: (row(x), column(x)), 0, name)
    for norm, op in (normed, layered):
        yield Case(op, "row", "mxfp8", lambda norm=norm: row(norm()), 0, f"torch, {name}")
    yield Case("rht32 + cast", "row", "mxfp8", lambda: turn(x), 0, f"unfused, {name}")


def _compiled_cast() -> tuple[str, Callable[[torch.Tensor], Any]]:
    try:
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    except ImportError:
        return "torch.compile", lambda t: emulated.quantize(t, MX, axis=-1)
    import torchao

    mode = ScaleCalculationMode.RCEIL
    return f"torchao {torchao.__version__}, compiled", lambda t: to_mx(
        t, torch.float8_e4m3fn, 32, mode
    )
