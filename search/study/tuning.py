"""The baseline that NE is relative to, with a small tuning budget of its own.

The first trial is the configuration as given; further ones vary learning rates, regularisation and, for a
shipped AdvancedDLRM, the embedding dimension and how buckets of numbers enter, drawn at random. If there
are buckets, the second has them apart and is otherwise as given: what candidates may have for one axis, the
baseline may have too. The best on validation is the baseline.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dhen.config import ModelConfig
from dhen.errors import UserError, unknown_name
from dhen.model import catalog, named_model, parse_model
from dhen.schema import FeatureSchema
from dhen.values import fingerprint, load_yaml, parse
from search.analysis.losses import block_sums, blocks_of
from search.analysis.statistics import one_seed_difference
from search.config import CONFIGURATION_KEYS, StudyConfig
from search.execution.budget import untuned
from search.execution.passes import PassFinder
from search.execution.retraining import score_networks
from search.execution.trainer import (
    Trainer,
    candidate_of,
    candidate_training,
    new_record,
    on_all_rows,
    trained_job,
)
from search.selection import eligible, knee, ne_of, pareto_front
from search.study.reuse import WinnerWeights
from search.study_state import StudyState
from spaces.axes import random_value, read_axis
from spaces.space import Candidate, Point, Space
from trials.data.prepared_log import PreparedLog
from trials.records.job import Job, TrainingConfig
from trials.records.trial_record import TrialKind, TrialRecord

TRAINING_AXES: dict[str, Any] = {
    "learning_rate": {"low": 0.001, "high": 0.006, "log": True},
    "embedding_learning_rate": {"low": 0.03, "high": 0.3, "log": True},
    "embedding_decay": {"low": 1e-6, "high": 1e-3, "log": True},
}
MODEL_AXES: dict[str, Any] = {"embedding_dim": [8, 16, 32], "dropout": [0.0, 0.1]}
BUCKETS: dict[str, Any] = {"buckets": ["summed", "apart", "interpolated"]}


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The baseline as given: a model and how it trains."""

    model: ModelConfig
    training: TrainingConfig
    incumbent: bool
    """Whether the architecture stays as it is: true for all but the shipped AdvancedDLRM."""
    bucketed: bool = False
    """Whether there are buckets of numbers to vary."""

    def at(self, point: Point) -> tuple[ModelConfig, TrainingConfig]:
        """The model and the training settings of a point; the empty one is the baseline as given."""
        model = {key: value for key, value in point.items() if not key.startswith("training.")}
        training = {key.removeprefix("training."): value for key, value in point.items() if key not in model}
        return (
            parse_model(self.model.to_dict() | model, "baseline"),
            parse(TrainingConfig, self.training.to_dict() | training, "baseline"),
        )

    def point(self, index: int, seed: int) -> Point:
        """The point of this index: 0 is the baseline as given, the others vary it."""
        if index == 0:
            return {}
        if index == 1 and self.bucketed:
            return {"buckets": "apart"}
        rng = random.Random(f"baseline {seed} {index}")
        axes = {f"training.{key}": spec for key, spec in TRAINING_AXES.items()}
        axes |= {} if self.incumbent else MODEL_AXES
        axes |= BUCKETS if self.bucketed else {}
        return {key: random_value(read_axis(key, spec), rng) for key, spec in axes.items()}


@dataclass(frozen=True, kw_only=True)
class StudyJobs:
    """Makes the jobs of one study; of a model and its training with what is left open, as is known by now."""

    config: StudyConfig
    trainer: Trainer
    space: Space
    baseline: Baseline
    passes: PassFinder
    """The number of passes that trainings have, or what finds it."""

    def of_model(self, model: ModelConfig, training: TrainingConfig) -> Job:
        """The job of training a model as this study trains, from its seed."""
        job = self.trainer.job(model, self.passes.applied(training), self.config.seed)
        return job.replace(period=self.config.next_period)

    def of_baseline(self, point: Point) -> Job:
        """The job of training the baseline at a point."""
        return self.of_model(*self.baseline.at(point))

    def of_candidate(self, candidate: Candidate) -> Job:
        """The job of training a candidate as this study trains candidates."""
        training = candidate_training(self.passes.decayed(self.config.training), candidate)
        return self.of_model(candidate.model, training)

    def on_all_rows(self, trial: TrialRecord) -> Job:
        """The job of a trial's configuration, not of its record: what was left open is decided anew for all
        rows."""
        if trial.kind is TrialKind.BASELINE:
            model, training = self.baseline.at(trial.point)
            return self.of_model(model, training.replace(train_fraction=1.0))
        candidate = candidate_of(trial, self.space)
        training = on_all_rows(self.passes.decayed(self.config.training), candidate)
        return self.of_model(candidate.model, training)


