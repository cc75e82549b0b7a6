r"""Samplers compared on what their studies really trained: the NE-FLOPs front after so many candidates.

    for sampler in random tpe ranker; do for seed in 1 2; do
        dhen-search run --data log.csv --out live/$sampler-$seed sampler=$sampler seed=$seed trials=40 \
            grow=no
    done; done
    python -m benchmarks.search.samplers_live live/*

The studies are of one space and log. The area is taken between NE on validation and log10 FLOPs, up to the most
FLOPs and the third quartile of NE of all their candidates. Candidates count in the order in which they began, also
those that were stopped. Start points and the baseline are the same for all samplers.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.search.candidate_table import check_alike
from benchmarks.search.stopping_replayed import corners, final, reference
from benchmarks.shared.machine_and_tables import machine, markdown, spread
from search.read_study import read_study
from search.samplers.ranker.propose import hypervolume
from search.selection import eligible
from trials.records.study_record import StudyRecord
from trials.records.trial_record import TrialRecord


def in_order(record: StudyRecord) -> list[TrialRecord]:
    """Candidates by when they began; what was never trained, or another's result, takes no place."""
    ended = [trial for trial in record.candidates if trial.origin.started_at and not trial.shared]
    return sorted(ended, key=lambda trial: (trial.origin.started_at or "", trial.number))


def report(records: Sequence[StudyRecord], marks: Sequence[int]) -> None:
    """By sampler: area, best NE, examples and seconds of training."""
    corner = reference(eligible(trial for record in records for trial in record.candidates))
    by_sampler: dict[str, list[list[TrialRecord]]] = defaultdict(list)
    for record in records:
        by_sampler[record.sampler].append(in_order(record))
    rows = []
    for sampler, studies in sorted(by_sampler.items()):
        ended = [[eligible(each[:mark]) for each in studies] for mark in marks]
        areas = [[1e3 * hypervolume(corners(each), corner) for each in found] for found in ended]
        best = [[min(map(final, each)) for each in found] for found in ended]
        seconds = [sum(trial.result.seconds or 0.0 for trial in each) for each in studies]
        rows.append(
            [
                sampler,
                len(studies),
                *(spread(each, 2) for each in areas),
                *(spread(each) for each in best),
                f"{statistics.mean(seconds):,.0f}",
            ]
        )
    header = ["sampler", "studies", *(f"area x 1e3, {mark}" for mark in marks)]
    header += [*(f"best NE, {mark}" for mark in marks), "seconds of training"]
    print(f"area up to log10 FLOPs, NE = {corner[0]:.3f}, {corner[1]:.5f}\n")
    print(markdown(header, rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--marks", nargs="+", type=int, default=[20, 40])
    options = parser.parse_args()
    print(machine())
    check_alike(options.directories)
    report([read_study(directory) for directory in options.directories], options.marks)


if __name__ == "__main__":
    main()
