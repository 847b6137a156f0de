"""Quality gates: is a low-precision recipe non-inferior to BF16 by a margin fixed in advance?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .experiment import Experiment
    from .gate import run
    from .sensitivity.driver import sweep

__all__ = ["Experiment", "judge", "run", "sweep"]


def judge(paths: Sequence[str | Path]) -> dict[str, Any]:
    """The verdict on a gate folder, or on run files, from the records alone: no training, no torch.

    Raises RecordError when a record is damaged or the files are not of one gate.
    """
    from .judging import judge_records
    from .records import load_evidence, load_speed

    return judge_records(*load_evidence(paths), speed=load_speed(paths))


def __getattr__(name: str) -> Any:
    # Lazy, so that judging needs no torch and importing costs nothing.
    if name == "Experiment":
        from .experiment import Experiment

        return Experiment
    if name == "run":
        from .gate import run

        return run
    if name == "sweep":
        from .sensitivity.driver import sweep

        return sweep
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