def read_baseline(config: StudyConfig, features: FeatureSchema | None = None) -> Baseline:
    """The study's baseline, with what may be varied of it on a log with these inputs.

    Raises:
        UserError: if `baseline` names neither a shipped model nor a readable configuration.
    """
    if config.baseline in catalog():
        model = named_model(config.baseline)
        incumbent = model.family != "advanced_dlrm"
        bucketed = not incumbent and features is not None and bool(features.bucketed)
        return Baseline(model=model, training=config.training, incumbent=incumbent, bucketed=bucketed)
    path = Path(config.baseline)
    if not path.exists():
        names = ", ".join(sorted(catalog()))
        raise UserError(
            f"baseline {config.baseline!r} is neither a shipped model ({names}) nor a configuration file."
        )
    model, training = read_configuration(path, config.training)
    if training.train_fraction != config.training.train_fraction:
        raise UserError(
            f"{path}: training.train_fraction is {training.train_fraction:g}, the study's "
            f"{config.training.train_fraction:g}: the baseline trains on the rows of its candidates. Leave it out "
            "there, and give it to the study: training.train_fraction=0.25."
        )
    return Baseline(model=model, training=training, incumbent=True)


def read_configuration(path: Path, defaults: TrainingConfig) -> tuple[ModelConfig, TrainingConfig]:
    """A model, or the name of a shipped one, and how it trains, from a YAML file with `model` and (optionally)
    `training`, or a model alone. What `plan` reads there too (`schema`) is left to it.

    Raises:
        UserError: naming the file and the key.
    """
    data = load_yaml(path)
    if isinstance(data, dict) and "model" in data:
        for unknown in sorted(map(str, set(data) - set(CONFIGURATION_KEYS))):
            raise UserError(f"{path}: {unknown_name('key', unknown, CONFIGURATION_KEYS)}")
        of_file = data["model"]
        model = named_model(of_file) if isinstance(of_file, str) else parse_model(of_file, f"{path}: model")
        settings = data.get("training") or {}
        if isinstance(settings, dict):  # `parse` refuses what is no mapping
            settings = defaults.to_dict() | settings
        return model, parse(TrainingConfig, settings, f"{path}: training")
    return parse_model(data, str(path)), defaults


# Tuning, after a search or in turns with it: regularisation and optimisation once more for the few best
# architectures.
#
# Training settings, dropouts, and what the space has left for tuning (`SpaceConfig.tuning`) are tuned. An
# architecture's other axes keep the values of the candidate that it was found with; the sampler of the study
# proposes the tuned ones, by what all candidates have shown. Architectures take turns.

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
    tuned = {axis.name for axis in space.training_axes.values()}
    for axes in (space.model_axes, *space.layer_axes.values()):
        tuned |= {axis.name for key, axis in axes.items() if key.split(".")[-1] == DROPOUT}
    return bool(space.left_for_tuning or tuned & {axis.name for axis in space.axes})


def check_tunable(space: Space) -> None:
    """Raises UserError if the space leaves nothing to tune."""
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


# From a part of the log to all of it: what a search on `training.train_fraction` has selected trains on all
# rows.
#
# The front's candidates and the baseline become trials of their own (`TrialRecord.promoted_from`), before test
# is looked at; from then on the selection is among these alone (`search.study_state`). They are no proposals:
# the budget does not count them, samplers and stopping rules do not see them. Whether a ranking on a part of the
# log carries over, `dhen-search fidelity` measures.


