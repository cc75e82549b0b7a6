"""Whether two checkouts run the same study: equal points, NE, choices, scores and plans, to the bit.

    python -m benchmarks.search.same_study ../before . --keep runs/same
    python -m benchmarks.search.same_study runs/same/old .

For a change of the code that should change no result. Three small logs are written from a fixed seed. Each
checkout searches on them, and plans a configuration for the shipped clusters. What it prints as JSON is compared
field by field. There is a line for each difference, and the exit code is 1 if there is any.

Each checkout begins with an empty user cache. On two cores both take some minutes. `--keep` keeps the results, and
later comparisons can take them in place of a checkout.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

Results = dict[str, Any]
"""What a checkout printed: by log, then by command; and the plans."""

RENAMED: dict[str, str] = {}
"""New names of fields by their old ones, both as lines of this script name them, such as
`status.trials.result.curve`. What lies below a field is renamed with it. A study's keys are `words.KEY`."""
LEFT_OUT = (
    "*_at",
    "*.elapsed_seconds",
    "*.result.seconds",
    "*.result.curve.seconds",
    "*.result.measured.*_seconds",
    "*.result.measured.step_ms",
    "*.result.measured.examples_per_second",
    "*.result.measured.peak_memory_bytes",
    "*.attempts.seconds",
    "*.attempts.measured_*",
    "*.rows.measured_peak_bytes",
    "*/run.sentences",
    "plain/*step_seconds*",
)
"""Fields that are not compared, as patterns of LOG/FIELD: what a clock or the system has measured, and sentences,
whose numbers are compared as fields. `plain` trains on this machine, so its predicted seconds follow a clock too.
Fields that are taken away on purpose are added here."""

RESULTS = "results.json"
CLUSTERS = ("a100-80gb", "h100", "h200", "rtx-4090", "zionex")
WORDS = (
    *("space=tiny", "parallel=1", "threads=1", "seed=7", "training.epochs=1", "baseline_trials=1"),
    "training.precision=fp32",  # auto takes what is faster, as measured at that moment
)
STUDIES: dict[str, tuple[str, ...]] = {
    "plain": ("ranks=1x2", "technique=zero1"),
    "stamped": ("cluster=h100", "averages=2", "refit=yes"),
    "bags": ("cluster=a100-80gb", "growing.capacity=60", "growing.columns=[user]", "tune=2"),
}
"""Words of the study on each log. No step time that depends on this machine enters a plan for a named cluster."""
CONFIGURATION = """\
# large enough for the clusters to need different techniques
model:
  embedding_dim: 128
  layers:
    - {modules: [attention, mlp], out_embeddings: 64}
    - {modules: [dcn_v2], out_embeddings: 64}
    - {modules: [attention, dcn_v2]}
schema:
  tables:
    - {name: site, rows: 20000}
    - {name: user, rows: 50000000}
    - {name: tags, rows: 3000, multi_hot: true, mean_ids: 2.5}
  numeric: 13
training: {batch_size: 8388608, precision: bf16}
"""
ROWS_SCORED = 200
"""Number of rows whose scores are compared: one that differs is a line."""
COMMAND = "from search.cli import main; main()"


