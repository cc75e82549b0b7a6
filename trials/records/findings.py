"""What a study finds: what winners are made of and where they are better, what is chosen, ends of ordered axes."""

from __future__ import annotations

import math
import re
from enum import StrEnum
from typing import Any, Literal

from dhen.values import Value
from trials.records.trial_record import TrialRecord

# What is worked out of winners once a study's selection is frozen: what their parts are worth, and on which rows
# they are better than the baseline; plain values, made by `search.analysis` and kept by the ledger.


class WinnerVerdict(StrEnum):
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


class AblatedPart(Value):
    """A module or a layer, and what the network is without it."""

    removed: str
    """Name of the part: `layer0: attention`, `layer1` (a whole layer), `members` (all but one), or `trial 3`."""
    ne_percent: MeanInterval | None
    """NE of the rest relative to the whole network's, over seeds; above 0 the part is worth that much.
    None if a training failed."""
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
    parts: tuple[AblatedPart, ...]


class Slice(Value):
    """Rows of the test split with one value, or in one tenth; means over seeds."""

    value: str
    rows: int
    base_rate: float
    ne: float | None
    """NE of the winner; None if all labels are equal."""
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
    better: WinnerVerdict
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


# What a study takes from its front before test is looked at: its best, the winners to confirm, how sure it is.
#
# The values are made from losses on validation (`search.analysis.choice`), noted in the ledger, and shown by the
# report, MLflow and `status --json`.

MOST_WINNERS = 5
"""Largest number of winners that are confirmed: correction over more of them costs the power to find any."""


class Winner(Value):
    """A trial that is scored on test and confirmed."""

    trial: int
    reasons: tuple[str, ...]
    """What the trial is chosen as: `best`, `knee`, `best network` and so on."""


class JudgedTrial(Value):
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
    """Numbers of the front that was chosen from: if it has changed since, the choice is no longer one."""
    baseline: int
    best: int
    """Number of the trial that is the study's best: the baseline if it is close to the lowest NE, else the
    steadiest, and of these the cheapest, of those that are close."""
    lowest: int
    """Number of the trial of the lowest NE on the rows that were judged; the baseline's, if none is lower."""
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
    judged: tuple[JudgedTrial, ...] = ()
    """Trials that were judged, the baseline included, by number; none if validation has too few rows."""

    def of(self, number: int) -> JudgedTrial | None:
        """Returns how a trial was judged; None if it was not."""
        return next((judged for judged in self.judged if judged.trial == number), None)


Setting = bool | int | float | str | None
DEPTH = "depth"
NEAR_END = 0.05
"""Share of a range within which a value counts as being at its end."""


class OrderedAxis(Value):
    """An axis of numbers, or of the widths of an MLP, that a study varied from less to more, with its ends;
    readers of its record know the ends without knowing the space."""

    name: str
    """Name of the axis in points: `layer.dlrm.mlp`."""
    part: Literal["depth", "model", "training", "layer"]
    """What the axis is a setting of."""
    key: str
    """Name of the setting there: `mlp`."""
    layer: int | None = None
    """Number of the layer whose setting it is; the first one if all layers share a recipe."""
    kind: str | None = None
    """Interaction module whose setting it is."""
    values: tuple[Setting, ...] = ()
    """All values from the lowest to the highest, as points have them, if there are a few."""
    low: float | None = None
    """Lower end of a range."""
    high: float | None = None
    """Upper end of a range."""
    log: bool = False
    """Whether the range's scale is logarithmic."""
    default: Setting = None
    """Value of the setting if a job's plain data leaves it out."""
    open_below: bool = True
    """Whether there are values below the lowest: not below a dropout of 0, or one layer."""
    open_above: bool = True
    """Whether there are values above the highest: not above a share of 1."""
    tuned_last: bool = False
    """Whether the axis keeps its first value until the tuning stage."""

    def value(self, trial: TrialRecord) -> Setting:
        """Returns the value that a candidate's network or training has, as points have it; None if the setting
        has no meaning in it, or waits for the tuning stage."""
        if self.tuned_last and trial.origin.tuned_from is None:
            return None
        layers = trial.job.model.get("layers") or []
        settings: dict[str, Any] | None = None  # the plain data of the trial's job in which the setting is
        if self.part == "training":
            settings = trial.job.training or None
        elif self.part == "depth" and layers:
            settings = {self.key: len(layers)}
        elif self.part == "model" and layers:
            settings = trial.job.model
        elif self.layer is not None and self.layer < len(layers):
            layer = layers[self.layer]
            of_kind = (module for module in layer.get("modules", ()) if module["kind"] == self.kind)
            settings = layer if self.kind is None else next(of_kind, None)
        if settings is None:
            return None
        value = settings.get(self.key, self.default)
        return "-".join(map(str, value)) or "none" if isinstance(value, (list, tuple)) else value

    def position(self, value: Setting) -> float | None:
        """Returns where a value lies, from 0 at the lowest to 1 at the highest; None for one that the axis has
        not."""
        if self.values:
            return self.values.index(value) / (len(self.values) - 1) if value in self.values else None
        assert self.low is not None
        assert self.high is not None
        if not isinstance(value, (int, float)) or not self.low <= value <= self.high:
            return None
        scale = math.log if self.log else float
        return (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))

    @property
    def setting(self) -> str:
        """The axis's name without the number of its layer: `layer.KEY`."""
        return re.sub(r"^layer\d+\.", "layer.", self.name)

    @property
    def ends(self) -> tuple[Setting, Setting]:
        """The lowest and the highest value."""
        return (self.values[0], self.values[-1]) if self.values else (self.low, self.high)
