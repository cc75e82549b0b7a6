"""How much a study may still do, by the number of its candidates, by the clock, and by what it has done before."""

from __future__ import annotations

from typing import Any

import pytest
from records import bare, judged, metrics

from search.config import read_study_config
from search.execution.budget import NOTHING_NEW, Budget
from search.execution.later_stages import LaterStages, expected_by_plan
from search.study_state import StudyState
from trials.records.trial_record import CurvePoint, Outcome, TrialKind, TrialRecord


def begun(searched: int = 0, tuned: int = 0, baselines: int = 1, **facts: Any) -> list[TrialRecord]:
    """Trials of the baseline, of the search and of the tuning stage, whatever has become of them."""
    kinds = [TrialKind.BASELINE] * baselines + [TrialKind.CANDIDATE] * (searched + tuned)
    trials = [bare(number, ne=0.9, flops=1.0, kind=kind, **facts) for number, kind in enumerate(kinds)]
    first = baselines + searched
    return trials[:first] + [trial.with_origin(tuned_from=baselines) for trial in trials[first:]]


ROWS = {"train": 800, "validation": 100, "test": 100}
ALONE = "averages=0 refit=no confirm=0 tune=0 search_until=none"
"""Words for a study that does nothing but search."""


def budget(
    words: str,
    trials: list[TrialRecord],
    elapsed_seconds: float = 0.0,
    *,
    spent: bool = False,
    detectable: float | None = None,
) -> Budget:
    config = read_study_config(None, words.split())
    state = StudyState(judged([]), trials, clock=lambda: elapsed_seconds)
    later = LaterStages(config, state, ROWS, side_by_side=1) if config.minutes is not None else None
    return Budget(config, state, spent=spent, later=later, detectable=lambda: detectable, tunable=True)


def test_the_search_is_over_with_as_many_candidates_as_were_asked_for() -> None:
    """Trials of the baseline, of tuning and on all rows are no candidates of the search."""
    assert not budget("trials=3", begun(2, tuned=5, baselines=4)).search_is_over(0)
    assert budget("trials=3", begun(3)).search_is_over(0)
    promoted = bare(9, ne=0.9, flops=1.0, promoted_from=1)
    whole = bare(10, ne=0.9, flops=1.0, promoted_from=0).replace(kind=TrialKind.BASELINE)
    assert not budget("trials=3", [*begun(2), promoted, whole]).search_is_over(0)
    # selection is frozen until the baseline, which comes last, has ended on all rows
    assert budget("trials=3", [*begun(2), promoted]).search_is_over(0)


@pytest.mark.parametrize("outcome", Outcome)
def test_a_candidate_counts_however_it_ended_and_while_it_runs(outcome: Outcome) -> None:
    """What was cut short goes on besides, under its own number."""
    assert budget("trials=2", begun(2, outcome=outcome)).search_is_over(0)


def test_proposals_that_need_no_training_end_a_search_without_a_number_of_trials_alone() -> None:
    assert not budget("trials=null minutes=9", begun()).search_is_over(NOTHING_NEW - 1)
    assert budget("trials=null minutes=9", begun()).search_is_over(NOTHING_NEW)
    assert not budget("trials=500", begun()).search_is_over(NOTHING_NEW)


def test_minutes_alone_leave_the_number_of_candidates_open() -> None:
    assert budget("", begun(20)).search_is_over(0)
    assert not budget("", begun(19)).search_is_over(0)
    assert not budget("minutes=9", begun(200)).search_is_over(0)
    assert budget("minutes=9", begun(200), 540.0).search_is_over(0)


def test_a_candidate_is_not_begun_where_it_is_not_expected_to_end_in_time() -> None:
    """Of two minutes the report has four seconds and what it took last; three in four candidates took 10 s at
    most."""
    trials = begun(8, seconds=10.0)
    words = f"minutes=2 trials=99 {ALONE}"
    for elapsed, over in ((105.9, False), (106.1, True)):
        assert budget(words, trials, elapsed).search_is_over(0) is over
    for slow, over in ((2, False), (3, True)):
        slower = [*trials[:-slow], *(trial.with_result(seconds=30.0) for trial in trials[-slow:])]
        assert budget(words, slower, 90.0).search_is_over(0) is over


