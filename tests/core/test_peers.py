"""Adapters to torchao and Transformer Engine: names of policies, refusals, bits, shared weights."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import nn

import lowprec
from lowprec import UnsupportedError, ops
from lowprec.backends import MODULES, ORDER, ao, peers, te
from lowprec.backends.facts import Facts
from lowprec.formats import FORMATS, Cast, ScaleRule
from lowprec.hardware import NAMED
from lowprec.policy import BF16, LinearPolicy
from lowprec.recipe import load_recipe, shipped_recipes

TILES = "mxfp8_1x128 x mxfp8_128x128"
NVFP4 = "nvfp4 x nvfp4_16x16 / nvfp4:sr x nvfp4_16x16 / nvfp4:sr x nvfp4 + rht16"
ROW, TENSOR = ("axiswise", "axiswise"), ("tensorwise", "tensorwise")
# Whatever is installed: the tests that need the library ask for it by `needs_torchao`.
TORCHAO = ao.LIBRARY.missing()
needs_torchao = pytest.mark.skipif(TORCHAO is not None, reason=str(TORCHAO))


def facts(left: str | None, right: str | None, machine: str) -> Facts:
    casts = [None if one is None else Cast.parse(one) for one in (left, right)]
    return Facts(NAMED[machine], *casts)


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Pretend that exactly these of the two libraries are installed."""

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(peers.metadata, "version", version)


# policy, what torchao calls it
AO_FORMS = {
    "fp8_tensorwise": ao.Float8Form(TENSOR, TENSOR, TENSOR),
    "fp8_rowwise": ao.Float8Form(ROW, ROW, ROW),
    "fp8_rowwise / fp8_rowwise x fp8_tensorwise / bf16": ao.Float8Form(
        ROW, ("axiswise", "tensorwise"), None
    ),
    "bf16 / fp8_tensorwise / fp8_rowwise": ao.Float8Form(None, TENSOR, ROW),
    "mxfp8": ao.MXForm(ScaleRule.RCEIL, False),
    "mxfp8 / mxfp8 / bf16": ao.MXForm(ScaleRule.RCEIL, True),
    "mxfp8:floor": ao.MXForm(ScaleRule.FLOOR, False),
}
AO_REFUSED = {
    "bf16": "quantizes nothing",
    "mxfp8 / mxfp8 / skip": "wgrad is skip",
    "mxfp8 / mxfp8 / mxfp8 + rht32:none": r"wgrad is rotated \(rht32:none\)",
    "mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8": "fprop is mxfp8_32x32: .*write 'mxfp8'",
    "mxfp8 / mxfp8_e5m2 x mxfp8 / mxfp8": "dgrad is mxfp8_e5m2: .*E4M3",
    f"{TILES} / {TILES} / mxfp8_1x128": "blocks of 1x32 only",
    "fp8_1x128": "not powers of two",
    "mxfp8:sr": "nearest only",
    "mxfp8 / bf16 / mxfp8": "can leave wgrad alone in bf16",
    "mxfp8 / mxfp8:floor / mxfp8": "one scale rule .* floor, rceil",
    "mxfp8:ceil": "rceil or floor",
    "mxfp8 / mxfp8 / fp8_rowwise": "mixes MXFP8 and FP8",
    "mxfp4": "trains in no such format",
    "mxfp6_e2m3": "trains in no such format",
    "nvfp4": "block scales above",
}
TE_FORMS = {
    "fp8_tensorwise": ("Float8CurrentScaling", {"fp8_format": "E4M3"}),
    "fp8_tensorwise / bf16 / bf16": (
        "Float8CurrentScaling",
        {"fp8_format": "E4M3", "backward_override": "high_precision"},
    ),
    f"{TILES} / {TILES} / mxfp8_1x128": (
        "Float8BlockScaling",
        {"fp8_format": "E4M3", "w_block_scaling_dim": 2},
    ),
    "fp8_1x128": ("Float8BlockScaling", {"fp8_format": "E4M3", "w_block_scaling_dim": 1}),
    "mxfp8": ("MXFP8BlockScaling", {"fp8_format": "E4M3", "enable_2d_quantization": False}),
    "mxfp8 / bf16 / bf16": (
        "MXFP8BlockScaling",
        {
            "fp8_format": "E4M3",
            "enable_2d_quantization": False,
            "backward_override": "high_precision",
        },
    ),
    "mxfp8 x mxfp8_32x32 / mxfp8_e5m2 x mxfp8_32x32 / mxfp8_e5m2 x mxfp8": (
        "MXFP8BlockScaling",
        {"fp8_format": "HYBRID", "enable_2d_quantization": True},
    ),
    NVFP4: (
        "NVFP4BlockScaling",
        {
            "disable_rht": False,
            "disable_stochastic_rounding": False,
            "disable_2d_quantization": False,
            "row_scaled_activation": False,
            "nvfp4_4over6": "none",
        },
    ),
}
TE_REFUSED = {
    "bf16": "quantizes nothing",
    "mxfp8 / mxfp8 / skip": "wgrad is skip",
    "mxfp8 / mxfp8 / mxfp8 + rht32:none": r"wgrad is rotated \(rht32:none\)",
    NVFP4.replace("rht16", "rht16:seeded"): "as rht16 with its fixed signs",
    "fp8_rowwise": "no scale a row",
    "mxfp4": "no such format",
    "mxfp6_e3m2": "no such format",
    "mxfp8:floor": "rounds scales up only",
    "mxfp8:sr": "stochastically in NVFP4 only",
    "mxfp8 / mxfp8 / bf16": "one product alone cannot stay bf16",
    "fp8_tensorwise / mxfp8 / mxfp8": "no recipe of Transformer Engine casts like",
}


