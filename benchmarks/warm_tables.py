"""Does `tables_from=baseline` change which candidate looks best? Random ones, trained with warm tables and
without.

    python benchmarks/warm_tables.py --out runs/warm-tables demo.rows=40000
    python benchmarks/warm_tables.py --out runs/mine --data log.csv --candidates 30 space=wide

The baseline is tuned as in a study. Each candidate is trained three times: from fresh tables with two seeds,
and from the baseline's tables with the first of these. Kendall's tau-b between the ranking with warm tables
and the one with fresh tables of the other seed is set against tau between the two seeds, so that both carry
the noise of two trainings; intervals are of a bootstrap over candidates. Then what warm tables are worth in
NE, by embedding dimension and interaction module: what is worth more in one design than in others favours it.
Finished trainings are kept in --out, and the same command goes on; results.jsonl there has a line for each
candidate. Other words are a study's keys.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, markdown
from scipy.stats import kendalltau

from dashboards.names import short_name
from search.analysis.reproduce.trainings import Trainings, measured_precision
from search.config import StudyConfig, read_study_config
from search.dataset import open_log
from search.execution.trainer import Trainer, candidate_training, new_record
from search.study.baseline import read_baseline
from spaces.catalog_loader import load_space, random_point
from spaces.space import Candidate
from trials.data.cache import PreparedLog
from trials.events import WEIGHTS
from trials.job import Job
from trials.processes.launcher import Launcher
from trials.record import Outcome, TrialKind, TrialRecord

RESAMPLES = 4000
FRESH, OTHER, WARM = "fresh", "other seed", "warm"


@dataclass(frozen=True)
class Row:
    """One candidate's three trainings."""

    name: str
    embedding_dim: int
    modules: frozenset[str]
    flops: float
    records: dict[str, TrialRecord]

    def ne(self, kind: str) -> float:
        """On validation, at the best point of the curve."""
        validation = self.records[kind].validation
        assert validation is not None
        return validation.ne

    @property
    def shift_percent(self) -> float:
        """NE from warm tables relative to fresh ones, of the same seed."""
        return 100.0 * (self.ne(WARM) / self.ne(FRESH) - 1.0)

    def examples_to(self, kind: str, ne: float) -> int | None:
        """Trained until validation NE was no higher."""
        points = self.records[kind].curve
        return next((point.examples for point in points if point.validation.ne <= ne), None)

    def line(self) -> dict[str, Any]:
        """As a line of results.jsonl."""
        curves = {
            kind: [[point.examples, point.validation.ne] for point in record.curve]
            for kind, record in self.records.items()
        }
        about = {"name": self.name, "embedding_dim": self.embedding_dim, "modules": sorted(self.modules)}
        return about | {"flops": self.flops, "ne": {kind: self.ne(kind) for kind in curves}, "curves": curves}


class Watch:
    """Says which training has ended."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.done = wanted, 0

    def ended(self, record: TrialRecord) -> None:
        self.done += 1
        ne = record.validation.ne if record.validation else math.nan
        tables = "warm" if record.tables_from else "fresh"
        said = f"{self.done}/{self.wanted} {short_name(record.model)}, {tables} tables: NE {ne:.5f}"
        print(said, file=sys.stderr, flush=True)

    def progress(self, examples: int) -> None:
        del examples


class Trials:
    """Jobs of one study's config on one log."""

    def __init__(self, config: StudyConfig, log: PreparedLog, trainer: Trainer) -> None:
        self.config, self.log, self.trainer = config, log, trainer

    def baseline(self) -> tuple[Job, Path]:
        """The best of its tuning, and its weights; what is done is not done again."""
        found = []
        for index in range(self.config.baseline_trials):
            _, model, training = read_baseline(self.config, self.log.features).variant(
                index, self.config.seed
            )
            job = self.trainer.job(model, training, self.config.seed)
            known = self.trainer.folder(index) / "record.json"
            if not known.exists():
                record = new_record(index, TrialKind.BASELINE, {}, job)
                record = self.trainer.train(record, job, lambda _record, _progress: None)
                known.write_text(record.model_dump_json())
            record = TrialRecord.model_validate_json(known.read_text())
            if record.outcome is Outcome.COMPLETED and record.validation is not None:
                found.append((record.validation.ne, index, job))
        ne, index, job = min(found, key=lambda each: each[:2])
        print(f"baseline: {short_name(job.model.to_dict())}, NE {ne:.5f}", file=sys.stderr, flush=True)
        return job, self.trainer.folder(index) / WEIGHTS

    def jobs(self, candidate: Candidate, tables_from: str) -> dict[str, Job]:
        """From fresh tables with two seeds, and from warm ones."""
        training, seed = candidate_training(self.config.training, candidate), self.config.seed
        fresh, other = (self.trainer.job(candidate.model, training, each) for each in (seed, seed + 1))
        return {FRESH: fresh, OTHER: other, WARM: fresh.model_copy(update={"tables_from": tables_from})}


def candidates(config: StudyConfig, log: PreparedLog, count: int) -> list[Candidate]:
    """Random ones of the space, the same for the same seed."""
    space, rng = load_space(config.space, log.features), random.Random(config.seed)
    return [space.decode(random_point(space, rng)) for _ in range(count)]


