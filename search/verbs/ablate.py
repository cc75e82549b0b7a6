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
from search.study.run_session import FinishedStudy, finished_study
from search.terminal import print_table
from trials.records.findings import Ablation
from trials.records.trial_record import TrialKind, TrialRecord

OUTPUT = Ablation
COLUMNS = ("Removed", "NE without it", "95 % interval", "FLOPs without it", "Its share of FLOPs")


@click.command(epilog="Example: dhen-search ablate runs/demo --pick knee --seeds 3")
@click.argument("directory", type=click.Path(path_type=Path))
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
@click.option("--json", "as_json", is_flag=True, help="As JSON (trials.records.findings.Ablation).")
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
        ablation = _ablation(study, trial, seeds)
        study.ledger.keep_analysis(ablation)
    if as_json:
        click.echo(ablation.model_dump_json(indent=1))
        return
    console.print(
        f"trial {trial.number} ({trial_name(trial)}), {si(ablation.flops)} FLOPs, {len(ablation.seeds)} seeds; "
        f"above 0 the part is worth that much NE on {ablation.split}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    print_table(plain_table(COLUMNS, _rows(ablation), COLUMNS[:1]))


def _ablation(study: FinishedStudy, trial: TrialRecord, seeds: int) -> Ablation:
    """The ablation of a network, or of an average over the blocks of its comparison with the baseline."""
    if trial.kind is not TrialKind.AVERAGE:
        return ablate(study.record, trial, study.log, study.retrainings, seeds=seeds)
    compared = study.record.comparison(trial.number)
    block_by = compared.blocked_by if compared else study.config.block_by
    return ablate_average(study.record, trial, study.log, study.retrainings, seeds=seeds, block_by=block_by)


def _rows(ablation: Ablation) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for part in ablation.parts:
        ne = part.ne_percent
        between = percent_range(ne.low, ne.high) if ne else MISSING
        mean = percent(ne.mean) if ne else MISSING
        name = counted_from_one(part.removed)
        rows.append((name, mean, between, si(part.flops), f"{decimals(part.flops_percent, 1)} %"))
    return rows
