"""`spaces`: the named search spaces and their sizes."""

from __future__ import annotations

import click
from rich.console import Console

from dhen.values import dump_yaml
from search.verbs.output import SpaceFacts, SpaceSizes, json_option, print_json
from spaces.nearest import space_size
from spaces.space import catalog, load_space

OUTPUT = list[SpaceFacts]


@click.command(epilog="Example: dhen-search spaces default")
@click.argument("name", required=False)
@json_option("Sizes (and with NAME the space) as JSON.")
def command(name: str | None, as_json: bool) -> None:
    """List the search spaces, or show one (a NAME, or a YAML file of your own) as YAML to start from."""
    spaces = [load_space(space_name) for space_name in ([name] if name else catalog())]
    if as_json:
        facts = [
            SpaceFacts(
                name=space.name,
                size=SpaceSizes(**vars(space_size(space))),
                space=space.config.to_dict() if name else None,
            )
            for space in spaces
        ]
        print_json(facts)
        return
    if name:
        click.echo(f"# {spaces[0].name}: {space_size(spaces[0])}")  # a comment: the whole is a space's file
        click.echo(dump_yaml(spaces[0].config.to_dict()))
        return
    console = Console()
    for space in spaces:
        console.print(f"[bold]{space.name}[/bold]: {space_size(space)}", soft_wrap=True)
        console.print(f"  {space.config.description.strip()}", soft_wrap=True)
