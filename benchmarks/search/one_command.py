"""What one command with a time finds on a log, beside an earlier version's defaults and tuned gradient boosting.

A log is cut in file order into rows for training, validation and test: 80, 10 and 10 of 100, or 85 and 15 of the
first file where a second one is the test file. Then, two at a time with one core each: `dhen-search run --data ...
minutes=M` of this version and of --previous, a checkout of an earlier one, with nothing else given; then the
libraries of gradient boosting, each tuned by Optuna's TPE for as many minutes. The bundle of each study scores the
test rows by `dhen-search predict`, as its user would have it; of this version the bundle of the lowest NE on
validation too, which is not always its best (`--pick lowest`). Where this version's winners are trained once more
on validation too, so are the libraries.

    python -m benchmarks.search.one_command log.csv.gz --out runs/mine --minutes 30 --previous ../earlier
    python -m benchmarks.search.one_command train.csv.gz test.csv.gz --out runs/adult
    python -m benchmarks.search.one_command trees --out runs/trees

`recurring` and `trees` are logs that are generated: users and items that recur, and labels that follow from
decision trees. The same command goes on with what is there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from scipy.special import expit, logit

from benchmarks.search.beside_boosting import LIBRARIES, tuned
from benchmarks.shared.machine_and_tables import machine, markdown
from benchmarks.shared.tree_log import write_tree_log
from dashboards.names import si, trial_name
from search.analysis.losses import BLOCKS
from search.analysis.statistics import one_seed_difference
from search.bundles.export import study_log
from search.read_study import read_study
from trials.records.metrics import Floats, evaluate_predictions
from trials.records.study_record import StudyRecord

ROWS, SEED = 150_000, 101
RECURRING = ("users=4000", "items=600", "affinity=0.4", "own=0.3")
TRAIN, VALIDATION, TEST, SCHEMA = "train.csv", "validation.csv", "test.csv", "schema.yaml"
TODAY, LOWEST, PREVIOUS = "today", "lowest", "previous"
COMMAND = (sys.executable, "-c", "from search.cli import main; main()")


def cut(files: list[str], out: Path, rows: int) -> None:
    """Writes the three parts of a log, and the schema file that names them; nothing if they are there."""
    if (out / SCHEMA).exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    first, *rest = files
    if first in ("trees", "recurring"):
        first, kind = str(out / "whole.csv"), first
        if kind == "trees":
            write_tree_log(Path(first), rows, SEED)
        else:
            words = [f"rows={rows}", f"seed={SEED}", *RECURRING]
            subprocess.run([*COMMAND, "demo", "--out", first, *words], check=True)
    log = _read(first)
    share = (0.85, 1.0) if rest else (0.8, 0.9)
    begin, end = (round(part * len(log)) for part in share)
    parts = {TRAIN: log[:begin], VALIDATION: log[begin:end], TEST: _read(rest[0]) if rest else log[end:]}
    for name, part in parts.items():
        part.to_csv(out / name, index=False)
    subprocess.run([*COMMAND, "prepare", out / TRAIN, "--out", out / "prepared"], check=True)
    schema = yaml.safe_load((out / "prepared" / SCHEMA).read_text())
    schema["split"] = {"by": "files", "validation": [VALIDATION], "test": [TEST]}
    (out / SCHEMA).write_text(yaml.safe_dump(schema, sort_keys=False))


def _read(path: str) -> pd.DataFrame:
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def searched(out: Path, checkout: Path, name: str, minutes: float, core: int) -> str:
    """Runs a study with the version of a checkout on one core, and has its best score the test rows."""
    data = [word for part in (TRAIN, VALIDATION, TEST) for word in ("--data", out / part)]
    settings = [f"schema_file={out / SCHEMA}", f"minutes={minutes:g}"]
    study, lowest = out / name, out / f"{LOWEST}-bundle"
    commands = [["run", *data, "--out", study, *settings], _predict(study / "best", out, name)]
    if name == TODAY and not (out / f"{LOWEST}.csv").exists():
        commands += [["export", study, "--pick", "lowest", "--out", lowest], _predict(lowest, out, LOWEST)]
    with (out / f"{name}.txt").open("a") as shown:
        for words in commands:
            # the older version, too, finds its own modules first, and so do the processes that it starts
            environment = os.environ | {"PYTHONPATH": str(checkout)}
            pinned = ["taskset", "-c", str(core), *COMMAND, *words]
            subprocess.run(pinned, env=environment, cwd=checkout, check=True, stdout=shown)
    return "the earlier version" if name == PREVIOUS else "this version"


def _predict(bundle: Path, out: Path, name: str) -> list[str | Path]:
    return ["predict", bundle, "--data", out / TEST, "--out", out / f"{name}.csv"]


def boosted(out: Path, library: str, minutes: float, core: int) -> str:
    """Tunes a library on one core, keeps its scores of the test rows, and says how many settings were tried."""
    os.sched_setaffinity(0, {core})
    scores, said = out / f"{library}.csv", out / f"{library}.txt"
    if not said.exists():
        refit = bool(read_study(out / TODAY).refits)
        model, tried = tuned(library, study_log(out / TODAY), minutes, refit=refit)
        pd.DataFrame({"score": expit(model(0).astype(np.float64))}).to_csv(scores, index=False)
        said.write_text(f"{library}, {tried} settings tried")
    return said.read_text()


def row(name: str, score_N: np.ndarray, first_N: np.ndarray, label_N: np.ndarray) -> list[str]:
    """A model's metrics on test, and the first model's NE less its own, with an interval over blocks of rows."""
    metrics = evaluate_predictions(score_N, label_N)
    beside = ""
    if score_N is not first_N:
        found = one_seed_difference(_block_sums(first_N, label_N), _block_sums(score_N, label_N))
        low, high = found.interval()
        beside = f"{found.percent:+.2f} % ({low:+.2f} to {high:+.2f})"
    return [name, f"{metrics.ne:.5f}", f"{metrics.auc:.5f}", f"{metrics.log_loss:.5f}", beside]


def _block_sums(score_N: np.ndarray, label_N: np.ndarray) -> Floats:
    """Sums of losses by block of consecutive rows."""
    loss_N = np.logaddexp(0, np.where(label_N > 0, -1, 1) * logit(score_N))
    return np.bincount(np.arange(len(label_N)) * BLOCKS // len(label_N), loss_N).astype(np.float64)


def main() -> None:
    """Prints a row for what each study takes away, and for each library."""
    options = _options()
    out, minutes = options.out.resolve(), options.minutes
    cut(options.data, out, options.rows)
    checkouts = {TODAY: Path(__file__).resolve().parents[2]}
    if options.previous is not None:
        checkouts[PREVIOUS] = options.previous.resolve()
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        searching = {
            name: pool.submit(searched, out, checkout, name, minutes, core % 2)
            for core, (name, checkout) in enumerate(checkouts.items(), options.core)
        }
        names = {name: future.result() for name, future in searching.items()}
        fitted = {
            library: pool.submit(boosted, out, library, minutes, core % 2)
            for core, library in enumerate(options.libraries, options.core)
        }
        names |= {library: future.result() for library, future in fitted.items()}
    record = read_study(out / TODAY)
    assert record.best is not None
    names[TODAY] += f", {len(record.candidates)} candidates: {_described(record, record.best)}"
    names = {
        TODAY: names.pop(TODAY),
        LOWEST: f"its lowest NE: {_described(record, record.front[-1])}",
    } | names
    label_N = _read(str(out / TEST))["label"].to_numpy(dtype=np.float64)
    scores = {name: pd.read_csv(out / f"{name}.csv")["score"].to_numpy() for name in names}
    log = f"{' '.join(options.data)}: {record.log.rows}"
    print(f"{machine()}, one core each; {log}; {minutes:g} minutes, {record.elapsed_seconds:,.0f} s\n")
    header = [
        "model",
        "test NE",
        "test AUC",
        "test log loss",
        "this version less it, 95 % interval over rows",
    ]
    print(markdown(header, [row(names[name], each, scores[TODAY], label_N) for name, each in scores.items()]))


def _described(record: StudyRecord, number: int) -> str:
    trial = record.trial(number)
    return f"{trial_name(trial)}, {si(trial.job.flops)}FLOPs"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", help="a log, or a log and its test file; `recurring` or `trees`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--previous", type=Path, help="a checkout of an earlier version")
    parser.add_argument("--core", type=int, choices=(0, 1), default=0, help="the one that is used first")
    parser.add_argument("--rows", type=int, default=ROWS, help="of a generated log")
    parser.add_argument("--libraries", nargs="*", choices=LIBRARIES, default=["lightgbm", "xgboost"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
