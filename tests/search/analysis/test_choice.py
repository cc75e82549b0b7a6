"""The choice of best and winners: what choosing makes of an NE, what is as good, and who is confirmed."""

from __future__ import annotations

import numpy as np
import pytest
from records import bare, judged

from dashboards.sentences.summary import sentences
from search.analysis.choice import Evidence, choice_of, choice_with_origins, judge, winners_of
from search.analysis.statistics import optimism_percent, relative_percent, standard_errors
from search.selection import picked
from search.study_state import StudyState
from trials.records.findings import MOST_WINNERS
from trials.records.metrics import Floats
from trials.records.serving_limits import ServingConfig
from trials.records.study_record import StudyRecord
from trials.records.trial_record import TrialKind, TrialRecord

BLOCKS = 60


def noisy(rng: np.random.Generator, means: list[float], deviation: float, blocks: int = BLOCKS) -> Floats:
    """Losses by trial and block: these means, a common swing, and noise of each trial's own."""
    common_K = rng.normal(0.0, 0.3, blocks)
    return np.array(means)[:, None] + common_K + rng.normal(0.0, deviation, (len(means), blocks))


def test_optimism_is_what_choosing_gained_where_all_are_equal() -> None:
    """Over many logs: the lowest of ten equal ones looks lower than it is by as much as is estimated."""
    rng = np.random.default_rng(1)
    gained, estimated = [], []
    for _ in range(300):
        loss_CK = noisy(rng, [10.0] * 10, 0.4)
        gained.append(100.0 * (loss_CK.mean(axis=1).mean() - loss_CK.mean(axis=1).min()) / 10.0)
        estimated.append(optimism_percent(loss_CK, resamples=200))
    assert np.mean(estimated) == pytest.approx(np.mean(gained), rel=0.15)
    assert optimism_percent(noisy(rng, [9.0, 10.0, 10.0], 0.1)) == 0.0, "a clear lowest"
    assert optimism_percent(noisy(rng, [10.0], 0.4)) == 0.0


def test_standard_errors_are_those_of_repeated_logs() -> None:
    rng = np.random.default_rng(3)
    logs = [noisy(rng, [10.0, 10.2], 0.4) for _ in range(400)]
    spread = np.std([relative_percent(loss_CK, loss_CK[0])[1] for loss_CK in logs])
    assert np.mean([standard_errors(loss_CK, loss_CK[0])[1] for loss_CK in logs]) == pytest.approx(
        spread, rel=0.1
    )


