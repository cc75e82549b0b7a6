"""A study from its first trial to its report: the baseline, the candidates, the winners.

One driver, several trials side by side, each in a process of its own. The ledger commits first, then the
sampler is told; whatever moment the driver ends at, the same command goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dashboards.warm import warm_starts
from dhen.errors import UserError
from search.absorb import cut_short
from search.activity import Training, look
from search.appraisal import Appraiser
from search.baseline import Baseline, read_baseline
from search.budget import Budget
from search.config import StudyConfig
from search.directory import database_url, study_name
from search.earlier import Earlier
from search.execution import execution, margin_bytes, ranks_here
from search.facts import Facts, check_training_axes
from search.finals import Driver, Finals
from search.objective import Trainer, candidate_training, new_record
from search.planning import plan_of, planned
from search.promotion import promotions, require_promoted
from search.proposals import Proposals
from search.reuse import Reuse
from search.samplers.known import UNFINISHED
from search.serving import Serving, side_by_side
from search.slots import slots
from search.standing import Standing
from search.stopping import stopping_rule
from search.stopping.rule import Rule, first_stop
from search.tuning import best_architectures, check_tunable, least_tuned, untuned
from search.warm_start import Reused, read_reused
from search.warm_tables import check_has_tables, tables_owner
from search.weights import KeptWeights
from spaces.load import load_space
from spaces.space import Candidate, Point, Space
from trials.data.cache import PreparedLog
from trials.events import Progress
from trials.job import Job
from trials.launcher import POLL_SECONDS, AnyLauncher
from trials.ledger import Ledger
from trials.record import Outcome, StudyRecord, TrialKind, TrialRecord

AGAIN = (Outcome.OUT_OF_MEMORY, Outcome.INTERRUPTED)
"""Ends of an attempt after which there may be another."""

SHARED = (Outcome.COMPLETED, Outcome.STOPPED)
"""Ends that hold for an equal network too."""

Watcher = Callable[["Study"], None]
"""Called at every change and about ten times a second between; takes in what it likes of the study."""
Upcoming = tuple[TrialRecord, Job | None]
"""A trial that comes up; without a job where its point gives no model, or one that is not to be trained."""


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
        self._baseline: Baseline = read_baseline(config)
        check_training_axes(self._space, config.training)
        if config.tables_from is not None:
            check_has_tables(self._baseline.model, log.features)
        if config.tune:
            check_tunable(self._space)
        self._stopping: Rule = stopping_rule(config.stopping)
        self._proposals = Proposals(
            sampler=config.sampler,
            seed=config.seed,
            appraiser=Appraiser(self._space, log.features, self._fits, config.serving),
            stopped_as=config.stopped_as,
        )
        name = study_name(directory, config.name)
        self._ledger = Ledger(database_url(directory, config.storage), name)
        self._parallel, threads = slots(side_by_side(config), config.threads, ranks_here(config))
        shares = {"side_by_side": self._parallel, "threads": threads}
        self._facts = Facts(self._ledger, config, directory, log, self._space, **shares)
        self._standing = Standing(
            self._facts.head, map(cut_short, self._ledger.trials()), averages=config.averages > 0
        )
        self._budget = Budget(config, self._standing, spent=self._facts.had_finished)
        self._trainer = Trainer(
            launcher,
            log,
            directory,
            threads=threads,
            precision=self._facts.precision,
            execution=execution(config, self._facts.cluster),
        )
        self._serving = Serving(config.serving, self._trainer, self._standing.trials.values())
        self._margin_bytes = margin_bytes(self._standing.trials.values())
        self._tables: TrialRecord | None = None
        self._earlier = self._earlier_studies()
        self._proposals.remember([*self._earlier.records, *self._standing.candidates])
        next(
            self._baseline_trials(), None
        )  # a batch that the ranks cannot share is an error before any trial
        self.setting = self._facts.setting
        """What its trials have in common."""
        latest_first = sorted(self._standing.trials.items(), reverse=True)
        self._known = {trial.fingerprint: trial for _, trial in latest_first if trial.outcome in SHARED}
        self._running: dict[int, Training] = {}
        self._waiting: list[tuple[TrialRecord, Job]] = []
        self._fruitless = 0
        self._deciding = True
        self._reuse = self._shared_ledger() if config.ledger else None
        self._weights = KeptWeights(self._trainer, self._standing, self._earlier, self._reuse)
        self._confirmed: dict[str, Any] = {
            "retrainings": tuple(self._ledger.retrainings()),
            "comparisons": self._ledger.comparisons(),
        }
        self.changes = 0
        """Grows with every change of the record."""
        self.ended: list[int] = []
        """Numbers of the trials that this driver has seen end, in that order."""
        self.notices: list[str] = []
        """What there is to say beside how trials end."""
        self.notices += warm_starts(self._standing.head)

    def run(self) -> StudyRecord:
        """Trains what is still to be trained, scores the winners on test; the study's record."""
        self._facts.note(finished=False)
        finals = self._finals()
        try:
            self._train(self._baseline_trials())
            self._require_baseline()
            self._provide_tables(finals)
            self._train(self._candidate_trials())
            self._train(self._tuning_trials())
            self._deciding = False  # from here on no sampler and no stopping rule sees anything
            self._promote()
            finals.recover_weights()
            finals.make_averages()
            finals.score_winners()
            finals.confirm_winners(self._confirmed)
            self._facts.note(finished=True)
        except BaseException as error:
            self._break_off(resumable=isinstance(error, KeyboardInterrupt))
            raise
        finally:
            self._standing.head = self._facts.head.model_copy(update={"running": False})
            self._ledger.close()
            if self._reuse is not None:
                self._reuse.close()
        self._tell_watchers()
        return self.record()

    def record(self) -> StudyRecord:
        """The study as it stands."""
        return self._standing.record().model_copy(update=self._confirmed)

    @property
    def finished(self) -> bool:
        """Whether the budget is spent and the winners are scored."""
        return self._standing.head.finished

    @property
    def progress(self) -> dict[int, Progress]:
        """What the trainings that run last said, by trial."""
        return {number: t.progress for number, t in self._running.items() if t.progress is not None}

    def _earlier_studies(self) -> Earlier:
        """What this study was started from, as it was when it began."""
        if not self._config.warm_start:
            return Earlier(Reused(), self._space, self._job)

        def plan(record: TrialRecord, job: Job) -> TrialRecord:
            cluster, prefer = self._facts.cluster, self._config.prefer
            record = planned(record, job, cluster, prefer, margin_bytes=self._margin_bytes)
            return self._serving.judged_by_size(record)

        def read() -> dict[str, Any]:
            return read_reused(self._config, self._log, self._space, self._job, plan).to_dict()

        reused = Reused.model_validate(self._facts.once("warm_start", read))
        self._facts.head = self._facts.head.model_copy(update={"earlier": reused.studies})
        self._standing.head = self._facts.head
        return Earlier(reused, self._space, self._job)

    def _baseline_trials(self) -> Iterator[Upcoming]:
        for index in range(self._config.baseline_trials):
            known = self._standing.trials.get(index)
            if known is None or known.outcome in UNFINISHED:
                point, model, training = self._baseline.variant(index, self._config.seed)
                job = self._trainer.job(model, training, self._config.seed)
                yield self._planned(new_record(index, TrialKind.BASELINE, point, job), job)

    def _require_baseline(self) -> None:
        if self._standing.verdict.baseline is None:
            errors = {trial.error for trial in self._standing.trials.values() if trial.error}
            raise UserError(f"no training of the baseline completed: {'; '.join(sorted(errors))}.")

    def _provide_tables(self, finals: Finals) -> None:
        """Those that candidates start from, if not from fresh ones; fetched, or trained here again."""
        if self._config.tables_from is None:
            return
        self._deciding = False
        while not self._weights.has(owner := tables_owner(self._standing)):
            finals.train_again([owner], "has the tables, its weights are gone: trained here again")
            self._require_baseline()
        self._deciding = True
        self._tables = self._weights.lender = owner
        self._trainer.weights[owner.fingerprint] = self._weights.file(owner)

    def _candidate_trials(self) -> Iterator[Upcoming]:
        """What was cut short, then new proposals until the budget is spent."""
        baseline = self._standing.verdict.baseline
        assert baseline is not None
        for record in self._standing.candidates:
            if record.outcome in UNFINISHED:
                yield self._candidate(
                    record.number, record.point, record.sampler_notes, tuned_from=record.tuned_from
                )
        while not self._budget.search_is_over(self._fruitless):
            number = len(self._standing.trials)
            candidates = self._standing.candidates
            start = self._space.start_point(len(untuned(candidates)), baseline.training)
            start = start or self._earlier.start({trial.fingerprint for trial in candidates})
            yield self._candidate(number, *self._proposals.ask(number, start))

    def _tuning_trials(self) -> Iterator[Upcoming]:
        """The best architectures with other training settings, once every candidate of the search has ended."""
        best = best_architectures(self._standing.candidates, self._space, self._config.tune_best)
        while best and not self._budget.tuning_is_over():
            number, architecture = len(self._standing.trials), least_tuned(best, self._standing.candidates)
            proposed = self._proposals.ask(number, architecture.fixed, start_is_fixed=True)
            yield self._candidate(number, *proposed, tuned_from=architecture.trial)

    def _candidate(
        self, number: int, point: Point, notes: dict[str, int], *, tuned_from: int | None = None
    ) -> Upcoming:
        known = {"sampler_notes": notes, "tuned_from": tuned_from}
        try:
            candidate = self._space.decode(point)
        except UserError as error:
            return _infeasible(number, point, str(error)).model_copy(update=known), None
        job = self._job(candidate)
        record = new_record(number, TrialKind.CANDIDATE, point, job)
        return self._planned(record.model_copy(update=known), job)

    def _job(self, candidate: Candidate) -> Job:
        training = candidate_training(self._config.training, candidate)
        job = self._trainer.job(candidate.model, training, self._config.seed)
        return job.model_copy(update={"tables_from": self._tables.fingerprint}) if self._tables else job

    def _promote(self) -> None:
        """Where the search has seen a part of the log, what it selected is trained on all of it."""
        if self._config.training.train_fraction < 1.0:
            wanted = promotions(self._standing, self._config, self._space, self._baseline, self._trainer.job)
            self._train(self._planned(*each) for each in wanted)
            require_promoted(self._standing)

    def _fits(self, candidate: Candidate) -> bool:
        """Whether a plan makes it fit on the study's cluster."""
        try:
            found = plan_of(
                self._job(candidate), self._facts.cluster, self._config.prefer, self._margin_bytes
            )
        except UserError:
            return False
        return found.chosen is not None

    def _planned(self, record: TrialRecord, job: Job) -> Upcoming:
        """With its plan for the study's cluster; one that fits nowhere or is over a limit of serving has ended."""
        known = self._standing.trials.get(record.number)
        if known is not None and known.attempts:
            again = self._trainer.execution.next_attempt(known, job, self._config.prefer)
            if again is not None:
                return again, job
        record = planned(
            record, job, self._facts.cluster, self._config.prefer, margin_bytes=self._margin_bytes
        )
        record = self._serving.judged(record, job)
        return record, job if record.outcome is Outcome.RUNNING else None

    def _train(self, upcoming: Iterator[Upcoming]) -> None:
        """Works off what comes up, side by side as far as there is room; a trial is made when it can start."""
        while True:
            room = max(len(self._running), len(self._waiting)) < self._parallel
            trial = next(upcoming, None) if room else None
            if trial is not None:
                self._place(*trial)
            elif not self._running:
                return
            self._look(0.0 if trial is not None else POLL_SECONDS)

    def _place(self, record: TrialRecord, job: Job | None) -> None:
        """Trains what is new; an equal network's result is shared, and waited for where it still trains."""
        self._fruitless += 1
        known = self._known.get(record.fingerprint)
        if job is None:
            self._end(record)
        elif known is not None and known.owner != record.number:
            self._end(_reused(record, known))
        elif (done := self._done_elsewhere(record)) is not None:
            self._end(done)
            self._fruitless = 0
        else:
            self._note(record)
            if any(training.record.fingerprint == job.fingerprint for training in self._running.values()):
                self._waiting.append((record, job))
            else:
                self._running[record.number] = self._trainer.start(record, job)
                self._fruitless = 0

    def _look(self, seconds: float) -> None:
        """Takes in what the trainings say; those that have ended make room, and their twins need not wait."""
        for training in look(list(self._running.values()), seconds):
            record = training.record
            stopped = self._stopped(training)
            if stopped is None and not training.run.ended:
                if record is not self._standing.trials[record.number]:
                    self._standing.note(record)
                    self.changes += 1
                    if record.kind is TrialKind.CANDIDATE:
                        self._proposals.note(record)
                continue
            del self._running[record.number]
            if stopped is None and record.outcome in AGAIN and self._try_again(record, training.job):
                continue
            self._end(stopped or record)
            waiting, self._waiting = self._waiting, []
            for twin, job in waiting:
                self._place(twin, job)
        self._tell_watchers()

    def _stopped(self, training: Training) -> TrialRecord | None:
        """How it ends where the stopping rule gives it up at an evaluation that is new; then it has been ended."""
        record, before = training.record, self._standing.trials[training.record.number]
        if record.kind is not TrialKind.CANDIDATE or not self._deciding:
            return None
        news = {"curve": record.curve, "executed_technique": record.executed_technique}
        trials = [trial for trial in self._standing.trials.values() if trial.promoted_from is None]
        stopped = first_stop(self._stopping, before.model_copy(update=news), len(before.curve), trials)
        return training.stop(stopped) if stopped is not None else None

    def _try_again(self, record: TrialRecord, job: Job) -> bool:
        """What ran out of memory goes on with the next strategy, if there is one; what was killed, as it was."""
        self._margin_bytes = max(self._margin_bytes, margin_bytes([record]))
        again = self._trainer.execution.next_attempt(record, job, self._config.prefer)
        if again is None:
            return False
        self._note(again)
        self._running[record.number] = self._trainer.start(again, job)
        return True

    def _end(self, record: TrialRecord) -> None:
        """Ledger first, then the sampler, then other studies."""
        self._note(record)
        if record.kind is TrialKind.CANDIDATE and self._deciding:
            self._proposals.tell(record)
        if record.outcome in SHARED:
            self._known.setdefault(record.fingerprint, record)
        if self._reuse is not None and record.attempts:
            self._reuse.publish(record)
        for twin in [] if self._deciding else list(self._standing.trials.values()):
            if twin.reused_from == record.number:
                self._note(_reused(twin, record).model_copy(update={"test": None}))
        self._weights.keep(record)
        if self._deciding:
            self._weights.drop(self._running)
        self.ended.append(record.number)

    def _note(self, record: TrialRecord) -> None:
        self._ledger.save(record)
        self._standing.note(record)
        self.changes += 1

    def _tell_watchers(self) -> None:
        for watcher in self._watchers:
            watcher(self)

    def _break_off(self, *, resumable: bool) -> None:
        """Ends what runs; the ledger hears of it where it can be relied on."""
        for training in self._running.values():
            training.run.kill()
        if resumable:
            going = [training.record for training in self._running.values()]
            for record in going + [record for record, _ in self._waiting]:
                self._note(cut_short(record))

    def _shared_ledger(self) -> Reuse:
        """With what this study has trained and others may not know yet."""
        assert self._config.ledger is not None
        reuse = Reuse(self._config.ledger, self._ledger, self._facts.shared_name, self.setting)
        ended = (trial for trial in self._standing.trials.values() if trial.outcome not in UNFINISHED)
        reuse.publish_missing([trial for trial in ended if trial.attempts])
        return reuse

    def _done_elsewhere(self, record: TrialRecord) -> TrialRecord | None:
        """With the result of another study; not once the winners are known, of whom weights are wanted."""
        if not self._deciding:
            return None
        known = self._reuse.result(record) if self._reuse is not None else None
        return known or self._earlier.result(record)

    def _finals(self) -> Finals:
        """What is done once candidates are decided on."""

        def note(record: TrialRecord) -> None:
            self._note(record)
            self._tell_watchers()

        def say(sentence: str) -> None:
            self.notices.append(sentence)
            self.changes += 1
            self._tell_watchers()

        driver = Driver(
            train=self._train,
            planned=self._planned,
            require_baseline=self._require_baseline,
            end=self._end,
            note=note,
            say=say,
        )
        own = self._config, self._log, self._ledger, self._standing, self._trainer, self._weights
        return Finals(*own, driver, parallel=self._parallel)


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


def _reused(record: TrialRecord, known: TrialRecord) -> TrialRecord:
    """The record of a trial whose network has been trained already."""
    own = {"number", "kind", "point", "started_at", "test", "sampler_notes", "attempts", "reused_from_study"}
    own |= {"promoted_from", "tuned_from"}
    shared = {name: getattr(known, name) for name in type(known).model_fields if name not in own}
    return record.model_copy(update=shared | {"reused_from": known.owner, "seconds": 0.0})