@pytest.mark.parametrize("text", AO_FORMS)
def test_torchao_form(text: str) -> None:
    assert ao.form_of(LinearPolicy.parse(text)) == AO_FORMS[text]


@pytest.mark.parametrize("text", TE_FORMS)
def test_transformer_engine_form(text: str) -> None:
    form = te.form_of(LinearPolicy.parse(text))
    assert isinstance(form, te.Form), form
    assert (form.recipe, dict(form.options)) == TE_FORMS[text]


@pytest.mark.parametrize(
    ("peer", "text", "reason"),
    [(ao, *one) for one in AO_REFUSED.items()] + [(te, *one) for one in TE_REFUSED.items()],
)
def test_what_cannot_be_said_is_refused_with_the_reason(peer: Any, text: str, reason: str) -> None:
    said = peer.form_of(LinearPolicy.parse(text))
    assert isinstance(said, str), said
    layer = nn.Linear(64, 64)
    with pytest.raises(UnsupportedError, match=reason) as caught:
        peer.layer(layer, LinearPolicy.parse(text))
    assert said in str(caught.value)


def test_every_shipped_recipe_gets_a_form_or_a_sentence() -> None:
    said: dict[str, tuple[bool, bool]] = {}
    for name in shipped_recipes():
        for rule in load_recipe(name).rules:
            if rule.kind == "linear" and isinstance(rule.policy, LinearPolicy):
                forms = [peer.form_of(rule.policy) for peer in (ao, te)]
                assert all(not isinstance(one, str) or len(one) > 20 for one in forms)
                if rule.match == "*":
                    said[name] = tuple(not isinstance(one, str) for one in forms)  # type: ignore[assignment]
    wanted = {
        "fp8-tensorwise": (True, True),
        "fp8-rowwise": (True, False),
        "mxfp8": (False, True),
        "mxfp8-portable": (False, False),  # theirs casts x in 1x128 blocks for wgrad
        "nvfp4": (False, True),
        "bf16": (False, False),
    }
    assert {name: said[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({}, r"torchao is not installed: pip install 'lowprec\[ao\]'"),
        ({"torchao": "0.17.0+cu130"}, r"torchao 0\.17\.0\+cu130 is too old; .* 0\.18\.x"),
        ({"torchao": "0.19.1"}, r"torchao 0\.19\.1 is newer than what was checked; .* 0\.18\.x"),
        ({"torchao": "nightly"}, "has version 'nightly', which cannot be read"),
    ],
)
def test_a_missing_or_other_version_says_so(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], reason: str
) -> None:
    installed(monkeypatch, **versions)
    refused = ao.refuse("matmul", facts("mxfp8", "mxfp8", "cpu"))
    assert refused is not None
    with pytest.raises(UnsupportedError, match=reason) as caught:
        ao.layer(nn.Linear(64, 64), LinearPolicy.parse("mxfp8"))
    assert refused in str(caught.value)
    assert te.refuse("matmul", facts("fp8_1x128", "fp8_128x128", "h200")) == (
        "Transformer Engine is not installed: pip install 'lowprec[te]'"
    )


