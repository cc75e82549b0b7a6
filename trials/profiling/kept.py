"""The costs of parts on this machine: read where they were kept, else measured in so many processes at once.

They are kept in the user's cache (`trials.user_cache`) by processor, version of torch, names of modules and
ensembles, precision, threads and processes; those of ranks that share a training in files of their own, by ranks
too. A file is written whole or not at all, and removing it has the machine measured again.
One command measures at a time: two would make each other slow. Where nothing can be written, costs serve the
command that has measured them. A command that has little time does without what is not kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from filelock import Timeout

from dhen.atomic_write import write_atomically
from dhen.blocks import BLOCKS
from dhen.ensembles import ENSEMBLES
from dhen.errors import UserError
from dhen.values import Value
from trials.cluster.machine import Precision, processor_name
from trials.cluster.part_costs import PartCosts
from trials.cluster.shared_costs import SharedCosts
from trials.data.prepare.locked_directory import locked
from trials.profiling.fit import fitted
from trials.profiling.on_ranks import SharedSetting, has_torchrec
from trials.profiling.processes import (
    MeasuringTookTooLongError,
    Say,
    measured_at_once,
    measured_on_ranks,
)
from trials.profiling.shared_fit import shared_costs_of
from trials.profiling.timing import Measured
from trials.user_cache import user_cache

WITHOUT = (
    "Step times are predicted from its peak and its memory's bandwidth instead, and this study keeps to that."
)
"""What a command says that does without a measurement."""
FORMAT, SHARED_FORMAT = 3, 2
"""Numbers that change when what is measured, or what a size means, does: for parts, and for shared trainings."""
LEAST_SECONDS = 25.0
"""Seconds below which no measurement is begun: somewhat more than its first round takes on a machine at rest."""
C = TypeVar("C", bound=Value)


def part_costs(
    precision: Precision, *, threads: int, processes: int, say: Say, until: float = math.inf
) -> PartCosts | None:
    """Returns what parts take on this CPU; the first time they are measured, which takes half a minute or so. None
    where that is not done at `until`, or not begun as too little is left.

    Args:
        precision: of the dense part.
        threads: threads of a process.
        processes: processes that train at the same time.
        say: takes a line for the user before the machine is measured, others while that takes long, and one where
            nothing can be kept.
        until: when the measurement has to end, in seconds of `time.monotonic`.
    """
    at_once = f", {processes} processes at once" if processes > 1 else ""
    return _once(
        PartCosts,
        kept_at(precision, threads, processes),
        f"Measuring what parts of models take on this CPU ({precision}{at_once})",
        lambda: measured_costs(precision, say, threads=threads, processes=processes, until=until),
        say,
        until,
    )


def shared_costs(setting: SharedSetting, say: Say, *, until: float = math.inf) -> SharedCosts | None:
    """Returns what ranks that share a training take on this CPU beside their parts; the first time it is measured,
    which takes a quarter of a minute or so. `say` takes lines as in `part_costs`, and `until` ends it so."""
    counted = ", with their memory counted" if setting.counted else ""
    return _once(
        SharedCosts,
        shared_kept_at(setting),
        f"Measuring what {setting.world} ranks of one training take on this CPU ({setting.precision}{counted})",
        lambda: shared_costs_of(measured_on_ranks(setting, say, until=until), setting),
        say,
        until,
    )


def _once(
    costs: type[C], path: Path, what: str, measure: Callable[[], C], say: Say, until: float
) -> C | None:
    """Returns the costs that a file holds, else those that are measured, and keeps them; None without the time."""
    if (kept := _kept(costs, path)) is not None:
        return kept
    left = until - time.monotonic()
    if left < LEAST_SECONDS:
        say(
            f"Not {what[0].lower()}{what[1:]}: that takes {LEAST_SECONDS:.0f} s or more, and the minutes leave "
            f"{max(0.0, left):.0f} s for it. {WITHOUT}"
        )
        return None
    try:
        return _measured_alone(costs, path, what, measure, say, left)
    except (MeasuringTookTooLongError, Timeout):
        say(f"Measuring was given up after {left:.0f} s, which is what the minutes leave for it. {WITHOUT}")
        return None


def _measured_alone(
    costs: type[C], path: Path, what: str, measure: Callable[[], C], say: Say, seconds: float
) -> C:
    """Returns the costs that are measured while no other command measures, for which it waits so many seconds, and
    keeps them."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path.parent, seconds=seconds))
        except UserError:
            say(
                f"{what}; not kept, as {path.parent} cannot be written. $DHEN_SEARCH_CACHE names another place."
            )
            return measure()
        if (kept := _kept(costs, path)) is not None:  # another command has measured meanwhile
            return kept
        say(f"{what}; once, kept in {path}.")
        found = measure()
        _keep(found, path, say)
        return found


def _kept(costs: type[C], path: Path) -> C | None:
    """Returns the costs that a file holds; None where there is none, or none that can be read."""
    try:
        return costs.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def _keep(costs: Value, path: Path, say: Say) -> None:
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
    return _file("part-costs", what)


def shared_kept_at(setting: SharedSetting) -> Path:
    """Returns the file in which costs of ranks that share a training are kept."""
    # with TorchRec there are tables to measure, which were not there before
    what = [SHARED_FORMAT, processor_name(), torch.__version__, *setting, has_torchrec()]
    return _file("shared-costs", what)


def _file(folder: str, what: Sequence[object]) -> Path:
    name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return user_cache() / folder / f"{name}.json"


def measured_costs(
    precision: Precision, say: Say, *, threads: int, processes: int, until: float = math.inf
) -> PartCosts:
    """Measures in so many processes at the same time, and fits the means of what they found.

    Raises:
        MeasuringTookTooLongError: when it is not done at `until`, in seconds of `time.monotonic`.
    """
    together = _mean(measured_at_once(precision, say, threads=threads, processes=processes, until=until))
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
