"""What follows selection, from top to bottom: weights recovered, averages made, winners scored on test, confirmed.

Candidates never see the test split; from here on nothing is proposed any more, and each look at it is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dashboards.sentences.winners import confirm_command, retrained_line
from dhen.errors import UserError
from search.analysis.confirm import confirm
from search.averages.average_trials import Members, average_record, choose, mean_metrics, meets
from search.bundles.export import trained_job
from search.execution.retraining import Retrainings
from search.execution.trainer import new_record
from search.planning.admission import Upcoming
from search.samplers.context import UNFINISHED
from search.study.parts import Parts
from search.study.trainings import Trainings
from trials.job import Job
from trials.record import Metrics, Retraining, TrialKind, TrialRecord

SEED_STRIDE = 1000
"""Between the seeds of one network's trainings for averages: more than what `confirm` draws its seeds from."""
SAME_NE = 1e-9
"""Relative; what the order of a sum may change."""


class Finals:
    """The end of one study."""

    def __init__(self, parts: Parts, trainings: Trainings) -> None:
        self._parts, self._trainings = parts, trainings
        self._config, self._log, self._ledger = parts.config, parts.log, parts.ledger
        self._standing, self._weights = parts.standing, parts.weights
        self.confirmed: dict[str, Any] = {
            "retrainings": tuple(self._ledger.retrainings()),
            "comparisons": self._ledger.comparisons(),
        }
        """What the study's record has of whether its winners are better than the baseline."""

    def recover_weights(self) -> None:
        """Every winner has weights: fetched from the study that has trained it, or trained here after all.

        Trained again, its result is its own, and may be a little another: then others may have won.
        """
        while lost := [each for each in self._standing.verdict.trained if not self._weights.has(each)]:
            self.train_again(lost, "won, its weights are gone: trained here before its test")
        self._standing.require_baseline()
        self._weights.drop()

    def train_again(self, lost: Iterable[TrialRecord], why: str) -> None:
        """Finished trials whose weights are gone, and says so."""
        self._trainings.train(self._again(lost, why))

    def make_averages(self) -> None:
        """Means of networks on the front, and next to it, that nothing beats become trials of the study.

        Chosen on validation among many, they are a little better there than elsewhere
        (`search.averages.greedy_selection`).
        """
        if not self._config.averages or not self._standing.verdict.networks:
            return
        self._trainings.train(self._further_seeds())
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
            self._parts.news.say(f"no average of the {len(pool)} best networks {lacking}")
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
                self._note(winner.replace(test=metrics))
        for average in averages:
            self._ledger.count_test_look(average.number)
            metrics = mean_metrics(self._members(average), self._log, "test", self._logits("test"))
            self._note(average.replace(test=metrics))

    def confirm_winners(self) -> None:
        """Whether they are better than the baseline, where the study is to say so.

        Where that cannot be told it says why, and the study ends all the same: the same command would come to
        the same, and what was searched for is there.
        """
        if not self._config.confirm or not self._standing.verdict.front:
            return

        def watch(each: Retraining) -> None:
            self.confirmed["retrainings"] = retrainings.all
            self._parts.news.say(retrained_line(each))

        retrainings = Retrainings(
            self._ledger, self._parts.trainer, parallel=self._parts.parallel, watch=watch
        )
        asked, record = self._config, self._standing.record()
        try:
            self.confirmed["comparisons"], told = confirm(
                record, self._log, self._ledger, retrainings, seeds=asked.confirm, block_by=asked.block_by
            )
        except UserError as error:
            told = [f"{error} The study ends without a verdict; `{confirm_command(record)}` goes on."]
        for line in told:
            self._parts.news.say(line)

    def _again(self, lost: Iterable[TrialRecord], why: str) -> Iterator[Upcoming]:
        for owner in {winner.owner: None for winner in lost}:
            known = self._standing.trials[owner]
            job = self._own_job(known)
            self._parts.news.say(f"trial {owner} {why}")
            fresh = new_record(owner, known.kind, known.point, job)
            kept = ("sampler_notes", "attempts", "seed_offset", "promoted_from", "tuned_from")
            fresh = fresh.replace(**({name: getattr(known, name) for name in kept}))
            yield self._parts.admission.planned(fresh, job)

    def _further_seeds(self) -> Iterator[Upcoming]:
        """Trainings of the best network from other seeds, those that have not ended."""
        best = self._standing.verdict.networks[-1]
        for offset in range(SEED_STRIDE, SEED_STRIDE * self._config.average_seeds, SEED_STRIDE):
            job = self._own_job(best).replace(seed=self._config.seed + offset)
            known = [each for each in self._standing.trials.values() if each.fingerprint == job.fingerprint]
            if any(each.outcome not in UNFINISHED for each in known):
                continue
            number = known[0].number if known else len(self._standing.trials)
            record = new_record(number, TrialKind.SEED, best.point, job)
            yield self._parts.admission.planned(record.replace(seed_offset=offset), job)

    def _take_in(self, members: Members) -> None:
        """An average that is new, or whose members have other weights than when it was made."""
        validation = mean_metrics(members, self._log, "validation", self._logits("validation"))
        fresh = average_record(len(self._standing.trials), members, validation)
        same = (each for each in self._standing.trials.values() if each.fingerprint == fresh.fingerprint)
        known = next(same, None)
        if known is None:
            self._trainings.end(fresh)
        elif known.validation is None or not math.isclose(
            known.validation.ne, validation.ne, rel_tol=SAME_NE
        ):
            self._note(known.replace(validation=validation, test=None))

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

        trainer, parallel = self._parts.trainer, self._parts.parallel
        return trainer.scores(jobs(), split, side_by_side=parallel, keep_logits=keep_logits)

    def _note(self, record: TrialRecord) -> None:
        """A trial that has changed; the watchers have it at once."""
        self._trainings.note(record)
        self._parts.news.tell()

    def _own_job(self, trial: TrialRecord) -> Job:
        return trained_job(trial, self._log, self._config.seed)

    def _members(self, average: TrialRecord) -> Members:
        return tuple(self._standing.trials[number] for number in average.members)

    def _logits(self, split: str) -> Callable[[TrialRecord], Path]:
        return partial(self._weights.logits, split=split)
