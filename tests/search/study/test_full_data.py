"""A search on a part of the log ends with winners trained on all of it, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from command_line import SMALL, Run
from records import bare, changed, judged, study

from dashboards.rows import trial_rows
from dashboards.sentences.summary import progress, sentences
from dhen.errors import UserError
from dhen.values import parse
from search.bundles.export import study_log
from search.config import StudyConfig
from search.read_study import read_study
from search.study.settings import check_training_axes
from search.study.tuning import read_baseline, to_promote
from search.study_state import StudyState
from spaces.space import Space, SpaceConfig
from trials.records.job import TrainingConfig
from trials.records.study_record import StudyRecord
from trials.records.trial_record import CurvePoint, Outcome, TrialKind, TrialRecord

PART = {"train_fraction": 0.25}


def searched() -> list[TrialRecord]:
    """A baseline and two candidates on the front, on a quarter of the log."""
    return [
        bare(0, ne=0.9, flops=1e6, kind=TrialKind.BASELINE, training=PART),
        bare(1, ne=0.8, flops=2e5, training=PART),
        bare(2, ne=0.7, flops=5e5, training=PART),
    ]


def promoted(number: int, of: TrialRecord, ne: float, outcome: Outcome = Outcome.COMPLETED) -> TrialRecord:
    return (
        of.replace(number=number)
        .with_origin(promoted_from=of.number)
        .with_job(training={})
        .with_result(
            outcome=outcome, validation=of.result.validation.replace(ne=ne) if of.result.validation else None
        )
    )


def test_a_fraction_of_one_leaves_fingerprints_alone() -> None:
    assert "train_fraction" not in TrainingConfig().to_dict()
    assert TrainingConfig(train_fraction=0.5).to_dict()["train_fraction"] == 0.5
    for wrong in (0.0, -0.5, 1.5):
        with pytest.raises(UserError, match="train_fraction"):
            parse(TrainingConfig, {"train_fraction": wrong}, "training")


def test_what_was_cut_short_ends_though_others_have_won_since() -> None:
    trials = searched()
    cut_short = promoted(3, trials[1], 0.85, Outcome.INTERRUPTED)
    better = bare(4, ne=0.6, flops=1e5, training=PART)
    state = StudyState(study(), [*trials, cut_short, better])
    assert [trial.number for trial in state.searched.networks] == [4]
    assert [trial.number for trial in to_promote(state)] == [1, 4, 0]


def test_a_part_is_trained_as_the_whole_is() -> None:
    whole, part = (TrainingConfig(train_fraction=f).resolved(400_000, "fp32") for f in (1.0, 0.1))
    assert (part.batch_size, part.epochs, part.schedule) == (whole.batch_size, whole.epochs, whole.schedule)
    assert (whole.evaluate_every, part.evaluate_every) == (100_000, 10_000)
    assert part.resolved(400_000, "fp32") == part  # a bundle's training is resolved once more
    with pytest.raises(UserError, match="over 40000 examples"):
        TrainingConfig(train_fraction=0.1, warmup_examples=50_000).resolved(400_000, "fp32")


def test_the_verdict_turns_to_all_rows_when_all_selected_have_ended() -> None:
    trials = searched()
    state = StudyState(judged([]), trials)
    state.note(promoted(3, trials[1], 0.6))
    state.note(promoted(4, trials[2], 0.65, Outcome.RUNNING))
    state.note(promoted(5, trials[0], 0.85))
    assert _numbers(state.selection.front) == [1, 2] == _numbers(state.searched.front)
    state.note(promoted(4, trials[2], 0.65))
    assert _numbers(state.selection.front) == [3]
    assert _numbers(state.candidates) == [1, 2]
    record = state.record()
    assert _numbers(record.candidates) == [1, 2]
    assert _numbers(record.field) == [3, 4]
    (said,) = [each for each in sentences(record) if "training rows" in each]
    assert "Kendall tau between both rankings is 0.33" in said
    assert "trial 1 of the search, whose own best was 2" in said
    relative = {row.trial.number: row.relative_percent for row in trial_rows(record)}
    assert relative[2] == pytest.approx(100 * (0.7 / 0.9 - 1))
    assert relative[3] == pytest.approx(100 * (0.6 / 0.85 - 1))


def _numbers(trials: Iterable[TrialRecord]) -> list[int]:
    return [trial.number for trial in trials]


def test_a_study_on_a_part_ends_on_all_rows(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    out, words = tmp_path / "study", ("trials=1", "training.train_fraction=0.4")
    said = dhen_search("run", "--data", click_log, "--out", out, *SMALL, *words).stdout
    after = read_study(out)
    assert "1 of 1 candidates" in progress(after)
    assert "were then trained on all of them" in said
    assert "train_fraction" not in (out / "best" / "bundle.json").read_text()
    # the front and the baseline once more on all rows, and the verdict on these alone
    part = [trial for trial in after.trials if trial.origin.promoted_from is None]
    assert {trial.job.training["train_fraction"] for trial in part} == {0.4}
    assert _numbers(part) == [0, 1]
    winners = {after.baseline, *after.front}
    assert winners <= set(_numbers(after.promoted))
    assert after.choice is not None
    scored = {after.baseline, *(winner.trial for winner in after.choice.winners)}
    assert {trial.number for trial in after.trials if trial.result.test} == scored <= winners
    assert all("train_fraction" not in trial.job.training for trial in after.promoted)
    rows = study_log(out).manifest.rows["train"]
    for trial in after.promoted:
        assert trial.origin.promoted_from is not None
        source = after.trial(trial.origin.promoted_from)
        assert (trial.point, trial.job.model) == (source.point, source.job.model)
        assert _a_pass(source.result.curve) == pytest.approx(round(0.4 * rows))
        assert _a_pass(trial.result.curve) == pytest.approx(rows)


def _a_pass(curve: tuple[CurvePoint, ...]) -> float:
    """Examples of one, as the curve counts them."""
    return curve[-1].examples / curve[-1].epoch


def test_parts_are_not_mixed(tmp_path: Path) -> None:
    settings = {"modules": {"linear": {}}, "training": {"train_fraction": [0.5, 1.0]}}
    with pytest.raises(UserError, match="is no axis"):
        check_training_axes(Space("mixed", parse(SpaceConfig, settings, "")), TrainingConfig())
    incumbent = tmp_path / "mine.yaml"
    incumbent.write_text("model: {family: advanced_dlrm}\ntraining: {train_fraction: 0.5}\n")
    with pytest.raises(UserError, match="trains on the rows of its candidates"):
        read_baseline(StudyConfig(baseline=str(incumbent)))


def test_a_space_in_which_nothing_fits_is_said_to_be_one() -> None:
    made = study(2)
    unfit = {"outcome": Outcome.INFEASIBLE, "validation": None, "memory_excess": 0.5}
    none = judged([*made.trials[:3], *(changed(t, **unfit) for t in made.trials[3:])])
    cluster = {"name": "this", "hosts": 1, "gpus_per_host": 1, "hbm": 2**30, "verified": True}
    record = StudyRecord.model_validate(none.model_dump() | {"cluster": cluster})
    assert "none of 2 fits 1.0 GiB per rank" in sentences(record)[0]
    assert "comes nearest, with 1.5 GiB" in sentences(record)[0]
