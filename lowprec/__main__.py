"""python -m lowprec recipes | show NAME | plan FILE:FUNC RECIPE [--hardware NAME] | formats."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from lowprec.errors import LowprecError, PlanError
from lowprec.formats import ALL, FORMATS
from lowprec.hardware import NAMED, named
from lowprec.planning import plan
from lowprec.recipe import load_recipe, shipped_recipes
from lowprec.table import render


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, or 3 with one line on stderr when the input is wrong."""
    arguments = _parser().parse_args(argv)
    try:
        lines = {
            "recipes": _recipes,
            "show": lambda: [load_recipe(arguments.name).to_toml().rstrip()],
            "plan": lambda: [_plan(arguments.model, arguments.recipe, arguments.hardware)],
            "formats": _formats,
        }[arguments.command]()
    except LowprecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    print("\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lowprec", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("recipes", help="list the shipped recipes")
    show = commands.add_parser("show", help="print a recipe as TOML")
    show.add_argument("name", help="a shipped recipe, or the path of a TOML file")
    plan_ = commands.add_parser("plan", help="print what a recipe does to a model")
    plan_.add_argument("model", help="FILE.py:FUNCTION; the function returns the model")
    plan_.add_argument("recipe", help="a shipped recipe, or the path of a TOML file")
    plan_.add_argument("--hardware", help=f"plan for {', '.join(NAMED)}; default: this machine")
    commands.add_parser("formats", help="list the formats")
    return parser


def _recipes() -> list[str]:
    return render(["recipe", "why"], [[name, load_recipe(name).why] for name in shipped_recipes()])


def _formats() -> list[str]:
    def extent(size: int) -> str:
        return "all" if size == ALL else str(size)

    rows = [
        [
            fmt.name,
            fmt.element.name,
            "x".join(map(extent, fmt.block)),
            ("power-of-two " if fmt.scale == "float32" and fmt.power_of_two else "") + fmt.scale,
            f"{fmt.bits_per_value:.3f}",
            ", ".join(fmt.scale_rules),
        ]
        for fmt in FORMATS.values()
    ]
    return render(["format", "element", "block", "scale", "bits/value", "scale rules"], rows)


def _plan(target: str, recipe: str, hardware: str | None) -> str:
    file, _, function = target.rpartition(":")
    if not file or not Path(file).is_file():
        raise PlanError(f"{target!r}: write FILE.py:FUNCTION, with a file that exists")
    try:
        names = runpy.run_path(file)
    except Exception as error:
        raise PlanError(f"{file} cannot be run: {type(error).__name__}: {error}") from error
    if not callable(names.get(function)):
        found = sorted(k for k, v in names.items() if callable(v) and not k.startswith("_"))
        raise PlanError(f"{file} has no function {function!r}; it has: {', '.join(found)}")
    try:
        model = names[function]()
    except Exception as error:
        raise PlanError(f"{target} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise PlanError(f"{target} returned {type(model).__qualname__}, not a torch.nn.Module")
    return str(plan(model, load_recipe(recipe), hardware=named(hardware) if hardware else None))


if __name__ == "__main__":
    sys.exit(main())
