"""Predicted times: exact on power laws, the decisions that follow, and what a plan says of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import lowprec
from lowprec.__main__ import main
from lowprec.backends import triton_kernels
from lowprec.calibrating import Case, write
from lowprec.calibration import Calibration, Rates
from lowprec.errors import PlanError
from lowprec.grids import Table
from lowprec.hardware import named
from lowprec.policy import Gemm, LinearPolicy
from lowprec.predicting import Prediction, Work, kernels, predict
from lowprec.recipe import parse_recipe
from lowprec.stages import Stage
from tests.core.calibrations import BF16_RATE, CAST_RATE, FP8_RATE, Clock, power_law, synthetic

PORTABLE = "mxfp8_1x128 x mxfp8_128x128"
ROWS = 32768


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return synthetic()


def stage_of(policy: str, gpu: str = "h200") -> Stage:
    return Stage.of(LinearPolicy.parse(policy), named(gpu))


def predicted(policy: str, work: Work, calibration: Calibration, gpu: str = "h200") -> Prediction:
    found = predict(stage_of(policy, gpu), work, calibration)
    assert isinstance(found, Prediction), found
    return found


def table_of(law: Callable[..., float], *axes: tuple[int, ...]) -> Table:
    sizes = [()]
    for axis in axes:
        sizes = [(*one, size) for one in sizes for size in axis]
    return Table("op", "what", axes, tuple(law(*one) for one in sizes))


def test_between_points_a_power_law_is_exact() -> None:
    def law(a: int, b: int, c: int) -> float:
        return 0.3 * a**0.9 * b**1.1 * c**0.5

    table = table_of(law, (16, 100, 4096), (8, 64), (7, 9, 11, 512))
    for sizes in ((16, 8, 7), (4096, 64, 512), (50, 33, 10), (1000, 8, 300), (17, 63, 8)):
        found = table.at(sizes)
        assert found is not None
        assert math.isclose(found.us, law(*sizes), rel_tol=1e-12)
        assert not found.extrapolated


def test_outside_of_the_grid_it_says_so() -> None:
    table = table_of(lambda a, b: a * b**0.5, (16, 64), (16, 256))
    above, below = table.at((128, 64)), table.at((16, 4))
    assert above is not None
    assert above.us == pytest.approx(128 * 64**0.5)
    assert above.extrapolated
    assert below is not None
    assert (below.us, below.extrapolated) == (pytest.approx(16 * 16**0.5), True)


def test_next_to_a_skipped_point_the_nearest_whole_cell_answers() -> None:
    table = table_of(lambda a, b: float(a * b), (16, 64, 256), (16, 64, 256))
    holed = dataclasses.replace(table, us=(*table.us[:-1], 0.0))
    found = holed.at((200, 200))
    assert found is not None
    assert (found.us, found.extrapolated) == (pytest.approx(200 * 200), True)
    inside = holed.at((60, 200))
    assert inside is not None
    assert (inside.us, inside.extrapolated) == (pytest.approx(60 * 200), False)
    assert dataclasses.replace(table, us=(0.0,) * 9).at((20, 20)) is None


def by_hand(m: int, n: int, k: int, batches: int = 1) -> tuple[float, float]:
    """BF16 and low-precision microseconds under the power law of the helper."""
    flops, elements = 6 * m * n * k, m * k + m * n + n * k / batches
    return flops / BF16_RATE, flops / FP8_RATE + 4 * elements / CAST_RATE


@pytest.mark.parametrize("policy", [PORTABLE, "fp8_tensorwise", "fp8_rowwise"])
def test_a_layer_is_three_products_and_three_casts(policy: str, calibration: Calibration) -> None:
    for m, n, k in ((30000, 3000, 700), (4096, 256, 8192), (10000, 1000, 1000)):
        found = predicted(policy, Work((n, k), m), calibration)
        bf16, low = by_hand(m, n, k)
        assert found.bf16_us == pytest.approx(bf16, rel=1e-3)
        assert found.us == pytest.approx(low, rel=1e-3)
        assert found.casts_us == pytest.approx(4 * (m * k + m * n + n * k) / CAST_RATE, rel=1e-3)
        assert found.tax == pytest.approx(found.casts_us / (bf16 - 6 * m * n * k / FP8_RATE), 1e-3)
        assert (found.native, found.extrapolated) == (True, False)
    many = predicted(policy, Work((3000, 700), 30000, micro_batches=8), calibration)
    assert many.us == pytest.approx(by_hand(30000, 3000, 700, 8)[1], rel=1e-3)


def test_casts_are_one_read_for_both_uses() -> None:
    found = list(kernels(stage_of(PORTABLE), Work((512, 256), 8192)))
    assert [(one.op, one.sizes) for one in found if one.part == "gemm"] == [
        ("fprop", (8192, 512, 256)),
        ("fprop", (8192, 256, 512)),
        ("wgrad", (8192, 512, 256)),
    ]
    assert [(one.what, one.sizes) for one in found if one.part == "cast"] == [
        ("fp8_1x128 | fp8_128x128", (8192, 256)),
        ("fp8_128x128 | fp8_128x128", (512, 256)),
        ("fp8_1x128 | fp8_1x128", (8192, 512)),
    ]
    partly = list(kernels(stage_of("fp8_rowwise / bf16 / bf16"), Work((512, 256), 8192)))
    assert [one.what for one in partly if one.part == "cast"] == ["fp8_rowwise | -"] * 2
    skipped = list(kernels(stage_of("fp8_rowwise / fp8_rowwise / skip"), Work((8, 8), 8)))
    assert [one.op for one in skipped if one.part == "gemm"] == ["fprop", "fprop"]


def test_the_norm_takes_over_the_cast_of_x(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("mxfp8_1x128", "mxfp8_128x128")
    every = {*names, *(f"norm + {name}" for name in names)}
    monkeypatch.setattr(triton_kernels, "PROVEN", frozenset(every))
    stage, work = stage_of(PORTABLE), Work((512, 256), 8192, norm=True)
    found = [(one.op, one.what) for one in kernels(stage, work) if one.part != "gemm"]
    if triton_kernels.missing() is None:
        assert found == [
            ("norm", "mxfp8_1x128 | -"),
            ("norm again", "- | mxfp8_128x128"),
            ("norm backward", "kernel"),
            ("cast", "mxfp8_128x128 | mxfp8_128x128"),
            ("cast", "mxfp8_1x128 | mxfp8_1x128"),
        ]
        assert predicted(PORTABLE, work, synthetic()).casts_us == pytest.approx(
            4 * (512 * 256 + 8192 * 512 + 8192 * 256) / CAST_RATE, rel=1e-3
        )
        whole = frozenset({"fp8_tensorwise", "norm + fp8_tensorwise"})
        monkeypatch.setattr(triton_kernels, "PROVEN", whole)
        found = [(one.op, one.what) for one in kernels(stage_of("fp8_tensorwise"), work)]
        assert found[3:] == [
            ("norm backward", "kernel"),
            *[("cast", "fp8_tensorwise | fp8_tensorwise")] * 3,
        ]
    monkeypatch.setattr(triton_kernels, "PROVEN", frozenset())
    found = [(one.op, one.what) for one in kernels(stage_of(PORTABLE), work) if one.part == "norm"]
    assert found == [("norm", "bf16"), ("norm", "bf16"), ("norm backward", "torch")]


@pytest.mark.parametrize(
    ("width", "want"), [(256, 0.66), (512, 0.83), (1024, 1.10), (2048, 1.31), (4096, 1.44)]
)
def test_published_rates_give_the_published_break_even(width: int, want: float) -> None:
    # performance model of block FP8 on an H200, one cast kernel for both uses, 65536 rows
    rates = Calibration(
        *("published", "h200", "NVIDIA H200", (9, 0), "any", "any", "any", "0", "2026-01-01"),
        *("model", 3.0, 4.3, ()),
        rates=Rates(770.0, 1230.0, 0.9 * 4.3),
    )
    found = predicted(PORTABLE, Work((width, width), 65536), rates)
    assert found.speedup == pytest.approx(want, abs=0.011)


def test_a_kernel_without_a_table_or_a_rate_is_named(calibration: Calibration) -> None:
    work = Work((512, 256), 8192)
    fewer = dataclasses.replace(
        calibration, tables=tuple(t for t in calibration.tables if t.what != "fp8_rowwise")
    )
    found = predict(stage_of("fp8_rowwise"), work, fewer)
    assert found == "fprop of fp8_rowwise was not calibrated on h200"
    shipped = lowprec.load_calibration("b200")
    found = predict(stage_of("nvfp4 / nvfp4 / nvfp4", "b200"), work, shipped)
    if stage_of("nvfp4 / nvfp4 / nvfp4", "b200").backends["fprop"].native:
        assert found == "fprop of nvfp4 was not calibrated on b200"


def test_memory_kept_for_backward(calibration: Calibration) -> None:
    m, n, k = 8192, 512, 1024
    plain = predicted(PORTABLE, Work((n, k), m), calibration)
    assert plain.bf16_bytes == 2 * m * k
    # Stored with float32 scales, as the products take them.
    codes = (m * k + 2 * n * k) * (1 + 4 / 128**2)
    assert plain.bytes == round(codes)
    normed = predicted(PORTABLE, Work((n, k), m, norm=True), calibration)
    assert normed.bf16_bytes == 4 * m * k
    assert normed.bytes == round(2 * m * k + 2 * n * k * (1 + 4 / 128**2))


# 6 M D^2 (1 / bf16 - 1 / fp8) = 4 (2 M D + D^2) / cast, solved for D
_GAIN = 6 * (1 / BF16_RATE - 1 / FP8_RATE)
BREAK_EVEN = 8 * ROWS / CAST_RATE / (_GAIN * ROWS - 4 / CAST_RATE)


def widths() -> tuple[int, int]:
    below = 16 * math.floor(BREAK_EVEN * 0.98 / 16)
    return below, 16 * math.ceil(BREAK_EVEN * 1.02 / 16)


def model_of(*widths_: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, device="meta") for width in widths_))


def plan_of(
    model: nn.Module, calibration: Calibration, recipe: str = "mxfp8-portable"
) -> lowprec.Plan:
    return lowprec.plan(
        model, lowprec.load_recipe(recipe), hardware="h200", calibration=calibration, rows=ROWS
    )


def test_decisions_turn_at_the_break_even(calibration: Calibration) -> None:
    below, above = widths()
    plan = plan_of(model_of(below, above), calibration)
    kept, gains = plan.layers
    assert (kept.converted, gains.converted) == (False, True)
    assert kept.predicted is not None
    assert kept.predicted.speedup < 1 < gains.predicted.speedup  # type: ignore[union-attr]
    reason = f"x of BF16 at {ROWS}x{below}x{below} on h200 (predicted)"
    assert reason in kept.reasons[0]
    assert kept.reasons[0].startswith("left as it is: 0.9")
    assert not kept.policy.quantizes


def test_the_text_has_times_tax_memory_and_totals(calibration: Calibration) -> None:
    below, above = widths()
    text = str(plan_of(model_of(below, above, 16384), calibration))
    assert "predicted from rates measured on h200, torch 2.11.0" in text
    assert "stays BF16" in text
    assert "1 of 3 stay BF16 because they would not gain." in text
    assert "conversion tax 0." in text
    assert "MiB kept for backward instead of" in text
    assert "extrapolated: this shape lies outside of the calibration" in text
    assert max(map(len, text.splitlines())) <= 165


def test_without_a_calibration_nothing_changes(calibration: Calibration) -> None:
    model, recipe = model_of(4096, 8192), lowprec.load_recipe("mxfp8-portable")
    plain = lowprec.plan(model, recipe, hardware="h200")
    priced = plan_of(model, calibration)
    assert plain.hash == priced.hash
    assert plain.layers[0].predicted is None
    assert "calibration" not in plain.to_json()
    assert "predicted" not in plain.to_json()
    assert not plain.diff(priced)
    smaller = plan_of(model_of(256, 8192), calibration)
    assert smaller.hash != lowprec.plan(model_of(256, 8192), recipe, hardware="h200").hash


def test_a_priced_plan_is_stored_and_read_back(calibration: Calibration) -> None:
    plan = plan_of(model_of(256, 8192), calibration)
    again = lowprec.Plan.from_json(plan.to_json())
    assert again == plan
    assert str(again) == str(plan)


def test_a_kept_layer_can_be_converted_by_hand(calibration: Calibration) -> None:
    plan = plan_of(model_of(256, 8192), calibration)
    changed = plan.with_layer("0", PORTABLE, why="its memory is wanted")
    assert changed.layers[0].converted
    assert changed.layers[0].quantizes


def test_a_plan_in_which_nothing_gains_says_so_and_does_not_fail(calibration: Calibration) -> None:
    plan = plan_of(model_of(256, 256), calibration)
    assert not any(layer.converted for layer in plan.layers)
    assert "2 of 2 stay BF16" in str(plan)
    with pytest.raises(PlanError, match="would quantize no layer"):
        plan_of(nn.Linear(64, 1), calibration)


def test_emulated_products_are_priced_and_kept_as_the_rule_asks(calibration: Calibration) -> None:
    plan = plan_of(model_of(4096), calibration, "mxfp8")
    (layer,) = plan.layers
    assert layer.converted
    assert layer.predicted is not None
    assert not layer.predicted.native
    assert layer.predicted.speedup < 1
    # Round trips: each operand once for each use, but w, whose kernel's values serve both.
    of_w = 1 if triton_kernels.missing() is None else 2
    assert layer.predicted.casts_us == pytest.approx(
        4 * (2 * 2 * ROWS * 4096 + of_w * 4096**2) / CAST_RATE, rel=1e-3
    )
    assert "emulated: it costs time, converted because the rule says so" in str(plan)
    assert layer.predicted.tax is None


@pytest.mark.parametrize(
    "policy",
    [
        "mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8",
        "mxfp8 / mxfp8 / mxfp8",
        "mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32:floor / mxfp8",
        "mxfp8 x mxfp8_32x32 / bf16 / mxfp8",
        PORTABLE + " / " + PORTABLE + " / " + PORTABLE,
    ],
)
def test_weights_are_priced_as_layers_cast_them(policy: str) -> None:
    """One round trip of w where a layer takes the same values twice."""
    from lowprec.nn.operands import Inside

    stage, sizes = stage_of(policy), (256, 128)
    found = kernels(stage, Work(sizes, 512))
    trips = [one for one in found if one.op == "round trip" and one.sizes == sizes]
    emulated = [
        name
        for name in ("fprop", "dgrad")
        if isinstance(getattr(stage.runs, name), Gemm) and not stage.backends[name].native
    ]
    assert len(trips) == (1 if Inside.of(stage).same_weight else len(emulated))


def test_random_and_rotated_casts_are_not_predicted_and_say_so(calibration: Calibration) -> None:
    text = (
        'schema = 1\nwhy = "t"\n[[rule]]\nmatch = "*"\nkind = "linear"\nwhy = "w"\n'
        'fprop = "mxfp8_1x128"\ndgrad = "mxfp8_1x128"\nwgrad = "mxfp8_1x128:sr"\n'
    )
    recipe = parse_recipe(text, name="random")
    plan = lowprec.plan(model_of(256), recipe, hardware="h200", calibration=calibration, rows=ROWS)
    (layer,) = plan.layers
    assert layer.converted
    assert "was not calibrated on h200" in layer.why
    assert "No layer's time is known" in str(plan)


def test_a_layer_behind_its_norm_is_priced_with_it(calibration: Calibration) -> None:
    norm_linear = lowprec.NormLinear(nn.RMSNorm(4096), nn.Linear(4096, 4096))
    plan = plan_of(nn.ModuleDict({"a": norm_linear, "b": nn.Linear(4096, 4096)}), calibration)
    found = {layer.name: layer.predicted for layer in plan.layers}
    assert found["a.linear"] is not None
    assert found["b"] is not None
    assert (found["a.linear"].norm, found["b"].norm) == (True, False)
    assert found["a.linear"].bf16_us > found["b"].bf16_us
    assert "with its norm" in str(plan)


def test_wrong_arguments(calibration: Calibration) -> None:
    model, recipe = model_of(512), lowprec.load_recipe("mxfp8-portable")
    for options in ({"calibration": calibration}, {"rows": 4096}):
        with pytest.raises(PlanError, match="needs both a calibration and rows"):
            lowprec.plan(model, recipe, hardware="h200", **options)  # type: ignore[arg-type]
    for rows in (0, -1, True, 4096.0):
        with pytest.raises(PlanError, match="rows is the number of tokens"):
            lowprec.plan(model, recipe, hardware="h200", calibration=calibration, rows=rows)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"of h200 \(sm90\), the plan is for b200"):
        lowprec.plan(model, recipe, hardware="b200", calibration=calibration, rows=4096)
    with pytest.raises(PlanError, match="no shipped calibration is called 'h2'"):
        lowprec.plan(model, recipe, hardware="h200", calibration="h2", rows=4096)


MODEL = "import torch\ndef build():\n    return torch.nn.Linear(4096, 4096, device='meta')\n"


def test_the_command_plans_for_the_machine_of_the_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], calibration: Calibration
) -> None:
    model, file = tmp_path / "model.py", tmp_path / "mine.toml"
    model.write_text(MODEL)
    write(file, calibration)
    call = ["plan", f"{model}:build", "mxfp8-portable", "--calibration"]
    assert main([*call, str(file), "--rows", "65536"]) == 0
    out = capsys.readouterr().out
    assert "for h200 (sm90)" in out
    assert "Forward and backward of 65536 rows" in out
    assert main([*call, "b200", "--rows", "65536"]) == 0
    assert "never measured" in capsys.readouterr().out
    bad = tmp_path / "bad.toml"
    bad.write_text(file.read_text().replace("copy_tbytes = 4.2", "copy_tbytes = 5.2"))
    for rest, says in (
        ([str(file)], "--calibration and --rows go together"),
        ([str(file), "--rows", "0"], "rows is the number of tokens"),
        ([str(file), "--rows", "4096", "--hardware", "b200"], "the plan is for b200"),
        ([str(bad), "--rows", "4096"], "edited by hand"),
        (["nowhere.toml", "--rows", "4096"], "cannot be read"),
    ):
        assert main([*call, *rest]) == 3
        captured = capsys.readouterr()
        assert says in captured.err
        assert captured.err.startswith("error: ")
        assert captured.out == ""


def test_a_schedule_is_priced_by_its_quantizing_stages(calibration: Calibration) -> None:
    text = (
        'schema = 1\nwhy = "t"\n[[rule]]\nmatch = "*"\nkind = "linear"\nwhy = "w"\n'
        'fprop = "bf16"\ndgrad = "bf16"\nwgrad = "bf16"\n[[rule]]\nmatch = "*"\n'
        'kind = "linear"\nwhy = "later"\nfrom_step = 5\n'
        'fprop = "fp8_rowwise"\ndgrad = "fp8_rowwise"\nwgrad = "fp8_rowwise"\n'
    )
    recipe = parse_recipe(text, name="later")
    plan = lowprec.plan(
        model_of(256, 8192), recipe, hardware="h200", calibration=calibration, rows=ROWS
    )
    assert [layer.converted for layer in plan.layers] == [False, True]


def test_slow_products_keep_bf16_whatever_the_size() -> None:
    def law(case: Case) -> float:
        return power_law(case) * (2 if case.what.startswith("fp8") else 1)

    plan = plan_of(model_of(8192, 8192), synthetic(Clock(law)), "fp8-rowwise")
    assert not any(layer.converted for layer in plan.layers)
