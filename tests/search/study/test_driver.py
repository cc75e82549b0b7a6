"""The driver's story on fake processes: which stage follows which, what the sampler is asked and told."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fake_processes import FakeLauncher, FakeRun, evaluated, failed, killed, progress, scored, trained

from dashboards.sentences.summary import sentences
from dhen.errors import UserError
from search.config import read_study_config
from search.samplers.ask_tell import Proposals
from search.study import open_study as opening
from search.study.driver import Study
from search.study_state import StudyState
from spaces.space import Point
from trials import job as jobs
from trials.data.cache import PreparedLog
from trials.data.prepare.prepare_log import prepare
from trials.processes.task import Task
from trials.record import Outcome, TrialKind, TrialRecord
from trials.study_record import StudyRecord

pytestmark = pytest.mark.usefixtures("unsynced")
WORDS = (
    "space=tiny",
    "sampler=random",
    "baseline_trials=2",
    "trials=3",
    "threads=1",
    "parallel=1",
    "cluster=zionex",
    "ranks=1x1",
    "training.batch_size=64",
    "training.precision=fp32",
)
"""Plans are for another cluster, so that nothing of this machine is measured."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> PreparedLog:
    folder, draw = tmp_path_factory.mktemp("log"), random.Random(0)
    rows = (f"{draw.randint(0, 1)},{draw.random():.3f},{draw.randint(0, 40)}\n" for _ in range(600))
    (folder / "log.csv").write_text("click,price,city\n" + "".join(rows))
    return prepare([folder / "log.csv"], out=folder / "prepared")


class Story:
    """What happened, in order: stages, trials that began, what the sampler was asked and told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.told: list[TrialRecord] = []
        self.remembered: list[TrialRecord] = []
        self.asked: list[tuple[int, Point, Point]] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)


class HeardProposals(Proposals):
    """The sampler, and what passes between it and the study."""

    story: Story

    def remember(self, candidates: Any) -> None:
        records = list(candidates)
        self.story.remembered += records
        super().remember(records)

    def ask(self, number: int, start: Point, fixed: Point | None = None) -> tuple[Point, dict[str, int]]:
        self.story(f"ask {number}")
        self.story.asked.append((number, start, fixed or {}))
        return super().ask(number, start, fixed)

    def tell(self, record: TrialRecord) -> None:
        self.story(f"tell {record.number} {record.result.outcome}")
        self.story.told.append(record)
        super().tell(record)


def well(task: Task) -> FakeRun:
    """A training that comes to an NE of its job's own; a scoring."""
    if task.score_split is not None:
        return FakeRun([scored(task.score_split)])
    ne = 0.7 + int(task.job.fingerprint[:4], 16) / 2**18
    return FakeRun([progress(10)], [evaluated(10, ne), trained(ne)])


class Setting:
    """Opens the same study again and again."""

    def __init__(self, directory: Path, log: PreparedLog, patch: pytest.MonkeyPatch) -> None:
        self._directory, self._log, self._patch = directory, log, patch
        directory.mkdir(exist_ok=True)

    def open(
        self,
        *words: str,
        script: Callable[[Task], FakeRun] = well,
        watcher: Callable[[StudyState], None] = lambda state: None,
    ) -> tuple[Study, Story]:
        story = Story()

        def told(task: Task) -> FakeRun:
            what = f"score on {task.score_split}" if task.score_split else "train"
            story(what)
            return script(task)

        proposals = type("Heard", (HeardProposals,), {"story": story})
        self._patch.setattr(opening, "Proposals", proposals)
        config = read_study_config(None, [*WORDS, *words])
        study = opening.open_study(config, self._directory, self._log, FakeLauncher(told), [watcher])
        for stage in ("_baseline", "_search", "_tune", "_promote", "_finalise"):
            self._patch.setattr(study, stage, _announced(stage.strip("_"), getattr(study, stage), story))
        return study, story


def _announced(name: str, stage: Callable[[], None], story: Story) -> Callable[[], None]:
    def announced() -> None:
        story(f"# {name}")
        stage()

    announced.__name__ = name
    return announced


@pytest.fixture
def setting(tmp_path: Path, log: PreparedLog, monkeypatch: pytest.MonkeyPatch) -> Setting:
    return Setting(tmp_path / "study", log, monkeypatch)


