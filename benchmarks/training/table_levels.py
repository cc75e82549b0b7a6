"""Tables below the device: milliseconds of a training step by the size of the cache, and how often rows are there.

    python -m benchmarks.training.table_levels

One network, a DHEN of two layers of dlrm beside linear over eight tables, is trained with its tables on the
device, in host memory, and in a file on the SSD, in turns, on the same batches. Ids are drawn by Zipf's law with
the exponents given. Hit rates are of all steps; beside them the ones that a plan predicts, from counts of these
ids and without (then it takes the exponent for 1). The file's pages stay in the memory of the machine as long as
there is room for them, which there is here; `--cold` also times steps before each of which they are dropped, which
takes a privileged user of Linux."""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
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
from trials.cluster.this_machine import this_machine
from trials.data.loader import LabelledBatch
from trials.data.prepare.fit import repeats_of
from trials.planner.pricing import CostModel
from trials.planner.table_memory import hits_of
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import KIB, Ranks, Strategy
from trials.training.distributed_step import DistributedStep
from trials.training.embeddings.levels import CachedTables

COLUMNS, CPU = 8, torch.device("cpu")
COLD = 3
"""Place of the tables whose pages are dropped, among those that take turns."""
MS_SYNC = 4


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
    parser.add_argument("--cold", action="store_true", help="Also time an SSD whose file is not in memory.")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{machine()}, one thread; batches of {options.batch:,}, tables of {options.rows:,} rows\n")
    for exponent in options.exponents:
        print(f"Ids by Zipf's law with exponent {exponent}\n")
        steps = options.warm_up, options.steps
        print(level_table(exponent, options.rows, options.batch, options.shares, steps, cold=options.cold))


def level_table(
    exponent: float, rows: int, size: int, shares: Sequence[float], steps: tuple[int, int], *, cold: bool
) -> str:
    """A row for each share of all rows that the cache has; `steps` are those that warm up, and those timed."""
    tables = tuple(Table(name=f"c{i}", rows=rows) for i in range(COLUMNS))
    schema = FeatureSchema(tables=tables, numeric=("n",))
    job = Job(
        model=parsed(stacked("dlrm", "linear")),
        features=schema,
        log="",
        training=TrainingConfig(batch_size=size, precision="fp32", epochs=1),
        seed=0,
    )
    below = CostModel(job.model, schema, job.training, this_machine()).below
    counted = hits_of(tuple(_counted(job, exponent, sum(steps))))
    header = ["cache", "device, ms", "host, ms", "ratio", "ssd, ms", "ratio"]
    header += ["cold ssd, ms", "ratio", "us a row"] if cold else []
    header += ["hit rate", "predicted", "without counts"]
    lines = []
    for share in shares:
        cache = int(share * below.whole_bytes) // KIB
        cached = sum(below.cached_rows(cache))
        ssd = Strategy(tables="ssd", table_cache=cache)
        kinds = (Strategy(), Strategy(tables="host", table_cache=cache), ssd, *([ssd] if cold else []))
        seconds, hits, copied = _medians(job, kinds, exponent, *steps)
        device, *others = (1e3 * each for each in seconds)
        line = [f"{cached / (COLUMNS * rows):.0%}", f"{device:.1f}"]
        for milliseconds in others:
            line += [f"{milliseconds:.1f}", f"{milliseconds / device:.2f}"]
        line += [f"{1e3 * (others[-1] - others[-2]) / copied:.0f}" if copied else "-"] if cold else []
        predicted = counted.share(cached), hits_of(tables).share(cached)
        lines.append([*line, f"{hits:.1%}", *(f"{share:.1%}" for share in predicted)])
    return markdown(header, lines)


def _medians(
    job: Job, kinds: Sequence[Strategy], exponent: float, warm_up: int, steps: int
) -> tuple[list[float], float, float]:
    """Seconds of a step of each kind, which take turns, the hit rate of all, and rows copied per timed step."""
    made = [_step(job, kind) for kind in kinds]
    seconds: list[list[float]] = [[] for _ in kinds]
    before = 0
    for number, batch in enumerate(_batches(job, exponent, warm_up + steps)):
        for place, (step, taken) in enumerate(zip(made, seconds, strict=True)):
            if place == COLD:
                drop_pages(step)
            began = time.perf_counter()
            step(batch)
            if number >= warm_up:
                taken.append(time.perf_counter() - began)
        if number == warm_up - 1:
            before = _copied(made[1])
    use = made[1].cache_use
    assert use is not None
    assert use.hit_rate is not None
    medians = [statistics.median(taken) for taken in seconds]
    return medians, use.hit_rate, (_copied(made[1]) - before) / steps


def _copied(step: DistributedStep) -> int:
    use = step.cache_use
    assert use is not None
    return use.copied_in + use.copied_out


def drop_pages(step: DistributedStep) -> None:
    """Writes the files of tables on an SSD, and takes their pages out of the machine's memory.

    Raises:
        PermissionError: for a user who may not open what is mapped.
    """
    tables = step._tables
    assert isinstance(tables, CachedTables)
    libc = ctypes.CDLL(None, use_errno=True)
    for cache in tables._caches:
        for tensor in (cache._weight_RD, cache.sum_R):
            where, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            start, end, file = _mapping(where)
            whole = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
            assert start <= where < where + size <= end
            assert libc.msync(*whole, MS_SYNC) == 0
            assert libc.madvise(*whole, mmap.MADV_DONTNEED) == 0
            descriptor = os.open(f"/proc/self/map_files/{file}", os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _mapping(address: int) -> tuple[int, int, str]:
    """The mapping of this process that an address lies in: where it begins and ends, and its name."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            if start <= address < end:
                return start, end, line.split()[0]
    raise AssertionError("no mapping has this address")


def _counted(job: Job, exponent: float, count: int) -> Iterator[Table]:
    """The tables with counts of the ids of all batches, as preparing a log would count them."""
    drawn = [batch.features.ids_BT.numpy() for batch in _batches(job, exponent, count)]
    for place, table in enumerate(job.features.tables):
        ids = np.concatenate([ids_BT[:, place] for ids_BT in drawn])
        yield table.replace(repeats=repeats_of(np.bincount(ids, minlength=table.rows)))


def _step(job: Job, strategy: Strategy) -> DistributedStep:
    torch.manual_seed(0)
    model: ModelConfig = job.model
    return DistributedStep(build_model(model, job.features).train(), job, strategy, Ranks(), where=CPU)


def _batches(job: Job, exponent: float, count: int) -> Iterator[LabelledBatch]:
    random, size, rows = np.random.default_rng(0), job.training.batch_size, job.features.tables[0].rows
    assert size is not None
    weights = np.arange(1, rows + 1) ** -exponent
    ends = np.cumsum(weights / weights.sum())
    places = [random.permutation(rows) for _ in job.features.tables]
    for _ in range(count):
        drawn = np.minimum(np.searchsorted(ends, random.random((len(places), size))), rows - 1)
        ids_BT = np.stack([place[its] for place, its in zip(places, drawn, strict=True)], axis=1)
        yield LabelledBatch(
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
