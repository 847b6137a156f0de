"""Weights that travel as codes: the numbers of one process, at any number of ranks, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import lowprec
from lowprec.errors import LowprecError, PlanError
from lowprec.fsdp import shard_plan, shard_quantized
from lowprec.transport import all_to_all
from tests.core import fsdp_ranks as they

Found = dict[str, Any]


def spawn(folder: Path, ranks: int, task: Any) -> list[Found]:
    folder.mkdir(exist_ok=True)
    mp.spawn(they.worker, (ranks, str(folder), task), nprocs=ranks)
    return [torch.load(folder / f"{task.__name__}-{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[Found]:
    """What two ranks saw."""
    return spawn(folder / "2", 2, they.everything)


@pytest.fixture(scope="module")
def four(folder: Path, two: list[Found]) -> list[Found]:
    """What four ranks saw; they also load the checkpoint of two."""
    return spawn(folder / "4", 4, they.everything)


def whole_codes(n: int, k: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    q = lowprec.quantize(nn.Linear(k, n).weight.detach(), "mxfp8_32x32")
    return [q.codes, q.scales]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@cache
def by_hand(policy: str, ranks: int) -> Found:
    """One process that averages the gradients of the ranks' rows: codes, losses, weights."""
    models = [they.wrap(they.mlp(), policy) for _ in range(ranks)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    codes, losses = [], []
    cast = models[0][0].lowprec_products.stage.policy.fprop.right
    for step in range(they.STEPS):
        for layer in they.linears(models[0]):
            q = lowprec.quantize(layer.weight.detach(), cast)
            codes.append([q.codes, q.scales])
        total = 0.0
        for rank, model in enumerate(models):
            lowprec.set_step(model, step, data_rank=rank)
            loss = model(they.share(they.batch(step), rank, ranks)).square().mean()
            loss.backward()
            total += loss.item()
        losses.append(total / ranks)
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(p.grad for p in parameters) / ranks
            for p in parameters:
                p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"codes": codes, "losses": losses, "weights": models[0].state_dict()}


@pytest.mark.parametrize("name", they.SHAPES)
def test_gathered_codes_are_those_of_the_whole_weight(
    two: list[Found], four: list[Found], name: str
) -> None:
    for ranks, found in ((2, two), (4, four)):
        n, k = they.SHAPES[name]
        planned = shard_plan(they.wrap(nn.Sequential(nn.Linear(k, n))), ranks).weights[0]
        for one in found:
            got = one["invariance"][name]
            assert (got is None) == (planned.cast is None)
            assert got is None or equal(got, whole_codes(n, k))


def test_the_plan_says_what_cannot_be_tiled() -> None:
    layers = {"a": nn.Linear(96, 100), "b": nn.Linear(160, 96), "c": nn.Linear(768, 2880)}
    model = they.wrap(nn.Sequential(*layers.values(), nn.Linear(64, 7)))  # type: ignore[arg-type]
    gathered = {
        ranks: [one.cast is not None for one in shard_plan(model, ranks).weights]
        for ranks in range(1, 9)
    }
    assert gathered[1] == [True] * 4
    assert gathered[2] == [False, False, True, False]
    assert gathered[3] == [False, True, True, False]
    assert gathered[7] == [False] * 4
    assert (
        shard_plan(model, 2).weights[0].why
        == "100 rows on 2 ranks are 50 each, not a multiple of 32"
    )
    assert shard_plan(model, 8).weights[0].why == "100 rows do not divide by 8 ranks"
    assert shard_plan(model, 2).weights[2].bits == 8 + 8 / 1024
    assert "not a multiple of 32" in str(shard_plan(model, 2))


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("mxfp8", "square tiles"),
        ("bf16", "bf16"),
        ("mxfp8 x mxfp8_32x32 / bf16 / mxfp8", "cast it differently"),
        ("mxfp8 x mxfp8_32x32 + rht32 / mxfp8 x mxfp8_32x32 / mxfp8", "rotates"),
        ("mxfp8 x mxfp8_32x32:sr / mxfp8 x mxfp8_32x32:sr / mxfp8", "stochastic"),
        ("fp8_tensorwise", "whole weight"),
    ],
)
def test_the_plan_says_why_a_cast_cannot_travel(policy: str, why: str) -> None:
    (weight,) = shard_plan(they.wrap(nn.Sequential(nn.Linear(64, 64)), policy), 2).weights
    assert weight.cast is None
    assert why in weight.why
    assert weight.bits == 32
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    (weight,) = shard_plan(nn.Sequential(nn.Linear(64, 64)), 2, mp_policy=mixed).weights
    assert (weight.bits, weight.why) == (16, "no lowprec layer: it has no cast")


