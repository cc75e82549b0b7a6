"""From a configuration class to the rows of its table: key, type in words, default, meaning.

The meaning is the docstring below the field. Nested values are shown as dotted keys (`demo.rows`), those in a list
with `[]` (`layers[].norm`); a class that has a page of its own is one row that links there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from dhen.blocks.base import BlockConfig
from dhen.ensembles.ensembles import EnsembleConfig
from dhen.schema import parse_ttl
from dhen.values import Value
from search.log_config import field_docs
from trials.cluster.cluster import (
    parse_bytes,
    parse_flops,
    parse_rate,
    parse_share,
    parse_signed_bytes,
    parse_time,
)

SIZE = "size such as `80GiB`, or a number of bytes"
QUANTITIES = {
    parse_bytes: SIZE,
    parse_signed_bytes: "size such as `512MiB` or `-512MiB`, or a number of bytes",
    parse_rate: "rate such as `300GB/s` or `200Gb/s`, or a number of bytes per second",
    parse_flops: "rate such as `312TFLOP/s`, or a number of FLOP/s",
    parse_share: "percentage such as `0.1%`, or a number below 0.01",
    parse_ttl: "time such as `3d`, `6h` or `30m`, or a whole number above 0",
    parse_time: "time such as `5us`, or a number of seconds",
}
"""What fields are written as that a function reads."""
WRITTEN_AS = {"hbm": SIZE, "max_bytes": SIZE, "ranks": "hosts x ranks per host, such as `2x4`"}
"""The same of fields whose class reads them with a validator of its own."""
NOUNS = {
    bool: ("`true` or `false`", "truth values"),
    int: ("whole number", "whole numbers"),
    float: ("number", "numbers"),
    str: ("text", "texts"),
    Any: ("[axis](space.md#axes)", "[axes](space.md#axes)"),
}
LINKS = {
    BlockConfig: ("[interaction module](modules.md)", "[interaction modules](modules.md)"),
    EnsembleConfig: ("[ensemble](model.md#ensembles)", "[ensembles](model.md#ensembles)"),
}


class Row(NamedTuple):
    """One key of a configuration."""

    key: str
    type: str
    default: str
    meaning: str


def rows(
    config: type[Value],
    *,
    prefix: str = "",
    skip: Iterable[str] = (),
    pages: Mapping[type, str] | None = None,
) -> Iterator[Row]:
    """The rows of a class's fields, in their order.

    Args:
        config: the class.
        prefix: what stands before each key, with its dot.
        skip: names of fields that are left out.
        pages: classes that are described on a page of their own, with its address.
    """
    pages, docs = pages or {}, field_docs(config)
    for name, field in config.model_fields.items():
        if name in skip:
            continue
        inner, listed = _inner(field.annotation)
        page = pages.get(inner) if inner is not None else None
        type_words = f"[mapping]({page})" if page else words_of(name, field)
        yield Row(f"{prefix}{name}", type_words, _default(field), docs.get(name, ""))
        if inner is not None and page is None:
            yield from rows(inner, prefix=f"{prefix}{name}{'[]' if listed else ''}.", pages=pages)


def own_fields(config: type[Value]) -> set[str]:
    """Names of the fields that the class itself declares, new or with another default."""
    return set(config.__annotations__) & set(config.model_fields)


def words_of(name: str, field: FieldInfo) -> str:
    """What may stand for a field, in words."""
    if name in WRITTEN_AS:
        return f"{WRITTEN_AS[name]}{', or `null`' if field.default is None else ''}"
    return _words(field.annotation, field.metadata)


def _words(annotation: Any, metadata: Iterable[Any] = (), *, plural: bool = False) -> str:
    metadata = _flat(metadata)
    quantity = next((QUANTITIES[f] for m in metadata if (f := getattr(m, "func", None)) in QUANTITIES), None)
    if quantity is not None:
        return quantity
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(arguments[0], (*arguments[1:], *metadata), plural=plural)
    if origin is Literal:
        return _either([f"`{value}`" for value in arguments])
    if origin in (Union, UnionType):
        return _either([_words(part, metadata, plural=plural) for part in arguments])
    if annotation is NoneType:
        return "`null`"
    if origin in (tuple, list):
        least = "non-empty " if any(isinstance(m, MinLen) for m in metadata) else ""
        return f"{least}list of {_words(arguments[0], plural=True)}"
    if origin is dict:
        return f"mapping{'s' if plural else ''} of names to {_words(arguments[1], plural=True)}"
    for base, nouns in LINKS.items():
        if isinstance(annotation, type) and issubclass(annotation, base):
            return nouns[plural]
    if isinstance(annotation, type) and issubclass(annotation, Value):
        return "mappings" if plural else "mapping"
    return f"{NOUNS[annotation][plural]}{_bounds(metadata, whole=annotation is int)}"


def _bounds(metadata: Iterable[Any], *, whole: bool) -> str:
    """` from 1 to 16`, ` above 0`, ` of at least 0`; nothing where there are none."""
    found = {type(m): m for m in metadata}
    if whole and Gt in found and Le in found:
        found = {Ge: Ge(found[Gt].gt + 1), Le: found[Le]}
    low = found.get(Gt) or found.get(Ge)
    high = found.get(Lt) or found.get(Le)
    if isinstance(low, Ge) and isinstance(high, Le):
        return f" from {_number(low.ge)} to {_number(high.le)}"
    parts = []
    if low is not None:
        parts.append(f"above {_number(low.gt)}" if isinstance(low, Gt) else f"of at least {_number(low.ge)}")
    if high is not None:
        parts.append(f"below {_number(high.lt)}" if isinstance(high, Lt) else f"at most {_number(high.le)}")
    return " " + " and ".join(parts) if parts else ""


def _number(bound: Any) -> str:
    return f"{bound:,g}" if isinstance(bound, float) else f"{bound:,}"


def _flat(metadata: Iterable[Any]) -> tuple[Any, ...]:
    """`Annotated[int, Field(gt=0)]` in a union or a list keeps a whole FieldInfo."""
    return tuple(inner for m in metadata for inner in (m.metadata if isinstance(m, FieldInfo) else (m,)))


def _either(words: list[str]) -> str:
    *first, last = dict.fromkeys(words)
    return f"{', '.join(first)} or {last}" if first else last


def _inner(annotation: Any) -> tuple[type[Value] | None, bool]:
    """The plain value class inside `X`, `X | None` or `tuple[X, ...]`, and whether it is in a list."""
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple:
        return _inner(arguments[0])[0], True
    if get_origin(annotation) in (Union, UnionType) and NoneType in arguments:
        return _inner(next(part for part in arguments if part is not NoneType))
    is_plain = isinstance(annotation, type) and issubclass(annotation, Value)
    return (annotation if is_plain and not issubclass(annotation, tuple(LINKS)) else None), False


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, EnsembleConfig):
        default = default.kind
    if isinstance(default, Value):
        return "its keys' own"
    return f"`{json.dumps(default)}`"


def table(found: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for row in found:
        meaning = " ".join(row.meaning.split())
        lines.append(f"| `{row.key}` | {_cell(row.type)} | {_cell(row.default)} | {_cell(meaning)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """What Markdown would take for the end of a cell is escaped."""
    return text.replace("|", "\\|")
