"""Minutes are of the whole command: what it does in them, what it leaves out, and what it says of that.

Trainings are fake and take ten seconds of a clock that nothing else moves, scorings take one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_processes import (
    PLANNED_ELSEWHERE,
    FakeLauncher,
    FakeRun,
    evaluated,
    progress,
    scored,
    trained,
)

from dashboards.sentences.summary import sentences
from dhen.values import fingerprint
from search.analysis.confirm import most_important_first
from search.config import read_study_config, write_config
from search.execution import later_stages, running
from search.execution.clock import StudyClock
from search.execution.later_stages import LaterStages
from search.read_study import read_study
from search.run_directory import folder_of
from search.study.driver import StudyDriver
from search.study.finalize import Finalizer
from search.study.open_study import open_study
from search.study_state import Observer, StudyState
from trials.data.prepared_log import PreparedLog
from trials.records.events import WEIGHTS, Event, ScoreEvent, logits_file
from trials.records.study_record import StudyRecord
from trials.records.task import Task
from trials.records.trial_record import Outcome, TrialKind

pytestmark = pytest.mark.usefixtures("unsynced")
TRAINING, SCORING = 10.0, 1.0
WORDS = (
    "space=tiny",
    "sampler=random",
    "baseline_trials=2",
    "training.epochs=1",
    *PLANNED_ELSEWHERE,
)
NeOf = Callable[[Task], float]
SALT = 3
"""With this one several networks win."""


def by_fingerprint(task: Task) -> float:
    """Candidates are better than the baseline, and all differ."""
    job = (
        task.job
    )  # whose own fingerprint has the log's, which is another one with each version of its layout
    spread = int(fingerprint([SALT, job.model.to_dict(), job.training.to_dict(), job.seed])[:4], 16) / 2**18
    return (0.7 if task.job.model.family == "dhen" else 0.95) + spread


class Run(FakeRun):
    """A fake process that leaves the logits that it has scored."""

    def __init__(self, *looks: Sequence[Event], rows: int = 0, seed: int = 0) -> None:
        super().__init__(*looks)
        self._rows, self._seed = rows, seed

    def new_events(self) -> list[Event]:
        events = super().new_events()
        for event in events:
            if isinstance(event, ScoreEvent) and self.directory is not None:
                logits = np.random.default_rng(self._seed).normal(size=self._rows).astype(np.float32)
                np.save(logits_file(self.directory, event.split), logits)
        return events


class Studies:
    """Opens the same study again and again; the clock goes on."""

    def __init__(self, directory: Path, log: PreparedLog) -> None:
        self._directory, self._log = directory, log
        self.now = 1000.0
        self.tasks: list[Task] = []
        directory.mkdir()

    def open(
        self,
        *words: str,
        ne_of: NeOf = by_fingerprint,
        seconds: Callable[[Task], float] = lambda task: SCORING if task.score_split else TRAINING,
        watch: Observer = lambda state: None,
        began: float | None = None,
    ) -> StudyDriver:
        def script(task: Task) -> FakeRun:
            self.tasks.append(task)
            self.now += seconds(task)
            seed = int(task.job.fingerprint[:6], 16)
            if task.score_split is not None:
                rows = self._log.split(task.score_split).rows
                return Run([scored(task.score_split)], rows=rows, seed=seed)
            ne = ne_of(task)
            return Run([progress(10)], [evaluated(10, ne), trained(ne)])

        config = read_study_config(None, [*WORDS, *words])
        write_config(self._directory, config)
        return open_study(
            config,
            self._directory,
            self._log,
            FakeLauncher(script),
            [watch],
            clock=StudyClock(lambda: self.now, began=began),
        )

    @property
    def directory(self) -> Path:
        return self._directory


@pytest.fixture
def studies(tmp_path: Path, log: PreparedLog, monkeypatch: pytest.MonkeyPatch) -> Studies:
    found = Studies(tmp_path / "study", log)
    clock = SimpleNamespace(monotonic=lambda: found.now)
    monkeypatch.setattr(running, "time", clock)
    return found


def interrupt(when: Callable[[StudyState], bool]) -> Observer:
    def watch(state: StudyState) -> None:
        if when(state):
            raise KeyboardInterrupt

    return watch


def runs_again(state: StudyState, number: int) -> bool:
    return state.trials[number].result.outcome is Outcome.RUNNING


def said(study: StudyDriver) -> str:
    return " ".join((*study._state.notices, *sentences(study.record())))


def test_one_command_with_minutes_does_all_of_it_within_them(studies: Studies) -> None:
    """It tunes, makes averages and confirms; less than one more seed would take is left over."""
    study = studies.open("minutes=20", "search_until=none")
    record = study.run()
    assert record.finished
    assert 0.85 * 20 * 60 <= record.elapsed_seconds <= 1.1 * 20 * 60
    assert record.averages
    assert any(trial.origin.tuned_from is not None for trial in record.candidates)
    assert len(record.candidates) > 20, "no number of trials ends the search"
    seeds = {len(comparison.seeds) for comparison in record.comparisons}
    assert record.comparisons
    assert min(seeds) >= 2


def test_a_study_of_minutes_ends_where_the_space_has_nothing_new(studies: Studies, tmp_path: Path) -> None:
    """An ensemble of one module is a sum, so that all points are the same network. Minutes that were left stay."""
    (tmp_path / "space.yaml").write_text(
        "modules: {dcn_v2: {layers: 1}}\nslots: 1\ndepth: 1\nout_embeddings: 2\nraw_numeric: false\n"
        "ensemble: [concat, sum, weighted_sum]\ntraining: {learning_rate: 0.001}\n"
    )
    words = ("trials=null", "minutes=60", f"space={tmp_path / 'space.yaml'}")
    record = studies.open(*words).run()
    assert record.finished
    assert sum(trial.origin.reused_from is None for trial in record.candidates) == 1
    studies.tasks.clear()
    assert studies.open(*words).run().candidates == record.candidates
    assert studies.tasks == []


def test_a_few_minutes_leave_winners_unconfirmed_and_say_which_command_does_it(studies: Studies) -> None:
    study = studies.open("minutes=2")
    record = study.run()
    assert record.front
    assert record.comparisons == ()
    assert record.elapsed_seconds <= 1.1 * 120
    assert "Winners were not confirmed: the minutes have too little left for 2 seeds" in said(study)
    assert f"`dhen-search confirm {studies.directory}` does it" in said(study)


def test_networks_learn_within_their_share_though_the_confirmation_has_less_for_it(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A confirmation that takes all that is left does not keep networks from learning, for 15 % of the minutes."""
    began = studies.now

    def all_that_is_left(later: LaterStages) -> float:
        left = later.minutes_seconds - (studies.now - began)
        return left - later.refits() - later.scores() - later.closing - 1.0

    monkeypatch.setattr(LaterStages, "least_confirmation", all_that_is_left)
    record = studies.open("minutes=10", "search_until=none").run()
    taught = [trial for trial in record.trials if trial.kind is TrialKind.DISTILLED]
    assert 1 <= len(taught) * TRAINING <= 0.15 * 600
    assert record.elapsed_seconds <= 1.1 * 600


