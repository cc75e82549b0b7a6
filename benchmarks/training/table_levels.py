"""Tables below the device: milliseconds of a training step by the size of the cache, and how often rows are there.

    python -m benchmarks.training.table_levels

One network, a DHEN of two layers of dlrm beside linear over eight tables, is trained with its tables on the
device, in host memory, and in a file on the SSD, in turns, on the same batches. Ids are drawn by Zipf's law with
the exponents given. Hit rates are of the steps that are timed; beside them the one that a plan predicts, which
takes the exponent for 1. The file's pages stay in the memory of the machine as long as there is room for them,
which there is here."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from benchmarks.models.one_network import parsed, stacked
from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.batch import FeatureBatch
from dhen.config import ModelConfig
from dhen.model import build_model
from dhen.schema import FeatureSchema, Table
from trials.cluster.here import this_machine
from trials.data.loader import Batch
from trials.job import Job, TrainingConfig
from trials.planner.pricing import Pricing
from trials.planner.tables.levels import hit_rate
from trials.ranks import Ranks
from trials.strategy import KIB, Strategy
from trials.training.distributed_step import DistributedStep

COLUMNS, CPU = 8, torch.device("cpu")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints a table for each exponent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000, help="Of each of eight tables.")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--shares", type=float, nargs="+", default=(1.0, 0.5, 0.2, 0.1, 0.05, 0.02))
    parser.add_argument("--exponents", type=float, nargs="+", default=(1.1, 0.8))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=100)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{machine()}, one thread; batches of {options.batch:,}, tables of {options.rows:,} rows\n")
    for exponent in options.exponents:
        print(f"Ids by Zipf's law with exponent {exponent}\n")
        print(
            level_table(exponent, options.rows, options.batch, options.shares, options.warm_up, options.steps)
        )


def level_table(
    exponent: float, rows: int, size: int, shares: Sequence[float], warm_up: int, steps: int
) -> str:
    """A row for each share of all rows that the cache has."""
    schema = FeatureSchema(
        tables=tuple(Table(name=f"c{i}", rows=rows) for i in range(COLUMNS)), numeric=("n",)
    )
    job = Job(
        model=parsed(stacked("dlrm", "linear")),
        features=schema,
        log="",
        training=TrainingConfig(batch_size=size, precision="fp32", epochs=1),
        seed=0,
    )
    below = Pricing(job.model, schema, job.training, this_machine()).below
    header = ["cache", "device, ms", "host, ms", "ratio", "ssd, ms", "ratio", "hit rate", "predicted"]
    lines = []
    for share in shares:
        cache = int(share * below.whole_bytes) // KIB
        cached = sum(below.cached_rows(cache))
        kinds = (
            Strategy(),
            Strategy(tables="host", table_cache=cache),
            Strategy(tables="ssd", table_cache=cache),
        )
        seconds, hits = _medians(job, kinds, exponent, warm_up, steps)
        device, host, ssd = (1e3 * each for each in seconds)
        lines.append(
            [
                f"{cached / (COLUMNS * rows):.0%}",
                f"{device:.1f}",
                f"{host:.1f}",
                f"{host / device:.2f}",
                f"{ssd:.1f}",
                f"{ssd / device:.2f}",
                f"{hits:.1%}",
                f"{hit_rate([(rows, size)] * COLUMNS, cached):.1%}",
            ]
        )
    return markdown(header, lines)


def _medians(
    job: Job, kinds: Sequence[Strategy], exponent: float, warm_up: int, steps: int
) -> tuple[list[float], float]:
    """Seconds of a step of each kind, which take turns, and the hit rate of the timed ones."""
    made = [_step(job, kind) for kind in kinds]
    seconds: list[list[float]] = [[] for _ in kinds]
    looked_up = missed = 0
    for number, batch in enumerate(_batches(job, exponent, warm_up + steps)):
        for step, taken in zip(made, seconds, strict=True):
            began = time.perf_counter()
            step(batch)
            if number >= warm_up:
                taken.append(time.perf_counter() - began)
        if number == warm_up - 1:
            use = made[1].cache_use
            assert use is not None
            looked_up, missed = use.looked_up, use.missed
    use = made[1].cache_use
    assert use is not None
    hits = 1 - (use.missed - missed) / (use.looked_up - looked_up)
    return [statistics.median(taken) for taken in seconds], hits


def _step(job: Job, strategy: Strategy) -> DistributedStep:
    torch.manual_seed(0)
    model: ModelConfig = job.model
    return DistributedStep(build_model(model, job.features).train(), job, strategy, Ranks(), where=CPU)


def _batches(job: Job, exponent: float, count: int) -> Iterator[Batch]:
    random, size, rows = np.random.default_rng(0), job.training.batch_size, job.features.tables[0].rows
    assert size is not None
    weights = np.arange(1, rows + 1) ** -exponent
    ends = np.cumsum(weights / weights.sum())
    places = [random.permutation(rows) for _ in job.features.tables]
    for _ in range(count):
        drawn = np.minimum(np.searchsorted(ends, random.random((len(places), size))), rows - 1)
        ids_BT = np.stack([place[its] for place, its in zip(places, drawn, strict=True)], axis=1)
        yield Batch(
            features=FeatureBatch(
                ids_BT=torch.from_numpy(ids_BT.astype(np.int32)),
                bags=(),
                numeric_BK=torch.from_numpy(random.standard_normal((size, 1)).astype(np.float32)),
            ),
            label_B=torch.from_numpy((random.random(size) < 0.3).astype(np.float32)),
            weight_B=None,
        )


if __name__ == "__main__":
    main()
