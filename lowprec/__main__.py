"""python -m lowprec recipes | show NAME | plan FILE:FUNC RECIPE | formats | calibrate."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, Final, NoReturn

import torch

from lowprec.backends import triton_kernels
from lowprec.calibrating import measure
from lowprec.calibration import load_calibration
from lowprec.errors import LowprecError, PlanError
from lowprec.formats import ALL, FORMATS
from lowprec.hardware import NAMED, current, named
from lowprec.planning import plan
from lowprec.recipe import load_recipe, shipped_recipes
from lowprec.table import render

BROKEN: Final = 3
_numbers = itertools.count()


class _Parser(argparse.ArgumentParser):
    # argparse exits with 2; here every wrong input ends with the same code.
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(BROKEN, f"error: {message}\n")


class _Loader(SourceFileLoader):
    # No bytecode: a file that changes twice in a second would run in its older form.
    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, or 3 with one line on stderr when the input is wrong."""
    arguments = _parser().parse_args(argv)
    commands: dict[str, Callable[[], list[str]]] = {
        "recipes": _recipes,
        "show": lambda: [load_recipe(arguments.name).to_toml().rstrip()],
        "plan": lambda: [_plan(arguments)],
        "formats": _formats,
        "calibrate": lambda: _calibrate(arguments),
    }
    try:
        lines = commands[arguments.command]()
    except LowprecError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BROKEN
    print("\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m lowprec", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    commands.add_parser("recipes", help="list the shipped recipes")
    show = commands.add_parser("show", help="print a recipe as TOML")
    show.add_argument("name", help="a shipped recipe, or the path of a TOML file")
    plan_ = commands.add_parser("plan", help="print what a recipe does to a model")
    plan_.add_argument("model", help="FILE.py:FUNCTION; the function returns the model")
    plan_.add_argument("recipe", help="a shipped recipe, or the path of a TOML file")
    plan_.add_argument("--hardware", help=f"plan for {', '.join(NAMED)}; default: this machine")
    plan_.add_argument("--steps", type=int, help="training steps, for recipes with a schedule")
    plan_.add_argument(
        "--calibration", help="keep BF16 where the prediction is no gain: NAME, FILE"
    )
    plan_.add_argument("--rows", type=int, help="tokens a layer gets in a forward call on a device")
    commands.add_parser("formats", help="list the formats")
    calibrate = commands.add_parser("calibrate", help="measure this GPU: rates by shape, a minute")
    calibrate.add_argument("--out", type=Path, help="TOML file; default: the GPU's name, here")
    return parser


def _calibrate(arguments: argparse.Namespace) -> list[str]:
    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    out: Path = arguments.out or Path(f"{current().name}.toml")
    found = measure(out, say=say)
    # With a slash: a bare name is a shipped calibration.
    file = str(out) if out.is_absolute() else f"./{out}"
    return [
        f"{file}: {len(found.tables)} kernels of {found.device}, torch {found.torch}",
        f"use it: python -m lowprec plan FILE.py:FUNCTION RECIPE --calibration {file} --rows ROWS",
    ]


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


def _plan(arguments: argparse.Namespace) -> str:
    target: str = arguments.model
    file, _, function = target.rpartition(":")
    if not file:
        raise PlanError(f"{target!r}: write FILE.py:FUNCTION, such as model.py:build")
    if not Path(file).is_file():
        raise PlanError(f"{target!r}: {file} is not there; write FILE.py:FUNCTION, with its path")
    # All that can be wrong here is said before code of the user's runs, which may take long.
    recipe = load_recipe(arguments.recipe)
    hardware = None if arguments.hardware is None else named(arguments.hardware)
    prices = None if arguments.calibration is None else load_calibration(arguments.calibration)
    if (prices is None) != (arguments.rows is None):
        raise PlanError("--calibration and --rows go together: a prediction needs both")
    if prices is not None:  # a plan that is only printed needs no machine
        hardware = hardware or prices.hardware
    # The plan is what stdout holds; what the file prints goes past it.
    with contextlib.redirect_stdout(sys.stderr), _first_on_path(Path(file).resolve().parent):
        build = _builder(file, function, _run_file(file))
        with _reported(f"{target} failed"):
            model = build()
        if not isinstance(model, torch.nn.Module):
            raise PlanError(f"{target} returned {type(model).__qualname__}, not a torch.nn.Module")
        options = {"steps": arguments.steps, "calibration": prices, "rows": arguments.rows}
        text = str(plan(model, recipe, hardware=hardware, **options))
    missing = triton_kernels.missing()
    if missing and (hardware or current()).capability is not None:
        # Which kernels there are is asked here, not on the machine that will train.
        text += f"\n\nPlanned without our own kernels: {missing}. pip install 'lowprec[triton]'"
    return text


def _run_file(file: str) -> dict[str, Any]:
    name = f"_lowprec_model_{next(_numbers)}"
    loader = _Loader(name, file)
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None  # it is None only without a loader
    module = importlib.util.module_from_spec(spec)
    # Dataclasses, pickle and typing look the module of a class up by its name, also later.
    sys.modules[name] = module
    with _reported(f"{file} cannot be run"):
        loader.exec_module(module)
    return vars(module)


def _builder(file: str, function: str, names: dict[str, Any]) -> Callable[..., object]:
    build: object = names.get(function)
    if not callable(build):
        public = {k: v for k, v in names.items() if callable(v) and not k.startswith("_")}
        own = [k for k, v in public.items() if getattr(v, "__module__", "") == names["__name__"]]
        known = ", ".join(sorted(own or public)) or "none"
        raise PlanError(f"{file} has no function {function!r}; it has: {known}")
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # a callable written in C need not have one
        return build
    try:
        signature.bind()
    except TypeError as error:
        raise PlanError(
            f"{file}:{function} needs arguments, {signature}, and is called without any: write "
            "a function without arguments that returns the model"
        ) from error
    return build


@contextlib.contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    text = str(folder)
    sys.path.insert(0, text)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's code may have taken it out
            sys.path.remove(text)


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        raise PlanError(
            f"{what}: it exits (SystemExit: {error.code}); keep what belongs to a script behind "
            "if __name__ == '__main__'"
        ) from error
    except Exception as error:
        raise PlanError(f"{what}: {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
