"""Calibrations: strict reading, checksums, what fits which machine, and measuring with a clock."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import lowprec
from lowprec import timing
from lowprec.__main__ import main
from lowprec.calibrating import Case, measure, needed, write
from lowprec.calibration import (
    Calibration,
    Rates,
    load_calibration,
    parse_calibration,
    shipped_calibrations,
)
from lowprec.errors import LowprecError, PlanError, UnsupportedError
from lowprec.hardware import named
from lowprec.policy import LinearPolicy
from lowprec.predicting import Work, kernels, predict
from lowprec.recipe import load_recipe, shipped_recipes
from lowprec.stages import Stage
from lowprec.tensor import QuantizedTensor
from lowprec.timing import CudaBench
from tests.core.calibrations import Clock, power_law, resealed, synthetic
from tests.core.kernel_cases import inside

PUBLISHED = Calibration(
    *("published", "b200", "NVIDIA B200", (10, 0), "any", "any", "any", "0.1.0", "2026-01-01"),
    *("somebody's talk", 3.0, 6.9, ('a note with "quotes" and \x7f',)),
    rates=Rates(1600.0, 3000.0, 5.0),
)


@pytest.fixture(scope="module")
def text() -> str:
    return synthetic().to_toml()


@pytest.mark.parametrize("calibration", [synthetic(), PUBLISHED], ids=["measured", "published"])
def test_what_is_written_is_read_back(calibration: Calibration, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    write(file, calibration)
    assert load_calibration(file) == calibration
    assert lowprec.load_calibration(str(file)).hardware == named(calibration.gpu)
    assert [one.name for one in tmp_path.iterdir()] == ["mine.toml"]


def test_shipped_ones_are_read_and_published_rates_never_pass_for_measured() -> None:
    assert {"b200", "h200"} <= set(shipped_calibrations())
    for name in shipped_calibrations():
        found = load_calibration(name)
        assert found.hardware == named(name)
        assert ("measured on" in found.text) == (found.kind == "measured")
    assert load_calibration("b200").kind == "published"
    assert "published rates of b200, never measured" in load_calibration("b200").text


def test_an_edit_by_hand_is_refused_wherever_it_is(text: str) -> None:
    for old, new in (
        ("copy_tbytes = 4.2", "copy_tbytes = 4.3"),
        ('gpu = "h200"', 'gpu = "h100"'),
        ("axes = [[4096, ", "axes = [[4095, "),
    ):
        assert old in text
        with pytest.raises(PlanError, match=r"edited by hand or damaged.*measure again"):
            parse_calibration(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("schema = 1", "schema = 2", "schema is 2; this version reads 1: measure again"),
        ("schema = 1", "schema = true", "schema is True"),
        ("copy_tbytes = 4.2", "copy_tbites = 4.2", "unknown key 'copy_tbites'; did you mean copy_"),
        ("copy_tbytes = 4.2", "copy_tbytes = 0.0", "copy_tbytes must be a number above 0, not 0"),
        ("copy_tbytes = 4.2", 'copy_tbytes = "4"', "copy_tbytes must be a number"),
        ("copy_tbytes = 4.2", "copy_tbytes = nan", "copy_tbytes must be a number"),
        ("capability = [9, 0]", "capability = [9]", "capability must be two whole numbers"),
        ("capability = [9, 0]", "capability = 9.0", "capability must be two whole numbers"),
        ('gpu = "h200"', 'gpu = ""', "gpu must be a non-empty line of text"),
        ('gpu = "h200"', "gpu = 7", "gpu must be a non-empty line of text"),
        ('kind = "measured"', 'kind = "guessed"', "kind is 'guessed'"),
        ('kind = "measured"', 'kind = "published"', "published ones the reverse"),
        ('torch = "2.11.0"', 'torch = "new"', "torch is 'new', not a version"),
        ("notes = []", "notes = [1]", "notes must be a list of strings"),
        ("notes = []", 'notes = []\nmine = "x"', "unknown key 'mine'"),
        ("axes = [[4096, 16384, ", "axes = [[4096, 4096, ", "axes must be lists of increasing"),
        ("axes = [[4096, ", "axes = [[-4096, ", "axes must be lists of increasing"),
        ("axes = [[4096, ", "axes = [[2, 4096, ", "us must be a list of 36 numbers"),
        ("us = [", "us = [-1.0, ", "us must be a list of"),
        ('op = "fprop"', 'op = "wgrad"', "'bf16' is there twice"),
        ('op = "fprop"', 'top = "fprop"', "unknown key 'top'; did you mean op"),
    ],
)
def test_reading_is_strict(text: str, old: str, new: str, says: str) -> None:
    assert old in text
    with pytest.raises(PlanError) as caught:
        parse_calibration(resealed(text.replace(old, new, 1)))
    assert says in str(caught.value)


def test_a_negative_time_and_a_bad_rate_are_refused(text: str) -> None:
    start = text.index("us = [") + len("us = [")
    end = text.index(",", start)
    with pytest.raises(PlanError, match="us must be a number at least 0"):
        parse_calibration(resealed(text[:start] + "-1.0" + text[end:]))
    rates = PUBLISHED.to_toml()
    with pytest.raises(PlanError, match="fp8_tflops must be a number above 0, not None"):
        parse_calibration(resealed(rates.replace("fp8_tflops = 3000.0\n", "")))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe", "is not UTF-8"),
        (b"a = ", "is not TOML"),
        (b"", "schema is None"),
        (None, "cannot be read: No such file"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "x.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        load_calibration(file)
    assert str(file) in str(caught.value)
    assert says in str(caught.value)
    with pytest.raises(PlanError, match="no shipped calibration is called 'h2000'"):
        load_calibration("h2000")


def test_another_machine_and_stale_versions_are_refused() -> None:
    mine = synthetic()
    mine.check_fits(named("h200"), torch_here="2.11.3+cu130")
    mine.check_fits(named("h200"), torch_here=None)
    with pytest.raises(PlanError, match=r"of h200 \(sm90\), the plan is for b200 \(sm100\)"):
        mine.check_fits(named("b200"), torch_here=None)
    with pytest.raises(PlanError, match=r"of h200 \(sm90\), the plan is for h100 \(sm90\)"):
        mine.check_fits(named("h100"), torch_here=None)
    with pytest.raises(PlanError, match=r"stale: measured with torch 2.11.0, this is torch 2.12.0"):
        mine.check_fits(named("h200"), torch_here="2.12.0")
    old = dataclasses.replace(mine, torch="2.9.1")
    with pytest.raises(PlanError, match=r"stale: measured with torch 2.9.1, older than any"):
        old.check_fits(named("h200"), torch_here=None)
    PUBLISHED.check_fits(named("b200"), torch_here="2.14.0")


@pytest.mark.parametrize("gpu", ["h200", "b200", "a100"])
def test_everything_that_predictions_ask_for_is_measured(gpu: str) -> None:
    calibration = synthetic(gpu=gpu)
    asked = 0
    for recipe in map(load_recipe, shipped_recipes()):
        for rule in recipe.rules:
            if not isinstance(rule.policy, LinearPolicy):
                continue
            if rule.policy.random or "+" in str(rule.policy):
                continue
            for norm in (False, True):
                stage, work = Stage.of(rule.policy, named(gpu)), Work((512, 1024), 8192, norm)
                assert not isinstance(predict(stage, work, calibration), str)
                asked += len(list(kernels(stage, work)))
    assert asked > 100
    assert ("fprop", "fp8_1x128 x fp8_128x128") in needed(named("h200"))
    assert not any(what.startswith("mxfp8") for _, what in needed(named("a100")))


def test_out_of_memory_skips_shapes_and_says_so() -> None:
    def full(case: Case) -> bool:
        return case.sizes == (65536, 8192, 8192) and case.what == "bf16"

    lines: list[str] = []
    found = synthetic(Clock(full=full), say=lines.append)
    table = found.table("fprop", "bf16")
    assert table is not None
    assert table.us[-1] == 0.0
    assert all(table.us[:-1])
    assert found.notes == ("skipped 65536x8192x8192: out of memory (3 kernels)",)
    assert lines[-1] == found.notes[0]
    native = found.table("fprop", "fp8_rowwise")
    assert native is not None
    assert all(native.us)
    assert parse_calibration(found.to_toml()) == found
    assert any(line.startswith("products: 27 of 27 shapes") for line in lines)
    with pytest.raises(UnsupportedError, match=r"fits in the GPU's memory at no size"):
        synthetic(Clock(full=lambda case: case.op == "dgrad"))


def test_nothing_half_written(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("before")

    class Broken(Calibration):
        def to_toml(self) -> str:
            raise KeyboardInterrupt

    fields = {f.name: getattr(PUBLISHED, f.name) for f in dataclasses.fields(PUBLISHED)}
    with pytest.raises(KeyboardInterrupt):
        write(file, Broken(**fields))
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("mine.toml", "before")]
    with pytest.raises(UnsupportedError, match="cannot be written: No such file"):
        write(tmp_path / "none" / "x.toml", PUBLISHED)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_not_measurable_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    assert main(["calibrate", "--out", str(file)]) == 3
    captured = capsys.readouterr()
    assert captured.err.startswith("error: not measurable here: this machine has no CUDA device")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not file.exists()
    with pytest.raises(LowprecError):
        measure(file, say=print)


def test_the_kernels_that_are_timed_have_the_shapes_they_are_named_for() -> None:
    bench, m, n, k = CudaBench(named("cpu"), device="cpu"), 64, 32, 128
    shapes = {"fprop": (m, n), "dgrad": (m, n), "wgrad": (n, k)}
    for op, shape in shapes.items():
        for what in ("bf16", "mxfp8_1x128 x mxfp8_128x128", "fp8_rowwise"):
            if op == "dgrad" and what != "bf16":
                continue  # it is timed as fprop
            result = bench.build(Case(op, what, (m, n, k)))()
            assert isinstance(result, torch.Tensor)
            assert (tuple(result.shape), result.dtype) == (shape, torch.bfloat16)
            assert result.isfinite().all()
    row, column = bench.build(Case("cast", "mxfp8 | mxfp8_32x32", (m, k)))()  # type: ignore[misc]
    assert (row.axis, row.format.name, column.axis) == (-1, "mxfp8", -2)
    assert column.format.name == "mxfp8_32x32"
    (only,) = bench.build(Case("cast", "- | mxfp8", (m, k)))()  # type: ignore[misc]
    assert only.axis == -2
    for case in (("norm", "bf16"), ("round trip", "row"), ("round trip", "column")):
        result = bench.build(Case(*case, (m, k)))()
        assert isinstance(result, torch.Tensor)
        assert result.shape == (m, k)
    dx, dweight = bench.build(Case("norm backward", "torch", (m, k)))()  # type: ignore[misc]
    assert (dx.shape, dweight.shape) == ((m, k), (k,))


@inside
@pytest.mark.parametrize("what", ["fp8_tensorwise", "fp8_rowwise", "mxfp8_1x128 x mxfp8_128x128"])
def test_products_are_timed_on_operands_that_need_no_copy(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels a layer has all codes along the contraction, for wgrad as well."""
    seen: list[QuantizedTensor] = []
    monkeypatch.setattr(timing, "_by_triton", lambda cast: True)
    monkeypatch.setattr(timing.ops, "matmul", lambda a, b, backend: seen.extend((a, b)))
    bench = CudaBench(named("cpu"), device="cpu")
    for op in ("fprop", "wgrad"):
        bench.build(Case(op, what, (128, 256, 128)))()
    assert len(seen) == 4
    for left, right in (seen[:2], seen[2:]):
        assert left.codes.stride(-1) == 1
        assert right.codes.stride(-1 if right.codes.shape[-1] == left.codes.shape[-1] else -2) == 1


def test_the_clock_is_asked_for_every_shape_of_the_grid_once() -> None:
    clock = Clock()
    found = synthetic(clock)
    assert len(clock.asked) == len(set(clock.asked)) == sum(len(t.us) for t in found.tables)
    table = found.table("cast", "fp8_rowwise | fp8_rowwise")
    assert table is not None
    assert table.us[0] == round(power_law(Case("cast", "", (256, 256))), 3)


def test_a_kernel_that_fails_is_named_and_a_full_memory_is_told_apart() -> None:
    bench = CudaBench(named("cpu"), device="cpu")

    def failing(error: Exception) -> CudaBench:
        def build(case: Case) -> object:
            raise error

        bench.build = build  # type: ignore[method-assign, assignment]
        return bench

    case = Case("fprop", "fp8_rowwise", (64, 32, 16))
    with pytest.raises(
        UnsupportedError, match=r"failed at \(64, 32, 16\) \(fprop of fp8_rowwise\)"
    ):
        failing(ValueError("no such product")).time([case])
    for error in (torch.OutOfMemoryError("full"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")):
        with pytest.raises(MemoryError):
            failing(error).time([case])
