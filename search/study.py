"""A study from its first trial to its report: the baseline, the candidates, the winners.

One driver, several trials side by side, each in a process of its own. The ledger commits first, then the
sampler is told; whatever moment the driver ends at, the same command goes on from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dashboards.winners import retrained_line
from dhen.errors import UserError
from dhen.values import parse
from search.absorb import cut_short
from search.activity import Training, look
from search.appraisal import Appraiser
from search.baseline import Baseline, read_baseline
from search.config import StudyConfig
from search.directory import database_url, study_name
from search.execution import execution, margin_bytes, ranks_here
from search.export import trained_job
from search.facts import Facts, check_training_axes
from search.objective import CHECKPOINTS, Trainer, new_record
from search.planning import plan_of, planned
from search.proposals import Proposals
from search.reuse import Reuse
from search.samplers.known import UNFINISHED
from search.slots import slots
from search.standing import Standing
from search.stopping import stopping_rule
from search.stopping.rule import Rule, first_stop
from search.winners.confirm import confirm
from search.winners.retraining import Retrainings
from spaces.load import load_space
from spaces.space import Candidate, Point, Space
from trials.data.cache import PreparedLog
from trials.events import WEIGHTS, Progress
from trials.job import Job, TrainingConfig
from trials.launcher import POLL_SECONDS, AnyLauncher
from trials.ledger import Ledger
from trials.record import Outcome, Retraining, StudyRecord, TrialKind, TrialRecord

NOTHING_NEW = 100
"""Proposals in a row that needed no training, after which a study without a number of trials ends."""

AGAIN = (Outcome.OUT_OF_MEMORY, Outcome.INTERRUPTED)
"""Ends of an attempt after which there may be another."""

SHARED = (Outcome.COMPLETED, Outcome.STOPPED)
"""Ends that hold for an equal network too."""

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
        launcher: AnyLauncher,
        *watchers: Watcher,
    ) -> None:
        """Opens the study's database.

        Raises:
            UserError: for an impossible space, an unknown sampler, rule or baseline, a database out of reach,
                or a database that holds another study of this name.
        """
        self._config, self._log, self._watchers = config, log, watchers
        self._space: Space = load_space(config.space)
        self._baseline: Baseline = read_baseline(config)
        check_training_axes(self._space, config.training)
        self._stopping: Rule = stopping_rule(config.stopping)
        self._proposals = Proposals(
            sampler=config.sampler,
            seed=config.seed,
            appraiser=Appraiser(self._space, log.features, self._fits),
            stopped_as=config.stopped_as,
        )
        name = study_name(directory, config.name)
        self._ledger = Ledger(database_url(directory, config.storage), name)
        self._parallel, threads = slots(config.parallel, config.threads, ranks_here(config))
        shares = {"side_by_side": self._parallel, "threads": threads}
        self._facts = Facts(self._ledger, config, directory, log, self._space, **shares)
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
        self.setting = self._facts.setting
        """What its trials have in common."""
        latest_first = sorted(self._standing.trials.items(), reverse=True)
        self._known = {trial.fingerprint: trial for _, trial in latest_first if trial.outcome in SHARED}
        self._running: dict[int, Training] = {}
        self._waiting: list[tuple[TrialRecord, Job]] = []
        self._with_weights = set(self._standing.trials)
        self._fruitless = 0
        self._deciding = True
        self._reuse = self._shared_ledger() if config.ledger else None
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

    def run(self) -> StudyRecord:
        """Trains what is still to be trained, scores the winners on test; the study's record."""
        self._facts.note(finished=False)
        try:
            self._train(self._baseline_trials())
            self._require_baseline()
            self._train(self._candidate_trials())
            self._recover_weights()
            self._score_winners()
            self._confirm_winners()
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
        job = self._job(candidate)
        record = new_record(number, TrialKind.CANDIDATE, point, job)
        return self._planned(record.model_copy(update={"sampler_notes": notes}), job)

    def _job(self, candidate: Candidate) -> Job:
        training = parse(TrainingConfig, self._config.training.to_dict() | candidate.training, "space")
        return self._trainer.job(candidate.model, training, self._config.seed)

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
        """With its plan for the study's cluster; one that fits nowhere has ended and is not trained."""
        known = self._standing.trials.get(record.number)
        if known is not None and known.attempts:
            again = self._trainer.execution.next_attempt(known, job, self._config.prefer)
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
        trials = list(self._standing.trials.values())
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
        self._keep_weights(record)
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
        if self._reuse is None or not self._deciding:
            return None
        return self._reuse.result(record)

    def _recover_weights(self) -> None:
        """Every winner has weights: fetched from the study that has trained it, or trained here after all.

        Trained again, its result is its own, and may be a little another: then others may have won.
        """
        self._deciding = False
        while lost := [winner for winner in self._standing.verdict.winners if not self._has_weights(winner)]:
            self._train(self._again(lost))
        self._require_baseline()
        self._drop_weights()

    def _again(self, lost: list[TrialRecord]) -> Iterator[Upcoming]:
        """Trainings of finished trials whose weights are gone."""
        for owner in {winner.owner: None for winner in lost}:
            known = self._standing.trials[owner]
            job = trained_job(known, self._log, self._config.seed)
            self.notices.append(f"trial {owner} won, its weights are gone: trained here before its test")
            fresh = new_record(owner, known.kind, known.point, job)
            kept = {"sampler_notes": known.sampler_notes, "attempts": known.attempts}
            yield self._planned(fresh.model_copy(update=kept), job)

    def _has_weights(self, winner: TrialRecord) -> bool:
        """Fetched now, where another study has them."""
        if (self._trainer.folder(winner.owner) / WEIGHTS).exists():
            return True
        return self._reuse is not None and self._reuse.fetch_weights(self._standing.trials[winner.owner])

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

    def _confirm_winners(self) -> None:
        """Whether they are better than the baseline, where the study is to say so."""
        if not self._config.confirm or not self._standing.verdict.front:
            return

        def watch(each: Retraining) -> None:
            self._confirmed["retrainings"] = retrainings.all
            self.notices.append(retrained_line(each))
            self.changes += 1
            self._tell_watchers()

        retrainings = Retrainings(self._ledger, self._trainer, parallel=self._parallel, watch=watch)
        seeds = self._config.confirm
        found, failed = confirm(self.record(), self._log, self._ledger, retrainings, seeds=seeds)
        self._confirmed["comparisons"] = found
        self.notices += failed

    def _keep_weights(self, ended: TrialRecord) -> None:
        """Of a trial that may be exported: fetched where another study has trained it."""
        if ended.reused_from_study is not None and ended in self._standing.verdict.winners:
            self._has_weights(ended)  # now, before that study drops them or is deleted
        shutil.rmtree(self._trainer.folder(ended.number) / CHECKPOINTS, ignore_errors=True)
        self._with_weights.add(ended.number)
        if self._deciding:
            self._drop_weights()

    def _drop_weights(self) -> None:
        """Only what may still be exported keeps its weights: the front and the baseline."""
        kept = {winner.owner for winner in self._standing.verdict.winners}
        for number in self._with_weights - kept - set(self._running):
            (self._trainer.folder(number) / WEIGHTS).unlink(missing_ok=True)
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
    own = {"number", "kind", "point", "started_at", "test", "sampler_notes", "attempts", "reused_from_study"}
    shared = {name: getattr(known, name) for name in type(known).model_fields if name not in own}
    return record.model_copy(update=shared | {"reused_from": known.owner, "seconds": 0.0})
