"""Every example runs as a reader would run it, and says what it did."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from qualitygates import Experiment
from qualitygates.sensitivity.spec import SweepSpec

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
SWEEPS = sorted((ROOT / "examples").glob("*-sweep.toml"))
GATES = [
    *(path for path in sorted((ROOT / "examples").glob("*.toml")) if path not in SWEEPS),
    *sorted((ROOT / "examples" / "own-loops").glob("*.toml")),
]
# Scripts around a library that takes seconds to import, in several processes: their small forms run
# by default in gates/test_integrations.py.
NEEDS = {
    "gate_a_lightning_module.py": "lightning",
    "gate_a_hugging_face_model.py": "transformers",
    "embedding_parallel.py": "torchrec",
}
# Four processes; its subject is held by core/test_fsdp.py.
SLOW = {*NEEDS, "sharded_weights.py"}
EXTRAS = {"transformers": "huggingface", "torchrec": "recsys"}
DISTRIBUTED = [path for path in SCRIPTS if "torchrun" in path.read_text(encoding="utf-8")]
# Lightning's own, about torch's tree of arguments.
THEIR_WARNING = "ignore:`isinstance(treespec:FutureWarning"


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


def as_parameter(path: Path) -> Any:
    marks = [pytest.mark.slow] if path.name in SLOW else []
    return pytest.param(path, marks=marks, id=path.name)


@pytest.mark.parametrize("path", [as_parameter(path) for path in SCRIPTS])
def test_a_script_runs_and_prints(path: Path, tmp_path: Path) -> None:
    runs_and_prints(path, tmp_path, "-W", "error", "-W", THEIR_WARNING)


@pytest.mark.slow
@pytest.mark.parametrize("path", DISTRIBUTED, ids=name)
def test_a_script_runs_under_torchrun(path: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    runs_and_prints(path, tmp_path, *launcher)


def runs_and_prints(path: Path, tmp_path: Path, *options: str) -> None:
    library = NEEDS.get(path.name)
    if library and find_spec(library) is None:
        extra = EXTRAS.get(library, library)
        pytest.skip(f"{library} is not installed: pip install 'lowprec[{extra}]'")
    done = subprocess.run(
        [sys.executable, *options, str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("path", GATES, ids=name)
def test_a_gate_file_reads(path: Path) -> None:
    experiment = Experiment.from_toml(path)
    assert experiment.null_control
    assert experiment.known_bad_margins > 0


@pytest.mark.parametrize("path", SWEEPS, ids=name)
def test_a_sweep_file_reads(path: Path) -> None:
    spec = SweepSpec.from_toml(path)
    assert spec.gate == Experiment.from_toml(path.parent / spec.gate_file)
    assert spec.confirm
