"""The size of the code: files and functions that a reader can hold in mind."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from statistics import median, quantiles

import pytest

ROOT = Path(__file__).parent.parent
MEDIAN, CAP, KERNEL_CAP, TEST_CAP = 150, 400, 500, 600
FUNCTION_P90, PARAMETERS = 40, 6
# What attention reads is one more tensor than that; the names and order are torch's own.
ATTENTION = ("attention", "attention_forward", "attention_backward", "forward_op", "backward_op")
KERNELS = ROOT / "lowprec" / "backends" / "triton_kernels"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


PACKAGE = files("lowprec", "qualitygates")


@cache
def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@cache
def functions(path: Path) -> list[Function]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def is_kernel(path: Path) -> bool:
    return KERNELS in path.parents


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_median_file_is_short() -> None:
    assert median(lines(path) for path in PACKAGE if not is_kernel(path)) <= MEDIAN


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_no_file_is_long(path: Path) -> None:
    assert lines(path) <= (KERNEL_CAP if is_kernel(path) else CAP)


@pytest.mark.parametrize("path", files("tests"), ids=name)
def test_no_test_file_is_long(path: Path) -> None:
    assert lines(path) <= TEST_CAP


def test_functions_are_short() -> None:
    sizes = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in PACKAGE
        if not is_kernel(path)
        for node in functions(path)
    ]
    assert quantiles(sizes, n=10)[-1] <= FUNCTION_P90


@pytest.mark.parametrize("path", [path for path in PACKAGE if not is_kernel(path)], ids=name)
def test_public_functions_take_few_parameters(path: Path) -> None:
    for node in functions(path):
        every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        counted = [one.arg for one in every if one.arg not in ("self", "cls", "ctx")]
        public = not node.name.startswith("_") and node.name not in ATTENTION
        assert not public or len(counted) <= PARAMETERS, f"{node.name}({', '.join(counted)})"
