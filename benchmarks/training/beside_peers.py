"""Training beside its peers: examples a second, seconds an epoch, test NE; ours, FuxiCTR, plain PyTorch.

    python -m benchmarks.training.beside_peers
        the generated 10-column log; ours and plain PyTorch
    python -m benchmarks.training.beside_peers --log LOG.csv
        a log of your own as well, every column a table
    python -m benchmarks.training.beside_peers --fuxictr-python .venv-fuxictr/bin/python

FuxiCTR comes from its package, in an environment for this benchmark alone:

    python3.11 -m venv .venv-fuxictr
    .venv-fuxictr/bin/pip install fuxictr==2.3.10 torch==2.13.0

All contestants get the same encoded ids, splits, batch size, passes and learning rate of Adam (1e-3,
constant; our tables have row-wise Adagrad at its default rate). Each training has a process of its own;
contestants take turns, so that drift of the machine meets all alike; each turn has the next seed. The
speed leaves out evaluations and the first steps of each pass; seconds an epoch leave out nothing but
starting the process, reading its data and building the model. Test NE after so few steps says how fast each
setting learns; with more passes (--epochs 8) it says how good the model becomes.

dcn_v2: four cross layers beside 400-400-400, embedding dimension 10, batch 4096. Ours projects both to ten
embeddings before the linear head, which adds no capacity and costs some FLOPs; the others do not.

dhen3: a DHEN of three layers, each with an MLP over pairwise dots (dlrm) beside two cross layers (dcn_v2),
concatenated, shortcut, layer norm. FuxiCTR has no hierarchical ensemble. The nearest it can express is the
same stack put together from its own InnerProductInteraction, MLP_Block and CrossNetV2; of its ready models
none has more than one level, so their FLOPs could not be alike. Both FLOPs are printed. Plain PyTorch has
DCN-V2 alone.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.shared.generated_log import generated_log
from benchmarks.shared.machine_and_tables import TRAINING_FLOPS, machine, markdown
from benchmarks.training.peers.contest import ARCHITECTURES, LEARNING_RATE, Contest, Result
from benchmarks.training.timed_steps import StepTrainer, completed, train_timed
from dhen.config import ModelConfig
from dhen.errors import UserError
from dhen.model import parse_model
from search.execution.retraining import score_one
from trials.cluster.machine import PRODUCT_SIZE, MatmulPeak, matmul_peak, measured_matmul, preferred_precision
from trials.data.log_schema import CategoricalColumn, Column, IgnoredColumn
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.data.raw.sources import open_log
from trials.data.read_options import ReadOptions
from trials.data.roles.infer import infer
from trials.records.job import TrainingConfig
from trials.records.metrics import evaluate_predictions
from trials.runtime.launcher import Launcher

OURS, FUXICTR, PLAIN = "ours", "FuxiCTR", "plain PyTorch"
PEERS = Path(__file__).parent / "peers"
ROOT = Path(__file__).parents[2]
INSTALL = "python3.11 -m venv .venv-fuxictr && .venv-fuxictr/bin/pip install fuxictr==2.3.10 torch==2.13.0"
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of one contestant."""

    result: Result
    test_ne: float

    def describe(self) -> str:
        """One line for people who wait."""
        speed, seconds = self.result.examples_per_second, self.result.epoch_seconds
        return f"{speed:,.0f} examples/s, {seconds:.2f} s an epoch, test NE {self.test_ne:.5f}"


