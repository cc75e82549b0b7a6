"""`online`: trains a bundle's network period by period, and leaves an increment after each."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dashboards.figures.curves import PeriodPoint, periods_figure
from dashboards.names import byte_size
from dashboards.report.page import write_figure
from search.bundles.bundle import read_bundle
from search.bundles.increments import Increment, only_trainer
from search.bundles.online import (
    CHECKPOINTS,
    OnlineTraining,
    check_network,
    check_servers,
    online_settings,
    opened,
    time_of,
)
from search.bundles.table_servers import SERVERS, TableServers
from search.dataset import log_files
from search.log_config import data_option, read_options
from search.terminal import print_notes, resumable, step_progress
from search.verbs.output import PATH, OnlineBundle, OnlineIncrement, json_option, print_json
from trials.data.periods import Periods
from trials.data.prepare.prepare_log import prepare

OUTPUT = OnlineBundle
FIGURE = "online.html"
NO_STATE = (
    "the bundle has no optimizer state, so that its first steps are as large as if nothing had been learnt: NE of "
    "the next periods may rise. Bundles of trainings with objective=next_period have it"
)
NO_CHECKPOINT = (
    "there is no checkpoint of the optimizers after the newest increment (increments have none), so that the "
    "first steps are as large as if nothing had been learnt: NE of the next periods may rise"
)


@click.command(
    epilog="""\b
Examples:
  dhen-search online runs/demo/best --data july.csv --out live
  dhen-search online runs/demo/best --data august.csv --out live period=6h
  dhen-search online best --data log.csv --out live period=50000 training.learning_rate=0.0005
  dhen-search online best --data log.csv --out live servers=2 training.tables.synchrony=sync
"""
)
@click.argument("bundle", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[key=value ...]")
@data_option("Rows that came after those the bundle was trained on: files or a folder.", required=True)
@click.option("--out", type=PATH, required=True, help="The bundle that is trained.")
@click.option("--format", "log_format", help="csv, tsv, parquet, criteo or avazu; found out if not given.")
@click.option("--skip-bad-rows", is_flag=True, help="Leave out rows that cannot be read.")
@json_option("Its version and the increments of these rows, as JSON.")
def command(
    bundle: Path,
    overrides: tuple[str, ...],
    data: tuple[str, ...],
    out: Path,
    log_format: str | None,
    skip_bad_rows: bool,
    as_json: bool,
) -> None:
    """Train a bundle's network on newer rows, period by period in the order of time: each period is scored, then
    trained on once, and leaves an increment. Keys: period (1d, 6h, 30m, or a number of rows), servers,
    training.KEY, csv.KEY.

    --out begins as a copy of BUNDLE. It is a bundle at every moment: `predict` uses its newest version. The same
    command goes on after Ctrl-C, and with newer --data later.
    """
    console = Console(stderr=as_json)
    source = read_bundle(bundle)
    check_network(source)
    of_files = [word for word in overrides if word.startswith("csv.")]
    settings = online_settings(source, [word for word in overrides if word not in of_files])
    given: dict[str, Any] = {"format": log_format, "skip_bad_rows": skip_bad_rows or None}
    if settings.servers is not None:
        check_servers(source.job(), settings.servers)
    with resumable(console, out), only_trainer(out), step_progress(console) as progress:
        log = prepare(
            log_files(data),
            encoding=source.encoding,
            options=read_options(of_files, **given),
            joins_splits=True,
            progress=progress,
        )
        periods = Periods.of(log, settings.period)
        opened_bundle = opened(source, out)
        notes = list(log.notes)
        if periods.left_out:
            notes.append(f"rows without a time stamp are left out: {periods.left_out:,}")
        if settings.training.frequency_decay:
            notes.append("training.frequency_decay is 0 online: how often an id will occur is not known")
        if settings.training.table_decay:
            notes.append(
                "training.table_decay changes every row of every table: increments are as large as bundles"
            )
        job = settings.job(opened_bundle)
        servers = None
        if settings.servers is not None:
            servers = TableServers(job, settings.servers, log.directory, out / CHECKPOINTS / SERVERS)

        def stays() -> str:
            number = read_bundle(out).version.number
            return f"{out} stays at version {number}; the same command goes on from there."

        with servers.watched(stays) if servers is not None else nullcontext():
            online = OnlineTraining(opened_bundle, job, servers)
            if online.optimizers_begin_anew:
                notes.append(NO_CHECKPOINT if online.increments else NO_STATE)
            print_notes(console, notes)
            online.done(periods)  # refuses a log with which time goes back, before anything is said of it
            for increment in online.of(log):
                console.print(_line(increment), soft_wrap=True, highlight=False)
            try:
                rows = len(periods.rows)
                for increment in online.train(periods, lambda done: progress("training", done, rows)):
                    console.print(_line(increment), soft_wrap=True, highlight=False)
            finally:
                write_figure(periods_figure([*map(_point, online.increments)]), out / FIGURE)
    if as_json:
        print_json(
            OnlineBundle(
                bundle=str(out),
                version=online.version,
                figure=str(out / FIGURE),
                notes=tuple(notes),
                increments=tuple(
                    OnlineIncrement(
                        period=_name(increment),
                        increment=increment.info.number,
                        online=increment.info.period.online,
                        frozen=increment.info.period.frozen,
                        begun=increment.info.begun,
                        gone=increment.info.gone,
                        size_bytes=increment.bytes,
                    )
                    for increment in online.of(log)
                ),
            )
        )
        return
    console.print(f"{out}: version {online.version}; figure: {out / FIGURE}", soft_wrap=True)


def _line(increment: Increment) -> str:
    period, info = increment.info.period, increment.info
    online, frozen = period.online, period.frozen
    ids = (
        f"; {info.begun:,} ids have got rows, {info.gone:,} have lost theirs"
        if info.begun or info.gone
        else ""
    )
    ne = f"NE {online.ne:.5f} online, {frozen.ne:.5f} as it was ({100 * (online.ne / frozen.ne - 1):+.2f} %)"
    if math.isnan(online.ne):
        ne = "whose labels are all equal, so that no NE is known"
    return (
        f"{_name(increment)}: {online.examples:,} rows, {ne}{ids}; increment {info.number}, "
        f"{byte_size(increment.bytes)}"
    )


def _name(increment: Increment) -> str:
    period = increment.info.period
    return f"period {period.number}" if period.first is None else time_of(period.first)


def _point(increment: Increment) -> PeriodPoint:
    period = increment.info.period
    return PeriodPoint(
        name=_name(increment),
        examples=period.online.examples,
        online=period.online.ne,
        frozen=period.frozen.ne,
        ne_floor=period.ne_floor,
    )