def test_a_library_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, transformer_engine="2.20.2")
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    refused = te.refuse("matmul", facts("fp8_tensorwise", "fp8_tensorwise", "h200"))
    assert refused is not None
    assert "2.20.2 is installed, but transformer_engine.pytorch cannot be imported" in refused
    with pytest.raises(UnsupportedError, match="cannot be imported"):
        te.recipe(te.Form("MXFP8BlockScaling"))


@pytest.mark.parametrize(
    ("left", "right", "machine", "reason"),
    [
        ("mxfp8", "mxfp8", "h200", "needs sm100, this is sm90"),
        ("nvfp4", "nvfp4", "h100", "needs sm100, this is sm90"),
        ("mxfp8", "mxfp8_32x32", "b200", "not handed over"),
        ("fp8_tensorwise", "fp8_tensorwise", "a100", "needs sm89, this is sm80"),
        ("fp8_tensorwise", "fp8_tensorwise", "cpu", "needs sm89, this is cpu"),
        ("fp8_1x128", "fp8_128x128", "b200", "needs sm90, this is b200"),
        ("fp8_128x128", "fp8_128x128", "h200", "two operands in 128x128"),
        ("fp8_rowwise", "fp8_rowwise", "h200", "no product fp8_rowwise x fp8_rowwise"),
        (None, None, "h200", "no product bf16 x bf16"),
    ],
)
def test_transformer_engine_names_the_hardware_it_lacks(
    left: str | None, right: str | None, machine: str, reason: str
) -> None:
    assert reason in str(te.refuse("matmul", facts(left, right, machine)))


@pytest.mark.parametrize("text", ["mxfp8", NVFP4])
def test_a_layer_on_the_wrong_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(te, "hardware_of", lambda _: NAMED["h200"])
    with pytest.raises(UnsupportedError, match="needs sm100, this is sm90"):
        te.layer(nn.Linear(64, 64), LinearPolicy.parse(text))


def test_transformer_engine_has_no_mxfp8_on_sm120() -> None:
    newer = lowprec.hardware.Hardware("rtx", "cuda", (12, 0))
    assert "needs sm100 or sm103" in str(te.unfit(te.Form("MXFP8BlockScaling"), newer))
    assert te.unfit(te.Form("MXFP8BlockScaling"), NAMED["b300"]) is None
    assert te.unfit(te.Form("Float8BlockScaling"), newer) is None


@pytest.mark.parametrize("peer", [ao, te])
def test_no_peer_casts_and_none_is_chosen_by_itself(peer: Any) -> None:
    for name in FORMATS:
        for machine in ("cpu", "h200", "b200"):
            assert "other bits than ours" in peer.refuse("quantize", facts(name, None, machine))
    with pytest.raises(UnsupportedError, match="other bits than ours"):
        peer.quantize(torch.ones(4, 32), Cast.parse("mxfp8"), axis=-1)
    assert peer not in MODULES.values()
    assert {"ao", "te", "torchao"}.isdisjoint(ORDER)


@pytest.mark.parametrize("peer", [ao, te])
def test_products_of_anything_else_are_refused(peer: Any) -> None:
    mx4, plain = ops.quantize(torch.ones(4, 32), "mxfp4"), torch.ones(4, 32)
    for pair in ((mx4, mx4), (plain, mx4), (mx4, plain)):
        with pytest.raises(UnsupportedError, match="refused: "):
            peer.matmul(*pair, bias=None, out_dtype=torch.bfloat16)
    reason = ao.refuse("matmul", facts("fp8_rowwise", "fp8_rowwise", "h200"))
    assert "rounds a rowwise product to bf16" in str(reason)
    assert "only, not mxfp8 x bf16" in str(ao.refuse("matmul", facts("mxfp8", None, "cpu")))


