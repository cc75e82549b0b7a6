"""`ablate`: what is each part of a winner, or each member of an average, worth?"""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from dashboards.names import MISSING, counted_from_one, decimals, percent, percent_range, si, trial_name
from dashboards.terminal.tables import plain_table
from search.analysis.ablate import ablate, ablate_average
from search.analysis.confirm import SEEDS, fresh_seeds
from search.selection import picked
from search.study.run_session import finished_study
from search.terminal import print_line, print_table
from search.verbs.output import PATH, json_option
from trials.records.findings import Ablation
from trials.records.trial_record import TrialKind

OUTPUT = Ablation
COLUMNS = ("Removed", "NE without it", "95 % interval", "FLOPs without it", "Its share of FLOPs")


@click.command(epilog="Example: dhen-search ablate runs/demo --pick knee --seeds 3")
@click.argument("directory", type=PATH)
@click.option(
    "--pick",
    "how",
    default="best",
    show_default=True,
    help="best, lowest, knee, 'flops<=X', 'ms<=X', 'table_bytes<=X', a number.",
)
@click.option(
    "--seeds", default=SEEDS, show_default=True, help="Trainings of the whole and without each part."
)
@json_option("As JSON (trials.records.findings.Ablation).")
def command(directory: Path, how: str, seeds: int, as_json: bool) -> None:
    """Remove each module and each layer of a winner in turn, train the rest again, and say what it was worth.

    In NE on validation relative to the whole network, over seeds, and in FLOPs. Of an average each member is
    removed in turn, and NE is that on test of the retrainings that `dhen-search confirm` makes too. What is
    trained is kept: the same command goes on.
    """
    fresh_seeds(0, seeds)
    console = Console(stderr=as_json)
    with finished_study(directory, console) as study:
        trial = picked(study.record, how)
        arguments = (study.record, trial, study.log, study.retrainings)
        if trial.kind is TrialKind.AVERAGE:
            # over the blocks of its comparison with the baseline
            compared = study.record.comparison(trial.number)
            block_by = compared.blocked_by if compared else study.config.block_by
            ablation = ablate_average(*arguments, seeds=seeds, block_by=block_by)
        else:
            ablation = ablate(*arguments, seeds=seeds)
        study.ledger.keep_analysis(ablation)
    if as_json:
        click.echo(ablation.model_dump_json(indent=1))
        return
    print_line(
        console,
        f"trial {trial.number} ({trial_name(trial)}), {si(ablation.flops)} FLOPs, {len(ablation.seeds)} seeds; "
        f"above 0 the part is worth that much NE on {ablation.split}",
    )
    rows = []
    for part in ablation.parts:
        ne = part.ne_percent
        between = percent_range(ne.low, ne.high) if ne else MISSING
        mean = percent(ne.mean) if ne else MISSING
        name = counted_from_one(part.removed)
        rows.append((name, mean, between, si(part.flops), f"{decimals(part.flops_percent, 1)} %"))
    print_table(plain_table(COLUMNS, rows, COLUMNS[:1]))
