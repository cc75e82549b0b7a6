"""`blocks`: the interaction modules, their settings and what they cost."""

from __future__ import annotations

import inspect
import sys

import click
from rich.console import Console
from rich.table import Table

from dhen.blocks import BLOCKS, BlockShape
from dhen.cost import dense_parameters, headline_flops
from dhen.errors import unknown_name
from search.log_config import field_docs
from search.verbs.output import BlockFacts, BlockSetting, json_option, print_json

OUTPUT = list[BlockFacts]

REFERENCE = BlockShape(embeddings=32, dim=16, out=8)
"""Shape at which costs are shown: 32 embeddings of length 16 in, 8 out."""


@click.command(epilog="Example: dhen-search blocks attention")
@click.argument("name", required=False)
@json_option("Settings and costs as JSON.")
def command(name: str | None, as_json: bool) -> None:
    """List the interaction modules with their defaults' cost, or show the settings of one."""
    if name is not None and name not in BLOCKS:
        raise unknown_name("interaction module", name, BLOCKS)
    kinds = [name] if name else list(BLOCKS)
    if as_json:
        print_json([_facts(kind) for kind in kinds])
        return
    console = Console()
    if name:
        console.print(inspect.getdoc(sys.modules[BLOCKS[name].__module__]), markup=False)
    shape = f"{REFERENCE.embeddings} embeddings of {REFERENCE.dim} to {REFERENCE.out}"
    table = Table("module", "settings (defaults)", "FLOPs", "parameters", box=None, caption=shape)
    for kind in kinds:
        facts = _facts(kind)
        settings = ", ".join(f"{key}={setting.default}" for key, setting in facts.settings.items())
        table.add_row(kind, settings or "none", f"{facts.flops:,.0f}", f"{facts.parameters:,}")
    console.print(table)
    if name:
        for key, setting in _facts(name).settings.items():
            console.print(f"  {key}: {setting.description}", markup=False)


def _facts(kind: str) -> BlockFacts:
    config = BLOCKS[kind]
    cost, docs = config(kind=kind).cost(REFERENCE), field_docs(config)
    settings = {
        key: BlockSetting(default=field.get_default(call_default_factory=True), description=docs.get(key))
        for key, field in config.model_fields.items()
        if key != "kind"
    }
    return BlockFacts(
        kind=kind, settings=settings, flops=headline_flops(cost), parameters=dense_parameters(cost)
    )
