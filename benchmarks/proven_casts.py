"""The casts whose GPU tests all passed, for lowprec/backends/triton_kernels/proven.py.

    python benchmarks/proven_casts.py TESTS.xml

A cast is proven when at least one test has it as a parameter and every such test passed.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from lowprec.errors import UnsupportedError  # noqa: E402
from lowprec.formats import Cast  # noqa: E402


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


def main() -> None:
    """Print PROVEN's entries, and what failed."""
    passed: dict[str, list[bool]] = defaultdict(list)
    for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
        skipped = case.find("skipped") is not None
        well = case.find("failure") is None and case.find("error") is None
        for cast in () if skipped else casts_in(case.get("name", "")):
            passed[cast].append(well)
    proven = sorted(cast for cast, results in passed.items() if all(results))
    print("".join(f'        "{cast}",\n' for cast in proven), end="")
    failed = sorted(set(passed) - set(proven))
    print(f"# {len(proven)} proven; not proven: {', '.join(failed) or 'none'}")


if __name__ == "__main__":
    main()
