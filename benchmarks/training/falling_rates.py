"""What networks of a study gain where learning rates fall to zero over several passes, beside constant rates.

Retrains the study's baseline and some of its candidates, the quickest first, from seeds other than the study's: at
constant rates with as many passes as are found for them, and with falling rates over the numbers of passes that
are named. The best evaluation on validation counts, and NE is of test; differences are paired by network and seed,
with their standard error. The study must be finished and have found that several passes help
(`training.epochs=auto`); what is trained is kept in its run directory, and the same command goes on.

    python -m benchmarks.training.falling_rates runs/mine --passes 2 3 [--networks 4] [--seeds 3]
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

from rich.console import Console

from benchmarks.shared.machine_and_tables import machine, markdown
from dashboards.names import trial_name
from search.analysis.confirm import fresh_seeds
from search.execution.passes import FALLING
from search.execution.retraining import SPLIT, RetrainingRequest
from search.execution.trainer import trained_job
from search.study.run_session import FinishedStudy, finished_study
from trials.records.job import Job
from trials.records.trial_record import Outcome, TrialRecord

PATIENT = 1_000_000
"""Evaluations without a better NE through which falling rates go on to their end."""


def gains(study: FinishedStudy, seeds: range, passes: list[int], networks: int) -> list[list[str]]:
    """Rows of the table: a network each, then the mean of all."""
    record = study.record
    assert record.baseline is not None
    own = [t for t in record.candidates if t.result.outcome is Outcome.COMPLETED and t.job.teacher is None]
    own.sort(key=lambda trial: trial.result.training_seconds)
    trials = [record.trial(record.baseline), *own[: networks - 1]]
    wanted = {
        (trial.number, over, seed): RetrainingRequest(trial, _job(study, trial, over, seed))
        for seed in seeds
        for trial in trials
        for over in (None, *passes)
    }
    done = study.retrainings.run(wanted.values(), score=SPLIT)

    def result(trial: TrialRecord, over: int | None, seed: int) -> tuple[float, float]:
        ended = done[wanted[trial.number, over, seed].job.fingerprint].result
        assert ended.test is not None
        return ended.test.ne, ended.training_seconds

    def cell(over: int, some: list[TrialRecord]) -> str:
        pairs = [(result(trial, over, seed), result(trial, None, seed)) for trial in some for seed in seeds]
        percent = [100.0 * (ours[0] / constant[0] - 1.0) for ours, constant in pairs]
        mean, error = statistics.mean(percent), statistics.stdev(percent) / math.sqrt(len(percent))
        times = statistics.mean(ours[1] / constant[1] for ours, constant in pairs)
        return f"{mean:+.2f} ± {error:.2f} %, {times:.2f}"

    rows = []
    for label, some in [*((trial_name(trial), [trial]) for trial in trials), ("all", trials)]:
        constant = statistics.mean(result(trial, None, seed)[0] for trial in some for seed in seeds)
        rows.append([label, f"{constant:.5f}", *(cell(over, some) for over in passes)])
    return rows


def _job(study: FinishedStudy, trial: TrialRecord, over: int | None, seed: int) -> Job:
    """The job of a network from a seed: with rates that fall over so many passes, or with constant ones."""
    found = study.record.passes
    assert found is not None
    job = trained_job(trial, study.log, seed_shift=seed - study.record.seed)
    if over is None:
        training = job.training.replace(schedule="constant", epochs=found.passes)
    else:
        training = job.training.replace(**FALLING, epochs=over, patience=PATIENT)
    return job.replace(training=training)


def main() -> None:
    """Prints a row for each network: NE on test at constant rates, and for each number of passes what falling
    rates change and the share of seconds that they take."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--passes", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--networks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    with finished_study(options.directory, Console(stderr=True)) as study:
        found = study.record.passes
        if found is None or found.passes == 1:
            raise SystemExit(f"{options.directory}: several passes were not found to help.")
        seeds = fresh_seeds(study.record.seed, options.seeds)
        rows = gains(study, seeds, options.passes, options.networks)
        name = study.record.log.name
    print(f"{machine()}, {name}, {options.seeds} seeds\n")
    heads = [f"falling over {over}, times the seconds" for over in options.passes]
    print(markdown(["network", f"constant, up to {found.passes} passes", *heads], rows))


if __name__ == "__main__":
    main()
