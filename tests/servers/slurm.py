"""A Slurm cluster on this machine: its controller and two nodes, as their Debian packages have them."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools import program, tool

TIMEOUT_SECONDS = 60
NODES, CPUS = ("n1", "n2"), 2
CONF = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr={address} Port={ports[1]} CPUs={cpus} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr={address} Port={ports[2]} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm_cluster() -> Iterator[dict[str, str]]:
    """Gives the environment of commands that use the cluster; nothing of it is left."""
    tool("slurm")
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        addresses = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
        address = next((one for one in addresses if ":" not in one), "127.0.0.1")
        conf = CONF.format(
            host=socket.gethostname(), address=address, ports=_free_ports(3), folder=folder, cpus=CPUS
        )
        (folder / "slurm.conf").write_text(conf)
        places = ("key-file", "munge.key"), ("socket", "munge.socket"), ("pid-file", "munge.pid")
        places += ("log-file", "munge.log"), ("seed-file", "munge.seed")
        munged = [f"--{option}={folder / file}" for option, file in places]
        environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        try:
            for words in (
                ["munged", "--foreground", "--force", *munged],
                ["slurmctld", "-D"],
                *(["slurmd", "-D", "-N", node] for node in NODES),
            ):
                command = program(words[0])
                assert command is not None
                with (folder / f"{words[0]}.out").open("ab") as output:
                    processes.append(
                        subprocess.Popen(
                            [command, *words[1:]], env=environment, stdout=output, stderr=subprocess.STDOUT
                        )
                    )
                if words[0] == "munged":
                    _until(lambda: (folder / "munge.socket").exists(), folder)
            _until(lambda: _idle(environment) == len(NODES), folder)
            yield environment
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                process.wait(TIMEOUT_SECONDS)


def _idle(environment: dict[str, str]) -> int:
    words = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    return len(subprocess.run(words, env=environment, capture_output=True, text=True).stdout.split())


def _until(there: object, folder: Path) -> None:
    assert callable(there)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not there():
        said = "\n".join(file.read_text() for file in folder.glob("*.out"))
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    listeners = [socket.socket() for _ in range(count)]
    for listener in listeners:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
