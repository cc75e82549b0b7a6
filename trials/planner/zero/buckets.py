"""The buckets of ZeRO's stages 1 and 2: which units of a model lie in one tensor, to be reduced at a time."""

from __future__ import annotations

from collections.abc import Sequence


def zero_buckets(unit_bytes: Sequence[int], bucket_bytes: int) -> list[range]:
    """Joins neighbouring units from the last backwards, as backward comes to them, until a bucket is full.

    Args:
        unit_bytes: bytes of gradients of each unit in forward's order: features, layers, head.
        bucket_bytes: bytes from which on a bucket is full; with 0 every unit that has parameters is a bucket.

    Returns:
        The places of each bucket's units, first bucket first; every unit with parameters is in one.
    """
    buckets: list[range] = []
    stop, size = len(unit_bytes), 0
    for place in reversed(range(len(unit_bytes))):
        size += unit_bytes[place]
        if size and (size >= bucket_bytes or place == 0):
            buckets.append(range(place, stop))
            stop, size = place, 0
    return buckets[::-1]
