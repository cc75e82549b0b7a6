"""An encoding with growing tables in place of static ones, or the other way round; and rows that were encoded.

A growing table knows values by their hashes alone. So does the vocabulary that comes of it, and every value that
had a row finds it again, whatever its text. A log could give the texts, but only of the values that it has; the
others would lose what they have learnt.

Shapes: N examples, T categorical tables, G growing ones among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dhen.schema import Growing
from trials.data.encoding.encoding import Encoding
from trials.data.encoding.hashing import MISSING_KEY, UNKNOWN_KEY, Hashes
from trials.data.encoding.vocabulary import FIRST_ID, MISSING_ID, AnyVocabulary, HashVocabulary
from trials.data.log_schema import FIXED, MIN_COUNT, Column, TableKind
from trials.data.rows import Bags, EncodedRows


def to_growing(encoding: Encoding, rules: Mapping[str, Growing]) -> Encoding:
    """Returns an encoding in which these columns, which have vocabularies, have growing tables."""
    schema = encoding.schema
    columns: dict[str, Column] = {
        name: schema.tables[name].replace(table=TableKind(growing=rule), min_count=MIN_COUNT)
        for name, rule in rules.items()
    }
    kept = {name: one for name, one in encoding.vocabularies.items() if name not in rules}
    return encoding.with_tables(schema.replace(columns={**schema.columns, **columns}), kept)


def to_static(encoding: Encoding, hashes: Mapping[str, Hashes]) -> Encoding:
    """Returns an encoding in which these columns, whose tables grow, have vocabularies of hashes (ascending).

    A training from nothing makes vocabularies of the values that occur as often as those that were admitted.
    """
    schema = encoding.schema
    columns: dict[str, Column] = {}
    for name in hashes:
        rule = schema.growing(name)
        assert rule is not None
        columns[name] = schema.tables[name].replace(table=FIXED, min_count=rule.admit_after)
    made: dict[str, AnyVocabulary] = {name: HashVocabulary(each) for name, each in hashes.items()}
    made |= encoding.vocabularies
    in_order = {name: made[name] for name in schema.tables if name in made}
    return encoding.with_tables(schema.replace(columns={**schema.columns, **columns}), in_order)


def converted_rows(rows: EncodedRows, old: Encoding, new: Encoding) -> EncodedRows:
    """Returns rows of one encoding as another has them, which was made of it."""
    names = list(old.schema.categorical)
    keys = dict(zip(_growing(old), () if rows.keys is None else rows.keys.T, strict=True))
    ids, kept = rows.categorical.copy(), []
    for place, name in enumerate(names):
        found = _converted(keys.get(name, rows.categorical[:, place]), name, old, new)
        if new.schema.growing(name):
            kept.append(found)
            found = np.zeros(rows.rows, dtype=np.int32)
        ids[:, place] = found
    bags = [
        Bags(ids=_converted(bags.ids, name, old, new), offsets=bags.offsets)
        for name, bags in zip(old.schema.multi_hot, rows.bags, strict=True)
    ]
    return EncodedRows(
        categorical=ids,
        bags=tuple(bags),
        numeric=rows.numeric,
        keys=np.stack(kept, axis=1) if kept else None,
        share=rows.share,
    )


def _growing(encoding: Encoding) -> list[str]:
    """Returns the categorical columns whose tables grow, in order."""
    return [name for name in encoding.schema.categorical if encoding.schema.growing(name)]


def _converted(ids: NDArray[Any], name: str, old: Encoding, new: Encoding) -> NDArray[Any]:
    """Returns ids or keys (N) of a column as the other encoding has them."""
    before, after = old.schema.growing(name), new.schema.growing(name)
    if (before is None) == (after is None):
        return ids
    if before is None:
        keys = [np.array([MISSING_KEY, UNKNOWN_KEY]), old.vocabularies[name].hashes.view(np.int64)]
        found: NDArray[np.int64] = np.concatenate(keys)[ids]
        return found
    vocabulary = new.vocabularies[name]
    assert isinstance(vocabulary, HashVocabulary)
    missing = (ids == 0) | (ids == MISSING_KEY)
    return np.where(missing, MISSING_ID, vocabulary.ids_of_hashes(ids.view(np.uint64))).astype(np.int32)


assert FIRST_ID == 2, "ids before the first value's are those of missing and of unknown ones"
