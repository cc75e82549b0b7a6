"""The paper's general optimisations (arXiv 2203.11014): speed and NE with each of them on, and with all.

Each is a setting of `training`, in fields of `trials.records.job.TrainingConfig`; what it is compared with is
the same training in fp32 throughout. A repeat trains every setting once, one after the other, from a seed of
its own; speed is examples a second between evaluations, of all ranks together, and its ratio is to fp32 in the
same repeat, as is the difference in validation NE. Figures are medians over repeats, with the extremes of the
differences in NE. Ranks are processes on this machine, as a study starts them. Settings that concern what ranks
send are left out on one rank. On several, bytes decide where tables lie, and where a table is split decides
over which columns Adagrad takes its mean: NE differs by that too.

    python -m benchmarks.training.paper_optimisations
        the demo log, 1 and 2 ranks
    python -m benchmarks.training.paper_optimisations log.csv --ranks 1x1 2x2 --repeats 5
    python -m benchmarks.training.paper_optimisations
        --only '' 'table_precision=fp16' 'table_precision=fp16 precision=bf16'

The paper reports 1.08 times the speed for all together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared.log_or_demo import log_or_demo
from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.model import parse_model
from dhen.values import parse
from search.execution.attempts import Execution
from search.execution.train_list import train_one
from search.execution.trainer import Trainer, new_record
from search.log_config import DEMO
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import this_machine
from trials.data.prepared_log import PreparedLog
from trials.planner.pricing import pricing_of
from trials.records.job import TrainingConfig
from trials.records.trial_record import Outcome, TrialKind
from trials.runtime.launcher import Launcher

FP32 = {"precision": "fp32", "all_reduce_precision": "fp32"}
"""What is automatic otherwise, of what every setting starts from."""
COMPUTE, TABLES, MOMENTS = "precision=bf16", "table_precision=fp16", "optimizer_precision=bf16"
SENT_TABLES, SENT_GRADIENTS = "all_to_all_precision=bf16", "all_reduce_precision=bf16"
LARGE = "batch_size={large} reference_batch_size={batch} learning_rate_scaling=sqrt"
SETTINGS: dict[str, str] = {
    "fp32": "",
    "bf16 compute": COMPUTE,
    "fp16 tables": TABLES,
    "fp16 all-to-all": "all_to_all_precision=fp16",
    "bf16 all-to-all": SENT_TABLES,
    "bf16 optimizer state": MOMENTS,
    "bf16 gradient all-reduce": SENT_GRADIENTS,
    "large batch, rate x square root": LARGE,
    "all but the large batch": " ".join((COMPUTE, TABLES, SENT_TABLES, MOMENTS, SENT_GRADIENTS)),
    "all": " ".join((COMPUTE, TABLES, SENT_TABLES, MOMENTS, SENT_GRADIENTS, LARGE)),
}
BETWEEN_RANKS = {"all_to_all_precision", "all_reduce_precision"}


class Finding(NamedTuple):
    """One training."""

    speed: float
    """Examples a second."""
    ne: float
    """The best on validation."""


class Bench:
    """Trains settings of one model on one log and one set of ranks."""

    def __init__(self, options: argparse.Namespace, log: PreparedLog, launcher: Launcher, ranks: str) -> None:
        self._options, self._launcher, self._log = options, launcher, log
        self._cluster: Cluster = this_machine().with_ranks(ranks)
        layer = {
            "modules": [{"kind": "dlrm", "rank": 16, "mlp": [256, 128]}, {"kind": "dcn_v2", "layers": 2}]
        }
        layers = [layer | {"ensemble": "concat", "out_embeddings": 8}] * options.layers
        self._model = parse_model({"embedding_dim": options.dim, "layers": layers}, "benchmark")

    @property
    def sharded(self) -> int:
        """Tables that are not on every rank."""
        with tempfile.TemporaryDirectory() as folder:
            job = self._trainer(Path(folder)).job(self._model, self._training(""), 0)
        return len({shard.table for shard in pricing_of(job, self._cluster).placement.shards})

    def measure(self, setting: str, seed: int) -> Finding:
        """One training, by processes that the launcher starts."""
        with tempfile.TemporaryDirectory() as folder:
            trainer = self._trainer(Path(folder))
            job = trainer.job(self._model, self._training(setting), seed)
            record = new_record(0, TrialKind.CANDIDATE, {}, job)
            result = train_one(record, job, trainer, lambda _: None).result
        if result.outcome is not Outcome.COMPLETED or result.validation is None:
            raise SystemExit(f"{setting or 'fp32'}: {result.outcome.value}: {result.error}")
        assert result.measured.examples_per_second is not None
        return Finding(result.measured.examples_per_second, result.validation.ne)

    def _trainer(self, folder: Path) -> Trainer:
        execution = Execution(self._cluster if self._cluster.ranks > 1 else None)
        return Trainer(self._launcher, self._log, folder, threads=self._options.threads, execution=execution)

    def _training(self, setting: str) -> TrainingConfig:
        """fp32 with the setting's words, which are `training`'s keys and values."""
        options = self._options
        words = setting.format(batch=options.batch, large=options.large)
        changed: dict[str, Any] = dict(word.split("=", 1) for word in words.split())
        base: dict[str, Any] = {"batch_size": options.batch, "epochs": options.epochs, **FP32}
        return parse(TrainingConfig, base | changed, "training")


def concerns(setting: str, ranks: int) -> bool:
    """Whether it changes anything on so many ranks."""
    keys = {word.split("=", 1)[0] for word in setting.split()}
    return ranks > 1 or not keys or bool(keys - BETWEEN_RANKS)


def table(found: dict[str, list[Finding]]) -> str:
    """A row a setting, beside the first."""
    base = next(iter(found.values()))
    rows = []
    for name, findings in found.items():
        pairs = list(zip(findings, base, strict=True))
        ratio = statistics.median(mine.speed / theirs.speed for mine, theirs in pairs)
        differences = [100 * (mine.ne / theirs.ne - 1) for mine, theirs in pairs]
        rows.append(
            [
                name,
                f"{statistics.median(mine.speed for mine in findings):,.0f}",
                f"{ratio:.2f}",
                f"{statistics.median(mine.ne for mine in findings):.5f}",
                f"{statistics.median(differences):+.3f} ({min(differences):+.3f} to {max(differences):+.3f})",
            ]
        )
    return markdown(["setting", "examples/s", "x fp32", "validation NE", "NE against fp32, %"], rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", nargs="?", default=DEMO)
    parser.add_argument("--rows", type=int, default=200_000, help="of the demo log")
    parser.add_argument("--ranks", nargs="+", default=["1x1", "2x1"], help="hosts x ranks a host")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--batch", type=int, default=1024, help="examples a step, over all ranks")
    parser.add_argument("--large", type=int, default=4096, help="the large batch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--dim", type=int, default=16, help="of an embedding; multiples of 4 on several ranks"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="SETTING", help="words of `training`; the first is compared with"
    )
    return parser.parse_args()


def measured(bench: Bench, settings: dict[str, str], options: argparse.Namespace, ranks: str) -> str:
    """All repeats on these ranks, as a table."""
    found: dict[str, list[Finding]] = {name: [] for name in settings}
    for repeat in range(options.repeats):
        for name, setting in settings.items():
            print(f"{ranks}, {repeat + 1} of {options.repeats}: {name} ...", file=sys.stderr, flush=True)
            found[name].append(bench.measure(setting, repeat))
    return table(found)


def chosen(only: Sequence[str] | None) -> dict[str, str]:
    """Settings by name."""
    return SETTINGS if only is None else {words or "fp32": words for words in only}


def main() -> None:
    options = arguments()
    log = log_or_demo([options.log], options.rows)
    launcher = Launcher(several_ranks=any(ranks != "1x1" for ranks in options.ranks))
    launcher.warm_up()
    print(machine())
    print(
        f"{options.log}, {log.manifest.rows['train']:,} training rows, {options.epochs} pass(es), "
        f"{options.layers} layers, batch {options.batch:,} (large: {options.large:,}), "
        f"{options.threads} thread(s) per rank, medians of {options.repeats}"
    )
    for ranks in options.ranks:
        bench = Bench(options, log, launcher, ranks)
        world = this_machine().with_ranks(ranks).ranks
        settings = {name: words for name, words in chosen(options.only).items() if concerns(words, world)}
        print(f"\n{ranks}: {bench.sharded} of {len(log.features.tables)} tables sharded\n")
        print(measured(bench, settings, options, ranks), flush=True)


if __name__ == "__main__":
    main()
