"""The wheel that users get: two packages, every recipe inside, and it works away from the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHIPPED = ("lowprec", "recipes", "calibrations", "qualitygates")


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for folder in SHIPPED:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


def test_top_level_names_are_the_two_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lowprec", "qualitygates"}


def test_every_module_and_recipe_is_inside(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {f"lowprec/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")}
    modules = {
        str(path.relative_to(ROOT))
        for package in ("lowprec", "qualitygates")
        for path in (ROOT / package).rglob("*.py")
    }
    assert recipes
    assert recipes | modules | {"lowprec/py.typed", "qualitygates/py.typed"} <= names
    assert "lowprec/recipes/__init__.py" not in names
    assert any(name.endswith("LICENSE") for name in names)


def test_the_installed_wheel_finds_its_recipes(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    code = (
        "import lowprec, lowprec.recipe as r;"
        "print(lowprec.__file__, *(lowprec.load_recipe(n).name for n in r.shipped_recipes()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    file, *names = done.stdout.split()
    assert file.startswith(str(target))
    assert sorted(names) == sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))
