"""A task on hosts of a Ray cluster as one run: its ranks are watched like those of this machine.

A host that leaves ends the run on all of them; a run waits until what it needs is reserved before it starts.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from trials.records.events import Event, SlowRank
from trials.records.task import Task
from trials.records.trial_record import MOVED
from trials.runtime.hosts.hosts import FAREWELL_SECONDS, Hosts, MemberHost, RemoteRank
from trials.runtime.hosts.placement import IDLE_SECONDS, Place, Reservation, Reservations, shape
from trials.runtime.hosts.ray_connection import free_on_nodes
from trials.runtime.launcher import Replacements, Run, device_words, forget_last_run

LOG = logging.getLogger(__name__)
PATIENCE_SECONDS = 3.0
"""Seconds that a run waits for its reservation before it says so."""
AVOIDING_SECONDS = 10.0
"""Seconds that a run waits for hosts on which no rank was slow, after which it takes any: Ray needs up to a second
to give back what was reserved."""
MOST_MOVES = 2
"""Number of times that a candidate is moved because a rank of it was slow; then it may be its own work."""
PATHS = ("log_directory", "start_from", "resume_from", "teacher")
"""Fields of a task that name files, which its hosts have at the same paths."""


class HostsLauncher:
    """Starts tasks on hosts of a Ray cluster."""

    def __init__(self, hosts: Hosts) -> None:
        """`hosts` are those of the study."""
        self._hosts, self.reservations = hosts, Reservations(hosts.head)
        self._moves = Counter[Path]()

    def start(self, task: Task, directory: Path) -> HostsRun:
        """Starts the task's ranks as soon as all hosts, CPUs and devices that it needs are reserved."""
        number = next(self._hosts.run_numbers)
        return HostsRun(self._hosts, self.reservations, number, task, directory.absolute(), self._moves)


class _HostGoneError(Exception):
    """The first host of a run is gone just as its ranks are to start."""


