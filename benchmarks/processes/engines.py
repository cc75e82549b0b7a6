"""What an engine for several hosts costs: start of a candidate, pulls and pushes of rows between processes.

Start: four ranks on two hosts join, train ten steps and are gone, by the fork servers of `launcher=ray`, and by
a Ray actor per rank in a placement group. Pulls and pushes: 4,096 x 16 floats, by Ray actors,
`torch.distributed.rpc` and send/recv of gloo groups, with 1, 2 and 4 clients at once. All on this machine over the
loopback interface, in a Ray cluster of a head and two nodes that lives as long as the benchmark. Medians.

    python -m benchmarks.processes.engines [--repeats 200] [--starts 5]
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.processes import rank_start_job as rank_job
from benchmarks.processes.row_transport import FLOATS, IDS, by_ray, by_rpc, by_send
from benchmarks.shared.machine_and_tables import machine, markdown
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.records.task import Task
from trials.runtime.hosts.hosts import Hosts
from trials.runtime.hosts.placement import shape
from trials.runtime.hosts.ray_connection import Head
from trials.runtime.hosts.run import HostsLauncher
from trials.runtime.launcher import wait_for

ROOT = Path(__file__).parents[2]
HOSTS = 2
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Variables under which Ray listens at 127.0.0.1 alone, and tells nobody that it is used."""
CLIENTS = (1, 2, 4)


@contextmanager
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of a head and two nodes of two CPUs on this machine, to which this process is connected."""
    os.environ |= LOOPBACK | {"PYTHONPATH": str(ROOT)}  # nodes find this file
    import ray
    from ray.cluster_utils import Cluster

    node = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"num_cpus": 0})
    try:
        for _ in range(HOSTS):
            cluster.add_node(num_cpus=2, **node)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def by_actors(folder: Path) -> None:
    """A fresh actor per rank, which imports torch."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Rank:
        def train(self, rank: int, meeting: str, folder: str) -> None:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            rank_job.join_and_train(rank, meeting, Path(folder))

    per_host = rank_job.RANKS // HOSTS
    group = placement_group([{"CPU": float(per_host)}] * HOSTS, strategy="STRICT_SPREAD")
    actors: list[Any] = []
    for rank in range(rank_job.RANKS):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank // per_host)
        actors.append(ray.remote(num_cpus=1)(Rank).options(scheduling_strategy=place).remote())
    meeting = (folder / "meet").as_uri()
    ray.get([actor.train.remote(rank, meeting, str(folder)) for rank, actor in enumerate(actors)])
    for actor in actors:
        ray.kill(actor)
    remove_placement_group(group)


def seconds(start: Callable[[Path], None]) -> tuple[float, float]:
    """Until all ranks have joined, and until all are gone."""
    with tempfile.TemporaryDirectory() as folder:
        began, clock = time.time(), time.perf_counter()
        start(Path(folder))
        whole = time.perf_counter() - clock
        return float((Path(folder) / rank_job.JOINED).read_text()) - began, whole


def starts(ways: dict[str, Callable[[Path], None]], repeats: int) -> list[list[str]]:
    rows = []
    for name, start in ways.items():
        start_folders = (seconds(start) for _ in range(repeats + 1))
        next(start_folders)  # the first one waits for what is imported once
        columns = zip(*start_folders, strict=True)
        rows.append([name, *(f"{statistics.median(column):.2f}" for column in columns)])
    return rows


def transports(repeats: int) -> list[list[str]]:
    """A row per transport and number of clients: medians over all operations of all clients."""
    ways = {"Ray actors": by_ray, "torch.distributed.rpc": by_rpc, "gloo send/recv": by_send}
    rows = []
    for name, transport in ways.items():
        for clients in CLIENTS:
            with tempfile.TemporaryDirectory() as folder:
                samples = transport(clients, repeats, Path(folder))
            pulls, pushes = ([ms for each in samples for ms in each[kind]] for kind in (0, 1))
            rows.append(
                [name, str(clients), f"{statistics.median(pulls):.2f}", f"{statistics.median(pushes):.2f}"]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=200, help="pulls, and pushes, of each client")
    parser.add_argument("--starts", type=int, default=5)
    options = parser.parse_args()
    print(machine())
    with ray_cluster(), agents() as by_agents:
        started = starts(
            {"fork servers of Ray's agents": by_agents, "a Ray actor per rank": by_actors}, options.starts
        )
        print(markdown(["4 ranks on 2 hosts by", "s until all have joined", "s until all are gone"], started))
        print()
        header = ["transport", "clients", "ms per pull", "ms per push"]
        print(f"{IDS} x {FLOATS} floats:\n\n{markdown(header, transports(options.repeats))}")


@contextmanager
def agents() -> Iterator[Callable[[Path], None]]:
    """The hosts of a study on the cluster; gives what starts a candidate on both."""
    given = Head(), lambda _: None, rank_job.JobLauncher
    with tempfile.TemporaryDirectory() as kept, closing(Hosts(*given)) as hosts:
        lines = "".join(f"{row % 2},{row % 7}\n" for row in range(2000))
        (Path(kept) / "log.csv").write_text("click,kind\n" + lines)
        log = PreparedLog.open(prepare([Path(kept) / "log.csv"], out=Path(kept) / "log").directory)
        per_host = rank_job.RANKS // HOSTS
        hosts.open(log, Path(kept))
        hosts.check(shape(HOSTS, per_host, 1))
        launcher = HostsLauncher(hosts)

        def start(folder: Path) -> None:
            task = Task(
                job=rank_job.JOB, log_directory="none", threads=1, hosts=HOSTS, gpus_per_host=per_host
            )
            run, events = launcher.start(task, folder), []
            while not run.ended:
                wait_for([run])
                events += run.new_events()
            assert events[-1].event == "trained", events

        yield start


if __name__ == "__main__":
    main()
