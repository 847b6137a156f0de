"""Adapter to Transformer Engine 2.20: its products for our codes, and its whole layers beside ours.

Its casts are its own kernels: per-tensor scaling multiplies by max / amax where we divide by
amax / max, MXFP8 saturates a block with Inf where ours becomes NaN. So `quantize` is always
refused. A product is served from our codes in the forms that run on Hopper: fp8_tensorwise, and
blocks of 1x128 and 128x128 with power-of-two scales, with split accumulation. MXFP8 and NVFP4 codes
are not handed over. It adds nothing to what cuBLAS gives through torch, so it is not in ORDER.

`layer` gives Transformer Engine's own layer from a layer and a policy of ours, sharing its
Parameters: a peer for gates and benchmarks, in Transformer Engine's numerics. Delayed scaling has
no counterpart: our casts keep no history.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from lowprec.backends.facts import Facts
from lowprec.backends.peers import (
    Library,
    below,
    casts_of,
    common_refusal,
    hardware_of,
    padded,
)
from lowprec.blocks import power_of_two
from lowprec.errors import UnsupportedError
from lowprec.formats import Cast, ScaleRule
from lowprec.hardware import Hardware
from lowprec.policy import BF16, LinearPolicy
from lowprec.rng import RandomStream
from lowprec.tensor import QuantizedTensor

LIBRARY: Final = Library("Transformer Engine", "transformer_engine", (2, 20), "te")
_NEEDS: Final = {
    "Float8CurrentScaling": (8, 9),
    "Float8BlockScaling": (9, 0),
    "MXFP8BlockScaling": (10, 0),
    "NVFP4BlockScaling": (10, 0),
}
_TOO_NEW: Final = (12, 0)  # for MXFP8: not all GEMM layouts exist there
_ELEMENTS: Final = ("mxfp8", "fp8", "nvfp4")


@dataclass(frozen=True)
class Form:
    """The name of a Transformer Engine recipe, and its options as (name, value), Formats by name.

    Options that are left out keep the library's default.
    """

    recipe: str
    options: tuple[tuple[str, Any], ...] = ()

    def but(self, **options: Any) -> Form:
        """The same recipe with these options as well."""
        return Form(self.recipe, (*self.options, *options.items()))


def _table() -> Mapping[LinearPolicy, Form]:
    current = Form("Float8CurrentScaling", (("fp8_format", "E4M3"),))
    block = Form("Float8BlockScaling", (("fp8_format", "E4M3"),))
    mx = Form("MXFP8BlockScaling")
    texts = {
        "fp8_tensorwise": current,
        "mxfp8": mx.but(fp8_format="E4M3", enable_2d_quantization=False),
        "mxfp8 / mxfp8_e5m2 x mxfp8 / mxfp8_e5m2 x mxfp8": mx.but(
            fp8_format="HYBRID", enable_2d_quantization=False
        ),
        "mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8": mx.but(
            fp8_format="E4M3", enable_2d_quantization=True
        ),
        "mxfp8 x mxfp8_32x32 / mxfp8_e5m2 x mxfp8_32x32 / mxfp8_e5m2 x mxfp8": mx.but(
            fp8_format="HYBRID", enable_2d_quantization=True
        ),
    }
    for name in ("mxfp8", "fp8"):
        tiles = f"{name}_1x128 x {name}_128x128"
        texts[f"{name}_1x128"] = block.but(w_block_scaling_dim=1)
        texts[f"{tiles} / {tiles} / {name}_1x128"] = block.but(w_block_scaling_dim=2)
    choices = itertools.product(("", " + rht16"), ("", ":sr"), ("", "_16x16"))
    for rotation, rounding, weight in choices:
        dy, w = f"nvfp4{rounding}", f"nvfp4{weight}"
        texts[f"nvfp4 x {w} / {dy} x {w} / {dy} x nvfp4{rotation}"] = Form(
            "NVFP4BlockScaling",
            (
                ("disable_rht", not rotation),
                ("disable_stochastic_rounding", not rounding),
                ("disable_2d_quantization", not weight),
                ("row_scaled_activation", False),
                ("nvfp4_4over6", "none"),
            ),
        )
    table = {LinearPolicy.parse(text): form for text, form in texts.items()}
    # Of forms that differ only in what backward does, the first stands for "forward only".
    forward_only = {
        LinearPolicy(policy.fprop, BF16, BF16): form.but(backward_override="high_precision")
        for policy, form in reversed(table.items())
    }
    return MappingProxyType({**forward_only, **table})


FORMS: Final = _table()
"""Every policy that Transformer Engine can say, and its name for it."""


def form_of(policy: LinearPolicy) -> Form | str:
    """What Transformer Engine calls this policy, or the sentence that says why it has no name."""
    if reason := common_refusal(policy):
        return reason
    if policy in FORMS:
        return FORMS[policy]
    for product, gemm in casts_of(policy):
        if gemm.rotation is not None:
            return (
                f"{product} is rotated ({gemm.rotation}); Transformer Engine rotates only in "
                "NVFP4, both operands of wgrad, as rht16 with its fixed signs"
            )
        for cast in (gemm.left, gemm.right):
            if reason := _unsayable(cast):
                return f"{product} is {cast}: {reason}"
    if policy.fprop is BF16 or policy.wgrad is BF16 or policy.dgrad is BF16:
        return (
            "one product alone cannot stay bf16 in Transformer Engine; it has all three quantized, "
            "or fprop with dgrad and wgrad in bf16"
        )
    return f"no recipe of Transformer Engine casts like {policy}"


def _unsayable(cast: Cast) -> str | None:
    if cast.format.name == "fp8_rowwise":
        return "Transformer Engine has no scale a row"
    if not cast.format.name.startswith(_ELEMENTS):
        return "Transformer Engine has no such format"
    if cast.scale_rule not in (ScaleRule.RCEIL, ScaleRule.EXACT):
        return "Transformer Engine rounds scales up only (rceil)"
    if cast.stochastic and not cast.format.name.startswith("nvfp4"):
        return "Transformer Engine rounds stochastically in NVFP4 only"
    return None


def unfit(form: Form, hardware: Hardware) -> str | None:
    """None when `hardware` runs the recipe, else a sentence."""
    if reason := below(hardware, _NEEDS[form.recipe]):
        return reason
    if form.recipe == "MXFP8BlockScaling" and (hardware.capability or _TOO_NEW) >= _TOO_NEW:
        return f"needs sm100 or sm103, this is {hardware}"
    return None


def recipe(form: Form) -> Any:
    """Transformer Engine's own recipe object, with fast accumulation off in every product.

    Raises UnsupportedError when one of its environment variables (NVTE_*) changes what scales are.
    """
    theirs = LIBRARY.load("transformer_engine.common.recipe")
    options = {"backward_override": None, **dict(form.options)}
    if "fp8_format" in options:
        options["fp8_format"] = theirs.Format[options["fp8_format"]]
    if form.recipe == "Float8CurrentScaling":
        options["fp8_gemm_fprop"] = theirs.MMParams(use_split_accumulator=True)
    made = getattr(theirs, form.recipe)(**options)
    powers = {"Float8CurrentScaling": False, "Float8BlockScaling": True}.get(form.recipe)
    if powers is not None and made.fp8_quant_fwd_inp.power_2_scale is not powers:
        raise UnsupportedError(
            "Transformer Engine refused: NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES or "
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES is set, which changes its scales; unset it before "
            "transformer_engine is imported"
        )
    return made


class Peer(nn.Module):
    """Transformer Engine's layer `module`, and the autocast region with `recipe` that it needs."""

    def __init__(self, module: nn.Module, recipe: Any) -> None:
        super().__init__()
        self.module, self.recipe = module, recipe
        self._autocast = LIBRARY.load("transformer_engine.pytorch").autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to x [..., K]; Transformer Engine wants rows in multiples of 8, or 32."""
        with self._autocast(enabled=True, recipe=self.recipe):
            return self.module(x)  # type: ignore[no-any-return]


def _leave(weight: torch.Tensor) -> None:
    """Initialize nothing: no random number is drawn for memory that is replaced at once."""


def layer(linear: nn.Linear, policy: LinearPolicy) -> Peer:
    """Transformer Engine's layer for `policy`, with the very Parameters of `linear`, unchanged.

    The module itself is `.module`. Raises UnsupportedError with the reason when Transformer Engine
    cannot say the policy or take the layer, does not run it on this GPU, or is not installed in the
    right version.
    """
    form = form_of(policy)
    if isinstance(form, str):
        raise UnsupportedError(f"Transformer Engine refused: {form}")
    LIBRARY.check_layer(
        linear, 32 if form.recipe in ("MXFP8BlockScaling", "NVFP4BlockScaling") else 16
    )
    if reason := unfit(form, hardware_of(linear.weight)):
        raise UnsupportedError(f"Transformer Engine refused: {form.recipe} {reason}")
    module = LIBRARY.load("transformer_engine.pytorch").Linear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
        device=linear.weight.device,
        init_method=_leave,
    )
    module.weight = linear.weight
    if linear.bias is not None:
        module.bias = linear.bias
    return Peer(module, recipe(form)).train(linear.training)


def refuse(op: str, facts: Facts) -> str | None:
    """None for products of fp8_tensorwise or 128-block codes on the GPUs that have them."""
    if op != "matmul":
        return f"Transformer Engine's {op} gives other bits than ours"
    if reason := _unserved(facts.left, facts.right, facts.hardware):
        return reason
    return LIBRARY.unusable("transformer_engine.pytorch")


def _unserved(left: Cast | None, right: Cast | None, hardware: Hardware) -> str | None:
    names = [cast.format.name if cast else "bf16" for cast in (left, right)]
    if names == ["fp8_tensorwise"] * 2:
        return below(hardware, (8, 9))
    if all(name.endswith("x128") for name in names):
        if all(name.endswith("_128x128") for name in names):
            return "cuBLAS has no product of two operands in 128x128 blocks"
        if hardware.capability is None or hardware.capability[0] != 9:
            return f"needs sm90, this is {hardware}"
        return None
    if all(name.startswith(("mxfp8", "nvfp4")) for name in names):
        return below(hardware, (10, 0)) or (
            "MXFP8 and NVFP4 codes are not handed over; compare whole layers with te.layer"
        )
    return f"Transformer Engine has no product {' x '.join(names)}"


def quantize(
    x: torch.Tensor, cast: Cast, *, axis: int, stream: RandomStream | None = None
) -> QuantizedTensor:
    """Always raises UnsupportedError: see `refuse`."""
    del axis, stream
    reason = refuse("quantize", Facts(hardware_of(x), cast, None))
    raise UnsupportedError(f"Transformer Engine refused: {reason}")


def matmul(
    a: torch.Tensor | QuantizedTensor,
    b: torch.Tensor | QuantizedTensor,
    *,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a [M, K] times b [N, K] transposed, both codes of ours, by Transformer Engine.

    See lowprec.ops.matmul: sums are float32 and are rounded once. Raises UnsupportedError for
    codes that Transformer Engine does not multiply on this machine.
    """
    if not isinstance(a, QuantizedTensor) or not isinstance(b, QuantizedTensor):
        raise UnsupportedError(
            "Transformer Engine refused: both operands of its products must be quantized"
        )
    left, right = (Cast(t.format, t.format.scale_rules[0]) for t in (a, b))
    if reason := _unserved(left, right, hardware_of(a.codes)):
        raise UnsupportedError(f"Transformer Engine refused: {reason}")
    rows, columns = a.shape[0], b.shape[0]
    if 0 in (rows, columns, a.shape[1]):
        product = a.codes.new_zeros((rows, columns), dtype=torch.float32)
    else:
        gemm = LIBRARY.load("transformer_engine.pytorch.cpp_extensions").general_gemm
        # Transformer Engine counts columns first: its A is our b.
        product, *_ = gemm(
            _handed_over(b),
            _handed_over(a),
            out_dtype=torch.float32,
            layout="TN",
            use_split_accumulator=True,
        )
        product = product[:rows, :columns]
    if bias is not None:
        product = product + bias.to(product.dtype)
    return product.to(out_dtype)