def test_the_first_candidate_has_all_of_the_minutes() -> None:
    """Of six minutes a quarter is kept for confirmation, of which there would be nothing to confirm."""
    words = "minutes=6 trials=99 averages=0 tune=0 search_until=none"
    took = begun(0, baselines=3, seconds=20.0)
    for elapsed, over in ((335.9, False), (336.1, True)):
        assert budget(words, took, elapsed).search_is_over(0) is over
    assert budget(words, begun(1, baselines=3, seconds=20.0), 335.9).search_is_over(0)


def test_a_proposal_takes_a_tenth_of_what_is_left_or_twice_what_is_usual() -> None:
    """Ten seconds of training for every 10 ms of a planned step of 100 examples."""
    trials = [
        trial.with_plan(step_seconds=0.01).replace(job=trial.job.replace(training={"batch_size": 100}))
        for trial in begun(8, seconds=10.0)
    ]
    words = f"minutes=10 trials=99 {ALONE}"

    def is_worth(times: float, elapsed: float, known: list[TrialRecord] = trials, asked: str = words) -> bool:
        return budget(asked, known, elapsed).is_worth_its_time(times * 0.01 / 100)

    assert is_worth(4.9, 96.0)
    assert not is_worth(5.1, 96.0)
    assert is_worth(1.9, 496.0)
    assert not is_worth(2.1, 496.0)
    assert is_worth(1.9, 1e9)
    assert is_worth(9.0, 496.0, trials[:3]), "two candidates say nothing of what is usual"
    assert not is_worth(99.0, 496.0, trials[:3]), "it would outlast the search"
    assert is_worth(99.0, 496.0, begun(8, seconds=10.0)), "their plans have no times"
    assert is_worth(99.0, 496.0, asked="trials=99")


def test_the_search_leaves_what_follows_it_its_time() -> None:
    """The baseline and a winner, and four like it to come, are 60 s from one seed: 5 seeds within a quarter of 20
    minutes, 3 of 12. A quarter of 5 is for some of the winners, and of 150 s it is less than the 40 s that the
    best alone takes from two seeds."""
    trials = begun(8, seconds=10.0)
    for minutes, seconds in ((20, 300), (12, 180), (5, 75), (2.75, 41.25), (2.5, 0)):
        words = f"minutes={minutes} averages=0 refit=no search_until=none tune=0"
        end = 60.0 * minutes - 4.0 - seconds - 10.0
        for elapsed, over in ((end - 0.1, False), (end + 0.1, True)):
            assert budget(words, trials, elapsed).search_is_over(0) is over, (minutes, elapsed)


def test_the_search_has_half_of_what_the_baseline_leaves() -> None:
    """Of two minutes the baseline takes 70 s and the report four: 23 s are for the search, where the confirmation
    would have 24 or 30, and winners that are trained once more come before it."""
    trials = [
        trial if trial.kind is TrialKind.BASELINE else trial.with_result(seconds=1.0)
        for trial in begun(1, baselines=10, seconds=7.0)
    ]
    words = "minutes=2 averages=0 search_until=none tune=0"
    for further, end in (
        ("refit=no", 92.0),
        ("refit=auto", 92.0 + 23.0 - 9.6),
        ("refit=no confirm=2", 91.0),
        ("refit=yes confirm=0", 115.0 - 9.6),
    ):
        for late, over in ((-0.1, False), (0.1, True)):
            assert budget(f"{words} {further}", trials, end + late).search_is_over(0) is over, further


def test_a_number_of_seeds_that_was_asked_for_has_its_time_whatever_it_is() -> None:
    words = f"minutes=20 trials=99 {ALONE} confirm=9"
    assert budget(words, begun(8, seconds=10.0), 60 * 20 - 4.0 - 9 * 60.0 - 9.9).search_is_over(0)
    assert not budget(words, begun(8, seconds=10.0), 60 * 20 - 4.0 - 9 * 60.0 - 10.1).search_is_over(0)


def test_the_search_leaves_the_time_of_a_number_of_tuning_candidates() -> None:
    trials, words = begun(9, seconds=10.0), f"trials=99 minutes=10 {ALONE} tune=2"
    assert not budget(words, trials, 565.0).search_is_over(0)
    assert budget(words, trials, 567.0).search_is_over(0)
    assert not budget(words, trials, 567.0).tuning_is_over()
    assert budget(words, trials, 587.0).tuning_is_over()
    assert not budget(words, begun(8, tuned=2, seconds=10.0), 567.0).search_is_over(0)  # tuned already


