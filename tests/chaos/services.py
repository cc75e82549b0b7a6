"""Faults of what a study relies on: its database, a tracking server, space on a disk."""

from __future__ import annotations

import time
from random import Random

from chaos.scenes import Hit, OnSmallDisk, SeveralDrivers, Tracked

GONE_SECONDS, LONG_GONE_SECONDS = 10.0, 120.0
END_SECONDS = 5.0
"""What a small study's end takes, about."""
FULL_SECONDS = 12.0
"""A disk is given back after so long at the latest."""


def restart(scene: SeveralDrivers, _: Random) -> Hit | None:
    return _away(scene, 0.0)


def gone(scene: SeveralDrivers, _: Random) -> Hit | None:
    return _away(scene, GONE_SECONDS)


def gone_for_long(scene: SeveralDrivers, _: Random) -> Hit | None:
    return _away(scene, LONG_GONE_SECONDS)


def _away(scene: SeveralDrivers, seconds: float) -> Hit | None:
    if not scene.running():
        return None
    trials = len(list(scene.out.glob("trials/*")))
    scene.server.stop()
    time.sleep(seconds)
    scene.server.start()
    # a trial that begins afterwards has been committed
    return Hit(set(range(trials, 100)), time.time())


def tracking_gone(scene: Tracked, rng: Random) -> Hit | None:
    if not scene.running():
        return None
    scene.server_down()
    time.sleep(rng.uniform(0.0, GONE_SECONDS))
    scene.server_up()
    return Hit(None, time.time())


def fill_disk(scene: OnSmallDisk, _: Random) -> Hit | None:
    if not scene.running():
        return None
    scene.disk.fill()
    return _until_free(scene)


def fill_at_the_end(scene: OnSmallDisk, rng: Random) -> Hit | None:
    """Once all is trained."""
    scene.wait(scene.has_trained)
    time.sleep(rng.uniform(0.0, END_SECONDS))
    return fill_disk(scene, rng)


def almost_full(scene: OnSmallDisk, rng: Random) -> None:
    """A log is prepared in the first moments, before anything can be timed."""
    scene.disk.fill(rng.randrange(4096, 400_000))


def before_the_cache(scene: OnSmallDisk, _: Random) -> Hit | None:
    return _until_free(scene)


def _until_free(scene: OnSmallDisk) -> Hit:
    deadline = time.monotonic() + FULL_SECONDS
    while scene.running() and time.monotonic() < deadline:
        time.sleep(0.05)
    scene.disk.free()
    return Hit(None, time.time())
