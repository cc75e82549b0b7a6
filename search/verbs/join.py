"""`join`: this machine becomes one of the hosts of a study that another one runs."""

from __future__ import annotations

import platform
from pathlib import Path

import click
from rich.console import Console

from dhen.errors import UserError
from trials.address import host_and_port
from trials.processes.launcher import Launcher

WAIT_SECONDS = 600.0
"""Seconds to wait for the study, as long as torchrun waits at its rendezvous."""


@click.command(
    epilog="""\b
Example, two hosts with four GPUs each:
  first:   dhen-search run --data log.csv ranks=2x4 address=10.0.0.1:29500
  second:  dhen-search join 10.0.0.1:29500 --host 1
""",
)
@click.argument("address", metavar="HOST:PORT")
@click.option("--host", type=int, required=True, envvar="SLURM_NODEID", show_envvar=True, help="Its index.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="For logs (default: the run's directory if shared)."
)
@click.option(
    "--wait", type=float, default=WAIT_SECONDS, show_default=True, help="Seconds for the study to begin."
)
def command(address: str, host: int, out: Path | None, wait: float) -> None:
    """Lend this machine's ranks to the study that waits at HOST:PORT, until it ends.

    The study's log must be here at the same path. Set DHEN_SEARCH_SECRET to the same value on all hosts, and
    nobody else can join.
    """
    console = Console()

    def say(sentence: str) -> None:
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)

    try:
        host_and_port(address)
    except ValueError as error:
        raise UserError(f"{address!r}: {error}.") from None
    launcher = Launcher(several_ranks=True)
    launcher.warm_up()
    from trials.hosts.join import JoinedHost, check_log, join_study

    wire, welcome = join_study(address, host, platform.node(), wait, say)
    check_log(wire, welcome)
    joined = JoinedHost(wire, welcome, launcher, out)
    say(f"joined the study in {welcome.directory} as host {host}; logs are in {joined.logs or 'its trials'}")
    say(f"the study has ended: {joined.serve()}")
