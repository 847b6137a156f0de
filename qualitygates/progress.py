"""Progress of a gate: bars on a terminal, one line a finished run elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class Progress:
    """Shows steps and runs of one look; silent when `enabled` is False."""

    def __init__(self, *, enabled: bool, jobs: int, steps: int) -> None:
        self.jobs, self.steps, self.done = jobs, steps, 0
        self.started = time.monotonic()
        self.console = Console(stderr=True)
        self.enabled = enabled and jobs > 0
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (self.enabled and self.console.is_terminal),
        )

    def __enter__(self) -> Self:
        self.bars.start()
        self.total = self.bars.add_task(f"{self.jobs} runs", total=self.jobs * self.steps)
        self.tasks: dict[tuple[str, int], Any] = {}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bars.stop()

    @contextmanager
    def listening(self, ticks: Any) -> Iterator[None]:
        """Count the steps that workers put on the queue until the block ends.

        The thread is never joined: a worker killed while it writes leaves the queue locked.
        """
        self.open = True
        threading.Thread(target=self._listen, args=(ticks,), daemon=True).start()
        try:
            yield
        finally:
            self.open = False

    def _listen(self, ticks: Any) -> None:
        while self.open:
            run = ticks.get()
            task = self.tasks.get(run)
            if task is None:
                task = self.bars.add_task(f"{run[0]}, seed {run[1]}", total=self.steps)
                self.tasks[run] = task
            self.bars.advance(task)
            self.bars.advance(self.total)

    def note(self, text: str) -> None:
        """Say something that a user who waits should know."""
        if self.enabled:
            self.console.print(text, markup=False, highlight=False)

    def finished(self, arm: str, seed: int) -> None:
        """Say that a run is on disk."""
        self.done += 1
        counted = 0.0
        if (task := self.tasks.pop((arm, seed), None)) is not None:
            counted = self.bars.tasks[self.bars.task_ids.index(task)].completed
            self.bars.remove_task(task)
        # Runs elsewhere do not count their steps here.
        self.bars.advance(self.total, self.steps - counted)
        if self.enabled and not self.console.is_terminal:
            elapsed = time.monotonic() - self.started
            print(
                f"{self.done}/{self.jobs} runs: {arm}, seed {seed} ({elapsed:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
