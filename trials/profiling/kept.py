"""The costs of parts on this machine: read where they were kept, else measured in so many processes at once.

They are kept in the user's cache (`trials.user_cache`) by processor, version of torch, precision,
threads and processes; a file is written whole or not at all, and removing it has the machine measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from pydantic import ValidationError

from dhen.atomic_write import write_atomically
from trials.cluster.machine import Precision, processor_name
from trials.cluster.part_costs import PartCosts
from trials.profiling.fit import fitted
from trials.profiling.timing import Measured, measured
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
        say: takes a line for the user before the machine is measured.
    """
    path = kept_at(precision, threads, processes)
    try:
        return PartCosts.model_validate_json(path.read_text())
    except (OSError, ValidationError):
        pass
    at_once = f", {processes} processes at once" if processes > 1 else ""
    say(f"Measuring what parts of models take on this CPU ({precision}{at_once}); once, kept in {path}.")
    costs = measured_costs(precision, threads=threads, processes=processes)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, costs.model_dump_json())
    return costs


def kept_at(precision: Precision, threads: int, processes: int) -> Path:
    """Returns the file in which costs are kept."""
    what = [FORMAT, processor_name(), torch.__version__, precision, threads, processes]
    name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return user_cache() / "part-costs" / f"{name}.json"


def measured_costs(precision: Precision, *, threads: int, processes: int) -> PartCosts:
    """Measures in so many processes at the same time, and fits the means of what they found."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(measured, [precision] * processes, [threads] * processes))
    together = _mean(found)
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
