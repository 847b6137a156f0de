"""A small calibration on this machine's GPU: plausible times, and a plan that uses them."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import lowprec
from lowprec.calibrating import Grid, calibrate, write
from lowprec.timing import CudaBench, machine

pytestmark = pytest.mark.gpu

GRID = Grid(rows=(4096, 16384), features=(512, 4096), cast_rows=(512, 4096, 16384))


def test_measured_written_read_and_planned(tmp_path: Path) -> None:
    here = machine()
    found = calibrate(CudaBench(here.hardware), here, grid=GRID, say=print)
    file = tmp_path / "mine.toml"
    write(file, found)
    assert lowprec.load_calibration(file) == found
    assert found.notes == ()
    assert 0.1 < found.copy_tbytes < 20
    assert 0.5 < found.launch_us < 20
    products = found.table("fprop", "bf16")
    assert products is not None
    small, large = products.us[0], products.us[-1]
    assert large > 20 * small
    flops = 2 * 16384 * 4096 * 4096
    assert 50 < flops / large / 1e6 < 3000  # TFLOP/s
    model = nn.Sequential(nn.Linear(4096, 4096, device="meta"))
    recipe = lowprec.load_recipe("mxfp8-portable")
    plan = lowprec.plan(model, recipe, calibration=found, rows=8192)
    assert plan.layers[0].predicted is not None
    assert "predicted from rates measured on" in str(plan)