def to_promote(state: StudyState) -> tuple[TrialRecord, ...]:
    """Trials on a part of the rows that are to be trained on all: those cut short there, though others have won
    since, the front's candidates by FLOPs, and last the baseline."""
    searched = state.searched
    cut_short = (trial.origin.promoted_from for trial in state.promoted if trial.result.outcome.unfinished)
    begun = [state.trials[number] for number in cut_short if number is not None]
    last = (searched.baseline,) if searched.baseline is not None else ()
    wanted = {trial.number: trial for trial in (*begun, *searched.networks) if trial not in last}
    return (*wanted.values(), *last)


def promotions(state: StudyState, jobs: StudyJobs) -> Iterator[tuple[TrialRecord, Job]]:
    """Trials that are still to be trained on all rows.

    The baseline begins last, so that all promotions have ended once none of them runs (`StudyState.selection`).
    """
    for selected in to_promote(state):
        earlier = next(
            (trial for trial in state.promoted if trial.origin.promoted_from == selected.number), None
        )
        if earlier is None or earlier.result.outcome.unfinished:
            whole_job = jobs.on_all_rows(selected)
            number = len(state.trials) if earlier is None else earlier.number
            yield (
                new_record(
                    number,
                    selected.kind,
                    selected.point,
                    whole_job,
                    promoted_from=selected.number,
                    proposal=selected.origin.proposal,
                ),
                whole_job,
            )


def require_promoted(state: StudyState) -> None:
    """Checks, once all promotions have ended, that the baseline has completed on all rows.

    Raises:
        UserError: if the baseline did not complete on all rows: then there is nothing to compare with.
    """
    baselines = [trial for trial in state.promoted if trial.kind is TrialKind.BASELINE]
    if state.selection.baseline not in baselines:
        ends = "; ".join(f"{trial.result.outcome}, {trial.result.error}" for trial in baselines)
        raise UserError(
            f"the baseline did not complete on all rows of the log ({ends}), so the candidates selected on a part "
            "of it have nothing to be compared with. Another training.learning_rate, or a study without "
            "training.train_fraction, would show how it trains there."
        )


# The smallest difference of NE that a log can show: between the two best candidates, over its validation rows.
#
# Both are scored on validation once more, for the logits, which averages need anyway. The difference between
# them varies from block of rows to block of rows; what that says of the whole split is what no number of seeds
# can better. Seeds come on top, so that a comparison of single trainings shows less than this.

SPLIT = "validation"
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SmallestDifference:
    """Measures the smallest detectable difference of one study, as often as it is asked for."""

    config: StudyConfig
    log: PreparedLog
    state: StudyState
    trainer: Trainer
    weights: WinnerWeights
    known: dict[tuple[int, ...], float] = field(default_factory=dict)
    """What was measured, by the numbers of the two networks."""

    def __call__(self) -> float | None:
        """The difference relative to NE (0.001 is 0.1 %) that four of five comparisons of two networks like the
        best would find; None while fewer than two of the best have weights."""
        selection = self.state.selection
        different = {trial.job.fingerprint: trial for trial in (*selection.runners_up, *selection.networks)}
        by_ne = sorted(eligible(different.values()), key=ne_of)
        pair = [trial for trial in by_ne[:3] if self.weights.has(trial)][:2]
        if len(pair) < 2:
            return None
        numbers = tuple(network.number for network in pair)
        if numbers in self.known:
            return self.known[numbers]
        missing = [network for network in pair if not self.weights.have_logits(network, SPLIT)]
        requests = [(network, trained_job(network, self.log)) for network in missing]
        try:
            score_networks(requests, SPLIT, self.trainer, lambda network, metrics: None, keep_logits=True)
            split, rate = self.log.split(SPLIT), self.log.schema.negative_sampling_rate
            blocks = blocks_of(self.log, split, self.config.block_by)
            best_K, second_K = (
                block_sums([self.weights.logits(network, SPLIT)], split=split, rate=rate, blocks=blocks)
                for network in pair
            )
        except UserError as error:
            LOG.info("the smallest detectable difference is not known: %s", error)
            return None
        self.known[numbers] = one_seed_difference(best_K, second_K).detectable() / 100.0
        LOG.info("trials %s differ detectably by %g", numbers, self.known[numbers])
        return self.known[numbers]
