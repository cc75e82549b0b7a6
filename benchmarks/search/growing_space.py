"""Studies that widen their space beside studies that keep to it, at the same seconds of candidates.

Each seed has a study with `grow=yes` and one with `grow=no`, as a user runs them, one after the other. Of each
pair the one whose candidates took longer is cut where the other one ends, by the sum of seconds that candidates
took, so that wider networks pay for themselves. A front's area is between log FLOPs and NE relative to the
baseline, up to ten times the baseline's FLOPs and 20 % above its NE.

    python -m benchmarks.search.growing_space log.csv space=mine.yaml minutes=20 --out runs/growing
    python -m benchmarks.search.growing_space low-rank trials=36 training.epochs=6 --out runs/low-rank

`low-rank` is a generated log of users and items whose vectors are longer than the embeddings of the space that is
taken with it.

Studies that lie in `--out` are not run again.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shared.generated_log import write_low_rank_log
from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.values import dump_yaml
from search.read_study import read_study
from search.samplers.ranker.propose import hypervolume
from search.selection import eligible
from trials.records.study_record import StudyRecord, relative_ne_percent
from trials.records.trial_record import TrialRecord

LOW_RANK, LOW_RANK_ROWS = "low-rank", 8_000
NARROW = {
    "description": "Shorter embeddings and narrower layers than the low-rank log asks for.",
    "depth": [1, 2],
    "slots": 2,
    "modules": {
        "mlp": {"mlp": [[32], [64]]},
        "dcn_v2": {"layers": [1, 2]},
        "dlrm": {"mlp": [[32], [64]], "rank": 0},
        "linear": {},
    },
    "ensemble": ["concat", "sum"],
    "out_embeddings": [2, 4],
    "raw_numeric": False,
    "norm": ["layer", "none"],
    "model": {"embedding_dim": [2, 4], "head": [[16], [32]], "dropout": [0.0, 0.1]},
    "training": {
        "learning_rate": {"low": 0.001, "high": 0.006, "log": True},
        "embedding_learning_rate": {"low": 0.03, "high": 0.3, "log": True},
    },
}
"""The space that is taken with the low-rank log."""
MOST_TIMES, MOST_PERCENT = 10.0, 20.0
"""Up to where a front's area counts: times the baseline's FLOPs, and NE in percent above the baseline's."""


def study(log: str, out: Path, words: Sequence[str]) -> StudyRecord:
    """The record of a study that is run here, unless it lies there."""
    if not (out / "report.html").exists() or not read_study(out).finished:
        command = [str(Path(sys.executable).parent / "dhen-search"), "run", "--data", log, "--out", str(out)]
        subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)
    return read_study(out)


def within(record: StudyRecord, seconds: float) -> list[TrialRecord]:
    """The candidates that had a result when all candidates together had taken so many seconds."""
    spent, done = 0.0, []
    for trial in record.candidates:
        spent += trial.result.seconds or 0.0
        if spent <= seconds:
            done.append(trial)
    return eligible(done)


def seconds_of(record: StudyRecord) -> float:
    """Seconds that all candidates took."""
    return sum(trial.result.seconds or 0.0 for trial in record.candidates)


def relative_percent(record: StudyRecord, trial: TrialRecord) -> float:
    """NE on validation relative to the baseline's."""
    assert record.baseline is not None
    baseline = record.trial(record.baseline).result.validation
    assert baseline is not None
    assert trial.result.validation is not None
    return relative_ne_percent(trial.result.validation.ne, baseline.ne)


def area(record: StudyRecord, trials: Sequence[TrialRecord]) -> float:
    """The area that the front of these trials covers, in percent times powers of ten."""
    assert record.baseline is not None
    flops = record.trial(record.baseline).job.flops or 1.0
    corners = [
        (math.log10((trial.job.flops or 1.0) / flops), relative_percent(record, trial)) for trial in trials
    ]
    return hypervolume(corners, (math.log10(MOST_TIMES), MOST_PERCENT))


def main() -> None:
    """Prints a row for each seed, and the means."""
    options = _options()
    log, words = options.log, options.words
    if log == LOW_RANK:
        options.out.mkdir(parents=True, exist_ok=True)
        log, space = str(options.out / "low_rank.parquet"), options.out / "narrow.yaml"
        write_low_rank_log(Path(log), LOW_RANK_ROWS)
        space.write_text(dump_yaml(NARROW))
        words = [f"space={space}", "label=label", *words]
    rows: list[list[str]] = []
    numbers: list[list[float]] = []
    for seed in options.seeds:
        pair = {}
        for grow in ("yes", "no"):
            print(f"seed {seed}, grow={grow} ...", file=sys.stderr, flush=True)
            own = [*words, f"seed={seed}", f"grow={grow}"]
            pair[grow] = study(log, options.out / f"{grow}-{seed}", own)
        seconds = min(map(seconds_of, pair.values()))
        done = {grow: within(record, seconds) for grow, record in pair.items()}
        best = {
            grow: min(relative_percent(pair[grow], trial) for trial in trials)
            for grow, trials in done.items()
        }
        areas = {grow: area(pair[grow], trials) for grow, trials in done.items()}
        numbers.append([best["yes"], best["no"], areas["yes"], areas["no"]])
        steps = "; ".join(
            f"{step.axis} {step.before} to {step.end} after {step.completed}" for step in pair["yes"].grown
        )
        rows.append(
            [
                str(seed),
                f"{seconds:.0f}",
                f"{len(done['yes'])}, {len(done['no'])}",
                *_cells(numbers[-1]),
                steps or "none",
            ]
        )
    means = [statistics.mean(column) for column in zip(*numbers, strict=True)]
    rows.append(["mean", "", "", *_cells(means), ""])
    print(f"{machine()}\n{log} {' '.join(words)}\n")
    heads = ["seed", "candidates' seconds", "candidates", "best NE to the baseline: grow=yes", "grow=no"]
    print(markdown([*heads, "area of the front: grow=yes", "grow=no", "widened"], rows))


def _cells(numbers: Sequence[float]) -> list[str]:
    best_yes, best_no, area_yes, area_no = numbers
    return [f"{best_yes:+.2f} %", f"{best_no:+.2f} %", f"{area_yes:.2f}", f"{area_no:.2f}"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", help="a log file, or demo")
    parser.add_argument("words", nargs="*", metavar="key=value", help="of both studies")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True, help="folder of the run directories")
    return parser.parse_args()


if __name__ == "__main__":
    main()
