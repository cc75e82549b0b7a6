"""What a study's best and its baseline gain from learning from the rows of validation too.

Trains both from several seeds, other than the study's, on the training rows with validation to say when to stop,
and on the rows of training and validation together for as many passes (`refit=yes`), and scores all on test.
Differences are paired by seed; their intervals are over seeds and blocks of rows. The study must be finished; what
is trained is kept in its run directory, and the same command goes on.

    python -m benchmarks.training.refit_gain runs/mine [more run directories] [--seeds 5]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks.shared.machine_and_tables import machine, markdown
from dashboards.names import trial_name
from search.analysis.confirm import SEEDS, BlockLosses, BySeed, JobOf, by_seed, fresh_seeds, wanted_from
from search.analysis.losses import blocks_of
from search.analysis.statistics import paired_bootstrap
from search.execution.retraining import SPLIT
from search.execution.trainer import refit_job, trained_job
from search.study.run_session import FinishedStudy, finished_study
from trials.records.trial_record import TrialRecord


def gains(study: FinishedStudy, seeds: range) -> list[list[str]]:
    """Rows of the table: the baseline and the best, as they are and with validation."""
    record, log = study.record, study.log
    losses = BlockLosses(log, blocks_of(log, log.split(SPLIT)), study.retrainings)
    rows = []
    for number in dict.fromkeys((record.baseline, record.best)):
        assert number is not None
        trial = record.trial(number)
        before, after = (
            _trained(study, record.networks(trial), seeds, job_of) for job_of in (trained_job, refit_job)
        )
        found = paired_bootstrap(losses(after, seeds), losses(before, seeds))
        low, high = found.interval()
        rows.append(
            [
                f"{record.log.name}, {sum(record.log.rows.values()):,} rows",
                ("baseline, " if number == record.baseline else "best, ") + trial_name(trial),
                f"{losses.ne(before, seeds):.5f}",
                f"{losses.ne(after, seeds):.5f}",
                f"{found.percent:+.2f} % ({low:+.2f} to {high:+.2f})",
            ]
        )
    return rows


def _trained(study: FinishedStudy, networks: tuple[TrialRecord, ...], seeds: range, job_of: JobOf) -> BySeed:
    """Networks trained and scored on test, by seed."""
    wanted = wanted_from(networks, study.record, study.log, seeds, job_of)
    done = study.retrainings.run(wanted, score=SPLIT)
    return by_seed(networks, study.record, study.log, seeds, done, job_of)


def main() -> None:
    """Prints a row for the baseline and the best of each study."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    rows = []
    for directory in options.directories:
        with finished_study(directory, Console(stderr=True)) as study:
            rows += gains(study, fresh_seeds(study.record.seed, options.seeds))
    print(f"{machine()}, {options.seeds} seeds\n")
    header = ["log", "network", "NE on test", "with validation", "difference, 95 % interval"]
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
