"""What is worked out of winners once a study's selection is frozen: what their parts are worth, and on which rows
they are better than the baseline; plain values, made by `search.analysis` and kept by the ledger."""

from __future__ import annotations

from enum import StrEnum

from dhen.values import Value


class Better(StrEnum):
    """Whether a winner is better than the baseline."""

    YES = "yes"
    NO = "no"
    CANNOT_TELL = "cannot tell"


class MeanInterval(Value):
    """A mean over seeds, in percent of NE, and its interval with the confidence asked for."""

    mean: float
    low: float | None = None
    """Lower end of the interval; None with one seed."""
    high: float | None = None

    @property
    def half_width(self) -> float | None:
        """Distance from the mean to either end of the interval."""
        return None if self.high is None else self.high - self.mean


class Part(Value):
    """A module or a layer, and what the network is without it."""

    removed: str
    """Name of the part: `layer0: attention`, `layer1` (a whole layer), `members` (all but one), or `trial 3`."""
    ne_percent: MeanInterval | None
    """NE of the rest relative to the whole network's, over seeds; above 0 the part is worth that much.
    None where a training failed."""
    flops: float
    """FLOPs of the rest, forward, per example."""
    flops_percent: float
    """FLOPs of the part, in percent of the whole network's."""


class Ablation(Value):
    """All parts of one network or average, the most valuable first."""

    trial: int
    seeds: tuple[int, ...]
    split: str = "validation"
    """Split on which NE is compared; `test` for an average."""
    blocked_by: str | None = None
    """What the test rows of a block have in common, for an average; intervals are over blocks too."""
    flops: float
    """FLOPs of the whole network or average."""
    parts: tuple[Part, ...]


class Slice(Value):
    """Rows of the test split with one value, or in one tenth; means over seeds."""

    value: str
    rows: int
    base_rate: float
    ne: float | None
    """NE of the winner; None where all labels are equal."""
    baseline_ne: float | None
    calibration: float | None
    """Calibration of the winner: predictions over labels; None without positives."""
    baseline_calibration: float | None
    difference_percent: float | None = None
    """NE relative to the baseline's; negative is better. None without a baseline, or with one block alone."""
    low_percent: float | None = None
    """Lower end of the 95 % interval."""
    high_percent: float | None = None
    p_adjusted: float | None = None
    better: Better
    """Whether the winner is better than the baseline on this slice."""


class Slices(Value):
    """A winner and the baseline, or a bundle alone, on the slices of a column."""

    trial: int
    baseline: int | None = None
    column: str
    blocked_by: str | None = None
    """What rows of a block have in common: `time`, `order`, or a column's name. None without intervals."""
    seeds: tuple[int, ...]
    slices: tuple[Slice, ...]
