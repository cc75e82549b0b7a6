from __future__ import annotations

import shlex

import click
import pytest
from records import judged, study
from reports.planned import confirmed, plan, planned_study

from dashboards.report.answers import answers, export_line, next_commands
from dashboards.rows import trial_rows
from search.cli import cli
from trials.records.study_record import StudyRecord, WinnerVerdict


def answer(record: StudyRecord, question: str) -> tuple[str, str, str]:
    (found,) = [each for each in answers(record).answers if each.question == question]
    return found.value, found.detail, found.tone


def test_how_much_better_is_the_records_relative_ne() -> None:
    record = study()
    best = trial_rows(record, (record.trial(record.best),))[0]
    value, detail, tone = answer(record, "How much better?")
    assert value == f"{best.relative_percent:+.2f} %"
    assert f"{best.ne:.5f}" in detail
    assert tone == ("good" if best.relative_percent < 0 else "bad")
    assert answers(record).number == record.best


def test_cost_names_units_and_a_cheaper_one() -> None:
    record = planned_study()
    value, detail, _ = answer(record, "At what cost?")
    assert value.endswith("FLOPs per example")
    assert "dense parameters" in detail
    assert (f"cheaper: trial {record.knee}," in detail) == (record.knee != record.best)


@pytest.mark.parametrize(
    ("better", "value", "tone"),
    [
        (WinnerVerdict.YES, "Yes, better", "good"),
        (WinnerVerdict.NO, "Yes, worse", "bad"),
        (WinnerVerdict.CANNOT_TELL, "This log cannot tell", "open"),
    ],
)
def test_certainty_is_the_verdict_of_the_comparison(better: WinnerVerdict, value: str, tone: str) -> None:
    record = confirmed(study(), better)
    found = answer(record, "Is it certain?")
    assert (found[0], found[2]) == (value, tone)
    assert "95 % interval" in found[1]
    assert "3 seeds" in found[1]
    (comparison,) = record.comparisons
    assert answers(record).comparison == comparison


def test_fit_is_the_plans_verdict() -> None:
    record = planned_study()
    value, detail, tone = answer(record, "Does it fit?")
    assert (value, tone) == ("Yes, with fsdp", "good")
    assert "19.0 MiB of 24.0 MiB per rank on 4 ranks of two-hosts" in detail
    assert answers(record).memory_share == pytest.approx(19 / 24)
    best = record.trial(record.best)
    none = best.with_plan(technique=None, summary=plan(fits=False, remedy="hbm=30MiB would do."))
    other = record.replace(trials=tuple(none if each is best else each for each in record.trials))
    assert answer(other, "Does it fit?")[::2] == ("No technique fits", "bad")


RECORDS = {
    "unconfirmed": study(),
    "confirmed": confirmed(study()),
    "running": study(3, finished=False),
    "cut short": study(3, finished=False, running=False),
    "empty": judged([]),
    "a name for the shell": study(directory="runs/it's; here"),
}


def test_what_is_next_follows_the_state_of_the_study_and_is_what_the_program_takes() -> None:
    for record in RECORDS.values():
        for line in [*(command.line for command in next_commands(record)), export_line(record, 3)]:
            program, verb, *words = shlex.split(line)
            assert program == "dhen-search"
            command = cli.get_command(click.Context(cli), verb)
            assert command is not None, line
            command.make_context(verb, [*words])
            assert record.directory in words or verb == "predict"
    first = {name: next_commands(record)[0].line.split()[1] for name, record in RECORDS.items()}
    assert first == {
        "unconfirmed": "confirm",
        "confirmed": "export",
        "running": "status",
        "cut short": "run",
        "empty": "run",
        "a name for the shell": "confirm",
    }
