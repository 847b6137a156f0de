"""What `python -m qualitygates sweep` does."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from .bisect import bisect
from .driver import sweep
from .report import summary
from .spec import SweepSpec

# Without a confirmation nothing is accepted, so the exit code is that of INCONCLUSIVE.
_CODES: Final = {"ACCEPT": 0, "REJECT": 1, "INCONCLUSIVE": 2}


def run_command(
    file: Path, *, out: Path | None, recipe: str | None, workers: int, cluster: str = ""
) -> int:
    """Sweep, or bisect `recipe`; the exit code is that of the confirming gate, 2 without one."""
    spec = SweepSpec.from_toml(file)
    if recipe is not None:
        folder = out or Path("gates") / f"{file.stem}-bisect"
        found = bisect(spec, recipe, out=folder, workers=workers, progress=True, cluster=cluster)
        print(f"give back to BF16: {', '.join(found['given_back'])}")
        if not found["minimal"]:
            print("not shown to be minimal: raise [confirm] attempts to let more gates run")
        print(f"recipe: {folder / 'recipe.toml'}")
        print(f"the gate that judges it: python -m qualitygates run {folder / 'gate.toml'}")
        return _CODES["INCONCLUSIVE"]
    folder = out or Path("gates") / file.stem
    result = sweep(spec, out=folder, workers=workers, progress=True, cluster=cluster)
    print("\n".join(summary(folder, result)))
    print(f"report: {folder / 'report.html'}")
    confirmation = result["confirmation"] or {"verdict": "INCONCLUSIVE"}
    return _CODES[confirmation["verdict"]]
