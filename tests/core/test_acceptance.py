"""apply(require=...): what an acceptance covers passes, whatever differs is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import lowprec
from lowprec.acceptance import current_versions
from qualitygates.acceptance import read_rules, settle
from qualitygates.records import seal

HASH = "0123456789abcdef" * 4


def model(width: int = 64, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32), nn.LayerNorm(32)]
    return nn.Sequential(*layers).to(dtype)


def plan_of(net: nn.Module, recipe: str = "mxfp8", **given: Any) -> lowprec.Plan:
    return lowprec.plan(net, lowprec.load_recipe(recipe), **{"hardware": "cpu", **given})


def accept(
    folder: Path,
    *,
    net: nn.Module | None = None,
    recipe: str = "mxfp8",
    days_ago: float = 0,
    known: bool = True,
    environment: dict[str, str] | None = None,
    made_for: str = "cpu",
    **rules: Any,
) -> Path:
    """The acceptance.json that a gate around this model and recipe writes."""
    net = model() if net is None else net
    plan = plan_of(net, recipe, hardware=made_for)
    versions = environment or current_versions()
    run = {"arm": "candidate", "seed": 1, "environment": versions, "recipe_hash": "unknown"}
    if known:
        run |= {"plan": plan.to_json(), "model": lowprec.fingerprint(net).to_data()}
        run |= {"recipe_hash": plan.recipe_hash, "plan_hash": plan.hash}
    gate = {
        "experiment": {"name": "toy"},
        "margins": {"ne": 0.005},
        "created": (datetime.now(UTC) - timedelta(days=days_ago)).isoformat(),
        "acceptance": read_rules(rules),
    }
    verdict = {"verdict": "ACCEPT", "seeds": [1], "speed": {"status": "not_required"}}
    path = settle(folder, gate, [run], verdict=verdict)
    assert path is not None
    return path


def refused(path: Path, net: nn.Module, plan: lowprec.Plan) -> str:
    """The words of the refusal; the model must come out of it as it went in."""
    kinds = [type(one) for one in net.modules()]
    with pytest.raises(lowprec.AcceptanceError) as caught:
        lowprec.apply(net, plan, require=path)
    assert [type(one) for one in net.modules()] == kinds
    assert not any("lowprec_products" in one.__dict__ for one in net.modules())
    return str(caught.value)


def test_what_was_accepted_is_applied(tmp_path: Path) -> None:
    path, net = accept(tmp_path), model()
    plan = plan_of(net)
    assert lowprec.apply(net, plan, require=path) is net
    assert isinstance(net[0], lowprec.Linear)
    # In the middle of training, and with an acceptance read once.
    accepted = lowprec.load_acceptance(path)
    lowprec.apply(net, plan, require=accepted)
    assert accepted.plan == plan
    assert accepted.margins == {"ne": 0.005}
    assert accepted.recipe_hash == plan.recipe_hash


def test_another_recipe_is_refused_by_name(tmp_path: Path) -> None:
    net = model()
    said = refused(accept(tmp_path), net, plan_of(net, "mxfp8-portable"))
    assert "recipe: accepted" in said
    assert "(mxfp8)" in said
    assert "(mxfp8-portable)" in said
    assert "The model was not touched" in said


def test_another_plan_of_the_same_recipe_is_refused_by_layer(tmp_path: Path) -> None:
    net = model()
    plan = plan_of(net).with_layer("2", "bf16", why="a test")
    said = refused(accept(tmp_path), net, plan)
    assert "recipe" not in said.partition("The model was")[0].partition("training: ")[2]
    assert "plan: accepted" in said
    assert "2: fprop mxfp8" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda: model(dtype=torch.bfloat16), "'0.weight': float32 [64, 32] -> bfloat16 [64, 32]"),
        (lambda: model(96), "'0.bias': float32 [64] -> float32 [96]"),
        (lambda: model().append(nn.Tanh()), "module '4': absent -> torch.Tanh"),
    ],
)
def test_another_model_is_refused_by_what_differs(tmp_path: Path, change: Any, says: str) -> None:
    net = change()
    assert says in refused(accept(tmp_path), net, plan_of(net))


@pytest.mark.parametrize("name", ["lowprec", "torch", "python"])
def test_another_version_is_refused(tmp_path: Path, name: str) -> None:
    other = current_versions() | {name: "0.9.1"}
    net = model()
    said = refused(accept(tmp_path, environment=other), net, plan_of(net))
    assert f"{name}: accepted 0.9.1, here {current_versions()[name]} (rule: minor)" in said
    lowprec.apply(net, plan_of(net), require=accept(tmp_path, environment=other, versions="any"))


def test_a_patch_release_matters_only_to_the_exact_rule(tmp_path: Path) -> None:
    here = current_versions()
    other = here | {"torch": ".".join([*here["torch"].split(".")[:2], "99"])}
    net = model()
    assert "rule: exact" in refused(
        accept(tmp_path, environment=other, versions="exact"), net, plan_of(net)
    )
    lowprec.apply(net, plan_of(net), require=accept(tmp_path, environment=other))


def test_it_expires_by_the_age_of_the_gate(tmp_path: Path) -> None:
    net = model()
    assert "expired on" in refused(accept(tmp_path, days_ago=91), net, plan_of(net))
    assert "expired on" in refused(accept(tmp_path, days_ago=8, expires_days=7), net, plan_of(net))
    old = accept(tmp_path, days_ago=3000, expires_days=0)
    lowprec.apply(net, plan_of(net), require=old)


def test_other_hardware_is_refused_unless_the_gate_allowed_it(tmp_path: Path) -> None:
    net = model()
    on_b200 = plan_of(net, hardware="b200")
    assert "hardware: cpu -> b200" in refused(accept(tmp_path), net, on_b200)
    there = accept(tmp_path, made_for="b200")
    assert "hardware: b200" in refused(there, net, plan_of(net))
    anywhere = accept(tmp_path, made_for="b200", hardware="any")
    lowprec.apply(net, plan_of(net), require=anywhere)
    lowprec.restore(net)
    other = plan_of(net).with_layer("2", "bf16", why="a test")
    assert "plan: accepted" in refused(anywhere, net, other)


def test_the_seed_counts_on_any_hardware_where_bits_are_drawn(tmp_path: Path) -> None:
    net = model()
    path = accept(tmp_path, recipe="nvfp4", made_for="b200", hardware="any")
    lowprec.apply(net, plan_of(net, "nvfp4"), require=path)
    lowprec.restore(net)
    plan = dataclasses.replace(plan_of(net, "nvfp4"), seed=5)
    assert "seed: 0 -> 5" in refused(path, net, plan)


def test_unknown_is_refused_until_the_hashes_are_given(tmp_path: Path) -> None:
    net = model()
    plan = plan_of(net)
    said = refused(accept(tmp_path, known=False), net, plan)
    assert "recipe and plan and model unknown" in said
    hashes = {"recipe_hash": plan.recipe_hash, "plan_hash": plan.hash}
    said = refused(accept(tmp_path, known=False, **hashes), net, plan)
    assert "model unknown" in said
    hashes["model_hash"] = lowprec.fingerprint(net).hash
    lowprec.apply(net, plan, require=accept(tmp_path, known=False, **hashes))
    lowprec.restore(net)
    hashes["model_hash"] = HASH
    assert "model: accepted 0123456789ab, here" in refused(
        accept(tmp_path, known=False, **hashes), net, plan
    )


def damaged(path: Path) -> Iterator[tuple[str, bytes, str]]:
    good = json.loads(path.read_text())
    yield "cut", path.read_bytes()[:-40], "not an acceptance record"
    yield "edited", json.dumps(good | {"plan_hash": HASH}).encode(), "damaged or edited"
    yield "dates", json.dumps(seal(good | {"created": "soon"})).encode(), "not an acceptance"
    yield "swapped", json.dumps(seal(good | {"plan_hash": HASH})).encode(), "not that of the stored"
    yield (
        "rule",
        json.dumps(seal(good | {"expiry": good["expiry"] | {"versions": "all"}})).encode(),
        "allowed: exact, minor, any",
    )
    yield "plan", json.dumps(seal(good | {"plan": "[" * 100_000})).encode(), "not an acceptance"
    yield "days", json.dumps(seal(good | {"expiry": [1]})).encode(), "not an acceptance"
    yield "kind", json.dumps(seal(good | {"kind": "run"})).encode(), "kind 'run'"
    yield "number", b'{"schema": ' + b"9" * 10_000 + b"}", "not an acceptance record"
    yield "depth", b"[" * 100_000, "not an acceptance record"
    yield "nan", b'{"schema": NaN}', "NaN is not JSON"
    yield "pickle", b"\x80\x04\x95\x10", "not an acceptance record"
    yield "list", b"[]", "it holds a list"


def test_damaged_edited_and_absent_records_are_refused(tmp_path: Path) -> None:
    path, net = accept(tmp_path), model()
    plan = plan_of(net)
    for name, content, says in damaged(path):
        bad = tmp_path / f"{name}.json"
        bad.write_bytes(content)
        assert says in refused(bad, net, plan), name
    assert "cannot be read" in refused(tmp_path / "absent.json", net, plan)
    assert "cannot be read" in refused(tmp_path, net, plan)
    for wrong in (3, {"plan_hash": plan.hash}, b"acceptance.json"):
        assert "what load_acceptance read, not" in refused(wrong, net, plan)  # type: ignore[arg-type]


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = accept(tmp_path)
    content = bytearray(path.read_bytes())
    generator = torch.Generator().manual_seed(0)
    for at in torch.randint(0, len(content), (60,), generator=generator).tolist():
        if chr(content[at]).isspace():
            continue
        changed = bytearray(content)
        changed[at] ^= 1
        path.write_bytes(bytes(changed))
        with pytest.raises(lowprec.AcceptanceError):
            lowprec.load_acceptance(path)


def test_the_fingerprint_is_the_same_before_apply_and_after() -> None:
    net = model()
    before = lowprec.fingerprint(net)
    lowprec.apply(net, plan_of(net))
    assert lowprec.fingerprint(net) == before
    lowprec.restore(net)
    assert lowprec.fingerprint(net) == before
    with torch.device("meta"):
        assert lowprec.fingerprint(model()).hash == before.hash
    with torch.no_grad():
        net[0].weight.mul_(2)
    net[0].weight.requires_grad_(False)
    assert lowprec.fingerprint(net) == before
    assert lowprec.Fingerprint.from_data(json.loads(json.dumps(before.to_data()))) == before


def test_ties_and_order_are_part_of_the_fingerprint() -> None:
    tied, untied = model(32), model(32)
    tied[2].weight = tied[0].weight
    first, second = lowprec.fingerprint(untied), lowprec.fingerprint(tied)
    assert first.differences(second) == ["parameter '2.weight': float32 [32, 32] -> is 0.weight"]
    turned = lowprec.Fingerprint(dict(reversed(list(first.modules.items()))), first.parameters)
    assert turned.hash != first.hash
    assert first.differences(turned) == ["the modules come in another order"]
    with pytest.raises(ValueError, match="does not fit"):
        lowprec.Fingerprint.from_data(first.to_data() | {"hash": HASH})


def test_wrapped_models_count_as_the_model_inside(tmp_path: Path) -> None:
    net = model()
    inside = lowprec.fingerprint(net)
    path = accept(tmp_path)
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrappers = [DistributedDataParallel(copy.deepcopy(net)), torch.compile(net)]
        wrappers.append(nn.DataParallel(net))
        wrappers.append(torch.compile(wrappers[0]))
        for wrapped in wrappers:
            assert lowprec.fingerprint(wrapped) == inside
            said = refused(path, wrapped, plan_of(wrapped))
            assert "renames every layer; plan and apply the model inside, then wrap it" in said
    finally:
        distributed.destroy_process_group()
    # The order that works.
    lowprec.apply(net, plan_of(net), require=path)
    assert lowprec.fingerprint(torch.compile(net)) == inside


def test_the_version_is_that_of_the_package() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert f'version = "{lowprec.__version__}"' in project.read_text(encoding="utf-8")
