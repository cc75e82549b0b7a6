"""`plan`: the ladder of memory techniques for a configuration, priced on clusters; needs no GPU and no data.

`--json` is a list of plans, one per cluster in the order asked for: `cluster`, `hosts`, `gpus_per_host`,
`hbm`, `verified`, `examples_per_rank`, `batch_size`, `precision`, `chosen` (a strategy's name, or null
if none fits), `strategies` (fewer techniques first), `remedy`, `faster` (sentences or null), `notes`, and
`other_shapes` (of each other shape of `--ranks 1x1,1x2` that was tried, why it does not do).
Each strategy has `name`, `techniques`, `memory` (bytes by item and `total`), `step` (seconds by item and
`total`), `examples_per_second`, `fits`, `lacking_bytes` and `reason`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dashboards.figures.curves import deepest_that_fit, sweep_figure
from dashboards.names import byte_size, short_name
from dashboards.report.page import write_figure
from dashboards.terminal.plan_ladder import ladder_table, parts_table, reasons, selection
from dhen.config import DhenConfig
from dhen.errors import UserError
from search.config import HELD_KEYS, LOG_KEYS, held_config
from search.execution.attempts import plan_options
from search.execution.plan_trial import declared_clusters
from search.log_config import data_option, set_override
from search.plan_request import (
    PlanRequest,
    fits_nowhere,
    for_cluster,
    in_least_shape,
    log_to_read,
    read_request,
)
from search.verbs.output import PATH, PlannedCluster, StrategyPrice, json_option, print_json
from trials.cluster.cluster import Cluster, parse_bytes
from trials.cluster.this_machine import THIS
from trials.planner.estimates import PlanOptions
from trials.planner.plan import Plan, plan
from trials.records.strategy import Prefer

DEPTHS = re.compile(r"depth=([0-9]+)\.\.([0-9]+)")
DEEPEST = 1000
OUTPUT = list[PlannedCluster]
WIDTH = 120
"""Width in columns of output that does not go to a terminal, which has a width of its own."""


def size(context: click.Context, option: click.Parameter, words: str | None) -> int | None:
    """The number of bytes that an option says.

    Raises:
        UserError: when the option is no size above 0.
    """
    if words is None:
        return None
    try:
        return parse_bytes(words)
    except ValueError as error:
        raise UserError(f"--{option.name}: {error} (received {words!r}).") from error


@click.command(
    epilog="""\b
Examples:
  dhen-search plan model.yaml --cluster zionex --ranks 2x8
  dhen-search plan model.yaml --cluster zionex --ranks 1x1,1x8,2x8
  dhen-search plan runs/mine/best --cluster a100-80gb --cluster h100 --json
  dhen-search plan dcn_v2 --data prepared --cluster ours.yaml training.batch_size=65536
  dhen-search plan model.yaml --cluster zionex --sweep depth=1..40 --out depth.html
