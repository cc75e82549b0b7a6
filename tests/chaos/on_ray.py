"""A study on the hosts of a Ray cluster of its own, which is a head and some nodes, and faults of these."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from chaos import processes
from chaos.scenes import Hit, Scene
from faulty_hosts import CPUS, ENVIRONMENT, add_node, ray_cluster

from trials.runtime.hosts.ray_connection import RAYS_SETTING, SHARE

NEW_NODE_SECONDS = 2.0
GONE_SECONDS = 15.0
HOSTS = ("ranks=2x1", "launcher=ray")
RAYS_OWN = Path("/tmp/ray")
"""Where Ray notes the address of a machine's cluster, whatever folder the cluster has."""


class OnRay(Scene):
    """One driver; each candidate has a rank on each of two nodes, where nothing else is said."""

    def __init__(self, *given: Any, cpus: Sequence[int] = (CPUS, CPUS)) -> None:
        """Starts the cluster, whose nodes declare so many CPUs."""
        super().__init__(*given)
        self._stack, self._cpus = ExitStack(), cpus
        self.words = HOSTS
        self.cluster_up()

    def cluster_up(self) -> None:
        """Starts a cluster, whose processes have the mark too, as ranks are theirs."""
        os.environ[processes.MARK] = self.mark
        RAYS_OWN.mkdir(exist_ok=True)
        self.cluster = self._stack.enter_context(ray_cluster(self._cpus))
        self.environment |= {name: os.environ[name] for name in (*ENVIRONMENT, "RAY_ADDRESS")}

    def cluster_down(self) -> None:
        self._stack.close()
        os.environ.pop(processes.MARK, None)

    def left(self, seconds: float) -> list[str]:
        """Fork servers and ranks that outlive the study; the cluster itself goes on."""
        deadline = time.monotonic() + seconds
        while (servers := processes.fork_servers(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [f"fork server {server} is left" for server in servers]

    def close(self) -> None:
        for driver in self.running():
            processes.send(driver.pid, signal.SIGKILL)
        for driver in self.drivers:
            driver.wait()
        self.cluster_down()
        processes.left_after(self.mark, 5.0)


def agent(scene: OnRay, rng: Random) -> Hit | None:
    """The parent of a rank's fork server."""
    found = scene.a_rank(rng)
    if found is None:
        return None
    try:
        agent_pid = _parent(_parent(found[0]))
    except OSError:
        return None
    return Hit({found[1]}, time.time()) if processes.send(agent_pid, signal.SIGKILL) else None


def node(scene: OnRay, rng: Random) -> Hit | None:
    """Another one joins some seconds later."""
    trials = set(processes.ranks(scene.mark).values())
    if not scene.running():
        return None
    nodes = sorted(scene.cluster.worker_nodes, key=lambda each: each.node_id)
    scene.cluster.remove_node(rng.choice(nodes), allow_graceful=False)
    at = time.time()
    time.sleep(NEW_NODE_SECONDS)
    add_node(scene.cluster)
    return Hit(trials or None, at)


def sooner(scene: OnRay, _: Random) -> None:
    """The study gives up a head that is gone after so many seconds, and not after the 45 of Ray's default."""
    scene.environment[RAYS_SETTING] = f"{GONE_SECONDS / SHARE:.0f}"


def head(scene: OnRay, _: Random) -> Hit | None:
    """All of the cluster goes with it; its owner starts another one, and the study's command is repeated."""
    if not scene.running():
        return None
    scene.cluster.remove_node(scene.cluster.head_node, allow_graceful=False)
    at = time.time()
    scene.wait(lambda: False)
    scene.cluster_down()
    scene.cluster_up()
    return Hit(None, at)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
