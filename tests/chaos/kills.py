"""Faults of processes: they are killed, stopped, slowed down, or there twice."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from random import Random

from chaos import processes
from chaos.scenes import Broken, Hit, Scene, SeveralDrivers

ON_SECONDS, SHARE = 0.01, 0.1
"""A slow rank runs so long at a time, and this share of all the time."""
SLOW_SECONDS = 600.0
"""So long it may be slow until it is named, which needs three intervals of two seconds of steps."""
OWN_TEMPORARY, SOCKETS = ("tmp*",), "pymp-*"
"""What a process that is killed leaves in the temporary folder: files that libraries write there, and the folder
of the fork server's socket, which the fork server removes if it lives."""
REFUSED = "another process is running this study"


def rank(scene: Scene, rng: Random) -> Hit | None:
    found = scene.a_rank(rng)
    if found is None or not processes.send(found[0], signal.SIGKILL):
        return None
    return Hit({found[1]}, time.time())


def without_streams(scene: Scene, _: Random) -> None:
    scene.streams = False


def pause_rank(scene: Scene, rng: Random) -> Hit | None:
    found = scene.a_rank(rng)
    if found is None or not processes.send(found[0], signal.SIGSTOP):
        return None
    time.sleep(rng.uniform(1.0, 8.0))
    processes.send(found[0], signal.SIGCONT)
    return Hit({found[1]}, time.time())


def hang_early(scene: Scene, _: Random) -> None:
    scene.hangs_early = True


def stop_rank(scene: Scene, rng: Random) -> Hit | None:
    """The driver finds it by its silence, and ends it."""
    found = scene.a_rank(rng)
    if found is None or not processes.send(found[0], signal.SIGSTOP):
        return None
    at = time.time()
    scene.wait(lambda: found[0] not in {process.pid for process in processes.marked(scene.mark)})
    return Hit({found[1]}, at)


def slow_rank(scene: Scene, rng: Random) -> Hit | None:
    """Stopped and continued all the time: what a throttled core looks like. The study has to name it."""
    found = scene.a_rank(rng)
    if found is None or (number := processes.rank_of(found[0])) is None:
        return None
    at = time.time()
    named = f"trial {found[1]}: rank {number} on "

    def is_named() -> bool:
        return named in scene.said()

    slow_down(found[0], lambda: is_named() or time.time() - at > SLOW_SECONDS)
    if is_named():
        return Hit({found[1]}, time.time())
    if time.time() - at > SLOW_SECONDS:
        raise Broken(f"a slow rank was not named in {SLOW_SECONDS:.0f} s: {scene.said()[-2000:]}")
    return None  # it had nothing to train any more


def slow_down(pid: int, until: Callable[[], bool], share: float = SHARE) -> None:
    """Lets a process run a share of the time until something is so, or it is gone."""
    while not until() and processes.send(pid, signal.SIGSTOP):
        time.sleep(ON_SECONDS / share - ON_SECONDS)
        processes.send(pid, signal.SIGCONT)
        time.sleep(ON_SECONDS)


def fork_server(scene: Scene, rng: Random) -> Hit | None:
    """Its ranks go with it, as if each had been killed."""
    trials = set[int]()

    def not_struck() -> bool:
        nonlocal trials
        trials = set(processes.ranks(scene.mark).values())
        return not trials & scene.struck

    if not scene.wait(not_struck) or not (found := processes.fork_servers(scene.mark)):
        return None
    processes.send(rng.choice(found), signal.SIGKILL)
    scene.struck |= trials
    return Hit(trials or None, time.time())


def driver(scene: Scene, _: Random) -> Hit | None:
    if not scene.running():
        return None
    trials = set(processes.ranks(scene.mark).values())
    processes.send(scene.drivers[-1].pid, signal.SIGKILL)
    scene.drivers[-1].wait()
    scene.cannot_tidy_up = OWN_TEMPORARY
    return Hit(trials or None, time.time())


def everything(scene: Scene, _: Random) -> Hit | None:
    if not scene.running():
        return None
    for process in processes.marked(scene.mark):
        processes.send(process.pid, signal.SIGKILL)
    scene.cannot_tidy_up = (*OWN_TEMPORARY, SOCKETS)
    for each in scene.drivers:
        each.wait()
    return Hit(None, time.time())


def one_driver(scene: SeveralDrivers, rng: Random) -> Hit | None:
    """The other goes on with its candidate."""
    if len(scene.running()) < 2:
        return None
    dies = rng.choice(scene.running())
    query = "select number from dhen_lease join dhen_driver on driver = id where what = 'trial'"
    query += f" and dhen_lease.study = '{scene.name}' and process like '% {dies.pid} %'"
    held = {int(row) for row in scene.server.rows(query)}
    processes.send(dies.pid, signal.SIGKILL)
    dies.wait()
    scene.cannot_tidy_up = OWN_TEMPORARY
    return Hit(held or None, time.time())


def second_run(scene: Scene, _: Random) -> Hit | None:
    """It is refused in words, and the first is not disturbed."""
    if not scene.running():
        return None
    (first,) = scene.running()
    scene.begin()
    second = scene.drivers.pop()
    code = second.wait()
    if first.poll() is None:
        said = (scene.folder / f"said{len(scene.drivers)}.txt").read_text()
        if code != 2 or REFUSED not in said:
            raise Broken(f"a second driver was not refused ({code}): {said}")
    return Hit(None, time.time())
