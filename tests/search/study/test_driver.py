"""The driver's story on fake processes: which stage follows which, what the sampler is asked and told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_processes import (
    PLANNED_ELSEWHERE,
    FakeLauncher,
    FakeRun,
    evaluated,
    failed,
    killed,
    progress,
    trained,
    well,
)
from records import bare, changed

from dashboards.sentences.stages import passes_found
from dashboards.sentences.summary import sentences
from dashboards.terminal.tables import OF_CANDIDATES, done_in_stage
from dhen.errors import UserError
from search.config import read_study_config
from search.execution.passes import EPOCHS, PassFinder, known_passes
from search.read_study import read_study
from search.run_directory import STUDY_FILE
from search.samplers.ask_tell import Proposals, is_proposal
from search.study import open_study as opening
from search.study.driver import StudyDriver
from search.study_state import StudyState
from spaces.space import Point, load_space
from trials.data.prepared_log import PreparedLog
from trials.records.job import TrainingConfig
from trials.records.study_record import FoundPasses, StageName, StudyRecord
from trials.records.task import Task
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

pytestmark = pytest.mark.usefixtures("unsynced")
WORDS = (
    "space=tiny",
    "sampler=random",
    "baseline_trials=2",
    "trials=3",
    *PLANNED_ELSEWHERE,
    "training.epochs=6",
)


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
        records = list(filter(is_proposal, candidates))
        self.story.remembered += records
        super().remember(records)

    def ask(self, number: int, start: Point, fixed: Point | None = None) -> tuple[Point, dict[str, int]]:
        self.story(f"ask {number}")
        self.story.asked.append((number, start, fixed or {}))
        return super().ask(number, start, fixed)

    def tell(self, record: TrialRecord) -> None:
        if is_proposal(record):
            self.story(f"tell {record.number} {record.result.outcome}")
            self.story.told.append(record)
        super().tell(record)


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
    ) -> tuple[StudyDriver, Story]:
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
    assert record.passes is None, "their number is given"
    lines = [line for line in story.lines if not line.startswith("score on ")]
    assert lines == [
        *("# baseline", "train", "train"),
        *("# search", "ask 2", "train", "tell 2 completed", "ask 3", "train", "tell 3 completed"),
        *("# tune", "# promote", "# finalise"),
    ]
    assert story.lines.index("score on validation") > story.lines.index("# finalise")
    assert "score on validation" not in story.lines[story.lines.index("score on test") :]
    assert record.choice is not None
    winners = {record.baseline, *(winner.trial for winner in record.choice.winners)}
    assert story.lines.count("score on test") == len(winners)
    assert {trial.number for trial in record.trials if trial.result.test} == winners


def test_another_terminal_sees_the_stage_and_how_far_it_is(setting: Setting, tmp_path: Path) -> None:
    (tmp_path / "study" / STUDY_FILE).write_text("{}\n")
    seen: dict[tuple[StageName, int, int | None], None] = {}

    def watcher(state: StudyState) -> None:
        if state.trials:
            record = read_study(tmp_path / "study")
            assert record.stage is not None or state.finished
            if record.stage is not None:
                seen[record.stage.name, done_in_stage(record, record.stage), record.stage.total] = None

    study, _ = setting.open("tune=1", watcher=watcher)
    study.run()
    counts = [(name, *count) for name, *count in seen if name in (StageName.BASELINE, *OF_CANDIDATES)]
    assert counts == [
        *((StageName.BASELINE, done, 2) for done in (0, 1, 2)),
        *((StageName.SEARCH, done, 4) for done in (0, 1, 2, 3)),
        *((StageName.TUNING, done, 4) for done in (3, 4)),
    ]
    behind = [
        StageName.AVERAGES,
        StageName.DISTILLING,
        StageName.CHOICE,
        StageName.TEST,
        StageName.CONFIRMATION,
    ]
    assert [name for name, *_ in seen if name in behind] == behind
    assert read_study(tmp_path / "study").stage is None


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
    study, story = setting.open("tune=6")
    record = study.run()
    tune = story.lines[story.lines.index("# tune") : story.lines.index("# promote")]
    assert len([line for line in tune if line.startswith("ask")]) == 6
    assert len(searched(record)) == 3
    tuned = [trial.origin.tuned_from for trial in record.candidates if trial.origin.tuned_from is not None]
    best = min(searched(record), key=lambda trial: trial.result.validation.ne)
    assert tuned[0] == best.number
    assert tuned[:3] == tuned[3:]
    assert len(set(tuned)) == 3
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


def test_more_trials_go_on_where_the_study_had_ended(setting: Setting) -> None:
    setting.open()[0].run()
    study, story = setting.open("trials=4")
    record = study.run()
    assert [number for number, _, _ in story.asked] == [5]
    assert len(record.candidates) == 4


@pytest.mark.parametrize("again", [False, True])
def test_trials_that_are_asked_for_after_ctrl_c_in_a_promotion_are_searched_after_it(
    setting: Setting, again: bool
) -> None:
    """Also where that is broken off too."""
    words = ("training.train_fraction=0.5",)
    study, _ = setting.open(*words, watcher=interrupts(MOMENTS["promote"]))
    with pytest.raises(KeyboardInterrupt):
        study.run()
    known = len(study.record().candidates)
    if again:
        more = interrupts(lambda state: len(state.candidates) > known)
        with pytest.raises(KeyboardInterrupt):
            setting.open(*words, f"trials={known + 3}", watcher=more)[0].run()
    record = setting.open(*words, f"trials={known + 3}")[0].run()
    assert record.finished
    assert len(record.candidates) == known + 3
    assert any(trial.kind is TrialKind.BASELINE for trial in record.promoted)


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


def better_later(
    *nes: float, falling: dict[int, tuple[float, ...]] | None = None
) -> Callable[[Task], FakeRun]:
    """The baseline with many passes has these NEs after each half of one, and others by their number over which
    learning rates fall; with a single pass it comes to 0.8."""
    by_passes = falling or {}

    def script(task: Task) -> FakeRun:
        training = task.job.training
        if task.score_split is not None or task.job.model.family == "dhen":
            return well(task)
        if training.epochs == 1:
            return FakeRun([evaluated(10, 0.8, epoch=1.0), trained(0.8)])
        at_the_end = (*[0.95] * int(2 * training.epochs - 1), 0.9)
        shown = nes if training.schedule == "constant" else by_passes.get(int(training.epochs), at_the_end)
        curve = [evaluated(10 * half, ne, epoch=half / 2) for half, ne in enumerate(shown, start=1)]
        return FakeRun([*curve, trained(min(shown))])

    return script


LEFT_OPEN = "training.epochs=auto"
LATE = (0.9, 0.85, 0.87, 0.86, 0.75, 0.7, 0.8, 0.8)
"""NE rises in the second pass before it falls in the third."""
FALLING = {3: (0.9, 0.85, 0.78, 0.68, 0.75, 0.76), 2: (0.9, 0.8, 0.78, 0.66)}
"""The third pass is learnt by heart, so rates had better be low by the end of the second."""


def test_passes_are_found_before_the_baseline_is_tuned(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[tuple[str, int]] = []

    def watch(state: StudyState) -> None:
        said.extend((notice, len(state.candidates)) for notice in state.notices[len(said) :])

    script = better_later(*LATE, falling=FALLING)
    study, _ = setting.open(LEFT_OPEN, script=script, watcher=watch)
    with caplog.at_level("INFO", logger="search"):
        record = study.run()
    sentence = (
        "Trainings have 2 passes, with learning rates that fall to zero, over the training rows: with the "
        "baseline, NE on validation was 0.80000 within one pass and 0.70000 after 3.0 of up to 32 at constant "
        "rates and 0.66000 with falling ones, with training.table_decay=0.01."
    )
    assert (sentence, 0) in said
    assert sentence in sentences(record)
    assert sentence in caplog.messages
    one, many, rarer, falling, fewer, tuned, *candidates = record.trials
    assert [trial.kind for trial in record.trials] == [TrialKind.BASELINE] * 6 + [TrialKind.CANDIDATE] * 3
    assert one.job.training["epochs"] == 1
    for trial in (many, rarer):
        assert [trial.job.training[key] for key in ("epochs", "schedule", "patience")] == [32, "constant", 6]
    shapes = [(trial.job.training["epochs"], trial.job.training["schedule"]) for trial in record.trials[3:]]
    assert shapes == [(3, "cosine")] + [(2, "cosine")] * 5
    assert EPOCHS in falling.point
    assert EPOCHS in fewer.point
    assert tuned.point
    assert EPOCHS not in tuned.point
    assert one.job.training["table_decay"] == 0.0
    decays = [
        [trial.job.training.get(key, 0.0) for key in ("table_decay", "frequency_decay")]
        for trial in (many, rarer, falling, fewer, tuned, *candidates)
    ]
    assert decays == [[0.01, 0.0], [0.01, 0.1], *[[0.01, 0.0]] * 6]  # of equal ones the first
    assert record.baseline == fewer.number
    assert record.passes == FoundPasses(
        passes=5,
        tried=32,
        first_ne=0.8,
        lowest_ne=0.7,
        lowest_after=3.0,
        falling=2,
        falling_ne=0.66,
        decays={"table_decay": 0.01},
    )

    study, story = setting.open(LEFT_OPEN, "trials=4", script=script)
    record = study.run()
    assert record.trials[-1].job.training["epochs"] == 2
    assert story.lines.count("train") == 1  # the new candidate; nothing is found out again


def test_what_a_study_tries_by_itself_is_limited_to_what_the_technique_can_do(setting: Setting) -> None:
    """Embeddings decay by how often their ids occur alone, also while the best candidates are tuned."""
    words = (LEFT_OPEN, "technique=ssd_tables", "tune=3", "trials=4")
    record = setting.open(*words, script=better_later(*LATE, falling=FALLING))[0].run()
    decays = [
        [trial.job.training.get(key, 0.0) for key in ("table_decay", "frequency_decay")]
        for trial in record.trials
    ]
    assert decays[1:3] == [[0.0, 0.0], [0.0, 0.1]]
    assert {of_tables for of_tables, _ in decays} == {0.0}
    assert {trial.result.outcome for trial in record.trials} == {Outcome.COMPLETED}
    assert any(trial.origin.tuned_from is not None for trial in record.candidates)
    assert record.passes is not None
    assert record.passes.passes == 5
    left_out = (
        "training.table_decay is left out of what is tried: a network that dp+ssd_tables holds could not be held "
        "with it."
    )
    assert left_out in sentences(record)


def test_a_decay_that_the_technique_excludes_is_refused(setting: Setting) -> None:
    with pytest.raises(UserError, match=r"training.table_decay=0.01 is .* technique=dp\+ssd_tables excludes"):
        setting.open("technique=ssd_tables", "training.table_decay=0.01")


@pytest.mark.parametrize(
    ("falling", "tried"), [({3: (0.9, 0.8, 0.75, 0.74, 0.73, 0.71)}, [3]), ({3: (0.71,), 2: (0.72,)}, [3, 2])]
)
def test_rates_stay_constant_where_falling_ones_are_no_better(
    setting: Setting, falling: dict[int, tuple[float, ...]], tried: list[int]
) -> None:
    record = setting.open(LEFT_OPEN, script=better_later(*LATE, falling=falling))[0].run()
    found = [
        trial.job.training["epochs"] for trial in record.trials if trial.job.training["schedule"] == "cosine"
    ]
    assert found == tried
    after = record.trials[3 + len(tried) :]
    assert {(trial.job.training["epochs"], trial.job.training["schedule"]) for trial in after} == {
        (5, "constant")
    }
    assert any(line.startswith("Trainings have up to 5 passes over") for line in sentences(record))


@pytest.mark.parametrize(("of_fewer", "passes"), [(0.683, 2), (0.684, 3)])
def test_more_passes_over_which_rates_fall_have_to_be_worth_their_time(
    setting: Setting, of_fewer: float, passes: int
) -> None:
    """0.68 with three passes; 0.5 % above it is 0.6834."""
    script = better_later(*LATE, falling=FALLING | {2: (0.9, of_fewer)})
    record = setting.open(LEFT_OPEN, script=script)[0].run()
    assert record.passes is not None
    assert (record.passes.falling, record.passes.falling_ne) == (passes, of_fewer if passes == 2 else 0.68)


@pytest.mark.parametrize(("minutes", "fallen"), [(None, [8, 7, 6]), (12.0, [8]), (17.0, [8, 7])])
def test_rates_fall_in_their_share_of_the_minutes(minutes: float | None, fallen: list[int]) -> None:
    """A pass takes ten seconds; each training is best one pass before its end. Of 17 minutes 153 s are theirs,
    of which 8 passes have 80 and 7 have 70."""
    trials: dict[int, TrialRecord] = {}

    def train(points: Mapping[int, Point]) -> None:
        for number, settings in points.items():
            training = {key.removeprefix("training."): value for key, value in settings.items()}
            passes, falls = training["epochs"], training.get("schedule") == "cosine"
            assert isinstance(passes, int)
            best = max(6, passes - 1) if falls else 8
            nes = [(0.7 if falls else 0.71) + 0.01 * abs(done - best) for done in range(1, passes + 1)]
            record = bare(number, ne=min(nes), flops=1.0, kind=TrialKind.BASELINE, seconds=10.0 * passes)
            curve = [evaluated(done, ne, epoch=done).point for done, ne in enumerate(nes, start=1)]
            trials[number] = changed(record, training=training, curve=curve)

    passes = PassFinder(TrainingConfig(table_decay=0.01), minutes=minutes)
    passes.find(trials, train)
    tried = [t.job.training["epochs"] for t in trials.values() if t.job.training.get("schedule") == "cosine"]
    assert tried == fallen
    assert passes.found is not None
    assert passes.found.falling == fallen[-1]


def test_a_schedule_that_is_given_is_not_replaced(setting: Setting) -> None:
    script = better_later(*LATE, falling=FALLING)
    record = setting.open(LEFT_OPEN, "training.schedule=constant", script=script)[0].run()
    assert {trial.job.training["schedule"] for trial in record.trials} == {"constant"}
    assert {trial.job.training["epochs"] for trial in record.trials[3:]} == {5}


def test_a_candidate_with_constant_rates_has_more_passes_than_one_whose_rates_fall() -> None:
    passes = PassFinder(TrainingConfig(), minutes=None, found=FoundPasses(passes=5, falling=2))
    applied = {
        schedule: passes.applied(TrainingConfig(schedule=schedule))
        for schedule in ("auto", "cosine", "linear", "constant")
    }
    assert {schedule: (training.epochs, training.schedule) for schedule, training in applied.items()} == {
        "auto": (2, "cosine"),
        "cosine": (2, "cosine"),
        "linear": (2, "linear"),
        "constant": (5, "constant"),
    }
    assert passes.applied(TrainingConfig(epochs=7)).epochs == 7


def test_what_an_earlier_study_has_found_is_said_as_it_applies(setting: Setting) -> None:
    earlier = setting.open(LEFT_OPEN, script=better_later(*LATE, falling=FALLING))[0].run()
    for schedule, said in (
        ("auto", "2 passes, with learning rates that fall"),
        ("constant", "up to 5 passes"),
    ):
        found = known_passes(earlier, "as many as before", schedule=schedule)
        assert found is not None
        sentence = passes_found(earlier.replace(passes=found))
        assert sentence is not None
        assert sentence.startswith(f"Trainings have {said}")
        assert "over the training rows: as many as before; training.epochs= sets another number" in sentence


@pytest.mark.parametrize(
    "nes", [(0.9, 0.85, 0.9, 0.9), (0.9, 0.797, 0.799, 0.795)], ids=["memorised", "hardly better"]
)
def test_candidates_have_one_pass_where_more_do_not_help(setting: Setting, nes: tuple[float, ...]) -> None:
    record = setting.open(LEFT_OPEN, script=better_later(*nes))[0].run()
    assert {trial.job.training["epochs"] for trial in record.trials[3:]} == {1}
    assert record.trials[3].job.training["table_decay"] == 0.0
    assert any("further ones did not help the baseline" in line for line in sentences(record))


def test_passes_that_were_being_found_are_found_on(setting: Setting) -> None:
    def interrupted(task: Task) -> FakeRun:
        if task.job.training.epochs == 32:
            raise KeyboardInterrupt
        return well(task)

    study, _ = setting.open(LEFT_OPEN, script=interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.run()
    study, story = setting.open(LEFT_OPEN, "trials=1", script=better_later(*LATE))
    record = study.run()
    assert record.passes is not None
    assert record.passes.passes == 5
    # many passes twice, rates that fall, the tuned baseline, a candidate; not one pass again
    assert story.lines.count("train") == 5


def test_more_passes_are_not_tried_where_minutes_are_few(setting: Setting) -> None:
    record = setting.open(LEFT_OPEN, "minutes=0.0000001", script=better_later(*LATE))[0].run()
    assert record.passes is not None
    assert record.passes.passes == 1
    assert any(
        "two of the baseline would take more than 15% of the study's" in line for line in sentences(record)
    )


def test_a_failure_with_more_passes_leaves_one(setting: Setting) -> None:
    def fails(task: Task) -> FakeRun:
        return FakeRun([failed()]) if task.job.training.epochs == 32 else well(task)

    record = setting.open(LEFT_OPEN, script=fails)[0].run()
    assert record.passes == FoundPasses(passes=1, reason="the baseline's training with more ended as failed")


def test_the_tuned_baseline_is_the_first_start_point_and_is_not_proposed_again(setting: Setting) -> None:
    """The space's own start points follow, also where the study was cut short in between."""

    def best_tuned(task: Task) -> FakeRun:
        """The baseline is best where its embeddings are not those of the configuration as given."""
        model = task.job.model
        if task.score_split is None and model.family != "dhen":
            return FakeRun([trained(0.9 if model.embedding_dim == 16 else 0.8)])
        return well(task)

    words = ("space=default", "baseline_trials=6", "trials=6", "parallel=1")
    watcher = interrupts(lambda state: len(state.candidates) == 2)
    study, before = setting.open(*words, script=best_tuned, watcher=watcher)
    with pytest.raises(KeyboardInterrupt):
        study.run()
    study, after = setting.open(*words, script=best_tuned)
    record = study.run()
    first, *others = searched(record)
    baseline = record.trial(record.baseline)
    assert baseline.point["embedding_dim"] != 16
    layers = first.job.model["layers"]
    assert [[block["kind"] for block in layer["modules"]] for layer in layers] == [["dlrm"]]
    for key in ("embedding_dim", "dropout"):
        assert first.job.model[key] == baseline.job.model[key]
    for key in ("learning_rate", "embedding_learning_rate", "embedding_decay"):
        assert first.job.training[key] == baseline.job.training[key] == baseline.point[f"training.{key}"]
    starts = [start for _, start, _ in (*before.asked, *after.asked)]
    own = load_space("default").config.start
    assert starts[0].items() <= first.point.items()
    assert all(start.items() >= point.items() for start, point in zip(starts[1:4], own, strict=True))
    assert starts[4:] == [{}, {}]
    assert len(others) == 5