"""
)
@click.argument("what", metavar="CONFIG.yaml|BUNDLE|MODEL")
@click.argument("overrides", nargs=-1, metavar="[key=value ...]")
@click.option(
    "--cluster",
    "clusters",
    multiple=True,
    help="A name, a YAML file, or `this` (the default).",
)
@click.option("--ranks", help="Hosts x ranks per host in place of the cluster's own, e.g. 2x4 or 1x1,1x2.")
@click.option("--hbm", callback=size, help="Memory per rank in place of the cluster's own, e.g. 24GiB.")
@click.option("--prefer", type=click.Choice(["least", "fastest"]), help="least is the default.")
@data_option("A log that gives the inputs, in place of a schema in CONFIG.")
@click.option("--all", "everything", is_flag=True, help="Every strategy of the ladder.")
@json_option("All of it, in bytes and seconds.")
@click.option("--sweep", "swept", metavar="depth=A..B", help="Throughput and memory against depth, a figure.")
@click.option("--out", type=PATH, help="The figure's HTML file.")
@click.option("--member", type=int, help="Which network of a bundle that is an average: 0, 1 ...")
def command(
    what: str,
    overrides: tuple[str, ...],
    clusters: tuple[str, ...],
    ranks: str | None,
    hbm: int | None,
    prefer: Prefer | None,
    data: tuple[str, ...],
    everything: bool,
    as_json: bool,
    swept: str | None,
    out: Path | None,
    member: int | None,
) -> None:
    """Print what each memory technique costs a configuration on a cluster, and the least that fits.

    CONFIG.yaml holds `model`, `schema` (tables with name, rows, multi_hot, mean_ids; numeric: names or how
    many) and `training` (batch_size over all ranks, precision). Keys: model.KEY, schema.KEY, training.KEY, and
    as in a study ranks, hbm, prefer, technique (the one strategy to price), memory_margin and servers; with --data
    also label, weight, columns.NAME, format, csv.KEY, schema_file, split.KEY, growing, skip_bad_rows and demo.KEY.
    """
    if (swept is None) != (out is None):
        raise UserError("--sweep and --out go together: --sweep depth=1..40 --out depth.html.")
    if swept is not None and as_json:
        raise UserError("--json prints plans, and --sweep draws a figure: give one of them.")
    given: dict[str, Any] = {"ranks": ranks, "hbm": hbm, "prefer": prefer}
    given = {key: value for key, value in given.items() if value is not None}
    # keys of a study say how the model is to be held and the log to be read; other words are of the configuration
    words = []
    for word in overrides:
        if word.partition("=")[0].partition(".")[0] in (*HELD_KEYS, *LOG_KEYS):
            set_override(given, word)
        else:
            words.append(word)
    request = read_request(what, log_to_read(data, given), tuple(words), member)
    config = held_config(given, request.training, "plan")
    options = plan_options(config)
    declared = [declared_clusters(name, config.shapes, config.hbm) for name in clusters or (THIS,)]
    if swept is not None and out is not None:
        if len(config.shapes) > 1:
            raise UserError(f"--sweep draws one shape of ranks; give one of {config.ranks}.")
        _sweep(request, [shape for (shape,) in declared], options, swept, out)
        return
    plans = [in_least_shape(request, shapes, options) for shapes in declared]
    if all(fits_nowhere(request, *pair, options) for pair in zip(declared, plans, strict=True)):
        layer = "not even one layer with one example a rank would fit. " if plans[0].strategies else ""
        raise UserError(f"{what}: {layer}{plans[0].remedy}")
    if as_json:
        print_json([as_data(cluster_plan) for cluster_plan in plans])
        return
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    console.print(short_name(request.model.to_dict()), markup=False, soft_wrap=True)
    for cluster_plan in plans:
        _show(console, cluster_plan, everything=everything)


def as_data(cluster_plan: Plan) -> PlannedCluster:
    """A plan as `--json` gives it."""
    chosen = cluster_plan.chosen
    strategies = tuple(
        StrategyPrice(
            name=priced.strategy.name,
            techniques=tuple(priced.strategy.techniques),
            memory=priced.memory.to_dict() | {"total": priced.memory.total},
            step=priced.time.to_dict(),
            examples_per_second=cluster_plan.batch_size / priced.seconds_per_batch,
            fits=priced.fits,
            lacking_bytes=priced.lacking_bytes,
            reason=priced.reason,
        )
        for priced in cluster_plan.strategies
    )
    fields = {name: getattr(cluster_plan, name) for name in PlannedCluster.model_fields}
    return PlannedCluster(**fields | {"chosen": chosen.name if chosen else None, "strategies": strategies})


def _show(console: Console, cluster_plan: Plan, *, everything: bool) -> None:
    """Prints the ladder, the reasons, the items of the chosen strategy, and what else would do."""
    heading = (
        f"{cluster_plan.cluster}: {cluster_plan.hosts} x {cluster_plan.gpus_per_host} ranks of "
        f"{byte_size(cluster_plan.hbm)}, "
        f"batch {cluster_plan.batch_size:,} ({cluster_plan.examples_per_rank:,} per rank), "
        f"{cluster_plan.precision}"
    )
    console.print()
    console.print(heading, style="bold", markup=False, soft_wrap=True)
    ladder, best = cluster_plan.strategies, cluster_plan.best
    if ladder:
        shown = list(ladder) if everything else selection(ladder, best)
        console.print(ladder_table(shown, best, cluster_plan.batch_size))
        if len(shown) < len(ladder):
            left_out = f"{len(ladder) - len(shown)} more strategies: --all"
            console.print(left_out, style="dim", soft_wrap=True)
        console.print()
    sentences = (
        cluster_plan.remedy,
        *(cluster_plan.other_shapes if cluster_plan.chosen else ()),
        *reasons(ladder, best),
        cluster_plan.faster,
        *cluster_plan.notes,
    )
    for sentence in filter(None, sentences):
        console.print(sentence, markup=False, soft_wrap=True)
    if cluster_plan.closest is not None:
        how = "by item" if best else "which comes closest, by item"
        console.print(f"\n{cluster_plan.closest.strategy.name}, {how}:", markup=False, soft_wrap=True)
        console.print(parts_table(cluster_plan.closest))
    if not cluster_plan.verified:
        text = f"Unverified: the numbers of {cluster_plan.cluster} have not been measured on it."
        console.print(text, style="yellow", soft_wrap=True)


def _sweep(
    request: PlanRequest, clusters: list[Cluster], options: PlanOptions, swept: str, out: Path
) -> None:
    """Writes the figure, and prints how many layers fit with each way to hold the state."""
    if len(clusters) > 1:
        raise UserError("--sweep draws one cluster; give --cluster once.")
    (cluster,) = clusters
    forced = options.technique
    if forced is not None and (forced.no_sync or set(forced.techniques) - {forced.dense}):
        raise UserError(
            f"--sweep draws ways to hold the dense state without other techniques, so that nothing would be drawn "
            f"for technique={forced.name}; give technique={forced.dense}, or none for all of them."
        )
    match = DEPTHS.fullmatch(swept.strip())
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= DEEPEST:
        raise UserError(
            f"--sweep {swept!r}: expected depth=FIRST..LAST from 1 to {DEEPEST}, such as depth=1..40."
        )
    model, training = request.model, for_cluster(request.training, cluster)
    if not isinstance(model, DhenConfig):
        raise UserError(f"--sweep: a model of the family {model.family!r} has no layers; give a dhen model.")
    ladders = {}
    for depth in range(first, last + 1):
        # at other depths the last layer is repeated, or the last layers are left out
        layers = model.layers[:depth]
        deep = model.replace(layers=layers + layers[-1:] * (depth - len(layers)))
        ladders[depth] = tuple(plan(deep, request.schema, training, cluster, options=options).strategies)
    assert request.training.batch_size is not None
    figure = sweep_figure(
        ladders,
        cluster=f"{cluster.name} ({cluster.hosts} x {cluster.gpus_per_host})",
        hbm=cluster.hbm,
        batch_size=request.training.batch_size,
    )
    write_figure(figure, out)
    for dense, deepest in deepest_that_fit(ladders).items():
        click.echo(f"{dense}: {'fits at no depth' if deepest is None else f'{deepest} layers'}")
    click.echo(f"figure: {out}")
