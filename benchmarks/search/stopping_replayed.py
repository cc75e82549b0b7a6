"""Stopping rules replayed on finished curves: what each saves, and what it does to the front.

    python -m benchmarks.search.stopping_replayed table.json
        what benchmarks/search/candidate_table.py wrote
    python -m benchmarks.search.stopping_replayed runs/a runs/b --orders 200
        run directories of one space and log
    python -m benchmarks.search.stopping_replayed table.json --candidates 50
        studies of 50 of them, drawn at random

Candidates come one after the other in random orders, the same for each rule; all were trained to their end, so
it is known what a stopped one would have come to. Seconds are those of training up to the last evaluation counted.
The hypervolume is taken between NE and log10 FLOPs up to the most FLOPs and the third quartile of NE.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.search.candidate_table import read_table, table
from benchmarks.shared.machine_and_tables import machine, markdown, spread
from benchmarks.shared.surrogate import curve_of, metrics
from search.samplers.ranker.propose import hypervolume
from search.samplers.stopping import (
    CONFIDENCE,
    FEWEST,
    NONE,
    RULES,
    Judge,
    first_stop,
    forecast,
    like,
    went_on,
)
from search.selection import pareto_front
from trials.records.trial_record import JobSummary, Outcome, Result, TrialKind, TrialRecord


@dataclass(frozen=True)
class Replay:
    """One rule in one order."""

    examples: float
    """Trained, as a share of those without stopping."""
    seconds: float
    """The same of the seconds of training and evaluation."""
    stopped: float
    """Share of the candidates."""
    same_front: bool
    lost: float
    """Share of the hypervolume."""
    wrongly: int
    """Members of the front without stopping that were stopped."""


def finished(paths: Sequence[Path]) -> list[TrialRecord]:
    """The candidates with a whole curve."""
    rows = table(list(paths))["candidates"] if paths[0].is_dir() else read_table(paths[0])[2]
    whole = [row for row in rows if row["outcome"] == "completed" and row["ne"] is not None and row["curve"]]
    return [record(number, row) for number, row in enumerate(whole)]


def record(number: int, row: dict[str, Any]) -> TrialRecord:
    curve = curve_of((examples, seconds, ne) for examples, seconds, ne in row["curve"])
    return TrialRecord(
        number=number,
        kind=TrialKind.CANDIDATE,
        point=row["point"],
        job=JobSummary(fingerprint=str(number), flops=row["flops"]),
        result=Result(outcome=Outcome.COMPLETED, curve=curve, validation=metrics(row["ne"])),
    )


def replay(rule: Judge | None, order: Sequence[TrialRecord]) -> Replay:
    """A study of these candidates, one at a time; at its last evaluation a training has ended."""
    trials: list[TrialRecord] = []
    for number, whole in enumerate(order):
        trials.append(_trained(rule, whole.replace(number=number), trials))
    found, full = pareto_front(trials), pareto_front(order)
    kept = {trial.job.fingerprint for trial in found}
    stopped = {trial.job.fingerprint for trial in trials if trial.result.outcome is Outcome.STOPPED}
    corner = reference(order)
    return Replay(
        examples=sum(t.result.curve[-1].examples for t in trials)
        / sum(t.result.curve[-1].examples for t in order),
        seconds=sum(t.result.curve[-1].seconds for t in trials)
        / sum(t.result.curve[-1].seconds for t in order),
        stopped=len(stopped) / len(order),
        same_front=kept == {trial.job.fingerprint for trial in full},
        lost=1.0 - hypervolume(corners(found), corner) / hypervolume(corners(full), corner),
        wrongly=len(stopped & {trial.job.fingerprint for trial in full}),
    )


def _trained(rule: Judge | None, whole: TrialRecord, trials: Sequence[TrialRecord]) -> TrialRecord:
    """A candidate as its training ends; at its last evaluation it has ended."""
    training = whole.with_result(outcome=Outcome.RUNNING, curve=whole.result.curve[:-1])
    given_up = first_stop(rule, training, 0, trials) if rule is not None else None
    return given_up or whole


def corners(trials: Sequence[TrialRecord]) -> list[tuple[float, float]]:
    return [(math.log10(trial.job.flops or 1.0), final(trial)) for trial in trials]


def reference(trials: Sequence[TrialRecord]) -> tuple[float, float]:
    quartiles = statistics.quantiles((final(trial) for trial in trials), n=4)
    return max(flops for flops, _ in corners(trials)), quartiles[2]


def final(trial: TrialRecord) -> float:
    assert trial.result.validation is not None
    return trial.result.validation.ne


def below_bound(orders: Sequence[Sequence[TrialRecord]]) -> tuple[int, int]:
    """How often a candidate came to less than its bound at an evaluation, and of how many; nothing is stopped."""
    below = count = 0
    for order in orders:
        for position, candidate in enumerate(order):
            before = list(order[:position])
            for seen in range(1, len(candidate.result.curve)):
                so_far = candidate.with_result(curve=candidate.result.curve[:seen])
                known = went_on(seen, like(so_far, before))
                if len(known) >= FEWEST:
                    below += final(candidate) < forecast(so_far, known).low
                    count += 1
    return below, count


def report(orders: Sequence[Sequence[TrialRecord]]) -> None:
    rows = []
    rules: dict[str, Judge | None] = {NONE: None, **RULES}
    for name, rule in rules.items():
        replays = [replay(rule, order) for order in orders]
        rows.append(
            [
                name,
                spread([100 * each.examples for each in replays], 0, " %"),
                spread([100 * each.seconds for each in replays], 0, " %"),
                spread([100 * each.stopped for each in replays], 0, " %"),
                f"{100 * statistics.mean(each.same_front for each in replays):.0f} %",
                spread([100 * each.lost for each in replays], 2, " %"),
                spread([each.wrongly for each in replays], 2),
            ]
        )
    header = ["stopping", "examples", "seconds", "stopped", "same front", "hypervolume lost"]
    print(markdown([*header, "front members stopped"], rows))
    below, count = below_bound(orders)
    if count:
        print(
            f"\nof {count:,} bounds, held {100 * (1 - below / count):.1f} % (nominal {100 * CONFIDENCE:.0f} %)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="+", type=Path, help="a table, or run directories")
    parser.add_argument("--orders", type=int, default=100)
    parser.add_argument("--candidates", type=int, help="of each order; all where not given")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    trials = finished(options.table)
    if len(trials) <= FEWEST:
        parser.error(f"{len(trials)} finished candidates with a curve; a rule needs more than {FEWEST}")
    rng = random.Random(options.seed)
    count = min(options.candidates or len(trials), len(trials))
    orders = [rng.sample(trials, count) for _ in range(options.orders)]
    print(machine())
    lengths = [len(trial.result.curve) for trial in trials]
    print(
        f"{len(trials)} finished candidates, {min(lengths)} to {max(lengths)} evaluations; {options.orders} "
        f"orders of {count}; mean ± standard deviation over the orders\n"
    )
    report(orders)


if __name__ == "__main__":
    main()
