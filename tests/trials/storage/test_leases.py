"""Drivers of one study on both kinds of databases: who lives, what each alone may do, what a dead one leaves."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from records import trial

from dhen.errors import UserError
from trials.records.trial_record import Outcome, TrialRecord
from trials.store import database
from trials.store.database import ServerGoneError, masked, sqlite_file
from trials.store.leases import LEAD, SILENT_SECONDS, TRIAL, TURN, Driver, Leases, TakenForDeadError
from trials.store.ledger import Ledger, StudySetting

CLUSTER = {"name": "x", "hosts": 1, "gpus_per_host": 1, "hbm": 1}
SETTING = StudySetting(directory="/runs/a", log="l", features={}, seed=0, version=1, cluster=CLUSTER)
RUNNING = trial(0, Random(0)).with_result(outcome=Outcome.RUNNING)


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Driven:
    """A driver of a study."""

    def __init__(self, url: str, study: str, host: str = "host") -> None:
        self.ledger, self.clock = Ledger(url, study), Clock()
        self.ledger.settle(SETTING)
        self.leases = self.ledger.leases = Leases(self.ledger.database, study, clock=self.clock)
        self.leases.register(host, "1", "/runs/a")

    def __enter__(self) -> Driven:
        return self

    def __exit__(self, *_: object) -> None:
        self.ledger.close()

    def silent(self, after: float) -> list[Driver]:
        """The others whose beats have stood still, `after` some seconds."""
        self.clock.seconds += after
        return self.leases.silent(self.leases.others())

    def buries(self, dead: Driver) -> tuple[TrialRecord, ...]:
        return self.ledger.bury(dead, lambda each: each.with_result(outcome=Outcome.INTERRUPTED))


def wait_in_vain(waiting: Driven, living: Driven | None = None) -> list[Driver]:
    """Who is silent after a while of looking; one that lives beats meanwhile."""
    silent = waiting.silent(0.0)
    for _ in range(int(SILENT_SECONDS) // 2):
        assert silent == []
        if living is not None:
            living.leases.beat()
        silent = waiting.silent(2.0)
    return silent


def test_one_driver_has_a_lease_until_it_lets_go(url: str) -> None:
    with Driven(url, "one") as first, Driven(url, "one") as second, Driven(url, "other") as stranger:
        assert first.leases.claim(TURN)
        assert first.leases.claim(TURN)
        assert not second.leases.claim(TURN)
        assert stranger.leases.claim(TURN)
        assert second.leases.claim(LEAD)
        first.leases.release(TURN)
        assert second.leases.claim(TURN)
        first.ledger.save(RUNNING)
        with pytest.raises(AssertionError, match="run by another driver"):
            second.ledger.save(RUNNING)
        assert second.leases.held()[(TRIAL, 0)] == first.leases.driver
        first.ledger.save(trial(0, Random(0)))
        assert (TRIAL, 0) not in second.leases.held()
        second.leases.leave()
        assert set(first.leases.held().values()) == set()


def test_a_silent_driver_is_dead_and_its_trial_free(url: str) -> None:
    with Driven(url, "silent") as waiting, Driven(url, "silent", "gone") as lost:
        lost.ledger.save(RUNNING)
        (dead,) = wait_in_vain(waiting)
        assert (dead.id, dead.host) == (lost.leases.driver, "gone")
        lost.leases.beat()
        assert waiting.buries(dead) == ()  # it lives after all
        assert waiting.silent(2.0) == []
        (dead,) = wait_in_vain(waiting)
        (left,) = waiting.buries(dead)
        assert left.result.outcome is Outcome.INTERRUPTED
        assert waiting.leases.others() == []
        for writes in (
            lambda: lost.ledger.save(trial(0, Random(0))),
            lambda: lost.ledger.change_facts(lambda facts: {"x": 1}),
            lambda: lost.leases.claim(TURN),
        ):
            with pytest.raises(TakenForDeadError, match="joins them again"):
                writes()
        waiting.ledger.save(RUNNING)
        assert waiting.leases.held() == {(TRIAL, 0): waiting.leases.driver}


def test_who_beats_lives_and_who_could_not_look_waits_anew(url: str) -> None:
    with Driven(url, "beats") as waiting, Driven(url, "beats") as other:
        assert wait_in_vain(waiting, living=other) == []
        assert waiting.silent(SILENT_SECONDS - 1.0) == []  # no look for so long: the database was away
        assert waiting.silent(2.0) == []


def test_changes_are_what_others_have_committed_since(url: str) -> None:
    with Driven(url, "follow") as one, Driven(url, "follow") as two:
        before = one.ledger.revision()
        one.ledger.save(RUNNING)
        two.ledger.save(RUNNING.replace(number=1))
        two.ledger.change_facts(lambda facts: facts | {"x": 1})
        changes = one.ledger.changes(before)
        assert [each.number for each in changes.trials] == [1]
        assert changes.facts == {"x": 1}
        assert one.ledger.changes(changes.revision) is None
        seen_by_two = two.ledger.changes(before)
        assert [each.number for each in seen_by_two.trials] == [0]


def test_a_driver_waits_for_its_server_as_long_as_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PAUSE_SECONDS", 0.01)
    ledger = Ledger(f"sqlite:///{tmp_path / 'study.db'}", "a")
    answers = ledger.database.transaction
    tries, said = [0], list[str]()
    ledger.database.say = said.append

    def away() -> object:
        tries[0] += 1
        if tries[0] % 4:
            raise ServerGoneError("gone")
        return answers()

    monkeypatch.setattr(ledger.database, "transaction", away)
    with pytest.raises(ServerGoneError):
        ledger.trials()
    tries[0] = 0
    ledger.database.patience_seconds = 60.0
    assert ledger.trials() == []
    assert tries == [4]
    assert [sentence.split(",")[0] for sentence in said] == [
        "waits for the database",
        "the database answers again",
    ]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:secret@host/db",
        "postgresql://user@host/db?password=secret&x=1",
        "postgresql:/user:secret@host",
        "no scheme:secret@host",
        "postgresql://user:se@secret@host/db",
        "http://secret@host/db?Token=secret&x=1",
        "https://host/db?x=1&api_key=secret#access_token=secret",
    ],
)
def test_no_password_is_shown(url: str) -> None:
    for shown in (masked(url), masked(f"storage: {url}\n"), masked(repr([url]))):
        assert "secret" not in shown
    with pytest.raises(UserError) as raised:
        Ledger(url, "a")
    assert "secret" not in str(raised.value)


def test_what_is_no_secret_is_shown_and_a_port_that_is_no_number_is_said_in_words() -> None:
    for url in (
        "postgresql://user@host:5432/db?sslkey=client.key&connect_timeout=3&keepalives=1&passfile=own",
        "sqlite:////runs/a:b@c/study.db",
        "http://tracking.example:5000/a?x=1",
    ):
        assert masked(url) == url
    url = "postgresql://user:secret@host:port/db"
    with pytest.raises(UserError, match=r"user:\*\*\*@host:port/db cannot be used \(its port is no number\)"):
        Ledger(url, "a")
    assert sqlite_file(url) is None
