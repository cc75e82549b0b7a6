"""The hosts of a study: the nodes of a Ray cluster with an agent on each, as the driver knows them.

A thread per host listens to its agent; all else happens in the driver's own thread, whenever it looks
(`Hosts.hear`). Nodes that join the cluster later are taken in, nodes that leave are given up.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from dhen.errors import UserError
from trials.data.prepared_log import PreparedLog
from trials.records.events import START_MARK, FailureEvent, LastWords, RankLogs
from trials.runtime.hosts.agent import LISTEN_SECONDS, Agent, HostFacts, RankEnded, StudyNeeds
from trials.runtime.hosts.placement import Shape
from trials.runtime.hosts.ray_connection import Head, HeadGoneError, devices_here, versions_here
from trials.runtime.launcher import Launcher

LOG = logging.getLogger(__name__)
MARK = ".hosts"
"""Name of a file in the run's directory while hosts may join: what it holds shows a host whether the directory is
shared."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at the nodes of the cluster."""
GREET_SECONDS = 120.0
"""Longest time that a host has to start its agent and to find the log when the study begins."""
SILENCE_SECONDS = 15 * LISTEN_SECONDS
"""Time without a word from an agent after which its host is gone."""
FAREWELL_SECONDS = 10.0
"""Seconds that a host has to end its ranks, after which the host is taken to be gone itself."""
LOST = 1
"""Exit code of a rank whose host is gone."""
AVOID_SECONDS = 600.0
"""Time in which a host is avoided after a rank there was slow for the last time: what slows a machine down for
longer is noticed again."""
CALLS_AT_ONCE = 8
"""Calls that an agent answers at the same time: one is always a listener's."""
AGENT_ENVIRONMENT = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
"""Environment of an agent: it has no device of its own, and yet its ranks must see those of its host."""
Say = Callable[[str], None]
"""A function that shows sentences to people."""


class Node(NamedTuple):
    """A node of the cluster."""

    id: str
    address: str
    cpus: float
    gpus: float


class LogAttempt(NamedTuple):
    """A host has tried to get the log for itself."""

    objection: str | None
    """Why it could not."""


class MemberHost:
    """A host of the cluster with its agent."""

    def __init__(self, node: Node, agent: Any, study: StudyNeeds, heard: Callable[[], None]) -> None:
        """Asks the agent, an actor, what its host is; `heard` is called by another thread when it has answered
        anything."""
        self.node, self.agent = node, agent
        self.facts: HostFacts | None = None
        """What the host says of itself; None until it has."""
        self.has_log = study.get_log is None
        """Whether the log is there, as far as is known."""
        self.why_gone: str | None = None
        self.ranks: dict[tuple[int, int], RemoteRank] = {}
        """Ranks of the host that live, by run and rank."""
        self.news: SimpleQueue[HostFacts | LogAttempt | list[RankEnded] | str] = SimpleQueue()
        """What the listener has heard; a sentence says that the host is gone."""
        threading.Thread(target=self._listen, args=(study, heard), daemon=True).start()

    @property
    def words(self) -> str:
        """Address of the host and the beginning of its node's id, for sentences."""
        return f"node {self.node.address} ({self.node.id[:8]})"

    @property
    def is_ready(self) -> bool:
        """Whether ranks can be started there."""
        return self.facts is not None and self.has_log

    def _listen(self, study: StudyNeeds, heard: Callable[[], None]) -> None:
        """Hears the agent until it is gone."""
        import ray

        answered = False
        try:
            self.news.put(ray.get(self.agent.facts.remote(study), timeout=GREET_SECONDS))
            heard()
            answered = True
            if study.get_log is not None:  # however long that takes
                self.news.put(LogAttempt(ray.get(self.agent.get_log.remote(study))))
                heard()
            while self.why_gone is None:
                endings = ray.get(self.agent.ended.remote(), timeout=SILENCE_SECONDS)
                if endings:
                    self.news.put(endings)
                    heard()
        except ray.exceptions.GetTimeoutError:
            self.news.put("is taken to be gone: it does not answer")
        except Exception as error:  # of Ray, or of the agent's own start
            self.news.put(_why_gone(error, answered=answered))
        heard()

    def call(self, method: str, *arguments: object) -> None:
        """Has the agent do something; if it is gone, its listener notices."""
        with contextlib.suppress(Exception):
            getattr(self.agent, method).remote(*arguments)

    def lose(self, why: str, *, head_answers: bool = True) -> None:
        """Gives the host up: it takes part no longer, and neither do its ranks."""
        import ray

        self.why_gone = self.why_gone or why
        if head_answers:  # else Ray would wait for it
            with contextlib.suppress(Exception):
                ray.kill(self.agent)
        while self.ranks:
            self.ranks.popitem()[1].lost(f"{self.words} {self.why_gone}")


