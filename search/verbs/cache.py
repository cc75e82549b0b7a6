"""`cache`: lists and clears the logs that are kept for later commands."""

from __future__ import annotations

import contextlib
import datetime
import json

import click

from dhen.errors import UserError, unknown_name
from search.verbs.output import CacheFacts, CacheItem, json_option, print_json
from trials.cluster.cluster import byte_words
from trials.store.user_cache import LIMIT, cache_limit, entries, remove, user_cache

OUTPUT = CacheFacts


@click.command(epilog="Example: dhen-search cache --clear demo/demo-200000-0.parquet")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--clear", is_flag=True, help="Remove these entries, or all; not what a process uses.")
@json_option("What is kept, and what was cleared, as JSON.")
def command(names: tuple[str, ...], clear: bool, as_json: bool) -> None:
    """List the logs that are kept, or those of these NAMEs: what they are, their size, their last use.

    They lie below ~/.cache/dhen-search, or $DHEN_SEARCH_CACHE. Beyond $DHEN_SEARCH_CACHE_LIMIT (such as 20GiB; by
    default a tenth of the disk) those go that were unused the longest, unless a process uses them. All are made
    anew when they are needed.
    """
    kept = {str(entry.path.relative_to(user_cache())): entry for entry in entries()}
    for name in names:
        if name not in kept:
            raise unknown_name("entry of the cache", name, kept)
    chosen = {name: kept[name] for name in names or kept}
    cleared = tuple(name for name, entry in chosen.items() if clear and remove(entry.path))
    left = []
    for name, entry in chosen.items():
        if name in cleared:
            continue
        what, last_used = entry.what, datetime.datetime.fromtimestamp(entry.used, datetime.UTC)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads((entry.path / "manifest.json").read_text(encoding="utf-8"))
            what += f" {manifest['name']!r}"
        iso = last_used.isoformat(timespec="seconds")
        left.append(CacheItem(name=name, what=what, bytes=entry.bytes, last_used=iso))
    facts = CacheFacts(
        directory=str(user_cache()), limit_bytes=cache_limit(), entries=tuple(left), cleared=cleared
    )
    if as_json:
        print_json(facts)
    elif clear:
        freed = byte_words(sum(kept[name].bytes for name in cleared))
        click.echo(f"cleared: {len(cleared)} entries, {freed}")
    else:
        for each in left:
            click.echo(f"{byte_words(each.bytes):>10}  {each.last_used}  {each.name}  {each.what}")
        total, limit = sum(each.bytes for each in left), byte_words(facts.limit_bytes)
        click.echo(f"{facts.directory}: {byte_words(total)}; the limit is {limit} (${LIMIT})")
    if clear and left:
        used = ", ".join(each.name for each in left)
        raise UserError(f"a process uses {used}: not cleared. End it, then run the same command.")
