"""What more candidates are expected to gain: by how much the lowest NE would fall, from the lowest ones so far.

The smallest of many values lie below a threshold u about as exponential variables do (Pickands 1975: excesses
follow a generalised Pareto distribution, of which the exponential is the case between bounded and heavy tails). u
is the ninth lowest NE, and the mean distance of the eight lower ones from it is the scale s. A further candidate
comes below the best, at distance d from u, with probability q = 8 / n x exp(-d / s), and the lowest of m further
ones is expected to be lower by

    s (E1(m q) + ln(m q) + gamma),

the integral of 1 - exp(-m q exp(-t / s)) over t. It knows nothing of the sampler, which may propose better ones
than before, and nothing of a floor of NE, near which there is less to gain: docs/log.md has how it compares with
searches that went on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LEAST = 20
"""Number of candidates with a result from which anything is expected: before, the sampler has only begun."""
EULER_GAMMA = 0.5772156649015329
NEGLIGIBLE = 1e-9
"""Expected number of better candidates below which the difference of logarithms would be rounding alone."""
PATIENCE = 10
"""Number of candidates in a row after each of which little was to be expected: single ones are lucky, and then it
looks for a moment as if nothing were to be gained any more (docs/log.md)."""
TAIL = 8
"""Number of lowest NEs that the scale follows from. A share of the candidates in their place reaches into the
bulk, and promises gains for ever."""


def expected_gain(ne: Sequence[float], more: float) -> float | None:
    """Decrease of the lowest NE that is expected of so many further candidates, relative to it (0.001 is 0.1 %).

    Args:
        ne: NE of the candidates with a result.
        more: number of further candidates.

    Returns:
        None where there are too few candidates to say anything.
    """
    if len(ne) < LEAST:
        return None
    from scipy.special import exp1  # half a second of imports that a study's beginning need not wait for

    *lowest, threshold = sorted(ne)[: TAIL + 1]
    scale = statistics.fmean(threshold - value for value in lowest)
    if scale <= 0.0:
        return 0.0
    below = more * TAIL / len(ne) * math.exp(-(threshold - lowest[0]) / scale)
    return (
        scale * float(exp1(below) + math.log(below) + EULER_GAMMA) / lowest[0] if below > NEGLIGIBLE else 0.0
    )


def lasting_gain(ne: Sequence[float], more: float) -> float | None:
    """The largest of the gains that were expected of so many further candidates after each of the latest ten.

    Args:
        ne: NE of the candidates with a result, in the order in which they were proposed.
        more: number of further candidates.

    Returns:
        None where after one of them too few candidates had a result.
    """
    gains = [expected_gain(ne[: len(ne) - left_out], more) for left_out in range(PATIENCE)]
    known = [gain for gain in gains if gain is not None]
    return max(known) if len(known) == PATIENCE else None
