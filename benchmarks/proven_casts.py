"""What the tests of a GPU run prove, for lowprec/backends/triton_kernels/proven.py.

    python benchmarks/proven_casts.py TESTS.xml [TESTS.xml ...]

A cast is proven when at least one test of the kernels has it as a parameter and every such test
passed; attention when all tests of its files passed, none skipped. What other runs proved of the
same kernels stays: add what is printed, and take out what it says is not proven.
"""

from __future__ import annotations

import argparse
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.attention_sqnr import policies  # noqa: E402
from lowprec.errors import UnsupportedError  # noqa: E402
from lowprec.formats import Cast  # noqa: E402

CASTS = ("test_kernels_on_gpu", "test_fused_on_gpu", "test_emulated_on_gpu")


def attention_names() -> dict[str, set[str]]:
    """What each file of attention tests proves: policies of the recipes that have kernels.

    And that of a backward pass in BF16 of what the casts say.
    """
    known = policies()
    native = (known["fp8-attention"], known["fp8-attention, backward rounded"])
    both = {"attention bf16", *(f"attention {one}" for one in native)}
    return {
        "test_attention_on_gpu": both,
        "test_attention_calls_on_gpu": both,
        "test_attention_fused_on_gpu": {f"front + {one}" for one in both}
        | {"attention bf16, short keys"},
    }


def casts_in(name: str) -> set[str]:
    """The casts among the parameters of a test's name, with what the test fuses them with."""
    kinds = ("rotation", "norm", "gate", "values")
    before = next((f"{one} + " for one in kinds if one in name), "")
    found = set()
    for part in re.findall(r"\[(.*)\]", name)[:1]:
        for text in part.split("-"):
            try:
                found.add(before + str(Cast.parse(text)))
            except UnsupportedError:
                continue
    return found


def outcomes(paths: list[str]) -> Iterator[tuple[str, str, bool | None]]:
    """File, name and success of each test; None for one that was skipped."""
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            skipped = case.find("skipped") is not None
            well = case.find("failure") is None and case.find("error") is None
            file = case.get("classname", "").split(".")[-1]
            yield file, case.get("name", ""), None if skipped else well


def main() -> None:
    """Print PROVEN's entries, and what failed."""
    passed: dict[str, list[bool]] = defaultdict(list)
    files = attention_names()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tests", nargs="+", help="JUnit XML files")
    for file, name, well in outcomes(parser.parse_args().tests):
        if file in CASTS and well is not None:
            for what in casts_in(name):
                passed[what].append(well)
        # On a GPU without 8-bit products those tests of attention are skipped.
        for what in files.get(file, ()):
            passed[what].append(bool(well))
    proven = sorted(what for what, results in passed.items() if all(results))
    print("".join(f'        "{what}",\n' for what in proven), end="")
    failed = sorted(set(passed) - set(proven))
    print(f"# {len(proven)} proven; not proven: {', '.join(failed) or 'none'}")


if __name__ == "__main__":
    main()
