"""A 64-bit hash of strings, the same on every machine and in every version of the project.

A polynomial in the bytes modulo 2 ** 64, then the finaliser of SplitMix64 (Steele et al., OOPSLA 2014).
Vectorised over Arrow's own buffers. Not for adversaries.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_BASE = np.uint64(0x9E3779B97F4A7C15)
_SECOND_BASE, _PRIME = np.uint64(0x5851F42D), np.uint64(2**31 - 1)

Hashes = NDArray[np.uint64]
MISSING_KEY = -0x2B1D5E6C3F9A4871
"""The key that stands for a missing value where it has a row of its own: a number of no meaning, which a value's
hash is as seldom as it is another value's."""


def hash64(values: pa.Array) -> Hashes:
    """Returns the hashes (N) of N strings; those of nulls mean nothing."""
    if not len(values):
        return np.empty(0, dtype=np.uint64)  # Arrow may leave out the buffers
    text, starts, lengths = _text(values)
    position = np.arange(len(text)) - np.repeat(starts, lengths)
    terms = (text.astype(np.uint64) + np.uint64(1)) * _powers(int(lengths.max(initial=0)))[position]
    return mixed(_sums(terms, starts, lengths))


def second_hash(values: pa.Array) -> Hashes:
    """Returns hashes (N) of N strings by which those that share the first one are told apart: the polynomial in
    another number, modulo a prime."""
    if not len(values):
        return np.empty(0, dtype=np.uint64)
    text, starts, lengths = _text(values)
    powers = np.ones(1, dtype=np.uint64)
    while len(powers) < lengths.max(initial=0):
        following = np.uint64(pow(int(_SECOND_BASE), len(powers), int(_PRIME)))
        powers = np.concatenate([powers, powers * following % _PRIME])
    position = np.arange(len(text)) - np.repeat(starts, lengths)
    terms = (text.astype(np.uint64) + np.uint64(1)) * powers[position] % _PRIME
    return _sums(terms, starts, lengths) % _PRIME


def _text(values: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int32]]:
    """Returns the bytes of all strings one after another, where each begins, and its length."""
    _, offset_buffer, data_buffer = values.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32)[values.offset : values.offset + len(values) + 1]
    text = np.frombuffer(data_buffer or b"", dtype=np.uint8)[offsets[0] : offsets[-1]]
    return text, offsets[:-1] - offsets[0], np.diff(offsets)


def _sums(terms: Hashes, starts: NDArray[np.int32], lengths: NDArray[np.int32]) -> Hashes:
    """Returns the sum of each string's terms (N) modulo 2 ** 64."""
    # sums wrap around, and so their differences are exact modulo 2 ** 64
    sums = np.concatenate(([np.uint64(0)], np.cumsum(terms, dtype=np.uint64)))
    found: Hashes = sums[starts + lengths] - sums[starts]
    return found


def _powers(count: int) -> Hashes:
    return np.cumprod(np.full(count, _BASE, dtype=np.uint64), dtype=np.uint64)


def mixed(h: Hashes) -> Hashes:
    """Returns 64-bit numbers (N) that look random, each of one given number: the finaliser of SplitMix64."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))
