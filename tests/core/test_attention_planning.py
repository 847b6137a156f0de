"""Attentions in recipes and plans; modules that call scaled_dot_product_attention."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowprec
from benchmarks.attention_sqnr import recipe_policy
from lowprec import Attention, Mask, Plan
from lowprec.attention_planning import bounded
from lowprec.attention_policy import AttentionPolicy
from lowprec.backends import attention_triton
from lowprec.backends.attention import AttentionChoice, AttentionFacts, choose_attention
from lowprec.errors import PlanError, RecipeError, UnsupportedError
from lowprec.hardware import NAMED
from lowprec.policy import BF16
from lowprec.recipe import parse_recipe
from tests.core.attention_cases import COMPILERS, one_thread

__all__ = ["one_thread"]

RULE = """
schema = 1
why = "test"
[[rule]]
match = "*"
kind = "attention"
qk = "mxfp8_32x32"
pv = "e4m3*256 x mxfp8_32x32"
dp = "bf16"
dv = "mxfp8 x mxfp8_32x32"
dq = "mxfp8 x mxfp8_32x32"
dk = "bf16"
why = "because"
"""
RECIPE = parse_recipe(RULE, name="test")


class Caller(nn.Module):
    """Calls it as many models do."""

    def __init__(self, *, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.dropout, self.causal = dropout, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, 2, 16).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        o = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal
        )
        y: torch.Tensor = self.out(o.transpose(1, 2).flatten(-2)) + 0 * dropout
        return y


class Masked(nn.Module):
    def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)


class Twice(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        q = functional.scaled_dot_product_attention(q, q, q)
        return functional.scaled_dot_product_attention(q, q, q)


class Given(nn.Module):
    def forward(self, q: torch.Tensor, **options: Any) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, q, q, **options)


class Decided(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, q, q, is_causal=q.shape[2] > 1)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Masked()

    def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, q, self.inner(q, mask))


def replaced() -> Caller:
    module = Caller()
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


UNPROVEN = {
    "dropout": (lambda: Caller(dropout=0.1), "its dropout_p is not 0 in training"),
    "mask": (Masked, "passes attn_mask"),
    "twice": (Twice, "without one plain call"),
    "options": (Given, "that its source does not show"),
    "decided": (Decided, "is_causal is decided in the call"),
    "around": (Around, "holds inner, a Masked"),
    "fused": (lambda: nn.MultiheadAttention(32, 2), "inside a fused function of torch"),
    "replaced": (replaced, "its forward was replaced on the instance"),
}


@pytest.mark.parametrize("what", UNPROVEN)
def test_a_call_that_cannot_be_proven_is_left_alone_with_the_reason(what: str) -> None:
    make, reason = UNPROVEN[what]
    model = nn.ModuleDict({"good": Attention(), "bad": make()})
    plan = lowprec.plan(model, RECIPE)
    entry = next(one for one in plan.attentions if one.name == "bad")
    assert not entry.converted
    assert reason in entry.why
    before = type(model["bad"])
    lowprec.apply(model, plan)
    assert type(model["bad"]) is before
    alone = nn.ModuleDict({"bad": make()})
    with pytest.raises(PlanError, match="quantizes nothing"):
        lowprec.plan(alone, RECIPE)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Caller(), Caller(causal=False))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(1))


def test_a_proven_call_runs_by_the_plan_and_restore_undoes_it(
    model: nn.Sequential, x: torch.Tensor
) -> None:
    plain, names = model(x), list(model.state_dict())
    kinds = [type(one) for one in model]
    plan = lowprec.plan(model, RECIPE)
    assert [one.mask.kind for one in plan.attentions] == ["causal", "none"]
    print_before = lowprec.fingerprint(model)
    assert lowprec.apply(model, plan) is model
    assert lowprec.fingerprint(model) == print_before
    y = model(x)
    y.sum().backward()
    difference = float((y - plain).detach().norm() / plain.detach().norm())
    assert 1e-4 < difference < 0.1
    counts = lowprec.observe(model).gemms["1"]
    assert counts["pv"] == {"e4m3*256 x mxfp8_32x32": 1}
    assert counts["dk"] == {"bf16": 1}
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), y)
    lowprec.restore(model)
    assert [type(one) for one in model] == kinds
    assert torch.equal(model(x), plain)
    assert list(model.state_dict()) == names
    assert not any(key.startswith("lowprec") for one in model for key in one.__dict__)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@COMPILERS
def test_a_proven_call_compiles(model: nn.Sequential, x: torch.Tensor, compiler: str) -> None:
    torch.compiler.reset()
    lowprec.apply(model, lowprec.plan(model, RECIPE))
    compiled: Any = torch.compile(model, fullgraph=True, backend=compiler)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)


def test_a_call_that_changed_since_the_plan_is_refused(
    model: nn.Sequential, x: torch.Tensor
) -> None:
    lowprec.apply(model, lowprec.plan(model, RECIPE))
    first: Any = model[0]
    first.causal = False
    with pytest.raises(UnsupportedError, match="'0' was planned with is_causal=True"):
        model(x)
    first.causal, first.dropout = True, 0.5
    with pytest.raises(UnsupportedError, match="without attn_mask and dropout"):
        model(x)


def test_in_evaluation_and_under_autocast(model: nn.Sequential, x: torch.Tensor) -> None:
    lowprec.apply(model, lowprec.plan(model, RECIPE))
    with torch.autocast("cpu"), torch.no_grad():
        assert model.eval()(x).dtype == torch.bfloat16


def test_the_plan_prints_stores_hashes_and_differs() -> None:
    model = nn.ModuleDict(
        {"a": Attention(mask=Mask("window", 3, 4)), "b": Attention(activation="gelu")}
    )
    plan = lowprec.plan(model, RECIPE, hardware="h200")
    assert Plan.from_json(plan.to_json()) == plan
    text = str(plan)
    assert "softmax, window 3 back, 4 ahead" in text
    assert "pv stays bf16: gelu gives P no bound for e4m3*256" in " ".join(plan.attentions[1].notes)
    assert plan.attentions[1].policy.pv == AttentionPolicy.parse("bf16").pv
    other = lowprec.plan(model, parse_recipe(RULE.replace('dp = "bf16"', 'dp = "mxfp8"'), name="o"))
    assert other.hash != plan.hash
    assert [line for line in plan.diff(other) if line.startswith("a: qk mxfp8")]
    wider = nn.ModuleDict({"a": Attention(), "b": Attention(activation="gelu")})
    assert lowprec.plan(wider, RECIPE, hardware="h200").hash != plan.hash


def test_a_plan_says_why_a_gpu_emulates() -> None:
    recipe = lowprec.load_recipe("fp8-attention")
    model = nn.ModuleDict({"a": Attention(), "b": Attention(activation="gelu")})
    model["c"] = nn.Linear(128, 128)
    there = lowprec.plan(model, recipe, hardware="h200").attentions
    here = lowprec.plan(model, recipe, hardware="cpu").attentions
    if importlib.util.find_spec("triton") is None:
        assert there[0].notes == ("emulated: Triton is not installed",)
    else:
        assert there[0].runs() == "native"
        assert there[0].notes == ()
    assert there[1].notes[-1] == "emulated: 8-bit products of a softmax alone, not of gelu"
    assert not any("emulated" in note for one in here for note in one.notes)


def test_plans_without_attention_keep_their_hash_and_read_back() -> None:
    model = nn.Sequential(nn.Linear(32, 32), Attention())
    plan = lowprec.plan(model, lowprec.load_recipe("mxfp8"), hardware="cpu")
    assert plan.attentions == ()
    assert plan.hash == lowprec.plan(model[:1], lowprec.load_recipe("mxfp8"), hardware="cpu").hash
    assert [(one.name, one.kind) for one in plan.uncovered] == [("1", "attention")]
    assert Plan.from_json(plan.to_json()) == plan


def test_a_model_that_is_not_the_planned_one_is_refused(model: nn.Sequential) -> None:
    plan = lowprec.plan(model, RECIPE)
    without = lowprec.plan(model, lowprec.load_recipe("bf16"))
    first, second = Caller(), Caller(causal=False)
    with pytest.raises(PlanError, match="an attention '2' that the plan does not know"):
        lowprec.apply(nn.Sequential(first, second, Attention()), plan)
    bare = nn.Module()
    bare.qkv, bare.out = second.qkv, second.out
    with pytest.raises(PlanError, match="the plan names attention '1', which this model does not"):
        lowprec.apply(nn.Sequential(first, bare), plan)
    with pytest.raises(PlanError, match="computes softmax with mask none, the plan was made"):
        lowprec.apply(nn.Sequential(Caller(causal=False), Caller(causal=False)), plan)
    lowprec.apply(model, plan)
    with pytest.raises(PlanError, match="already converted"):
        lowprec.plan(model, RECIPE)
    with pytest.raises(PlanError, match=r"converted '0'; call lowprec\.restore"):
        lowprec.apply(model, without)


def test_a_plan_takes_the_place_of_another(model: nn.Sequential, x: torch.Tensor) -> None:
    again = parse_recipe(RULE.replace("mxfp8_32x32", "mxfp8"), name="again")
    plans = [lowprec.plan(model, one) for one in (RECIPE, again)]
    for plan in plans:
        lowprec.apply(model, plan)
        model(x)
    assert lowprec.observe(model).gemms["0"]["qk"] == {"mxfp8_32x32": 1, "mxfp8": 1}


def test_an_attention_is_demoted_by_hand(model: nn.Sequential, x: torch.Tensor) -> None:
    plan = lowprec.plan(model, RECIPE)
    lowprec.apply(model, plan)
    model(x)
    lower = plan.with_attention("1", "bf16", why="sensitive")
    assert lower.hash != plan.hash
    assert "set by hand: sensitive" in str(lower)
    assert Plan.from_json(lower.to_json()) == lower
    lowprec.apply(model, lower)
    model(x)
    assert lowprec.observe(model).gemms["1"]["qk"] == {"mxfp8_32x32": 1, "bf16": 1}
    with pytest.raises(PlanError, match="no attention '2'"):
        plan.with_attention("2", "bf16", why="")
    both = lowprec.plan(nn.Sequential(Attention(), nn.MultiheadAttention(32, 2)), RECIPE)
    with pytest.raises(PlanError, match=r"'1' cannot be converted: .* fused function"):
        both.with_attention("1", "bf16", why="")


def test_attention_built_with_a_policy_gets_it_back() -> None:
    layer = Attention(policy="mxfp8")
    model = nn.Sequential(layer)
    lowprec.apply(model, lowprec.plan(model, RECIPE))
    assert str(layer.lowprec_attention.stage.policy.dp) == "bf16"
    lowprec.restore(model)
    assert str(layer.lowprec_attention.stage.policy) == " / ".join(["mxfp8"] * 6)
    lowprec.plan(model, RECIPE)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('pv = "e4m3*256 x mxfp8_32x32"', "", "key 'pv' is missing"),
        ("pv =", "vp =", "unknown key 'vp'; did you mean pv or dv or dp"),
        ('dk = "bf16"', 'dk = "e4m3*256 x mxfp8"', "ds in dk has no bound"),
        ('dk = "bf16"', 'dk = "skip"', "dk: 'skip': write 'bf16'"),
        ('dk = "bf16"', 'dk = "bf16"\nfprop = "bf16"', "unknown key 'fprop'"),
        ('kind = "attention"', 'kind = "atention"', "unknown kind 'atention'; did you mean att"),
        ('why = "because"', "", "key 'why' is missing"),
    ],
)
def test_rules_of_kind_attention_are_read_strictly(old: str, new: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(RULE.replace(old, new), name="bad")


def test_rules_that_match_no_attention_or_decide_nothing() -> None:
    linear = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(PlanError, match="matches no attention layer; the model has none"):
        lowprec.plan(linear, lowprec.load_recipe("mxfp8-attention"))
    twice = parse_recipe(RULE + RULE[RULE.index("[[rule]]") :], name="twice")
    with pytest.raises(PlanError, match=r"rule 1 .* decides nothing: rule 2"):
        lowprec.plan(nn.Sequential(Attention()), twice)
    assert parse_recipe(RECIPE.to_toml(), name="test") == RECIPE
    assert parse_recipe(RULE.replace("256", "128"), name="test").hash != RECIPE.hash


def test_dp_reads_v_as_pv_does_where_p_has_no_bound() -> None:
    shipped, native = recipe_policy("fp8-attention"), AttentionPolicy.parse("fp8_128x128")
    policy, notes = bounded(shipped, "silu")
    assert policy == dataclasses.replace(shipped, pv=BF16, dp=BF16)
    assert notes == [
        "pv stays bf16: silu gives P no bound for e4m3*256",
        "dp stays bf16: it reads v as pv does",
    ]
    assert bounded(shipped, "softmax") == (shipped, [])
    both = dataclasses.replace(shipped, dp=native.dp)
    assert bounded(both, "silu")[0] == dataclasses.replace(both, pv=BF16, dp=BF16)
    left = AttentionPolicy.parse("fp8_128x128 x bf16").dp
    alone = dataclasses.replace(shipped, dp=left)
    assert bounded(alone, "silu")[0] == dataclasses.replace(alone, pv=BF16)


def test_the_backend_follows_from_facts_and_refusals_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(name: str, policy: str, **more: Any) -> AttentionChoice:
        parsed = AttentionPolicy.parse(policy)
        return choose_attention(AttentionFacts(NAMED[name], parsed, "softmax", "none", **more))

    for name, policy, more, backend, said in (
        ("cpu", "bf16", {}, "emulated", "needs a CUDA device, this is cpu"),
        ("h200", "mxfp8", {}, "emulated", "dv, dq and dk are BF16 in these kernels"),
        ("h200", "bf16", {"dtype": torch.float64}, "emulated", "reads bfloat16, not torch.float64"),
    ):
        choice = chosen(name, policy, **more)
        assert choice.backend == backend
        assert said in dict(choice.refusals)["triton"]
        assert not choice.native
    if importlib.util.find_spec("triton") is not None:
        native = str(recipe_policy("fp8-attention"))
        monkeypatch.setattr(attention_triton, "PROVEN", frozenset())
        for policy, what in (("bf16", "bf16"), (native, native)):
            choice = chosen("h200", policy)
            assert choice.backend == "emulated"
            says = f"the kernels of {what} attention are not proven on a GPU yet"
            assert dict(choice.refusals)["triton"] == says
        proven = frozenset({"attention bf16", f"attention {native}"})
        monkeypatch.setattr(attention_triton, "PROVEN", proven)
        assert chosen("h200", "bf16").backend == "triton"
        assert chosen("h200", native).native
        assert chosen("a100", native).backend == "emulated"
        assert chosen("h200", native, plain=False).backend == "emulated"


@pytest.mark.parametrize("front", [False, True])
def test_kernels_run_with_the_device_of_their_tensors_as_the_current_one(
    front: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the current device, whatever device a tensor is on."""
    entered: list[Any] = []

    class Guard:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __enter__(self) -> None:
            entered.append(self.tensor)

        def __exit__(self, *_: object) -> None:
            entered.append(None)

    class Kernels:
        def __getattr__(self, name: str) -> Any:
            def run(*_: Any, **__: Any) -> list[None]:
                assert entered[-1] is q
                return [None] * (4 if "backward" in name else 2)

            return run

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    monkeypatch.setattr(attention_triton, "_kernels", lambda *_: Kernels())
    q, none = torch.empty(0), torch.empty(0)
    how: Any = {"call": None, "policy": AttentionPolicy.parse("bf16"), "bias": None}
    if front:
        attention_triton.fronted_forward((q, none), (None, None), front=None, **how)  # type: ignore[arg-type]
        attention_triton.fronted_backward((q, none), (None, None), front=None, **how)  # type: ignore[arg-type]
    else:
        attention_triton.attention_forward(q, none, none, none, none, **how)
        attention_triton.attention_backward(none, q, none, none, none, none, none, none, **how)
    assert entered == [q, None, q, None]