def _handed_over(t: QuantizedTensor) -> Any:
    """The same codes and scales as one of Transformer Engine's tensors, padded with zeros."""
    dtype = LIBRARY.load("transformer_engine.pytorch").DType.kFloat8E4M3
    storage = "transformer_engine.pytorch.tensor.storage"
    if t.format.name == "fp8_tensorwise":
        theirs = LIBRARY.load(f"{storage}.float8_tensor_storage").Float8TensorStorage
        codes = padded(t.codes, 16, 16)
        scale = t.scales.reshape(1)
        return theirs(data=codes, fp8_scale_inv=scale, fp8_dtype=dtype, fake_dtype=torch.float32)
    theirs = LIBRARY.load(f"{storage}.float8_blockwise_tensor_storage")
    codes = padded(t.codes, 16, 128)
    return theirs.Float8BlockwiseQTensorStorage(
        rowwise_data=codes,
        rowwise_scale_inv=_block_scales(t, codes.shape[0]),
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=dtype,
        quantizer=None,
        is_2D_scaled=t.format.transposable,
        fake_dtype=torch.float32,
    )


def _block_scales(t: QuantizedTensor, rows: int) -> torch.Tensor:
    """float32 scales of [rows, K]: [K / 128, rows up to 4s] of 1x128, [rows / 128, 4s] of tiles."""
    scales = power_of_two(t.scales.int()) if t.format.scale == "e8m0" else t.scales
    if not t.format.transposable:
        scales = functional.pad(scales, (0, 0, 0, rows - scales.shape[0]), value=1.0).mT
    return functional.pad(scales, (0, -scales.shape[1] % 4), value=1.0).contiguous()
