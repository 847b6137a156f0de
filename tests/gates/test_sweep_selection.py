"""What a sweep says of its choice belongs to that choice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qualitygates.sensitivity import driver


class Effect:
    estimate = 1.0

    def to_dict(self) -> dict[str, float]:
        return {"estimate": self.estimate}


@pytest.mark.parametrize("in_the_end", [{"a": {}}, {"a": {"fprop": "nvfp4"}}])
def test_measured_is_what_was_chosen(
    in_the_end: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice over the budget of harm; then nothing is low any more, or all is as it was."""
    chosen = [
        SimpleNamespace(policies={"a": {"fprop": "nvfp4"}}, harm=0.5),
        SimpleNamespace(policies=in_the_end, harm=0.0),
    ]
    run: Any = object.__new__(driver._Chosen)
    run.search = SimpleNamespace(budget=0.1, whole=lambda *a, **k: {"chosen": Effect()})
    run.spec = SimpleNamespace(branches=SimpleNamespace(trainings=1))
    run.tried, run.measured = [], {}
    found = iter(chosen)
    monkeypatch.setattr(run, "_within", lambda budget: next(found), raising=False)
    assert run.select() is chosen[1]
    if any(in_the_end.values()):
        assert run.measured["effect"] == {"estimate": 1.0}
        assert len(run.tried) == 2
    else:
        assert run.measured == {}
        assert len(run.tried) == 1