def test_a_number_of_tuning_candidates_takes_half_of_the_minutes_at_most() -> None:
    words = f"trials=99 minutes=10 {ALONE} tune=50"
    assert not budget(words, begun(9, seconds=10.0), 285.0).search_is_over(0)
    assert budget(words, begun(9, seconds=10.0), 287.0).search_is_over(0)


def test_trainings_on_all_rows_have_their_time() -> None:
    """Six networks of 40 s each where a quarter of the rows takes 10 s."""
    words = f"trials=99 minutes=10 {ALONE} training.train_fraction=0.25"
    assert not budget(words, begun(9, seconds=10.0), 600 - 4 - 240 - 10.1).search_is_over(0)
    assert budget(words, begun(9, seconds=10.0), 600 - 4 - 240 - 9.9).search_is_over(0)


def test_those_that_won_after_others_were_trained_on_all_rows_have_their_time() -> None:
    words = f"trials=99 minutes=10 {ALONE} training.train_fraction=0.25"
    searched = begun(9, seconds=10.0)
    promoted = [
        bare(20 + number, ne=0.9, flops=1.0, kind=trial.kind, seconds=40.0, promoted_from=trial.number)
        for number, trial in enumerate(searched[:2])
    ]
    later = LaterStages(
        read_study_config(None, words.split()),
        state := StudyState(judged([]), [*searched, *promoted], clock=lambda: 0.0),
        ROWS,
        side_by_side=1,
    )
    assert later.promotions() == 0.0
    state.note(bare(10, ne=0.8, flops=1.0, seconds=10.0))
    assert later.promotions() == 40.0


def test_winners_that_learn_from_validation_too_have_their_time() -> None:
    """Six networks, on rows of both: at most 8 % of the minutes."""
    words = f"trials=99 {ALONE}".replace("refit=no", "refit=auto")
    longer = 60.0 * (1 + ROWS["validation"] / ROWS["train"])
    for minutes, seconds in ((20, longer), (10, 48)):
        for late, over in ((-0.1, False), (0.1, True)):
            elapsed = 60 * minutes - 4 - seconds - 10 + late
            spent = budget(f"{words} minutes={minutes}", begun(9, seconds=10.0), elapsed)
            assert spent.search_is_over(0) is over, (minutes, late)


def test_the_baseline_is_tuned_in_half_of_the_minutes() -> None:
    trained = begun(0, baselines=2, seconds=10.0)
    assert budget("minutes=1", [], 59.0).has_time_for_baseline()  # without a baseline there is no study
    assert budget("minutes=1", trained, 20.0).has_time_for_baseline()
    assert not budget("minutes=1", trained, 20.1).has_time_for_baseline()
    assert budget("", trained, 1e9).has_time_for_baseline()


def planned(trial: TrialRecord, times: float = 1.0) -> TrialRecord:
    """Its step of 100 examples is planned to take so many times 10 ms."""
    training = trial.job.replace(training={"batch_size": 100})
    return trial.with_plan(step_seconds=times * 0.01).replace(job=training)


def test_a_training_that_would_outlast_its_part_of_the_minutes_is_not_begun() -> None:
    """Of ten minutes the baseline has five, the search all but the four seconds of the report."""
    trials, words = [planned(trial) for trial in begun(2, seconds=10.0)], f"minutes=10 trials=9 {ALONE}"
    baseline, candidate = trials[:2]

    def too_long(
        trial: TrialRecord, times: float, elapsed: float, known: list[TrialRecord] = trials
    ) -> str | None:
        return budget(words, known, elapsed).too_long(planned(trial, times))

    assert too_long(baseline, 25.0, 40.0) is None
    refused = too_long(baseline, 27.0, 40.0)
    assert refused is not None
    assert "would take about 4 min 30 s, and the baseline's part has 4 min 20 s" in refused
    assert too_long(candidate, 58.0, 40.0) is None
    assert too_long(candidate, 60.0, 40.0) is not None
    assert too_long(candidate, 1.9, 595.0) is None, "it may take as long as others"
    assert too_long(baseline, 1e9, 40.0, []) is None, "there has to be a baseline"
    running = baseline.with_result(outcome=Outcome.RUNNING, seconds=None)
    beside = running.replace(number=1)
    # a pass of 800 examples by the plan alone, as nothing is known of what plans are worth
    assert too_long(beside, 3_000.0, 40.0, [running]) is None
    assert too_long(beside, 4_000.0, 40.0, [running]) is not None
    assert too_long(running, 4_000.0, 40.0, [running]) is None, "it was interrupted, and there has to be one"
    assert budget("trials=9", trials, 40.0).too_long(planned(candidate, 1e9)) is None


