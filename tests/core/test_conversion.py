"""apply and restore: nothing but the class changes, everything is checked first, and back again."""

import copy
import io

import pytest
import torch
from torch import nn

import lowprec
from lowprec.errors import PlanError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.Dropout(0.1))


def wrap(model: nn.Module, recipe: str = "mxfp8") -> nn.Module:
    return lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe(recipe)))


def test_objects_names_and_state_stay() -> None:
    model = net()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    keys, ids = list(model.state_dict()), {k: id(p) for k, p in parameters.items()}
    parameters["0.bias"].requires_grad_(False)
    model[2].eval()
    assert wrap(model) is model
    assert dict(model.named_modules()) == modules
    assert {k: id(p) for k, p in model.named_parameters()} == ids
    assert list(model.state_dict()) == keys
    assert not model[0].bias.requires_grad
    assert not model[2].training
    assert model[0].training
    assert isinstance(model[0], nn.Linear)
    assert type(model[0]) is lowprec.Linear


def test_restore_is_the_identity() -> None:
    model, x = net().eval(), torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    before, attributes = model(x), [set(m.__dict__) for m in model.modules()]
    buffers = [name for name, _ in model.named_buffers()]
    wrap(model)
    assert not torch.equal(model(x), before)
    assert lowprec.restore(model) is model
    assert torch.equal(model(x), before)
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert [name for name, _ in model.named_buffers()] == buffers
    assert type(model[0]) is nn.Linear


def test_state_dict_travels_both_ways_strictly_and_weights_only() -> None:
    plain, wrapped = net(), wrap(net())
    for source, target in ((plain, wrapped), (wrapped, plain)):
        buffer = io.BytesIO()
        torch.save(source.state_dict(), buffer)
        buffer.seek(0)
        target.load_state_dict(torch.load(buffer, weights_only=True), strict=True)


def test_hooks_survive_and_can_be_removed() -> None:
    model, calls = net(), []
    handle = model[0].register_forward_hook(lambda m, i, o: calls.append(o.shape))
    wrap(model)
    model(torch.randn(3, 64))
    assert calls == [(3, 96)]
    lowprec.restore(model)
    handle.remove()
    model(torch.randn(3, 64))
    assert len(calls) == 1


def test_tied_weights_stay_one_parameter_and_train() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(32, 64), "out": nn.Linear(64, 32, bias=False)})
    model["out"].weight = model["table"].weight
    wrap(model)
    assert model["out"].weight is model["table"].weight
    assert len(list(model.parameters())) == 1
    hidden = model["table"](torch.arange(32))
    model["out"](hidden).square().sum().backward()
    tied = model["table"].weight.grad
    other = nn.ModuleDict({"table": nn.Embedding(32, 64), "out": nn.Linear(64, 32, bias=False)})
    other["out"].weight = other["table"].weight
    other.load_state_dict(model.state_dict())
    other["out"](other["table"](torch.arange(32))).square().sum().backward()
    relative = (tied - other["table"].weight.grad).norm() / other["table"].weight.grad.norm()
    assert relative < 0.1


def test_one_module_used_twice_accumulates_gradients() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(64, 64, bias=False)
    model = wrap(nn.Sequential(shared, nn.ReLU(), shared), "bf16")
    x = torch.randn(8, 64)
    model(x).sum().backward()
    once = shared.weight.grad.clone()
    model(x).sum().backward()
    assert torch.allclose(shared.weight.grad, 2 * once)
    assert lowprec.observe(model).gemms["0"]["fprop"] == {"bf16": 4}


def test_deepcopy_and_pickle_keep_the_wrapping() -> None:
    model, x = wrap(net()).eval(), torch.randn(4, 64)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), model(x))


def test_optimizer_made_before_apply_still_updates() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrap(model)
    before = model[0].weight.detach().clone()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