def searched(record: StudyRecord) -> list[TrialRecord]:
    return [trial for trial in record.candidates if trial.origin.tuned_from is None]


def test_stages_follow_each_other_and_the_sampler_is_asked_as_late_as_there_is_a_place(
    setting: Setting,
) -> None:
    study, story = setting.open("trials=2")
    record = study.run()
    assert record.finished
    lines = [line for line in story.lines if line != "score on test"]
    assert lines == [
        *("# baseline", "train", "train"),
        *("# search", "ask 2", "train", "tell 2 completed", "ask 3", "train", "tell 3 completed"),
        *("# tune", "# promote", "# finalise"),
    ]
    assert story.lines.index("score on test") > story.lines.index("# finalise")
    winners = {record.baseline, *record.front}
    assert story.lines.count("score on test") == len(winners)
    assert {trial.number for trial in record.trials if trial.result.test} == winners


def test_the_baseline_is_no_matter_of_the_sampler(setting: Setting) -> None:
    study, story = setting.open()
    record = study.run()
    kinds = {trial.number: trial.kind for trial in record.trials}
    assert [kinds[number] for number, _, _ in story.asked] == [TrialKind.CANDIDATE] * 3
    assert [trial.number for trial in story.told] == [2, 3, 4]


def test_side_by_side_the_sampler_is_asked_before_the_first_has_ended(setting: Setting) -> None:
    study, story = setting.open("parallel=2")
    study.run()
    search = story.lines[story.lines.index("# search") : story.lines.index("# tune")]
    assert [line for line in search if line != "train"][:4] == [
        "# search",
        "ask 2",
        "ask 3",
        "tell 2 completed",
    ]


def test_tuning_asks_for_the_best_architectures_in_turn(setting: Setting) -> None:
    study, story = setting.open("tune=4", "tune_best=2")
    record = study.run()
    tune = story.lines[story.lines.index("# tune") : story.lines.index("# promote")]
    assert len([line for line in tune if line.startswith("ask")]) == 4
    assert len(searched(record)) == 3
    tuned = [trial.origin.tuned_from for trial in record.candidates if trial.origin.tuned_from is not None]
    best = min(searched(record), key=lambda trial: trial.result.validation.ne)
    assert tuned[0] == best.number
    assert tuned[:2] == tuned[2:]
    assert tuned[0] != tuned[1]
    for number, _, fixed in story.asked[3:]:
        trial = record.trial(number)
        of = record.trial(trial.origin.tuned_from).point
        assert fixed
        assert fixed.items() <= of.items()
        assert fixed.items() <= trial.point.items()
        assert not any(name.startswith("training.") for name in fixed)


def test_promotions_are_trained_without_the_sampler_and_are_what_wins(setting: Setting) -> None:
    study, story = setting.open("training.train_fraction=0.5")
    record = study.run()
    promote = story.lines[story.lines.index("# promote") : story.lines.index("# finalise")]
    assert promote == ["# promote", *["train"] * len(record.promoted)]
    assert record.baseline in {trial.number for trial in record.promoted}
    assert set(record.front) <= {trial.number for trial in record.promoted}
    assert [trial.number for trial in story.told] == [2, 3, 4]
    assert not any(trial.result.test for trial in record.trials if trial.origin.promoted_from is None)


def test_without_a_baseline_that_completes_nothing_is_proposed(setting: Setting) -> None:
    study, story = setting.open(script=lambda task: FakeRun([failed("a broken machine")]))
    with pytest.raises(UserError, match="no training of the baseline completed: a broken machine"):
        study.run()
    assert story.asked == []
    assert not study.record().finished
    assert not study.record().running


def test_candidates_that_all_fail_leave_a_study_of_the_baseline(setting: Setting) -> None:
    begun: list[Task] = []

    def script(task: Task) -> FakeRun:
        begun.append(task)
        return FakeRun([failed()]) if len(begun) > 2 and not task.score_split else well(task)

    study, story = setting.open("tune=2", script=script)
    record = study.run()
    assert (record.finished, record.front) == (True, ())
    assert [trial.result.outcome for trial in story.told] == [Outcome.FAILED] * 3
    assert record.trial(record.baseline).result.test is not None


