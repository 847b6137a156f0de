"""python -m lowprec: every command, and errors that end with code 3 and one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowprec.__main__ import main
from lowprec.backends import triton_kernels
from lowprec.formats import FORMATS
from lowprec.recipe import parse_recipe, shipped_recipes

MODEL = "import torch\ndef build():\n    return torch.nn.Sequential(torch.nn.Linear(64, 64))\n"
ODD = """
from torch.nn import Linear
def number(): return 3
def broken(): return 1 / 0
def leave(): raise SystemExit(0)
def width(n, *, bias=True): return Linear(n, n, bias)
def vector(): return Linear(64, 1)
def lines(): raise ValueError("one\\n  two")
"""


def test_recipes_formats_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in shipped_recipes())
    assert main(["formats"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in FORMATS)
    assert main(["show", "mxfp8-safe"]) == 0
    assert parse_recipe(capsys.readouterr().out, name="x").rules[1].match == "last:1"


def test_plan_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    assert main(["plan", f"{file}:build", "mxfp8", "--hardware", "b200"]) == 0
    out = capsys.readouterr().out
    assert "b200 (sm100)" in out
    assert "mxfp8 x mxfp8_32x32" in out
    assert "native" in out


def test_a_plan_for_a_gpu_says_that_triton_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    says = "Planned without our own kernels: Triton is not installed. pip install 'lowprec[triton]'"
    for reason, hardware, said in (
        ("Triton is not installed", "h200", True),
        ("Triton is not installed", "cpu", False),
        (None, "h200", False),
    ):
        monkeypatch.setattr(triton_kernels, "missing", lambda reason=reason: reason)
        assert main(["plan", f"{file}:build", "mxfp8", "--hardware", hardware]) == 0
        assert capsys.readouterr().out.endswith(says + "\n") == said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "mxfp88"], "did you mean mxfp8"),
        (["plan", "nowhere.py:f", "mxfp8"], "nowhere.py is not there; write FILE.py:FUNCTION"),
        (["plan", "nowhere.py", "mxfp8"], "write FILE.py:FUNCTION, such as model.py:build"),
        (
            ["plan", "{file}:bild", "mxfp8"],
            "it has: broken, build, leave, lines, number, vector, width",
        ),
        (["plan", "{file}:build", "mxfp8", "--hardware", "h300"], "unknown hardware"),
        (["plan", "{file}:build", "mxfp8", "--hardware", ""], "unknown hardware"),
        (["plan", "{file}:leave", "mxfp8"], "{file}:leave failed: it exits (SystemExit: 0)"),
        (["plan", "{file}:width", "mxfp8"], "needs arguments, (n, *, bias=True), and is called"),
        (["plan", "{file}:vector", "mxfp8"], "would quantize no layer of this model: (model)"),
        (["plan", "{file}:lines", "mxfp8"], "ValueError: one two"),
        (["plan", "{file}:number", "mxfp8"], "returned int"),
        (["plan", "{file}:broken", "mxfp8"], "ZeroDivisionError"),
    ],
)
def test_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL + ODD)
    assert main([a.replace("{file}", str(file)) for a in arguments]) == 3
    captured = capsys.readouterr()
    assert says.replace("{file}", str(file)) in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise SystemExit(0)", "it exits (SystemExit: 0); keep what belongs to a script behind"),
        ("import sys; sys.exit('no data here')", "it exits (SystemExit: no data here)"),
        ("import argparse; argparse.ArgumentParser().error('x')", "it exits (SystemExit: 2)"),
        ("def build(:", "SyntaxError"),
        ("import no_such_module_anywhere", "ModuleNotFoundError"),
    ],
)
def test_a_file_that_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, says: str
) -> None:
    file = tmp_path / "model.py"
    file.write_text(code)
    assert main(["plan", f"{file}:build", "mxfp8"]) == 3
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith(f"error: {file} cannot be run: ")
    assert says in last
    assert captured.out == ""


def test_siblings_dataclasses_and_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sibling_of_the_cli_test.py").write_text("WIDTH = 96\nprint('sibling')\n")
    (tmp_path / "late_sibling_of_the_cli_test.py").write_text("DEPTH = 2\n")
    file = tmp_path / "model.py"
    file.write_text(
        "from __future__ import annotations\n"
        "import sys\n"
        "from dataclasses import dataclass, field\n"
        "from typing import ClassVar, get_type_hints\n"
        "import torch\n"
        "from sibling_of_the_cli_test import WIDTH\n"
        "print('at import')\n"
        "@dataclass\n"
        "class Sizes:\n"
        "    kind: ClassVar[str] = 'k'\n"
        "    width: int = field(default=WIDTH)\n"
        "def build():\n"
        "    from late_sibling_of_the_cli_test import DEPTH\n"
        "    print('in build')\n"
        "    assert get_type_hints(Sizes)['width'] is int\n"
        "    assert vars(sys.modules[Sizes.__module__])['Sizes'] is Sizes\n"
        "    width = Sizes().width\n"
        "    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(DEPTH)))\n"
    )
    path, argv = list(sys.path), list(sys.argv)
    assert main(["plan", f"{file}:build", "mxfp8", "--hardware", "cpu"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("plan ")
    assert captured.out.count("96x96") == 2
    assert captured.err.split("\n") == ["sibling", "at import", "in build", ""]
    assert (sys.path, sys.argv) == (path, argv)
    assert not list((tmp_path / "__pycache__").glob("model.*"))


def test_a_file_changed_at_once_is_read_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "model.py", []
    for width in (64, 96):
        file.write_text(MODEL.replace("64", str(width)))
        os.utime(file, (1e9, 1e9))
        assert main(["plan", f"{file}:build", "mxfp8", "--hardware", "cpu"]) == 0
        out.append(capsys.readouterr().out)
    assert "64x64" in out[0]
    assert "96x96" in out[1]


@pytest.mark.parametrize("rest", [["mxfp9"], ["mxfp8", "--hardware", "h300"]])
def test_names_are_checked_before_the_file_runs(tmp_path: Path, rest: list[str]) -> None:
    file, trace = tmp_path / "model.py", tmp_path / "ran"
    file.write_text(f"open({str(trace)!r}, 'w').close()\n{MODEL}")
    assert main(["plan", f"{file}:build", *rest]) == 3
    assert not trace.exists()
    assert main(["plan", f"{file}:build", "mxfp8", "--hardware", "cpu"]) == 0
    assert trace.exists()


def test_only_imported_functions_are_named_when_there_are_no_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.py"
    file.write_text("from torch.nn import Linear\n")
    assert main(["plan", f"{file}:build", "mxfp8"]) == 3
    assert "it has: Linear" in capsys.readouterr().err
    file.write_text("x = 1\n")
    assert main(["plan", f"{file}:build", "mxfp8"]) == 3
    assert "it has: none" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["plna"], ["show"], ["plan", "a", "b", "--hard"]])
def test_misuse_ends_with_the_same_code(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 3
    captured = capsys.readouterr()
    assert "error: " in captured.err
    assert captured.out == ""


def test_the_process_ends_with_the_code(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("raise SystemExit(0)\n")
    done = subprocess.run(
        [sys.executable, "-m", "lowprec", "plan", f"{file}:build", "mxfp8"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error: ")
