"""What follows selection, from top to bottom: weights recovered, averages made, winners scored on test, confirmed.

Candidates never see the test split; from here on nothing is proposed any more, and each look at it is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dashboards.winners import retrained_line
from search.averages import Members, average_record, choose, mean_metrics, meets
from search.config import StudyConfig
from search.export import trained_job
from search.objective import Trainer, new_record
from search.samplers.known import UNFINISHED
from search.standing import Standing
from search.weights import KeptWeights
from search.winners.confirm import confirm
from search.winners.retraining import Retrainings
from trials.data.cache import PreparedLog
from trials.job import Job
from trials.ledger import Ledger
from trials.record import Metrics, Retraining, TrialKind, TrialRecord

SEED_STRIDE = 1000
"""Between the seeds of one network's trainings for averages: more than what `confirm` draws its seeds from."""
SAME_NE = 1e-9
"""Relative; what the order of a sum may change."""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """What a study does for its finals."""

    train: Callable[[Iterator[tuple[TrialRecord, Job | None]]], None]
    """Trains what comes up."""
    planned: Callable[[TrialRecord, Job], tuple[TrialRecord, Job | None]]
    """A trial with its plan."""
    require_baseline: Callable[[], None]
    end: Callable[[TrialRecord], None]
    """Takes in a trial that has ended."""
    note: Callable[[TrialRecord], None]
    """Takes in a trial that has changed."""
    say: Callable[[str], None]
    """Something beside how trials end; watchers are told."""


