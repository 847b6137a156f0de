"""What a plan says of each module: parents that keep a layer, odd layers, what else is there."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import lowprec
from lowprec.coverage import Uncovered, left_alone_because, linear_layers, uncovered


def listed(model: nn.Module) -> dict[str, Uncovered]:
    return {entry.name: entry for entry in uncovered(model)}


class Holder(nn.Module):
    """A module with one raw parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(shape))


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.eye(8))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight @ self.inner


class LoRA(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 16)
        self.a = nn.Parameter(torch.zeros(2, 8))
        self.b = nn.Parameter(torch.zeros(16, 2))
        self.gain = nn.Parameter(torch.ones(16))


def test_a_parametrized_weight_is_counted_once() -> None:
    model = nn.Sequential(
        parametrizations.orthogonal(nn.Linear(8, 8)),
        parametrizations.weight_norm(nn.Linear(8, 8)),
        parametrizations.weight_norm(nn.Conv1d(4, 4, 3)),
        parametrizations.spectral_norm(nn.Embedding(10, 8)),
    )
    assert [name for name, *_ in linear_layers(model)] == ["0", "1"]
    assert {name: e.kind for name, e in listed(model).items()} == {
        "2": "convolution",
        "3": "embedding",
    }


def test_the_root_may_be_the_parametrized_layer() -> None:
    assert uncovered(parametrizations.orthogonal(nn.Linear(8, 8))) == ()


def test_what_a_parametrization_multiplies_with_is_listed() -> None:
    linear, holder = nn.Linear(8, 8), Holder(8, 8)
    parametrize.register_parametrization(linear, "weight", Double())
    parametrize.register_parametrization(holder, "raw", Double())
    assert set(listed(nn.ModuleDict({"linear": linear, "holder": holder}))) == {
        "linear.parametrizations.weight.0.inner",
        "holder.parametrizations.raw.original",
        "holder.parametrizations.raw.0.inner",
    }


def test_weights_renamed_by_older_hooks_are_the_layers_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls weight_norm deprecated; models still use it
        model = nn.Sequential(
            nn.utils.weight_norm(nn.Linear(8, 8)), nn.utils.spectral_norm(nn.Linear(8, 8))
        )
    assert {name for name, _ in model.named_parameters()} >= {"0.weight_v", "1.weight_orig"}
    assert uncovered(model) == ()


def test_norms_do_not_multiply_matrices() -> None:
    model = nn.Sequential(
        nn.LayerNorm((8, 64)), nn.RMSNorm((8, 64)), nn.GroupNorm(2, 8), nn.BatchNorm2d(8)
    )
    model.append(nn.LazyBatchNorm1d())
    model.append(nn.InstanceNorm1d(8, affine=True))
    assert uncovered(model) == ()


@pytest.mark.parametrize(
    ("shape", "flops"),
    [
        ((4096, 64), 6 * 4096 * 64),
        ((3, 32, 64), 6 * 3 * 32 * 64),
        ((64, 1), 6 * 64),
        ((1, 4096, 64), None),
        ((1, 64), None),
        ((4096, 1, 64), None),
        ((2, 3, 4, 5), None),
    ],
)
def test_a_raw_parameter_may_multiply(shape: tuple[int, ...], flops: int | None) -> None:
    entry = listed(Holder(*shape))["raw"]
    assert entry.flops_per_row == flops
    assert entry.reason == (
        f"raw {len(shape)}-D parameter of Holder: may be multiplied outside nn.Linear"
    )


def test_parameters_that_a_subclass_adds_are_listed() -> None:
    plain = nn.Linear(8, 16)
    plain.extra = nn.Parameter(torch.zeros(4, 8))
    found = listed(nn.ModuleDict({"lora": LoRA(), "plain": plain}))
    assert {name: entry.flops_per_row for name, entry in found.items()} == {
        "lora.a": 6 * 2 * 8,
        "lora.b": 6 * 16 * 2,
        "plain.extra": 6 * 4 * 8,
    }
    assert "parameter of LoRA" in found["lora.a"].reason


def test_added_biases_of_attention_are_no_projection() -> None:
    found = listed(nn.MultiheadAttention(16, 2, add_bias_kv=True))
    assert set(found) == {"in_proj_weight"}


def test_a_layer_of_unknown_shape_says_what_to_do() -> None:
    model = nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 64))
    plan = lowprec.plan(model, lowprec.load_recipe("mxfp8"), hardware="cpu")
    assert not plan.layer("0").converted
    assert "its shape is not known yet: run one batch first" in plan.layer("0").why
    assert plan.uncovered == ()
    assert "run one batch first" in str(plan)
    model(torch.zeros(2, 32))
    plan = lowprec.plan(model, lowprec.load_recipe("mxfp8"), hardware="cpu")
    assert plan.layer("0").converted
    assert plan.layer("0").shape == (64, 32)


def test_a_raw_parameter_of_unknown_shape_is_listed() -> None:
    model = Holder(8, 8)
    model.raw = nn.UninitializedParameter()
    assert listed(model)["raw"].flops_per_row is None
    assert "not known yet" in listed(model)["raw"].reason


@pytest.mark.parametrize(("n", "k"), [(0, 64), (64, 0), (0, 0), (0, 1), (1, 0)])
def test_a_layer_without_a_product_is_left_alone_and_runs(n: int, k: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is nothing to initialise
        empty = nn.Linear(k, n)
    model = nn.ModuleDict({"empty": empty, "full": nn.Linear(64, 64)})
    plan = lowprec.plan(model, lowprec.load_recipe("mxfp8"), hardware="cpu")
    assert f"{n} x {k} (N x K): nothing to multiply" in plan.layer("empty").why
    lowprec.apply(model, plan)
    assert model["empty"](torch.zeros(3, k)).shape == (3, n)


def encoder() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("first", [True, False])
def test_any_parent_that_refuses_decides(first: bool) -> None:
    torch.manual_seed(0)
    layer, model = encoder(), nn.Module()
    if first:
        model.mine, model.encoder = nn.ModuleList([layer.linear1, nn.Linear(64, 64)]), layer
    else:
        model.encoder, model.mine = layer, nn.ModuleList([layer.linear1, nn.Linear(64, 64)])
    found = {name: (parent, aliases) for name, _, parent, aliases in linear_layers(model)}
    name = "mine.0" if first else "encoder.linear1"
    assert found[name][0] is layer
    assert sorted(found[name][1]) == ["encoder.linear1", "mine.0"]
    plan = lowprec.plan(model, lowprec.load_recipe("mxfp8"), hardware="cpu")
    assert "fast path" in plan.layer(name).why
    lowprec.apply(model, plan)
    assert type(layer.linear1) is nn.Linear


def test_without_a_refusing_parent_the_first_one_is_given() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    ((name, module, parent, aliases),) = linear_layers(model)
    assert (name, aliases) == ("a.0", ["a.0", "b.0"])
    assert parent is model["a"]
    assert left_alone_because(module, parent=parent) is None
