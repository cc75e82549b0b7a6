"""Optuna's side of a study: ask for points, tell results; reconciled with the ledger on resume.

The sampler is made anew for each proposal from the study's seed and the proposal's number, so a study
that was interrupted proposes what it would have proposed without.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from dhen.errors import UserError
from dhen.values import fingerprint
from search.samplers import make_sampler
from spaces.space import Point, Space
from trials.ledger import Entry, database_trouble, engine_options
from trials.record import Outcome, TrialRecord

if TYPE_CHECKING:
    pass


class Proposals:
    """Points of a space, proposed by a sampler that learns from what it is told."""

    def __init__(self, *, url: str, study: str, space: Space, sampler: str, seed: int) -> None:
        """Opens or creates the Optuna study of two objectives, NE and FLOPs.

        Raises:
            UserError: when the sampler is unknown or the database cannot be used.
        """
        import optuna
        from sqlalchemy.exc import SQLAlchemyError

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._space, self._sampler, self._seed = space, sampler, seed
        try:
            storage = optuna.storages.RDBStorage(url, engine_kwargs=engine_options(url))
            self._study = optuna.create_study(
                storage=storage, study_name=study, directions=["minimize", "minimize"], load_if_exists=True
            )
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            raise UserError(database_trouble(url, cause)) from None

    def reconcile(self, entries: list[Entry]) -> None:
        """Tells Optuna what the ledger knows and it does not; drops proposals that no trial took up."""
        taken = {entry.optuna_number: entry.record for entry in entries if entry.optuna_number is not None}
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state is not self._optuna.trial.TrialState.RUNNING:
                continue
            record = taken.get(trial.number)
            if record is None:
                self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
            elif record.outcome not in (Outcome.RUNNING, Outcome.INTERRUPTED):
                self.tell(trial.number, record)

    def ask(self, start: Point) -> tuple[int, Point]:
        """The next proposal: its number in Optuna, and a point that has the values of `start`."""
        trials = self._study.get_trials(deepcopy=False)
        waiting = [trial.number for trial in trials if trial.state is self._optuna.trial.TrialState.WAITING]
        number = waiting[0] if waiting else len(trials)
        if start and not waiting:
            self._study.enqueue_trial(start)
        seed = int(fingerprint([self._seed, number]), 16) % 2**32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            self._study.sampler = make_sampler(self._sampler, seed)
            trial = self._study.ask()
            return trial.number, self._space.sample(trial)

    def tell(self, number: int, record: TrialRecord) -> None:
        """How a proposal ended.

        Trials that cannot be trained are told as pruned, not as failed: samplers ignore failed trials
        and would go on proposing their corner.
        """
        state = self._optuna.trial.TrialState
        if record.outcome is Outcome.COMPLETED:
            assert record.validation is not None
            assert record.flops is not None
            self._study.tell(number, [record.validation.ne, record.flops])
        elif record.outcome is Outcome.FAILED:
            self._study.tell(number, state=state.FAIL)
        else:
            self._study.tell(number, state=state.PRUNED)
