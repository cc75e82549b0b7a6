"""A model that is trained online beside the same model as it was, by day; and what increments cost.

    python -m benchmarks.training.online_beside_frozen
        NE by day, means over seeds, with a vocabulary and with growing tables, from fresh optimizers and from
        their state; then bytes and seconds of the last increment beside those of all weights

The log is generated: users and items stay for some days, then others come, and an id alone decides much. A network
of two layers is trained on its first half, in one pass, and then online on the second, day by day. Both kinds of
tables have room for all who are there at a time; a vocabulary knows those of the first half alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from benchmarks.models.one_network import stacked
from benchmarks.shared.machine_and_tables import beside, machine, markdown, spread
from search.bundles.bundle import Bundle, read_bundle
from search.bundles.increments import write_increment
from search.bundles.online import time_of
from trials.store.weights import changes, save_weights

LOG = ("users=2000", "items=300", "own=0.6", "lifetime_days=3")
STATES = {"fresh optimizers": (), "their state kept": ("objective=next_period",)}
"""What online training begins with, and the words that `train` has for it."""
COLUMNS, DAYS = ("user", "item"), 10
REPEATS = 5
COMMAND = (sys.executable, "-c", "from search.cli import main; main()")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains all and prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args(arguments)
    print(f"{machine()}\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, second = halves(folder, options.rows)
        capacity = int(LOG[0].partition("=")[2]) * 2
        kinds = {"a vocabulary": (), "growing tables": (f"growing.capacity={capacity}", "growing.evict=lru")}
        for kind, growing in kinds.items():
            log = prepared(folder / kind, first, growing)
            for state, words in STATES.items():
                seeds = range(options.seeds)
                bundles = [trained(folder / kind / state, log, second, seed, *words) for seed in seeds]
                print(f"{kind}, {state}:\n\n{_by_day(bundles)}\n")
            print(f"{_costs(bundles[0], folder)}\n")


def _run(folder: Path, *words: object) -> None:
    """Runs a command whose cache lies in the folder."""
    environment = os.environ | {"DHEN_SEARCH_CACHE": str(folder / "cache")}
    subprocess.run([*COMMAND, *map(str, words)], check=True, stdout=subprocess.DEVNULL, env=environment)


def halves(folder: Path, rows: int) -> tuple[Path, Path]:
    """Writes a log and returns its first and its second half."""
    whole = folder / "whole.csv"
    _run(folder, "demo", "--out", whole, f"rows={rows}", *LOG)
    header, *lines = whole.read_text().splitlines()
    written = folder / "first.csv", folder / "second.csv"
    for path, part in zip(written, (lines[: rows // 2], lines[rows // 2 :]), strict=True):
        path.write_text("\n".join([header, *part]) + "\n")
    return written


def prepared(folder: Path, log: Path, growing: Sequence[str]) -> Path:
    """Prepares the first half; growing tables are asked for in its schema."""
    _run(folder, "prepare", log, "--out", folder / "log")
    if growing:
        given = {word.partition("=")[0].removeprefix("growing."): word.partition("=")[2] for word in growing}
        schema = folder / "log" / "schema.yaml"
        data = yaml.safe_load(schema.read_text())
        for column in COLUMNS:
            rule = {"capacity": int(given["capacity"]), "evict": given["evict"]}
            data["columns"][column] = {"role": "categorical", "table": {"growing": rule}}
        schema.write_text(yaml.safe_dump(data, sort_keys=False))
        _run(folder, "prepare", log, "--out", folder / "log")
    return folder / "log"


def trained(folder: Path, log: Path, later: Path, seed: int, *words: str) -> Bundle:
    """Trains a network on the first half, and goes on online with the second."""
    folder.mkdir(exist_ok=True)
    model, base, live = folder / "model.yaml", folder / f"base{seed}", folder / f"live{seed}"
    model.write_text(yaml.safe_dump({"model": stacked("dlrm", "linear")}))
    _run(folder, "train", model, "--data", log, "--out", base, "training.epochs=1", f"seed={seed}", *words)
    _run(folder, "online", base, "--data", later, "--out", live)
    return read_bundle(live)


def _by_day(bundles: Sequence[Bundle]) -> str:
    """NE of each day, and of all days together."""
    header = ["day", "lowest possible", "as it was", "online", "less"]
    days = list(zip(*([one.info.period for one in bundle.increments] for bundle in bundles), strict=True))
    lines = []
    for periods in days:
        frozen, online = ([getattr(one, kind).ne for one in periods] for kind in ("frozen", "online"))
        floor = periods[0].ne_floor
        name = time_of(periods[0].first)[:10]
        shown = "" if floor is None else f"{floor:.5f}"
        lines.append([name, shown, spread(frozen), spread(online), beside(online, frozen)])
    means = [
        [statistics.fmean(getattr(day[seed], kind).ne for day in days) for seed in range(len(bundles))]
        for kind in ("frozen", "online")
    ]
    lines.append(["mean of days", "", spread(means[0]), spread(means[1]), beside(means[1], means[0])])
    return markdown(header, lines)


def _costs(bundle: Bundle, folder: Path) -> str:
    """Bytes and seconds of the newest increment beside those of all weights, medians."""
    newest = bundle.increments[-1]
    before = Bundle(
        directory=bundle.directory,
        info=bundle.info,
        encoding=bundle.encoding,
        increments=bundle.increments[:-1],
    )
    old, new = (dict(one.model().state_dict()) for one in (before, bundle))
    score = newest.scores()

    def increment() -> None:
        write_increment(folder / "again", newest.info, changes(old, new), score)

    def whole() -> None:
        save_weights(new, folder / "whole.safetensors")

    seconds = [median_seconds(write) for write in (increment, whole)]
    size = newest.bytes, (folder / "whole.safetensors").stat().st_size
    names = "the newest increment", "all weights"
    rows = [
        [name, f"{many / 2**20:.2f}", f"{1e3 * took:.1f}"]
        for name, many, took in zip(names, size, seconds, strict=True)
    ]
    return markdown(["what is written", "MiB", "ms"], rows)


def median_seconds(write: Callable[[], object]) -> float:
    """Returns the median time of a call."""
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        write()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


if __name__ == "__main__":
    main()
