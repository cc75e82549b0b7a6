"""The costs of parts on this machine: read where they were kept, else measured in so many processes at once.

They are kept in the user's cache (`trials.user_cache`) by processor, version of torch, names of modules and
ensembles, precision, threads and processes; a file is written whole or not at all, and removing it has the
machine measured again.
One command measures at a time: two would make each other slow. Where nothing can be written, costs serve the
command that has measured them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from dhen.atomic_write import write_atomically
from dhen.blocks import BLOCKS
from dhen.ensembles import ENSEMBLES
from dhen.errors import UserError
from trials.cluster.machine import Precision, processor_name
from trials.cluster.part_costs import PartCosts
from trials.data.prepare.locked_directory import locked
from trials.profiling.fit import fitted
from trials.profiling.processes import measured_at_once
from trials.profiling.timing import Measured
from trials.user_cache import user_cache

FORMAT = 1
"""Number that changes when what is measured, or what a size means, does."""


def part_costs(
    precision: Precision, *, threads: int, processes: int, say: Callable[[str], None]
) -> PartCosts:
    """Returns what parts take on this CPU; the first time they are measured, which takes half a minute or so.

    Args:
        precision: of the dense part.
        threads: threads of a process.
        processes: processes that train at the same time.
        say: takes a line for the user before the machine is measured, and one where nothing can be kept.
    """
    path = kept_at(precision, threads, processes)
    if (kept := _kept(path)) is not None:
        return kept
    with ExitStack() as stack:
        at_once = f", {processes} processes at once" if processes > 1 else ""
        what = f"Measuring what parts of models take on this CPU ({precision}{at_once})"
        try:
            stack.enter_context(locked(path.parent))
        except UserError:
            say(
                f"{what}; not kept, as {path.parent} cannot be written. $DHEN_SEARCH_CACHE names another place."
            )
            return measured_costs(precision, threads=threads, processes=processes)
        if (kept := _kept(path)) is not None:  # another command has measured meanwhile
            return kept
        say(f"{what}; once, kept in {path}.")
        costs = measured_costs(precision, threads=threads, processes=processes)
        _keep(costs, path, say)
        return costs


def _kept(path: Path) -> PartCosts | None:
    """Returns the costs that a file holds; None where there is none, or none that can be read."""
    try:
        return PartCosts.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def _keep(costs: PartCosts, path: Path, say: Callable[[str], None]) -> None:
    """Writes costs for later commands, as far as the disk allows."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, costs.model_dump_json())
    except OSError as error:
        say(f"{path} was not written ({error.strerror}); the next command measures again.")


def kept_at(precision: Precision, threads: int, processes: int) -> Path:
    """Returns the file in which costs are kept."""
    kinds = sorted(BLOCKS), sorted(ENSEMBLES)  # one that is new has everything measured again
    what = [FORMAT, *kinds, processor_name(), torch.__version__, precision, threads, processes]
    name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return user_cache() / "part-costs" / f"{name}.json"


def measured_costs(precision: Precision, *, threads: int, processes: int) -> PartCosts:
    """Measures in so many processes at the same time, and fits the means of what they found."""
    together = _mean(measured_at_once(precision, threads=threads, processes=processes))
    kinds = fitted(together.cases, together.networks, precision)
    return PartCosts(precision=precision, threads=threads, processes=processes, kinds=kinds)


def _mean(found: list[Measured]) -> Measured:
    """Returns the mean over processes of each time."""
    cases = [
        each[0]._replace(
            forward=float(np.mean([timed.forward for timed in each])),
            backward=float(np.mean([timed.backward for timed in each])),
        )
        for each in zip(*(measured.cases for measured in found), strict=True)
    ]
    networks = [
        each[0]._replace(seconds=float(np.mean([network.seconds for network in each])))
        for each in zip(*(measured.networks for measured in found), strict=True)
    ]
    return Measured(cases, networks)
