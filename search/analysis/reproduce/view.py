"""What the terminal says while a list of trainings goes on."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from dashboards.units import decimals, duration
from search.dataset import OnProgress
from trials.record import TrialRecord


class TrainingsView:
    """A bar of all examples, a line for each training that ends: a
    `search.execution.train_list.TrainingObserver`."""

    def __init__(
        self, step: str, names: Mapping[str, str], console: Console, progress: OnProgress, *, total: int
    ) -> None:
        """A view; `names` are by the fingerprint of the job, at most `total` examples are trained."""
        self._step, self._names, self._total = step, names, total
        self._console, self._show = console, progress

    def ended(self, record: TrialRecord) -> None:
        """Prints a line for a training that has ended."""
        ne = record.result.curve[-1].validation.ne if record.result.curve else None
        how = f"NE {decimals(ne, 5)}" if record.result.error is None else record.result.error
        self._console.print(
            f"{self._names[record.job.fingerprint]}: {how}, {duration(record.result.seconds)}",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )

    def progress(self, examples: int) -> None:
        """Moves the bar to this number of examples."""
        self._show(self._step, examples, self._total)