def evidence(
    trials: list[TrialRecord], means: list[float], deviation: float = 0.05, periods: int = 1
) -> Evidence:
    loss_CK = noisy(np.random.default_rng(0), means, deviation)
    return Evidence(trials=tuple(trials), loss_CK=loss_CK, period_K=np.arange(BLOCKS) * periods // BLOCKS)


def field() -> list[TrialRecord]:
    """The baseline, then candidates with 0.1, 1 and 10 MFLOPs."""
    return [
        bare(0, ne=0.8, flops=5e5, kind=TrialKind.BASELINE),
        *(bare(number, ne=0.8, flops=10.0 ** (number + 4)) for number in (1, 2, 3)),
    ]


@pytest.mark.parametrize(
    ("means", "best"),
    [
        ([10.0, 9.9, 9.5, 9.0], 3),  # the lowest, far ahead of all others
        ([10.0, 9.9, 9.0, 8.999], 2),  # as good, with a tenth of the FLOPs
        ([10.0, 11.0, 10.0, 9.999], 0),  # none is better than the baseline, which is cheaper
        ([10.0, 10.0, 10.0, 9.999], 0),  # nor is another as good for being cheaper
        ([9.0, 9.9, 9.5, 9.4], 0),  # the baseline is the lowest itself
    ],
)
def test_the_best_is_the_baseline_or_the_cheapest_as_good_as_the_lowest(
    means: list[float], best: int
) -> None:
    assert judge(evidence(field(), means)).best == best


def test_a_baseline_over_a_limit_is_never_the_best_whatever_candidates_are_beside_it() -> None:
    """Its NE is far below theirs; the best is the lowest of those that may be it."""
    baseline, *candidates = field()
    over = [baseline.with_plan(serving_excess=1.0), *candidates]
    verdict = judge(evidence(over, [9.0, 12.0, 11.0, 10.0], periods=4))
    assert (verdict.best, verdict.lowest) == (3, 3)
    assert judge(evidence(over, [9.0, 12.0, 10.0, 9.999])).best == 2  # as good, and cheaper
    assert judge(evidence(over[:1], [9.0])).best == 0


def test_the_steadier_stands_before_the_cheaper() -> None:
    """Two as good on the whole: the cheap one is far worse than the baseline in one period of four."""
    drawn = evidence(field(), [10.0, 9.5, 9.5, 9.5], periods=4)
    equal_CK = np.stack([drawn.loss_CK[0], *[drawn.loss_CK[1]] * 3])
    flat = Evidence(trials=drawn.trials, loss_CK=equal_CK, period_K=drawn.period_K)
    swinging_CK = flat.loss_CK.copy()
    swinging_CK[1] += np.where(flat.period_K == 2, 1.2, -0.4)
    uneven = Evidence(trials=flat.trials, loss_CK=swinging_CK, period_K=flat.period_K)
    assert judge(flat).best == 1
    verdict = judge(uneven)
    assert verdict.best == 2
    assert [one.worse_periods for one in verdict.judged] == [0, 1, 0, 0]
    assert verdict.judged[1].by_period[2] > 5.0


def test_the_baseline_alone_has_what_the_lowest_owes_to_having_been_chosen() -> None:
    """Half a percent behind, which is many standard errors: other candidates were chosen on these rows too."""
    trials, means = field(), [10.0, 9.95, 9.95, 9.9]
    assert judge(evidence(trials, means, deviation=0.001), optimism=0.2).best == 3
    behind = evidence(trials, [9.95, 9.95, 9.95, 9.9], deviation=0.001)
    assert judge(behind, optimism=0.2).best == 3
    assert judge(behind, optimism=1.0).best == 0


def test_earlier_periods_count_as_much() -> None:
    """What was lowest on validation alone is not on the periods before it."""
    late = evidence(field(), [10.0, 10.0, 9.9, 9.0])
    early = evidence(field(), [10.0, 10.0, 9.0, 12.0])
    both = late.and_earlier(early.loss_CK, early.period_K)
    assert (judge(late).best, judge(both).best, both.periods) == (3, 2, 2)


def a_study(**changes: object) -> StudyRecord:
    """A front of candidates and averages: 1, 2, 5, 3, 6, by FLOPs; 4 is on the front of candidates alone."""
    trials = [
        bare(0, ne=0.80, flops=5e5, kind=TrialKind.BASELINE),
        bare(1, ne=0.82, flops=1e5),
        bare(2, ne=0.79, flops=3e5),
        bare(3, ne=0.77, flops=2e6),
        bare(4, ne=0.765, flops=9e6),
        bare(5, ne=0.775, flops=1e6, kind=TrialKind.AVERAGE).with_origin(members=(1, 2)),
        bare(6, ne=0.76, flops=8e6, kind=TrialKind.AVERAGE).with_origin(members=(2, 3)),
    ]
    return StudyState(judged([]).replace(**changes), trials).record()


def test_at_most_five_are_confirmed_each_with_its_reasons() -> None:
    record = a_study(serving=ServingConfig(max_flops=1e7))
    assert record.front == (1, 2, 5, 3, 6)
    assert record.networks_front == (1, 2, 3, 4)
    reasons = {winner.trial: winner.reasons for winner in winners_of(record, 5)}
    assert list(reasons) == [2, 5, 6, 4]  # by FLOPs
    assert reasons[5][0] == "best"
    assert reasons[2][-1] == "best below the baseline's FLOPs"
    assert reasons[4] == ("best network",)
    assert reasons[6] == ("best average", "best within the limits of serving")
    assert len(reasons) <= MOST_WINNERS
    assert [trial for trial, found in reasons.items() if "knee" in found] == [record.knee]
    twin = record.trial(4).with_job(fingerprint=record.trial(0).job.fingerprint)
    trials = [twin if trial.number == 4 else trial for trial in record.trials]
    without_twin = StudyState(record, trials).record()
    assert 4 not in {winner.trial for winner in winners_of(without_twin, 5)}, "a twin of the baseline"


def test_with_earlier_periods_the_lowest_still_owes_what_it_owed_to_being_chosen() -> None:
    record, few = a_study(), 5
    behind = evidence([record.trial(number) for number in (0, 1, 2, 3)], [9.95, 9.95, 9.95, 9.9], 0.001)
    choice = choice_of(record, None)
    assert choice_with_origins(record, choice.replace(optimism_percent=0.2), behind, few).best == 3
    assert choice_with_origins(record, choice.replace(optimism_percent=1.0), behind, few).best == 0


def test_a_choice_stands_until_the_front_changes() -> None:
    record = a_study()
    choice = choice_of(record, None)
    assert (choice.best, choice.lowest) == (6, 6)  # validation has too few rows to say more
    chosen = choice.replace(best=2)
    state = StudyState(record.replace(choice=chosen), record.trials)
    assert (state.record().best, picked(state.record(), "best").number) == (2, 2)
    assert picked(state.record(), "lowest").number == 6
    # on the front of candidates alone, so its weights are there
    assert picked(state.record(), "4").number == 4
    state.note(bare(7, ne=0.5, flops=1e4))
    assert state.record().choice is None
    assert state.record().best == 7


def test_the_baseline_may_be_the_best_and_is_said_to_be() -> None:
    record = a_study()
    front = [record.trial(number) for number in record.front]
    trials = [record.trial(0), *front]
    choice = choice_of(record, evidence(trials, [10.0, 10.2, 10.3, 10.1, 10.1, 9.999]))
    assert choice.best == 0
    assert choice.optimism_percent == 0.0
    assert [one.close for one in choice.judged] == [True, False, False, False, False, True]
    told = sentences(StudyState(record.replace(choice=choice), record.trials).record())
    assert told[0].startswith("None is better than the tuned baseline beyond what choosing among 5 explains")
    assert "trial 6 (average of trials 2 and 3): the baseline is worse by " in told[1]
    assert not any(line.startswith("Choosing the lowest") for line in told), "it gained nothing"
    lucky = record.replace(choice=choice.replace(optimism_percent=0.2))
    told_of_luck = sentences(StudyState(lucky, record.trials).record())
    words = "Choosing the lowest NE of 5 makes it look about 0.20 % lower"
    assert any(line.startswith(words) for line in told_of_luck)
    assert any("Chosen before test was looked at" in line and "(knee" in line for line in told)
