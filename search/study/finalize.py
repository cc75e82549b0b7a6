"""What follows the search, in order: weights are recovered, averages made and learnt from, winners chosen,
scored, trained once more on all but test, and confirmed.

Candidates never see the test split; from here on nothing is proposed any more, and each look at test is counted.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from dashboards.sentences.stages import (
    NO_TIME_TO_DISTIL,
    no_time_for_averages,
    no_time_to_confirm,
    no_time_to_refit,
)
from dashboards.sentences.winners import confirm_command, retrained_line
from dhen.errors import UserError
from search.analysis.averages import (
    Lesson,
    Members,
    average_record,
    choose,
    mean_metrics,
    mean_probability,
    meets,
)
from search.analysis.choice import (
    Evidence,
    choice_of,
    choice_with_origins,
    on_validation,
    with_earlier_periods,
)
from search.analysis.confirm import confirm, confirming, most_important_first
from search.execution.admission import AdmittedTrial
from search.execution.retraining import (
    HasTimeFor,
    RetrainingRequest,
    Retrainings,
    Watcher,
    score_networks,
)
from search.execution.trainer import new_record, refit_job, trained_job
from search.study.parts import StudyParts
from search.study.trial_runner import TrialRunner
from trials.data.log_views import JOINED, origins_of, save_teacher
from trials.records.events import Progress
from trials.records.findings import Choice
from trials.records.job import Job
from trials.records.study_record import RefitResult, StudyRecord
from trials.records.trial_record import Metrics, Outcome, TrialKind, TrialRecord

SEED_STRIDE = 1000
"""Distance between the seeds of one network's trainings for averages: more than what `confirm` draws its seeds
from."""
SAME_NE = 1e-9
"""Relative difference in NE that the order of a sum may make."""

LOG = logging.getLogger(__name__)


class Finalizer:
    """The end of one study."""

    def __init__(self, parts: StudyParts, runner: TrialRunner, *, average_seeds: int) -> None:
        """The end of a study that is opened.

        Args:
            parts: the study's parts.
            runner: trains its trials.
            average_seeds: trainings of the best network that may be members of averages, each from its own seed;
                1 is the search's own.
        """
        self._config, self._log, self._ledger = parts.config, parts.log, parts.ledger
        self._state, self._settings, self._trainer = parts.state, parts.settings, parts.trainer
        self._admission, self._weights, self._budget = parts.admission, parts.weights, parts.budget
        self._later, self._side_by_side = parts.later, parts.side_by_side
        self._runner, self._average_seeds = runner, average_seeds
        self.retrainings = Retrainings(
            parts.ledger,
            parts.trainer,
            side_by_side=parts.side_by_side,
            watcher=Watcher(
                changed=self._note_retraining,
                wanted=self._note_wanted,
                progress=self._note_progress,
                on_poll=self._state.tell,
                say=self._state.say,
            ),
        )

    def read_again(self) -> None:
        """Takes in what another driver, which has led before, has retrained."""
        for record in self.retrainings.read_again():
            self._state.note_retraining(record)
        self._state.note_comparisons(self._ledger.comparisons())

    def recover_weights(self) -> None:
        """Gives every winner weights: fetched from the study that has trained it, or trained here after all.

        A winner that is trained again has a result of its own, which may differ: then others may have won.
        """
        while lost := [trial for trial in self._state.selection.exported if not self._weights.has(trial)]:
            self._runner.train(self._again(lost, "won, its weights are gone: trained here before its test"))
        self._state.require_baseline()
        for member in self._state.selection.members:  # of averages on the front
            if member.kind is TrialKind.RETRAINING and not self._weights.has(member):
                trial = self._state.trials[member.network_of]
                self.retrainings.run([RetrainingRequest(trial, trained_job(member, self._log))], weights=True)
        self._weights.drop()

    def go_on_for_weights(self) -> None:
        """Goes on with what was trained once more for its lost weights as the study was broken off; the search
        goes on with candidates."""
        begun = [
            trial
            for trial in self._state.trials.values()
            if trial.origin.trained_for_weights
            and trial.result.outcome is Outcome.INTERRUPTED
            and trial.kind is not TrialKind.CANDIDATE
        ]
        self._runner.train(self._again(begun, "is trained here for its weights: it goes on"))

    def make_averages(self) -> None:
        """Makes trials of those means of networks on the front, and next to it, that nothing beats.

        Averages are chosen on validation among many, so they are a little better there than elsewhere
        (`search.analysis.averages`).
        """
        if not self._config.most_averaged or not self._state.selection.networks:
            return
        later = self._later
        has_time = later is None or self._budget.has_time_for(later.choosing() + later.scores())
        if self._config.averages == "auto" and not has_time:
            if all(trial.kind is not TrialKind.AVERAGE for trial in self._state.selection.front):
                self._state.say(no_time_for_averages(self._state.record()))
            return
        best = self._state.selection.networks[-1]
        shifts = range(SEED_STRIDE, SEED_STRIDE * self._average_seeds, SEED_STRIDE)
        wanted = [RetrainingRequest(best, trained_job(best, self._log, seed_shift=shift)) for shift in shifts]
        retrained = self.retrainings.run(wanted, weights=True).values()
        selection = self._state.selection
        at_hand = (trial for trial in selection.runners_up if self._weights.has(trial))
        pool = (*selection.networks, *at_hand, *retrained)
        self._keep_logits((*pool, *selection.members), "validation")
        chosen = choose(
            pool, self._log, "validation", self._logits("validation"), most=self._config.most_averaged
        )
        averages = [members for members in chosen if meets(self._config.limits, members)]
        standing = [self._state.networks(average) for average in selection.averages]
        for members in (*averages, *standing):
            self._take_in(members)
        if not averages:
            lacking = "is within the limits" if chosen else "is better than they are, for its FLOPs"
            if len(pool) > 1:
                self._state.say(f"no average of the {len(pool)} best networks {lacking}")
        self._weights.drop()

    def distil(self) -> None:
        """Has networks of the front learn from the best average, if there is one and the study is to
        (`search.analysis.averages`)."""
        # winners who learn afterwards would be others than those that were trained once more and confirmed
        has_ended = self._budget.spent and self._config.distil is not True
        if not self._config.distils or has_ended:
            return
        lesson = Lesson.of(self._state, self._log)
        if lesson is None or not lesson.missing:
            return
        has_time = partial(self._has_time_to_teach, self._state.elapsed_seconds())
        file, members = self._trainer.teacher_file(lesson.teacher.job.fingerprint), lesson.members
        if not file.exists():
            scoring = self._later.scored_on_train(members) if self._later is not None else 0.0
            if not all(map(self._weights.has, members)):
                return
            if not has_time(scoring + lesson.missing[0][0].result.training_seconds):
                self._state.say(NO_TIME_TO_DISTIL)
                return
            self._keep_logits(members, "train")
            self._keep_logits(members, "validation")
            taught = [mean_probability(members, self._log, self._logits(split)) for split in JOINED]
            save_teacher(np.concatenate(taught), file)
            for member in members:
                self._weights.logits(member, "train").unlink()
        self._runner.train(lesson.trials(self._admission, has_time))
        self._weights.drop()

    def choose_winners(self) -> Choice | None:
        """Chooses the best and the winners by what they predict on validation; None without a front."""
        selection = self._state.selection
        baseline, front = selection.baseline, selection.front
        if baseline is None or not front:
            return None
        others = (*selection.singles, *selection.networks, *selection.contenders, *selection.runners_up)
        at_hand = [trial for trial in others if self._weights.has(trial)]
        # equal jobs have one result: it was chosen among once
        first: dict[str, TrialRecord] = {}
        for trial in (baseline, *front, *at_hand):
            first.setdefault(trial.job.fingerprint, trial)
        trials = tuple(first.values())
        networks_of = self._state.networks
        self._keep_logits((network for trial in trials for network in networks_of(trial)), "validation")
        evidence = on_validation(trials, networks_of, self._log, self._logits("validation"))
        choice = choice_of(self._state.record(), evidence)
        return choice if evidence is None else self._judged_earlier(choice, evidence)

    def score_winners(self) -> None:
        """Scores the baseline and the winners on test, after they are chosen; each look is counted.

        An average is the mean of its members' logits, which are scored for it if they are not winners too.
        """
        choice = self._state.record().choice
        chosen = [self._state.trials[winner.trial] for winner in choice.winners] if choice else []
        new = [trial for trial in (self._state.require_baseline(), *chosen) if trial.result.test is None]
        averages = [winner for winner in new if winner.kind is TrialKind.AVERAGE]
        alone = [winner for winner in new if winner.kind is not TrialKind.AVERAGE]
        networks = [self._state.trials[winner.owner] for winner in alone]
        members = (member for average in averages for member in self._state.networks(average))
        networks += [member for member in members if not self._weights.have_logits(member, "test")]

        def take(network: TrialRecord, metrics: Metrics) -> None:
            for winner in _sharing(alone, network):
                self._note(winner.with_result(test=metrics))

        self._score(networks, "test", take, keep_logits=bool(averages), winners=alone)
        for average in averages:
            self._ledger.count_test_look(average.number)
            networks_of_average = self._state.networks(average)
            self._note(
                average.with_result(
                    test=mean_metrics(networks_of_average, self._log, "test", self._logits("test"))
                )
            )

    @property
    def refits(self) -> bool:
        """Tells whether winners are to be trained once more, on the rows of training and validation together."""
        return self._config.refits and self._state.record().choice is not None

    def refit_winners(self) -> tuple[RefitResult, ...]:
        """Trains the baseline and the winners once more, on the rows of training and validation together, and
        scores them on test: as many of the winners as there is time for, the best first; none if the study is
        not to. What was trained so before stays, whatever there is time for."""
        record = self._state.record()
        if not self._config.refits or record.choice is None:
            return ()
        winners = most_important_first(record)
        # the best may be the baseline, which is none of the winners
        numbers = dict.fromkeys((record.choice.baseline, record.choice.best, *winners))
        requests = {
            number: [
                RetrainingRequest(self._state.trials[network.network_of], refit_job(network, self._log))
                for network in record.networks(record.trial(number))
            ]
            for number in numbers
        }
        asked = self._refits_in_time(record, requests)
        wanted = [request for number in asked for request in requests[number]]
        self.retrainings.run(wanted, weights=True)
        for sentence in self.retrainings.failures(wanted):
            self._state.say(f"{sentence} It stays as it was trained before.")
        refitted = self._refitted(requests)
        trained = [winner for winner in winners if winner in {refit.trial for refit in refitted}]
        if set(winners) - {*trained, *asked}:
            self._state.say(no_time_to_refit(len(trained), len(winners)))
        return refitted

    def _refits_in_time(
        self, record: StudyRecord, requests: Mapping[int, Sequence[RetrainingRequest]]
    ) -> list[int]:
        """Returns the trials that are to be trained once more: the baseline and the best together, then each
        winner that leaves the confirmation its time; of a study that has ended those that it had trained so."""
        assert record.choice is not None
        first = (record.choice.baseline, record.choice.best)
        earlier = {refit.trial for refit in record.refits}
        asked: list[int] = []
        for group in (first, *((number,) for number in requests if number not in first)):
            wanted = [request for number in asked for request in requests[number]]
            wanted += [request for number in group for request in requests[number]]
            if self._budget.spent and self._config.refit is not True:
                has_time = earlier.issuperset(group)
            else:
                missing = self.retrainings.missing(wanted, weights=True)
                has_time = self._has_time_to_refit(missing, best=group == first)
            if has_time:
                asked += group
            elif group == first:
                break  # nothing compares with what has learnt from more rows than the baseline
        return asked

    def _has_time_to_teach(self, began: float, seconds: float) -> bool:
        """Tells whether so many seconds, of lessons that `began` at a second of the study, are within their share
        of the minutes or leave what follows its time. What was asked for is always done."""
        if self._later is None or self._config.distil is True:
            return True
        follows = [self._later.scores()]
        if self._state.elapsed_seconds() + seconds > began + self._later.most_distillation:
            follows += [self._later.refits(), self._later.least_confirmation()]
        return self._leave_time(seconds, follows)

    def _has_time_to_refit(self, missing: Sequence[RetrainingRequest], *, best: bool) -> bool:
        """Tells whether there is time for the missing refits: any for the best alone, for further winners their
        share of the minutes, or what leaves confirmation its time. What was asked for is always done."""
        if self._later is None or self._config.refit is True or not missing:
            return True
        seconds = self._later.retrained(request.of for request in missing)
        shared = best or seconds <= self._later.most_refits
        return self._leave_time(seconds, [] if shared else [self._later.least_confirmation()])

    def _refitted(self, requests: Mapping[int, Sequence[RetrainingRequest]]) -> tuple[RefitResult, ...]:
        """Returns the trials all of whose networks are trained once more, with their scores on test."""
        done = self.retrainings.completed(itertools.chain.from_iterable(requests.values()), weights=True)
        networks = {
            number: tuple(done[request.job.fingerprint] for request in some)
            for number, some in requests.items()
            if all(request.job.fingerprint in done for request in some)
        }
        self._keep_logits(itertools.chain.from_iterable(networks.values()), "test")
        rows = self._log.manifest.rows
        return tuple(
            RefitResult(
                trial=number,
                networks=tuple(network.number for network in some),
                rows=rows["train"] + rows["validation"],
                test=mean_metrics(some, self._log, "test", self._logits("test")),
            )
            for number, some in networks.items()
        )

    def confirm_winners(self) -> None:
        """Says whether winners are better than the baseline, if the study is to say so.

        If that cannot be told it says why, and the study ends all the same: the same command would fail
        again, and what was searched for is there.
        """
        least, most = self._config.confirm_seeds
        if not most or not self._state.selection.front:
            return
        record, later, budget = self._state.record(), self._later, self._budget
        winners: list[int] | None = None
        has_time_for: HasTimeFor | None = None
        if later is not None and least < most:
            winners = most_important_first(record)
            while True:  # as many winners as there is time to confirm from the least number of seeds
                wanted = confirming(record, self._log, seeds=most, winners=winners)
                per_seed = len(wanted) // most  # seed by seed, as many from each
                missing = [
                    self.retrainings.missing(wanted[first : first + per_seed], score="test")
                    for first in range(0, len(wanted), per_seed)
                ]
                seed_seconds = [later.retrained(request.of for request in some) for some in missing]
                seconds = sum(seed_seconds[:least])
                in_time = not any(missing[:least]) or budget.has_time_for(seconds)
                if in_time or len(winners) == 1:
                    break
                winners = winners[:-1]
            if not in_time:
                self._state.say(no_time_to_confirm(record, least, seconds))
                return
            seed_of = {request.job.fingerprint: i // per_seed for i, request in enumerate(wanted)}
            begun = set(range(least)) if any(missing[:least]) else set[int]()

            def may_begin(request: RetrainingRequest) -> bool:
                """Whether it may begin: with its seed, or after it as long as the minutes are not over."""
                seed = seed_of[request.job.fingerprint]
                if seed in begun:
                    return budget.has_time_for(0.0)
                begun.add(seed)
                return budget.has_time_for(seed_seconds[seed])

            has_time_for = may_begin
        try:
            comparisons, sentences = confirm(
                record,
                self._log,
                self._ledger,
                self.retrainings,
                seeds=most,
                winners=winners,
                block_by=self._config.block_by,
                has_time_for=has_time_for,
            )
            self._state.note_comparisons(comparisons)
        except UserError as error:
            sentences = [f"{error} The study ends without a verdict; `{confirm_command(record)}` goes on."]
        for sentence in sentences:
            self._state.say(sentence)

    def _leave_time(self, seconds: float, follows: Iterable[float]) -> bool:
        """Says whether so many seconds leave what follows its own, as far as there is time for it in any case."""
        kept = 0.0
        for stage in follows:
            kept += stage if self._budget.has_time_for(kept + stage) else 0.0
        return self._budget.has_time_for(seconds + kept)

    def _judged_earlier(self, choice: Choice, evidence: Evidence) -> Choice:
        """The choice by evidence on earlier periods too, if the study is to have it (`origins`)."""
        origins = origins_of(self._log, self._config.origins)
        if not origins:
            return choice
        # a network that averages have pushed off the front is confirmed, but never the best
        numbers = [winner.trial for winner in choice.winners if winner.trial in choice.front]
        winners = evidence.of(numbers)
        networks = {trial.number: self._state.networks(trial) for trial in winners.trials}
        trial_with = self._state.trials.__getitem__
        earlier, used = with_earlier_periods(
            winners, origins, networks, trial_with, self._log, self.retrainings
        )
        return choice_with_origins(self._state.record(), choice, earlier, used) if used else choice

    def _again(self, lost: Iterable[TrialRecord], why: str) -> Iterator[AdmittedTrial]:
        """Finished trials whose weights are gone, as they begin once more."""
        for owner in {winner.owner: None for winner in lost}:
            finished = self._state.trials[owner]
            job = trained_job(finished, self._log)
            self._state.say(f"trial {owner} {why}")
            fresh = new_record(owner, finished.kind, finished.point, job)
            # whose result it was no longer counts: it is trained here
            origin = finished.origin.replace(
                started_at=fresh.origin.started_at, reused_from_study=None, trained_for_weights=True
            )
            fresh = fresh.replace(origin=origin)
            yield self._admission.admit(fresh.replace(attempts=finished.attempts), job)

    def _take_in(self, members: Members) -> None:
        """Takes in an average that is new, or whose members have other weights than when it was made."""
        validation = mean_metrics(members, self._log, "validation", self._logits("validation"))
        fresh = average_record(len(self._state.trials), members, validation)
        fingerprint = fresh.job.fingerprint
        existing = next(
            (trial for trial in self._state.trials.values() if trial.job.fingerprint == fingerprint), None
        )
        if existing is None:
            self._runner.take_in(fresh)
            return
        before = existing.result.validation
        if before is None or not math.isclose(before.ne, validation.ne, rel_tol=SAME_NE):
            self._note(existing.with_result(validation=validation, test=None))

    def _keep_logits(self, networks: Iterable[TrialRecord], split: str) -> None:
        missing = [network for network in networks if not self._weights.have_logits(network, split)]
        self._score(missing, split, lambda network, metrics: None, keep_logits=True)

    def _score(
        self,
        networks: Iterable[TrialRecord],
        split: str,
        take: Callable[[TrialRecord, Metrics], None],
        *,
        keep_logits: bool,
        winners: Iterable[TrialRecord] = (),
    ) -> None:
        """Scores networks that have weights, each once.

        `winners` are the trials whose results these are; on test each of them counts as a look, and a network that
        is a member alone counts as one.
        """
        unique = {(network.kind is TrialKind.RETRAINING, network.owner): network for network in networks}

        def upcoming() -> Iterator[tuple[TrialRecord, Job]]:
            for network in unique.values():
                if split == "test":  # counted before the score is known: a look that is cut short is a look
                    for trial in _sharing(winners, network) or [network]:
                        self._ledger.count_test_look(trial.network_of)
                yield network, trained_job(network, self._log)

        LOG.info("scoring %d networks on %s", len(unique), split)
        score_networks(
            upcoming(), split, self._trainer, take, side_by_side=self._side_by_side, keep_logits=keep_logits
        )

    def _note(self, record: TrialRecord) -> None:
        """Commits a trial that has changed, and calls the observers."""
        self._runner.note(record)
        self._state.tell()

    def _note_wanted(self, total: int, done: int) -> None:
        stage = self._state.head.stage
        if stage is not None:
            self._settings.enter(stage.name, total, done)

    def _note_progress(self, record: TrialRecord, progress: Progress) -> None:
        self._state.retraining_progress[record.number] = progress

    def _note_retraining(self, record: TrialRecord, ended: bool) -> None:
        self._state.note_retraining(record)
        if ended:
            self._state.retraining_progress.pop(record.number, None)
            self._state.say(retrained_line(record))

    def _logits(self, split: str) -> Callable[[TrialRecord], Path]:
        return partial(self._weights.logits, split=split)


def _sharing(trials: Iterable[TrialRecord], network: TrialRecord) -> list[TrialRecord]:
    """Trials whose result is that of the network."""
    if network.kind is TrialKind.RETRAINING:
        return []
    return [trial for trial in trials if trial.owner == network.owner]
