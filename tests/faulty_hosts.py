"""A Ray cluster on this machine, and hosts on it whose ranks misbehave as their folder's name says (see
`faulty_ranks`)."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faulty_ranks import rank_main
from tools import tool

from trials.records.task import Task
from trials.runtime.launcher import Launcher
from trials.runtime.rank_process import LocalRank

ENDLESS = "endless"
MARKS = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    # Ray leaves the log of its server for clients open
    pytest.mark.filterwarnings("ignore:.*ray_client_server:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file .*ray_client_server:ResourceWarning"),
]
"""Marks of tests with a cluster."""
ROOT = Path(__file__).parents[1]
CPUS, GPUS = 2, 3
"""What a node declares; there are no GPUs."""
TOKEN = "0123456789abcdef" * 2
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens at 127.0.0.1 alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    # agents find FaultyLauncher
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")])
    ),
}
NODE = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20, "include_dashboard": False}


class FaultyLauncher(Launcher):
    """Its ranks run `faulty_ranks.add_up`."""

    def ranks(self, task: Task, directory: Path, processes: Sequence[int] | None = None) -> list[LocalRank]:
        steps = 1_000_000 if directory.name == ENDLESS else 10
        return self._fork(partial(rank_main, directory.name, steps), task, directory, processes)


@contextmanager
def ray_cluster(cpus: Sequence[int] = (CPUS, CPUS)) -> Iterator[Any]:
    """A head, which trains nothing, and nodes that declare so many CPUs, each with a cache of its own in the
    cluster's folder; `RAY_ADDRESS` names it meanwhile. The head answers clients at `client_port`. Nothing is left.
    """
    tool("ray")
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder,
    ):
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        # where Ray notes the newest cluster of a machine, by default in /tmp/ray, which need not be there
        patch.setenv("RAY_TMPDIR", folder)
        Path(folder, "ray").mkdir()
        from command_line import free_port  # here, as agents import this file
        from ray._private import ray_constants
        from ray._raylet import Config
        from ray.cluster_utils import Cluster

        # what it has read of the environment when another test imported it
        Config.initialize("")
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)

        client_port = free_port()
        given = NODE | {"num_cpus": 0, "temp_dir": folder, "ray_client_server_port": client_port}
        cluster = Cluster(initialize_head=True, head_node_args=given)
        cluster.client_port, cluster.folder = client_port, Path(folder)
        patch.setenv("RAY_ADDRESS", cluster.address)
        try:
            for count in cpus:
                add_node(cluster, count)
            yield cluster
        finally:
            cluster.shutdown()


def add_node(cluster: Any, cpus: int = CPUS) -> Any:
    """A node more, with a cache of its own."""
    cache = tempfile.mkdtemp(prefix="cache", dir=cluster.folder)
    return cluster.add_node(num_cpus=cpus, num_gpus=GPUS, env_vars={"DHEN_SEARCH_CACHE": cache}, **NODE)
