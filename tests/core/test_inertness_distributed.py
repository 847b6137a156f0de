"""Inertness on several processes: DDP and FSDP2 over gloo, against one process."""

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lowprec
from lowprec.errors import LowprecError, PlanError
from lowprec.policy import LinearPolicy
from lowprec.recipe import Recipe, Rule

POLICIES = {
    "bf16": "bf16",
    "mxfp8": "mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8",
    "random": "mxfp8 x mxfp8_32x32 / mxfp4:sr + rht32:seeded / nvfp4:sr x nvfp4 + rht16",
    "skip": "mxfp8 / mxfp8 / skip",
}
TRAINED = ("bf16", "mxfp8", "random")
RANKS = 2


def wrap(model: nn.Module, kind: str) -> Any:
    rule = Rule("*", "linear", LinearPolicy.parse(POLICIES[kind]), "test")
    return lowprec.apply(model, lowprec.plan(model, Recipe("test", "test", (rule,))))


def net(*, inplace: bool = False) -> nn.Sequential:
    """33 rows do not divide by two ranks; of the head's single row one rank owns nothing."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(40, 33), nn.ReLU(inplace=inplace), nn.Linear(33, 48), nn.Linear(48, 1)
    )


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(16, 40, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {
        name.removeprefix("module."): getattr(p.grad, "full_tensor", lambda g=p.grad: g)()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {name: gradient.clone() for name, gradient in found.items()}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(model: Any, runner: Any, rank: int) -> dict[str, torch.Tensor]:
    """Two steps of two micro-batches, the first of them without synchronisation."""
    optimizer = torch.optim.SGD(runner.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            lowprec.set_step(model, step, micro_batch=micro, data_rank=rank)
            x = rows(2 * step + micro, rank)
            if micro == 0:
                with runner.no_sync():
                    runner(x).square().mean().backward()
            else:
                runner(x).square().mean().backward()
        optimizer.step()
    return weights(model)


def by_hand(kind: str) -> dict[str, torch.Tensor]:
    """What `train` gives, by one process that averages the gradients of both halves."""
    models = [wrap(net(), kind) for _ in range(RANKS)]
    for step in range(2):
        for rank, model in enumerate(models):
            model.zero_grad()
            for micro in range(2):
                lowprec.set_step(model, step, micro_batch=micro, data_rank=rank)
                model(rows(2 * step + micro, rank)).square().mean().backward()
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            p.grad = (p.grad + q.grad) / RANKS
            q.grad = p.grad
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    return weights(models[0])


def one_step(model: Any, runner: Any, x: torch.Tensor, rank: int) -> dict[str, torch.Tensor]:
    lowprec.set_step(model, 0, data_rank=rank)
    runner(x).square().sum().backward()
    return gradients(model)


def sharded(model: nn.Sequential, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def ddp_results(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for kind in TRAINED:
        model = wrap(net(), kind)
        results[f"trained {kind}"] = train(model, DistributedDataParallel(model), rank)
    model = wrap(net(), "skip")
    runner = DistributedDataParallel(model, find_unused_parameters=True)
    results["skip"] = [one_step(model, runner, rows(step, rank), rank) for step in range(2)]
    # One rank without a single row, one rank whose input is poisoned.
    model = wrap(net(), "mxfp8")
    x = rows(0, rank)[: 16 * (1 - rank)]
    results["no rows"] = one_step(model, DistributedDataParallel(model), x, rank)
    model = wrap(net(), "mxfp8")
    x = rows(0, rank) / (1 - rank)
    results["poisoned"] = one_step(model, DistributedDataParallel(model), x, rank)
    model = wrap(net(), "random")
    runner = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    lowprec.set_step(model, 0, data_rank=rank)
    checkpoint(runner, rows(0, rank), use_reentrant=False).square().sum().backward()
    results["checkpointed"] = gradients(model)
    model = wrap(net(), "random")
    results["not checkpointed"] = one_step(model, DistributedDataParallel(model), rows(0, rank), 0)
    return results


def fsdp_results(rank: int) -> dict[str, Any]:
    results = {}
    for kind in TRAINED:
        model = sharded(wrap(net(), kind))
        results[f"fsdp {kind}"] = one_step(model, model, rows(0, rank), rank)
    return results


def worker(rank: int, store: str, folder: str) -> None:
    warnings.simplefilter("ignore")  # of torch about its own gloo and FSDP
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.save({**ddp_results(rank), **fsdp_results(rank)}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, (str(folder / "store"), str(folder)), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def mean_of_ranks(kind: str) -> dict[str, torch.Tensor]:
    parts = []
    for rank in range(RANKS):
        model = wrap(net(), kind)
        parts.append(one_step(model, model, rows(0, rank), rank))
    return {name: (parts[0][name] + parts[1][name]) / RANKS for name in parts[0]}


@pytest.mark.parametrize("kind", TRAINED)
def test_ddp_trains_as_one_process_that_averages(two: list[dict[str, Any]], kind: str) -> None:
    """Two steps, accumulation under no_sync included, bit for bit; random bits follow the rank."""
    key = f"trained {kind}"
    assert equal(two[0][key], two[1][key])
    assert equal(two[0][key], by_hand(kind))
    assert not torch.equal(two[0][key]["0.weight"], net()[0].weight)


def test_ddp_with_skipped_wgrad_needs_find_unused_parameters_only(
    two: list[dict[str, Any]],
) -> None:
    """The vector head stays plain, so its weight has a gradient; the others have their biases'."""
    names = {"0.bias", "2.bias", "3.weight", "3.bias"}
    for step in two[0]["skip"]:
        assert step.keys() == names
    assert equal(two[0]["skip"][0], two[1]["skip"][0])