class Hosts:
    """All hosts of a study."""

    def __init__(self, head: Head, say: Say, make_launcher: Callable[[], Launcher] | None = None) -> None:
        """A connection to the cluster with this head is there. `make_launcher` makes what starts ranks on a
        host."""
        self._say = say
        self.head = head
        """The head of the cluster."""
        self._make_launcher = make_launcher or partial(Launcher, several_ranks=True)
        self._members: dict[str, MemberHost] = {}
        self._refused: dict[str, str] = {}
        self._avoided: dict[str, float] = {}
        """Until when hosts are avoided, by their nodes' ids."""
        self._study: StudyNeeds | None = None
        self._looked = 0.0
        self._heard, self._hears = socket.socketpair()
        self._heard.setblocking(False)
        self._hears.setblocking(False)
        self.on_device = 1
        """Number of candidates with one rank per host that share a device."""
        self.run_numbers = itertools.count()
        """Numbers by which hosts tell runs apart."""

    @property
    def sentinel(self) -> int:
        """What `multiprocessing.connection.wait` takes: ready once a host has told something."""
        return self._heard.fileno()

    def open(
        self, log: PreparedLog, directory: Path, get_log: Callable[[], PreparedLog] | None = None
    ) -> None:
        """Starts an agent on each node for a study of this log in this directory, and waits until they are ready:
        for the log however long it takes.

        Args:
            log: the log, as it is here.
            directory: the run's directory, which all hosts see.
            get_log: has each host get the log for itself; None if all see the one that is here.
        """
        mark = directory.absolute() / MARK
        self._study = StudyNeeds(
            log_directory=str(log.directory.absolute()),
            log=log.fingerprint,
            get_log=get_log,
            mark=str(mark),
            mark_text=secrets.token_hex(16),
        )
        mark.write_text(self._study.mark_text)
        deadline = time.monotonic() + GREET_SECONDS
        self.hear()
        while any(
            not member.is_ready and (member.facts is not None or time.monotonic() < deadline)
            for member in self._members.values()
        ):
            time.sleep(0.02)
            self.hear()

    def check(self, wanted: Shape) -> None:
        """Checks that there are enough nodes for a candidate.

        Raises:
            UserError: if fewer nodes can train than it needs.
        """
        nodes = [member.node for member in self.ready() if member.node.gpus >= wanted.gpus]
        cpus = sorted((node.cpus for node in nodes), reverse=True)
        # the host with the most servers is the first
        able = sum(has >= wanted.cpus_of(host) for has, host in zip(cpus, range(wanted.hosts), strict=False))
        if able < wanted.hosts:
            raise UserError(self._too_few(wanted, able))

    def close(self) -> None:
        """Ends all agents, and their ranks with them."""
        self._lose_all("is no longer needed")
        self._members.clear()
        for end in (self._heard, self._hears):
            end.close()
        if self._study is not None:
            Path(self._study.mark).unlink(missing_ok=True)

    def hear(self) -> None:
        """Takes in what agents have told, which nodes have left, and which are new.

        Raises:
            HeadGoneError: once, if the head of the cluster is gone, and all hosts with it.
        """
        with contextlib.suppress(BlockingIOError):
            self._heard.recv(4096)
        for member in list(self._members.values()):
            while not member.news.empty() and member.why_gone is None:
                self._take(member, member.news.get())
        if self._study is not None and time.monotonic() - self._looked > LOOK_SECONDS:
            if self.head.is_gone:
                self._lose_all(LOST_HEAD)
            else:
                self._look()
        for node_id, member in list(self._members.items()):
            if member.why_gone is not None:
                del self._members[node_id]
                if not member.is_ready:  # another agent there would fare no better
                    self._refused[node_id] = f"{member.words} {member.why_gone}"
                self.tell(f"{member.words} {member.why_gone}", logging.WARNING)

    def ready(self) -> list[MemberHost]:
        """Returns the hosts that can start ranks."""
        return [member for member in self._members.values() if member.is_ready]

    def avoid(self, member: MemberHost) -> None:
        """Avoids a host on which a rank was slow, while others have room, for `AVOID_SECONDS` from now on."""
        if not self.is_avoided(member):
            minutes = AVOID_SECONDS / 60.0
            self.tell(
                f"{member.words} is avoided for {minutes:.0f} minutes while others have room: it is slow"
            )
        self._avoided[member.node.id] = time.monotonic() + AVOID_SECONDS

    def is_avoided(self, member: MemberHost) -> bool:
        """Tells whether a rank was slow on a host a short time ago."""
        return time.monotonic() < self._avoided.get(member.node.id, 0.0)

    def objection(self, facts: HostFacts) -> str | None:
        """Returns why a host cannot take part; None if it can."""
        for name, version in versions_here().items():
            other_version = facts.versions.get(name)
            if other_version != version:
                return (
                    f"{name} is {other_version} there and {version} where the study runs; install the same on "
                    "all nodes."
                )
        if (facts.devices is None) != (devices_here() is None):
            return (
                "it has CUDA devices and the machine that runs the study has none, or the other way round; "
                "they must be alike."
            )
        nodes = self.head.ask(nodes_alive)
        accepted = facts.asks_for_token or os.environ.get(WITHOUT_TOKEN) == "1"
        if not accepted and not all(ipaddress.ip_address(node.address).is_loopback for node in nodes):
            return NO_TOKEN
        return None

    def tell(self, sentence: str, level: int = logging.INFO) -> None:
        """Says a sentence to people and to the driver's log."""
        LOG.log(level, "%s", sentence)
        self._say(sentence)

    def _take(self, member: MemberHost, news: HostFacts | LogAttempt | list[RankEnded] | str) -> None:
        if isinstance(news, str):
            member.lose(news)
        elif isinstance(news, HostFacts):
            objection = news.objection or self.objection(news)
            if objection is not None:
                member.lose(f"cannot take part: {objection}")
                return
            member.facts = news
            self.tell(f"{member.words} takes part" if member.has_log else f"{member.words} gets the log")
        elif isinstance(news, LogAttempt):
            if news.objection is not None:
                member.lose(f"cannot take part: {news.objection}")
                return
            member.has_log = True
            self.tell(f"{member.words} takes part")
        else:
            for message in news:
                rank = member.ranks.pop((message.run, message.rank), None)
                if rank is not None:
                    rank.exitcode, rank.killed = message.exitcode, message.killed

    def _look(self) -> None:
        """Looks which nodes the cluster has."""
        self._looked = time.monotonic()
        try:
            nodes = {node.id: node for node in self.head.ask(nodes_alive)}
        except HeadGoneError:
            self._lose_all(LOST_HEAD)
            raise
        for node_id, member in self._members.items():
            if node_id not in nodes:
                member.lose(LEFT)
        for node_id, node in nodes.items():
            if node.cpus >= 1 and node_id not in self._members and node_id not in self._refused:
                assert self._study is not None
                self._members[node_id] = MemberHost(node, self._new_agent(node), self._study, self._wake)

    def _lose_all(self, why: str) -> None:
        for member in list(self._members.values()):
            member.lose(why, head_answers=not self.head.is_gone)

    def _new_agent(self, node: Node) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # the reservation of a candidate has the CPUs and devices; its agent counts for none
        return (
            ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE, max_restarts=0)(Agent)
            .options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                runtime_env={"env_vars": AGENT_ENVIRONMENT},
            )
            .remote(self._make_launcher)
        )

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is full, or the study has ended
            self._hears.send(b"!")

    def _too_few(self, wanted: Shape, able: int) -> str:
        there = [
            self._refused.get(node.id)
            or f"node {node.address} ({node.id[:8]}) has {node.cpus:g} CPU(s) and {node.gpus:g} GPU(s)"
            for node in self.head.ask(nodes_alive)
        ]
        fewer = " fewer servers=," if wanted.servers else ""
        return (
            f"a candidate needs {wanted.words}, and {able} of the cluster's can train: {'; '.join(there)}. "
            f"Give smaller ranks= or threads=,{fewer} or add nodes (`ray start --address=HOST:6379`)."
        )


