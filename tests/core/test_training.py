"""Training with random bits and schedules: recompute, resume, ranks, stages, skipped wgrad."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowprec
from lowprec.errors import LowprecError, PlanError, UnsupportedError
from lowprec.policy import LinearPolicy
from lowprec.recipe import Recipe, Rule, parse_recipe

# Tracing instantiates autograd.Function inside torch, which warns about itself.
compiled = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
RANDOM = "mxfp8 x mxfp8_32x32 / mxfp4:sr + rht32:seeded / mxfp4:sr + rht32:seeded"
EVERYWHERE = "mxfp4:sr + rht32:seeded / mxfp4:sr + rht16:seeded / nvfp4:sr + rht16"


def recipe_of(*policies: str, starts: tuple[int, ...] = (0,), seed: int = 0) -> Recipe:
    rules = [
        Rule("*", "linear", LinearPolicy.parse(policy), "test", from_step=start)
        for policy, start in zip(policies, starts, strict=True)
    ]
    return Recipe("test", "test", tuple(rules), seed)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 64), nn.SiLU(), nn.Linear(64, 48), nn.SiLU())


def wrapped(recipe: Recipe | str = RANDOM) -> nn.Sequential:
    model = net()
    recipe = recipe_of(recipe) if isinstance(recipe, str) else recipe
    lowprec.apply(model, lowprec.plan(model, recipe))
    return model


def batch(step: int, rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, 40, generator=torch.Generator().manual_seed(step))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def backward(model: nn.Module, x: torch.Tensor, *, mode: str) -> list[torch.Tensor]:
    model.zero_grad()
    if mode == "plain":
        y = model(x)
    else:
        y = checkpoint(model, x.requires_grad_(), use_reentrant=mode == "reentrant")
    y.square().sum().backward()
    return gradients(model)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("policy", [RANDOM, EVERYWHERE])
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_checkpointing_is_bitwise_equal(mode: str, policy: str, told: bool) -> None:
    """With the step told, and with the count of forward calls that stands in for it."""
    plain, recomputed = wrapped(policy), wrapped(policy)
    seen = []
    for step in range(3):
        results = []
        for model, how in ((plain, "plain"), (recomputed, mode)):
            if told:
                lowprec.set_step(model, step)
            results.append(backward(model, batch(0), mode=how))
        assert equal(*results), step
        seen.append(results[0])
    assert not equal(seen[0], seen[1])
    assert not equal(seen[1], seen[2])


def test_evaluation_does_not_shift_the_bits_where_the_step_is_told() -> None:
    a, b = wrapped(), wrapped()
    for step in range(2):
        for model in (a, b):
            lowprec.set_step(model, step)
        with torch.no_grad():
            b(batch(9))
        assert equal(backward(a, batch(step), mode="plain"), backward(b, batch(step), mode="plain"))


def test_bits_follow_seed_step_micro_batch_and_rank() -> None:
    def run(seed: int = 0, **position: int) -> list[torch.Tensor]:
        model = wrapped(recipe_of(RANDOM, seed=seed))
        lowprec.set_step(model, **({"step": 0} | position))
        return backward(model, batch(0), mode="plain")

    base = run()
    assert equal(base, run())
    others = [run(seed=1), run(step=1), run(micro_batch=1), run(data_rank=1)]
    for i, one in enumerate(others):
        assert not any(equal(one, other) for other in [base, *others[:i]])


TRAIN = """
import sys, torch
sys.path.insert(0, {folder!r})
from test_training import batch, lowprec, wrapped
model = wrapped()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
first, last, load, save = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if load != "-":
    state = torch.load(load, weights_only=True)
    model.load_state_dict(state["model"], strict=True)
    optimizer.load_state_dict(state["optimizer"])
for step in range(first, last):
    lowprec.set_step(model, step)
    optimizer.zero_grad()
    model(batch(step)).square().mean().backward()
    optimizer.step()
torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, save)
"""


def test_six_steps_equal_three_a_new_process_and_three_more(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(folder=str(Path(__file__).parent)))
    for first, last, load, save in ((0, 6, "-", "six"), (0, 3, "-", "a"), (3, 6, "a", "b")):
        paths = [load if load == "-" else str(tmp_path / load), str(tmp_path / save)]
        subprocess.run(
            [sys.executable, str(script), str(first), str(last), *paths],
            check=True,
            env={"PYTHONPATH": str(Path(lowprec.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        )
    six, resumed = (torch.load(tmp_path / name, weights_only=True) for name in ("six", "b"))
    assert equal(list(six["model"].values()), list(resumed["model"].values()))
    assert list(six["model"]) == list(net().state_dict())


def test_one_rank_and_two_ranks_round_each_element_alike() -> None:
    """dx of a layer with stochastic dgrad: rows 32.. on rank 1 are those rows of one process."""
    whole = batch(0).requires_grad_()
    model = wrapped(EVERYWHERE)
    lowprec.set_step(model, 3)
    # The first layer alone: what reaches it must not depend on how other ranks sum.
    layer = model[0]
    y = layer(whole)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(dy)
    for rank in (0, 1):
        rows = slice(32 * rank, 32 * rank + 32)
        part = batch(0)[rows].requires_grad_()
        lowprec.set_step(model, 3, data_rank=rank)
        y_part = layer(part)
        y_part.backward(dy[rows])
        assert torch.equal(y_part, y[rows])
        assert torch.equal(part.grad, whole.grad[rows])


SCHEDULED = recipe_of("mxfp8", "bf16 / mxfp8 / bf16", starts=(0, 2))


def test_a_schedule_switches_at_its_step_and_counts_show_it() -> None:
    model = wrapped(SCHEDULED)
    for step in range(5):
        lowprec.set_step(model, step)
        backward(model, batch(step), mode="plain")
    gemms = lowprec.observe(model).gemms["2"]
    assert gemms == {
        "fprop": {"mxfp8": 2, "bf16": 3},
        "dgrad": {"mxfp8": 5},
        "wgrad": {"mxfp8": 2, "bf16": 3},
    }
    lowprec.set_step(model, 1)  # a run that was resumed from an earlier step
    model(batch(0))
    assert lowprec.observe(model).gemms["2"]["fprop"]["mxfp8"] == 3
    assert "fprop=mxfp8" in repr(model[2])


def test_a_schedule_that_nobody_drives_is_an_error_in_training_only() -> None:
    model = wrapped(SCHEDULED)
    with torch.no_grad():
        model(batch(0))
    with pytest.raises(
        UnsupportedError, match=r"layer '0' changes its precision on a schedule.*set_"
    ):
        model(batch(0))


def test_a_step_told_between_forward_and_backward_does_not_mix_stages() -> None:
    a, b = wrapped(SCHEDULED), wrapped(SCHEDULED)
    for model in (a, b):
        lowprec.set_step(model, 1)
    y = a(batch(0))
    lowprec.set_step(a, 2)
    y.square().sum().backward()
    assert equal(gradients(a), backward(b, batch(0), mode="plain"))


def test_the_plan_shows_the_schedule_and_resolves_fractions() -> None:
    text = """
