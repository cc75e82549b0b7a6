"""The scheduler by itself: places, the order of calls, and that an interruption ends all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from fake_processes import FakeRun, progress
from hypothesis import given, settings
from hypothesis import strategies as st

from search.execution.running import LateRun
from search.execution.scheduler import Scheduler
from trials.records.events import Event


class Fake:
    """An activity that goes on for some looks."""

    def __init__(self, name: Any, processes: FakeRun, ranks: int = 1) -> None:
        self.name, self.processes = name, processes
        self.run = LateRun(lambda: processes, ranks)

    def take(self, events: list[Event]) -> None:
        pass


def lasting(name: Any, looks: int = 1) -> Fake:
    return Fake(name, FakeRun(*[[progress(look)] for look in range(looks)]))


def endless(name: Any) -> Fake:
    return Fake(name, FakeRun([progress(1)], ends=False))


def wide(name: Any, ranks: int, looks: int = 1) -> Fake:
    return Fake(name, FakeRun(*[[progress(look)] for look in range(looks)]), ranks)


class FakeWork:
    """Work whose activities are made beforehand; None stands for what needs no processes."""

    def __init__(self, activities: Iterable[Callable[[], Fake] | None]) -> None:
        self.activities = activities
        self.scheduler = Scheduler[Fake](1)
        self.room = True
        self.began: list[Any] = []
        self.over: list[Any] = []
        self.looks = 0
        self.most = 0
        self.most_ranks = 0
        self.trained_at_once: list[list[Any]] = []

    def worked_off(self, places: int = 1, ranks: int | None = None) -> FakeWork:
        self.scheduler = Scheduler[Fake](places, poll_seconds=0.0, ranks=ranks)
        return self.run_by(self.scheduler)

    def run_by(self, scheduler: Scheduler[Fake]) -> FakeWork:
        scheduler.run(
            self.begin(), self.ended, on_events=self.on_events, on_poll=self.on_poll, has_room=self.has_room
        )
        return self

    def begin(self) -> Iterator[Fake | None]:
        for make in self.activities:
            activity = make() if make is not None else None
            self.began.append(activity and activity.name)
            yield activity

    def has_room(self) -> bool:
        return self.room

    def on_events(self, activity: Fake) -> bool:
        return False

    def ended(self, activity: Fake) -> Iterable[Fake]:
        self.over.append(activity.name)
        return ()

    def on_poll(self) -> None:
        self.looks += 1
        self.most = max(self.most, len(self.scheduler.running))
        begun = [activity for activity in self.scheduler.running if activity.run.begun]
        self.most_ranks = max(self.most_ranks, sum(activity.run.ranks for activity in begun))
        self.trained_at_once.append([activity.name for activity in begun])


def made(*activities: Fake) -> list[Callable[[], Fake]]:
    return [lambda activity=activity: activity for activity in activities]


@given(st.integers(1, 4), st.lists(st.integers(1, 4) | st.none(), max_size=9))
@settings(max_examples=50)
def test_all_places_are_filled_and_never_more(places: int, lengths: list[int | None]) -> None:
    named = list(enumerate(lengths))
    activities = [n and (lambda name=name, n=n: lasting(name, n)) for name, n in named]
    work = FakeWork(activities).worked_off(places)
    assert [name for name in work.began if name is not None] == [name for name, n in named if n]
    assert sorted(work.over) == [name for name, n in named if n]
    assert work.most <= places
    assert work.scheduler.running == []
    if all(n and n > places for n in lengths):
        assert work.most == min(places, len(lengths))


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), max_size=12))
@settings(max_examples=100)
def test_ranks_have_places_and_all_have_their_turn(places: int, wanted: list[tuple[int, int]]) -> None:
    """Each asks for a number of ranks and lasts for some looks."""
    most = max((places, *(ranks for ranks, _ in wanted)))
    activities = [wide(name, ranks, looks) for name, (ranks, looks) in enumerate(wanted)]
    work = FakeWork(made(*activities)).worked_off(places, most)
    assert sorted(work.over) == [*range(len(wanted))]
    assert work.most_ranks <= most
    assert all(len(at_once) <= places for at_once in work.trained_at_once)
    for waiting, activity in enumerate(activities):
        later = [name for name in work.over[: work.over.index(waiting)] if name > waiting]
        # what came up while it waited, and what was waiting too when it came up
        assert len(later) <= 2 * places, (activity.name, work.over)


def test_small_ones_train_while_a_large_one_waits_and_it_does_not_starve() -> None:
    small = [lasting(f"small {number}", 6) for number in range(8)]
    work = FakeWork(made(small[0], wide("large", 2, 4), *small[1:])).worked_off(places=2, ranks=2)
    assert ["small 0", "small 1"] in work.trained_at_once  # the large one waits for both places
    assert ["large"] in work.trained_at_once
    assert work.over.index("large") <= 3  # as many as there are places have gone before it
    assert len(work.over) == 9


def test_what_has_more_ranks_than_there_are_places_trains_alone() -> None:
    work = FakeWork(made(lasting("a"), wide("b", 9, 3), lasting("c", 3))).worked_off(places=2, ranks=2)
    assert ["b"] in work.trained_at_once
    assert sorted(work.over) == ["a", "b", "c"]


def test_what_is_interrupted_while_it_waits_never_begins() -> None:
    work = FakeWork(made(endless("a"), wide("b", 2)))

    def on_poll() -> None:
        if len(work.scheduler.running) == 2:
            interrupt()

    work.on_poll = on_poll  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        work.worked_off(places=2, ranks=2)
    a, b = work.scheduler.running
    assert (a.processes.kills, b.processes.kills) == (1, 0)
    assert (a.run.begun, b.run.begun, b.run.ended) == (True, False, True)
    assert b.run.seconds == 0.0


def test_what_is_settled_without_processes_takes_no_place() -> None:
    """It is followed by a look, so that what is begun next knows of all that has ended."""
    seen: list[list[str]] = []
    work = FakeWork([])
    work.activities = iter(
        [
            lambda: lasting("a"),
            None,
            lambda: seen.append(list(work.over)) or lasting("b"),
        ]
    )
    work.worked_off(places=2)
    assert seen == [["a"]]
    assert work.over == ["a", "b"]


def test_nothing_begins_while_the_work_has_no_room() -> None:
    work = FakeWork(made(lasting("a", 2), lasting("b")))
    began_when_full: list[list[str]] = []

    def on_poll() -> None:
        work.room = not work.scheduler.running
        began_when_full.append(list(work.began))

    work.on_poll = on_poll  # type: ignore[method-assign]
    work.worked_off(places=2)
    assert began_when_full[0] == began_when_full[1] == ["a"]
    assert work.over == ["a", "b"]


def test_what_follows_an_end_keeps_the_place_of_what_has_ended() -> None:
    """A next attempt goes before whatever comes up."""
    work = FakeWork(made(lasting("a"), lasting("b")))
    attempts = iter([lasting("a again"), lasting("a once more")])
    ended = work.ended

    def again(activity: Fake) -> Iterable[Fake]:
        ended(activity)
        return [next(attempts)] if activity.name in ("a", "a again") else []

    work.ended = again  # type: ignore[method-assign]
    work.worked_off()
    assert work.over == ["a", "a again", "a once more", "b"]


def test_the_last_words_of_what_has_ended_are_heard_before_its_end_is_taken_in() -> None:
    calls: list[str] = []
    work = FakeWork(made(lasting("a")))
    work.on_events = lambda each: bool(calls.append("on_events"))  # type: ignore[method-assign]
    work.ended = lambda each: calls.append("ended") or ()  # type: ignore[method-assign]
    work.worked_off()
    assert calls == ["on_events", "ended"]


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["begin", "has_room", "on_events", "on_poll", "an error"])
def test_ctrl_c_and_errors_end_all_that_runs_and_say_what_ran(moment: str) -> None:
    activities = [endless("a"), endless("b")]
    work = FakeWork([*made(*activities), interrupt] if moment == "begin" else made(*activities))

    def once_both_run(*_: Any) -> Any:
        if len(work.scheduler.running) == 2:
            raise error
        return moment == "has_room"

    error = RuntimeError("the database is full") if moment == "an error" else KeyboardInterrupt()
    if moment != "begin":
        setattr(work, "on_poll" if moment == "an error" else moment, once_both_run)
    with pytest.raises(type(error)):
        work.worked_off(places=3)
    assert [activity.processes.kills for activity in activities] == [1, 1]
    assert work.scheduler.running == activities
    assert work.over == []


def test_what_has_begun_in_place_of_another_is_ended_though_the_next_beginning_fails() -> None:
    """Two have waited for an equal one; the first of them runs when Ctrl-C comes."""
    first = endless("first")

    def ended(_: Fake) -> Iterator[Fake]:
        yield first
        interrupt()

    work = FakeWork(made(lasting("a")))
    work.ended = ended  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        work.worked_off()
    assert first.processes.kills == 1
    assert work.scheduler.running == [first]


def test_a_second_run_knows_nothing_of_an_interrupted_one() -> None:
    work = FakeWork(made(endless("a")))
    work.on_poll = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        work.worked_off()
    fresh, seen = FakeWork(made(lasting("b"))), []
    fresh.on_poll = lambda: seen.append(len(work.scheduler.running))  # type: ignore[method-assign]
    fresh.run_by(work.scheduler)
    assert fresh.over == ["b"]
    assert max(seen) <= 1
