"""Each memory technique on 1, 2 and 4 ranks: the same losses as one process, and less memory than plain DP.

A DHEN on a generated log, fp32, no dropout, 50 steps at one learning rate; gloo over the loopback interface.
Tables are four columns wide, so that none is cut: column blocks have an Adagrad sum each, and would differ by
design (docs/decisions/0010-tables-through-torchrec.md). Bytes are of the fullest rank, counted storage by storage;
`held` are weights, optimizer state and tables between steps, without what lies on the host. A technique that
shards must hold less than plain DP on as many ranks, any other must have a lower peak: else it has failed. Tables
below the device have a cache of the rows of one batch.

    python -m benchmarks.processes.technique_equality
        each technique by itself, and all together, on each number of ranks
    python -m benchmarks.processes.technique_equality --all
        the whole ladder
    python -m benchmarks.processes.technique_equality --ranks 1 2
        the first number of ranks gives the losses that the others are held to
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.processes import technique_equality_job as equality_job
from benchmarks.shared.generated_log import generated_log
from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.model import parse_model
from trials.cluster.cluster import byte_words
from trials.cluster.this_machine import this_machine
from trials.data.prepared_log import PreparedLog
from trials.planner.ladder import ladder
from trials.planner.pricing import pricing_of
from trials.records.events import TrainingEvent
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import Ranks, Strategy
from trials.records.task import Task
from trials.runtime.launcher import Launcher, wait_for

SHAPES = {1: Ranks(0, 1, 1), 2: Ranks(0, 1, 2), 4: Ranks(0, 2, 2)}
ROWS, COLUMNS, BATCH = 16_000, (10, 30, 100, 300, 1000, 3000), 256
LAYER = {"modules": ["dcn_v2", "mlp"], "out_embeddings": 6, "raw_numeric": False}
MODEL = parse_model({"embedding_dim": 4, "layers": [LAYER] * 3, "dropout": 0.0}, "model")
TRAINING = TrainingConfig(
    batch_size=BATCH, precision="fp32", epochs=1, learning_rate=2.5e-4, embedding_learning_rate=0.02
)
"""At the default learning rate rounding grows: one process with micro-batches is 1e-7 apart at step 12 and 2e-3 at
step 40 (2 cores, 2026-11-21)."""
MICRO_BATCHES = (1, 4)
SMALLEST = 1
"""KiB of a cache: it has the rows of a batch then, and no more."""
ENOUGH = 64 * 2**30
TOLERANCE = 1e-4


class Finding(NamedTuple):
    """One technique on so many ranks."""

    ranks: Ranks
    strategy: Strategy
    answer: equality_job.Answer
    planned_bytes: int


class Bench:
    """One log, one job."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._launcher = folder, Launcher(several_ranks=True)
        self._log: PreparedLog = generated_log(folder / "log", ROWS, COLUMNS)
        self._job = Job(
            model=MODEL,
            features=self._log.features,
            log=self._log.fingerprint,
            training=TRAINING.resolved(self._log.manifest.rows["train"], "fp32"),
            seed=0,
        )

    def measured(self, ranks: Ranks, strategy: Strategy) -> Finding:
        """A training on fresh ranks."""
        cluster = this_machine().with_ranks(f"{ranks.hosts}x{ranks.gpus_per_host}").with_hbm(ENOUGH)
        folder = self._folder / f"{ranks.world}-{strategy.name}"
        folder.mkdir()
        task = Task(
            job=self._job,
            log_directory=str(self._log.directory),
            threads=1,
            strategy=strategy,
            hosts=ranks.hosts,
            gpus_per_host=ranks.gpus_per_host,
            cluster=cluster,
            hbm=cluster.hbm,
        )
        run, events = self._launcher.launch(equality_job.ours, task, folder), []
        while not run.ended:
            wait_for([run])
            events += run.new_events()
        assert isinstance(events[-1], TrainingEvent), events
        answer = equality_job.Answer.model_validate_json((folder / equality_job.ANSWER).read_bytes())
        planned = pricing_of(self._job, cluster).memory(strategy)
        return Finding(ranks, strategy, answer, planned.total)


def strategies(ranks: Ranks, *, everything: bool) -> Iterator[Strategy]:
    """Plain DP first; each technique by itself, and of each way of holding all that goes with it."""
    rungs = ladder(ranks.hosts, ranks.gpus_per_host, BATCH // ranks.world)
    found = [
        each.replace(table_cache=SMALLEST if each.tables != "device" else 0)
        for each in rungs
        if each.micro_batches in MICRO_BATCHES
    ]
    alone = {1} if ranks.world > 1 else {1, 2}  # on one rank offload comes with fsdp
    for dense in dict.fromkeys(each.dense for each in found):
        its = [each for each in found if each.dense == dense]
        yield from (e for e in its if everything or len(e.techniques) in {0, *alone} or e == its[-1])


def row(found: Finding, plain: equality_job.Answer, losses: tuple[float, ...]) -> list[str]:
    """`plain` is DP on as many ranks, `losses` are those of one process."""
    answer = found.answer
    apart = max(abs(mine - other) for mine, other in zip(answer.losses, losses, strict=True))
    less = answer.peak_bytes < plain.peak_bytes
    sharded = found.strategy.dense != "dp" and (found.ranks.world > 1 or found.strategy.updated_on_host)
    if sharded or found.strategy.tensor > 1:
        less = answer.held_bytes < plain.held_bytes
    right = apart < TOLERANCE and (less or found.strategy == Strategy())
    error = answer.peak_bytes / found.planned_bytes - 1
    sizes = [byte_words(b) for b in (answer.held_bytes, answer.peak_bytes, found.planned_bytes)]
    return [
        f"{found.ranks.world}",
        found.strategy.name,
        f"{answer.losses[-1]:.6f}",
        f"{apart:.1e}",
        *sizes,
        f"{100 * error:+.1f} %",
        "yes" if right else "**failed**",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", dest="everything")
    parser.add_argument("--ranks", type=int, nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    rows, losses = [], None
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for ranks in (SHAPES[count] for count in options.ranks):
            plain = None
            for strategy in strategies(ranks, everything=options.everything):
                found = bench.measured(ranks, strategy)
                plain = plain or found.answer
                losses = losses or found.answer.losses
                rows.append(row(found, plain, losses))
                print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    print(machine())
    header = ["ranks", "technique", "final loss", "worst difference", "held", "peak", "planned peak"]
    print(markdown([*header, "peak against plan", "as it should be"], rows))


if __name__ == "__main__":
    main()
