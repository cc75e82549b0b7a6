"""Tuning, after a search or in turns with it: regularisation and optimisation once more for the few best
architectures.

Training settings, dropouts, and what the space has left for tuning (`SpaceConfig.tuning`) are tuned. An
architecture's other axes keep the values of the candidate that it was found with; the sampler of the study
proposes the tuned ones, by what all candidates have shown. Architectures take turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dhen.errors import UserError
from dhen.fingerprint import fingerprint
from search.budget.turns import untuned
from search.pareto import eligible, knee, ne_of, pareto_front
from spaces.axes import Axis
from spaces.space import Point, Space
from trials.record import TrialRecord

DROPOUT = "dropout"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture that is tuned again."""

    trial: int
    """Number of the candidate that the architecture was found with."""
    fixed: Point
    """Values of its axes; axes left out are to be tuned."""


def is_tunable(space: Space) -> bool:
    """Whether the space leaves anything to tune."""
    tuned = {axis.name for axis in (*space.training_axes.values(), *_dropouts(space))}
    return bool(space.left_for_tuning or tuned & {axis.name for axis in space.axes})


def check_tunable(space: Space) -> None:
    """Raises UserError where the space leaves nothing to tune."""
    if is_tunable(space):
        return
    raise UserError(
        f"tune= tunes training settings and dropouts, and space {space.name!r} leaves none of them open: give it "
        f"axes under `training:`, `model: {{dropout: ...}}` or a module's `dropout`, name others under `tuning:`, "
        "or leave tune out."
    )


def best_architectures(
    candidates: Sequence[TrialRecord], space: Space, most: int
) -> tuple[Architecture, ...]:
    """Architectures to tune: the best by NE, the knee, the rest of the front by NE, then the others, as far as
    they differ in more than what is tuned. Only the search's own candidates count, so that the stage can be
    resumed, and none outside the space, which says what is tuned."""
    left = space.left_for_tuning
    searched = [trial for trial in untuned(candidates) if not trial.outside_space]
    front = pareto_front(searched)
    bend = knee(front)
    ordered = [
        *front[-1:],
        *([bend] if bend else []),
        *reversed(front),
        *sorted(eligible(searched), key=ne_of),
    ]
    architectures: dict[str, Architecture] = {}
    for trial in ordered:
        if len(architectures) == most:
            break
        free = _free(space, trial, left)
        fixed = {name: value for name, value in trial.point.items() if name not in free}
        if free:
            architectures.setdefault(
                fingerprint(_without_dropout(trial.job.model)), Architecture(trial=trial.number, fixed=fixed)
            )
    return tuple(architectures.values())


def least_tuned(best: Sequence[Architecture], candidates: Iterable[TrialRecord]) -> Architecture:
    """The architecture whose turn it is: the first of those that were tuned least often."""
    often = Counter(trial.origin.tuned_from for trial in candidates)
    return min(best, key=lambda architecture: often[architecture.trial])


def _dropouts(space: Space) -> list[Axis]:
    """Axes of dropouts: the model's, and those of modules."""
    all_axes = (space.model_axes, *space.layer_axes.values())
    return [axis for axes in all_axes for key, axis in axes.items() if key.split(".")[-1] == DROPOUT]


def _free(space: Space, trial: TrialRecord, left: Collection[str]) -> set[str]:
    """Names of the tuned axes: training, dropouts, and those left for tuning, of modules in the trial."""
    names = {axis.name for axis in space.training_axes.values()}
    names |= {axis.name for key, axis in space.model_axes.items() if key == DROPOUT or axis.name in left}
    for layer, axes in zip(trial.job.model["layers"], space.layer_axes.values(), strict=False):
        kinds = {module["kind"] for module in layer["modules"]}
        module_axes = {key: axis for key, axis in axes.items() if key.partition(".")[0] in kinds}
        names |= {
            axis.name for key, axis in module_axes.items() if key.endswith(f".{DROPOUT}") or axis.name in left
        }
    return names & {axis.name for axis in space.axes}


def _without_dropout(value: Any) -> Any:
    """Plain data of a model without its dropouts, which are tuned."""
    if isinstance(value, dict):
        return {key: _without_dropout(inner) for key, inner in value.items() if key != DROPOUT}
    return [_without_dropout(inner) for inner in value] if isinstance(value, list) else value
