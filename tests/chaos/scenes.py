"""Small real studies that faults are put into: the command, where its files lie, and what it needs beside it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from chaos import processes
from chaos.small_disk import SmallDisk
from command_line import EARLY_CHECKPOINTS, free_port
from postgresql import Server
from servers.mlflow_servers import tracking_server

from dhen.errors import UserError
from search.read_study import read_study
from trials.records.events import EVENTS
from trials.records.trial_record import TrialRecord

CANDIDATES = 3
WORDS = (
    *(
        "space=tiny",
        "sampler=random",
        "baseline_trials=1",
        "threads=1",
        "parallel=1",
        "training.precision=fp32",
    ),
    *("confirm=0", "averages=0", "distil=false", "training.epochs=8"),
    *("training.patience=1000", "training.evaluate_every=400"),
)
"""A study of seconds, whose proposals do not depend on what ended when."""
TWO_RANKS = ("ranks=1x2",)
LONG = ("training.epochs=150", "training.evaluate_every=20000")
"""Trainings of many steps between few evaluations."""
REPEATS = 8
"""Times that a command may be repeated until its study is finished."""
PATIENCE_SECONDS = 600.0
COSTS = ("part-costs", "shared-costs")
"""What was measured on this machine, in the cache."""
DISK_BYTES = 64 * 2**20
HANG_SECONDS = 6.0
"""Silence that counts as a hang in a study whose ranks are stopped, in place of minutes."""


class Broken(Exception):  # noqa: N818
    """What a study did that no fault may make it do."""


class Hit(NamedTuple):
    """What a fault did."""

    trials: set[int] | None = None
    """Trials that it hit; None: any may show that training goes on."""
    ended_at: float = 0.0
    """When it was over, from which on recovery counts; 0: at once."""

    @property
    def since(self) -> float:
        return self.ended_at or time.time()


class Scene:
    """One driver, its ledger in the run directory; with `ranks=1x2` candidates have two ranks. Each evaluation is
    followed by a checkpoint."""

    def __init__(self, folder: Path, log: Path, seed: int, environment: dict[str, str]) -> None:
        self.folder, self.log, self.seed = folder, log, seed
        self.out = folder / "study"
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True)
        self.environment = environment | {processes.MARK: self.mark, "TMPDIR": str(self.temporary)}
        self.environment["DHEN_SEARCH_CACHE"] = str(self.folder / "cache")
        self.own_cache(Path(environment["DHEN_SEARCH_CACHE"]))
        self.words: tuple[str, ...] = ()
        self.candidates = CANDIDATES
        self.struck: set[int] = set()
        """Trials of which a rank was struck: one that is killed twice counts as out of memory, as it should."""
        self.hangs_early = False
        self.cannot_tidy_up: tuple[str, ...] = ()
        """Temporary files that those who were killed leave, whoever they are."""
        self.streams = True
        """Whether its commands have standard streams."""
        self.drivers: list[subprocess.Popen[bytes]] = []
        self.repeated = 0

    def own_cache(self, cache: Path) -> None:
        """Copies a cache, with the prepared log and what trainings have taken; the first study finds it empty."""
        cache.mkdir(parents=True, exist_ok=True)
        shutil.copytree(cache, self.folder / "cache")

    def begin(self) -> None:
        """Starts the study."""
        self.start("run", "--data", self.log, "--out", self.out, *WORDS, *self._numbers, *self.words)

    @property
    def _numbers(self) -> tuple[str, ...]:
        return f"seed={self.seed}", f"trials={self.candidates}"

    def start(self, *words: object) -> subprocess.Popen[bytes]:
        """Starts the command in a session of its own; what it says goes into a file."""
        command = [*EARLY_CHECKPOINTS]
        if self.hangs_early:
            command = [sys.executable, str(Path(__file__).with_name("early_hang.py")), str(HANG_SECONDS)]
        if not self.streams:
            command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
        with (self.folder / f"said{len(self.drivers)}.txt").open("wb") as said:
            driver = subprocess.Popen(
                [*command, *map(str, words)],
                env=self.environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.drivers.append(driver)
        return driver

    def running(self) -> list[subprocess.Popen[bytes]]:
        return [driver for driver in self.drivers if driver.poll() is None]

    def said(self) -> str:
        """What all its drivers have said so far."""
        files = (self.folder / f"said{number}.txt" for number in range(len(self.drivers)))
        return "\n".join(file.read_text(errors="replace") for file in files)

    def has_begun(self) -> bool:
        """Whether its first trial has begun."""
        return (self.out / "trials" / "00000" / "events.jsonl").exists()

    def has_trained(self) -> bool:
        """Whether its last candidate is trained."""
        events = self.out / "trials" / f"{self.candidates:05d}" / EVENTS
        return events.exists() and any(f'"{end}"' in events.read_text() for end in ("trained", "scored"))

    def wait(self, there: Callable[[], object]) -> bool:
        """Waits until something is so; False where the study has ended before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not there():
            if not self.running():
                return bool(there())
            if time.monotonic() > deadline:
                raise Broken(f"nothing happens any more:\n{self.said()[-2000:]}")
            time.sleep(0.02)
        return True

    def a_rank(self, rng: Random) -> tuple[int, int] | None:
        """A rank that lives, of a trial that was not struck yet, and its trial; None where the study ends."""
        if not self.wait(self._ranks):
            return None
        if not (found := sorted(self._ranks().items())):
            return self.a_rank(rng)
        rank, trial = rng.choice(found)
        self.struck.add(trial)
        return rank, trial

    def _ranks(self) -> dict[int, int]:
        return {rank: trial for rank, trial in processes.ranks(self.mark).items() if trial not in self.struck}

    def finished_trials(self) -> dict[int, TrialRecord]:
        """Trials that have ended, as the ledger has them now."""
        try:
            record = read_study(self.out)
        except UserError:  # it has none yet
            return {}
        return {trial.number: trial for trial in record.trials if not trial.result.outcome.unfinished}

    def last_event(self, trials: set[int] | None) -> float:
        """When a trial last said something, by the clock of the file system."""
        paths = (
            (self.out / "trials" / f"{trial:05d}" / "events.jsonl" for trial in trials)
            if trials is not None
            else self.out.glob("trials/*/events.jsonl")
        )
        return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)

    def recover(self, trials: set[int] | None, since: float) -> float:
        """Waits until one of the trials (any, by default) trains again, or the study is finished; returns the
        seconds from `since` on."""
        return self._go_on(lambda: self.last_event(trials) > since + 0.01) - since

    def finish(self) -> None:
        """Waits until the study is finished."""
        self._go_on(lambda: False)

    def _go_on(self, there: Callable[[], bool]) -> float:
        """Waits until something is so or the study is finished, and repeats its command where nobody is at it any
        more; returns when that was."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not there():
            if not self.running():
                self._check_words()
                if any(driver.returncode == 0 for driver in self._latest()):
                    break
                if self.repeated == REPEATS:
                    raise Broken(f"it does not finish however often it is begun:\n{self.said()[-3000:]}")
                self.repeated += 1
                self.begin()
            if time.monotonic() > deadline:
                raise Broken(f"nothing happens any more:\n{self.said()[-3000:]}")
            time.sleep(0.05)
        return time.time()

    def catch_up(self) -> None:
        """What a user does whose study is finished while MLflow is behind."""
        if "MLflow is behind" in self.said():
            driver = self.start("report", self.out)
            if driver.wait(PATIENCE_SECONDS) != 0:
                raise Broken(f"report failed:\n{self.said()[-2000:]}")

    def mlflow(self) -> str | None:
        """The store of its runs; None: the run directory's own."""
        return None

    def left(self, seconds: float) -> list[str]:
        """Its processes that still live once so much time was given to end, in words; they are killed."""
        return processes.left_after(self.mark, seconds)

    def close(self) -> None:
        for driver in self.running():
            processes.send(driver.pid, signal.SIGKILL)
        for driver in self.drivers:
            driver.wait()
        processes.left_after(self.mark, 5.0)

    def _latest(self) -> list[subprocess.Popen[bytes]]:
        """Drivers that were there after the last repetition."""
        return self.drivers[-1:]

    def _check_words(self) -> None:
        """Whoever ended said why in a sentence, or was killed."""
        said = self.said()
        if "Traceback (most recent call last)" in said:
            raise Broken(f"a traceback:\n{said[-3000:]}")
        for driver in self.drivers:
            if driver.returncode not in (0, 2, 130, -signal.SIGKILL):
                raise Broken(f"exit code {driver.returncode}:\n{said[-2000:]}")


