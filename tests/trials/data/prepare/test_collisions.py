"""Values of growing tables that share a 64-bit hash are counted, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from command_line import write_log

from trials.data.prepare.fit import HashCollisions
from trials.data.prepare.prepare_log import prepare
from trials.data.read_options import GivenGrowing, ReadOptions
from trials.data.vocabulary import hash64


def twins(first: str, second: str) -> list[str]:
    """Two values of one hash: a Thue-Morse sequence and its complement, equal polynomials modulo 2 ** 64."""
    ones = [number.bit_count() % 2 for number in range(1024)]
    return ["".join((first, second)[one ^ flip] for one in ones) for flip in (0, 1)]


@pytest.mark.parametrize("most", [1 << 20, 200])
def test_collisions_are_those_of_a_known_share_of_the_values(most: int) -> None:
    counted = HashCollisions(most)
    pairs = [twins(first, second) for first in "abcdefgh" for second in "stuvwxyz"]
    values = [value for pair in pairs for value in pair] + [f"value {number}" for number in range(2000)]
    order = np.random.default_rng(0).permutation(len(values))
    for part in np.array_split(order, 7):
        for _ in range(2):  # what comes again changes nothing
            counted.add(pa.array([values[place] for place in part]))
    hashes = {int(hash64(pa.array(pair))[0]) for pair in pairs}
    kept = [one for one in hashes if one < counted.share * 2**64]
    assert counted.share == (1.0 if most > 2000 else 1 / 16)
    assert counted.hashes == len(kept) > 0


def test_they_are_noted_where_there_are_some(tmp_path: Path) -> None:
    given = GivenGrowing(capacity=40, columns=("user", "tags"))
    log = write_log(tmp_path / "log.csv", 400)
    assert not any(
        "hashes stand" in note for note in prepare([log], options=ReadOptions(growing=given)).notes
    )
    one, other = twins("a", "b")
    log.write_text(log.read_text().replace(",u1,", f",{one},").replace(",u2,", f",{other},"))
    said = [
        note for note in prepare([log], options=ReadOptions(growing=given)).notes if "hashes stand" in note
    ]
    assert said == ["'user': 1 hashes stand for several values each, which share a row"]
