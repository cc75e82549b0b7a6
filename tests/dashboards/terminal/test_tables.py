from __future__ import annotations

import io

import pytest
from records import judged, study
from rich.console import Console

from dashboards.rows import trial_rows
from dashboards.sentences.summary import progress
from dashboards.terminal.tables import progress_line, seconds_left, trial_line, trial_table
from trials.records.study_record import StageName, StudyStage
from trials.records.trial_record import Outcome


def shown(renderable, *, width: int = 120, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def numbers(text: str) -> list[int]:
    firsts = [line.split()[0] for line in text.splitlines() if line.strip() and "trials:" not in line]
    return [int(first) for first in firsts if first.isdigit()]


def test_little_room_is_for_what_matters_and_the_newest() -> None:
    record = study(60, finished=False)
    text = shown(trial_table(record, rows=12))
    found = numbers(text)
    assert len(found) == 12
    assert found == sorted(found)
    running = [trial.number for trial in record.trials if trial.result.outcome is Outcome.RUNNING]
    assert {record.best, record.knee, record.baseline, *running} <= set(found)
    assert "12 of 64 trials" in text


@pytest.mark.parametrize("width", [60, 80, 140])
def test_numbers_are_never_cut(width: int) -> None:
    text = shown(trial_table(study(), rows=50), width=width)
    best = next(line for line in text.splitlines() if " best " in line)
    assert best.split()[2].startswith("0.7")
    assert len(best.split()[2]) == len("0.78123")
    assert max(map(len, text.splitlines())) <= width
    assert all(f" {mark} " in text for mark in ("best", "knee", "front", "baseline"))
    assert "\x1b" not in text
    assert width < 140 or "[conv+cross+dlrm] concat" in text, "brackets are no markup"


def test_a_running_trial_is_compared_at_the_same_examples() -> None:
    record = study(3, finished=False)
    row = trial_rows(record)[-1]
    last = record.trials[-1].result.curve[-1]
    same = next(p for p in record.trial(record.baseline).result.curve if p.examples == last.examples)
    assert row.trial.result.outcome is Outcome.RUNNING
    assert row.relative_percent == pytest.approx(100 * (last.validation.ne / same.validation.ne - 1))


def test_progress_tells_pace_running_and_best() -> None:
    record = study(20, finished=False, trials_budget=40, elapsed_seconds=230.0)
    text = progress_line(record).plain
    assert text.startswith("20/40 candidates, 3 min 50 s, about 3 min 20 s left, running 23")
    assert f"best {record.best}: NE 0.7" in text
    assert "finished" in progress_line(study()).plain


def test_a_study_without_a_driver_is_said_to_stand_still() -> None:
    cut = [trial.with_result(outcome=Outcome.INTERRUPTED) for trial in study(3).trials[-1:]]
    record = judged([*study(3).trials[:-1], *cut], finished=False, budget=9, running=False)
    text = progress_line(record).plain
    assert text.startswith("2/9 candidates")
    assert ", not running" in text
    assert "left" not in text
    assert progress(record) == "not running, 2 of 9 candidates"


def test_time_left_knows_nothing_of_what_comes_before_the_first_trial() -> None:
    """Minutes in which the machine is measured; then trainings of 34.6 s, and more in the stage of the search."""
    stage = StudyStage(name=StageName.SEARCH, total=30, began_seconds=100.0)
    record = study(0).replace(finished=False, trials_budget=30, stage=stage, elapsed_seconds=100.0)
    assert [trial.result.seconds for trial in record.trials] == [34.6] * len(record.trials)
    assert seconds_left(record.replace(elapsed_seconds=1000.0, stage=None)) == pytest.approx(30 * 34.6)
    searched = study(10).replace(finished=False, trials_budget=30, stage=stage, elapsed_seconds=200.0)
    done = sum(trial.result.outcome is not Outcome.RUNNING for trial in searched.candidates)
    assert seconds_left(searched) == pytest.approx((30 - done) * 100.0 / done)
    record = study(20, trials_budget=40, elapsed_seconds=230.0, seconds_budget=240.0)
    assert seconds_left(record) == pytest.approx(10.0)
    assert seconds_left(record.replace(elapsed_seconds=300.0)) == 0.0
    assert seconds_left(judged([], finished=False)) is None


def test_a_stage_says_how_many_of_how_many_and_how_long() -> None:
    stage = StudyStage(name=StageName.BASELINE, total=5, done_before=1, counted_before=1, began_seconds=10.0)
    record = study(0).replace(finished=False, trials_budget=20, stage=stage, elapsed_seconds=40.0)
    # two of three trainings ended in this session's 30 seconds, and half of one more is done
    text = progress_line(record, {3: 0.5}).plain
    assert text.startswith("baseline: 3/5 trainings, about 18 s left; 0/20 candidates, 40 s")
    search = record.replace(stage=StudyStage(name=StageName.SEARCH, total=20))
    assert progress_line(search).plain.startswith("search: 0/20 candidates, 40 s")
    late = study(20).replace(finished=False, stage=StudyStage(name=StageName.TEST))
    assert progress_line(late).plain.startswith("scores on test; 20/20 candidates")
    assert "left" not in progress_line(late).plain


def test_a_line_a_trial_for_logs() -> None:
    record = study(60)
    infeasible = next(trial for trial in record.trials if trial.result.outcome is Outcome.INFEASIBLE)
    best, failed, first = (trial_line(record, number).plain for number in (record.best, infeasible.number, 0))
    assert best.startswith(f"trial {record.best} completed, NE 0.7")
    assert infeasible.result.error in failed
    assert "NE" not in failed
    assert first.startswith("baseline 0 completed")
