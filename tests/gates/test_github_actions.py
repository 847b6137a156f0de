"""The GitHub Actions example: it parses, its shell does what it says, its commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import lowprec
from qualitygates.__main__ import _parser
from tests.core.test_acceptance import accept

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "examples" / "github-actions" / "gate.yml"
TEXT = WORKFLOW.read_text(encoding="utf-8")


def scripts() -> dict[str, str]:
    """The shell scripts of the workflow by the names of their steps; needs no YAML library."""
    found = {}
    for step in re.split(r"^      - ", TEXT, flags=re.MULTILINE)[1:]:
        name = re.match(r"name: (.+)", step)
        block = re.search(r"^        run: \|\n((?: {10}.*\n|\n)+)", step, re.MULTILINE)
        line = re.search(r"^        run: ([^|#\n]+)", step, re.MULTILINE)
        if name and (block or line):
            found[name[1]] = textwrap.dedent((block or line)[1])
    return found


def bash(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # GitHub runs a step by this line.
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_is_yaml_of_the_shape_that_github_reads() -> None:
    assert "\t" not in TEXT
    assert all((len(line) - len(line.lstrip())) % 2 == 0 for line in TEXT.splitlines())
    assert set(scripts()) == {"Install", "Gate", "Decide", "Check the acceptance"}
    if find_spec("yaml") is None:
        pytest.skip("PyYAML is not installed: only lines and indentation were checked")
    import yaml

    workflow = yaml.safe_load(TEXT)
    # YAML 1.1 reads the key `on` as true.
    assert set(workflow) == {"name", True, "permissions", "concurrency", "jobs"}
    steps = workflow["jobs"]["gate"]["steps"]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    parsed = {step["name"]: step["run"].strip() for step in steps if "run" in step}
    assert parsed == {name: script.strip() for name, script in scripts().items()}
    upload = next(step for step in steps if step.get("name") == "Upload the report")
    assert upload["if"] == "always()"


@pytest.mark.parametrize("name", ["Install", "Gate", "Decide", "Check the acceptance"])
def test_its_shell_is_valid(name: str) -> None:
    checked = subprocess.run(
        ["bash", "-n", "-c", scripts()[name]], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("code", "passes"), [("0", True), ("1", False), ("2", False), ("3", False)]
)
def test_only_an_accept_passes(tmp_path: Path, code: str, passes: bool) -> None:
    done = bash(scripts()["Decide"], tmp_path, CODE=code)
    assert (done.returncode == 0) == passes
    assert ("::error::" in done.stdout) != passes


def test_a_step_that_never_ran_does_not_pass(tmp_path: Path) -> None:
    assert bash(scripts()["Decide"], tmp_path, CODE="").returncode == 1


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_gate_step_keeps_the_exit_code_for_later(tmp_path: Path, code: int) -> None:
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$@" > called\nexit {code}\n')
    fake.chmod(0o755)
    out = {name: str(tmp_path / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = bash(scripts()["Gate"], tmp_path, OUT="gates/pull-request", PATH=path, **out)
    assert done.returncode == 0, done.stderr
    assert Path(out["GITHUB_OUTPUT"]).read_text() == f"code={code}\n"
    called = (tmp_path / "called").read_text().split()
    assert called[:2] == ["-m", "qualitygates"]
    assert str(_parser().parse_args(called[2:]).out) == "gates/pull-request"


def test_the_acceptance_step_applies_it_to_the_model_of_the_branch(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "from torch import nn\n"
        "def build(width=64):\n"
        "    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32))\n"
    )
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "mine.toml").write_text(lowprec.load_recipe("mxfp8").to_toml())
    torch.manual_seed(0)
    accept(tmp_path, net=nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)))
    given = {
        "OUT": ".",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
    }
    done = bash(scripts()["Check the acceptance"], tmp_path, **given)
    assert done.returncode == 0, done.stderr
    assert "the acceptance covers this model" in done.stdout
    source = (tmp_path / "model.py").read_text().replace("width=64", "width=96")
    (tmp_path / "model.py").write_text(source)
    done = bash(scripts()["Check the acceptance"], tmp_path, **given)
    assert done.returncode == 1
    assert "float32 [64, 32] -> float32 [96, 32]" in done.stderr
