"""`leaderboard`: a study's winners at a glance, with what they cost and the command that takes each away."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import cast

import click
from rich.console import Console

from dashboards.leaderboard import KEYS, By, Leaderboard, leaderboard, leaderboard_table
from dashboards.sentences.winners import confirm_command
from search.read_study import read_study
from search.terminal import print_line
from search.verbs.output import PATH, json_option

OUTPUT = Leaderboard
WIDTH = 100
"""Columns of output that does not go to a terminal, which has a width of its own."""


@click.command(
    epilog="""\b
Examples:
  dhen-search leaderboard runs/demo
  dhen-search leaderboard runs/demo --all --by flops
"""
)
@click.argument("directory", type=PATH)
@click.option(
    "--all", "everything", is_flag=True, help="Every finished trial, after the winners and the front."
)
@click.option(
    "--by",
    type=click.Choice(KEYS),
    default="ne",
    show_default=True,
    help="ms: forward time; test: NE on test.",
)
@json_option("As JSON (dashboards.leaderboard.Leaderboard).")
def command(directory: Path, everything: bool, by: str, as_json: bool) -> None:
    """The study in DIRECTORY, finished or not: baseline and winners, then the rest of the front, lowest NE first.

    NE is on validation; the interval is that of `dhen-search confirm`, on test. The technique is the one that a
    trial was trained under, the peak the predicted one.
    """
    record = read_study(directory, brief=True)
    board = leaderboard(record, by=cast(By, by), everything=everything)
    if as_json:
        click.echo(board.model_dump_json(indent=1))
        return
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    if not board.rows:
        if board.finished_trials:
            ended = (
                f"{board.finished_trials} trials of the study in {directory} have ended, none with a result"
            )
            console.print(f"{ended}; --all shows them, `dhen-search status {directory}` why.", soft_wrap=True)
            return
        running = "its first trainings are under way" if record.running else "its command goes on"
        console.print(f"no trial of the study in {directory} has ended yet; {running}.", soft_wrap=True)
        return
    table, no_room = leaderboard_table(board, console.width)
    console.print(table)
    shown = f"{len(board.rows)} of {board.finished_trials} finished trials"
    more = f"{shown}; --all shows every one" if len(board.rows) < board.finished_trials else shown
    state = "" if record.finished else "; still running" if record.running else "; not finished"
    no_times = board.by == "ms" and all(row.forward_ms is None for row in board.rows)
    by_ne = "no forward time is known (serving.max_ms=): in the order of NE" if no_times else None
    for line in filter(None, (more + state, by_ne, no_room)):
        print_line(console, line, "dim")
    for row in board.rows:
        if row.export is not None and {"best", "knee", "winner", "baseline"} & set(row.marks):
            print_line(console, f"take trial {row.trial} away: {row.export}")
    if any(row.export is not None and row.marks == ("front",) for row in board.rows):
        export = f"dhen-search export {shlex.quote(record.directory)} --pick TRIAL --out BUNDLE"
        print_line(console, f"take another of the front away: {export}")
    if record.finished and not record.comparisons and record.front:
        print_line(console, f"no intervals yet: {confirm_command(record)}")
