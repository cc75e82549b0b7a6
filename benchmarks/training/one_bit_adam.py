"""One-bit Adam, and PowerSGD beside it: what they cost in NE and what they send (`ne`), and at which bandwidth of
the network they pay (`links`).

`ne` trains a network on ranks of this machine, as a study starts them: by AdamW and by one-bit Adam, each setting
once from each seed. NE is the best on validation; the difference is to AdamW from the same seed. What is sent is
read from the ranks' logs: after which step they compress, and how many bytes leave a rank; the share is of
gradients in fp32 over a ring in every step.

`links` prices a network of 0.8 billion dense parameters on hosts of eight GPUs, by AdamW and by one-bit Adam's
second stage, or with PowerSGD (`--power`), over bandwidths of the network; nothing is trained.

    python -m benchmarks.training.one_bit_adam ne
    python -m benchmarks.training.one_bit_adam ne log.csv --repeats 5 --ranks 1x4
    python -m benchmarks.training.one_bit_adam ne --power 1 2 4
    python -m benchmarks.training.one_bit_adam links --cluster zionex --ranks 8x8
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.shared.log_or_demo import log_or_demo
from benchmarks.shared.machine_and_tables import machine, markdown, spread
from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from search.execution.attempts import Execution
from search.execution.train_list import train_one
from search.execution.trainer import Trainer, new_record
from search.log_config import DEMO
from trials.cluster.this_machine import load_cluster, this_machine
from trials.data.prepared_log import PreparedLog
from trials.planner.pricing import CostModel
from trials.planner.sentences import worth
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy
from trials.records.trial_record import Outcome, TrialKind
from trials.runtime.launcher import Launcher

LAYER = {
    "modules": [{"kind": "dlrm", "rank": 16, "mlp": [256, 128]}, {"kind": "dcn_v2", "layers": 2}],
    "out_embeddings": 8,
    "ensemble": "concat",
}
BEGINS = re.compile(
    r"compresses from step (\d+) on: this rank sends ([\d,]+) bytes .* send ([\d,]+) of gradients"
)
POWER_BEGINS = re.compile(
    r"PowerSGD compresses from step (\d+) on: ([\d,]+) bytes are reduced per step, ([\d,]+) of gradients"
)
GIGABITS = (1, 5, 10, 25, 50, 100, 200, 400)


class Finding(NamedTuple):
    """One training."""

    ne: float
    """The best on validation."""
    first_stage: float
    """Share of the steps that were of the first stage; 1 if there was no other."""
    sent: float
    """Share of what gradients in fp32 would have sent."""


def trained(
    options: argparse.Namespace, log: PreparedLog, launcher: Launcher, settings: dict[str, object], seed: int
) -> Finding:
    """One training, by processes that the launcher starts."""
    model = parse_model({"embedding_dim": 16, "layers": [LAYER] * options.layers}, "benchmark")
    base: dict[str, object] = {"epochs": options.epochs, "precision": "fp32", "batch_size": options.batch}
    training = TrainingConfig.model_validate(base | settings)
    with tempfile.TemporaryDirectory() as folder:
        cluster = this_machine().with_ranks(options.ranks)
        execution = Execution(cluster if cluster.ranks > 1 else None)
        trainer = Trainer(launcher, log, Path(folder), threads=options.threads, execution=execution)
        job = trainer.job(model, training, seed)
        record = new_record(0, TrialKind.CANDIDATE, {}, job)
        result = train_one(record, job, trainer, lambda _: None).result
        logs = "".join(path.read_text() for path in sorted(Path(folder).rglob("*.log")))
    if result.outcome is not Outcome.COMPLETED or result.validation is None:
        raise SystemExit(f"{settings}: {result.outcome.value}: {result.error}")
    begins = BEGINS.search(logs) or POWER_BEGINS.search(logs)
    if begins is None:
        return Finding(result.validation.ne, 1.0, 1.0)
    assert job.training.batch_size is not None
    steps = result.curve[-1].examples // job.training.batch_size
    first, second, ring = (int(number.replace(",", "")) for number in begins.groups())
    share = (first - 1) / steps
    return Finding(result.validation.ne, share, share + (1 - share) * (second / ring if ring else 0.0))


def costs(options: argparse.Namespace) -> None:
    """The table of NE and bytes."""
    log = log_or_demo([options.log], options.rows)
    launcher = Launcher(several_ranks=options.ranks != "1x1")
    launcher.warm_up()
    settings: dict[str, dict[str, object]] = {"AdamW": {}, "one-bit Adam": {"optimizer": "onebit_adam"}}
    for rank in options.power:
        settings[f"AdamW, PowerSGD of rank {rank}"] = {"power_sgd_rank": rank}
    found: dict[str, list[Finding]] = {name: [] for name in settings}
    for seed in range(options.repeats):
        for name, words in settings.items():
            found[name].append(trained(options, log, launcher, words, seed))
            print(f"seed {seed}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    plain = [finding.ne for finding in found["AdamW"]]
    rows = []
    for name, findings in found.items():
        nes = [finding.ne for finding in findings]
        more = [100 * (ne / other - 1) for ne, other in zip(nes, plain, strict=True)]
        rows.append(
            [
                name,
                spread(nes),
                f"{statistics.mean(more):+.2f} ({min(more):+.2f} to {max(more):+.2f})",
                f"{100 * statistics.mean(each.first_stage for each in findings):.0f}",
                f"{100 * statistics.mean(each.sent for each in findings):.1f}",
            ]
        )
    rows_of_log = f"{log.manifest.rows['train']:,} training rows"
    print(f"{options.log}, {rows_of_log}, {options.ranks} ranks, {options.repeats} seeds\n")
    header = ["optimizer", "validation NE", "more than AdamW, %", "first stage, % of steps", "sent, %"]
    print(markdown(header, rows))


def links(options: argparse.Namespace) -> None:
    """The table over bandwidths."""
    layer = {"modules": [{"kind": "mlp", "mlp": [options.width, options.width]}], "out_embeddings": 16}
    model = parse_model({"embedding_dim": 64, "layers": [layer] * options.layers}, "benchmark")
    schema = FeatureSchema(tables=(Table(name="id", rows=100_000),), numeric=("x",))
    given = load_cluster(options.cluster).with_ranks(options.ranks)
    training = TrainingConfig(
        batch_size=options.examples * given.ranks,
        precision="bf16",
        power_sgd_rank=options.power,
        optimizer="adamw" if options.power else "onebit_adam",
    )
    assert given.network is not None
    rows, below = [], None
    for gigabits in GIGABITS:
        cluster = given.replace(network=given.network.replace(bandwidth=gigabits * 1e9 / 8))
        found = worth(CostModel(model, schema, training, cluster), Strategy())
        below = found.pays_below
        times = found.adamw_seconds / found.seconds
        rows.append(
            [gigabits, f"{1e3 * found.adamw_seconds:.1f}", f"{1e3 * found.seconds:.1f}", f"{times:.2f}"]
        )
    numbers = sum(segment.parameters for segment in CostModel(model, schema, training, given).segments(1))
    print(
        f"{options.cluster}, {options.ranks} ranks, {numbers / 1e9:.2f} billion dense parameters, bf16, "
        f"{options.examples} examples per rank"
    )
    at = f"below {below * 8 / 1e9:.1f} Gb/s" if below is not None else "at no bandwidth"
    name = f"PowerSGD of rank {options.power}" if options.power else "one-bit Adam"
    print(f"{name} pays {at}\n")
    print(markdown(["network, Gb/s per rank", "AdamW, ms", f"{name}, ms", "times as fast"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    ne = parts.add_parser("ne", help="train")
    ne.add_argument("log", nargs="?", default=DEMO, help="by default the demo log")
    ne.add_argument("--rows", type=int, default=200_000, help="of the demo log")
    ne.add_argument("--ranks", default="1x2", help="hosts x ranks per host")
    ne.add_argument("--repeats", type=int, default=5)
    ne.add_argument("--power", type=int, nargs="*", default=[], help="ranks of PowerSGD")
    ne.add_argument("--layers", type=int, default=2)
    ne.add_argument("--epochs", type=int, default=1)
    ne.add_argument("--batch", type=int, help="by default that of a study")
    ne.add_argument("--threads", type=int, default=1, help="of each rank")
    priced = parts.add_parser("links", help="price")
    priced.add_argument("--cluster", default="zionex")
    priced.add_argument("--ranks", default="8x8")
    priced.add_argument("--power", type=int, default=0, help="rank of PowerSGD, in place of one-bit Adam")
    priced.add_argument("--layers", type=int, default=16)
    priced.add_argument("--width", type=int, default=6144)
    priced.add_argument("--examples", type=int, default=512, help="per rank")
    options = parser.parse_args()
    print(machine())
    {"ne": costs, "links": links}[options.part](options)


if __name__ == "__main__":
    main()