@pytest.mark.parametrize("kind", ["tiles", "portable", "random"])
def test_training_equals_one_process(two: list[Found], four: list[Found], kind: str) -> None:
    """Codes of every weight bit for bit at every step; random bits follow the rows."""
    policy = {"tiles": they.TILES, "portable": they.PORTABLE, "random": they.RANDOM}[kind]
    for ranks, found in ((2, two), (4, four)):
        want = by_hand(policy, ranks)
        for one in found:
            got = one["trained"][kind]
            assert got["losses"] == pytest.approx(want["losses"], rel=1e-6)
            same = [
                g is None or equal(g, w) for g, w in zip(got["codes"], want["codes"], strict=True)
            ]
            assert all(same)
            assert sum(g is not None for g in got["codes"]) >= they.STEPS
            for name, tensor in want["weights"].items():
                torch.testing.assert_close(got["weights"][name], tensor, rtol=1e-6, atol=1e-7)
        assert want["losses"][-1] < want["losses"][0]


def test_hybrid_sharding_trains_the_same(four: list[Found]) -> None:
    want = by_hand(they.TILES, 4)
    for one in four:
        assert one["hsdp"]["losses"] == pytest.approx(want["losses"], rel=1e-6)
        assert all(equal(g, w) for g, w in zip(one["hsdp"]["codes"], want["codes"], strict=True))


def test_half_the_bytes_on_the_wire(two: list[Found], four: list[Found]) -> None:
    for found in (two, four):
        for one in found:
            assert one["wire"]["codes"] / one["wire"]["bf16"] <= 0.505


def test_nothing_piles_up(two: list[Found]) -> None:
    """After a step no rank holds more than with torch's own shards."""
    for one in two:
        held = one["held"]
        assert held["codes"][1:] == [held["codes"][0]] * 2
        assert held["codes"][0] <= held["plain"][0]


def test_a_checkpoint_resumes_bit_for_bit(two: list[Found]) -> None:
    for one in two:
        saved = one["saved"]
        whole, resumed = saved["whole"]["weights"], saved["resumed"]["weights"]
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
        assert saved["whole"]["losses"][-1] == saved["resumed"]["losses"][-1]


def test_a_checkpoint_loads_at_another_number_of_ranks(two: list[Found], four: list[Found]) -> None:
    """Optimizer states included: the step after it agrees with that of two ranks."""
    want = two[0]["saved"]
    for one in four:
        loaded = one["resharded"]["loaded"]
        assert all(torch.equal(loaded[name], want["loaded"][name]) for name in loaded)
    # The sum of all ranks' rows, in another order and rounded to bf16 in other parts.
    got = four[0]["resharded"]["resumed"]["weights"]
    for name, tensor in want["resumed"]["weights"].items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=2e-2)


