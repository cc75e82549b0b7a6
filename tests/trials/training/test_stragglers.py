"""What each rank takes itself, and which of them is taken to be slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from trials.records.events import SlowRank
from trials.records.strategy import Ranks, named
from trials.training.stragglers import INTERVALS, Stragglers, ThreadTime, like_ranks

ALIKE = (0, 0, 0, 0)


def told(
    stretches: list[tuple[list[float], float]], like: tuple[int, ...] = ALIKE, examples: int = 100
) -> list[SlowRank]:
    """What is said of stretches, each with the own seconds of all ranks and the seconds by the clock."""
    judge, found = Stragglers(like), []
    for number, (own, wall) in enumerate(stretches):
        found += judge.note(own, wall, number * examples)
    return found


def test_a_rank_at_a_tenth_of_the_speed_is_named_after_three_intervals() -> None:
    (slow,) = told([([0.2, 0.2, 1.9, 0.2], 2.0)] * 3)
    assert (slow.rank, slow.examples, slow.seconds) == (2, 0, 6.0)
    assert slow.times == pytest.approx(9.5)


def test_short_stretches_are_put_together_until_they_are_long_enough() -> None:
    stretch = [0.05, 0.05, 0.45, 0.05], 0.5  # four of them are an interval
    assert told([stretch] * 11) == []
    (slow,) = told([stretch] * 12)
    assert slow.seconds == pytest.approx(6.0)


def test_one_fast_interval_between_makes_it_begin_anew() -> None:
    slow, fast = ([0.2, 0.2, 1.9, 0.2], 2.0), ([1.8, 1.8, 1.9, 1.8], 2.0)
    assert told([slow, slow, fast, slow, slow]) == []
    (found,) = told([slow, slow, fast, slow, slow, slow])
    assert found.examples == 300  # it began to be slow once more


def test_a_rank_that_shares_its_core_with_two_others_is_not_slow() -> None:
    assert told([([0.7, 0.7, 1.9, 0.7], 2.0)] * 9) == []


def test_a_rank_is_not_slow_where_all_wait_for_the_network() -> None:
    assert told([([0.02, 0.02, 0.4, 0.02], 2.0)] * 9) == []


def test_one_that_stays_slow_is_told_again() -> None:
    found = told([([0.2, 0.2, 1.9, 0.2], 2.0)] * (2 * INTERVALS))
    assert [slow.seconds for slow in found] == [6.0, 12.0]
    assert [slow.examples for slow in found] == [0, 0]


def test_two_ranks_of_a_slow_host_are_both_named() -> None:
    found = told([([0.2, 0.2, 0.2, 1.9, 1.9], 2.0)] * 3, like=(0,) * 5)
    assert [slow.rank for slow in found] == [3, 4]


def test_stages_of_a_pipeline_are_not_compared() -> None:
    like = tuple(like_ranks(Ranks(0, 1, 4), named("pipeline2")))
    assert like == (0, 0, 1, 1)
    assert told([([0.2, 0.2, 1.9, 1.9], 2.0)] * 3, like=like) == []  # the second stage has more layers
    (slow,) = told([([0.2, 0.2, 0.1, 1.9], 2.0)] * 3, like=like)
    assert slow.rank == 3


def test_a_rank_without_others_like_it_is_not_judged() -> None:
    like = tuple(like_ranks(Ranks(0, 1, 2), named("pipeline2")))
    assert told([([0.1, 1.9], 2.0)] * 9, like=like) == []


def test_the_sentence_says_who_where_how_much_and_since_when() -> None:
    slow = SlowRank(
        rank=1, times=9.6, examples=1200, seconds=6.2, where="host1, device 3", then="and trains on"
    )
    assert slow.words == (
        "rank 1 on host1, device 3 is slow: it takes 9.6 times as long for its part of a step as the others, "
        "since 1,200 examples, 6 s ago, and trains on"
    )


def seconds_of(body: str) -> tuple[float, float]:
    """What a process takes itself while it runs some lines, `own` among their names."""
    code = f"import time\nfrom trials.training.stragglers import ThreadTime\nown = ThreadTime()\n{body}\n"
    code += "print(*own.taken())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own, wall = map(float, done.stdout.split())
    return own, wall


def test_who_sleeps_waits_for_others() -> None:
    own, wall = seconds_of("time.sleep(0.3)")
    assert wall >= 0.3
    assert own < 0.5 * wall


def test_who_computes_takes_the_time_itself() -> None:
    own, wall = seconds_of("until = time.perf_counter() + 0.3\nwhile time.perf_counter() < until: pass")
    assert own > 0.5 * wall  # also where it had to wait for a core


@pytest.mark.skipif(sys.platform != "linux", reason="stops a process")
def test_who_is_stopped_takes_the_time_itself() -> None:
    stop = "import os, signal, threading\nos.kill(os.getpid(), signal.SIGSTOP)"
    code = (
        f"from trials.training.stragglers import ThreadTime\nown = ThreadTime()\n{stop}\nprint(*own.taken())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    os.waitpid(process.pid, os.WUNTRACED)
    threading.Timer(0.3, process.send_signal, [signal.SIGCONT]).start()
    printed, _ = process.communicate(timeout=60)
    own, wall = map(float, printed.split())
    assert wall > 0.25
    assert own > 0.5 * wall


def test_a_stretch_leaves_out_what_was_before_it() -> None:
    own = ThreadTime()
    until = time.perf_counter() + 0.2
    while time.perf_counter() < until:
        pass
    began = time.perf_counter()
    own.begin()
    taken, wall = own.taken()
    assert taken <= wall <= time.perf_counter() - began
    own.close()
