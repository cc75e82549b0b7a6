"""`worker`: one more driver of a study that has its ledger on PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import click

from search.execution.clock import StudyClock
from search.log_config import data_option
from search.verbs.output import PATH, FinishedRun, json_option, print_json
from trials.runtime.launcher import Launcher

OUTPUT = FinishedRun


@click.command(
    epilog="""\b
Examples:
  dhen-search run --data log.csv --out runs/ads minutes=600 storage=postgresql://user@host/studies
  dhen-search worker --study postgresql://user@host/studies                and on as many machines as there are
  dhen-search worker --study postgresql://user@host/studies --name ads parallel=2""",
)
@click.argument("words", nargs=-1, metavar="[key=value ...]")
@click.option("--study", metavar="URL", required=True, help="The study's database, as storage= has it.")
@click.option("--name", help="The study's name there; needed if the database holds several.")
@data_option()
@click.option(
    "--out",
    type=PATH,
    help="The run directory (default: the study's own if it is on this machine, else runs/NAME).",
)
@json_option("What the study has come to, as JSON.")
def command(
    words: tuple[str, ...],
    study: str,
    name: str | None,
    data: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Be the second driver, or a further one, of a study that `dhen-search run storage=URL` has begun.

    Drivers share the study's proposals and see each other's results. Any of them may end or be killed: its
    candidates go on at another one, from their checkpoints if the run directory is shared. The driver that has
    the lead at the end confirms the winners and writes report and MLflow; should it die, another does.

    Keys that a further driver may have of its own: parallel, threads, ledger, tracking, optuna.
    """
    clock = StudyClock()  # before what takes seconds to import
    launcher = Launcher(several_ranks=True)
    launcher.warm_up()
    from rich.console import Console

    from search.study.drivers import join
    from search.study.run_session import join_session  # torch is imported here and in the fork server
    from search.verbs.finished_run import finished_run

    record = join_session(
        join(study, name, out, data, words), launcher, clock, Console(stderr=as_json), quiet=as_json
    )
    if as_json:
        print_json(finished_run(record))