class HostsRun:
    """A `Run` whose ranks are on hosts of a Ray cluster."""

    def __init__(
        self,
        hosts: Hosts,
        reservations: Reservations,
        number: int,
        task: Task,
        directory: Path,
        moves: Counter[Path],
    ) -> None:
        """Asks for hosts, and starts the ranks if they are there, else when they are; `moves` counts how often
        candidates were moved, by their directories."""
        self._moves = moves
        self._members: list[MemberHost] = []
        self._devices: list[tuple[str, ...]] = []
        self._hosts, self._reservations, self._number = hosts, reservations, number
        self._task, self._directory = task, directory
        self._reservation: Reservation | None = None
        self._wanted = shape(
            task.hosts, task.gpus_per_host, task.threads, task.strategy.servers, hosts.on_device
        )
        self._asked, self._said = time.monotonic(), False
        self._run: Run | None = None
        self._given_up = False
        self._start_if_reserved()

    @property
    def ended(self) -> bool:
        """See `Run`."""
        return self._given_up if self._run is None else self._run.ended

    @property
    def sentinels(self) -> list[int]:
        """See `Run`."""
        return [] if self._run is None else self._run.sentinels

    def new_events(self) -> list[Event]:
        """See `Run`; none while hosts are waited for."""
        if self._run is None:
            if not self._given_up:
                self._start_if_reserved()
            if self._run is None:
                return []
        events = self._run.new_events()
        if self._run.ended:
            self._give_back()
        return events

    def kill(self) -> None:
        """See `Run`."""
        self._given_up = True
        if self._run is not None:
            self._run.kill()
            self._give_back()  # nobody need ask for its events any more
        else:
            self._cancel()

    def _cancel(self) -> None:
        if self._reservation is not None:
            self._reservation.cancel()
            self._reservation = None

    def _give_back(self) -> None:
        if self._reservation is not None:
            self._reservations.give_back(self._reservation)
            self._reservation = None

    def _start_if_reserved(self) -> None:
        self._hosts.hear()
        # what is kept for others may be what this one waits for
        self._reservations.drop_idle(IDLE_SECONDS if self._reservation is None else 0.0)
        ready = {member.node.id: member for member in self._hosts.ready()}
        places = self._reserved(self._preferred(ready))
        if places is not None:
            self._members = [ready[place.node] for place in places]
            self._devices = [place.devices for place in places]
            for member in filter(self._hosts.is_avoided, self._members):
                self._hosts.tell(f"{member.words} is slow, and is used as no other node has room")
            try:
                self._run = self._started(self._members, self._devices)
            except _HostGoneError:  # just now: hosts are asked for anew at the next look
                self._cancel()
        elif not self._said and time.monotonic() - self._asked > PATIENCE_SECONDS:
            self._said = True
            self._hosts.tell(f"waiting for {self._wanted.words}: {len(ready)} node(s) take part")

    def _preferred(self, ready: Mapping[str, MemberHost]) -> Set[str]:
        """Returns the nodes that are asked for: those on which no rank was slow, if they are enough and have
        room within a while; else all."""
        fast = {node for node, member in ready.items() if not self._hosts.is_avoided(member)}
        waits = time.monotonic() - self._asked < AVOIDING_SECONDS
        return fast if len(fast) >= self._wanted.hosts and waits else ready.keys()

    def _slow(self, slow: SlowRank) -> SlowRank:
        """Says where a slow rank is, and moves the candidate if there is room without its host."""
        host = next(host for host in range(self._task.hosts) if slow.rank in self._ranks_of(host))
        member, ranks = self._members[host], self._ranks_of(host)
        devices = self._devices[host]
        device = devices[slow.rank - ranks.start] if devices else None
        slow = slow.replace(where=device_words(member.words, device))
        self._hosts.avoid(member)
        if self._moves[self._directory] >= MOST_MOVES:
            return slow.replace(then=f"and trains on, as the candidate was moved {MOST_MOVES} times already")
        if not self._has_room_elsewhere():
            return slow.replace(then="and trains on, as no other node has room")
        self._moves[self._directory] += 1
        return slow.replace(then=MOVED, moves=True)

    def _ranks_of(self, host: int) -> range:
        """Returns the ranks on one of the hosts."""
        per_host = self._task.gpus_per_host
        return range(host * per_host, (host + 1) * per_host)

    def _has_room_elsewhere(self) -> bool:
        """Tells whether enough nodes on which no rank was slow have room, with what this run gives back there."""
        free, wanted = self._hosts.head.ask(free_on_nodes), self._wanted
        mine = {member.node.id: host for host, member in enumerate(self._members)}
        cpus = list[float]()
        for member in self._hosts.ready():
            node = member.node.id
            if self._hosts.is_avoided(member) or node not in free:
                continue
            own_cpus = wanted.cpus_of(mine[node]) if node in mine else 0.0
            own_gpus = wanted.gpus if node in mine else 0.0
            gpus = free[node].get("GPU", 0.0) + self._reservations.room_on(node, "GPU") + own_gpus
            if gpus >= wanted.gpus:
                cpus.append(free[node].get("CPU", 0.0) + self._reservations.room_on(node, "CPU") + own_cpus)
        cpus.sort(reverse=True)
        able = sum(has >= wanted.cpus_of(host) for has, host in zip(cpus, range(wanted.hosts), strict=False))
        return able >= wanted.hosts

    def _reserved(self, ready: Set[str]) -> tuple[Place, ...] | None:
        """Returns the places of the ranks; None if they are not reserved yet."""
        if self._reservation is not None:
            places = self._reservation.places()
            some_left = bool(self._reservation.nodes - ready)
            if some_left or (places is None and ready - self._reservation.nodes):
                self._reservation.cancel()  # asked for anew among the nodes that there are now
                self._reservation = None
            else:
                return places
        if len(ready) >= self._wanted.hosts:
            self._reservation = self._reservations.ask(self._wanted, ready)
            return self._reservation.places()
        return None

    def _started(self, members: list[MemberHost], devices: list[tuple[str, ...]]) -> Run:
        task, logs = self._prepared(members), self._task.logs(self._directory)
        host_of = {process: host for host in range(task.hosts) for process in task.processes_of(host)}
        forget_last_run(self._directory, host_of)

        def start(its_task: Task, numbers: Sequence[int]) -> list[RemoteRank]:
            host = host_of[numbers[0]]
            member, there = members[host], its_task.replace(host=host, devices=devices[host] or None)
            member.call("start", self._number, there.to_dict(), str(self._directory), [*numbers])
            named = ", ".join(map(str, numbers))
            LOG.info("%s: ranks and servers %s are on %s", self._directory, named, member.words)
            return [RemoteRank(member, self._hosts, self._number, number, logs) for number in numbers]

        def anew(again: Task, number: int) -> RemoteRank:
            forget_last_run(self._directory, [number])
            (rank,) = start(again, [number])
            return rank

        processes = dict[int, RemoteRank]()
        for host in range(task.hosts):
            its = task.processes_of(host)
            processes |= dict(zip(its, start(task, its), strict=True))
        return Run(
            processes,
            logs,
            deadline_seconds=task.deadline_seconds,
            replacements=Replacements(task, anew),
            slow=self._slow,
        )

    def _prepared(self, members: list[MemberHost]) -> Task:
        """Returns the task with absolute paths, and a port of its own on its first host if it has several."""
        paths = {name: getattr(self._task, name) for name in PATHS}
        absolute = {name: str(Path(path).absolute()) for name, path in paths.items() if path is not None}
        task = self._task.replace(**absolute)
        if len(members) == 1:
            return task
        import ray

        address = members[0].node.address
        try:
            port = ray.get(members[0].agent.free_port.remote(address), timeout=FAREWELL_SECONDS)
        except ray.exceptions.RayError as error:
            members[0].lose(f"does not answer ({type(error).__name__})")
            raise _HostGoneError from error
        return task.replace(address=f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
