"""SWEEP.toml is read strictly: every mistake names the key and the cure."""

from pathlib import Path

import pytest

from qualitygates.errors import ExperimentError
from qualitygates.sensitivity.groups import Group, find_groups
from qualitygates.sensitivity.options import rungs_of
from qualitygates.sensitivity.spec import SweepSpec
from qualitygates.sensitivity.store import SweepStore

GATE = """
schema = 1
name = "toy"
workload = "clicks"
margins = "demo"
looks = [3]
train = { steps = 100, batch_size = 64 }
baseline = { recipe = "bf16" }
candidate = { recipe = "mxfp8" }
speed = { required = false }
"""
HEAD = 'schema = 1\nname = "s"\ngate = "gate.toml"\n'
FORMATS = 'formats = ["nvfp4", "mxfp8"]\n'


def read(folder: Path, text: str) -> SweepSpec:
    (folder / "gate.toml").write_text(GATE)
    (folder / "sweep.toml").write_text(text)
    return SweepSpec.from_toml(folder / "sweep.toml")


def test_defaults(tmp_path: Path) -> None:
    spec = read(tmp_path, HEAD + FORMATS)
    assert spec.start_steps == (25,)
    assert spec.window == 15
    assert spec.speed.hardware == "b200"
    used = (set(spec.branches.seeds), set(spec.confirm_seeds), set(spec.gate.seeds))
    assert len(set.union(*used)) == sum(map(len, used))
    # Every attempt has seeds of its own.
    assert len(spec.confirm_seeds) == spec.attempts * max(spec.gate.looks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD, r"formats is missing"),
        (HEAD + "formats = []", r"leaves nothing to try"),
        (HEAD + 'formats = ["bf16"]', r"only 'bf16'"),
        (HEAD + 'formats = ["nvfp5"]', r"'nvfp5'.*nvfp4"),
        (HEAD + FORMATS + "select = { budget = 'watts' }", r"budget = 'watts'.*time, memory"),
        (HEAD + FORMATS + "select = { savings = 0.1 }", r"unknown key 'savings'.*'saving'"),
        (HEAD + FORMATS + "branches = { at = [0.9], length = 0.2 }", r"past the end of training"),
        (HEAD + FORMATS + "branches = { first_seed = 1 }", r"seeds \[1, 2, 3\] are also seeds"),
        (HEAD + FORMATS + "branches = { first_seed = 101 }", r"also seeds of confirmation"),
        (HEAD + FORMATS + "confirm = { first_seed = 2 }", r"confirmation needs fresh ones"),
        (HEAD + FORMATS + "branches = { seeds = 1 }", r"from 2 to 100"),
        (
            HEAD + FORMATS + "branches = { trainings = 1 }",
            r"trainings = 1 has no error.*at least 2",
        ),
        (HEAD + FORMATS + "branches = { trainings = 5 }", r"trainings = 5 .*from 0 to 4"),
        (HEAD + FORMATS + "[[group]]\nname = 'a'\nmatch = []", r"match = \[\] matches no layer"),
        (HEAD + FORMATS + "formatz = 1", r"unknown key 'formatz'.*'formats'"),
        (HEAD + FORMATS + "evaluation = { share = 2 }", r"share = 2 must be a number"),
        ("schema = 2", r"reads schema = 1"),
        ("x = [", r"not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=message) as error:
        read(tmp_path, text)
    assert str(tmp_path / "sweep.toml") in str(error.value)


def test_a_rung_is_one_product_or_three() -> None:
    assert rungs_of("mxfp8") == dict.fromkeys(("fprop", "dgrad", "wgrad"), "mxfp8")
    mixed = rungs_of("fp8_1x128 x fp8_128x128 / mxfp8 / bf16 x bf16".replace("bf16", "mxfp4"))
    assert mixed["fprop"] == "fp8_1x128 x fp8_128x128"
    with pytest.raises(ExperimentError, match="one product for all three"):
        rungs_of("mxfp8 / mxfp8")


class Layer:
    def __init__(self, name: str, shape: tuple[int, int]) -> None:
        self.name, self.shape, self.converted, self.notes, self.reasons = name, shape, True, (), ()


class Plan:
    def __init__(self, *layers: Layer) -> None:
        self.layers = layers


BLOCKS = Plan(
    *(
        Layer(f"blocks.{i}.{name}", (4096, 4096))
        for i in range(3)
        for name in ("attn.q", "attn.k", "mlp.up")
    )
)


def groups(tmp_path: Path, more: str) -> dict[str, tuple[str, ...]]:
    spec = read(tmp_path, HEAD + FORMATS + more)
    return {one.name: one.layers for one in find_groups(BLOCKS, spec).candidates}


def test_groups_by_kind_by_depth_and_fused_by_parent(tmp_path: Path) -> None:
    kinds = groups(tmp_path, "groups = { by = 'kind' }")
    assert set(kinds) == {"blocks.*.attn.q", "blocks.*.attn.k", "blocks.*.mlp.up"}
    depth = groups(tmp_path, "groups = { by = 'depth', depth = 3 }")
    assert [len(one) for one in depth.values()] == [3, 3, 3]
    assert depth["depth 1 of 3"] == ("blocks.0.attn.q", "blocks.0.attn.k", "blocks.0.mlp.up")
    fused = groups(tmp_path, "[[group]]\nname = 'qk'\nmatch = ['*.q', '*.k']\nper_parent = true")
    assert fused["qk of blocks.1.attn"] == ("blocks.1.attn.q", "blocks.1.attn.k")
    assert fused["blocks.2.mlp.up"] == ("blocks.2.mlp.up",)
    assert len(fused) == 6


def test_layers_below_break_even_stay_bf16_with_that_reason(tmp_path: Path) -> None:
    spec = read(tmp_path, HEAD + FORMATS)
    plan = Plan(Layer("big", (4096, 4096)), Layer("tiny", (64, 64)), Layer("head", (1, 64)))
    found = find_groups(plan, spec)
    assert [one.name for one in found.candidates] == ["big"]
    assert "below break-even" in found.excluded["tiny"]
    assert "not measured" in found.excluded["tiny"]
    assert "N=1" in found.excluded["head"]
    with pytest.raises(ExperimentError, match=r"no layer is a candidate.*tiny: below break-even"):
        find_groups(Plan(Layer("tiny", (64, 64))), spec)


def test_rungs_without_native_products_are_left_out(tmp_path: Path) -> None:
    spec = read(tmp_path, HEAD + 'formats = ["nvfp4", "fp8_rowwise"]\nspeed = {hardware = "h200"}')
    (group,) = find_groups(Plan(Layer("big", (4096, 4096))), spec).candidates
    assert [rung["fprop"] for rung in group.rungs] == ["fp8_rowwise"]
    assert "nvfp4 has no native product on h200" in group.notes[0]


def test_layers_that_never_run_are_left_out(tmp_path: Path) -> None:
    spec = read(tmp_path, HEAD + FORMATS)
    plan = Plan(Layer("a", (4096, 4096)), Layer("b", (4096, 4096)))
    kept = find_groups(plan, spec).only({"a"}, batches=8)
    assert [one.name for one in kept.candidates] == ["a"]
    assert kept.excluded["b"] == "never executed in training (8 batches were watched)"


def test_stored_measurements_are_sealed_and_found_by_their_inputs(tmp_path: Path) -> None:
    store = SweepStore(tmp_path)
    store.save("sweep-branch", {"seed": 1}, {"loss": [0.5]})
    found = store.load("sweep-branch", {"seed": 1})
    assert found is not None
    assert found["result"] == {"loss": [0.5]}
    assert store.load("sweep-branch", {"seed": 2}) is None
    path = next((tmp_path / "measured").iterdir())
    path.write_text(path.read_text().replace("0.5", "0.4"))
    assert store.load("sweep-branch", {"seed": 1}) is None
    assert path.with_name(path.name + ".damaged").exists()


def test_a_group_counts_flops_of_all_its_layers() -> None:
    assert Group("g", ("a", "b"), ((2, 3), (4, 5)), (), ()).flops == 6 * (6 + 20)