schema = 1
why = "w"
[[rule]]
match = "*"
kind = "linear"
fprop = "mxfp8"
dgrad = "mxfp8"
wgrad = "mxfp8"
why = "start"
[[rule]]
match = "0"
kind = "linear"
fprop = "bf16"
dgrad = "bf16"
wgrad = "bf16"
last_fraction = 0.25
why = "settle"
"""
    recipe = parse_recipe(text, name="r")
    with pytest.raises(PlanError, match=r"recipe r: rule 2: .*plan\(model, recipe, steps=10000\)"):
        lowprec.plan(net(), recipe)
    plan = lowprec.plan(net(), recipe, steps=100)
    assert [stage.from_step for stage in plan.layer("0").stages] == [0, 75]
    assert [stage.from_step for stage in plan.layer("2").stages] == [0]
    assert "from step 75 bf16 / bf16 / bf16 (rule 2: settle)" in str(plan)
    assert lowprec.Plan.from_json(plan.to_json()) == plan
    assert plan.hash != lowprec.plan(net(), recipe, steps=200).hash
    with pytest.raises(PlanError, match="steps is the number of training steps"):
        lowprec.plan(net(), recipe, steps=0)
    with pytest.raises(PlanError, match="must begin after step 0 and before the end"):
        lowprec.plan(net(), recipe, steps=1)
    late = Recipe("late", "w", (Rule("0", "linear", recipe.rules[0].policy, "w", from_step=5),))
    with pytest.raises(PlanError, match="layer '0' is decided from step 5 on only"):
        lowprec.plan(net(), late)


def test_skipped_wgrad_freezes_the_weight_and_the_plan_says_so() -> None:
    recipe = recipe_of("mxfp8 / mxfp8 / skip")
    model = net()
    plan = lowprec.plan(model, recipe)
    assert plan.frozen == ("0.weight", "2.weight")
    assert "No weight gradient (wgrad is skipped): 0.weight, 2.weight" in str(plan)
    assert "wgrad is skipped: 0.weight gets no gradient" in plan.layer("0").why
    lowprec.apply(model, plan)
    x = batch(0).requires_grad_()
    model(x).square().sum().backward()
    assert model[0].weight.grad is None
    assert model[0].weight.requires_grad
    assert model[0].bias.grad is not None
    assert x.grad is not None
    gemms = lowprec.observe(model).gemms["0"]
    assert gemms == {"fprop": {"mxfp8": 1}, "dgrad": {"mxfp8": 1}, "wgrad": {}}


def test_skipping_one_use_of_a_tied_weight_leaves_the_other() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model[1].weight = model[0].weight
    rules = recipe_of("mxfp8", "mxfp8 / mxfp8 / skip", starts=(0, 0)).rules
    skip_second = Recipe("r", "w", (rules[0], Rule("1", "linear", rules[1].policy, "w")))
    lowprec.apply(model, lowprec.plan(model, skip_second))
    x = torch.randn(8, 32)
    model(x).sum().backward()
    through_first = model[0].weight.grad.clone()
    hidden = (x.bfloat16().float() @ model[0].weight.T).detach()
    assert through_first.norm() > 0
    exact_second = torch.ones(8, 32).T @ hidden
    dy = torch.ones(8, 32) @ model[1].weight.detach()
    exact_first = dy.T @ x
    assert (through_first - exact_first).norm() < 0.1 * exact_first.norm()
    assert (through_first - exact_first - exact_second).norm() > 0.5 * exact_second.norm()


def test_a_layer_is_demoted_in_the_middle_of_training() -> None:
    model = net()
    plan = lowprec.plan(model, recipe_of("mxfp8"))
    assert lowprec.apply(lowprec.apply(model, plan), plan) is model  # twice is once
    backward(model, batch(0), mode="plain")
    demoted = plan.with_layer("2", "bf16", why="wgrad saturates")
    assert "set by hand: wgrad saturates" in demoted.layer("2").why
    lowprec.apply(model, demoted)
    backward(model, batch(1), mode="plain")
    gemms = lowprec.observe(model).gemms
    assert gemms["2"]["wgrad"] == {"mxfp8": 1, "bf16": 1}
    assert gemms["0"]["wgrad"] == {"mxfp8": 2}
    with pytest.raises(PlanError, match="no layer '3'"):
        plan.with_layer("3", "bf16", why="x")
    with pytest.raises(LowprecError, match="cannot read the policy"):
        plan.with_layer("2", "bf16 / bf16", why="x")
    lowprec.restore(model)
    assert type(model[2]) is nn.Linear


@pytest.mark.parametrize("policy", ["bf16", EVERYWHERE])
def test_a_plan_applied_between_forward_and_backward_changes_the_next_step(policy: str) -> None:
    """What forward kept is in the format of its own plan, and backward reads it as that."""
    a, b = wrapped(), wrapped()
    for model in (a, b):
        lowprec.set_step(model, 0)
    plan = lowprec.plan(net(), recipe_of(policy, seed=9))
    y = a(batch(0))
    lowprec.apply(a, plan)
    y.square().sum().backward()
    assert equal(gradients(a), backward(b, batch(0), mode="plain"))
    lowprec.apply(b, plan)
    assert equal(*(backward(model, batch(1), mode="plain") for model in (a, b)))


@compiled
def test_a_second_plan_compiles_as_well() -> None:
    eager, traced = wrapped(), wrapped()
    plan = lowprec.plan(net(), recipe_of("mxfp4"))
    results = []
    torch._dynamo.reset()
    for model in (eager, traced):
        step = torch.compile(model, backend="aot_eager", fullgraph=True)
        call = step if model is traced else model
        call(batch(0)).sum().backward()
        lowprec.apply(model, plan)
        model.zero_grad()
        call(batch(1)).square().sum().backward()
        results.append(gradients(model))
    assert equal(*results)
    assert lowprec.observe(traced).gemms["0"]["wgrad"] == lowprec.observe(eager).gemms["0"]["wgrad"]


def test_a_plan_that_leaves_a_converted_layer_alone_changes_nothing() -> None:
    model = net()
    plan = lowprec.plan(model, recipe_of("mxfp8"))
    rules = recipe_of("mxfp8").rules
    other = lowprec.plan(model, Recipe("r", "w", (Rule("0", "linear", rules[0].policy, "w"),)))
    lowprec.apply(model, plan)
    with pytest.raises(
        PlanError, match="leaves layer '2' as it is, which an earlier plan converted"
    ):
        lowprec.apply(model, other)
    assert type(model[2]) is lowprec.Linear


def test_copies_keep_policy_position_and_counts() -> None:
    model = wrapped()
    lowprec.set_step(model, 4)
    twin = copy.deepcopy(model)
    assert equal(backward(model, batch(0), mode="plain"), backward(twin, batch(0), mode="plain"))
    assert lowprec.observe(twin).gemms == lowprec.observe(model).gemms


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"step": -1}, "step must be a whole number from 0"),
        ({"step": 1.0}, "step must be a whole number"),
        ({"step": 2**32}, "step must be a whole number"),
        ({"step": 0, "micro_batch": True}, "micro_batch must be a whole number"),
        ({"step": 0, "data_rank": None}, "data_rank must be a whole number"),
    ],
)
def test_bad_steps(arguments: dict, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        lowprec.set_step(net(), **arguments)


def test_torch_random_state_is_untouched() -> None:
    model, x = wrapped(EVERYWHERE), batch(0)
    before = torch.get_rng_state()
    backward(model, x, mode="plain")
    assert torch.equal(before, torch.get_rng_state())


@compiled
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(
    "policy", [RANDOM, EVERYWHERE, "mxfp8 / mxfp8 / bf16", "mxfp8 / mxfp4 / skip"]
)
def test_compiled_equals_eager_at_every_step_without_recompiling(policy: str, told: bool) -> None:
    eager, traced = wrapped(policy), wrapped(policy)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    step = torch.compile(traced, backend=backend, fullgraph=True)
    for number in range(3):
        results = []
        for model, call in ((eager, eager), (traced, step)):
            if told:
                lowprec.set_step(model, number)
            model.zero_grad()
            call(batch(0)).square().sum().backward()
            results.append(gradients(model))
        assert equal(*results), number
    assert len(graphs) == 1
    assert lowprec.observe(traced).gemms == lowprec.observe(eager).gemms
