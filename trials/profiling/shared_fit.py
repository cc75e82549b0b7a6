"""Seconds for each size of engines and tables, from what ranks have timed: least squares, no number below zero.

An engine takes what its passes are longer than those of compute alone. Errors are taken relative to the whole
pass, of which an engine may be little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from scipy.optimize import nnls

from trials.cluster.shared_costs import EngineCost, SharedCosts
from trials.profiling.engines import ALONE, EngineTimed
from trials.profiling.fit import RIDGE
from trials.profiling.on_ranks import SharedMeasured, SharedSetting
from trials.profiling.sharded_tables import TablesTimed


def shared_costs_of(found: Sequence[SharedMeasured], setting: SharedSetting) -> SharedCosts:
    """Returns what is fitted to the means over ranks."""
    engines, uncounted = (
        _mean_engines([getattr(each, name) for each in found]) for name in ("engines", "uncounted")
    )
    tables = _mean_tables([each.tables for each in found])
    return SharedCosts(
        ranks=f"{setting.hosts}x{setting.gpus_per_host}",
        engines=_engines(engines),
        waits=_waits(engines),
        tables=_tables(tables) if tables else None,
        counted=setting.counted,
        counting=_counting(engines, uncounted),
        collectives=_mean_collectives([each.collectives for each in found]),
    )


def _mean_collectives(
    found: Sequence[Mapping[str, tuple[float, float]]],
) -> dict[str, tuple[float, float]]:
    return {
        kind: (fmean(each[kind][0] for each in found), fmean(each[kind][1] for each in found))
        for kind in found[0]
    }


def _engines(timed: Sequence[EngineTimed]) -> dict[str, EngineCost]:
    alone = [each for each in timed if each.engine == ALONE]
    costs = {}
    for name in dict.fromkeys(each.engine for each in timed if each.engine != ALONE):
        its = [each for each in timed if each.engine == name]
        sizes, both = [each.sizes for each in its], [*zip(its, alone, strict=True)]
        costs[name] = EngineCost(
            passes=_fit(sizes, [e.waiting - a.waiting for e, a in both], [e.waiting for e in its]),
            reduced=_fit(sizes, [e.reduced - e.waiting for e in its], [e.reduced for e in its]),
            update=_fit(sizes, [e.update for e in its], [e.update for e in its]),
        )
    return costs


def _waits(timed: Sequence[EngineTimed]) -> tuple[float, ...]:
    """Returns what whole steps of all engines take longer than what they consist of."""
    alone = {each.sizes: each for each in timed if each.engine == ALONE}
    its = [each for each in timed if each.engine != ALONE]
    more = [each.whole - each.reduced - each.update - alone[each.sizes].tables for each in its]
    return _fit(
        [(1.0, alone[each.sizes].waiting, each.sizes[-1]) for each in its], more, [each.whole for each in its]
    )


def _tables(timed: Sequence[TablesTimed]) -> tuple[float, ...]:
    wholes = [each.shared for each in timed]
    return _fit([each.sizes for each in timed], [each.shared - each.local for each in timed], wholes)


def _counting(engines: Sequence[EngineTimed], uncounted: Sequence[EngineTimed]) -> tuple[float, ...]:
    """Returns the seconds by which counting lengthens compute, for 1 and for each operation."""
    if not uncounted:
        return (0.0, 0.0)
    counted = [each.waiting for each in engines if each.engine == ALONE]
    more = [whole - each.waiting for whole, each in zip(counted, uncounted, strict=True)]
    return _fit([(1.0, each.operations) for each in uncounted], more, counted)


def _fit(
    sizes: Sequence[Sequence[float]], seconds: Sequence[float], wholes: Sequence[float]
) -> tuple[float, ...]:
    """Returns the seconds for one of each size, by errors relative to whole times."""
    scale = np.max(np.asarray(sizes, dtype=np.float64), axis=0)
    scale = np.where(scale > 0.0, scale, 1.0)
    whole = np.asarray(wholes)
    rows = np.vstack([np.asarray(sizes) / scale / whole[:, np.newaxis], RIDGE * np.eye(len(scale))])
    found, _ = nnls(rows, np.concatenate([np.asarray(seconds) / whole, np.zeros(len(scale))]))
    return tuple(float(each) for each in found / scale)


def _mean_engines(found: Sequence[Sequence[EngineTimed]]) -> list[EngineTimed]:
    return [
        each[0]._replace(
            waiting=fmean(timed.waiting for timed in each),
            reduced=fmean(timed.reduced for timed in each),
            update=fmean(timed.update for timed in each),
            whole=fmean(timed.whole for timed in each),
            tables=fmean(timed.tables for timed in each),
        )
        for each in zip(*found, strict=True)
    ]


def _mean_tables(found: Sequence[Sequence[TablesTimed]]) -> list[TablesTimed]:
    return [
        each[0]._replace(
            shared=fmean(timed.shared for timed in each), local=fmean(timed.local for timed in each)
        )
        for each in zip(*found, strict=True)
    ]
