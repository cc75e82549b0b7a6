"""Samplers compared: the NE-FLOPs front after so many trials, and after so many seconds of training.

    python -m benchmarks.search.samplers_on_surrogate --synthetic --repeats 10
        a made-up function
    python -m benchmarks.search.samplers_on_surrogate table.json --out found.jsonl
        a surrogate of really trained candidates
    python -m benchmarks.search.samplers_on_surrogate table.json --samplers random tpe tpe+curve
        without and with a stopping rule
    python -m benchmarks.search.samplers_on_surrogate table.json --fits 0.5
        half of the space does not fit in memory

What a sampler is told carries the noise of a training; what it found is counted by the noise-free NE of the
candidates on the front that it saw. The hypervolume is taken between NE and log10 FLOPs up to a fixed corner.
Where candidates are stopped, their curves are those of the table's most similar one, moved to their NE.
Repeats of equal number have the same noise, so samplers are compared in pairs. Each finished repeat is a line of
--out; the same command goes on from there, and `--repeats 0` prints what there is.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
import warnings
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.shared.machine_and_tables import machine, markdown, spread
from benchmarks.shared.surrogate import Answers, Surrogate, Synthetic, metrics
from dhen.cost import dense_parameters
from dhen.model import model_cost
from search.samplers import SAMPLERS
from search.samplers.ask_tell import Proposals
from search.samplers.context import CandidatePricer, PricedCandidate
from search.samplers.ranker.propose import hypervolume
from search.samplers.stopping import NONE, RULES, first_stop
from spaces.space import Candidate
from trials.records.trial_record import Origin, Outcome, TrialKind, TrialRecord

POINTS_FOR_LIMIT = 400
MARKS = (50, 100, 200)
AGAINST = "random"


@dataclass(frozen=True)
class Variant:
    """A sampler, with a stopping rule or without."""

    sampler: str
    stopping: str

    @staticmethod
    def read(text: str) -> Variant:
        """From `tpe` or `tpe+curve`."""
        sampler, _, stopping = text.partition("+")
        if sampler not in SAMPLERS or (stopping and stopping not in RULES):
            raise argparse.ArgumentTypeError(f"{text!r}: SAMPLER[+RULE], such as tpe+curve")
        return Variant(sampler, stopping or NONE)


@dataclass(frozen=True)
class Setting:
    """What is answered, alike for all samplers."""

    table: str | None
    surrogate: str
    noise: float | None
    fits: float
    trials: int
    side_by_side: int


@cache
def answers_of(setting: Setting) -> Answers:
    if setting.table is None:
        return Synthetic()
    return Surrogate(Path(setting.table), setting.surrogate, setting.noise)


@cache
def limit(setting: Setting) -> float:
    """Dense parameters up to which the wanted share of random candidates fits."""
    if setting.fits >= 1:
        return math.inf
    answers, rng = answers_of(setting), random.Random(0)
    pricer = CandidatePricer(answers.space, answers.features, lambda _: True)
    drawn = (pricer.price(answers.space.random_point(rng)) for _ in range(POINTS_FOR_LIMIT))
    sizes = sorted(each.parameters for each in drawn if each is not None)
    return float(sizes[round(setting.fits * len(sizes)) - 1])


class Run:
    """One variant, one repeat."""

    def __init__(self, setting: Setting, variant: Variant, repeat: int) -> None:
        self.answers, self.limit = answers_of(setting), limit(setting)
        self.pricer = CandidatePricer(self.answers.space, self.answers.features, self._fits)
        self.proposals = Proposals(
            sampler=variant.sampler,
            seed=repeat,
            pricer=self.pricer,
        )
        self.rule = RULES.get(variant.stopping)
        self.noise = random.Random(f"noise {repeat}")
        self.setting = setting
        self.records: dict[int, TrialRecord] = {}
        self.front: list[tuple[float, float, float]] = []
        """log10 FLOPs, NE as measured, NE as expected."""
        self.trace: dict[str, list[float]] = {"hypervolume": [], "ne": [], "seconds": []}
        """The values after each candidate."""
        self.asking = 0.0

    def all(self) -> dict[str, Any]:
        """Everything, candidate by candidate, and the seconds an ask took."""
        waiting: deque[TrialRecord] = deque()
        while (record := self._next()) is not None or waiting:
            if record is not None:
                self.records[record.number] = record
                waiting.append(record)
            while waiting and (record is None or len(waiting) >= self.setting.side_by_side):
                self._end(waiting.popleft())
        return {"trace": self.trace, "ask_seconds": self.asking / self.setting.trials}

    def _next(self) -> TrialRecord | None:
        """A new candidate; None once there are as many as wanted."""
        number = len(self.records)
        if number == self.setting.trials:
            return None
        began = time.process_time()
        point, notes = self.proposals.ask(number, {}, self.answers.space.left_for_tuning)
        self.asking += time.process_time() - began
        return TrialRecord(
            number=number, kind=TrialKind.CANDIDATE, point=point, origin=Origin(sampler_notes=notes)
        )

    def _end(self, record: TrialRecord) -> None:
        priced, seconds, fits = self.pricer.price(record.point), 0.0, False
        if priced is not None:
            excess = priced.parameters / self.limit - 1.0
            record = record.with_job(fingerprint=priced.fingerprint, flops=priced.flops)
            record, fits = record.with_plan(memory_excess=excess), excess <= 0
        if not fits:
            record = record.with_result(outcome=Outcome.INFEASIBLE)
        elif priced is not None:
            record, seconds = self._trained(record, priced)
        self.records[record.number] = record
        self.proposals.tell(record)
        self._trace(seconds)

    def _trained(self, record: TrialRecord, priced: PricedCandidate) -> tuple[TrialRecord, float]:
        """The candidate with its result, and the seconds that it took; at its last evaluation a training has
        ended."""
        ne, seconds = self.answers.measured(priced, self.noise), self.answers.seconds(priced)
        curve = self.answers.curve(priced, ne)
        training = record.with_result(outcome=Outcome.RUNNING, curve=curve[:-1])
        others = list(self.records.values())
        stopped = first_stop(self.rule, training, 0, others) if self.rule is not None else None
        if stopped is not None:
            return stopped, seconds * stopped.result.curve[-1].examples / curve[-1].examples
        self.front.append((math.log10(priced.flops), ne, self.answers.ne(priced)))
        return record.with_result(outcome=Outcome.COMPLETED, validation=metrics(ne), curve=curve), seconds

    def _fits(self, candidate: Candidate) -> bool:
        return dense_parameters(model_cost(candidate.model, self.answers.features)) <= self.limit

    def _trace(self, seconds: float) -> None:
        front: list[tuple[float, float, float]] = []
        for each in sorted(self.front):
            if not front or each[1] < front[-1][1]:
                front.append(each)
        self.front = front
        found = [(log_flops, expected) for log_flops, _measured, expected in front]
        before = self.trace["seconds"][-1] if self.trace["seconds"] else 0.0
        self.trace["hypervolume"].append(1e3 * hypervolume(found, self.answers.reference))
        self.trace["ne"].append(front[-1][2] if front else 1.0)
        self.trace["seconds"].append(before + seconds)


def one(setting: Setting, name: str, repeat: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {"sampler": name, "repeat": repeat, **Run(setting, Variant.read(name), repeat).all()}


def finished(path: Path | None, setting: Setting) -> list[dict[str, Any]]:
    """The lines of an earlier call with this setting."""
    if path is None or not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line.pop("setting") == vars(setting)]


def as_they_end(
    setting: Setting, wanted: Sequence[tuple[str, int]], processes: int
) -> Iterator[dict[str, Any]]:
    """One repeat after the other here, or in fresh processes: forks wait for threads of the trees."""
    if processes == 1:
        yield from (one(setting, *each) for each in wanted)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(one, setting, *each) for each in wanted]):
            yield future.result()


def measure(
    setting: Setting, samplers: Sequence[str], repeats: int, processes: int, out: Path | None
) -> list[dict[str, Any]]:
    """All repeats, those of an earlier call included."""
    found = finished(out, setting)
    known = {(line["sampler"], line["repeat"]) for line in found}
    wanted = [(name, repeat) for repeat in range(repeats) for name in samplers if (name, repeat) not in known]
    for done, line in enumerate(as_they_end(setting, wanted, processes), 1):
        found.append(line)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(line | {"setting": vars(setting)}) + "\n")
        name, last = line["sampler"], line["trace"]["hypervolume"][-1]
        print(f"{done}/{len(wanted)} {name} {line['repeat']}: {last:.2f}", file=sys.stderr, flush=True)
    return [line for line in found if line["sampler"] in samplers]


def report(found: list[dict[str, Any]], setting: Setting) -> None:
    """Means and spreads, differences in pairs, and how soon each is where random search is later."""
    by_sampler: dict[str, dict[int, dict[str, Any]]] = {}
    for line in found:
        by_sampler.setdefault(line["sampler"], {})[line["repeat"]] = line
    marks = [mark for mark in MARKS if mark <= setting.trials] or [setting.trials]
    for key, title, digits in (("hypervolume", "hypervolume x 1e3", 2), ("ne", "NE of the best", 5)):
        print(f"\n{title}: mean ± standard deviation over {len(by_sampler[found[0]['sampler']])} repeats\n")
        header = ["sampler", *(f"{mark} trials" for mark in marks)]
        header += [f"less {AGAINST}, {mark}" for mark in marks] + ["less tpe, last"]
        rows = []
        for name, lines in sorted(by_sampler.items()):
            cells = [spread([at(line, key, mark) for line in lines.values()], digits) for mark in marks]
            cells += [paired(lines, by_sampler.get(AGAINST, {}), key, mark, digits) for mark in marks]
            cells += [paired(lines, by_sampler.get("tpe", {}), key, marks[-1], digits)]
            rows.append([name, *cells])
        print(markdown(header, rows))
    ahead = [
        f"{mark}: {max(by_sampler, key=lambda s: mean_at(by_sampler[s], 'hypervolume', mark))}"
        for mark in marks
    ]
    print(f"\nahead in hypervolume at {', '.join(ahead)}")
    print_at_equal_seconds(by_sampler, marks)
    print_speed(by_sampler, 100 if setting.trials >= 100 else setting.trials)


def print_at_equal_seconds(by_sampler: dict[str, dict[int, dict[str, Any]]], marks: Sequence[int]) -> None:
    """Hypervolume after the seconds of training that random search needs for so many trials."""
    if AGAINST not in by_sampler:
        return
    budgets = [mean_at(by_sampler[AGAINST], "seconds", mark) for mark in marks]
    rows = []
    for name, lines in sorted(by_sampler.items()):
        found = [[after(line, seconds) for line in lines.values()] for seconds in budgets]
        rows.append([name, *("-" if None in each else spread(each, 2) for each in found)])  # type: ignore[arg-type]
    print("\nhypervolume x 1e3 after so many seconds of training (-: 200 trials take less)\n")
    print(markdown(["sampler", *(f"{seconds:,.0f} s" for seconds in budgets)], rows))


def after(line: dict[str, Any], seconds: float) -> float | None:
    """The hypervolume when so many seconds are over; None if the trials took less."""
    trials = bisect_right(line["trace"]["seconds"], seconds)
    if trials == len(line["trace"]["seconds"]) and line["trace"]["seconds"][-1] < 0.98 * seconds:
        return None
    return at(line, "hypervolume", trials) if trials else 0.0


def print_speed(by_sampler: dict[str, dict[int, dict[str, Any]]], mark: int) -> None:
    """Trials and seconds to what random search has on average after `mark` trials."""
    if AGAINST not in by_sampler:
        return
    goal = {key: mean_at(by_sampler[AGAINST], key, mark) for key in ("hypervolume", "ne")}
    took = mean_at(by_sampler[AGAINST], "seconds", mark)
    rows = []
    for name, lines in sorted(by_sampler.items()):
        row: list[object] = [
            name,
            f"{1e3 * statistics.mean(line['ask_seconds'] for line in lines.values()):.0f}",
        ]
        for key, sign in (("hypervolume", 1.0), ("ne", -1.0)):
            trial = first_trial(lines, key, goal[key], sign)
            seconds = mean_at(lines, "seconds", trial) if trial else None
            row += [f"{mark / trial:.1f}x" if trial else "-", f"{took / seconds:.1f}x" if seconds else "-"]
        rows.append(row)
    print(
        f"\nas good as {AGAINST} search after {mark} trials ({took:,.0f} s of training), so many times sooner\n"
    )
    header = [
        "sampler",
        "ms an ask",
        "trials, hypervolume",
        "seconds, hypervolume",
        "trials, NE",
        "seconds, NE",
    ]
    print(markdown(header, rows))


def first_trial(lines: dict[int, dict[str, Any]], key: str, goal: float, sign: float) -> int | None:
    """The first number of trials at which the mean over the repeats is no worse than the goal."""
    trials = len(next(iter(lines.values()))["trace"][key])
    return next((t for t in range(1, trials + 1) if sign * (mean_at(lines, key, t) - goal) >= 0), None)


def at(line: dict[str, Any], key: str, trials: int) -> float:
    return float(line["trace"][key][trials - 1])


def mean_at(lines: dict[int, dict[str, Any]], key: str, trials: int) -> float:
    return statistics.mean(at(line, key, trials) for line in lines.values())


def paired(
    lines: dict[int, dict[str, Any]], others: dict[int, dict[str, Any]], key: str, mark: int, digits: int
) -> str:
    """Mean difference and its standard error, over the repeats that both have."""
    both = sorted(set(lines) & set(others))
    if lines is others or len(both) < 2:
        return ""
    differences = [at(lines[repeat], key, mark) - at(others[repeat], key, mark) for repeat in both]
    error = statistics.stdev(differences) / math.sqrt(len(both))
    return f"{statistics.mean(differences):+.{digits}f} ± {error:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", help="what benchmarks/search/candidate_table.py wrote")
    parser.add_argument("--synthetic", action="store_true", help="a made-up function in place of a table")
    parser.add_argument("--surrogate", choices=("trees", "gp"), default="trees")
    parser.add_argument("--noise", type=float, help="standard deviation of NE between two trainings")
    parser.add_argument("--samplers", nargs="+", default=sorted(SAMPLERS), metavar="SAMPLER[+RULE]")
    parser.add_argument("--trials", type=int, default=max(MARKS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--fits", type=float, default=1.0, help="share of random candidates that fit in memory"
    )
    parser.add_argument("--side-by-side", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if (options.table is None) != options.synthetic:
        parser.error("give a table, or --synthetic")
    setting = Setting(
        options.table, options.surrogate, options.noise, options.fits, options.trials, options.side_by_side
    )
    answers = answers_of(setting)
    stops = [name for name in options.samplers if Variant.read(name).stopping != NONE]
    if stops and options.synthetic:
        parser.error(f"{', '.join(stops)}: the made-up function has no curves; give a table")
    print(machine())
    print(f"{setting}; area up to log10 FLOPs, NE = {answers.reference}")
    if isinstance(answers, Surrogate):
        print(f"surrogate, cross-validated: {answers.check}; noise added: {answers.noise:.5f}")
    found = measure(setting, options.samplers, options.repeats, options.processes, options.out)
    if found:
        report(found, setting)


if __name__ == "__main__":
    main()
