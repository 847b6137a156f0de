"""Plans: last rule wins, positions, dead rules, reasons, purity, hash, diff, storage."""

import copy

import pytest
import torch
from torch import nn

import lowprec
from lowprec.errors import PlanError
from lowprec.policy import ALL_BF16
from lowprec.recipe import parse_recipe


def recipe_of(*rules: tuple[str, str]) -> lowprec.Recipe:
    text = 'schema = 1\nwhy = "test"\n'
    for match, products in rules:
        fprop, dgrad, wgrad = (products.split("/") * 3)[:3]
        text += f'[[rule]]\nmatch = "{match}"\nkind = "linear"\nwhy = "w"\n'
        text += f'fprop = "{fprop}"\ndgrad = "{dgrad}"\nwgrad = "{wgrad}"\n'
    return parse_recipe(text, name="test")


def stack(count: int = 4, width: int = 64) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def fprops(plan: lowprec.Plan) -> list[str]:
    return [str(layer.policy.fprop) for layer in plan.layers]


def test_last_rule_wins_and_positions_count_over_the_model() -> None:
    recipe = recipe_of(("*", "mxfp8"), ("first:1", "bf16"), ("last:2", "mxfp4"), ("3", "bf16"))
    plan = lowprec.plan(stack(), recipe, hardware="cpu")
    assert fprops(plan) == ["bf16", "mxfp8", "mxfp4", "bf16"]
    assert plan.layers[1].rule.startswith("rule 1")
    assert plan.layers[3].rule.startswith("rule 4")


def test_first_does_not_match_names_that_contain_a_number() -> None:
    plan = lowprec.plan(stack(12), recipe_of(("*", "mxfp8"), ("1", "bf16")), hardware="cpu")
    assert [layer.name for layer in plan.layers if not layer.policy.quantizes] == ["1"]


def test_a_rule_that_matches_nothing_is_an_error_with_the_nearest_names() -> None:
    model = nn.ModuleDict({"lm_head": nn.Linear(32, 32), "body": nn.Linear(32, 32)})
    with pytest.raises(PlanError, match=r"rule 2 \(match = 'lm_haed'\).*nearest: lm_head"):
        lowprec.plan(model, recipe_of(("*", "mxfp8"), ("lm_haed", "bf16")), hardware="cpu")


def test_a_shadowed_rule_is_an_error_that_names_the_later_rule() -> None:
    recipe = recipe_of(("0", "bf16"), ("*", "mxfp8"))
    with pytest.raises(PlanError, match=r"rule 1 .* decides nothing: rule 2 comes later"):
        lowprec.plan(stack(), recipe, hardware="cpu")


def test_quantizing_nothing_is_an_error_and_plain_bf16_is_not() -> None:
    head = nn.Linear(64, 1)
    with pytest.raises(PlanError, match=r"would quantize no layer(.|\n)*N=1 head"):
        lowprec.plan(head, recipe_of(("*", "mxfp8")), hardware="cpu")
    with pytest.raises(PlanError, match="matches no linear layer; the model has none"):
        lowprec.plan(nn.ReLU(), recipe_of(("*", "mxfp8")), hardware="cpu")
    plan = lowprec.plan(head, lowprec.load_recipe("bf16"), hardware="cpu")
    assert plan.layers[0].policy == ALL_BF16
    assert not plan.layers[0].converted


def test_a_rule_that_quantizes_only_layers_left_alone_is_an_error() -> None:
    model = nn.ModuleDict({"body": nn.Linear(64, 64), "attn": nn.MultiheadAttention(64, 4)})
    recipe = recipe_of(("body", "mxfp8"), ("attn.*", "mxfp8"))
    with pytest.raises(PlanError, match=r"rule 2 .* quantizes nothing.*never called as a module"):
        lowprec.plan(model, recipe, hardware="cpu")
    lowprec.plan(model, recipe_of(("body", "mxfp8"), ("attn.*", "bf16")), hardware="cpu")


def test_layers_without_a_rule_are_left_as_they_are() -> None:
    plan = lowprec.plan(stack(2), recipe_of(("0", "mxfp8")), hardware="cpu")
    assert [layer.converted for layer in plan.layers] == [True, False]
    assert "no rule matches" in plan.layers[1].reasons[0]


class OwnForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Zoo(nn.Module):
    """One of everything that a plan must speak about."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Linear(39, 48)
        self.sub = OwnForward(48, 48)
        self.attn = nn.MultiheadAttention(32, 4)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64)
        self.table = nn.Embedding(10, 48)
        self.tied = nn.Linear(48, 10, bias=False)
        self.tied.weight = self.table.weight
        self.conv = nn.Conv1d(4, 4, 3)
        self.raw = nn.Parameter(torch.zeros(48, 48))
        self.half = nn.Linear(32, 32).half()
        self.patched = nn.Linear(32, 32)
        self.patched.forward = lambda x: x  # type: ignore[method-assign]
        self.head = nn.Linear(48, 1)
        self.again = self.good


REASONS = {
    "good": "fprop: K=39 is padded to 64",
    "sub": "is a OwnForward, a subclass",
    "attn.out_proj": "never called as a module",
    "encoder.self_attn.out_proj": "never called as a module",
    "encoder.linear1": "fast path reads its weight",
    "tied": "weight tied with table.weight",
    "half": "its weight is torch.float16",
    "patched": "forward was replaced on the instance",
    "head": "N=1 head",
}


def test_every_odd_layer_has_its_reason() -> None:
    plan = lowprec.plan(Zoo(), recipe_of(("*", "mxfp8")), hardware="cpu")
    for name, reason in REASONS.items():
        assert reason in plan.layer(name).why, name
    assert "also registered as again" in plan.layer("good").why
    for name in ("sub", "attn.out_proj", "encoder.linear1", "half", "patched", "head"):
        assert not plan.layer(name).converted
        assert plan.layer(name).policy == ALL_BF16
    uncovered = {entry.name: entry for entry in plan.uncovered}
    assert set(uncovered) == {
        "raw",
        "table",
        "conv",
        "attn.in_proj_weight",
        "encoder.self_attn.in_proj_weight",
    }
    assert uncovered["conv"].flops_per_row is None
    assert uncovered["raw"].flops_per_row == 6 * 48 * 48
    text = str(plan)
    assert all(name in text for name in (*REASONS, *uncovered))


def test_shares_of_flops() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    plan = lowprec.plan(model, recipe_of(("*", "mxfp8/mxfp8/bf16")), hardware="cpu")
    assert plan.quantized_share == pytest.approx(2 / 3)
    assert plan.uncovered_share == 0


def test_flops_and_padding_notes_name_the_right_dimension() -> None:
    portable = lowprec.load_recipe("mxfp8-portable")
    layer = lowprec.plan(nn.Linear(200, 300), portable, hardware="cpu").layers[0]
    assert layer.flops_per_row == 6 * 200 * 300
    assert layer.reasons == (
        "fprop: K=200 is padded to 256",
        "dgrad: N=300 is padded to 384",
    )
    mixed = recipe_of(("*", "mxfp8 x mxfp8_1x128"))
    layer = lowprec.plan(nn.Linear(96, 128), mixed, hardware="cpu").layers[0]
    assert layer.reasons == ("fprop: K=96 is padded to 128",)


def test_plan_is_pure_needs_no_gpu_and_works_on_meta() -> None:
    model, recipe = stack(), lowprec.load_recipe("mxfp8")
    before = copy.deepcopy(model.state_dict())
    for hardware in ("cpu", "h200", "b200"):
        a, b = (lowprec.plan(model, recipe, hardware=hardware) for _ in range(2))
        assert a == b
        assert a.hash == b.hash
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    with torch.device("meta"):
        meta = stack()
    assert lowprec.plan(meta, recipe, hardware="b200").hash == a.hash


def test_unknown_hardware() -> None:
    with pytest.raises(lowprec.UnsupportedError, match="did you mean h200"):
        lowprec.plan(stack(), lowprec.load_recipe("mxfp8"), hardware="h20")


def test_hash_diff_and_with_layer() -> None:
    plan = lowprec.plan(stack(), lowprec.load_recipe("mxfp8"), hardware="cpu")
    other = plan.with_layer("2", ALL_BF16, why="sensitive")
    assert plan.hash != other.hash
    assert plan.diff(plan) == ()
    assert len(plan.diff(other)) == 1
    assert plan.diff(other)[0].startswith("2: fprop mxfp8 x mxfp8_32x32")
    assert "sensitive" in other.layer("2").why
    gpu = lowprec.plan(stack(), lowprec.load_recipe("mxfp8"), hardware="h200")
    assert gpu.hash != plan.hash
    assert plan.diff(gpu)[0] == "hardware: cpu -> h200 (sm90)"
    # The kernels cast there, where Triton is installed.
    for line in plan.diff(gpu)[1:]:
        first, second = line.split(" -> ")
        assert first.endswith("(emulated)")
        assert second.endswith("(emulated; casts by triton)")
    smaller = lowprec.plan(stack(3), lowprec.load_recipe("mxfp8"), hardware="cpu")
    assert plan.diff(smaller) == ("3: only in the first plan",)
    with pytest.raises(PlanError, match="no layer '22'"):
        plan.with_layer("22", ALL_BF16, why="x")


def test_store_and_read_back() -> None:
    plan = lowprec.plan(Zoo(), lowprec.load_recipe("mxfp8"), hardware="h200")
    text = plan.to_json()
    assert lowprec.Plan.from_json(text) == plan
    for old, new in (("mxfp8_32x32", "mxfp8"), ('"schema": 2', '"schema": 9'), ("OwnF", "OwnG")):
        assert old in text
        with pytest.raises(PlanError, match="checksum does not fit"):
            lowprec.Plan.from_json(text.replace(old, new, 1))
    with pytest.raises(PlanError, match="cannot be read"):
        lowprec.Plan.from_json(text[:-40])


def test_an_already_converted_model_is_refused() -> None:
    model, recipe = stack(), lowprec.load_recipe("mxfp8")
    lowprec.apply(model, lowprec.plan(model, recipe))
    with pytest.raises(PlanError, match="already converted"):
        lowprec.plan(model, recipe)


def test_a_hand_built_layer_is_listed_and_left_alone() -> None:
    policy = lowprec.load_recipe("mxfp8").rules[0].policy
    model = nn.Sequential(nn.Linear(64, 64), lowprec.Linear(64, 64, policy=policy))
    plan = lowprec.plan(model, lowprec.load_recipe("mxfp8"))
    assert not plan.layer("1").converted
    lowprec.restore(lowprec.apply(model, plan))
    assert type(model[1]) is lowprec.Linear


@pytest.mark.parametrize("wrong", ["mxfp8", None, 3])
def test_wrong_arguments_say_what_to_pass(wrong: object) -> None:
    with pytest.raises(PlanError, match="load_recipe"):
        lowprec.plan(stack(), wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"make one with lowprec\.plan"):
        lowprec.apply(stack(), wrong)  # type: ignore[arg-type]