class RemoteRank:
    """A rank on another host, as a `RankProcess`."""

    def __init__(self, member: MemberHost, hosts: Hosts, run: int, rank: int, logs: RankLogs) -> None:
        """Makes a rank that was asked for and not yet heard of; what it leaves is in the trial's directory, where
        `logs` are."""
        self._member, self._hosts, self._run, self._rank, self._logs = member, hosts, run, rank, logs
        self.exitcode: int | None = None
        self.killed: str | None = None
        if member.why_gone is None:
            member.ranks[run, rank] = self
        else:
            self.lost(f"{member.words} {member.why_gone}")

    @property
    def sentinel(self) -> int:
        """See `RankProcess`."""
        return self._hosts.sentinel

    def is_alive(self) -> bool:
        """See `RankProcess`."""
        self._hosts.hear()
        return self.exitcode is None

    def show_stack(self) -> None:
        """See `RankProcess`."""
        self._member.call("show_stacks", self._run)

    def is_stopped(self) -> bool:
        """See `RankProcess`: that is seen on its host alone."""
        return False

    def kill(self) -> None:
        """See `RankProcess`."""
        self._member.call("kill", self._run)

    def join(self) -> None:
        """See `RankProcess`; a host that does not answer is given up."""
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self.is_alive():
            if time.monotonic() > deadline:
                self._member.lose("did not end its ranks when told to")
            connection.wait([self.sentinel], 0.1)

    def lost(self, why: str) -> None:
        """Notes that the host is gone; the candidate is not to blame, and has another try."""
        self.exitcode = LOST
        # a time before that of any peer: these have lost a peer, and say so
        words = LastWords(failed=FailureEvent(error=why, killed=True, host_left=True), unix_seconds=0.0)
        words.leave(self._logs.folder, self._rank)
        with self._logs.path(self._rank).open("a", encoding="utf-8") as log:
            log.write(f"{START_MARK}{why}\n")


