"""Faults of what a study reads: files that are not as they were written, and the clock."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from chaos import kills
from chaos.scenes import PATIENCE_SECONDS, Broken, Hit, Scene

from dhen.atomic_write import write_atomically

CLOCK = Path(__file__).with_name("clock.c")
HOUR_SECONDS = 3600
REFUSED = 2
"""Exit code of a study that cannot go on."""
REMEDY = re.compile(r"restore|delete|export|prepare|train|run the same|another", re.IGNORECASE)
"""What a sentence has that says what helps."""


def truncate(path: Path, rng: Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def flip(path: Path, rng: Random) -> None:
    """One bit."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def remove(path: Path, _: Random) -> None:
    path.unlink()


HARMS: tuple[Callable[[Path, Random], None], ...] = (truncate, flip, remove)


def newest_checkpoint(scene: Scene, rng: Random) -> Hit | None:
    """Of the trial that trains; it has two."""

    def with_two() -> list[Path]:
        folders = scene.out.glob("trials/*/checkpoints")
        return [folder for folder in folders if len(list(folder.glob("after-*"))) > 1]

    if not scene.wait(with_two) or kills.everything(scene, rng) is None:
        return None
    for folder in with_two():
        newest = max(folder.glob("after-*"), key=lambda path: int(path.name.partition("-")[2]))
        rng.choice(HARMS)(rng.choice(sorted(newest.iterdir())), rng)
        return Hit({int(folder.parent.name)}, time.time())
    return None


def truncated_cache(scene: Scene, rng: Random) -> Hit | None:
    """Any file of the prepared log with content."""
    if kills.everything(scene, rng) is None:
        return None
    (log,) = Path(scene.environment["DHEN_SEARCH_CACHE"]).glob("*/manifest.json")
    files = [path for path in sorted(log.parent.rglob("*")) if path.is_file() and path.stat().st_size]
    truncate(rng.choice(files), rng)
    return Hit(None, time.time())


KEPT_FILES = {
    "ledger": "study.db",
    "weights": "trials/*/weights.safetensors",
    "logits": "trials/*/logits.*",
    "checkpoint": "trials/*/checkpoints/after-*/*",
    "events": "trials/*/events.jsonl",
    "bundle": "best/**/*",
}
"""Kinds of files that a study keeps, as patterns in its run directory; beside them the prepared log without its
columns, whose sizes alone are checked when it is opened."""


def flipped_bit(scene: Scene, rng: Random) -> Hit | None:
    """In a file of one of the kinds that are there, while nobody is at the study. Then it is begun once: whoever
    refuses the file names it and a remedy, and the file is put back, as that says."""
    if kills.everything(scene, rng) is None:
        return None
    files = {kind: [*scene.out.glob(pattern)] for kind, pattern in KEPT_FILES.items()}
    files["prepared log"] = [*Path(scene.environment["DHEN_SEARCH_CACHE"]).glob("*/manifest.json")]
    files["prepared log"] += [
        path for log in files["prepared log"] for path in log.parent.glob("encoding/**/*")
    ]
    files = {
        kind: kept
        for kind, paths in files.items()
        if (kept := sorted({path for path in paths if path.is_file() and path.stat().st_size}))
    }
    path = rng.choice(files[rng.choice(sorted(files))])
    before, struck = path.read_bytes(), time.time()
    flip(path, rng)
    scene.begin()
    driver = scene.drivers[-1]
    if driver.wait(PATIENCE_SECONDS) == REFUSED:
        said = (scene.folder / f"said{len(scene.drivers) - 1}.txt").read_text(errors="replace")
        sentence = next((line for line in said.splitlines() if line.startswith("dhen-search: ")), "")
        names = {path.name, path.parent.name}
        if not any(name in sentence for name in names) or not REMEDY.search(sentence):
            raise Broken(f"a bit of {path} was flipped, and it said: {sentence}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(before)
        scene.repeated += 1
    return Hit(None, struck)


def moved(scene: Scene, rng: Random) -> Hit | None:
    """The run directory has another name when its command is given again."""
    if kills.everything(scene, rng) is None:
        return None
    scene.out = scene.out.rename(scene.out.with_name(f"moved{rng.randrange(1000)}"))
    return Hit(None, time.time())


def own_clock(scene: Scene, _: Random) -> None:
    """The study's processes have a clock that can be put forth and back; monotonic time goes on, as it does."""
    clock, library = scene.folder / "clock", scene.folder / "clock.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, CLOCK, "-ldl"], check=True)
    clock.write_text("0")
    scene.environment |= {"LD_PRELOAD": str(library), "DHEN_CLOCK": str(clock)}


def jump(scene: Scene, rng: Random) -> Hit | None:
    if not scene.running():
        return None
    seconds = rng.choice((-1, 1)) * rng.randrange(60, 24 * HOUR_SECONDS)
    # who reads it in between sees the one or the other
    write_atomically(scene.folder / "clock", str(seconds))
    return Hit(None, time.time())