def after(epoch: float) -> CurvePoint:
    validation = metrics(0.9)
    return CurvePoint(
        examples=100, epoch=epoch, train_loss=0.5, learning_rate=0.1, seconds=60.0, validation=validation
    )


def test_the_first_training_has_half_of_what_is_left_and_what_was_cut_does_not_keep_candidates_away() -> None:
    words, baseline = f"minutes=10 trials=9 {ALONE}", planned(begun(0, seconds=60.0)[0])
    assert budget(words, [], 500.0).seconds_left(baseline) == 50.0
    assert budget(words, [], 100.0).seconds_left(baseline) == 250.0
    assert budget(words, [baseline], 100.0).seconds_left(baseline) == 200.0
    assert budget(words, [baseline], 560.0).search_is_over(0)
    measured = baseline.result.measured.replace(cut_after=100)
    cut = baseline.with_result(measured=measured, curve=(after(0.1),))
    assert not budget(words, [cut], 560.0).search_is_over(0)
    assert budget(words, [cut], 560.0).too_long(baseline.replace(kind=TrialKind.CANDIDATE)) is None
    assert expected_by_plan(0.0001, [cut]) == pytest.approx(600.0), "it would have taken ten times as long"


def test_a_candidate_that_outlasts_the_search_is_cut_short_where_others_have_completed() -> None:
    """The search of ten minutes ends four seconds before them; 5 % of them is given on top."""
    trials, words = begun(3, seconds=10.0), f"minutes=10 trials=9 {ALONE}"
    slow = trials[3].with_result(outcome=Outcome.RUNNING, seconds=None)
    trials = [*trials[:3], slow]
    assert not budget(words, trials, 625.0).cuts_short(slow)
    assert budget(words, trials, 627.0).cuts_short(slow)
    assert not budget(words, [trials[0], slow], 627.0).cuts_short(slow)
    assert not budget(words, trials, 627.0).cuts_short(trials[0]), "the baseline is needed"
    assert not budget(f"trials=9 {ALONE}", trials, 1e9).cuts_short(slow)


def searching(*nes: float) -> list[TrialRecord]:
    """A baseline, and candidates with these NEs."""
    return [
        bare(0, ne=0.9, flops=1.0, kind=TrialKind.BASELINE, seconds=1.0),
        *(bare(number, ne=ne, flops=1.0, seconds=1.0) for number, ne in enumerate(nes, 1)),
    ]


LEVEL = [0.8 + 0.00001 * (number % 7) for number in range(40)]
"""NEs among which nothing is to be gained."""
FALLING = [0.9 - 0.002 * number for number in range(40)]


def test_a_search_ends_where_the_log_cannot_show_what_it_would_gain() -> None:
    words = "minutes=60 tune=0"
    ended = budget(words, searching(*LEVEL), detectable=0.001)
    assert ended.search_is_over(0)
    assert ended.enough is not None
    assert (ended.enough.candidates, ended.enough.more) == (40, 40)
    assert ended.enough.detectable_percent == pytest.approx(0.1)
    assert ended.enough.worth_percent is None
    assert 0.0 < ended.enough.percent < 0.1
    assert not budget(words, searching(*FALLING), detectable=0.001).search_is_over(0)
    assert not budget(words, searching(*LEVEL), detectable=0.0).search_is_over(0)
    assert not budget(words, searching(*LEVEL), detectable=None).search_is_over(0)
    assert not budget(words, searching(*LEVEL[:28]), detectable=0.001).search_is_over(0)


def test_candidates_of_one_job_are_one_draw() -> None:
    """As many as before, but the lowest is ten times the same."""
    words = "minutes=60 tune=0"
    trials = searching(*LEVEL[:20], *[LEVEL[0]] * 10)
    twins = [trial.with_origin(reused_from=1) if trial.number > 20 else trial for trial in trials]
    assert budget(words, trials, detectable=0.001).search_is_over(0)
    assert not budget(words, twins, detectable=0.001).search_is_over(0)