def test_a_rank_without_rows_neither_hangs_nor_disturbs(two: list[dict[str, Any]]) -> None:
    model = wrap(net(), "mxfp8")
    alone = one_step(model, model, rows(0, 0), 0)
    assert equal(two[0]["no rows"], two[1]["no rows"])
    assert equal(two[0]["no rows"], {name: g / RANKS for name, g in alone.items()})


def test_nan_on_one_rank_is_nan_on_every_rank(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["poisoned"]["0.weight"].isnan().any()
        assert found["poisoned"]["3.weight"].isnan().all()


def test_ddp_with_checkpointing_and_a_static_graph(two: list[dict[str, Any]]) -> None:
    assert equal(two[0]["checkpointed"], mean_of_ranks("random"))
    assert not equal(two[0]["not checkpointed"], mean_of_ranks("random"))  # rank 0's bits twice


@pytest.mark.parametrize("kind", TRAINED)
def test_fsdp_shards_that_do_not_divide(two: list[dict[str, Any]], kind: str) -> None:
    assert equal(two[0][f"fsdp {kind}"], two[1][f"fsdp {kind}"])
    assert equal(two[0][f"fsdp {kind}"], mean_of_ranks(kind))


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("kind", TRAINED)
def test_fsdp_of_one_process_is_the_model(kind: str) -> None:
    alone, model = wrap(net(), kind), sharded(wrap(net(), kind))
    assert isinstance(model[0], lowprec.Linear)
    assert equal(
        one_step(model, model, rows(0, 0), 0),
        one_step(alone, alone, rows(0, 0), 0),
    )
    assert lowprec.observe(model).gemms == lowprec.observe(alone).gemms
    options = StateDictOptions(full_state_dict=True)
    assert list(get_model_state_dict(model, options=options)) == list(net().state_dict())


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("kind", TRAINED)
def test_fsdp_with_bf16_parameters(kind: str) -> None:
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    alone, model = wrap(net(), kind).bfloat16(), sharded(wrap(net(), kind), mp_policy=mixed)
    got = one_step(model, model, rows(0, 0), 0)
    want = one_step(alone, alone, rows(0, 0).bfloat16(), 0)
    assert {g.dtype for g in got.values()} == {torch.float32}
    assert equal(got, {name: g.float() for name, g in want.items()})


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("kind", TRAINED)
def test_fsdp_takes_activations_that_change_outputs_in_place(kind: str) -> None:
    """As it does with plain layers: what FSDP hangs on an output must survive the change."""
    want = [one_step(m, m, rows(0, 0), 0) for m in (net(inplace=True), wrap(net(), kind))]
    got = []
    for model in (net(inplace=True), wrap(net(inplace=True), kind)):
        got.append(one_step(sharded(model), model, rows(0, 0), 0))
    assert equal(got[0], want[0])
    assert equal(got[1], want[1])


@pytest.mark.usefixtures("gloo")
def test_layers_sharded_before_the_plan_are_left_with_the_reason() -> None:
    model = sharded(net())
    bf16 = lowprec.load_recipe("bf16")
    assert "is a FSDPLinear" in lowprec.plan(model, bf16).layer("0").why
    with pytest.raises(PlanError, match="would quantize no layer"):
        lowprec.plan(model, lowprec.load_recipe("mxfp8"))


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("kind", ["mxfp8", "random"])
def test_tensor_parallel_weights_are_refused_not_miscast(kind: str) -> None:
    """Casts read plain tensors; of a DTensor they would give wrong numbers without a word."""
    model = wrap(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)), kind)
    mesh = init_device_mesh("cpu", (1,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with pytest.raises(LowprecError, match="DTensor"):
        model(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))


@pytest.mark.usefixtures("gloo")
def test_ddp_leaves_the_wrapped_model_as_it_is() -> None:
    model = wrap(net(), "mxfp8")
    keys, twin = list(model.state_dict()), copy.deepcopy(model)
    runner = DistributedDataParallel(model)
    assert equal(one_step(model, runner, rows(0, 0), 0), one_step(twin, twin, rows(0, 0), 0))
    assert list(model.state_dict()) == keys
    assert list(runner.state_dict()) == [f"module.{key}" for key in keys]
    assert lowprec.observe(runner).gemms.keys() == {"module.0", "module.2"}
