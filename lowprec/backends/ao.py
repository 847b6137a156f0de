"""Adapter to torchao 0.18: its products for our codes, and its whole layers beside ours.

Its casts are not ours, bit for bit: float8 multiplies by max / amax where we divide by amax / max,
and MXFP8 derives RCEIL by a float logarithm, saturates a block with Inf, and loses blocks below
2^-127 x 448. So `quantize` is always refused. A product is served from our codes where torchao's
GEMM rounds once: fp8_tensorwise by torch._scaled_mm (sm89 and later, else its own emulation) and
mxfp8 by MXTensor (sm100, else KernelPreference.EMULATED). That changes no bit of a cast, but other
backends multiply the same operands through fewer layers, so torchao is not in ORDER.

`layer` gives torchao's own layer from a layer and a policy of ours, sharing its Parameters: a peer
for gates and benchmarks, in torchao's numerics.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from lowprec.errors import UnsupportedError
from lowprec.formats import Cast, ScaleRule
from lowprec.hardware import Hardware
from lowprec.policy import BF16, LinearPolicy, Product, casts
from lowprec.rng import RandomStream
from lowprec.tensor import QuantizedTensor

LIBRARY: Final = Library("torchao", "torchao", (0, 18), "ao")
_GRANULARITY: Final = {"fp8_tensorwise": "tensorwise", "fp8_rowwise": "axiswise"}
_NATIVE: Final = {"float8": (8, 9), "mxfp8": (10, 0)}
_SIDES: Final = {"float8": 16, "mxfp8": 32}
_OTHER_NUMERICS: Final = {
    "fp8_1x128": "its blockwise layer has free float32 scales, not powers of two",
    "fp8_128x128": "its blockwise layer has free float32 scales, not powers of two",
    "mxfp8_1x128": "its MXFP8 has blocks of 1x32 only",
    "mxfp8_128x128": "its MXFP8 has blocks of 1x32 only",
    "mxfp8_32x32": "its MXFP8 layer casts weights in blocks of 1x32; write 'mxfp8'",
    "mxfp8_e5m2": "its MXFP8 layer casts everything to E4M3",
    "nvfp4": "its NVFP4 keeps block scales above 2^-6, other numerics than ours",
    "nvfp4_16x16": "its NVFP4 keeps block scales above 2^-6, other numerics than ours",
}


@dataclass(frozen=True)
class Float8Form:
    """A Float8LinearConfig: (left, right) granularity of each product; None: high precision."""

    fprop: tuple[str, str] | None
    dgrad: tuple[str, str] | None
    wgrad: tuple[str, str] | None

    family = "float8"


@dataclass(frozen=True)
class MXForm:
    """An MXFP8TrainingOpConfig: the scale rule, and whether wgrad stays in high precision."""

    scale_rule: ScaleRule
    wgrad_in_high_precision: bool

    family = "mxfp8"


Form = Float8Form | MXForm


def form_of(policy: LinearPolicy) -> Form | str:
    """What torchao calls this policy, or the sentence that says why it cannot be said."""
    if reason := common_refusal(policy):
        return reason
    names = set()
    for product, gemm in casts_of(policy):
        if gemm.rotation is not None:
            return (
                f"{product} is rotated ({gemm.rotation}); torchao rotates no FP8 or MXFP8 operand"
            )
        for cast in (gemm.left, gemm.right):
            if reason := _unsayable(cast):
                return f"{product} is {cast}: {reason}"
            names.add(cast.format.name)
    if names == {"mxfp8"}:
        return _mx_form(policy)
    if "mxfp8" in names:
        return f"{policy} mixes MXFP8 and FP8, which are two kinds of layer in torchao"
    return Float8Form(*(_granularities(product) for _, product in policy.items()))


def _granularities(product: Product) -> tuple[str, str] | None:
    left, right = casts(product)
    if left is None or right is None:
        return None
    return _GRANULARITY[left.format.name], _GRANULARITY[right.format.name]


def _unsayable(cast: Cast) -> str | None:
    name = cast.format.name
    if name in _OTHER_NUMERICS:
        return _OTHER_NUMERICS[name]
    if name not in ("mxfp8", *_GRANULARITY):
        return "torchao trains in no such format"
    if cast.stochastic:
        return "torchao rounds FP8 and MXFP8 to nearest only"
    return None


def _mx_form(policy: LinearPolicy) -> MXForm | str:
    if policy.fprop is BF16 or policy.dgrad is BF16:
        return "of the three products, torchao's MXFP8 layer can leave wgrad alone in bf16"
    every = {cast.scale_rule for _, gemm in casts_of(policy) for cast in (gemm.left, gemm.right)}
    if len(every) > 1 or not every <= {ScaleRule.RCEIL, ScaleRule.FLOOR}:
        return (
            "torchao's MXFP8 layer has one scale rule for all casts, rceil or floor; this policy "
            f"has {', '.join(sorted(every))}"
        )
    return MXForm(every.pop(), policy.wgrad is BF16)


def emulated(form: Form, hardware: Hardware) -> bool:
    """True where torchao has no native kernels for `form` and its own emulation is used."""
    return below(hardware, _NATIVE[form.family]) is not None


def config(form: Form, *, emulate: bool) -> Any:
    """torchao's own config: a Float8LinearConfig, or an MXFP8TrainingOpConfig.

    Fast accumulation is off in every product, scales are not rounded to powers of two, and every
    operand is E4M3: what our formats say, and not what torchao's recipe names stand for.
    """
    return _mx_config(form, emulate) if isinstance(form, MXForm) else _float8(form, emulate)


def _mx_config(form: MXForm, emulate: bool) -> Any:
    theirs = LIBRARY.load("torchao.prototype.moe_training.config")
    preference = theirs.KernelPreference
    return theirs.MXFP8TrainingOpConfig(
        kernel_preference=preference.EMULATED if emulate else preference.AUTO,
        wgrad_with_hp=form.wgrad_in_high_precision,
        scale_calculation_mode=theirs.ScaleCalculationMode(form.scale_rule.value),
    )


def _float8(form: Float8Form, emulate: bool) -> Any:
    theirs = LIBRARY.load("torchao.float8.config")

    def cast_configs(product: tuple[str, str] | None) -> list[Any]:
        if product is None:
            one = theirs.CastConfig(
                scaling_type=theirs.ScalingType.DISABLED, target_dtype=torch.float8_e4m3fn
            )
            return [one, one]
        return [
            theirs.CastConfig(
                scaling_granularity=theirs.ScalingGranularity(side),
                target_dtype=torch.float8_e4m3fn,
            )
            for side in product
        ]

    (x, w), (dy, w_dgrad), (dy_wgrad, x_wgrad) = map(
        cast_configs, (form.fprop, form.dgrad, form.wgrad)
    )
    slow = theirs.Float8GemmConfig(use_fast_accum=False)
    return theirs.Float8LinearConfig(
        cast_config_input=x,
        cast_config_input_for_grad_weight=x_wgrad,
        cast_config_weight=w,
        cast_config_weight_for_grad_input=w_dgrad,
        cast_config_grad_output=dy,
        cast_config_grad_output_for_grad_weight=dy_wgrad,
        gemm_config_output=slow,
        gemm_config_grad_input=slow,
        gemm_config_grad_weight=slow,
        emulate=emulate,
    )


def layer(linear: nn.Linear, policy: LinearPolicy) -> nn.Module:
    """torchao's layer for `policy`, with the very Parameters of `linear`, which stays as it is.

    Native where the GPU has the kernels, else in torchao's own emulation (slow; for numerics).
    Rows must come in multiples of 16, for MXFP8 of 32. Raises UnsupportedError with the reason when
    torchao cannot say the policy or take the layer, or is not installed in the right version.
    """
    form = form_of(policy)
    if isinstance(form, str):
        raise UnsupportedError(f"torchao refused: {form}")
    LIBRARY.check_layer(linear, _SIDES[form.family])
    theirs = config(form, emulate=emulated(form, hardware_of(linear.weight)))
    if isinstance(form, Float8Form):
        convert = LIBRARY.load("torchao.float8").convert_to_float8_training
        return convert(linear, config=theirs)  # type: ignore[no-any-return]
    # Not quantize_ with this config: it drops the bias and replaces the Parameter (torchao 0.18).
    peer: nn.Module = LIBRARY.load("torchao.prototype.moe_training.mxfp8_linear").MXFP8Linear(
        linear.in_features,
        linear.out_features,
        bias=False,
        device="meta",
        kernel_preference=theirs.kernel_preference,
        scale_calculation_mode=theirs.scale_calculation_mode,
        wgrad_with_hp=theirs.wgrad_with_hp,
    )
    peer.weight, peer.bias = linear.weight, linear.bias
    return peer.train(linear.training)


def refuse(op: str, facts: Facts) -> str | None:
    """None for products of fp8_tensorwise or mxfp8 codes where torchao is installed."""
    if op != "matmul":
        return f"torchao's {op} gives other bits than ours"
    names = {cast and cast.format.name for cast in (facts.left, facts.right)}
    if names == {"fp8_rowwise"}:
        return (
            "without fast accumulation torchao rounds a rowwise product to bf16 before scaling it"
        )
    if names not in ({"fp8_tensorwise"}, {"mxfp8"}):
        shown = " x ".join(str(cast or "bf16") for cast in (facts.left, facts.right))
        return f"torchao multiplies fp8_tensorwise and mxfp8 codes only, not {shown}"
    return LIBRARY.unusable("torchao.float8")


def quantize(
    x: torch.Tensor, cast: Cast, *, axis: int, stream: RandomStream | None = None
) -> QuantizedTensor:
    """Always raises UnsupportedError: see `refuse`."""
    del axis, stream
    reason = refuse("quantize", Facts(hardware_of(x), cast, None))
    raise UnsupportedError(f"torchao refused: {reason}")


def matmul(
    a: torch.Tensor | QuantizedTensor,
    b: torch.Tensor | QuantizedTensor,
    *,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a [M, K] times b [N, K] transposed, both codes of ours, by torchao; see lowprec.ops.matmul.

    Sums are float32, rounded once, but for native MXFP8 with a bias or a result other than bf16:
    torchao's GEMM rounds to bf16 first.
    """
    if not isinstance(a, QuantizedTensor) or not isinstance(b, QuantizedTensor):
        raise UnsupportedError("torchao refused: both operands of its products must be quantized")
    if a.format != b.format or a.format.name not in ("fp8_tensorwise", "mxfp8"):
        raise UnsupportedError(
            "torchao refused: it multiplies fp8_tensorwise and mxfp8 codes only, not "
            f"{a.format.name} x {b.format.name}"
        )
    rows, columns = a.shape[0], b.shape[0]
    if 0 in (rows, columns, a.shape[1]):
        product = a.codes.new_zeros((rows, columns), dtype=torch.float32)
    else:
        multiply = _mx_product if a.format.name == "mxfp8" else _float8_product
        product = multiply(a, b)[:rows, :columns]
    if bias is not None:
        product = product + bias.to(product.dtype)
    return product.to(out_dtype)


