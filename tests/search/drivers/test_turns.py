"""Three drivers of one study on fake processes and a real PostgreSQL server: turns, deaths, the lead."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

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
from postgresql import Server
from tools import needs

from dhen.values import compact
from search.config import read_study_config
from search.study.open_study import open_study
from search.study_state import StudyState
from trials.data.prepared_log import PreparedLog
from trials.records.study_record import StudyRecord
from trials.records.task import Task
from trials.records.trial_record import Outcome, TrialKind
from trials.store import leases
from trials.store.ledger import Ledger

pytestmark = needs("postgresql")
CANDIDATES = 9


class Killed(BaseException):
    """The end of a driver that cannot say anything any more."""


class Drivers:
    """Drivers of one study in threads; `dies` says at which of its tasks one dies."""

    def __init__(
        self, server: Server, directory: Path, log: PreparedLog, dies: Callable[[int, Task], bool]
    ) -> None:
        self._server, self._directory, self._log, self._dies = server, directory, log, dies
        directory.mkdir()
        self.begun: list[tuple[int, str]] = []
        """Trainings that have begun: the driver and the fingerprint of the job."""
        self.dead: list[int] = []
        self.records: dict[int, StudyRecord] = {}
        self.states: dict[int, StudyState] = {}
        self.errors: list[BaseException] = []
        self.ends: list[int] = []

    def start(self, index: int) -> threading.Thread:
        thread = threading.Thread(target=self._drive, args=(index,))
        thread.start()
        return thread

    def _drive(self, index: int) -> None:
        words = ("space=tiny", "sampler=random", "baseline_trials=2", f"trials={CANDIDATES}")
        words += (
            *PLANNED_ELSEWHERE,
            "training.epochs=6",
            f"storage={self._server.url}",
            f"name={self._directory.name}",
        )

        def run(task: Task) -> FakeRun:
            if self._dies(index, task):
                self.dead.append(index)
                raise Killed
            if task.score_split is not None:
                return FakeRun([scored(task.score_split)])
            self.begun.append((index, task.job.fingerprint))
            deadline = time.monotonic() + 60
            while index > 0 and not self.dead and time.monotonic() < deadline:
                time.sleep(0.02)  # the first driver gets to the candidate that it dies at
            time.sleep(0.02)  # another driver may have a turn
            ne = 0.7 + int(task.job.fingerprint[:4], 16) / 2**18
            return FakeRun([progress(10)], [evaluated(10, ne)], [trained(ne)])

        config = read_study_config(None, words)
        try:
            study = open_study(config, self._directory, self._log, FakeLauncher(run), joins=index > 0)
            assert study.sharing is not None
            self.states[index] = study._state
            self.records[index] = study.run()
            if study.does_the_end:
                self.ends.append(index)
            study.note_written()
            study.sharing.close()
        except Killed:
            assert study.sharing is not None
            study.sharing._ended.set()  # its heart stops, and all that it held stays
            study.sharing._beats.join()
            study.sharing._ledger.close()
        except BaseException as error:
            self.errors.append(error)


def test_each_proposal_is_trained_once_though_drivers_die(
    server: Server, log: PreparedLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first driver dies at a candidate, the one that then leads at a score on test; the last does the rest."""
    monkeypatch.setattr(leases, "SILENT_SECONDS", 3.0)
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.5)
    monkeypatch.setattr("search.study.drivers.BEAT_SECONDS", 0.5)
    killed_at: list[str] = []

    def dies(index: int, task: Task) -> bool:
        if task.score_split is None and index == 0 and len(drivers.begun) >= 5 and not killed_at:
            killed_at.append(task.job.fingerprint)
            return True
        return task.score_split == "test" and len(drivers.dead) == 1

    drivers = Drivers(server, tmp_path / "three", log, dies)
    threads = [drivers.start(0)]
    deadline = time.monotonic() + 60
    while not drivers.begun and time.monotonic() < deadline:
        time.sleep(0.02)
    threads += [drivers.start(index) for index in (1, 2)]
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert drivers.errors == []
    ledger = Ledger(server.url, "three")
    trials, looks = ledger.trials(), ledger.test_looks()
    ledger.close()
    assert server.rows(
        "select count(*) from dhen_lease where study = 'three' and what in ('trial', 'turn')"
    ) == ["0"]
    assert drivers.dead[0] == 0
    assert len(drivers.dead) == 2
    (last,) = {0, 1, 2} - set(drivers.dead)
    assert drivers.ends == [last]
    assert [trial.number for trial in trials] == list(range(2 + CANDIDATES))
    assert {trial.result.outcome for trial in trials} == {Outcome.COMPLETED}
    assert len([trial for trial in trials if trial.kind is TrialKind.CANDIDATE]) == CANDIDATES
    assert set(Counter(fingerprint for _, fingerprint in drivers.begun).values()) == {1}
    assert len({index for index, _ in drivers.begun}) >= 2
    (lost,) = [trial for trial in trials if len(trial.attempts) > 1]
    assert lost.job.fingerprint == killed_at[0]
    assert [attempt.outcome for attempt in lost.attempts] == [Outcome.INTERRUPTED, Outcome.COMPLETED]
    record = drivers.records[last]
    assert record.finished
    assert record.trials == tuple(trials)
    scored_on_test = [trial for trial in trials if trial.result.test is not None]
    assert len(scored_on_test) <= looks
    # whoever has trained them, each driver keeps them in little memory
    for known in drivers.states[last].trials.values():
        assert known.job.model_fields_set is compact(known.job).model_fields_set


@pytest.mark.parametrize("index", [0, 1], ids=["the study is resumed", "a further driver"])
def test_who_begins_takes_up_what_a_driver_left_that_is_gone(
    server: Server, log: PreparedLog, tmp_path: Path, index: int
) -> None:
    name = f"left{index}"

    def dies(_: int, task: Task) -> bool:
        return task.score_split is None and len(drivers.begun) == 5 and not drivers.dead

    drivers = Drivers(server, tmp_path / name, log, dies)
    drivers.start(0).join(120)
    assert drivers.dead == [0]
    # as if its process had ended: another one has its number
    server.rows(
        f"update dhen_driver set process = regexp_replace(process, '[0-9]+$', '0') where study = '{name}'"
    )
    drivers.start(index).join(120)
    assert drivers.errors == []
    ledger = Ledger(server.url, name)
    trials = ledger.trials()
    ledger.close()
    assert server.rows(f"select count(*) from dhen_driver where study = '{name}'") == ["0"]
    assert {trial.result.outcome for trial in trials} == {Outcome.COMPLETED}
    (lost,) = [trial for trial in trials if len(trial.attempts) > 1]
    assert lost.attempts[0].lost_its_driver
    assert drivers.records[index].passes is None  # the settings say how many: there is nothing to find
