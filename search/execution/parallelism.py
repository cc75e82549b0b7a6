"""How many candidates train side by side on this machine, and with how many threads each."""

from __future__ import annotations

from trials.cluster.machine import cores, device, fastest_threads

MOST = 4
"""Candidates side by side where the study does not say (docs/decisions/0007-candidates-side-by-side.md)."""


def slots(parallel: int | None, threads: int | None, ranks: int = 1) -> tuple[int, int]:
    """Candidates side by side and threads a rank; what is not given follows from the other.

    A candidate has so many `ranks`, processes that share this machine.

    Neither given: one candidate on an accelerator, else as many as there are cores, four at most; then of
    each candidate's share of the cores as many threads as are found to gain (`fastest_threads`).
    """
    if parallel is None:
        parallel = 1 if device().type != "cpu" else max(1, min(MOST, cores() // (ranks * (threads or 1))))
    return parallel, threads or fastest_threads(max(1, cores() // (ranks * parallel)))