def _float8_product(a: QuantizedTensor, b: QuantizedTensor) -> torch.Tensor:
    theirs = LIBRARY.load("torchao.float8.float8_training_tensor")
    emulate = below(hardware_of(a.codes), _NATIVE["float8"]) is not None
    one = theirs.ScaledMMConfig(emulate, False, False, False)
    configs = theirs.LinearMMConfig(one, one, one)
    roles = theirs.GemmInputRole
    left, right = (
        theirs.Float8TrainingTensor(
            padded(t.codes, 16, 16).view(torch.float8_e4m3fn),
            t.scales.reshape(()).reciprocal(),  # torchao keeps the factor of the cast
            torch.float32,
            configs,
            role,
        )
        for t, role in ((a, roles.INPUT), (b, roles.WEIGHT))
    )
    return torch.mm(left, right.t())


def _mx_product(a: QuantizedTensor, b: QuantizedTensor) -> torch.Tensor:
    theirs = LIBRARY.load("torchao.prototype.mx_formats.mx_tensor")
    emulate = below(hardware_of(a.codes), _NATIVE["mxfp8"]) is not None
    preference = theirs.KernelPreference
    left, right = (
        theirs.MXTensor(
            padded(t.codes, 32, 32).view(torch.float8_e4m3fn),
            functional.pad(t.scales, (0, 0, 0, -t.shape[0] % 32)).view(torch.float8_e8m0fnu),
            torch.float8_e4m3fn,
            32,
            torch.float32,
            preference.EMULATED if emulate else preference.AUTO,
            None,
            False,
        )
        for t in (a, b)
    )
    return torch.mm(left, right.t()).float()