class Twice(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_a_subclass_with_its_own_forward_and_attention_are_left_right() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"a": nn.Linear(32, 32), "twice": Twice(32, 32), "attn": nn.MultiheadAttention(32, 4)}
    )
    x = torch.randn(6, 2, 32)
    before = model["twice"](x), model["attn"](x, x, x)[0]
    wrap(model)
    assert type(model["twice"]) is Twice
    assert torch.equal(model["twice"](x), before[0])
    assert torch.equal(model["attn"](x, x, x)[0], before[1])


def test_transformer_encoder_layer_evaluates_as_it_trains() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(32, 32))
    wrap(model)
    assert type(layer.linear1) is nn.Linear


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m._modules.pop("2"), "names layer '2', which this model does not have"),
        (lambda m: m.append(nn.Linear(64, 64)), "has a linear layer '4' that the plan does not"),
        (lambda m: m.__setitem__(2, m[0]), "names layer '2', which this model does not have"),
        (lambda m: m.__setitem__(2, nn.Linear(96, 32)), r"is 32 x 96 \(N x K\).*made for 64 x 96"),
        (lambda m: m.__setitem__(2, Twice(96, 64)), "can no longer be converted: is a Twice"),
        (
            lambda m: m.__setitem__(2, nn.ReLU()),
            "names layer '2', which this model does not have as a linear",
        ),
    ],
)
def test_a_plan_for_another_model_is_refused_before_anything_changes(change, says) -> None:
    model = net()
    plan = lowprec.plan(model, lowprec.load_recipe("mxfp8"))
    change(model)
    classes = [type(m) for m in model.modules()]
    with pytest.raises(PlanError, match=says):
        lowprec.apply(model, plan)
    assert [type(m) for m in model.modules()] == classes


def test_restore_refuses_a_class_changed_after_apply_and_changes_nothing() -> None:
    model = wrap(net())
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(PlanError, match="became a Parametrized"):
        lowprec.restore(model)
    assert type(model[2]) is lowprec.Linear
    model(torch.randn(3, 64))


def test_attributes_of_the_users_layer_are_left_alone() -> None:
    model = net()
    model[0].policy, model[0].backends, model[0].gemm_counts = "mine", "mine", "mine"
    lowprec.restore(wrap(model))
    assert (model[0].policy, model[0].backends, model[0].gemm_counts) == ("mine",) * 3


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64)])
def test_outputs_can_be_changed_in_place(recipe: str, shape: tuple[int, ...]) -> None:
    model = wrap(nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64)), recipe)
    model(torch.randn(*shape)).sum().backward()
    assert model[0].weight.grad is not None


def test_meta_initialisation_counts_from_zero() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    wrap(model)
    state = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).state_dict()
    model.load_state_dict(state, assign=True)
    model(torch.randn(3, 64))
    assert lowprec.observe(model).gemms["0"]["fprop"] == {"mxfp8 x mxfp8_32x32": 1}
    assert not list(model.named_buffers())


def test_restore_between_forward_and_backward() -> None:
    model = wrap(net())
    loss = model(torch.randn(3, 64)).sum()
    lowprec.restore(model)
    loss.backward()
    assert model[0].weight.grad is not None


def test_copies_count_apart() -> None:
    model = wrap(net())
    model(torch.randn(3, 64))
    twin = copy.deepcopy(model)
    twin(torch.randn(3, 64))
    counts = [lowprec.observe(m).gemms["0"]["fprop"] for m in (model, twin)]
    assert counts == [{"mxfp8 x mxfp8_32x32": 1}, {"mxfp8 x mxfp8_32x32": 2}]


def test_apply_says_in_a_line_what_it_was_given_instead() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    recipe = lowprec.load_recipe("mxfp8")
    with pytest.raises(PlanError, match=r"not a Recipe; make one with lowprec.plan\(model, recipe"):
        lowprec.apply(model, recipe)  # type: ignore[arg-type]
    plan = lowprec.plan(model, recipe, hardware="cpu")
    with pytest.raises(PlanError, match="main_grad=True, False or None, not 'yes'"):
        lowprec.apply(model, plan, main_grad="yes")  # type: ignore[arg-type]
    assert type(model[0]) is torch.nn.Linear
