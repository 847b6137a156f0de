"""The scripts that train whole models, at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import memory, training
from tests.core.accountant import kept_bytes


def test_a_tiny_run_learns_and_low_precision_learns_as_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "training.jsonl"
    arms = ["bf16", "mxfp8-portable", "mxfp8"]
    training.main(["--tiny", "--steps", "20", "--out", str(out), "--arms", *arms])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["arm"] for line in lines] == arms
    assert [line["backends"] for line in lines] == [[], ["emulated"], ["emulated"]]
    for line in lines:
        first, *_, last = line["loss_every_10_steps"]
        assert last < first - 0.03
        assert line["ne"] < 0.95  # the base rate alone gives 1
        assert abs(line["ne_change_percent"]) < 1.0
    curves = [line["loss_every_10_steps"] for line in lines]
    assert curves[0] != curves[1] != curves[2]
    assert capsys.readouterr().out.count("no time: not a GPU") == 3


def test_batches_follow_their_number_alone() -> None:
    teacher = training.Teacher(training.TINY, "cpu")
    once, again, other = teacher.batch(3), teacher.batch(3), teacher.batch(4)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert not torch.equal(once[0], other[0])
    assert 0.1 < once[2].mean().item() < 0.5


def test_kernels_fall_into_the_classes_of_the_breakdown() -> None:
    found = {
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT": "gemm",
        "cast_tiles_pipelined": "conversion",
        "round_trip_tiles": "conversion",
        "norm_rows": "norm",
        "norm_bands_pipelined": "norm",
        "void at::native::(anonymous namespace)::FusedAdamMathFunctor": "optimizer",
        "gate_tiles": "activation",
        "void at::native::vectorized_elementwise_kernel<4, add>": "rest",
    }
    assert {name: training.class_of(name) for name in found} == found


@pytest.mark.parametrize(("arm", "bound"), [*zip(memory.ARMS[1:], (0.81, 0.53, 0.33), strict=True)])
def test_what_the_mlp_keeps_for_backward(arm: memory.Arm, bound: float) -> None:
    def kept(one: memory.Arm) -> int:
        model = memory.model_of(one, 2, 128, 512, "cpu")
        x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
        with one.context():
            return kept_bytes(model(x))

    assert kept(arm) / kept(memory.ARMS[0]) <= bound
