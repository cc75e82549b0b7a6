"""From a part of the log to all of it: what a search on `training.train_fraction` has selected trains on all rows.

The front's candidates and the baseline become trials of their own (`TrialRecord.promoted_from`), before test is
looked at; from then on the selection is among these alone (`search.study_state`). They are no proposals: the
budget does not count them, samplers and stopping rules do not see them. Whether a ranking on a part of the log
carries over, `dhen-search fidelity` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dhen.config import ModelConfig
from dhen.errors import UserError
from search.config import StudyConfig
from search.execution.jobs import candidate_of, new_record, on_all_rows
from search.execution.passes import Passes
from search.study.baseline import Baseline
from search.study_state import StudyState
from spaces.space import Space
from trials.job import Job, TrainingConfig
from trials.record import TrialKind, TrialRecord

JobOf = Callable[[ModelConfig, TrainingConfig, int], Job]
"""A function that makes the job of a model, its training with what is left open, and a seed: `Trainer.job`."""


def to_promote(state: StudyState) -> tuple[TrialRecord, ...]:
    """Trials on a part of the rows that are to be trained on all: those cut short there, though others have won
    since, the front's candidates by FLOPs, and last the baseline."""
    searched = state.searched
    cut_short = (trial.origin.promoted_from for trial in state.promoted if trial.result.outcome.unfinished)
    begun = [state.trials[number] for number in cut_short if number is not None]
    last = (searched.baseline,) if searched.baseline is not None else ()
    wanted = {trial.number: trial for trial in (*begun, *searched.networks) if trial not in last}
    return (*wanted.values(), *last)


def promotions(
    state: StudyState, config: StudyConfig, space: Space, baseline: Baseline, job: JobOf, passes: Passes
) -> Iterator[tuple[TrialRecord, Job]]:
    """Trials that are still to be trained on all rows.

    The baseline begins last, so that all promotions have ended once none of them runs (`StudyState.selection`).
    """
    for selected in to_promote(state):
        earlier = next(
            (trial for trial in state.promoted if trial.origin.promoted_from == selected.number), None
        )
        if earlier is None or earlier.result.outcome.unfinished:
            whole_job = _whole_log_job(selected, config, space, baseline, job, passes)
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
        UserError: where the baseline did not complete on all rows: then there is nothing to compare with.
    """
    baselines = [trial for trial in state.promoted if trial.kind is TrialKind.BASELINE]
    if state.selection.baseline not in baselines:
        ends = "; ".join(f"{trial.result.outcome}, {trial.result.error}" for trial in baselines)
        raise UserError(
            f"the baseline did not complete on all rows of the log ({ends}), so the candidates selected on a part "
            "of it have nothing to be compared with. Another training.learning_rate, or a study without "
            "training.train_fraction, would show how it trains there."
        )


def _whole_log_job(
    trial: TrialRecord,
    config: StudyConfig,
    space: Space,
    baseline: Baseline,
    job: JobOf,
    passes: Passes,
) -> Job:
    """The job of a trial's configuration, not of its record: what was left open is decided anew for all rows."""
    if trial.kind is TrialKind.BASELINE:
        model, training = baseline.at(trial.point)
        return job(model, training.replace(train_fraction=1.0), config.seed)
    candidate = candidate_of(trial, space)
    return job(candidate.model, on_all_rows(passes.decayed(config.training), candidate), config.seed)
