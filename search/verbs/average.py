"""`average`: is a mean of several of a study's networks better than any of them?"""

from __future__ import annotations

from pathlib import Path

import click

from dhen.errors import UserError
from search.config import DEFAULT_AVERAGED, written_config
from search.read_study import read_finished_study, read_study
from search.study.run_session import run_session
from search.verbs.finished_run import finished_run
from search.verbs.output import PATH, FinishedRun, json_option, print_json
from trials.runtime.launcher import Launcher

OUTPUT = FinishedRun


@click.command(
    epilog="""\b
Examples:
  dhen-search average runs/demo
  dhen-search average runs/demo --most 5 --seeds 3
"""
)
@click.argument("directory", type=PATH)
@click.option("--most", default=DEFAULT_AVERAGED, show_default=True, help="Networks in an average.")
@click.option(
    "--seeds",
    default=1,
    show_default=True,
    help="Trainings of the best network that may be members; 1: as it is.",
)
@json_option("What the study has come to, as JSON.")
def command(directory: Path, most: int, seeds: int, as_json: bool) -> None:
    """Make averages of the networks on the front of the finished study in DIRECTORY, with their FLOPs together.

    Chosen on validation for what they are worth at their FLOPs, they are trials like others: on the front, in the
    report, in MLflow, scored on test, exported as one bundle. With one seed the same as `dhen-search run` with
    averages=N, from the start or later. After Ctrl-C the same command goes on.
    """
    if most < 2:
        raise UserError(f"--most {most}: an average is of two networks at least, such as --most 3.")
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: 1 takes the best network as it is, 3 trains it twice more.")
    study = read_study(directory)
    if study.running:
        raise UserError(f"{directory}: another process is running this study; wait for it to end.")
    if study.finished_at is None:  # else it was finished once, and this very command may have been cut short
        read_finished_study(directory)
    config = written_config(directory)
    launcher = Launcher(several_ranks=config.ranks is not None)
    launcher.warm_up()
    words = (f"averages={most}",)
    record = run_session(words, (), directory, launcher, quiet=as_json, average_seeds=seeds)
    if as_json:
        print_json(finished_run(record))