@pytest.mark.parametrize("cast", ["mxfp8", "mxfp4", "mxfp6_e2m3"])
def test_rows_that_cross_are_the_cast_rows(two: list[Found], four: list[Found], cast: str) -> None:
    """Zero rows to some ranks, none at all from one; 69 columns end in a ragged block."""
    for found in (two, four):
        ranks = len(found)
        arrive = [found[r]["exchanged"][cast] for r in range(ranks)]
        sent = [list(torch.split(one["x"], they.SENT[r][:ranks])) for r, one in enumerate(arrive)]
        counts = [[they.SENT[other][r] for other in range(ranks)] for r in range(ranks)]
        back = [list(torch.split(one["dy"], counts[r])) for r, one in enumerate(arrive)]
        for rank, one in enumerate(arrive):
            came = torch.cat([sent[other][rank] for other in range(ranks)])
            gone = torch.cat([back[other][rank] for other in range(ranks)])
            for got, source in ((one["y"], came), (one["dx"], gone)):
                want = lowprec.dequantize(lowprec.quantize(source, cast), torch.bfloat16)
                assert torch.equal(got, want)
            bits = {"mxfp8": 8, "mxfp6_e2m3": 6, "mxfp4": 4}[cast]
            width = (69 if bits == 8 else 72 * bits // 8) + 3
            assert one["bytes"] == [len(one["x"]) * width]


@pytest.mark.usefixtures("gloo")
def test_exchanges_that_do_not_fit_say_so() -> None:
    x = torch.ones(4, 32)
    for send, receive, cast, words in (
        ([3], [3], "mxfp8", "sends all rows"),
        ([4], [2, 2], "mxfp8", "one count, zero or more"),
        ([4], [4], "mxfp8_32x32", "does not cast each row by itself"),
        ([4], [4], "nvfp4", "does not cast each row by itself"),
        ([4], [4], "mxfp8:sr", "nearest rounding"),
    ):
        with pytest.raises(LowprecError, match=words):
            all_to_all(x, send, receive, cast=cast)
    assert torch.equal(all_to_all(x, [4], [4]), x)


def test_full_state_is_that_of_one_process(two: list[Found]) -> None:
    state = two[0]["trained"]["tiles"]["weights"]
    alone = they.mlp().state_dict()
    assert list(state) == list(alone)
    assert {type(one) for one in state.values()} == {torch.Tensor}
    assert {name: one.shape for name, one in state.items()} == {
        name: one.shape for name, one in alone.items()
    }


def test_a_lost_rank_stops_the_others_with_words(folder: Path) -> None:
    place = folder / "lost"
    place.mkdir()
    context = mp.get_context("spawn")
    arguments = [(rank, 2, str(place), they.lost) for rank in range(2)]
    ranks = [context.Process(target=they.worker, args=one) for one in arguments]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
    assert [one.exitcode for one in ranks] == [0, -9]
    survivor = torch.load(place / "lost-0.pt")
    assert survivor["seconds"] < 60
    assert "onnection" in survivor["error"] or "imed out" in survivor["error"]


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def alone(model: Any, **options: Any) -> Any:
    return shard_quantized(model, init_device_mesh("cpu", (1,)), **options)


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("mixed", [False, True])
def test_one_rank_is_the_model(*, reshard: bool | None, mixed: bool) -> None:
    """FSDP2 copies only the first tensor of a group of one; gradients bit for bit."""
    dtype = torch.bfloat16 if mixed else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    want, got = they.wrap(they.mlp()), they.wrap(they.mlp())
    want_like = they.wrap(they.mlp()).to(dtype)
    alone(got, blocks=they.linears(got), reshard_after_forward=reshard, mp_policy=policy)
    for step in range(2):
        for model in (want_like, got):
            model(they.batch(step).to(dtype)).square().mean().backward()
    for layer, other, source in zip(got[::2], want_like[::2], want[::2], strict=True):
        assert layer.weight.grad.dtype == source.weight.dtype
        if mixed:  # cast from float32 weights here, from bf16 ones there
            assert layer.weight.grad.full_tensor().isfinite().all()
        else:
            assert torch.equal(layer.weight.grad.full_tensor(), other.weight.grad)
    assert lowprec.observe(got).gemms["0"]["dgrad"] == {}
    assert lowprec.observe(got).gemms["2"]["dgrad"] == {"mxfp8 x mxfp8_32x32": 2}


@pytest.mark.usefixtures("gloo")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_layers_and_models_give_the_eager_gradients(*, whole: bool) -> None:
    want, got = they.wrap(they.mlp()), they.wrap(they.mlp())
    if not whole:
        for layer in they.linears(got):
            layer.compile(backend="aot_eager")
    alone(got, blocks=they.linears(got))
    runner = torch.compile(got, backend="aot_eager") if whole else got
    for model in (want, runner):
        model(they.batch(0)).square().mean().backward()
    for mine, theirs in zip(got.parameters(), want.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad)


@pytest.mark.usefixtures("gloo")
def test_tied_weights_travel_once() -> None:
    def tied() -> Any:
        torch.manual_seed(0)
        model = they.wrap(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
        model[2].weight = model[0].weight
        return model

    want, got = tied(), alone(tied())
    for model in (want, got):
        model(they.batch(0)).square().mean().backward()
    assert torch.equal(got[0].weight.grad.full_tensor(), want[0].weight.grad)
    assert got[0].weight is got[2].weight


def test_a_weight_that_others_read_is_gathered_as_it_is() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(64, 64), "out": nn.Linear(64, 64, bias=False)})
    model["out"].weight = model["table"].weight
    they.wrap(model)
    (weight,) = shard_plan(model, 1).weights
    assert weight.cast is None
    assert "'table', a Embedding" in weight.why


