"""Balance of embedding tables over ranks: generated tables, several planners, each priced by two cost functions.

Tables have Zipf-distributed rows and ids an example; ranks are those of a ZionEX pod. A step waits for its
heaviest rank, so what counts is that rank's cost, and how far it is above the mean. Costs are predictions:
ours is `trials.planner.table_placement`, the other TorchRec's own estimator, from the same data sheet. No table
is replicated: none has as few rows as a rank has examples.

    python -m benchmarks.planner.table_balance [--ranks 2x8 16x8] [--tables 500] [--seeds 5]

TorchRec is optional. To have it beside this project's torch, without the packages it would pull in:

    pip install fbgemm-gpu-cpu==1.8.0 tensordict pyre-extensions tqdm torchmetrics
    pip install --no-deps torchrec==1.8.0
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import logging
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from benchmarks.shared.machine_and_tables import machine, markdown
from dhen.schema import Table
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.planner.table_placement import (
    ROW_STATE_BYTES,
    Rates,
    ShardPrice,
    Workload,
    held_bytes,
    narrowest_width,
    rates,
    sharded_cost,
    spread,
)

ROWS, ROWS_EXPONENT, MOST_ROWS = 10_000, 1.6, 10**8
IDS_EXPONENT, MOST_IDS = 1.8, 200
MEMORY_SHARE = 0.85
"""Of a rank's memory for tables; the rest is TorchRec's default reservation."""
OURS, BOUND = "LPT with column splitting (ours)", 1.05
TORCHREC_WIDTHS = (64, 32)
"""Of its column shards: it splits a table into shards of one width (`min_partition`), or not at all."""
HEADER = (
    "placement",
    "shards",
    "heaviest over mean",
    "over the larger of mean and indivisible",
    "heaviest, ms",
    "TorchRec's cost: heaviest over mean",
    "heaviest, ms",
    "fullest rank, GiB",
    "planned in, ms",
)
HOW = (
    "TorchRec is not installed; its rows are left out. To have them:\n"
    "pip install fbgemm-gpu-cpu==1.8.0 tensordict pyre-extensions tqdm torchmetrics"
    " && pip install --no-deps torchrec==1.8.0"
)

Layout = list[tuple[int, int, int]]
"""(table, columns, rank) of every shard."""
Seconds = Callable[[int, int], float]
"""Of a shard: from its table and columns."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One set of tables on one cluster."""

    tables: tuple[Table, ...]
    dim: int
    work: Workload
    cluster: Cluster
    rates: Rates

    def seconds(self, table: int, columns: int) -> float:
        return sharded_cost(self.tables[table], columns, self.work, self.rates).seconds

    def held_bytes(self, table: int, columns: int) -> int:
        return held_bytes(self.tables[table], columns, self.work)

    def summed(self, layout: Layout, price: Callable[[int, int], float]) -> list[float]:
        """By rank."""
        ranks = [0.0] * self.cluster.ranks
        for table, columns, rank in layout:
            ranks[rank] += price(table, columns)
        return ranks


def generated(count: int, seed: int) -> tuple[Table, ...]:
    random = np.random.default_rng(seed)
    rows = np.minimum(ROWS * random.zipf(ROWS_EXPONENT, count), MOST_ROWS)
    ids = np.minimum(random.zipf(IDS_EXPONENT, count), MOST_IDS)
    return tuple(
        Table(name=f"t{i}", rows=int(rows[i]), multi_hot=True, mean_ids=float(ids[i])) for i in range(count)
    )


def split_lpt(case: Case, price: Seconds) -> Layout:
    """The planner's algorithm over a cost, with nothing replicated."""

    def both(table: int, columns: int) -> ShardPrice:
        return ShardPrice(price(table, columns), case.held_bytes(table, columns))

    found = spread([case.dim] * len(case.tables), case.cluster.ranks, both)
    return [(shard.table, shard.columns, rank) for shard, rank in found]


