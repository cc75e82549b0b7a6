"""Questions to the head of a Ray cluster have an answer, or an end; `tests/chaos` has a real head that is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from dhen.errors import EXIT_CODE
from trials.runtime.hosts import ray_connection
from trials.runtime.hosts.ray_connection import Head, HeadGoneError


def test_the_answer_and_what_goes_wrong_are_those_of_the_question() -> None:
    answers = Head()
    assert answers.ask(lambda: 3) == 3

    def wrong() -> None:
        raise ValueError("no such node")

    with pytest.raises(ValueError, match="no such node"):
        answers.ask(wrong)
    assert not answers.is_gone


def test_a_head_that_does_not_answer_is_given_up_before_ray_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ray_connection.RAYS_SETTING, "0.8")
    gone, never = Head(), threading.Event()
    began = time.monotonic()
    with pytest.raises(HeadGoneError, match=r"has not answered for 1 s .* the same command goes on"):
        gone.ask(never.wait)
    assert time.monotonic() - began >= ray_connection.SHARE * 0.8
    assert gone.is_gone
    asked: list[int] = []
    with pytest.raises(HeadGoneError):
        gone.ask(lambda: asked.append(1))
    assert asked == []
    never.set()


def test_a_head_that_is_watched_may_take_long_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ray_connection.RAYS_SETTING, "2")
    monkeypatch.setattr(ray_connection, "BEAT_SECONDS", 0.1)
    slow = Head()
    with slow.watched(lambda: None):
        assert slow.ask(lambda: time.sleep(2.5)) is None


OUT_OF_REACH = """
import threading, time
from dhen.errors import EXIT_CODE
from trials.runtime.hosts import ray_connection
ray_connection.BEAT_SECONDS = 0.1
with ray_connection.Head().watched(threading.Event().wait):
    time.sleep(600)
"""


def test_a_process_that_asks_nothing_ends_with_a_sentence() -> None:
    environment = os.environ | {ray_connection.RAYS_SETTING: "1"}
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_REACH], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == EXIT_CODE
    assert "the head of the Ray cluster has not answered for 1 s" in done.stderr


def test_a_client_whose_connection_is_lost_is_told_so() -> None:
    def lost() -> None:
        raise ConnectionError("Client is\n shutting down.")

    gone = Head()
    with pytest.raises(HeadGoneError, match=r"has gone \(Client is shutting down\.\)"):
        gone.ask(lost)
    assert gone.is_gone
