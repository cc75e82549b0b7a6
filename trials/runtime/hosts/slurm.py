"""A Ray cluster on the nodes of a Slurm allocation, which lives as long as the study's command.

Slurm places, limits and ends: each node's part of the cluster is in a step of the job (`srun`), so nothing of it
outlives the job. The cluster asks for a token that is made for it, since other jobs reach the nodes too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from dhen.errors import UserError

LOG = logging.getLogger(__name__)
JOB, NODES, HERE = "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"
"""Variables that Slurm sets in a job: its number, its nodes, and the node of this process."""
ADDRESS = "RAY_ADDRESS"
"""Variable that names the cluster to Ray."""
PORTS = range(20_000, 30_000)
"""Ports of which the head takes one, by the job's number: two jobs of one node seldom meet."""
START_SECONDS = 180.0
"""Seconds in which all nodes are to be there: Ray is read from a file system that all nodes may share."""
FAREWELL_SECONDS = 20.0
PAUSE_SECONDS = 0.2
LONGEST = 600
"""Letters of what is quoted of a step that has failed."""
ALLOCATE = (
    "launcher=slurm starts a Ray cluster on the nodes of a Slurm job and works inside one: "
    "`sbatch --nodes=2 --ntasks-per-node=1 --cpus-per-task=8 "
    "--wrap 'dhen-search run ... ranks=2x8 launcher=slurm'`"
)


class _Step(NamedTuple):
    """A step of the job, which is there while its `srun` is."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def last_words(self) -> str:
        """Returns the last lines of what it has said."""
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").splitlines()
        return " / ".join(line.strip() for line in lines if line.strip())[-LONGEST:]


class JobCluster:
    """The Ray cluster of a Slurm job: a step of the job for its head, and one for its other nodes."""

    def __init__(self, nodes: list[str], node: str) -> None:
        """Starts the head on the node of this process, then the others.

        Args:
            nodes: names of the job's nodes.
            node: the name of this process's.

        Raises:
            UserError: if the head does not start.
        """
        show = [_command("scontrol"), "--oneliner", "show", "node", node]
        shown = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        match = re.search(r"NodeAddr=(\S+)", shown)  # the address at which the other nodes reach this one
        reached = socket.gethostbyname(match[1] if match else node)
        self.address = f"{reached}:{PORTS[int(os.environ[JOB]) % len(PORTS)]}"
        self._nodes = nodes
        self._steps: list[_Step] = []
        host, _, port = self.address.partition(":")
        self._start(
            [node], "--head", f"--port={port}", f"--node-ip-address={host}", "--include-dashboard=false"
        )
        try:
            self._wait(lambda: _answers(host, int(port)), f"node {node}")
            others = [one for one in nodes if one != node]
            if others:
                self._start(others, f"--address={self.address}")
        except BaseException:
            self.end()
            raise

    def wait_for_nodes(self, alive: Callable[[], int]) -> None:
        """Waits until all nodes of the job are nodes of the cluster; `alive` counts these.

        Raises:
            UserError: if they do not start.
        """
        self._wait(lambda: alive() >= len(self._nodes), f"nodes {', '.join(self._nodes)}")

    def end(self) -> None:
        """Ends the steps, with all that they have started."""
        for step in self._steps:
            step.process.terminate()
        deadline = time.monotonic() + FAREWELL_SECONDS
        for step in self._steps:
            try:
                step.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                step.process.kill()  # Slurm ends the step of a srun that is gone
                step.process.wait()
            step.output.close()

    def _start(self, nodes: list[str], *words: str) -> None:
        # CPUs are the job's on each node, and Ray would count those of the machine
        ray = " ".join((_command("ray"), "start", *words, "--num-cpus=$SLURM_CPUS_ON_NODE", "--block"))
        srun = [_command("srun"), "--overlap", f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}"]
        output = tempfile.TemporaryFile()  # noqa: SIM115, closed by `end`
        process = subprocess.Popen(
            [*srun, f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "bash", "-c", f"exec {ray}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the driver, which then ends the steps
        )
        self._steps.append(_Step(process, output))

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            gone = [step for step in self._steps if step.process.poll() is not None]
            if gone or time.monotonic() > deadline:
                why = (
                    f"exit code {gone[0].process.returncode}" if gone else f"not within {START_SECONDS:.0f} s"
                )
                said = (gone or self._steps)[0].last_words()
                raise UserError(f"launcher=slurm: Ray does not start on {what} ({why}): {said}")
            time.sleep(PAUSE_SECONDS)


@contextlib.contextmanager
def cluster_of_the_job() -> Iterator[JobCluster]:
    """A Ray cluster on all nodes of this job; the environment of this process names it meanwhile.

    Raises:
        UserError: outside of a job, without the commands of Slurm or Ray, and if the head does not start.
    """
    node = os.environ.get(HERE)
    if JOB not in os.environ or node is None:
        raise UserError(f"{ALLOCATE}.")
    listed = subprocess.run(
        [_command("scontrol"), "show", "hostnames", os.environ[NODES]],
        capture_output=True,
        text=True,
        check=True,
    )
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in (*token, ADDRESS)}
    os.environ |= token
    os.environ.pop(ADDRESS, None)  # of another cluster, which `ray start` would take for its own
    try:
        cluster = JobCluster(listed.stdout.split(), node)
        try:
            os.environ[ADDRESS] = cluster.address
            LOG.info("Ray cluster of Slurm job %s at %s", os.environ[JOB], cluster.address)
            yield cluster
        finally:
            cluster.end()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _command(name: str) -> str:
    """Returns the path of a command: of this Python's environment, else of the machine."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UserError(f"launcher=slurm: there is no command {name} here.")
    return found


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
