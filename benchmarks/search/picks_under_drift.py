"""Whether what a study picks is better than its baseline on test, on logs whose users and items change.

Each seed is a generated log of its own, and a study of it. Beside the lowest NE on validation, which studies once
picked as their best, stand the study's best by validation alone, and its best by earlier periods too (`origins`).
All are compared with the tuned baseline on test, each trained once. What choosing was estimated to have promised
too much stands beside it, in percent of NE.

    python -m benchmarks.search.picks_under_drift --out runs/drift
    python -m benchmarks.search.picks_under_drift --out runs/drift --seeds 3 --origins 0 demo.rows=10000 trials=6

The same command goes on with what is there. Words after the options are settings of the studies.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.shared.machine_and_tables import machine, markdown
from search.read_study import read_study
from trials.records.study_record import StudyRecord, relative_ne_percent
from trials.records.trial_record import TrialRecord

DRIFT = (
    *("demo.rows=24000", "demo.users=1500", "demo.items=400", "demo.own=0.2", "demo.affinity=0.15"),
    "demo.lifetime_days=4",
)
STUDY = ("trials=10", "baseline_trials=2", "averages=3", "training.epochs=2", "parallel=1", "threads=1")


class Picks(NamedTuple):
    """The picks of one study, in percent of the baseline's NE; negative is better."""

    lowest_on_validation: float
    optimism: float
    lowest: float
    """The lowest NE on validation, on test."""
    best: float
    """The best by validation alone, on test."""
    best_of_periods: float | None
    """The best by validation and earlier periods, on test; None if none were asked for."""


def picks(out: Path, seed: int, words: list[str], origins: int) -> Picks:
    """Runs the study of one seed, first on validation alone."""
    directory = out / f"seed{seed}"
    record = _study(directory, seed, words)
    lowest = record.trial(record.front[-1])
    assert record.choice is not None
    return Picks(
        lowest_on_validation=_relative(record, lowest, "validation"),
        optimism=record.choice.optimism_percent,
        lowest=_relative(record, lowest, "test"),
        best=_best_on_test(record),
        best_of_periods=(
            _best_on_test(_study(directory, seed, [*words, f"origins={origins}"])) if origins else None
        ),
    )


def main() -> None:
    """Prints a row for each seed, and how often each pick is better than the baseline."""
    options = _options()
    words = [*DRIFT, *STUDY, *options.settings]
    found = [picks(options.out, seed, words, options.origins) for seed in range(options.seeds)]
    print(f"{machine()}; {' '.join(words)} origins={options.origins}\n")
    heads = ["seed", "lowest, validation", "optimism", "lowest, test", "best, test", "best of periods, test"]
    rows = [[str(seed), *map(_percent, study)] for seed, study in enumerate(found)]
    print(markdown(heads, rows) + "\n")
    named = {
        "the lowest on validation": [study.lowest for study in found],
        "the best by validation": [study.best for study in found],
        f"the best by validation and {options.origins} periods before it": [
            study.best_of_periods for study in found if study.best_of_periods is not None
        ],
    }
    table = [_row(name, relatives) for name, relatives in named.items() if relatives]
    heads = ["picked", "better", "the baseline itself", "worse", "mean", "worst"]
    print(markdown(heads, table))


def _study(directory: Path, seed: int, words: list[str]) -> StudyRecord:
    command = [
        str(Path(sys.executable).parent / "dhen-search"),
        "run",
        "--data",
        "demo",
        "--out",
        str(directory),
    ]
    subprocess.run(
        [*command, f"seed={seed}", f"demo.seed={seed}", *words], check=True, stdout=subprocess.DEVNULL
    )
    return read_study(directory)


def _best_on_test(record: StudyRecord) -> float:
    assert record.best is not None
    return _relative(record, record.trial(record.best), "test")


def _relative(record: StudyRecord, trial: TrialRecord, split: str) -> float:
    metrics = [getattr(each.result, split) for each in (trial, record.trial(record.baseline or 0))]
    return relative_ne_percent(metrics[0].ne, metrics[1].ne)


def _row(name: str, relatives: list[float]) -> list[str]:
    better, worse = sum(value < 0 for value in relatives), sum(value > 0 for value in relatives)
    counts = (better, len(relatives) - better - worse, worse)
    return [name, *map(str, counts), _percent(statistics.mean(relatives)), _percent(max(relatives))]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f} %"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", help="settings of the studies, such as trials=6")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the studies")
    parser.add_argument("--seeds", type=int, default=10, help="number of logs and studies (default 10)")
    parser.add_argument(
        "--origins", type=int, default=2, help="earlier periods; 0 leaves them out (default 2)"
    )
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
