"""Every example runs as a reader would run it, and says what it did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qualitygates import Experiment

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
GATES = sorted((ROOT / "examples").glob("*.toml"))


def name(path: Path) -> str:
    return path.name


def test_there_are_examples() -> None:
    assert SCRIPTS
    assert (ROOT / "examples" / "flights.toml") in GATES


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_a_script_is_short_and_takes_no_arguments(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    assert "argv" not in text
    assert "argparse" not in text
    assert "environ" not in text


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_a_script_runs_and_prints(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("path", GATES, ids=name)
def test_a_gate_file_reads(path: Path) -> None:
    experiment = Experiment.from_toml(path)
    assert experiment.null_control
    assert experiment.known_bad_margins > 0