def test_minutes_that_are_over_end_search_and_tuning_and_what_runs_goes_on(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps as the first candidate trains."""
    jumped: list[float] = []
    monkeypatch.setattr(StudyState, "elapsed_seconds", lambda state: sum(jumped))

    def watcher(state: StudyState) -> None:
        if state.candidates and not jumped:
            jumped.append(timedelta(minutes=5).total_seconds())

    study, story = setting.open("minutes=5", "tune=2", watcher=watcher)
    record = study.run()
    assert [number for number, _, _ in story.asked] == [2]
    assert record.trial(2).result.outcome is Outcome.COMPLETED
    assert record.finished
    assert record.front == (2,)
    assert record.trial(2).result.test is not None


def interrupts(when: Callable[[StudyState], bool]) -> Callable[[StudyState], None]:
    def watcher(state: StudyState) -> None:
        if when(state):
            raise KeyboardInterrupt

    return watcher


MOMENTS: dict[str, Callable[[StudyState], bool]] = {
    "baseline": lambda state: len(state.trials) == 1,
    "search": lambda state: len(state.candidates) == 2,
    "between": lambda state: len(state.ended) == 4,
    "tune": lambda state: any(trial.origin.tuned_from is not None for trial in state.candidates),
    "promote": lambda state: any(trial.kind is TrialKind.CANDIDATE for trial in state.promoted),
    "finalise": lambda state: any(trial.result.test is not None for trial in state.trials.values()),
}


EVERY_STAGE = ("tune=2", "training.train_fraction=0.5")


@pytest.fixture(scope="module")
def undisturbed(log: PreparedLog, tmp_path_factory: pytest.TempPathFactory) -> StudyRecord:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("undisturbed")
        return Setting(folder / "study", log, patch).open(*EVERY_STAGE)[0].run()


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_same_command_goes_on_from_ctrl_c_and_comes_to_what_it_would_have_come_to(
    setting: Setting, undisturbed: StudyRecord, moment: str
) -> None:
    study, before = setting.open(*EVERY_STAGE, watcher=interrupts(MOMENTS[moment]))
    with pytest.raises(KeyboardInterrupt):
        study.run()
    broken_off = study.record()
    assert not broken_off.finished
    assert not any(trial.result.outcome is Outcome.RUNNING for trial in broken_off.trials)

    study, after = setting.open(*EVERY_STAGE)
    record = study.run()
    assert [_essence(trial) for trial in record.trials] == [_essence(trial) for trial in undisturbed.trials]
    assert (record.baseline, record.front) == (undisturbed.baseline, undisturbed.front)
    assert [trial.number for trial in after.remembered] == [trial.number for trial in broken_off.candidates]
    told = [trial.number for trial in (*before.told, *after.told)]
    assert sorted(told) == [trial.number for trial in record.candidates]
    assert len(set(told)) == len(told)


def _essence(trial: TrialRecord) -> tuple[Any, ...]:
    result = trial.result
    return trial.number, trial.kind, trial.point, result.outcome, result.validation, result.test


def test_a_finished_study_does_nothing_again(setting: Setting) -> None:
    first = setting.open()[0].run()
    study, story = setting.open()
    assert study.run().trials == first.trials
    assert [line for line in story.lines if not line.startswith("#")] == []


def test_more_trials_go_on_where_the_study_had_ended(setting: Setting) -> None:
    setting.open()[0].run()
    study, story = setting.open("trials=4")
    record = study.run()
    assert [number for number, _, _ in story.asked] == [5]
    assert len(record.candidates) == 4


def test_a_promotion_that_was_cut_short_goes_on_with_its_attempts(setting: Setting) -> None:
    """What was killed once on all rows is not given another first try by Ctrl-C."""

    def script(task: Task) -> FakeRun:
        whole = task.job.training.train_fraction == 1.0
        if not whole or task.score_split:
            return well(task)
        return FakeRun([killed()]) if task.attempt == 0 else FakeRun([progress(1)], ends=False)

    study, _ = setting.open(
        "training.train_fraction=0.5",
        script=script,
        watcher=interrupts(lambda state: any(trial.attempts for trial in state.promoted)),
    )
    with pytest.raises(KeyboardInterrupt):
        study.run()
    study, _ = setting.open("training.train_fraction=0.5")
    record = study.run()
    tries = [[attempt.outcome for attempt in trial.attempts] for trial in record.promoted]
    assert tries[0] == [Outcome.INTERRUPTED, Outcome.COMPLETED]
    assert tries[1:] == [[Outcome.COMPLETED]] * len(tries[1:])


@pytest.fixture
def one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass is the default on logs as small as these."""
    monkeypatch.setattr(jobs, "ONE_PASS_ROWS", 100)


def better_with_two_passes(task: Task) -> FakeRun:
    if task.job.training.epochs == 2:
        return FakeRun([progress(10)], [evaluated(10, 0.6), trained(0.6)])
    return well(task)


HELPED = (
    "A second pass over the training rows would have helped: NE {before:.5f} -> 0.60000 on validation (the "
    "baseline, trial {trial}); give a new study training.epochs=2 or more."
)


@pytest.mark.usefixtures("one_pass")
def test_a_second_pass_that_would_have_helped_is_said_before_the_search(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[tuple[str, int]] = []

    def watch(state: StudyState) -> None:
        said.extend((notice, len(state.candidates)) for notice in state.notices[len(said) :])

    study, story = setting.open(script=better_with_two_passes, watcher=watch)
    with caplog.at_level("INFO", logger="search"):
        record = study.run()
    baseline = record.trial(record.baseline)
    sentence = HELPED.format(before=baseline.result.validation.ne, trial=baseline.number)
    assert (sentence, 0) in said
    assert sentence in sentences(record)
    assert sentence in caplog.messages
    (retraining,) = record.retrainings
    assert (retraining.origin.of, retraining.origin.passes) == (baseline.number, 2)
    assert retraining.job.training["epochs"] == 2
    # it is neither the baseline nor a candidate, though it has the lowest NE
    assert len(record.trials) == 2 + 3
    assert all(trial.job.training["epochs"] == 1 for trial in record.trials)
    assert story.lines.index("# search") > 3  # the baseline's two trainings, and this one

    study, story = setting.open(script=better_with_two_passes)
    assert sentence in sentences(study.run())
    assert "train" not in story.lines


@pytest.mark.usefixtures("one_pass")
def test_a_second_pass_that_would_not_have_helped_is_said_too(setting: Setting) -> None:
    def worse(task: Task) -> FakeRun:
        if task.job.training.epochs == 2:
            return FakeRun([progress(10)], [evaluated(10, 0.99), trained(0.99)])
        return well(task)

    record = setting.open(script=worse)[0].run()
    assert any(
        "second pass over the training rows would not have helped" in line for line in sentences(record)
    )
    assert "training.epochs=" not in " ".join(sentences(record))


@pytest.mark.usefixtures("one_pass")
def test_a_second_pass_that_was_cut_short_goes_on(setting: Setting) -> None:
    def interrupted(task: Task) -> FakeRun:
        if task.job.training.epochs == 2:
            raise KeyboardInterrupt
        return well(task)

    study, _ = setting.open(script=interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.run()
    record = setting.open(script=better_with_two_passes)[0].run()
    assert [trial.result.outcome for trial in record.retrainings] == [Outcome.COMPLETED]
    assert any("second pass over the training rows would have helped" in line for line in sentences(record))


@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize(
    "words", [["training.epochs=1"], ["training.train_fraction=0.5"], ["minutes=0.0000001"]]
)
def test_a_second_pass_is_not_tried_where_passes_are_given_or_minutes_are_few(
    setting: Setting, words: list[str]
) -> None:
    record = setting.open(*words, script=better_with_two_passes)[0].run()
    assert record.retrainings == ()


@pytest.mark.usefixtures("one_pass")
def test_a_second_pass_is_not_tried_where_the_first_was_too_long(setting: Setting) -> None:
    def overfits(task: Task) -> FakeRun:
        if task.score_split is not None:
            return well(task)
        return FakeRun([progress(10)], [evaluated(10, 0.7), evaluated(20, 0.8), trained(0.7)])

    assert setting.open(script=overfits)[0].run().retrainings == ()


def test_a_second_pass_is_not_tried_where_several_are_the_default(setting: Setting) -> None:
    record = setting.open(script=better_with_two_passes)[0].run()
    assert record.trial(0).job.training["epochs"] == 6
    assert record.retrainings == ()
