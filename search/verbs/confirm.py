"""`confirm`: are a study's winners better than the baseline?"""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from dashboards.sentences.winners import explanation, verdict, winners_table
from dashboards.terminal.tables import plain_table
from search.analysis.confirm import SEEDS, confirm, fresh_seeds
from search.read_study import read_study
from search.run_directory import REPORT
from search.study.run_session import finished_study
from search.terminal import print_line, print_table
from search.verbs.output import PATH, json_option
from trials.records.study_record import Comparison

OUTPUT = list[Comparison]


@click.command(
    epilog="""\b
Examples:
  dhen-search confirm runs/demo
  dhen-search confirm runs/demo --seeds 10 --block-by user_id --json
"""
)
@click.argument("directory", type=PATH)
@click.option(
    "--seeds", default=SEEDS, show_default=True, help="Trainings of each winner and of the baseline."
)
@click.option(
    "--block-by",
    help="A categorical column whose rows are resampled together, such as a user's id; `time`: rows that lie "
    "together in time. By default the study's block_by.",
)
@json_option("The comparisons as JSON (trials.records.study_record.Comparison).")
def command(directory: Path, seeds: int, block_by: str | None, as_json: bool) -> None:
    """Retrain the winners of the finished study in DIRECTORY and its baseline from several seeds; compare on test.

    Winners are five at most, chosen before test was looked at: the best, the knee, the best network, the best
    average, and the best with fewer FLOPs than the baseline.

    Says of each whether it is better than the baseline (yes, no, cannot tell), with a 95 % interval over seeds
    and blocks of examples, and the smallest difference that could have been found. What is trained is kept: the
    same command goes on, and more seeds add to those there are.
    """
    fresh_seeds(0, seeds)
    console = Console(stderr=as_json)
    with finished_study(directory, console) as study:
        comparisons, failed = confirm(
            study.record,
            study.log,
            study.ledger,
            study.retrainings,
            seeds=seeds,
            block_by=block_by or study.config.block_by,
        )
    if as_json:
        click.echo(json.dumps([comparison.to_dict() for comparison in comparisons], indent=1))
        return
    for line in failed:
        console.print(line, style="yellow", soft_wrap=True, markup=False)
    record = read_study(directory)
    best = record.comparison(record.best)
    print_table(plain_table(*winners_table(record)))
    for sentence in (explanation(record), verdict(best) if best else None):
        print_line(console, sentence or "")
    console.print(f"report: {directory / REPORT}", soft_wrap=True)