WITHOUT_TOKEN = "DHEN_SEARCH_RAY_WITHOUT_TOKEN"
"""The variable that, as 1, accepts a cluster that others reach and that asks nobody for a token."""
NO_TOKEN = (
    "Ray asks nobody for a token there, so whoever reaches the cluster's ports could run anything. Start all "
    "nodes with RAY_AUTH_MODE=token and one token for all (`ray get-auth-token --generate` writes "
    "~/.ray/auth_token), and set the same here. If only trusted machines reach the cluster, as behind a network "
    f"policy of Kubernetes, {WITHOUT_TOKEN}=1 accepts it."
)


LEFT = "has left the cluster"
LOST_HEAD = "is given up: the head of the cluster does not answer"


def nodes_alive() -> list[Node]:
    """Returns the nodes of the cluster that live."""
    import ray

    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _why_gone(error: Exception, *, answered: bool) -> str:
    """Returns what is wrong with an agent in a sentence: its host has left, or it cannot be started there."""
    text = str(error)
    LOG.info("Ray says: %s", " ".join(text.split()))
    if answered:
        return LEFT
    for line in text.splitlines():
        if line.startswith(("ModuleNotFoundError", "ImportError")):
            return f"cannot take part: {line}; install dhen-search there."
    return f"cannot take part: {' '.join(text.split())}"
