"""`cache`: lists and clears what is kept for later commands."""

from __future__ import annotations

import datetime
import json

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from dhen.errors import UserError, unknown_name
from search.verbs.output import CacheFacts, KeptEntry, json_option, print_json
from trials.cluster.quantity import byte_words
from trials.user_cache import LIMIT, CacheEntry, cache_limit, entries, remove, user_cache

OUTPUT = CacheFacts


@click.command(
    epilog="""\b
Examples: dhen-search cache
          dhen-search cache --clear
          dhen-search cache --clear demo/demo-200000-0.parquet"""
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--clear", is_flag=True, help="Remove these entries, or all; not what a process uses.")
@json_option("What is kept, and what was cleared, as JSON.")
def command(names: tuple[str, ...], clear: bool, as_json: bool) -> None:
    """List what the cache holds, or the entries with these NAMEs: what it is, its size, its last use.

    It is ~/.cache/dhen-search, or the folder of $DHEN_SEARCH_CACHE. Beyond $DHEN_SEARCH_CACHE_LIMIT (such as 20GiB;
    by default a tenth of the disk) logs go that were unused the longest, unless a process uses them. All of it is
    made anew when it is needed.
    """
    kept = {str(entry.path.relative_to(user_cache())): entry for entry in entries()}
    for name in names:
        if name not in kept:
            raise unknown_name("entry of the cache", name, kept)
    chosen = {name: kept[name] for name in names or kept}
    cleared = [name for name, entry in chosen.items() if clear and remove(entry.path)]
    left = {name: entry for name, entry in chosen.items() if name not in cleared}
    if as_json:
        facts = [
            KeptEntry(name=name, what=_what(entry), bytes=entry.bytes, last_used=_time(entry).isoformat())
            for name, entry in left.items()
        ]
        limit = cache_limit()
        print_json(
            CacheFacts(
                directory=str(user_cache()), limit_bytes=limit, entries=tuple(facts), cleared=tuple(cleared)
            )
        )
    elif clear:
        freed = sum(chosen[name].bytes for name in cleared)
        click.echo(f"cleared: {len(cleared)} entries, {byte_words(freed)}")
    else:
        _list(left)
    if clear and left:
        raise UserError(f"a process uses {', '.join(left)}: not cleared. End it, then run the same command.")


def _list(kept: dict[str, CacheEntry]) -> None:
    table = Table(Column("name", overflow="fold"), "what", Column("size", justify="right"), "last used")
    for name, entry in kept.items():
        table.add_row(
            Text(name),
            Text(_what(entry)),
            byte_words(entry.bytes),
            f"{_time(entry).astimezone():%Y-%m-%d %H:%M}",
        )
    console = Console()
    console.print(table)
    total = byte_words(sum(entry.bytes for entry in kept.values()))
    limit = byte_words(cache_limit())
    console.print(Text(f"{user_cache()}: {total}; the limit is {limit} (${LIMIT})"), soft_wrap=True)


def _what(entry: CacheEntry) -> str:
    """What an entry is, a prepared log with its name."""
    try:
        name = json.loads((entry.path / "manifest.json").read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return entry.what
    return f"{entry.what} {name}"


def _time(entry: CacheEntry) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(entry.used, datetime.UTC)