class Field:
    """One log and one architecture, and who trains on it."""

    def __init__(self, name: str, log: PreparedLog, architecture: str, options: argparse.Namespace) -> None:
        self.name, self.log, self.architecture, self.options = name, log, architecture, options
        self.contestants = [OURS]
        if options.fuxictr_python:
            self.contestants.append(FUXICTR)
        if architecture == "dcn_v2":
            self.contestants.append(PLAIN)

    def run(self, contestant: str, seed: int, launcher: Launcher) -> Run:
        """One training in a process of its own."""
        with tempfile.TemporaryDirectory() as folder:
            if contestant == OURS:
                return self._ours(seed, launcher, Path(folder))
            return self._peer(contestant, seed, Path(folder))

    def _ours(self, seed: int, launcher: Launcher, folder: Path) -> Run:
        options = self.options
        trainer = StepTrainer(launcher, self.log, folder, threads=options.threads)
        rows = self.log.split("train").rows
        training = TrainingConfig(
            batch_size=options.batch,
            learning_rate=LEARNING_RATE,
            epochs=options.epochs,
            evaluate_every=max(rows // options.batch, 1) * options.batch,
            schedule="constant",
        )
        job = trainer.job(our_model(self.architecture, options.dropout), training, seed)
        record, passes = train_timed(trainer, job)
        if not completed(record):
            raise SystemExit(f"ours ended as {record.result.outcome}: {record.result.error}")
        seconds = record.result.curve[-1].seconds / len(passes)
        result = Result(passes=passes, epoch_seconds=seconds, flops=record.job.flops or 0.0)
        return Run(result=result, test_ne=score_one(record, job, "test", trainer).ne)

    def _peer(self, contestant: str, seed: int, folder: Path) -> Run:
        options = self.options
        _write_splits(self.log, folder, options.fuxictr_loader if contestant == FUXICTR else "npz")
        contest = Contest(
            folder=str(folder),
            tables=[table.rows for table in self.log.features.categorical],
            architecture=self.architecture,
            batch_size=options.batch,
            epochs=options.epochs,
            dropout=options.dropout,
            seed=seed,
            threads=options.threads,
            bf16=preferred_precision() == "bf16",
            loader=options.fuxictr_loader,
        )
        python, script = (
            (options.fuxictr_python, "fuxictr_contestant.py")
            if contestant == FUXICTR
            else (sys.executable, "plain_pytorch.py")
        )
        _python(python, str(PEERS / script), str(contest.save()))
        label = np.asarray(self.log.split("test").labels, dtype=np.float64)
        metrics = evaluate_predictions(np.load(folder / "test.npy"), label)
        return Run(result=Result.read(folder), test_ne=metrics.ne)


def our_model(architecture: str, dropout: float) -> ModelConfig:
    """The architecture as a DHEN."""
    shape = ARCHITECTURES[architecture]
    cross = {"kind": "dcn_v2", "layers": shape["cross_layers"]}
    layer: dict[str, object] = {"ensemble": "concat", "out_embeddings": shape.get("out_embeddings", 10)}
    if architecture == "dcn_v2":
        layer |= {"modules": [cross, {"kind": "mlp", "mlp": shape["mlp"]}], "norm": "none", "shortcut": False}
    else:
        layer |= {"modules": [{"kind": "dlrm", "mlp": shape["mlp"]}, cross]}
    data = {
        "embedding_dim": shape["embedding_dim"],
        "layers": [layer] * shape.get("layers", 1),
        "head": shape.get("head", []),
        "dropout": dropout,
    }
    return parse_model(data, architecture)


def all_categorical(path: Path, label: str | None) -> PreparedLog:
    """A log of which every feature is an embedding table, prepared into the usual cache.

    Peers know neither example weights nor bags, so weights are left out and bags are single values.
    """
    raw = open_log([path])
    schema = infer(raw, ReadOptions(label=label)).schema
    columns = {name: _as_table(column) for name, column in schema.columns.items()}
    return prepare([path], schema=schema.replace(columns=columns))


def _as_table(column: Column) -> Column:
    if column.role in ("numeric", "multi_hot", "categorical"):
        return CategoricalColumn(hash_buckets=None)
    return IgnoredColumn() if column.role in ("weight", "oracle") else column


def _write_splits(log: PreparedLog, folder: Path, kind: str) -> None:
    for name in SPLITS:
        split = log.split(name)
        columns = {
            f"c{i}": np.ascontiguousarray(split.inputs.categorical[:, i])
            for i in range(split.inputs.categorical.shape[1])
        }
        columns["label"] = split.labels.astype(np.int32)  # FuxiCTR stacks columns: one type keeps them int32
        if kind == "npz":
            np.savez(folder / f"{name}.npz", allow_pickle=False, **columns)
        else:
            pq.write_table(pa.table(columns), folder / f"{name}.parquet")


def _python(python: str, *arguments: str) -> None:
    """Runs it; what it printed is shown where it failed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join([python, *arguments])} failed:\n{done.stdout}{done.stderr}")


def _has_fuxictr(python: str | None) -> bool:
    """Whether this Python can run FuxiCTR; says how to get one otherwise."""
    found = shutil.which(python) if python else None
    if found and not subprocess.run([found, "-c", "import fuxictr, torch"], capture_output=True).returncode:
        return True
    why = f"{python} has none" if python else "no --fuxictr-python"
    print(f"FuxiCTR is left out ({why}). To have it: {INSTALL}", file=sys.stderr)
    return False


def compete(fields: Sequence[Field], repeats: int) -> tuple[dict[tuple[int, str], list[Run]], MatmulPeak]:
    """All runs, by field and contestant: one of each contestant in turn, then again with the next seed.

    The matmul peak beside them is the largest of those measured before and after each run.
    """
    launcher = Launcher()
    launcher.warm_up()
    runs: dict[tuple[int, str], list[Run]] = {}
    peak = matmul_peak(PRODUCT_SIZE)
    for index, field in enumerate(fields):
        for seed in range(repeats):
            for contestant in field.contestants:
                run = field.run(contestant, seed, launcher)
                runs.setdefault((index, contestant), []).append(run)
                peak = peak.or_better(measured_matmul(PRODUCT_SIZE))
                what = f"{field.name}, {field.architecture}, {seed + 1}/{repeats}: {contestant}"
                print(f"{what} {run.describe()}", file=sys.stderr, flush=True)
    return runs, peak


def rows_of(field: Field, runs: dict[str, list[Run]], peak: float) -> list[list[str]]:
    """A table row for each contestant."""
    speeds = {
        name: statistics.median(run.result.examples_per_second for run in each) for name, each in runs.items()
    }
    rows = []
    for name, each in runs.items():
        seconds = statistics.median(run.result.epoch_seconds for run in each)
        nes = [run.test_ne for run in each]
        spread = f" ± {statistics.stdev(nes):.5f}" if len(nes) > 1 else ""
        flops = each[0].result.flops
        rows.append(
            [
                name,
                f"{speeds[name]:,.0f}",
                "" if name == OURS else f"{speeds[OURS] / speeds[name]:.2f}",
                f"{seconds:.2f}",
                f"{statistics.mean(nes):.5f}{spread}",
                f"{flops:,.0f}",
                f"{TRAINING_FLOPS * flops * speeds[name] / peak:.1%}",
            ]
        )
    return rows


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)  # the peak is that of as many threads
    logs: list[tuple[str, PreparedLog]] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.rows:
            log = generated_log(Path(folder) / "generated", options.rows)
            logs.append((f"generated, {options.rows:,} rows", log))
        try:
            logs += [(path.name, all_categorical(path, options.label)) for path in options.log]
        except UserError as error:
            raise SystemExit(str(error)) from None
        fields = [Field(name, log, each, options) for name, log in logs for each in options.architectures]
        runs, peak = compete(fields, options.repeats)
        report(fields, runs, peak, options)


def report(
    fields: Sequence[Field],
    runs: dict[tuple[int, str], list[Run]],
    peak: MatmulPeak,
    options: argparse.Namespace,
) -> None:
    """A table for each log and architecture."""
    precision = preferred_precision()
    print(machine())
    print(
        f"matmul peak {peak.fp32 / 1e9:,.0f} GFLOP/s fp32, {peak.bf16 / 1e9:,.0f} bf16; "
        f"ours trained in {precision}"
    )
    header = [
        "contestant",
        "examples/s",
        "ours is faster by",
        "seconds an epoch",
        "test NE",
        "FLOPs an example",
    ]
    for index, field in enumerate(fields):
        rows, tables = field.log.split("train").rows, field.log.features.categorical
        print(
            f"\n{field.architecture}, {field.name}: {rows:,} training rows, {len(tables)} tables of "
            f"{sum(table.rows for table in tables):,} rows together, batch {options.batch:,}, dropout "
            f"{options.dropout:g}, {options.epochs} pass(es), {options.threads} threads, {options.repeats} runs\n"
        )
        of_field = {name: each for (i, name), each in runs.items() if i == index}
        share = f"share of the {precision} peak"
        best = peak.bf16 if precision == "bf16" else peak.fp32
        print(markdown([*header, share], rows_of(field, of_field, best)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--log", type=Path, nargs="*", default=[], help="logs to train on, besides the generated one"
    )
    parser.add_argument("--label", help="label column of these logs; found out where not given")
    parser.add_argument("--rows", type=int, default=200_000, help="of the generated log; 0 leaves it out")
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=1, help="passes over the training rows")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--fuxictr-python", help="a Python with FuxiCTR; left out without one")
    parser.add_argument("--fuxictr-loader", choices=("npz", "parquet"), default="npz")
    options = parser.parse_args()
    if not _has_fuxictr(options.fuxictr_python):
        options.fuxictr_python = None
    return options


if __name__ == "__main__":
    main()