def whole_lpt(case: Case) -> Layout:
    dim = case.dim
    ranks = [(0.0, rank) for rank in range(case.cluster.ranks)]
    layout = []
    for table in sorted(range(len(case.tables)), key=lambda table: -case.seconds(table, dim)):
        load, rank = ranks[0]
        heapq.heapreplace(ranks, (load + case.seconds(table, dim), rank))
        layout.append((table, dim, rank))
    return layout


def round_robin(case: Case) -> Layout:
    return [(table, case.dim, table % case.cluster.ranks) for table in range(len(case.tables))]


class TorchRec:
    """Its planner and its estimator for one case; bandwidths in bytes/ms, as its defaults are."""

    def __init__(self, case: Case) -> None:
        import torch
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.planner import Topology
        from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
        from torchrec.distributed.planner.estimator.config import EmbeddingPerfEstimatorFactory
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        cluster = case.cluster
        assert cluster.nvlink is not None
        assert cluster.network is not None
        self.case = case
        self.sharder = EmbeddingBagCollectionSharder()
        self.batch = case.work.global_batch // cluster.ranks
        self.topology = Topology(
            world_size=cluster.ranks,
            local_world_size=cluster.gpus_per_host,
            compute_device="cuda",
            hbm_cap=cluster.hbm,
            hbm_mem_bw=cluster.memory_bandwidth / 1e3,
            intra_host_bw=cluster.nvlink.bandwidth / 1e3,
            inter_host_bw=cluster.network.bandwidth / 1e3,
        )
        configs = [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.rows,
                embedding_dim=case.dim,
                feature_names=[table.name],
            )
            for table in case.tables
        ]
        self.module = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
        self.weights = {name.split(".")[-2]: weight for name, weight in self.module.named_parameters()}
        self.estimator = EmbeddingPerfEstimatorFactory.create(
            DEFAULT_PERF_ESTIMATOR, topology=self.topology, constraints=self.constraints(case.dim)
        )
        self.seconds = cache(self._seconds)

    def constraints(self, columns: int) -> dict[str, Any]:
        from torchrec.distributed.planner.types import ParameterConstraints

        return {
            table.name: ParameterConstraints(
                sharding_types=["table_wise", "column_wise"],
                compute_kernels=["fused"],
                pooling_factors=[table.mean_ids],
                min_partition=columns,
            )
            for table in self.case.tables
        }

    def plan(self, columns: int) -> Layout | None:
        """None if it finds no plan."""
        from torchrec.distributed.planner import EmbeddingShardingPlanner
        from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
        from torchrec.distributed.planner.types import PlannerError

        planner = EmbeddingShardingPlanner(
            topology=self.topology,
            batch_size=self.batch,
            constraints=self.constraints(columns),
            storage_reservation=FixedPercentageStorageReservation(percentage=1 - MEMORY_SHARE),
            stats=[],
            debug=False,
        )
        try:
            found = planner.plan(self.module, [self.sharder]).plan[""]
        except PlannerError:
            return None
        return [
            (table, shard.shard_sizes[1], shard.placement.rank())
            for table, each in enumerate(self.case.tables)
            for shard in found[each.name].sharding_spec.shards
        ]

    def _seconds(self, table: int, columns: int) -> float:
        """Its estimator's price of one shard."""
        from torchrec.distributed.planner.types import Shard, ShardingOption
        from torchrec.distributed.planner.utils import build_sharder_data_map, sharder_name

        each, whole = self.case.tables[table], columns == self.case.dim
        option = ShardingOption(
            name=each.name,
            tensor=self.weights[each.name],
            module=("", self.module),
            input_lengths=[each.mean_ids],
            batch_size=self.batch,
            compute_kernel="fused",
            sharding_type="table_wise" if whole else "column_wise",
            partition_by="device",
            shards=[Shard(size=[each.rows, columns], offset=[0, 0])],
            is_pooled=True,
        )
        self.estimator.estimate(
            [option], build_sharder_data_map({sharder_name(self.sharder.module_type): self.sharder})
        )
        perf = option.shards[0].perf
        assert perf is not None
        return float(perf.total) / 1e3