class SeveralDrivers(Scene):
    """A study on PostgreSQL with two drivers; one server for all injections of a process."""

    def __init__(self, *given: Any, server: Server) -> None:
        super().__init__(*given)
        self.server = server
        self.name = f"study-{self.mark[:8]}"
        self.words = (f"storage={server.url}", f"name={self.name}")

    def begin(self) -> None:
        super().begin()
        self.wait(self.has_begun)
        if self.running():
            self.start("worker", "--study", self.server.url, "--name", self.name)

    def _latest(self) -> list[subprocess.Popen[bytes]]:
        return self.drivers[-2:]


class OnSmallDisk(Scene):
    """A study of which one thing lies on a small disk: the cache, the ledger, or the run directory without it."""

    def __init__(self, *given: Any, what: str) -> None:
        self._what = what
        super().__init__(*given)
        self.disk = SmallDisk(self.folder / what if what != "study" else self.out)
        if what != "cache":
            self._small(self.disk)
            (self.folder / "ledger").mkdir(exist_ok=True)
            self.words = (f"storage=sqlite:///{self.folder / 'ledger' / 'study.db'}", "name=study")

    def own_cache(self, cache: Path) -> None:
        """On the small disk, where the cache is what finds no space; then the log is not prepared yet."""
        if self._what != "cache":
            super().own_cache(cache)
            return
        self._small(SmallDisk(self.folder / "cache"))
        for name in COSTS:
            shutil.copytree(cache / name, self.folder / "cache" / name)

    def _small(self, disk: SmallDisk) -> None:
        disk.folder.mkdir(parents=True)
        disk.limit(DISK_BYTES)

    def close(self) -> None:
        super().close()
        self.disk.close()


class Tracked(Scene):
    """A study whose runs go to a tracking server of its own."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._port, self._server = free_port(), ExitStack()
        self.server_up()
        self.words = (f"tracking=http://127.0.0.1:{self._port}",)

    def server_up(self) -> None:
        self._server.enter_context(tracking_server(self.folder, self._port))

    def server_down(self) -> None:
        self._server.close()

    def mlflow(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        super().close()
        self.server_down()