def test_a_search_ends_where_what_it_would_gain_is_not_worth_it() -> None:
    assert budget("minutes=60 tune=0 worth=0.1%", searching(*LEVEL)).search_is_over(0)
    assert not budget("minutes=60 tune=0 worth=0.1%", searching(*FALLING)).search_is_over(0)
    assert budget("minutes=60 tune=0 worth=50%", searching(*FALLING), detectable=0.0).search_is_over(0)
    assert budget("trials=500 worth=0.1%", searching(*LEVEL)).search_is_over(0)


def test_a_search_does_not_end_early_where_nobody_asked_for_it() -> None:
    for words in ("minutes=60 search_until=none", "minutes=60 trials=500", "trials=500"):
        assert not budget(words, searching(*LEVEL), detectable=0.1).search_is_over(0), words
    assert budget("trials=500 search_until=auto", searching(*LEVEL), detectable=0.1).search_is_over(0)
    assert budget("search_until=auto", searching(*LEVEL), detectable=0.1).search_is_over(0)
    assert not budget("search_until=auto", searching(*FALLING), detectable=0.001).search_is_over(0)


def test_what_the_log_can_show_is_measured_when_it_decides() -> None:
    """Each measurement is two scorings."""
    asked: list[int] = []
    config = read_study_config(None, ["minutes=60", "tune=0"])
    state = StudyState(judged([]), searching(*FALLING), clock=lambda: 0.0)
    later = LaterStages(config, state, ROWS, side_by_side=1)

    def detectable() -> float:
        asked.append(len(state.candidates))
        return 0.0001

    open_ended = Budget(config, state, spent=False, later=later, detectable=detectable)
    for number in range(41, 61):
        assert not open_ended.search_is_over(0)
        state.note(bare(number, ne=0.9 - 0.002 * number, flops=1.0, seconds=1.0))
    assert asked == [40]


def test_tuning_takes_turns_from_the_middle_on() -> None:
    """Three at a time; then whichever has gained more per second, and where neither has, the other one."""
    words = "minutes=60 averages=0 refit=no confirm=0"

    def next_is_tuning(trials: list[TrialRecord], elapsed: float = 3000.0) -> bool:
        return budget(words, trials, elapsed).tuning_is_next()

    first = begun(9, seconds=190.0)
    spans = [
        trial.with_origin(started_at=f"2026-03-01T12:{3 * i:02d}:00+00:00") for i, trial in enumerate(first)
    ]
    assert not next_is_tuning(spans, 1000.0)
    assert next_is_tuning(spans)
    one = [*spans, spans[1].replace(number=10).with_origin(tuned_from=1)]
    two = [*one, one[-1].replace(number=11)]
    three = [*two, one[-1].replace(number=12)]
    assert next_is_tuning(one)
    assert next_is_tuning(two)
    assert not next_is_tuning(three), "neither has gained anything: it is the search's turn"
    gained = [*two, bare(12, ne=0.8, flops=1.0, seconds=190.0, tuned_from=1)]
    assert next_is_tuning(gained), "tuning has gained"
    searched = [*gained, *(bare(number, ne=0.3, flops=1.0, seconds=1.0) for number in (13, 14, 15))]
    assert not next_is_tuning(searched), "the search has gained more"
    assert not budget("trials=99 minutes=60", spans, 3000.0).tuning_is_next()


def test_the_clock_does_not_end_a_study_without_minutes() -> None:
    assert not budget("trials=9 tune=2", begun(1), 1e9).search_is_over(0)
    assert not budget("trials=9 tune=2", begun(1), 1e9).tuning_is_over()
    assert not budget("trials=9", begun(1), 1e9).tuning_is_next()


def test_tuning_is_over_with_as_many_candidates_as_it_was_given() -> None:
    assert not budget("trials=3 tune=2", begun(3, tuned=1)).tuning_is_over()
    assert budget("trials=3 tune=2", begun(3, tuned=2)).tuning_is_over()
    assert budget("trials=3", begun(3)).tuning_is_over()


def test_a_study_that_had_come_to_its_end_with_this_budget_does_no_more() -> None:
    left = budget("trials=null minutes=60 tune=5", begun(1), 1.0, spent=True)
    assert left.search_is_over(0)
    assert left.tuning_is_over()


def test_seeds_that_were_asked_for_leave_the_search_half_of_the_minutes() -> None:
    words = f"minutes=2 trials=99 {ALONE} confirm=9"
    assert not budget(words, begun(8, seconds=10.0), 45.9).search_is_over(0)
    assert budget(words, begun(8, seconds=10.0), 46.1).search_is_over(0)