def test_the_best_is_confirmed_where_there_is_no_time_for_all_winners(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the baseline and one network, or two, from two seeds
    monkeypatch.setattr(LaterStages, "confirmation", lambda _, within: 5.5 * TRAINING)
    study = studies.open("minutes=5", "search_until=none", "distil=no", "averages=0", "refit=no")
    record = study.run()
    assert record.choice is not None
    confirmed = {comparison.trial for comparison in record.comparisons}
    winners = {winner.trial for winner in record.choice.winners}
    order = [number for number in most_important_first(record) if number in winners]
    assert confirmed == set(order[: len(confirmed)])
    assert 0 < len(confirmed) < len(winners)
    of_all = f"{len(confirmed)} of the {len(record.choice.winners)} winners, the best first, "
    assert f"For want of time {of_all}" in said(study)


@pytest.mark.parametrize("networks", [0, 2])
def test_as_many_winners_as_there_is_time_for_are_trained_once_more(
    studies: Studies, monkeypatch: pytest.MonkeyPatch, networks: int
) -> None:
    monkeypatch.setattr(Finalizer, "_has_time_to_refit", lambda _, missing, best: len(missing) <= networks)
    study = studies.open("minutes=60", "trials=8", "confirm=0", "distil=no", "averages=0")
    record = study.run()
    assert record.choice is not None
    order = list(dict.fromkeys((record.choice.baseline, record.choice.best, *most_important_first(record))))
    assert len(order) > 2
    assert [refit.trial for refit in record.refits] == order[:networks]
    winners = [winner.trial for winner in record.choice.winners]
    done = len(set(winners) & set(order[:networks]))
    some = f"{done} of the {len(winners)} winners, the best first," if done else "none of the winners"
    assert f"For want of time {some} {'was' if done < 2 else 'were'} trained once more on" in said(study)


@pytest.mark.parametrize("confirmable", [True, False])
def test_more_than_the_best_is_trained_once_more_within_its_share_or_where_nothing_can_be_confirmed(
    studies: Studies, monkeypatch: pytest.MonkeyPatch, confirmable: bool
) -> None:
    began = studies.now

    def nearly_all_that_is_left(later: LaterStages) -> float:
        left = later.minutes_seconds - (studies.now - began)
        return left - later.closing + (-1.0 if confirmable else 1.0)

    monkeypatch.setattr(LaterStages, "least_confirmation", nearly_all_that_is_left)
    monkeypatch.setattr(later_stages, "REFIT_SHARE", 0.0)
    record = studies.open("minutes=12", "trials=8", "distil=no", "averages=0").run()
    assert record.choice is not None
    winners = {winner.trial for winner in record.choice.winners}
    assert len(winners) > 1
    best_alone = {record.baseline, record.best}
    assert {refit.trial for refit in record.refits} == (best_alone if confirmable else winners | best_alone)


def ended_with_time_left(studies: Studies, monkeypatch: pytest.MonkeyPatch) -> StudyRecord:
    """A finished study of twelve minutes, in which networks could have learnt and did not."""
    with monkeypatch.context() as patch:
        patch.setattr(Finalizer, "_has_time_to_teach", lambda *_: False)
        return studies.open("minutes=12", "trials=8").run()


def test_a_study_that_has_ended_stays_as_it_is_though_it_had_time_left(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Networks that learnt afterwards would be winners that are neither trained once more nor confirmed."""
    ended = ended_with_time_left(studies, monkeypatch)
    assert ended.refits
    assert ended.averages
    assert TrialKind.DISTILLED not in {trial.kind for trial in ended.trials}
    assert ended.elapsed_seconds < 0.8 * 12 * 60
    studies.tasks.clear()
    again = studies.open("minutes=12", "trials=8").run()
    assert studies.tasks == []
    assert (again.trials, again.refits, again.comparisons) == (ended.trials, ended.refits, ended.comparisons)
    more = studies.open("minutes=13", "trials=8").run()
    assert TrialKind.DISTILLED in {trial.kind for trial in more.trials}


def test_winners_that_a_study_had_no_time_for_are_not_trained_once_more_after_it_has_ended(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("minutes=60", "trials=8", "confirm=0", "distil=no", "averages=0")
    with monkeypatch.context() as patch:
        patch.setattr(Finalizer, "_has_time_to_refit", lambda _, missing, best: best)
        ended = studies.open(*words).run()
    studies.tasks.clear()
    assert studies.open(*words).run().refits == ended.refits
    assert studies.tasks == []
    asked = studies.open(*words, "refit=yes").run()
    assert set(ended.refits) < set(asked.refits)


def test_what_was_trained_once_more_stays_where_there_is_no_time_for_what_is_lacking(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("trials=8", "confirm=0", "distil=no", "averages=0")
    ended = studies.open("minutes=60", *words).run()
    first, *others = ended.refits
    assert first.trial == ended.baseline
    (folder_of(studies.directory, ended.retraining(first.networks[0])) / WEIGHTS).unlink()
    monkeypatch.setattr(Finalizer, "_has_time_to_refit", lambda _, missing, best: not missing)
    assert studies.open("minutes=61", *words).run().refits == tuple(others)


def test_a_winner_that_is_trained_for_its_weights_goes_on_after_ctrl_c_though_the_time_is_over(
    studies: Studies,
) -> None:
    words = ("minutes=5", "averages=0", "confirm=0", "refit=no", "tune=0", "search_until=none")
    ended = studies.open(*words).run()
    lost = ended.front[-1]
    (folder_of(studies.directory, ended.trial(lost)) / WEIGHTS).unlink()
    with pytest.raises(KeyboardInterrupt):
        studies.open(*words, watch=interrupt(lambda state: runs_again(state, lost))).run()
    assert read_study(studies.directory).trial(lost).result.outcome is Outcome.INTERRUPTED
    again = studies.open(*words).run()
    assert again.trial(lost).result.outcome is Outcome.COMPLETED
    assert again.front == ended.front


def test_minutes_that_end_in_the_middle_of_a_seed_leave_those_that_are_done(studies: Studies) -> None:
    """Retrainings that turn out slower do not all come to be; those that do count, and a sentence says so."""

    def slower(task: Task) -> float:
        return SCORING if task.score_split else TRAINING * (2.5 if task.job.seed else 1.0)

    study = studies.open("minutes=20", "search_until=none", seconds=slower)
    record = study.run()
    assert record.finished
    seeds = min(len(comparison.seeds) for comparison in record.comparisons)
    assert 2 <= seeds < 5
    assert (
        f"Winners were retrained from {seeds} seeds; `dhen-search confirm {studies.directory}` adds others"
        in said(study)
    )
    assert record.elapsed_seconds <= 1.1 * 20 * 60


def test_without_minutes_nothing_is_made_that_was_not_asked_for(studies: Studies) -> None:
    record = studies.open("trials=4").run()
    assert record.averages == ()
    assert record.retrainings == ()
    assert [trial.origin.tuned_from for trial in record.candidates] == [None] * 4


def test_the_time_of_earlier_sessions_counts_and_that_between_them_does_not(studies: Studies) -> None:
    words = ("minutes=10", "averages=0", "confirm=0", "refit=no", "tune=0", "search_until=none")
    began = studies.now - 200.0
    with pytest.raises(KeyboardInterrupt):
        studies.open(*words, began=began, watch=interrupt(lambda state: len(state.candidates) == 5)).run()
    took = studies.now - began
    assert read_study(studies.directory).elapsed_seconds == pytest.approx(took)
    studies.now += 3600.0
    study = studies.open(*words)
    assert study.record().elapsed_seconds == pytest.approx(took)
    record = study.run()
    assert record.elapsed_seconds == pytest.approx(600, rel=0.05)


class Silent(FakeRun):
    """A training that goes on and on, and says so."""

    def __init__(self, studies: Studies) -> None:
        super().__init__(ends=False)
        self._studies = studies

    def new_events(self) -> list[Event]:
        super().new_events()
        self._studies.now += 5.0
        return [progress(10)]


def test_a_candidate_that_goes_on_and_on_is_cut_short_and_goes_on_with_more_minutes(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless: list[str] = []
    words = ("averages=0", "confirm=0", "refit=no", "tune=0", "search_until=none")

    def start(launcher: FakeLauncher, task: Task, directory: Path) -> FakeRun:
        candidates = [t for t in studies.tasks if t.job.model.family == "dhen" and t.score_split is None]
        if task.job.model.family == "dhen" and len(candidates) == 3 and not endless:
            endless.append(task.job.fingerprint)
            run = Silent(studies)
            launcher.runs.append(run)
            return run
        return begin(launcher, task, directory)

    begin = FakeLauncher.start
    monkeypatch.setattr(FakeLauncher, "start", start)
    study = studies.open("minutes=5", *words)
    record = study.run()
    cut = [trial for trial in record.candidates if trial.result.outcome is Outcome.INTERRUPTED]
    assert [trial.job.fingerprint for trial in cut] == endless
    assert cut[0].attempts == ()
    assert record.finished
    assert record.elapsed_seconds == pytest.approx(300, rel=0.1)

    studies.tasks.clear()
    assert studies.open("minutes=5", *words).run().candidates == record.candidates, "the minutes are over"
    assert studies.tasks == []
    resumed = studies.open("minutes=6", *words).run()
    assert resumed.trial(cut[0].number).result.outcome is Outcome.COMPLETED


def level(task: Task) -> float:
    """Networks among which there is nothing to gain."""
    return 0.7 + int(task.job.fingerprint[:4], 16) / 2**40 if task.job.model.family == "dhen" else 0.95


def test_a_search_ends_where_it_would_show_nothing_says_so_and_goes_on_when_asked(studies: Studies) -> None:
    study = studies.open("minutes=300", "confirm=0", "refit=no", "averages=0", ne_of=level)
    record = study.run()
    assert record.finished
    assert record.elapsed_seconds < 0.1 * 300 * 60
    gain = record.expected_gain
    assert gain is not None
    assert gain.detectable_percent is not None
    assert gain.percent < gain.detectable_percent
    assert gain.candidates == len(record.candidates) == 29
    sentence = (
        "The search ended after 29 candidates with a result: 29 more were expected to lower the best NE by 0.00 "
        f"%, and this log's validation rows show no difference below {gain.detectable_percent:.2f} %. "
        "The same command with search_until=none goes on."
    )
    assert sentence in study._state.notices
    assert sentence in sentences(read_study(studies.directory))

    studies.tasks.clear()
    studies.open("minutes=300", "confirm=0", "refit=no", "averages=0", ne_of=level).run()
    assert studies.tasks == [], "the same command does nothing twice"
    more = studies.open(
        "minutes=10", "confirm=0", "refit=no", "averages=0", "search_until=none", ne_of=level
    ).run()
    assert len(more.candidates) > 29
    assert more.expected_gain is None
    assert not any("The search ended after" in line for line in sentences(more))


@pytest.mark.parametrize("kind", [TrialKind.BASELINE, TrialKind.DISTILLED])
def test_what_else_is_trained_for_its_weights_goes_on_after_ctrl_c(studies: Studies, kind: TrialKind) -> None:
    """The baseline, also where it was the one that found the passes, and networks that learnt from an average."""
    words = (
        "minutes=60",
        "trials=6",
        "confirm=0",
        "refit=no",
        "averages=3",
        "distil=yes",
        "training.epochs=auto",
    )

    def taught_are_better(task: Task) -> float:
        return by_fingerprint(task) - (0.1 if task.teacher is not None else 0.0)

    ended = studies.open(*words, ne_of=taught_are_better).run()
    exported = (*ended.front, ended.baseline)
    lost = next(trial for trial in ended.trials if trial.kind is kind and trial.number in exported)
    (folder_of(studies.directory, lost) / WEIGHTS).unlink()
    watch = interrupt(lambda state: runs_again(state, lost.number))
    with pytest.raises(KeyboardInterrupt):
        studies.open(*words, ne_of=taught_are_better, watch=watch).run()
    assert read_study(studies.directory).trial(lost.number).result.outcome is Outcome.INTERRUPTED
    again = studies.open(*words, ne_of=taught_are_better).run()
    assert again.trial(lost.number).result.outcome is Outcome.COMPLETED
    assert (again.baseline, again.front) == (ended.baseline, ended.front)
