"""A study from its first trial to its report: the baseline, the candidates, the winners.

One driver, several trials side by side, each in a process of its own. Whatever moment the driver ends at, the same
command goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dashboards.sentences.warm import warm_starts
from dhen.errors import UserError
from search.analysis.losses import blocks_of
from search.config import StudyConfig
from search.execution.parallelism import slots
from search.execution.reduce_events import cut_short
from search.execution.retraining import SPLIT
from search.execution.trainer import Trainer, candidate_training, new_record
from search.planning.admission import Admission, Upcoming
from search.planning.attempts import execution, ranks_here
from search.planning.serving_gate import side_by_side
from search.planning.space_fits import check_some_fit
from search.reuse.earlier import Earlier
from search.reuse.elsewhere import Elsewhere
from search.reuse.kept_weights import KeptWeights
from search.reuse.shared_results import Reuse
from search.reuse.warm_start import Reused, read_reused
from search.run_directory import database_url, study_name
from search.samplers.ask_tell import Proposals
from search.samplers.context import UNFINISHED
from search.samplers.static_cost import Appraiser
from search.stopping import stopping_rule
from search.study.baseline import Baseline, read_baseline
from search.study.budget import Budget
from search.study.finalize import Finals
from search.study.full_data import promotions, require_promoted
from search.study.news import News
from search.study.parts import Parts
from search.study.retune import best_architectures, check_tunable, least_tuned, untuned
from search.study.settings import Facts, check_training_axes
from search.study.trainings import Trainings
from search.study_state import Standing
from spaces.catalog_loader import load_space
from spaces.space import Candidate, Point, Space
from trials.data.cache import PreparedLog
from trials.events import Progress
from trials.job import Job
from trials.processes.launcher import AnyLauncher
from trials.record import Outcome, StudyRecord, TrialKind, TrialRecord
from trials.storage.ledger import Ledger

Watcher = Callable[["Study"], None]
"""Called at every change and about ten times a second between; takes in what it likes of the study."""


class Study:
    """The driver of one study in one run directory."""

    def __init__(
        self,
        config: StudyConfig,
        directory: Path,
        log: PreparedLog,
        launcher: AnyLauncher,
        *watchers: Watcher,
    ) -> None:
        """Opens the study's database.

        Raises:
            UserError: for an impossible space, an unknown sampler, rule or baseline, a database out of reach,
                or a database that holds another study of this name.
        """
        self._config, self._log, self._watchers = config, log, watchers
        self._space: Space = load_space(config.space, log.features)
        self._baseline: Baseline = read_baseline(config, log.features)
        _check(config, self._space, log)
        stopping = stopping_rule(config.stopping)
        self._appraiser = Appraiser(self._space, log.features, self._fits, config.serving)
        self._proposals = Proposals(sampler=config.sampler, seed=config.seed, appraiser=self._appraiser)
        self._ledger = Ledger(database_url(directory, config.storage), study_name(directory, config.name))
        parallel, threads = slots(side_by_side(config), config.threads, ranks_here(config))
        shares = {"side_by_side": parallel, "threads": threads}
        self._facts = Facts(self._ledger, config, directory, log, self._space, **shares)
        self.setting = self._facts.setting
        """What its trials have in common."""
        known = map(cut_short, self._ledger.trials())
        self._standing = Standing(self._facts.head, known, averages=config.averages > 0)
        self._budget = Budget(config, self._standing, spent=self._facts.had_finished)
        self._trainer = Trainer(
            launcher,
            log,
            directory,
            threads=threads,
            precision=self._facts.precision,
            execution=execution(config, self._facts.cluster),
        )
        self._admission = Admission(config, self._facts.cluster, self._trainer, self._standing)
        self._earlier = self._earlier_studies()
        self._proposals.remember([*self._earlier.records, *self._standing.candidates])
        self._check_trials()
        self._elsewhere = Elsewhere(self._earlier, self._shared_ledger())
        self._weights = KeptWeights(self._trainer, self._standing, self._elsewhere)
        self.news = News(self._tell_watchers)
        self.news.notices += warm_starts(self._standing.head)
        parts = Parts(
            config=config,
            log=log,
            ledger=self._ledger,
            standing=self._standing,
            trainer=self._trainer,
            admission=self._admission,
            elsewhere=self._elsewhere,
            weights=self._weights,
            news=self.news,
            parallel=parallel,
        )
        self._trainings = Trainings(parts, self._proposals, stopping)
        self._finals = Finals(parts, self._trainings)

    def run(self) -> StudyRecord:
        """Trains what is still to be trained, scores the winners on test; the study's record."""
        self._facts.note(finished=False)
        try:
            self._trainings.train(self._baseline_trials())
            self._standing.require_baseline()
            self._trainings.train(self._candidate_trials())
            self._trainings.train(self._tuning_trials())
            self._trainings.deciding = False  # from here on no sampler and no stopping rule sees anything
            self._promote()
            self._finals.recover_weights()
            self._finals.make_averages()
            self._finals.score_winners()
            self._finals.confirm_winners()
            self._facts.note(finished=True)
        except BaseException as error:
            self._trainings.break_off(resumable=isinstance(error, KeyboardInterrupt))
            raise
        finally:
            self._standing.head = self._facts.head.replace(running=False)
            self._ledger.close()
            self._elsewhere.close()
        self.news.tell()
        return self.record()

    def record(self) -> StudyRecord:
        """The study as it stands."""
        return self._standing.record().replace(**self._finals.confirmed)

    @property
    def progress(self) -> dict[int, Progress]:
        """What the trainings that run last said, by trial."""
        return self._trainings.progress

    @property
    def finished(self) -> bool:
        """Whether the budget is spent and the winners are scored."""
        return self._standing.head.finished

    def _check_trials(self) -> None:
        """Before any trial: the ranks can share a batch, and there is a candidate that fits."""
        next(self._baseline_trials(), None)
        if not self._standing.candidates:
            check_some_fit(
                self._appraiser, self._facts.cluster, lambda each: self._admission.plan(self._job(each))
            )

    def _earlier_studies(self) -> Earlier:
        """What this study was started from, as it was when it began."""
        if not self._config.warm_start:
            return Earlier(Reused(), self._space, self._job)

        def read() -> dict[str, Any]:
            plan = self._admission.planned_by_size
            return read_reused(self._config, self._log, self._space, self._job, plan).to_dict()

        reused = Reused.model_validate(self._facts.once("warm_start", read))
        self._facts.head = self._facts.head.replace(earlier=reused.studies)
        self._standing.head = self._facts.head
        return Earlier(reused, self._space, self._job)

    def _baseline_trials(self) -> Iterator[Upcoming]:
        for index in range(self._config.baseline_trials):
            known = self._standing.trials.get(index)
            if known is None or known.outcome in UNFINISHED:
                point, model, training = self._baseline.variant(index, self._config.seed)
                job = self._trainer.job(model, training, self._config.seed)
                yield self._admission.planned(new_record(index, TrialKind.BASELINE, point, job), job)

    def _candidate_trials(self) -> Iterator[Upcoming]:
        """What was cut short, then new proposals until the budget is spent."""
        baseline = self._standing.require_baseline()
        for record in self._standing.candidates:
            if record.outcome in UNFINISHED:
                yield self._candidate(
                    record.number, record.point, record.sampler_notes, tuned_from=record.tuned_from
                )
        while not self._budget.search_is_over(self._trainings.fruitless):
            number = len(self._standing.trials)
            candidates = self._standing.candidates
            start = self._space.start_point(len(untuned(candidates)), baseline.training)
            start = start or self._earlier.start({trial.fingerprint for trial in candidates})
            yield self._candidate(number, *self._proposals.ask(number, start, self._space.left_for_tuning))

    def _tuning_trials(self) -> Iterator[Upcoming]:
        """The best architectures with other training settings, once every candidate of the search has ended."""
        best = best_architectures(self._standing.candidates, self._space, self._config.tune_best)
        while best and not self._budget.tuning_is_over():
            number, architecture = len(self._standing.trials), least_tuned(best, self._standing.candidates)
            proposed = self._proposals.ask(number, {}, architecture.fixed)
            yield self._candidate(number, *proposed, tuned_from=architecture.trial)

    def _candidate(
        self, number: int, point: Point, notes: dict[str, int], *, tuned_from: int | None = None
    ) -> Upcoming:
        known = {"sampler_notes": notes, "tuned_from": tuned_from}
        try:
            candidate = self._space.decode(point)
        except UserError as error:
            return _infeasible(number, point, str(error)).replace(**known), None
        job = self._job(candidate)
        record = new_record(number, TrialKind.CANDIDATE, point, job)
        return self._admission.planned(record.replace(**known), job)

    def _job(self, candidate: Candidate) -> Job:
        training = candidate_training(self._config.training, candidate)
        return self._trainer.job(candidate.model, training, self._config.seed)

    def _promote(self) -> None:
        """Where the search has seen a part of the log, what it selected is trained on all of it."""
        if self._config.training.train_fraction < 1.0:
            wanted = promotions(self._standing, self._config, self._space, self._baseline, self._trainer.job)
            self._trainings.train(self._admission.planned(*each) for each in wanted)
            require_promoted(self._standing)

    def _fits(self, candidate: Candidate) -> bool:
        """Whether a plan makes it fit on the study's cluster."""
        try:
            return self._admission.plan(self._job(candidate)).chosen is not None
        except UserError:
            return False

    def _tell_watchers(self) -> None:
        for watcher in self._watchers:
            watcher(self)

    def _shared_ledger(self) -> Reuse | None:
        """With what this study has trained and others may not know yet; None where it has none."""
        if self._config.ledger is None:
            return None
        reuse = Reuse(self._config.ledger, self._ledger, self._facts.shared_name, self.setting)
        ended = (trial for trial in self._standing.trials.values() if trial.outcome not in UNFINISHED)
        reuse.publish_missing([trial for trial in ended if trial.attempts])
        return reuse


def _check(config: StudyConfig, space: Space, log: PreparedLog) -> None:
    """That the settings go together, before anything is opened."""
    check_training_axes(space, config.training)
    if config.tune:
        check_tunable(space)
    if config.confirm or config.block_by:
        blocks_of(log, log.split(SPLIT), config.block_by)


def _infeasible(number: int, point: Point, error: str) -> TrialRecord:
    return TrialRecord(
        number=number,
        kind=TrialKind.CANDIDATE,
        outcome=Outcome.INFEASIBLE,
        fingerprint="",
        point=point,
        model={},
        training={},
        error=error,
        seconds=0.0,
    )
