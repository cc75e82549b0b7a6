"""The leaderboard: who is on it, in which order, and what of it a narrow terminal shows."""

from __future__ import annotations

import io

import pytest
from records import bare, judged, metrics, study
from reports import planned
from rich.console import Console

from dashboards.leaderboard import By, Leaderboard, leaderboard, leaderboard_table
from trials.records.findings import Choice, Winner
from trials.records.study_record import StudyRecord, WinnerVerdict
from trials.records.trial_record import TrialKind


def shown(board: Leaderboard, width: int) -> tuple[list[str], str | None]:
    """The lines of the table, and what is said of columns that had no room."""
    console = Console(file=io.StringIO(), width=width)
    table, no_room = leaderboard_table(board, width)
    console.print(table)
    return console.file.getvalue().splitlines(), no_room  # type: ignore[attr-defined]


def confirmed(record: StudyRecord) -> StudyRecord:
    """The study with two winners, one of which is compared with the baseline."""
    assert record.baseline is not None
    first, second = record.front[0], record.front[-1]
    choice = Choice(
        front=record.front,
        baseline=record.baseline,
        best=second,
        lowest=second,
        winners=(Winner(trial=first, reasons=("knee",)), Winner(trial=second, reasons=("best",))),
        compared=3,
    )
    compared = planned.confirmed(record.replace(best=first)).comparisons
    return record.replace(choice=choice, best=second, knee=first, comparisons=compared)


def test_winners_come_before_the_front_and_all_others() -> None:
    record = confirmed(study(40))
    some, all_rows = leaderboard(record), leaderboard(record, everything=True)
    chosen = {record.baseline, record.front[0], record.front[-1]}
    assert {row.trial for row in some.rows[:3]} == chosen
    assert {row.trial for row in some.rows} == {record.baseline, *record.front}
    assert {row.trial for row in all_rows.rows} == {trial.number for trial in record.trials}
    assert all_rows.rows[: len(some.rows)] == some.rows
    for group in (some.rows[:3], some.rows[3:]):
        assert [row.ne for row in group] == sorted(row.ne for row in group)  # type: ignore[type-var]
    (compared,) = (row for row in some.rows if row.better is not None)
    assert (compared.trial, compared.low_percent, compared.better) == (
        record.front[0],
        -0.41,
        WinnerVerdict.YES,
    )


@pytest.mark.parametrize(("by", "field"), [("flops", "flops"), ("ms", "forward_ms"), ("test", "test_ne")])
def test_it_is_sorted_by_what_is_asked_for_and_unknown_values_come_last(by: By, field: str) -> None:
    trials = [
        bare(1, ne=0.80, flops=5.0).with_plan(serving_ms=2.0).with_result(test=metrics(0.9)),
        bare(2, ne=0.70, flops=9.0),
        bare(3, ne=0.75, flops=7.0).with_plan(serving_ms=1.0).with_result(test=metrics(0.8)),
    ]
    record = judged(trials, finished=False).replace(best=None, knee=None)
    values = [getattr(row, field) for row in leaderboard(record, by=by).rows]
    known = [value for value in values if value is not None]
    assert known == sorted(known)
    assert values == known + [None] * (len(values) - len(known))
    assert len(values) == 3


def test_a_trial_on_all_rows_is_not_compared_with_a_baseline_that_had_a_part_of_them() -> None:
    """The baseline is trained on all rows last."""
    record = study(12)
    promoted = record.trial(record.front[0]).with_origin(promoted_from=record.front[0])
    promoted = promoted.replace(number=len(record.trials))
    rows = leaderboard(record.replace(trials=(*record.trials, promoted)), everything=True).rows
    by_trial = {row.trial: row.vs_baseline_percent for row in rows}
    assert by_trial[promoted.number] is None
    assert by_trial[record.front[0]] is not None


def test_an_export_command_is_given_for_those_whose_weights_are_kept_also_as_members() -> None:
    record = study(40)
    for row in leaderboard(record, everything=True).rows:
        kept = row.trial in (record.baseline, *record.front)
        assert (row.export is not None) == kept
    best = next(row for row in leaderboard(record).rows if row.trial == record.best)
    assert best.export == "dhen-search export runs/ads-march --pick best --out best"
    member = next(trial.number for trial in record.candidates if trial.number not in record.front)
    average = record.trial(record.front[0]).with_origin(members=(record.front[-1], member))
    average = average.replace(number=len(record.trials), kind=TrialKind.AVERAGE)
    front = (*record.front, average.number)
    rows = leaderboard(record.replace(trials=(*record.trials, average), front=front), everything=True).rows
    assert next(row for row in rows if row.trial == member).export is not None


@pytest.mark.parametrize("width", [160, 100, 80, 60, 40])
def test_it_narrows_without_cutting_a_number(width: int) -> None:
    record = confirmed(study(40))
    board = leaderboard(record, everything=True)
    lines, no_room = shown(board, width)
    assert all(len(line) <= width for line in lines)
    assert len(lines) == 1 + len(board.rows)
    for line, row in zip(lines[1:], board.rows, strict=True):
        assert str(row.trial) in line.split()
        assert row.ne is None or f"{row.ne:.5f}" in line
    assert (no_room is None) == (width >= 160)
    if width == 100:
        assert all(title in lines[0] for title in ("vs baseline", "95 % interval", "technique"))
