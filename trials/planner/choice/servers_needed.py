"""The strategies with servers on the ladder: how many servers, and on which level they have the tables.

Memory comes before the SSD: where all hosts together have room, servers have rows in memory, as few as have room
and a step of plain dp is at most `WORTH` longer than with one server per host. Both levels are on the ladder; a
choice takes memory where it fits, as its steps are shorter. On an SSD, whose size no cluster says, what is known
of each row decides in the same way. No more than one server per host is taken unless asked for.
"""

from __future__ import annotations

from itertools import takewhile
from typing import get_args

from dhen.errors import UserError
from trials.cluster.quantity import byte_words
from trials.planner.options import PlanOptions
from trials.planner.pricing import Pricing
from trials.strategy import ServerLevel, Strategy

WORTH = 0.05
"""Share by which a step may be longer with fewer servers."""
LEVELS: tuple[ServerLevel, ...] = get_args(ServerLevel)


def with_servers(
    strategies: tuple[Strategy, ...], options: PlanOptions, pricing: Pricing
) -> tuple[Strategy, ...]:
    """Returns the strategies that can train against servers, with as many as were asked for or are needed.

    Raises:
        UserError: for a technique that cannot, or more servers than a growing table has rows.
    """
    check_technique(options.technique, pricing)
    asked = options.technique
    count = options.servers or (asked.servers if asked is not None and asked.servers else None)
    if options.servers and asked is not None and asked.servers not in (0, options.servers):
        raise UserError(
            f"servers={options.servers} and technique={asked.name} name different numbers of servers; "
            "leave one out."
        )
    of_ranks = [each for each in strategies if not each.model_parallel and each.tables == "device"]
    if pricing.alone:
        of_ranks = [each for each in of_ranks if each.dense == "dp" and each.checkpointing == "none"]
    counts = {level: count or _needed(pricing, level) for level in LEVELS}
    _check_growing(max(counts.values()), pricing)
    return tuple(
        each.replace(servers=counts[level], server_level=level) for each in of_ranks for level in LEVELS
    )


def check_technique(asked: Strategy | None, pricing: Pricing) -> None:
    """Checks that a technique that is asked for can train with tables where they are."""
    synchrony = pricing.training.tables.synchrony
    if asked is None:
        return
    if not pricing.on_servers:
        if asked.servers:
            raise UserError(
                f"technique={asked.name} has servers, and training.tables.synchrony={synchrony} has "
                f"{'tables on the ranks' if pricing.schema.tables else 'no tables to put there'}: give "
                "training.tables.synchrony=async, semi or sync too, or leave servers out."
            )
        return
    if asked.model_parallel or asked.tables != "device":
        raise UserError(
            f"technique={asked.name}: training.tables.synchrony={synchrony} has servers for ranks that hold the "
            "whole dense part each, or a shard of it; leave one of the two out."
        )
    if pricing.alone and (asked.dense != "dp" or asked.checkpointing != "none"):
        raise UserError(
            f"technique={asked.name}: training.tables.synchrony=async has the dense part on servers too, and "
            "ranks hold it as dp does; give technique=dp, or synchrony=semi or sync."
        )


def fewest_servers(pricing: Pricing, level: ServerLevel, rank_bytes: int) -> int | None:
    """Returns the fewest servers with which a host has room beside its ranks; None where there are none."""
    room = pricing.room_for_servers - rank_bytes
    return pricing.kept.fewest(level, pricing.cluster.hosts, room)


def _needed(pricing: Pricing, level: ServerLevel) -> int:
    """Returns how many servers are taken on a level; as many as hosts where these have no room."""
    dp, hosts = Strategy(servers=1, server_level=level), pricing.cluster.hosts
    memory = pricing.memory(dp)
    fewest = fewest_servers(pricing, level, pricing.host_bytes(memory) - memory.servers)
    if fewest is None:
        return hosts
    doubled = takewhile(lambda count: count < hosts, (fewest << power for power in range(hosts.bit_length())))
    counts = [*doubled, hosts]
    seconds = {count: pricing.time(dp.replace(servers=count)).total for count in counts}
    longest = (1 + WORTH) * min(seconds.values())
    return next(count for count, each in seconds.items() if each <= longest)


def _check_growing(servers: int, pricing: Pricing) -> None:
    for table in pricing.served.tables:
        if table.growing is not None and table.rows - 1 < servers:
            raise UserError(
                f"table {table.name!r} has room for {table.rows - 1} id(s), fewer than one for each of {servers} "
                f"servers; give servers={table.rows - 1} at most, or the table more capacity."
            )


def too_few(pricing: Pricing, strategy: Strategy, rank_bytes: int) -> str:
    """Says of servers that have no room what there is, and what would do."""
    level, kept, hosts = strategy.server_level, pricing.kept, pricing.cluster.hosts
    takes = byte_words(kept.of_host(strategy.servers, level, hosts))
    count = f"{strategy.servers} servers take" if strategy.servers > 1 else "1 server takes"
    have = f"{count} {takes} of a host's memory, of which ranks and system leave "
    have += byte_words(max(0, pricing.room_for_servers - rank_bytes))
    fewest = fewest_servers(pricing, level, rank_bytes)
    on_ssd = fewest_servers(pricing, "ssd", rank_bytes) if level == "memory" else None
    would = [
        *([f"servers={fewest}"] if fewest is not None else []),
        *([f"+servers{on_ssd}=ssd"] if on_ssd is not None else []),
    ]
    return f"{have}; {' or '.join(would) if would else 'more hosts, or more memory in each,'} would do."
