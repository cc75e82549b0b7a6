"""`clusters`: what the named clusters, this machine or your own have, and where each number is from.

`--json` is a list of clusters, each with every key of `trials.cluster.cluster.Cluster`: bytes, bytes/s,
FLOP/s and seconds as plain numbers, `null` if there is none. With NAME the list has that one.
Without, the row `this` has `null` for whatever would have to be measured: `clusters this` measures it.
"""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Column, Table

from dashboards.names import MISSING, byte_size, si
from dhen.values import parse
from search.verbs.output import ClusterFacts, json_option, print_json
from trials.cluster.this_machine import DESCRIPTION, THIS, catalog, host_memory_bytes, load_cluster

OUTPUT = list[ClusterFacts]
DIRECTIONS = "Bandwidths are of one direction, for one GPU."
UNVERIFIED = f"Unverified: from data sheets, or not all of it measured. {DIRECTIONS}"


@click.command(epilog="Example: dhen-search clusters zionex")
@click.argument("name", required=False)
@json_option("Plain numbers and their sources.")
def command(name: str | None, as_json: bool) -> None:
    """List the clusters plans can be made for, or show one with the source of each number.

    NAME is one of the list, `this` (measured, for a second or two) or the path of a YAML file with the
    same keys.
    """
    clusters = [load_cluster(name)] if name else list(catalog().values())
    if as_json:
        facts = [parse(ClusterFacts, cluster.to_dict(), cluster.name) for cluster in clusters]
        if not name:
            # this machine, as far as it is known without torch
            known = {
                "name": THIS,
                "description": DESCRIPTION,
                "hosts": 1,
                "host_memory_bytes": host_memory_bytes(),
                "verified": False,
                "sources": {},
            }
            facts.append(ClusterFacts(**dict.fromkeys(ClusterFacts.model_fields) | known))
        print_json(facts)
    elif name:
        (cluster,), console = clusters, Console()
        console.print(f"{cluster.name}: {cluster.description}", markup=False, soft_wrap=True)
        table = Table("number", "value", Column("source", overflow="fold"), box=None)
        for key, number in cluster.numbers().items():
            table.add_row(key, in_words(key, number), cluster.sources[key])
        console.print(table)
        console.print(DIRECTIONS if cluster.verified else UNVERIFIED, markup=False, soft_wrap=True)
    else:
        columns = ("cluster", "hosts x GPUs", "HBM per GPU", "peak bf16", "NVLink", "network")
        caption = f"{UNVERIFIED} `clusters {THIS}` measures this machine."
        table = Table(*columns, box=None, caption=caption, caption_justify="left")
        for cluster in clusters:
            sizes = (f"{cluster.hosts} x {cluster.gpus_per_host}", byte_size(cluster.hbm))
            peak = f"{si(cluster.peak_flops.bf16)}FLOP/s"
            bandwidths = (
                in_words("bandwidth", link.bandwidth) if link else MISSING
                for link in (cluster.nvlink, cluster.network)
            )
            table.add_row(cluster.name, *sizes, peak, *bandwidths)
        table.add_row(THIS, *[MISSING] * (len(columns) - 1))
        Console().print(table)


def in_words(key: str, number: float) -> str:
    """A number of a cluster with the unit that its key stands for."""
    if key == "hbm" or key.endswith("_bytes"):
        return byte_size(number)
    if key.endswith("bandwidth"):
        return f"{si(number)}B/s"
    if key.endswith("latency"):
        return f"{number * 1e6:.3g} us"
    return f"{si(number)}FLOP/s" if key.startswith("peak_flops") else f"{number:g}"
