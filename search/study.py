"""A study from its first trial to its report: the baseline, the candidates, the winners.

One driver, one candidate at a time. The ledger commits first, then Optuna is told, then MLflow and the
report are brought up to date; whatever moment the driver ends at, the same command goes on from there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dhen.errors import UserError
from dhen.values import parse
from search.baseline import Baseline, read_baseline
from search.config import StudyConfig
from search.directory import STUDY_DB
from search.export import trained_job
from search.front import eligible, knee, pareto_front
from search.objective import Trainer, new_record
from search.proposals import Proposals
from search.samplers import make_sampler
from spaces.axes import Choice
from spaces.load import load_space
from spaces.space import Point, Space
from trials.data.cache import PreparedLog
from trials.events import WEIGHTS, Progress
from trials.hardware import preferred_precision
from trials.job import Job, TrainingConfig
from trials.launcher import Launcher
from trials.ledger import Ledger, sqlite_url
from trials.record import Outcome, StudyRecord, TrialKind, TrialRecord

UNFINISHED = (Outcome.RUNNING, Outcome.INTERRUPTED)


@dataclasses.dataclass(kw_only=True)
class Watchers:
    """Who is told what happens; all optional."""

    changed: Callable[[StudyRecord, Progress | None], None] = lambda record, progress: None
    """A trial has begun, goes on, or has ended."""
    publish: Callable[[StudyRecord], None] = lambda record: None
    """A trial has ended: time to bring MLflow and the report up to date."""


class Study:
    """The driver of one study in one run directory."""

    def __init__(
        self, config: StudyConfig, directory: Path, log: PreparedLog, launcher: Launcher, watchers: Watchers
    ) -> None:
        """Opens the study's database.

        Raises:
            UserError: for an impossible space, an unknown sampler or baseline, a database out of reach,
                or a database that holds another study of this name.
        """
        self._config, self._directory, self._log, self._watchers = config, directory, log, watchers
        self.name = config.name or directory.resolve().name
        make_sampler(config.sampler, config.seed)  # an unknown name is an error before anything is written
        self._space: Space = load_space(config.space)
        self._baseline: Baseline = read_baseline(config)
        self._check_training_axes()
        url = config.storage or sqlite_url(directory / STUDY_DB)
        self._ledger = Ledger(url, self.name)
        self._ledger_facts = self._settle_facts()
        self._proposals = Proposals(
            url=url, study=self.name, space=self._space, sampler=config.sampler, seed=config.seed
        )
        self._trainer = Trainer(
            launcher,
            log,
            directory / "trials",
            threads=config.threads,
            precision=self._ledger_facts["precision"],
        )
        entries = self._ledger.entries()
        self._proposals.reconcile(entries)
        self._records = {entry.record.number: entry.record for entry in entries}
        self._optuna = {entry.record.number: entry.optuna_number for entry in entries}
        self._summary = log.summary()
        self._finished = False

    def run(self) -> StudyRecord:
        """Trains what is still to be trained, scores the winners on test; the study's record."""
        try:
            self._train_baseline()
            self._train_candidates()
            self._score_winners()
        finally:
            self._ledger.close()
        self._finished = True
        record = self.record()
        self._watchers.publish(record)
        self._watchers.changed(record, None)
        return record

    def record(self) -> StudyRecord:
        """The study as it stands."""
        trials = tuple(self._records[number] for number in sorted(self._records))
        front = pareto_front(trial for trial in trials if trial.kind is TrialKind.CANDIDATE)
        bend, baseline = knee(front), self._best_baseline()
        return StudyRecord(
            name=self.name,
            directory=str(self._directory),
            space=self._space.name,
            sampler=self._config.sampler,
            seed=self._config.seed,
            log=self._summary,
            trials=trials,
            baseline=baseline.number if baseline else None,
            front=tuple(trial.number for trial in front),
            best=front[-1].number if front else None,
            knee=bend.number if bend else None,
            finished=self._finished,
            trials_budget=self._config.trials,
            seconds_budget=60.0 * self._config.minutes if self._config.minutes else None,
            elapsed_seconds=self._elapsed_seconds(),
        )

    def _train_baseline(self) -> None:
        for index in range(self._config.baseline_trials):
            if index in self._records and self._records[index].outcome not in UNFINISHED:
                continue
            point, model, training = self._baseline.variant(index, self._config.seed)
            job = self._trainer.job(model, training, self._config.seed)
            self._train(new_record(index, TrialKind.BASELINE, point, job), job, None)
        if self._best_baseline() is None:
            errors = {trial.error for trial in self._records.values() if trial.error}
            raise UserError(f"no training of the baseline completed: {'; '.join(sorted(errors))}.")

    def _train_candidates(self) -> None:
        for record in [r for r in self._records.values() if r.outcome in UNFINISHED]:
            self._run_point(record.number, record.point, self._optuna[record.number])
        baseline = self._best_baseline()
        assert baseline is not None
        while not self._spent():
            tried = len(self.record().candidates)
            start = self._space.start_point(tried, baseline.training)
            optuna_number, point = self._proposals.ask(start)
            self._run_point(len(self._records), point, optuna_number)

    def _run_point(self, number: int, point: Point, optuna_number: int | None) -> None:
        """One candidate: decoded, looked up in the ledger, trained where it is new."""
        try:
            candidate = self._space.decode(point)
        except UserError as error:
            self._end(_infeasible(number, point, str(error)), optuna_number)
            return
        training = parse(TrainingConfig, self._config.training.to_dict() | candidate.training, "space")
        job = self._trainer.job(candidate.model, training, self._config.seed)
        record = new_record(number, TrialKind.CANDIDATE, point, job)
        known = self._ledger.finished(job.fingerprint)
        if known is not None:
            self._end(_reused(record, known), optuna_number)
            return
        self._train(record, job, optuna_number)

    def _train(self, record: TrialRecord, job: Job, optuna_number: int | None) -> None:
        self._note(record, optuna_number)
        try:
            record = self._trainer.train(record, job, self._show)
        except KeyboardInterrupt:
            self._note(record.model_copy(update={"outcome": Outcome.INTERRUPTED}), optuna_number)
            self._watchers.publish(self.record())
            raise
        self._end(record, optuna_number)

    def _end(self, record: TrialRecord, optuna_number: int | None) -> None:
        """Ledger first, then Optuna, then whoever watches."""
        self._note(record, optuna_number)
        if optuna_number is not None:
            self._proposals.tell(optuna_number, record)
        self._drop_weights()
        self._watchers.publish(self.record())

    def _note(self, record: TrialRecord, optuna_number: int | None) -> None:
        self._ledger.save(record, optuna_number=optuna_number)
        self._records[record.number] = record
        self._optuna[record.number] = optuna_number
        self._watchers.changed(self.record(), None)

    def _show(self, record: TrialRecord, progress: Progress | None) -> None:
        self._records[record.number] = record
        self._watchers.changed(self.record(), progress)

    def _score_winners(self) -> None:
        """The test split, after selection is frozen: the baseline and the front, each look counted."""
        record = self.record()
        for number in (record.baseline, *record.front):
            if number is None or self._records[number].test is not None:
                continue
            trial = self._records[number]
            owner = trial if trial.reused_from is None else self._records[trial.reused_from]
            job = trained_job(owner, self._log, self._config.seed)
            self._ledger.count_test_look(number)
            metrics = self._trainer.score(owner, job, "test")
            self._note(trial.model_copy(update={"test": metrics}), self._optuna[number])

    def _drop_weights(self) -> None:
        """Only what may still be exported keeps its weights: the front and the baseline."""
        record = self.record()
        kept = {record.baseline, *record.front}
        owners = {trial.reused_from for trial in record.trials if trial.number in kept}
        for trial in record.trials:
            if trial.number not in kept | owners and trial.outcome is not Outcome.RUNNING:
                (self._trainer.folder(trial.number) / WEIGHTS).unlink(missing_ok=True)

    def _best_baseline(self) -> TrialRecord | None:
        trials = [trial for trial in self._records.values() if trial.kind is TrialKind.BASELINE]
        return min(eligible(trials), key=lambda t: t.validation.ne if t.validation else 0.0, default=None)

    def _spent(self) -> bool:
        config = self._config
        if config.trials is not None:
            done = sum(trial.kind is TrialKind.CANDIDATE for trial in self._records.values())
            if done >= config.trials:
                return True
        return config.minutes is not None and self._elapsed_seconds() >= 60.0 * config.minutes

    def _elapsed_seconds(self) -> float:
        """Spent on trials, in earlier sessions too."""
        return sum(trial.seconds or 0.0 for trial in self._records.values())

    def _check_training_axes(self) -> None:
        """The space's training settings exist and their values are valid."""
        for key, axis in self._space.training_axes.items():
            for value in axis.values if isinstance(axis, Choice) else (axis.low, axis.high):
                source = f"space {self._space.name!r}: training"
                parse(TrainingConfig, self._config.training.to_dict() | {key: value}, source)

    def _settle_facts(self) -> dict[str, Any]:
        """What must not change while a study lives; precision is this machine's preference at the start."""
        facts = {"log": self._log.fingerprint, "space": self._space.fingerprint, "seed": self._config.seed}
        known = self._ledger.facts()
        if known is None:
            known = facts | {"created": time.time(), "precision": preferred_precision()}
            self._ledger.note_facts(known)
        changed = [key for key, value in facts.items() if known.get(key) != value]
        if changed:
            raise UserError(
                f"{self._directory} holds a study with another {' and another '.join(changed)}; "
                f"continue it with the same settings, or choose another --out (or name=)."
            )
        return known


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
    own = {"number", "kind", "point", "started_at", "test"}
    shared = {name: getattr(known, name) for name in type(known).model_fields if name not in own}
    source = known.number if known.reused_from is None else known.reused_from
    return record.model_copy(update=shared | {"reused_from": source, "seconds": 0.0})
