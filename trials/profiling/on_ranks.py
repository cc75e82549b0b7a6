"""Times engines and tables in this process, one rank of several that share them, and speak through gloo."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist

from dhen.errors import UserError
from trials.cluster.machine import Precision, cores
from trials.distributed.process_group import join
from trials.embeddings.torchrec_backend import import_torchrec
from trials.memory.limit import limited_memory
from trials.memory.malloc import keep_freed_memory
from trials.profiling import engines, sharded_tables
from trials.profiling.collectives import timed_collectives
from trials.profiling.engines import ALONE, EngineTimed
from trials.profiling.sharded_tables import TablesTimed
from trials.ranks import Ranks

ROUNDS = 2
"""Number of rounds in which everything is timed: other work that takes the cores disturbs one of them. Ranks that
take turns on the cores, and so disturb each other, have one."""
GIVE_UP_SECONDS = 300.0
"""Seconds after which a rank no longer waits for another."""
ENOUGH = 2**40
"""A memory that nothing exceeds, so that it is counted and never lacking."""


class SharedSetting(NamedTuple):
    """What is measured."""

    precision: Precision
    threads: int
    """Threads of a rank."""
    hosts: int
    gpus_per_host: int
    counted: bool
    """Whether ranks count their memory."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.hosts * self.gpus_per_host


class SharedMeasured(NamedTuple):
    """What one rank has timed: the least of the rounds."""

    engines: list[EngineTimed]
    uncounted: list[EngineTimed]
    """Compute alone, without counting; nothing where none is counted."""
    tables: list[TablesTimed]
    """Nothing where TorchRec is missing or broken."""
    collectives: dict[str, tuple[float, float]]
    """Seconds of what tensor groups send, by kind, for any size and for each byte."""


def has_torchrec() -> bool:
    """Tells whether TorchRec is installed, without which no tables are sharded."""
    return all(find_spec(package) is not None for package in ("torchrec", "fbgemm_gpu"))


def _torchrec_works() -> bool:
    if not has_torchrec():
        return False
    try:
        import_torchrec()
    except UserError:  # who trains on several ranks is told; a plan needs no more than its own numbers
        return False
    return True


def time_rank(setting: SharedSetting, rank: int, folder: str) -> SharedMeasured:
    """Times everything with the other ranks, who meet in a folder; this process is left with these threads."""
    logging.disable(logging.WARNING)  # what libraries say of themselves is nothing for who asked for a plan
    torch.set_num_threads(setting.threads)
    keep_freed_memory()
    ranks = Ranks(rank, setting.hosts, setting.gpus_per_host)
    join(ranks, Path(folder), None, seconds=GIVE_UP_SECONDS)
    tables = sharded_tables.placed(ranks) if _torchrec_works() else {}
    dense = engines.wrapped(setting.precision, ranks, tables)
    rounds = range(ROUNDS if setting.world * setting.threads <= cores() else 1)
    uncounted: list[list[EngineTimed]] = []
    if setting.counted:
        alone = [subject for subject in dense if subject.engine == ALONE]
        uncounted = [list(engines.timed_engines(alone)) for _ in rounds]
    with limited_memory(ENOUGH if setting.counted else None, torch.device("cpu")):
        by_engine = [list(engines.timed_engines(dense)) for _ in rounds]
        by_tables = [list(sharded_tables.timed_tables(tables.values())) for _ in rounds]
    dist.barrier()
    collectives = timed_collectives(setting.world)
    return SharedMeasured(
        [_least_engine(each) for each in zip(*by_engine, strict=True)],
        [_least_engine(each) for each in zip(*uncounted, strict=True)],
        [_least_tables(each) for each in zip(*by_tables, strict=True)],
        collectives,
    )


def _least_engine(rounds: tuple[EngineTimed, ...]) -> EngineTimed:
    return rounds[0]._replace(
        waiting=min(each.waiting for each in rounds),
        reduced=min(each.reduced for each in rounds),
        update=min(each.update for each in rounds),
        # what ranks wait for each other in is a step as it mostly is, not the quickest
        whole=fmean(each.whole for each in rounds),
        tables=min(each.tables for each in rounds),
    )


def _least_tables(rounds: tuple[TablesTimed, ...]) -> TablesTimed:
    return rounds[0]._replace(
        shared=min(each.shared for each in rounds), local=min(each.local for each in rounds)
    )
