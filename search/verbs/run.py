"""`run`: the main job, from a click log to the best DHEN."""

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
  dhen-search run                                  the demo log, into runs/demo
  dhen-search run --data log.csv minutes=60
  dhen-search run --data log.csv trials=50 confirm=5
  dhen-search run --data log.csv cluster=zionex ranks=2x8
  dhen-search run --data log.csv ranks=2x4 launcher=ray              on a Ray cluster
  dhen-search run study.yaml --out runs/mine space=wide training.epochs=1
  dhen-search run --data log.csv --out runs/more space=wide warm_start=runs/log
  dhen-search run runs/log trials=100                                go on with a run
""",
)
@click.argument("words", nargs=-1, metavar="[STUDY.yaml|RUN] [key=value ...]")
@data_option()
@click.option("--out", type=PATH, help="The run directory (default runs/NAME).")
@json_option("What the study has come to, as JSON.")
def command(words: tuple[str, ...], data: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Search for the DHEN with the best NE for its FLOPs; the same command resumes it.

    \b
    Keys, by what they are about:
      budget      minutes, trials, search_until, worth, tune
      space       space, grow, warm_start, start_from
      proposals   sampler, seed, proposals, stopping
      trainings   training.KEY, baseline, baseline_trials
      objective   objective, period
      winners     averages, distil, origins, refit, confirm, block_by
      serving     serving.KEY, max_table_bytes
      machines    parallel, threads, cluster, ranks, hbm, launcher
      memory      prefer, technique, servers, memory_margin, enforce_memory
      log         format, csv.KEY, label, weight, columns.NAME, schema_file, skip_bad_rows
      rows        split.KEY, growing.KEY, demo.KEY
      records     name, storage, tracking, register_model, optuna

    Keys with a dot are paths into the study file, e.g. training.batch_size=4096, serving.max_ms=5 or
    demo.rows=1000000; the run directory's study.yaml has them all with their values.
    """
    clock = StudyClock()  # before what takes seconds to import: `minutes` are of the whole command
    launcher = Launcher(several_ranks=any(word.startswith("ranks=") for word in words))
    launcher.warm_up()
    from search.study.run_session import (
        run_session,  # torch is imported here and in the fork server side by side
    )
    from search.verbs.finished_run import finished_run

    record = run_session(words, data, out, launcher, clock, quiet=as_json)
    if as_json:
        print_json(finished_run(record))
