"""Ordered axis: a setting that a study varied from less to more, so that its candidates may sit at an end of it.

It is part of a study's record, so that readers know the ends without knowing the space.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from dhen.values import Value
from trials.record import TrialRecord

Setting = bool | int | float | str | None
DEPTH = "depth"
NEAR_END = 0.05
"""Share of a range within which a value counts as being at its end."""


class OrderedAxis(Value):
    """An axis of numbers, or of the widths of an MLP, with its ends."""

    name: str
    """Name of the axis in points: `layer.dlrm.mlp`."""
    part: Literal["depth", "model", "training", "layer"]
    """What the axis is a setting of."""
    key: str
    """Name of the setting there: `mlp`."""
    layer: int | None = None
    """Number of the layer whose setting it is; the first one where all layers share a recipe."""
    kind: str | None = None
    """Interaction module whose setting it is."""
    values: tuple[Setting, ...] = ()
    """All values from the lowest to the highest, as points have them, where there are a few."""
    low: float | None = None
    """Lower end of a range."""
    high: float | None = None
    """Upper end of a range."""
    log: bool = False
    """Whether the range's scale is logarithmic."""
    default: Setting = None
    """Value of the setting where a job's plain data leaves it out."""
    open_below: bool = True
    """Whether there are values below the lowest: not below a dropout of 0, or one layer."""
    open_above: bool = True
    """Whether there are values above the highest: not above a share of 1."""
    tuned_last: bool = False
    """Whether the axis keeps its first value until the tuning stage."""

    def value(self, trial: TrialRecord) -> Setting:
        """Returns the value that a candidate's network or training has, as points have it; None where the setting
        has no meaning in it, or waits for the tuning stage."""
        if self.tuned_last and trial.origin.tuned_from is None:
            return None
        settings = self._settings(trial)
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

    def _settings(self, trial: TrialRecord) -> dict[str, Any] | None:
        """The plain data of a trial's job in which the setting is found."""
        layers = trial.job.model.get("layers") or []
        if self.part == "training":
            return trial.job.training or None
        if not layers:
            return None
        if self.part == "depth":
            return {self.key: len(layers)}
        if self.part == "model":
            return trial.job.model
        assert self.layer is not None
        layer = layers[self.layer] if self.layer < len(layers) else None
        if layer is None or self.kind is None:
            return layer
        return next((module for module in layer["modules"] if module["kind"] == self.kind), None)
