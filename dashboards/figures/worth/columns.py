"""Candidates as columns of numbers: NE, the modules and pairs that each has, its place on the space's axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np

from dashboards.figures.frame import frame
from dashboards.figures.worth.additive import Floats
from dashboards.units import known
from trials.ordered_axis import OrderedAxis
from trials.record import Outcome, TrialRecord
from trials.study_record import relative_ne_percent


def ne_of(trial: TrialRecord) -> float | None:
    """NE of a candidate that says something of its own network; for a stopped one what it was to come to."""
    result = trial.result
    if trial.shared or not trial.job.model.get("layers"):
        return None
    if result.outcome is Outcome.STOPPED:
        return result.expected_ne if known(result.expected_ne) else None
    done = result.outcome is Outcome.COMPLETED and result.validation is not None
    return result.validation.ne if done and result.validation and known(result.validation.ne) else None


def relative(values: Sequence[float], reference: float | None) -> Floats:
    """NE in percent of the baseline's; a few that went wrong count as the worst of the others."""
    worst = frame(values).high
    base = reference if reference is not None else float(np.median(values))
    return np.array([relative_ne_percent(min(value, worst), base) for value in values])


def _layers(trial: TrialRecord) -> list[list[str]]:
    """Names of the modules by layer."""
    return [
        [str(module["kind"] if isinstance(module, Mapping) else module) for module in layer["modules"]]
        for layer in trial.job.model["layers"]
    ]


def layers_differ(trial: TrialRecord) -> bool:
    """Whether a candidate's layers have different modules."""
    return len({tuple(sorted(kinds)) for kinds in _layers(trial)}) > 1


def modules_in(trial: TrialRecord) -> set[str]:
    """Modules of any layer."""
    return {kind for kinds in _layers(trial) for kind in kinds}


def pairs_in(trial: TrialRecord) -> set[str]:
    """Pairs of modules in one layer: `attention + dlrm`."""
    return {
        f"{first} + {second}"
        for kinds in _layers(trial)
        for first, second in combinations(sorted(set(kinds)), 2)
    }


def modules_by_layer(trial: TrialRecord) -> set[str]:
    """Modules with their layer, counted from one: `layer 1: dlrm`."""
    return {f"layer {number}: {kind}" for number, kinds in enumerate(_layers(trial), 1) for kind in kinds}


def columns_of(
    trials: Sequence[TrialRecord], names_of: Callable[[TrialRecord], set[str]], fewest: int
) -> dict[str, Floats]:
    """A column of 0 and 1 for each name that enough candidates have and enough have not, most frequent first."""
    having = [names_of(trial) for trial in trials]
    counts = Counter(name for names in having for name in names)
    return {
        name: np.array([float(name in names) for names in having])
        for name, count in counts.most_common()
        if fewest <= count <= len(trials) - fewest
    }


def controls_of(trials: Sequence[TrialRecord], axes: Iterable[OrderedAxis]) -> list[Floats]:
    """A column for each ordered axis that is no layer's own: where a candidate lies on it, from 0 to 1."""
    columns = []
    for axis in axes:
        if axis.part == "layer":
            continue
        positions = [axis.position(axis.value(trial)) for trial in trials]
        known_ones = [position for position in positions if position is not None]
        if len(set(known_ones)) > 1:
            mean = sum(known_ones) / len(known_ones)
            columns.append(np.array([mean if position is None else position for position in positions]))
    return columns