@pytest.mark.parametrize("peer", [ao, te])
def test_layers_that_do_not_fit_are_refused(peer: Any) -> None:
    policy = LinearPolicy.parse("mxfp8")
    for layer, reason in (
        (nn.Linear(48, 64), "64 x 48 .* multiples of 32"),
        (nn.Linear(64, 1), "1 x 64 .* multiples of 32"),
        (nn.Linear(64, 64, dtype=torch.float16), "weight torch.float16"),
        (nn.Embedding(64, 64), "not of Embedding"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            peer.layer(layer, policy)


# ---- Transformer Engine's calls, against modules that answer as its sources say ----


class FakeLinear(nn.Linear):
    """The signature of transformer_engine.pytorch.Linear, as far as the adapter uses it."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        init = options.pop("init_method")
        self.options = options
        super().__init__(in_features, out_features, options["bias"], dtype=options["params_dtype"])
        init(self.weight)


def decoded(t: Any) -> torch.Tensor:
    """Values of what was handed over, by the layouts of Transformer Engine's GEMM."""
    if "data" in t:
        return t["data"].view(torch.float8_e4m3fn).float() * t["fp8_scale_inv"]
    codes, scales = t["rowwise_data"], t["rowwise_scale_inv"]
    values = codes.view(torch.float8_e4m3fn).float()
    rows, blocks = codes.shape[0], codes.shape[1] // 128
    assert scales.is_contiguous()
    assert scales.shape[1] % 4 == 0
    if t["is_2D_scaled"]:
        per_row = scales[:, :blocks].repeat_interleave(128, 0)[:rows]
    else:
        assert scales.shape[0] == blocks
        per_row = scales[:, :rows].T
    return values * per_row.repeat_interleave(128, 1)


@pytest.fixture
def fake_te(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Modules under Transformer Engine's names, on an H200; returns the recipes of its regions."""
    regions: list[Any] = []

    @contextmanager
    def autocast(*, enabled: bool, recipe: Any) -> Any:
        assert enabled
        regions.append(recipe)
        yield

    def general_gemm(a: Any, b: Any, **options: Any) -> tuple[torch.Tensor, None, None, None]:
        assert options == {
            "out_dtype": torch.float32,
            "layout": "TN",
            "use_split_accumulator": True,
        }
        return decoded(b) @ decoded(a).T, None, None, None

    class Recipe:
        def __init__(self, **options: Any) -> None:
            self.options = options
            self.fp8_quant_fwd_inp = types.SimpleNamespace(power_2_scale=self.power_2_scale)

        power_2_scale = False

    block = type("Float8BlockScaling", (Recipe,), {"power_2_scale": True})
    content = {
        "": {},
        ".pytorch": {
            "autocast": autocast,
            "Linear": FakeLinear,
            "DType": types.SimpleNamespace(kFloat8E4M3="e4m3"),
        },
        ".pytorch.cpp_extensions": {"general_gemm": general_gemm},
        ".pytorch.tensor.storage.float8_tensor_storage": {"Float8TensorStorage": dict},
        ".pytorch.tensor.storage.float8_blockwise_tensor_storage": {
            "Float8BlockwiseQTensorStorage": dict
        },
        ".common.recipe": {
            "Format": {"E4M3": "E4M3!", "HYBRID": "HYBRID!"},
            "MMParams": dict,
            "Float8CurrentScaling": type("Float8CurrentScaling", (Recipe,), {}),
            "Float8BlockScaling": block,
        },
    }
    for name, attributes in content.items():
        module = types.ModuleType(f"transformer_engine{name}")
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    installed(monkeypatch, transformer_engine="2.20.2")
    monkeypatch.setattr(te, "hardware_of", lambda _: NAMED["h200"])
    return regions


@pytest.mark.parametrize("bias", [True, False])
def test_a_transformer_engine_layer_shares_the_parameters(fake_te: list[Any], bias: bool) -> None:
    linear = nn.Linear(32, 16, bias=bias).eval()
    before = linear.weight.detach().clone()
    peer = te.layer(linear, LinearPolicy.parse("fp8_tensorwise"))
    assert peer.module.weight is linear.weight
    assert peer.module.bias is linear.bias
    assert torch.equal(linear.weight, before)
    assert not peer.training
    assert not peer.module.training
    x = torch.randn(8, 32)
    assert torch.equal(peer(x), linear(x))
    (recipe,) = fake_te
    assert recipe.options == {
        "fp8_format": "E4M3!",
        "fp8_gemm_fprop": {"use_split_accumulator": True},
        "backward_override": None,
    }


def test_an_environment_variable_that_changes_the_scales_is_refused(fake_te: list[Any]) -> None:
    theirs = sys.modules["transformer_engine.common.recipe"]
    policy = LinearPolicy.parse(f"{TILES} / {TILES} / mxfp8_1x128")
    made = te.recipe(te.FORMS[policy])
    assert made.options["w_block_scaling_dim"] == 2
    theirs.Float8BlockScaling.power_2_scale = False
    with pytest.raises(UnsupportedError, match="NVTE_FP8_BLOCK_SCALING_FP32_SCALES"):
        te.recipe(te.FORMS[policy])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("fp8_tensorwise", "fp8_tensorwise"),
        ("mxfp8_1x128", "mxfp8_128x128"),
        ("fp8_1x128", "fp8_1x128"),
        ("fp8_128x128", "fp8_1x128"),
    ],
)
@pytest.mark.parametrize("shape", [(0, 5, 7), (1, 3, 100), (130, 70, 300), (256, 128, 512)])
def test_transformer_engine_gets_our_codes_and_scales(
    fake_te: list[Any], left: str, right: str, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    torch.manual_seed(0)
    a = ops.quantize(torch.randn(m, k) * torch.exp2(torch.linspace(-8, 8, k)), left)
    b, bias = ops.quantize(torch.randn(n, k), right), torch.randn(n)
    assert te.refuse("matmul", facts(left, right, "h200")) is None
    for one in (None, bias):
        got = te.matmul(a, b, bias=one, out_dtype=torch.float32)
        want = ops.matmul(a, b, bias=one, out_dtype=torch.float32, backend="reference")
        scale = float(want.abs().max()) if want.numel() else 1.0
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * scale)


# ---- torchao itself, on the CPU in its own emulation ----


def passes(layer: nn.Module, weight: nn.Parameter, x: torch.Tensor, dy: torch.Tensor) -> list[Any]:
    x, weight.grad = x.detach().requires_grad_(), None
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, weight.grad]


