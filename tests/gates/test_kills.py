"""A gate killed with SIGKILL and resumed leaves the bytes of one that was never interrupted."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from qualitygates.experiment import Experiment
from qualitygates.gate import run
from tests.gates.killing import (
    FOLDER,
    contents,
    killed_after_records,
    killed_and_resumed,
    time_of,
)

TOML = """
schema = 1
name = "toy"
workload = "{folder}/toy_workload.py:build"
margins = "demo"
looks = [3]
[options]
rows = 2000
[train]
steps = 30
batch_size = 64
processes = {processes}
[baseline]
recipe = "bf16"
[candidate]
recipe = "mxfp8"
[speed]
required = false
"""
NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed (lowprec[cluster])"
)
ON_RAY = ("--cluster", "local")


def gate_file(folder: Path, *, processes: int = 1) -> Path:
    path = folder / "toy.toml"
    path.write_text(TOML.format(folder=FOLDER, processes=processes))
    return path


def finish(gate: Path, out: Path) -> None:
    run(Experiment.from_toml(gate), out=out, workers=1, progress=False)


def assert_same(out: Path, whole: Path) -> None:
    assert (out / "verdict.json").read_bytes() == (whole / "verdict.json").read_bytes()
    assert contents(out) == contents(whole)
    assert not list(out.rglob("*.tmp"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("whole")
    gate = gate_file(folder)
    finish(gate, folder / "whole")
    return gate, folder / "whole"


@pytest.mark.parametrize(
    ("options", "kills"),
    [pytest.param((), 2, id="local"), pytest.param(ON_RAY, 1, id="ray", marks=NEEDS_RAY)],
)
def test_killed_and_resumed_it_is_byte_equal(
    uninterrupted, tmp_path: Path, options: tuple[str, ...], kills: int
) -> None:
    """A gate that was killed on Ray may go on in local processes: the bytes are the same."""
    gate, whole = uninterrupted
    killed_after_records(gate, tmp_path / "out", kills=kills, options=options)
    finish(gate, tmp_path / "out")
    assert_same(tmp_path / "out", whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "processes", "kills"),
    [
        pytest.param((), 1, 20, id="local"),
        pytest.param(ON_RAY, 1, 20, id="ray", marks=NEEDS_RAY),
        pytest.param((), 2, 3, id="torchrun"),
    ],
)
def test_killed_anywhere_and_resumed_it_is_byte_equal(
    tmp_path: Path, options: tuple[str, ...], processes: int, kills: int
) -> None:
    gate, whole = gate_file(tmp_path, processes=processes), tmp_path / "whole"
    duration = time_of(gate, whole, options)
    outs = killed_and_resumed(gate, tmp_path, kills=kills, duration=duration, options=options)
    for out in outs:
        assert_same(out, whole)
