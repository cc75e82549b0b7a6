"""One injection: a study begins, a fault strikes at a random moment, the study goes on, and is judged."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from chaos import processes
from chaos.faults import FAULTS, Fault
from chaos.invariants import Key, judge, reference_of
from chaos.on_ray import OnRay
from chaos.scenes import CANDIDATES, LONG, TWO_RANKS, Broken, Scene, SeveralDrivers
from command_line import write_log
from postgresql import Server, served

from dhen.values import Value
from search.read_study import read_study
from trials.records.trial_record import TrialRecord

ROWS = 2000
KINDS: dict[str, tuple[type[Scene], tuple[str, ...]]] = {
    "one rank": (Scene, ()),
    "two ranks": (Scene, TWO_RANKS),
    "two ranks, long": (Scene, (*TWO_RANKS, *LONG)),
    "two hosts": (OnRay, ()),
}
"""Undisturbed studies that others are held against, and what their commands say besides."""
MISSES = 5
"""Times that a fault may find its study ended already before it is given up."""


class Injection(Value):
    """What came of one injection."""

    fault: str
    seed: int
    number: int
    """Number of the study, of those with this fault and seed."""
    strike: int = 0
    """How often the fault had struck this study before."""
    at: str = ""
    """When, in ISO 8601, UTC."""
    moment_seconds: float = 0.0
    """Seconds after the first trial's beginning, or after the study went on, at which it struck."""
    lost: int = 0
    doubled: int = 0
    compared: int = 0
    repeated: int = 0
    """Times that the command had to be repeated."""
    recovered_seconds: float | None = None
    """Seconds from the fault, or from its end, until training went on; None where it did not."""
    problems: tuple[str, ...] = ()
    """Invariants that did not hold, in words."""


class Undisturbed(NamedTuple):
    """A study that nothing happened to."""

    trials: dict[Key, TrialRecord]
    training_seconds: float
    """Seconds from its first trial's beginning until its last candidate was trained."""
    seconds: float
    """Seconds from its first trial's beginning to its end."""


class Chaos:
    """What the injections of one seed share: a log, undisturbed studies, a database server."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        environment: dict[str, str],
        stack: ExitStack,
        *,
        strikes: int = 1,
        keep: Path | None = None,
    ) -> None:
        """Writes the log. A fault strikes its study `strikes` times, which has the more candidates; a study that
        is not as it must be is kept below `keep`."""
        self._keep = keep
        self._strikes, self._candidates = strikes, CANDIDATES * (strikes + 1) // 2
        self._folder, self._seed, self._environment, self._stack = folder, seed, environment, stack
        self._log = write_log(folder / "clicks.csv", ROWS, seed=seed)
        self._undisturbed: dict[str, Undisturbed] = {}
        self._server: Server | None = None

    def inject(self, name: str, number: int) -> list[Injection]:
        """Puts a fault into a study of its own, as often as it strikes there; none where it found the study
        ended each time."""
        fault = FAULTS[name]
        for miss in range(MISSES):
            rng = Random(f"{self._seed} {name} {number} {miss}")
            if found := self._study(Injection(fault=name, seed=self._seed, number=number), fault, rng):
                return found
        return []

    def undisturbed(self, kind: str) -> Undisturbed:
        """A study that nothing happens to."""
        if kind not in self._undisturbed:
            with self._scene(KINDS[kind][0], kind, {}) as scene:
                scene.begin()
                scene.wait(scene.has_begun)
                began = time.monotonic()
                scene.wait(scene.has_trained)
                trained = time.monotonic() - began
                scene.finish()
                self._undisturbed[kind] = Undisturbed(
                    reference_of(read_study(scene.out)), trained, time.monotonic() - began
                )
                # what follows finds the log prepared
                shutil.copytree(
                    scene.folder / "cache", self._environment["DHEN_SEARCH_CACHE"], dirs_exist_ok=True
                )
        return self._undisturbed[kind]

    def _study(self, injection: Injection, fault: Fault, rng: Random) -> list[Injection]:
        """One study. What is wrong at its end is noted with the last injection, of the others what they took."""
        undisturbed = self.undisturbed(fault.reference)
        seconds = undisturbed.training_seconds if fault.while_training else undisturbed.seconds
        shared_memory = processes.shared_memory()
        found, before = list[Injection](), dict[int, TrialRecord]()
        with self._scene(fault.scene, fault.reference, fault.options) as scene:
            try:
                if fault.prepare is not None:
                    fault.prepare(scene, rng)
                scene.begin()
                for _ in range(self._strikes if fault.scene_begins else 1):
                    moment = rng.uniform(0.0, seconds / self._strikes) if fault.scene_begins else 0.0
                    if fault.scene_begins:
                        scene.wait(scene.has_begun)
                        deadline = time.monotonic() + moment
                        scene.wait(lambda deadline=deadline: time.monotonic() >= deadline)
                    before = scene.finished_trials() | before
                    at = datetime.now(UTC).isoformat(timespec="seconds")
                    hit = fault.inject(scene, rng)
                    if hit is None:
                        break
                    found.append(injection.replace(at=at, moment_seconds=round(moment, 3), strike=len(found)))
                    repeated = scene.repeated
                    recovered = scene.recover(hit.trials, hit.since)
                    took = {"recovered_seconds": round(recovered, 2), "repeated": scene.repeated - repeated}
                    found[-1] = found[-1].replace(**took)
                if found:
                    scene.finish()
                    scene.catch_up()
                    verdict = judge(scene, before, undisturbed.trials, shared_memory)
                    came = verdict._asdict() | {"problems": tuple(verdict.problems)}
                    found[-1] = found[-1].replace(**came)
                    if verdict.problems:
                        self._for_who_looks_for_the_cause(scene, found[-1])
            except Broken as broken:
                found = found or [injection]
                found[-1] = found[-1].replace(problems=(str(broken),))
        return found

    def _for_who_looks_for_the_cause(self, scene: Scene, injection: Injection) -> None:
        print(scene.said(), file=sys.stderr)
        if self._keep is not None:
            kept = self._keep / f"{injection.fault}-{injection.seed}-{injection.number}"
            shutil.copytree(scene.out, kept, dirs_exist_ok=True)
            print(f"kept: {kept}", file=sys.stderr)

    @contextmanager
    def _scene(self, scene: type[Scene], kind: str, options: dict[str, Any]) -> Iterator[Scene]:
        if issubclass(scene, SeveralDrivers):
            if self._server is None:
                self._server = self._stack.enter_context(served())
            options = {**options, "server": self._server}
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        opened = scene(folder, self._log, self._seed, self._environment, **options)
        opened.words += KINDS[kind][1]
        opened.candidates = self._candidates
        try:
            yield opened
        finally:
            opened.close()
            shutil.rmtree(folder)