# Difference of torchao's layer from ours, relative to ours. Rowwise: two roundings to bf16 in one,
# and scales that differ in their last bit; the others differ by the order of the sums.
BOUNDS = {
    "fp8_tensorwise": 1e-3,
    "mxfp8": 1e-3,
    "mxfp8:floor": 1e-3,
    "mxfp8 / mxfp8 / bf16": 1e-3,
    "fp8_rowwise": 6e-3,
    "bf16 / fp8_rowwise x fp8_tensorwise / fp8_rowwise": 6e-3,
}


@needs_torchao
@pytest.mark.parametrize("text", BOUNDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchao_layer_agrees_with_ours(text: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    policy = LinearPolicy.parse(text)
    plain = nn.Linear(192, 128, bias=False, dtype=dtype)
    ours = lowprec.Linear(192, 128, bias=False, dtype=dtype, policy=policy)
    ours.weight = plain.weight
    x, dy = torch.randn(4, 64, 192, dtype=dtype), torch.randn(4, 64, 128, dtype=dtype)
    peer = ao.layer(plain, policy)
    assert peer.weight is plain.weight
    assert type(plain) is nn.Linear
    mine, theirs = (passes(one, plain.weight, x, dy) for one in (ours, peer))
    # Our products are rounded to bf16, also between float32 tensors.
    bound = BOUNDS[text] if dtype is torch.bfloat16 else 6e-3
    for a, b in zip(theirs, mine, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= bound * b.double().norm()


@needs_torchao
def test_torchao_layer_keeps_bias_and_ties() -> None:
    for text in ("fp8_tensorwise", "mxfp8"):
        linear = nn.Linear(32, 64).eval()
        peer = ao.layer(linear, LinearPolicy.parse(text))
        assert peer.weight is linear.weight
        assert peer.bias is linear.bias
        assert list(peer.state_dict()) == list(linear.state_dict())
        with torch.no_grad():
            linear.bias.fill_(100.0)
        assert (peer(torch.randn(32, 32)).mean() - 100).abs() < 1


@needs_torchao
def test_torchao_config_says_what_the_form_says() -> None:
    form = ao.form_of(LinearPolicy.parse("fp8_rowwise / fp8_rowwise x fp8_tensorwise / bf16"))
    theirs = ao.config(form, emulate=False)
    sides = ("input", "weight", "grad_output", "weight_for_grad_input")
    found = {side: getattr(theirs, f"cast_config_{side}") for side in sides}
    assert [one.scaling_granularity.value for one in found.values()] == [
        *["axiswise"] * 3,
        TENSOR[0],
    ]
    assert {one.target_dtype for one in found.values()} == {torch.float8_e4m3fn}
    assert theirs.cast_config_input_for_grad_weight.scaling_type.value == "disabled"
    assert not theirs.round_scales_to_power_of_2
    gemms = (theirs.gemm_config_output, theirs.gemm_config_grad_input)
    assert not any(one.use_fast_accum for one in gemms)
    mx = ao.config(ao.MXForm(ScaleRule.FLOOR, True), emulate=True)
    assert (mx.kernel_preference.value, mx.wgrad_with_hp) == ("emulated", True)
    assert mx.scale_calculation_mode.value == "floor"


def test_torchao_emulates_exactly_where_it_has_no_kernels() -> None:
    rows = ao.Float8Form(ROW, ROW, ROW)
    mx = ao.MXForm(ScaleRule.RCEIL, False)
    machines = ("cpu", "a100", "h200", "b200")
    assert [ao.emulated(rows, NAMED[one]) for one in machines] == [True, True, False, False]
    assert [ao.emulated(mx, NAMED[one]) for one in machines] == [True, True, True, False]


@needs_torchao
@pytest.mark.parametrize("text", ["fp8_tensorwise", "mxfp8", "mxfp8:floor"])
@pytest.mark.parametrize(
    "shape", [(0, 5, 32), (3, 5, 0), (1, 3, 100), (63, 100, 1000), (64, 32, 96)]
)
def test_torchao_multiplies_our_codes(text: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    torch.manual_seed(4)
    spread = torch.exp2(torch.linspace(-20, 20, k)) if k else torch.ones(0)
    a, b = ops.quantize(torch.randn(m, k) * spread, text), ops.quantize(torch.randn(n, k), text)
    cast = facts(text, text, "cpu")
    assert ao.refuse("matmul", cast) is None
    for bias in (None, torch.randn(n)):
        for dtype in (torch.float32, torch.bfloat16):
            got = ao.matmul(a, b, bias=bias, out_dtype=dtype)
            want = ops.matmul(a, b, bias=bias, out_dtype=dtype, backend="reference")
            assert got.dtype == dtype
            scale = float(want.abs().max()) if want.numel() else 1.0
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-6 * scale)


@needs_torchao
def test_torchao_keeps_poisoned_and_tiny_blocks() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(5))
    x[3, 40] = torch.inf
    x[7] *= 2.0**-120
    a, b = ops.quantize(x, "mxfp8"), ops.quantize(torch.eye(64), "mxfp8")
    assert a.scales[7].tolist() == [0, 0]
    got = ao.matmul(a, b, bias=None, out_dtype=torch.float32)
    want = ops.matmul(a, b, bias=None, out_dtype=torch.float32, backend="reference")
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[7], want[7])
    assert got[7].abs().max() > 0


@needs_torchao
def test_torchao_casts_differ_which_is_why_they_are_refused() -> None:
    """Tiny blocks, an Inf, and scales from a logarithm: what rules torchao's MXFP8 cast out."""
    mx = ao.LIBRARY.load("torchao.prototype.mx_formats.mx_tensor")
    plain = torch.randn(4, 32, generator=torch.Generator().manual_seed(6))
    infinite, above = plain.clone(), torch.zeros(4, 32)
    infinite[2, 5] = torch.inf
    above[:, 0] = 448 * 2.0**100 * (1 + 2.0**-23)  # just too large for the scale 2^100
    # source, whether codes and scales are ours
    cases = {
        "ordinary": (plain, True, True),
        "tiny": (plain * 2.0**-125, False, True),
        "Inf": (infinite, False, False),
        "above a power of two": (above, False, False),
    }
    for name, (x, same_codes, same_scales) in cases.items():
        ours = ops.quantize(x, "mxfp8")
        scales, codes = mx.to_mx(x, torch.float8_e4m3fn, 32, mx.ScaleCalculationMode.RCEIL)
        assert torch.equal(codes.view(torch.uint8), ours.codes) is same_codes, name
        assert torch.equal(scales.view(torch.uint8), ours.scales) is same_scales, name


def test_importing_lowprec_and_the_adapters_imports_neither_library() -> None:
    code = (
        "import json, sys, lowprec; from lowprec.backends import ao, te\n"
        "from lowprec.policy import LinearPolicy\n"
        "ao.form_of(LinearPolicy.parse('mxfp8')), te.form_of(LinearPolicy.parse('mxfp8'))\n"
        "print(json.dumps([n for n in ('torchao', 'transformer_engine') if n in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout) == []


def test_the_forward_only_policies_come_from_the_table() -> None:
    for policy in te.FORMS:
        options = dict(te.FORMS[policy].options)
        only = policy.dgrad is BF16
        assert (options.get("backward_override") == "high_precision") is only
        assert only is (policy.wgrad is BF16)