class Finals:
    """The end of one study."""

    def __init__(
        self,
        config: StudyConfig,
        log: PreparedLog,
        ledger: Ledger,
        standing: Standing,
        trainer: Trainer,
        weights: KeptWeights,
        driver: Driver,
        *,
        parallel: int,
    ) -> None:
        """`parallel`: scorings and trainings side by side."""
        self._config, self._log, self._ledger, self._standing = config, log, ledger, standing
        self._trainer, self._weights, self._driver, self._parallel = trainer, weights, driver, parallel

    def recover_weights(self) -> None:
        """Every winner has weights: fetched from the study that has trained it, or trained here after all.

        Trained again, its result is its own, and may be a little another: then others may have won.
        """
        while lost := [each for each in self._standing.verdict.trained if not self._weights.has(each)]:
            self.train_again(lost, "won, its weights are gone: trained here before its test")
        self._driver.require_baseline()
        self._weights.drop()

    def train_again(self, lost: Iterable[TrialRecord], why: str) -> None:
        """Finished trials whose weights are gone, and says so."""
        self._driver.train(self._again(lost, why))

    def make_averages(self) -> None:
        """Means of networks on the front, and next to it, that nothing beats become trials of the study.

        Chosen on validation among many, they are a little better there than elsewhere (`search.greedy`).
        """
        if not self._config.averages or not self._standing.verdict.networks:
            return
        self._driver.train(self._further_seeds())
        verdict = self._standing.verdict
        at_hand = (each for each in verdict.runners_up if self._weights.has(each))
        pool = (*verdict.networks, *at_hand, *verdict.seeds)
        self._keep_logits((*pool, *verdict.members), "validation")
        chosen = choose(pool, self._log, "validation", self._logits("validation"), most=self._config.averages)
        found = [members for members in chosen if meets(self._config.serving, members)]
        standing = [self._members(each) for each in verdict.front if each.members]
        for members in (*found, *standing):
            self._take_in(members)
        if not found:
            lacking = (
                "is within the limits of serving" if chosen else "is better than they are, for its FLOPs"
            )
            self._driver.say(f"no average of the {len(pool)} best networks {lacking}")
        self._weights.drop()

    def score_winners(self) -> None:
        """The test split, after selection is frozen: the baseline and the front, each look counted.

        An average is the mean of its members' logits, which are scored for it where they are not winners too.
        """
        new = [winner for winner in self._standing.verdict.winners if winner.test is None]
        averages = [winner for winner in new if winner.members]
        winners: dict[int, list[TrialRecord]] = {}
        for winner in new:
            if not winner.members:
                winners.setdefault(winner.owner, []).append(winner)
        for member in (member for average in averages for member in self._members(average)):
            if not self._weights.have_logits(member, "test"):
                winners.setdefault(member.owner, [])
        for scored, metrics in self._scores(winners, "test", keep_logits=bool(averages)):
            for winner in winners[scored.number]:
                self._driver.note(winner.model_copy(update={"test": metrics}))
        for average in averages:
            self._ledger.count_test_look(average.number)
            metrics = mean_metrics(self._members(average), self._log, "test", self._logits("test"))
            self._driver.note(average.model_copy(update={"test": metrics}))

    def confirm_winners(self, confirmed: dict[str, Any]) -> None:
        """Whether they are better than the baseline, where the study is to say so; told by `confirmed`."""
        if not self._config.confirm or not self._standing.verdict.front:
            return

        def watch(each: Retraining) -> None:
            confirmed["retrainings"] = retrainings.all
            self._driver.say(retrained_line(each))

        retrainings = Retrainings(self._ledger, self._trainer, parallel=self._parallel, watch=watch)
        seeds, record = self._config.confirm, self._standing.record()
        confirmed["comparisons"], failed = confirm(record, self._log, self._ledger, retrainings, seeds=seeds)
        for line in failed:
            self._driver.say(line)

    def _again(self, lost: Iterable[TrialRecord], why: str) -> Iterator[tuple[TrialRecord, Job | None]]:
        for owner in {winner.owner: None for winner in lost}:
            known = self._standing.trials[owner]
            job = self._own_job(known)
            self._driver.say(f"trial {owner} {why}")
            fresh = new_record(owner, known.kind, known.point, job)
            kept = ("sampler_notes", "attempts", "seed_offset", "promoted_from", "tuned_from")
            fresh = fresh.model_copy(update={name: getattr(known, name) for name in kept})
            yield self._driver.planned(fresh, job)

    def _further_seeds(self) -> Iterator[tuple[TrialRecord, Job | None]]:
        """Trainings of the best network from other seeds, those that have not ended."""
        best = self._standing.verdict.networks[-1]
        for offset in range(SEED_STRIDE, SEED_STRIDE * self._config.average_seeds, SEED_STRIDE):
            job = self._own_job(best).model_copy(update={"seed": self._config.seed + offset})
            known = [each for each in self._standing.trials.values() if each.fingerprint == job.fingerprint]
            if any(each.outcome not in UNFINISHED for each in known):
                continue
            number = known[0].number if known else len(self._standing.trials)
            record = new_record(number, TrialKind.SEED, best.point, job)
            yield self._driver.planned(record.model_copy(update={"seed_offset": offset}), job)

    def _take_in(self, members: Members) -> None:
        """An average that is new, or whose members have other weights than when it was made."""
        validation = mean_metrics(members, self._log, "validation", self._logits("validation"))
        fresh = average_record(len(self._standing.trials), members, validation)
        same = (each for each in self._standing.trials.values() if each.fingerprint == fresh.fingerprint)
        known = next(same, None)
        if known is None:
            self._driver.end(fresh)
        elif known.validation is None or not math.isclose(
            known.validation.ne, validation.ne, rel_tol=SAME_NE
        ):
            self._driver.note(known.model_copy(update={"validation": validation, "test": None}))

    def _keep_logits(self, networks: Iterable[TrialRecord], split: str) -> None:
        missing = {each.owner: () for each in networks if not self._weights.have_logits(each, split)}
        for _ in self._scores(missing, split, keep_logits=True):
            pass

    def _scores(
        self, wanted: Mapping[int, Sequence[TrialRecord]], split: str, *, keep_logits: bool
    ) -> Iterator[tuple[TrialRecord, Metrics]]:
        """Of trials that have weights, by number, as they come; `wanted`: who shares each one's result, if any."""

        def jobs() -> Iterator[tuple[TrialRecord, Job]]:
            for owner, its in wanted.items():
                trained = self._standing.trials[owner]
                for looking in (its or (trained,)) if split == "test" else ():
                    self._ledger.count_test_look(looking.number)
                yield trained, self._own_job(trained)

        return self._trainer.scores(jobs(), split, side_by_side=self._parallel, keep_logits=keep_logits)

    def _own_job(self, trial: TrialRecord) -> Job:
        return trained_job(trial, self._log, self._config.seed, tables_from=trial.tables_from)

    def _members(self, average: TrialRecord) -> Members:
        return tuple(self._standing.trials[number] for number in average.members)

    def _logits(self, split: str) -> Callable[[TrialRecord], Path]:
        return partial(self._weights.logits, split=split)