def measure(config: StudyConfig, out: Path, count: int) -> list[Row]:
    """All trainings; rows of the candidates of which all three completed."""
    out.mkdir(parents=True, exist_ok=True)
    log = open_log(config)
    trainer = Trainer(Launcher(), log, out, threads=config.threads, precision=measured_precision(out))
    trials = Trials(config, log, trainer)
    baseline, weights = trials.baseline()
    trainer.weights[baseline.fingerprint] = weights
    drawn = candidates(config, log, count)
    wanted = [trials.jobs(candidate, baseline.fingerprint) for candidate in drawn]
    every = [job for jobs in wanted for job in jobs.values()]
    trainings = Trainings(trainer, out, parallel=config.parallel or 1)
    trainings.run(every, Watch(len(every) - len(trainings.finished(every))))
    done = trainings.finished(every)
    rows = [
        row(each, {kind: done[job.fingerprint] for kind, job in jobs.items()})
        for each, jobs in zip(drawn, wanted, strict=True)
    ]
    return [each for each in rows if all(r.outcome is Outcome.COMPLETED for r in each.records.values())]


def row(candidate: Candidate, records: dict[str, TrialRecord]) -> Row:
    model = candidate.model
    return Row(
        name=short_name(model.to_dict()),
        embedding_dim=model.embedding_dim,
        modules=frozenset(block.kind for layer in model.layers for block in layer.modules),
        flops=records[FRESH].flops or 0.0,
        records=records,
    )


def interval(values: np.ndarray) -> str:
    low, high = np.nanquantile(values, [0.025, 0.975])
    return f"{low:.2f} to {high:.2f}"


def taus(rows: Sequence[Row]) -> list[list[str]]:
    """Kendall's tau-b of pairs of rankings, and the first less each."""
    ne_KN = {kind: np.array([each.ne(kind) for each in rows]) for kind in (FRESH, OTHER, WARM)}
    rng = np.random.default_rng(0)
    drawn_RN = rng.integers(len(rows), size=(RESAMPLES, len(rows)))

    def resampled(a: str, b: str) -> np.ndarray:
        return np.array([kendalltau(ne_KN[a][drawn], ne_KN[b][drawn]).statistic for drawn in drawn_RN])

    reference_R = resampled(FRESH, OTHER)
    reference = kendalltau(ne_KN[FRESH], ne_KN[OTHER]).statistic
    table = []
    for a, b, words in (
        (FRESH, OTHER, "fresh, and fresh of another seed"),
        (WARM, OTHER, "warm, and fresh of another seed"),
        (WARM, FRESH, "warm, and fresh of the same seed"),
    ):
        tau, tau_R = kendalltau(ne_KN[a], ne_KN[b]).statistic, resampled(a, b)
        less = "" if (a, b) == (FRESH, OTHER) else f"{tau - reference:+.2f} ({interval(tau_R - reference_R)})"
        table.append([words, f"{tau:.2f} ({interval(tau_R)})", less])
    return table


def group(rows: Sequence[Row], holds: Callable[[Row], bool]) -> list[str]:
    """Shift of those for which it holds, and how far it is from that of the others."""
    inside = [each.shift_percent for each in rows if holds(each)]
    outside = [each.shift_percent for each in rows if not holds(each)]
    cells = [str(len(inside)), f"{statistics.mean(inside):+.2f} %" if inside else ""]
    if min(len(inside), len(outside)) < 2:
        return [*cells, ""]
    apart = statistics.mean(inside) - statistics.mean(outside)
    error = math.hypot(*(statistics.stdev(part) / math.sqrt(len(part)) for part in (inside, outside)))
    return [*cells, f"{apart:+.2f} ± {error:.2f}"]


def groups(rows: Sequence[Row]) -> list[list[str]]:
    dims = sorted({each.embedding_dim for each in rows})
    kinds = sorted(set().union(*(each.modules for each in rows)))
    table = [["all", *group(rows, lambda _: True)]]
    table += [
        [f"embedding_dim {dim}", *group(rows, lambda each, d=dim: each.embedding_dim == d)] for dim in dims
    ]
    return table + [[kind, *group(rows, lambda each, k=kind: k in each.modules)] for kind in kinds]


def speed(rows: Iterable[Row]) -> str:
    """Examples until the NE that fresh tables reach at best, and in all."""
    counts: dict[str, list[float]] = defaultdict(list)
    never = 0
    for each in rows:
        goal = each.ne(FRESH)
        fresh, warm = each.examples_to(FRESH, goal), each.examples_to(WARM, goal)
        trained = {kind: each.records[kind].curve[-1].examples for kind in (FRESH, WARM)}
        counts["all"].append(trained[WARM] / trained[FRESH])
        if warm is None or fresh is None:
            never += 1
        else:
            counts["goal"].append(warm / fresh)
    goal = f"{statistics.median(counts['goal']):.2f} of the examples" if counts["goal"] else "never"
    return (
        f"The best NE from fresh tables is reached from warm ones after {goal} (median), by {never} not at all; "
        f"trainings take {statistics.mean(counts['all']):.2f} of the examples (mean)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--data", action="append")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--candidates", type=int, default=20)
    options = parser.parse_intermixed_args()
    config = read_study_config(None, options.words, data=options.data)
    rows = measure(config, options.out, options.candidates)
    lines = "".join(json.dumps(each.line()) + "\n" for each in rows)
    (options.out / "results.jsonl").write_text(lines)
    print(f"{machine()}; {len(rows)} candidates of space {config.space}\n")
    print(markdown(["rankings", "tau-b (95 %)", "less the first"], taus(rows)))
    print(
        f"\n{markdown(['candidates with', 'count', 'NE shift', 'less the others'], groups(rows))}\n\n{speed(rows)}"
    )


if __name__ == "__main__":
    main()
