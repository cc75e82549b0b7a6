"""What a study takes from its front before test is looked at: its best, the winners to confirm, how sure it is.

The values are made from losses on validation (`search.analysis.choice`), noted in the ledger, and shown by the
report, MLflow and `status --json`.
"""

from __future__ import annotations

from dhen.values import Value

MOST_WINNERS = 5
"""Largest number of winners that are confirmed: correction over more of them costs the power to find any."""


class Winner(Value):
    """A trial that is scored on test and confirmed."""

    trial: int
    reasons: tuple[str, ...]
    """What the trial is chosen as: `best`, `knee`, `best network` and so on."""


class Judged(Value):
    """How a trial compares with the lowest NE of all that were judged, on the same rows."""

    trial: int
    percent: float
    """NE relative to the lowest, in percent; 0 for the lowest itself."""
    standard_error: float
    """Standard error of `percent`, in percent, over blocks of rows."""
    close: bool
    """Whether the difference is within the noise of choosing: at most one standard error, and for the baseline,
    which was not chosen among many, the optimism on top."""
    by_period: tuple[float, ...]
    """NE relative to the baseline's in each period, in percent; negative is better."""
    worse_periods: int
    """Number of periods in which the trial is worse than the baseline by more than one standard error."""


class Choice(Value):
    """The best and the winners of a study, with the noise that they were chosen in."""

    front: tuple[int, ...]
    """Numbers of the front that was chosen from: where it has changed since, the choice is no longer one."""
    baseline: int
    best: int
    """Number of the trial that is the study's best: the baseline where it is close to the lowest NE, else the
    steadiest, and of these the cheapest, of those that are close."""
    lowest: int
    """Number of the trial of the lowest NE on the rows that were judged; the baseline's, where none is lower."""
    winners: tuple[Winner, ...]
    """Trials that are confirmed, by FLOPs, `MOST_WINNERS` at most; chosen before test is looked at."""
    compared: int = 0
    """Number of candidates and averages that the optimism is of."""
    optimism_percent: float = 0.0
    """By how much the lowest of so many is too low, because it was chosen on the rows that it is judged by, in
    percent of NE."""
    periods: int = 0
    """Number of periods that were judged, one after another in time."""
    origins: int = 0
    """Number of periods before validation among them, for which networks were trained on earlier rows alone."""
    judged: tuple[Judged, ...] = ()
    """Trials that were judged, the baseline included, by number; none where validation has too few rows."""

    def of(self, number: int) -> Judged | None:
        """Returns how a trial was judged; None where it was not."""
        return next((judged for judged in self.judged if judged.trial == number), None)