def write_log(path: Path, name: str, rows: int) -> None:
    """Writes the log of a study: `stamped` has a time stamp, `bags` several tags in a cell and ever new users."""
    rng = random.Random(name)
    began = datetime(2026, 1, 1)
    columns = ["click", "site", "user", "price", "age"]
    columns += {"stamped": ["time"], "bags": ["tags"]}.get(name, [])
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        for row in range(rows):
            site, tags = rng.randrange(8), rng.sample("wxyz", rng.randrange(4))
            user = int(rng.paretovariate(1.1)) + (row // 40 if name == "bags" else 0)
            price = rng.uniform(0, 10)
            odds = 0.4 * site - 0.3 * price + user % 3 + 1.5 * ("x" in tags) - 2
            writer.writerow(
                {
                    "click": int(rng.random() < 1 / (1 + math.exp(-odds))),
                    "site": f"s{site}",
                    "user": f"u{user}",
                    "price": f"{price:.3f}",
                    "age": rng.randrange(18, 90),
                    "time": began + timedelta(minutes=5 * row),
                    "tags": "|".join(tags),
                }
            )


class Checkout:
    """The code in a directory, as commands that run in a folder of their own.

    Args:
        directory: of the code.
        folder: in which commands run, with a user cache of its own.
    """

    def __init__(self, directory: Path, folder: Path) -> None:
        self.directory, self.folder = directory.resolve(), folder.resolve()
        cache = self.folder / "cache"
        cache.mkdir(parents=True)
        ours = ("DHEN_SEARCH_", "MLFLOW_", "PYTHON")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self.environment = kept | {"DHEN_SEARCH_CACHE": str(cache), "PYTHONPATH": str(self.directory)}
        place = Path(self._run("import search; print(search.__file__)").strip())
        if self.directory not in place.parents:
            raise SystemExit(f"{directory} has no code of its own: `search` would come from {place.parent}")

    def _run(self, code: str, *words: str) -> str:
        run = [sys.executable, "-c", code, *words]
        done = subprocess.run(run, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(
                f"{self.directory}: {' '.join(words)} ended with {done.returncode}:\n{done.stderr}"
            )
        return done.stdout.replace(str(self.folder), "")

    def said(self, *words: str) -> Any:
        """What a command prints as JSON. Paths in it are relative to the folder."""
        print(f"{self.directory.name}: {' '.join(words)}", file=sys.stderr, flush=True)
        return json.loads(self._run(COMMAND, *words, "--json"))

    def study(self, log: Path, words: tuple[str, ...]) -> Results:
        """Runs a study, and reads what it found: record, leaderboard, and scores of two bundles."""
        out = log.stem
        said = {"run": self.said("run", "--data", str(log), "--out", out, *words)}
        said["status"] = self.said("status", out)
        said["leaderboard"] = self.said("leaderboard", out, "--all")
        self.said("export", out, "--pick", "lowest", "--out", f"{out}-lowest")
        for name, bundle in (("best", f"{out}/best"), ("lowest", f"{out}-lowest")):
            scores = self.folder / f"{out}-{name}.csv"
            self.said("predict", bundle, "--data", str(log), "--out", str(scores))
            said[f"scores of {name}"] = scores.read_text().splitlines()[1 : 1 + ROWS_SCORED]
        return said


def run(directory: Path, folder: Path, logs: list[Path], trials: int, *, renamed: dict[str, str]) -> Results:
    """All that a checkout finds and plans, also kept in a file; that of an earlier comparison is read.

    Args:
        directory: of the checkout, or the folder that an earlier comparison kept for one.
        folder: in which its commands run.
        logs: files, each named as its study is.
        trials: candidates of each study.
        renamed: names of a study's keys, where they are not those of this script.
    """
    if (directory / RESULTS).exists():
        kept: Results = json.loads((directory / RESULTS).read_text())
        return kept
    checkout = Checkout(directory, folder)
    results = Results(
        settings={"words": [*WORDS, f"trials={trials}"], "studies": [*map(list, STUDIES.values())]}
    )
    for log in logs:
        words = [word.partition("=") for word in (*WORDS, f"trials={trials}", *STUDIES[log.stem])]
        renamed_words = tuple(f"{renamed.get(f'words.{key}', key)}={value}" for key, _, value in words)
        results[log.stem] = {"bytes of log": log.stat().st_size} | checkout.study(log, renamed_words)
    (checkout.folder / "model.yaml").write_text(CONFIGURATION)
    clusters = [word for cluster in CLUSTERS for word in ("--cluster", cluster)]
    results["configuration"] = {"plan": checkout.said("plan", "model.yaml", *clusters)}
    (checkout.folder / RESULTS).write_text(json.dumps(results))
    return results


def fields(value: Any, name: str = "", place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Of each value: its field's name, its positions in the lists on the way to it, the value."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from fields(inner, f"{name}.{key}" if name else key, place)
    elif isinstance(value, list) and value:
        for position, inner in enumerate(value):
            yield from fields(inner, name, f"{place}[{position}]")
    else:
        yield name, place, value


def current_name(name: str, renamed: dict[str, str]) -> str:
    """A field's name in the newer checkout."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        begin = ".".join(parts[:count])
        if begin in renamed:
            return ".".join([renamed[begin], *parts[count:]])
    return name


def differences(old: Results, new: Results, renamed: dict[str, str]) -> Iterator[str]:
    """A line for each value that differs: its log, its field, its positions (in `trials` the number of the trial),
    and both values."""
    for log in dict.fromkeys([*old, *new]):
        before = {(current_name(name, renamed), at): value for name, at, value in fields(old.get(log, {}))}
        after = {(name, at): value for name, at, value in fields(new.get(log, {}))}
        for name, at in dict.fromkeys([*before, *after]):
            if any(fnmatchcase(f"{log}/{name}", pattern) for pattern in LEFT_OUT):
                continue
            was, now = (repr(side[name, at]) if (name, at) in side else "missing" for side in (before, after))
            if was != now:
                yield f"{log}: {name} {at}: {was} -> {now}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a checkout, or DIR/old or DIR/new of an earlier --keep DIR")
    parser.add_argument("new", type=Path, help="the same, for the code that should change nothing")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="a new folder, which keeps all that was made"
    )
    parser.add_argument("--logs", nargs="+", choices=STUDIES, default=[*STUDIES])
    parser.add_argument("--trials", type=int, default=8, help="candidates of each study")
    parser.add_argument("--rows", type=int, default=2000, help="rows of each log")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary) / "same"
        folder.mkdir(parents=True)
        logs = [folder.resolve() / f"{name}.csv" for name in arguments.logs]
        for log in logs:
            write_log(log, log.stem, arguments.rows)
        old = run(arguments.old, folder / "old", logs, arguments.trials, renamed={})
        new = run(arguments.new, folder / "new", logs, arguments.trials, renamed=RENAMED)
    lines = list(differences(old, new, RENAMED))
    for line in lines:
        print(line)
    print(f"{len(lines)} differences" if lines else "no difference")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
