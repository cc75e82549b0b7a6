from __future__ import annotations

from records import study
from reports.planned import confirmed, planned_study

from dashboards.report.comparison import (
    best_rows,
    different_settings,
    names_of,
    not_comparable,
    render_comparison,
    two_fronts_figure,
)
from trials.records.study_record import StudyRecord

ONE, OTHER = study(), study(seed=1, name="ads-april", directory="runs/ads-april", sampler="random")


def on_log(record: StudyRecord, **changes: object) -> StudyRecord:
    return record.replace(log=record.log.replace(**changes))


def test_studies_of_one_log_and_split_are_compared_by_ne() -> None:
    assert not_comparable(ONE, OTHER) == ()
    figure = two_fronts_figure((ONE, OTHER), names_of(ONE, OTHER), relative=False)
    baselines = [shape.y0 for shape in figure.layout.shapes]
    for trace, baseline, record in zip(figure.data, baselines, (ONE, OTHER), strict=True):
        front = [record.trial(number) for number in record.front]
        assert list(trace.x) == [trial.job.flops for trial in front]
        assert list(trace.y) == [trial.result.validation.ne for trial in front]
        assert baseline == record.trial(record.baseline).result.validation.ne


def test_what_cannot_be_compared_is_said_and_only_differences_are_drawn() -> None:
    other_log = on_log(OTHER, name="other.csv", rows={"train": 5}, fingerprint="1")
    other_split = on_log(OTHER, rows={**OTHER.log.rows, "validation": 10}, fingerprint="1")
    encoded = on_log(OTHER, fingerprint="1")
    by_period = OTHER.replace(period="1d")
    for record, said in (
        (other_log, "The logs differ: ads.csv (train 400,000"),
        (other_split, "The log ads.csv is split otherwise"),
        (encoded, "The prepared logs differ"),
        (by_period, "validation in the one, periods of 1d"),
    ):
        (reason,) = not_comparable(ONE, record)
        assert said in reason
        page = render_comparison(ONE, record)
        assert "What cannot be compared" in page
        assert said in page
    assert "What cannot be compared" not in render_comparison(ONE, OTHER)
    figure = two_fronts_figure((ONE, other_log), names_of(ONE, other_log), relative=True)
    assert [shape.y0 for shape in figure.layout.shapes] == [0.0, 0.0]
    assert figure.layout.yaxis.ticksuffix == " %"


def test_the_best_of_each_and_settings_that_differ_stand_side_by_side() -> None:
    rows = {name: (one, other) for name, one, other in best_rows(confirmed(ONE), planned_study())}
    assert rows["Best"][0].startswith(f"trial {ONE.best}, ")
    assert rows["Difference on test, 95 % interval"] == (
        "-0.30 % (-0.41 to -0.19 %), 3 seeds",
        "not confirmed",
    )
    assert rows["Better than its baseline"] == ("yes", "–")
    assert rows["Predicted peak per rank"] == ("–", "19.0 MiB")
    settings = {name: (one, other) for name, one, other in different_settings(ONE, OTHER)}
    assert settings["Sampler"] == ("tpe, seed 0", "random, seed 0")
    assert "Space" not in settings


def test_nothing_from_data_is_markup() -> None:
    evil = "<script>alert(1)</script>\"'&</script>"
    page = render_comparison(ONE, OTHER.replace(name=evil, sampler=evil, directory=evil))
    assert "<script>alert" not in page
    assert page.count("<script") == render_comparison(ONE, OTHER).count("<script")
