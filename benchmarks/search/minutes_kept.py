"""How nearly the whole command takes the minutes that it was given, and what they are divided into.

    python -m benchmarks.search.minutes_kept demo --minutes 2 4 8
    python -m benchmarks.search.minutes_kept log.csv space=wide --minutes 10

Wall clock from the command to its end, as a user runs it: reading the log, baseline, search, tuning, averages,
scores, confirmation, report, bundle. Where `search_until=none` is not among the words, a search may end early.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.shared.machine_and_tables import machine, markdown
from search.execution.budget import tuned, untuned
from search.read_study import read_study
from trials.records.study_record import covered_seconds
from trials.records.trial_record import TrialKind

COLUMNS = (
    *("minutes", "asked, s", "taken, s", "off", "baseline, s", "search and tuning, s", "retrainings, s"),
    *("candidates", "of tuning", "averages", "seeds", "best NE"),
)


def measured(command: str, log: str, words: list[str], minutes: float, out: Path) -> list[str]:
    """The row of one study, which is run into a folder that is not there yet."""
    began = time.perf_counter()
    run = [command, "run", "--data", log, "--out", str(out), *words, f"minutes={minutes:g}"]
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
    taken = time.perf_counter() - began
    record = read_study(out)
    best = record.trial(record.best) if record.best is not None else None
    baselines = [trial for trial in record.trials if trial.kind is TrialKind.BASELINE]
    return [
        f"{minutes:g}",
        f"{60 * minutes:.0f}",
        f"{taken:.0f}",
        f"{100 * (taken / (60 * minutes) - 1):+.1f} %",
        f"{covered_seconds(baselines):.0f}",
        f"{covered_seconds(record.candidates):.0f}",
        f"{covered_seconds(record.retrainings):.0f}",
        str(len(untuned(record.candidates))),
        str(len(tuned(record.candidates))),
        str(len(record.averages)),
        str(min((len(comparison.seeds) for comparison in record.comparisons), default=0)),
        f"{best.result.validation.ne:.5f}"
        if best is not None and best.result.validation is not None
        else "-",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log")
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--minutes", nargs="+", type=float, default=[2.0, 4.0, 8.0])
    parser.add_argument("--command", default=str(Path(sys.executable).parent / "dhen-search"))
    arguments = parser.parse_args()
    rows = []
    for minutes in arguments.minutes:
        print(f"{minutes:g} minutes ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "study"
            rows.append(measured(arguments.command, arguments.log, arguments.words, minutes, out))
    print(f"{machine()}; {arguments.log} {' '.join(arguments.words)}\n\n{markdown(COLUMNS, rows)}")


if __name__ == "__main__":
    main()