@pytest.mark.usefixtures("gloo")
def test_values_of_a_gathered_weight_are_refused() -> None:
    model = alone(they.wrap(nn.Sequential(nn.Linear(64, 64))))
    model[0].register_forward_pre_hook(lambda layer, _: layer.weight.norm())
    with pytest.raises(LowprecError, match=r"only lowprec\.Linear reads those"):
        model(they.batch(0))


@pytest.mark.usefixtures("gloo")
def test_another_plan_after_sharding_is_refused() -> None:
    model = alone(they.wrap(nn.Sequential(nn.Linear(64, 64))))
    model(they.batch(0))
    model[0].lowprec_products.replan(
        they.wrap(nn.Sequential(nn.Linear(64, 64)), "bf16")[0].lowprec_products.stages, seed=0
    )
    with pytest.raises(LowprecError, match="before shard_quantized"):
        model(they.batch(0))


@pytest.mark.usefixtures("gloo")
def test_a_saved_shard_is_a_plain_tensor(tmp_path: Path) -> None:
    model = alone(they.wrap(they.mlp()))
    full = {name: p.full_tensor() for name, p in model.state_dict().items()}
    torch.save(full, tmp_path / "full.pt")
    read = torch.load(tmp_path / "full.pt", weights_only=True)
    assert {type(one) for one in read.values()} == {torch.Tensor}
    assert all(torch.equal(read[name], one) for name, one in they.mlp().state_dict().items())
    torch.save(model[0].weight._local_tensor, tmp_path / "shard.pt")
    assert type(torch.load(tmp_path / "shard.pt", weights_only=True)) is torch.Tensor


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("assign", [False, True])
def test_loading_after_a_step_trains_on(*, assign: bool) -> None:
    model = alone(they.wrap(they.mlp()))
    model(they.batch(0)).square().mean().backward()
    state = {name: one * 0.5 for name, one in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    want = they.wrap(they.mlp())
    want.load_state_dict({name: one * 0.5 for name, one in want.state_dict().items()})
    assert torch.equal(model(they.batch(1)), want(they.batch(1)))


@pytest.mark.usefixtures("gloo")
def test_bad_calls_say_what_to_do() -> None:
    model = they.wrap(nn.Sequential(nn.Linear(64, 64)))
    with pytest.raises(PlanError, match="must be True, False or None"):
        alone(model, reshard_after_forward=2)
    with pytest.raises(PlanError, match="not a module of this model"):
        alone(model, blocks=[nn.Linear(2, 2)])
    with pytest.raises(PlanError, match="there is at least one"):
        shard_plan(model, 0)
    alone(model)
    with pytest.raises(PlanError, match="sharded already"):
        alone(model)