def layouts(case: Case, torchrec: TorchRec | None) -> Iterator[tuple[str, Layout | None, float]]:
    """(contestant, its layout, seconds that planning took)."""
    contestants: dict[str, Callable[[], Layout | None]] = {
        OURS: lambda: split_lpt(case, case.seconds),
        "LPT without splitting": lambda: whole_lpt(case),
        "round robin": lambda: round_robin(case),
    }
    if torchrec is not None:
        for columns in TORCHREC_WIDTHS:
            contestants[f"TorchRec, shards of {columns}"] = partial(torchrec.plan, columns)
        contestants["ours over TorchRec's cost"] = lambda: split_lpt(case, torchrec.seconds)
    for name, plan in contestants.items():
        began = time.perf_counter()
        layout = plan()
        yield name, layout, time.perf_counter() - began


def measures(case: Case, layout: Layout, torchrec: TorchRec | None) -> dict[str, float]:
    """One layout under each cost."""
    ours = case.summed(layout, case.seconds)
    held = case.summed(layout, case.held_bytes)
    narrowest = narrowest_width(case.dim, case.cluster.ranks)
    indivisible = max(case.seconds(table, narrowest) for table in range(len(case.tables)))
    found = {
        "shards": len(layout),
        "ours": max(ours) / statistics.mean(ours),
        "ours_ms": 1e3 * max(ours),
        "bound": max(ours) / max(statistics.mean(ours), indivisible),
        "gib": max(held) / 2**30,
    }
    if torchrec is not None:
        theirs = case.summed(layout, torchrec.seconds)
        found |= {"theirs": max(theirs) / statistics.mean(theirs), "theirs_ms": 1e3 * max(theirs)}
    return found


def row(name: str, found: list[dict[str, float]], cases: int) -> list[str]:
    """Means over the cases, the worst in brackets."""
    if not found:
        return [name, "no plan", *[""] * 7]

    def mean(key: str, digits: int) -> str:
        return f"{statistics.mean(each[key] for each in found):,.{digits}f}" if key in found[0] else ""

    def worst(key: str) -> str:
        return f"{mean(key, 3)} ({max(each[key] for each in found):.3f})" if key in found[0] else ""

    missing = f" ({len(found)} of {cases} planned)" if len(found) < cases else ""
    cells = [mean("shards", 0), worst("ours"), worst("bound"), mean("ours_ms", 1)]
    cells += [worst("theirs"), mean("theirs_ms", 1), worst("gib"), mean("planning_ms", 0)]
    return [name + missing, *cells]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", default=["2x8", "16x8"], help="hosts x ranks a host")
    parser.add_argument("--tables", type=int, default=500)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=65_536, help="examples over all ranks")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    with_torchrec = importlib.util.find_spec("torchrec") is not None
    print(machine())
    print(f"{options.tables} tables of {options.dim} columns, batch {options.batch:,}, {options.seeds} seeds")
    for ranks in options.ranks:
        cluster = load_cluster("zionex").with_ranks(ranks)
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        for seed in range(options.seeds):
            work = Workload(options.batch, ROW_STATE_BYTES)
            case = Case(
                tables=generated(options.tables, seed),
                dim=options.dim,
                work=work,
                cluster=cluster,
                rates=rates(cluster),
            )
            torchrec = TorchRec(case) if with_torchrec else None
            for name, layout, seconds in layouts(case, torchrec):
                found[name] += (
                    [measures(case, layout, torchrec) | {"planning_ms": 1e3 * seconds}] if layout else []
                )
        print(f"\n{cluster.ranks} ranks ({ranks}); {MEMORY_SHARE * cluster.hbm / 2**30:.1f} GiB for tables\n")
        print(markdown(HEADER, [row(name, each, options.seeds) for name, each in found.items()]))
        worst = max(each["bound"] for each in found[OURS])
        verdict = "holds" if worst <= BOUND else "does NOT hold"
        print(
            f"\nat most {BOUND} times the larger of mean and largest indivisible shard: {verdict} ({worst:.3f})"
        )
    if not with_torchrec:
        print(f"\n{HOW}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    main()
