"""What a candidate is expected to add to the front: the area between NE and log FLOPs that it would newly cover.

The expected hypervolume improvement of two objectives (Emmerich et al., CEC 2011), of which one, FLOPs, is known
before training, and NE is expected with a normal error: a sum over the stairs of the front, in closed form.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scipy.special import ndtr

Corner = tuple[float, float]
"""Log FLOPs and NE of a candidate."""


def expected_gain(
    log_flops_N: np.ndarray,
    ne_N: np.ndarray,
    error_N: np.ndarray,
    front: Iterable[Corner],
    reference: Corner,
) -> np.ndarray:
    """Expected gains gain_N of candidates with these FLOPs and expected NE; the area counts up to `reference`."""
    starts_S, levels_S = _stairs(front, reference)
    ends_S = np.append(starts_S[1:], reference[0])
    gain_N = np.zeros(len(log_flops_N))
    for start, end, level in zip(starts_S, ends_S, levels_S, strict=True):
        width_N = np.clip(end - np.maximum(start, log_flops_N), 0.0, None)
        gain_N += width_N * _expected_below(level, ne_N, error_N)
    return gain_N


def hypervolume(points: Iterable[Corner], reference: Corner) -> float:
    """The area between NE and log FLOPs that points cover up to the reference."""
    starts_S, levels_S = _stairs(points, reference)
    widths_S = np.diff(np.append(starts_S[1:], reference[0]))
    return float((widths_S * (reference[1] - levels_S[1:])).sum())


def _expected_below(level: float, ne_N: np.ndarray, error_N: np.ndarray) -> np.ndarray:
    """Expected distance of normal variables below a level, counted as 0 where they lie above."""
    z_N = (level - ne_N) / error_N
    density_N = np.exp(-0.5 * z_N**2) / np.sqrt(2.0 * np.pi)
    below_N: np.ndarray = error_N * (density_N + z_N * ndtr(z_N))
    return below_N


def _stairs(points: Iterable[Corner], reference: Corner) -> tuple[np.ndarray, np.ndarray]:
    """Start of each stair in log FLOPs, the first at minus infinity, and the lowest NE to be had there."""
    starts, levels = [-np.inf], [reference[1]]
    for log_flops, ne in sorted(points):
        if log_flops < reference[0] and ne < levels[-1]:
            starts.append(log_flops)
            levels.append(ne)
    return np.array(starts), np.array(levels)
