"""A study from its first trial to its report: the baseline, the candidates, the winners.

One driver, several trials side by side, each in a process of its own. The ledger commits first, then the
sampler is told; whatever moment the driver ends at, the same command goes on from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from dhen.errors import UserError
from dhen.values import parse
from search.absorb import cut_short
from search.activity import Training, look
from search.baseline import Baseline, read_baseline
from search.config import StudyConfig
from search.directory import database_url, study_name
from search.execution import execution, margin_bytes, next_strategy, ranks_here
from search.export import trained_job
from search.facts import Facts, check_training_axes
from search.objective import CHECKPOINTS, Trainer, new_record
from search.planning import plan_of, planned
from search.proposals import UNFINISHED, Proposals
from search.slots import slots
from search.standing import Standing
from spaces.load import load_space
from spaces.space import Point, Space
from trials.data.cache import PreparedLog
from trials.events import WEIGHTS, Progress
from trials.job import Job, TrainingConfig
from trials.launcher import POLL_SECONDS, Launcher
from trials.ledger import Ledger
from trials.record import Outcome, StudyRecord, TrialKind, TrialRecord

NOTHING_NEW = 100
"""Proposals in a row that needed no training, after which a study without a number of trials ends."""

Watcher = Callable[["Study"], None]
"""Called at every change and about ten times a second between; takes in what it likes of the study."""
Upcoming = tuple[TrialRecord, Job | None]
"""A trial that comes up; without a job where its point gives no model, or one that fits nowhere."""


class Study:
    """The driver of one study in one run directory."""

    def __init__(
        self,
        config: StudyConfig,
        directory: Path,
        log: PreparedLog,
        launcher: Launcher,
        *watchers: Watcher,
    ) -> None:
        """Opens the study's database.

        Raises:
            UserError: for an impossible space, an unknown sampler or baseline, a database out of reach,
                or a database that holds another study of this name.
        """
        self._config, self._log, self._watchers = config, log, watchers
        self._space: Space = load_space(config.space)
        self._baseline: Baseline = read_baseline(config)
        check_training_axes(self._space, config.training)
        self._proposals = Proposals(space=self._space, sampler=config.sampler, seed=config.seed)
        name = study_name(directory, config.name)
        self._ledger = Ledger(database_url(directory, config.storage), name)
        self._parallel, threads = slots(config.parallel, config.threads, ranks_here(config))
        self._facts = Facts(self._ledger, config, directory, log, self._space, side_by_side=self._parallel)
        self._standing = Standing(self._facts.head, map(cut_short, self._ledger.trials()))
        self._proposals.remember(self._standing.candidates)
        self._trainer = Trainer(
            launcher,
            log,
            directory,
            threads=threads,
            precision=self._facts.precision,
            execution=execution(config, self._facts.cluster),
        )
        self._margin_bytes = margin_bytes(self._standing.trials.values())
        next(
            self._baseline_trials(), None
        )  # a batch that the ranks cannot share is an error before any trial
        self._known = {trial.fingerprint: trial for trial in reversed(self._standing.completed)}
        self._running: dict[int, Training] = {}
        self._waiting: list[tuple[TrialRecord, Job]] = []
        self._with_weights = set(self._standing.trials)
        self._fruitless = 0
        self.changes = 0
        """Grows with every change of the record."""
        self.ended: list[int] = []
        """Numbers of the trials that this driver has seen end, in that order."""

    def run(self) -> StudyRecord:
        """Trains what is still to be trained, scores the winners on test; the study's record."""
        self._facts.note(finished=False)
        try:
            self._train(self._baseline_trials())
            self._require_baseline()
            self._train(self._candidate_trials())
            self._score_winners()
            self._facts.note(finished=True)
        except BaseException as error:
            self._break_off(resumable=isinstance(error, KeyboardInterrupt))
            raise
        finally:
            self._standing.head = self._facts.head.model_copy(update={"running": False})
            self._ledger.close()
        self._tell_watchers()
        return self.record()

    def record(self) -> StudyRecord:
        """The study as it stands."""
        return self._standing.record()

    @property
    def finished(self) -> bool:
        """Whether the budget is spent and the winners are scored."""
        return self._standing.head.finished

    @property
    def progress(self) -> dict[int, Progress]:
        """What the trainings that run last said, by trial."""
        return {number: t.progress for number, t in self._running.items() if t.progress is not None}

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

    def _candidate_trials(self) -> Iterator[Upcoming]:
        """What was cut short, then new proposals until the budget is spent."""
        baseline = self._standing.verdict.baseline
        assert baseline is not None
        for record in self._standing.candidates:
            if record.outcome in UNFINISHED:
                yield self._candidate(record.number, record.point, record.sampler_notes)
        while not self._spent():
            number = len(self._standing.trials)
            start = self._space.start_point(len(self._standing.candidates), baseline.training)
            yield self._candidate(number, *self._proposals.ask(number, start))

    def _candidate(self, number: int, point: Point, notes: dict[str, int]) -> Upcoming:
        try:
            candidate = self._space.decode(point)
        except UserError as error:
            return _infeasible(number, point, notes, str(error)), None
        training = parse(TrainingConfig, self._config.training.to_dict() | candidate.training, "space")
        job = self._trainer.job(candidate.model, training, self._config.seed)
        record = new_record(number, TrialKind.CANDIDATE, point, job)
        return self._planned(record.model_copy(update={"sampler_notes": notes}), job)

    def _planned(self, record: TrialRecord, job: Job) -> Upcoming:
        """With its plan for the study's cluster; one that fits nowhere has ended and is not trained."""
        known = self._standing.trials.get(record.number)
        if known is not None and known.attempts:
            again = self._next_attempt(known.model_copy(update={"outcome": Outcome.RUNNING}), job)
            if again is not None:
                return again, job
        record = planned(
            record, job, self._facts.cluster, self._config.prefer, margin_bytes=self._margin_bytes
        )
        return record, None if record.outcome is Outcome.INFEASIBLE else job

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
        elif known is not None:
            self._end(_reused(record, known))
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
            if not training.run.ended:
                if record is not self._standing.trials[record.number]:
                    self._standing.note(record)
                    self.changes += 1
                continue
            del self._running[record.number]
            if record.outcome is Outcome.OUT_OF_MEMORY and self._try_again(record, training.job):
                continue
            self._end(record)
            waiting, self._waiting = self._waiting, []
            for twin, job in waiting:
                self._place(twin, job)
        self._tell_watchers()

    def _try_again(self, record: TrialRecord, job: Job) -> bool:
        """What ran out of memory goes on with the next strategy, if there is one."""
        self._margin_bytes = max(self._margin_bytes, margin_bytes([record]))
        again = self._next_attempt(record, job)
        if again is None:
            return False
        self._note(again)
        self._running[record.number] = self._trainer.start(again, job)
        return True

    def _next_attempt(self, record: TrialRecord, job: Job) -> TrialRecord | None:
        """The record as it begins its next attempt; None where the last ended otherwise, or none is left."""
        if (
            self._trainer.execution.cluster is None
            or record.attempts[-1].outcome is not Outcome.OUT_OF_MEMORY
        ):
            return None
        found = plan_of(job, self._facts.cluster, self._config.prefer, 0)
        strategy = next_strategy(found, record.attempts)
        if strategy is None:
            return None
        return record.model_copy(
            update={
                "outcome": Outcome.RUNNING,
                "planned_technique": strategy.strategy.name,
                "predicted_peak_bytes": strategy.memory.total,
                "predicted_step_seconds": strategy.time.total,
                "error": None,
                "curve": (),
            }
        )

    def _end(self, record: TrialRecord) -> None:
        """Ledger first, then the sampler."""
        self._note(record)
        if record.kind is TrialKind.CANDIDATE:
            self._proposals.tell(record)
        if record.outcome is Outcome.COMPLETED:
            self._known.setdefault(record.fingerprint, record)
        self._drop_weights(record.number)
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

    def _score_winners(self) -> None:
        """The test split, after selection is frozen: the baseline and the front, each look counted."""
        winners: dict[int, list[TrialRecord]] = {}
        for winner in self._standing.verdict.winners:
            if winner.test is None:
                winners.setdefault(winner.owner, []).append(winner)

        def jobs() -> Iterator[tuple[TrialRecord, Job]]:
            for owner, its in winners.items():
                for winner in its:
                    self._ledger.count_test_look(winner.number)
                trained = self._standing.trials[owner]
                yield trained, trained_job(trained, self._log, self._config.seed)

        for scored, metrics in self._trainer.scores(jobs(), "test", side_by_side=self._parallel):
            for winner in winners[scored.number]:
                self._note(winner.model_copy(update={"test": metrics}))
            self._tell_watchers()

    def _drop_weights(self, ended: int) -> None:
        """Only what may still be exported keeps its weights: the front and the baseline."""
        kept = {winner.owner for winner in self._standing.verdict.winners}
        for number in (self._with_weights | {ended}) - kept:
            if number == ended or number not in self._running:
                (self._trainer.folder(number) / WEIGHTS).unlink(missing_ok=True)
        shutil.rmtree(self._trainer.folder(ended) / CHECKPOINTS, ignore_errors=True)
        self._with_weights = kept

    def _spent(self) -> bool:
        config = self._config
        if config.trials is not None and len(self._standing.candidates) >= config.trials:
            return True
        if config.minutes is not None and self._standing.elapsed_seconds() >= 60.0 * config.minutes:
            return True
        return config.trials is None and self._fruitless >= NOTHING_NEW


def _infeasible(number: int, point: Point, notes: dict[str, int], error: str) -> TrialRecord:
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
        sampler_notes=notes,
    )


def _reused(record: TrialRecord, known: TrialRecord) -> TrialRecord:
    """The record of a trial whose network has been trained already."""
    own = {"number", "kind", "point", "started_at", "test", "sampler_notes"}
    shared = {name: getattr(known, name) for name in type(known).model_fields if name not in own}
    return record.model_copy(update=shared | {"reused_from": known.owner, "seconds": 0.0})
