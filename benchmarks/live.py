"""Samplers compared on what their studies really trained: the NE-FLOPs front after so many candidates.

    for sampler in random tpe ranker; do for seed in 1 2; do
        dhen-search run --data log.csv --out live/$sampler-$seed sampler=$sampler seed=$seed trials=40
    done; done
    python benchmarks/live.py live/*

The studies are of one space and log. The area is taken between NE on validation and log10 FLOPs, up to the most
FLOPs and the third quartile of NE of all their candidates. Candidates count in the order in which they began, also
those that were stopped. Start points and the baseline are the same for all samplers.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from common import machine, markdown
from samplers import spread

from search.config import written_config
from search.directory import read_record
from search.ranking.gain import hypervolume
from spaces.load import load_space
from trials.record import Outcome, StudyRecord, TrialRecord

Corner = tuple[float, float]
"""log10 FLOPs and NE."""


def read(directories: Sequence[Path]) -> list[StudyRecord]:
    """The studies; those of another space or log are an error."""
    records = [read_record(directory) for directory in directories]
    heads = [
        (load_space(written_config(directory).space).config, record.log)
        for directory, record in zip(directories, records, strict=True)
    ]
    for directory, head in zip(directories, heads, strict=True):
        if head != heads[0]:
            raise SystemExit(f"{directory} searched another space or log than {directories[0]}")
    return records


def in_order(record: StudyRecord) -> list[TrialRecord]:
    """Candidates by when they began; what was never trained, or another's result, takes no place."""
    ended = [trial for trial in record.candidates if trial.started_at and not trial.shared]
    return sorted(ended, key=lambda trial: (trial.started_at or "", trial.number))


def corner(trial: TrialRecord) -> Corner | None:
    """None where its training did not come to its end."""
    if trial.outcome is not Outcome.COMPLETED or trial.validation is None or math.isnan(trial.validation.ne):
        return None
    return math.log10(trial.flops or 1.0), trial.validation.ne


def corners(trials: Sequence[TrialRecord]) -> list[Corner]:
    return [found for trial in trials if (found := corner(trial)) is not None]


def report(records: Sequence[StudyRecord], marks: Sequence[int]) -> None:
    """By sampler: area, best NE, examples and seconds of training."""
    everything = [found for record in records for found in corners(record.candidates)]
    quartiles = statistics.quantiles((ne for _, ne in everything), n=4)
    reference = max(flops for flops, _ in everything), quartiles[2]
    by_sampler: dict[str, list[list[TrialRecord]]] = defaultdict(list)
    for record in records:
        by_sampler[record.sampler].append(in_order(record))
    rows = []
    for sampler, studies in sorted(by_sampler.items()):
        areas = [[1e3 * hypervolume(corners(each[:mark]), reference) for each in studies] for mark in marks]
        best = [[min(ne for _, ne in corners(each[:mark])) for each in studies] for mark in marks]
        seconds = [sum(trial.seconds or 0.0 for trial in each) for each in studies]
        rows.append(
            [
                sampler,
                len(studies),
                *(spread(each, 2) for each in areas),
                *(spread(each, 5) for each in best),
                f"{statistics.mean(seconds):,.0f}",
            ]
        )
    header = ["sampler", "studies", *(f"area x 1e3, {mark}" for mark in marks)]
    header += [*(f"best NE, {mark}" for mark in marks), "seconds of training"]
    print(f"area up to log10 FLOPs, NE = {reference[0]:.3f}, {reference[1]:.5f}\n")
    print(markdown(header, rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--marks", nargs="+", type=int, default=[20, 40])
    options = parser.parse_args()
    print(machine())
    report(read(options.directories), options.marks)


if __name__ == "__main__":
    main()
