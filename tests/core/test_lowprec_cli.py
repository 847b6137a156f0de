"""python -m lowprec: every command, and errors that end with code 3 and one line."""

from pathlib import Path

import pytest

from lowprec.__main__ import main
from lowprec.formats import FORMATS
from lowprec.recipe import parse_recipe, shipped_recipes

MODEL = "import torch\ndef build():\n    return torch.nn.Sequential(torch.nn.Linear(64, 64))\n"


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
    assert "emulated" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "mxfp88"], "did you mean mxfp8"),
        (["plan", "nowhere.py:f", "mxfp8"], "a file that exists"),
        (["plan", "{file}:bild", "mxfp8"], "it has: broken, build, number"),
        (["plan", "{file}:build", "mxfp8", "--hardware", "h300"], "unknown hardware"),
        (["plan", "{file}:number", "mxfp8"], "returned int"),
        (["plan", "{file}:broken", "mxfp8"], "ZeroDivisionError"),
    ],
)
def test_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL + "def number():\n    return 3\ndef broken():\n    return 1 / 0\n")
    assert main([a.replace("{file}", str(file)) for a in arguments]) == 3
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""
