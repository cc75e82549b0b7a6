"""Frozen configuration values: typed, valid from birth, with errors that name the key and the remedy.

A thin layer over pydantic. Every configuration of the project derives from `Value`; `parse` turns
pydantic's errors into a `UserError` that lists unknown keys with the nearest known one.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from types import NoneType
from typing import Annotated, Any, Self, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dhen.errors import UserError, unknown_name


class Value(BaseModel):
    """A frozen, keyword-only value; unknown keys raise; fields are documented by the docstrings below them
    ."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able data, complete (defaults included)."""
        return self.model_dump(mode="json")

    def replace(self, **changes: Any) -> Self:
        """The same value with some fields changed: the one way to change a value.

        Names and types are checked and validators run, as when a value is built; pydantic's own
        `model_copy(update=...)` checks nothing, so that a misspelt field would pass silently.

        Raises:
            TypeError: for a name that is no field, naming the nearest one.
            ValidationError: for a value of another type, or one that a validator refuses.
        """
        unknown = sorted(changes.keys() - type(self).model_fields)
        if unknown:
            known = unknown_name("field", unknown[0], type(self).model_fields)
            raise TypeError(f"{type(self).__name__}.replace: {known}")
        # fields alone: a value's `__dict__` also has the properties that it caches
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **changes})


def omitted(default: Any, **constraints: Any) -> Any:
    """A field that plain data leaves out if it has its default, as all data did before there was the field."""
    return Field(default=default, exclude_if=lambda value: value == default, **constraints)


V = TypeVar("V", bound=BaseModel)
SHOULD_BE = "Input should be "
"""How pydantic begins to say what a value of a type may be."""
LONGEST_TEXT = 40
"""Letters of the longest text that equal ones share: names, not sentences."""
LONGEST_SHARED, MOST_SHARED = 8, 2**12
"""Largest number of entries of a mapping that equal ones share, and of such mappings that are remembered: they are
settings of modules, of which there are few kinds. An assumption, some 4 MB."""


def compact(value: V) -> V:
    """The same value in less memory, for one of thousands that are kept.

    Short texts and small mappings inside that are equal to others' are one object with them, parts that were one
    object stay so, and each class has one set of the fields that were given, which then are all of its fields.
    """
    done = dict[int, Any]()

    def compacted(part: Any) -> Any:
        if isinstance(part, BaseModel):
            if id(part) not in done:
                cls = type(part)
                fields = {name: compacted(getattr(part, name)) for name in cls.model_fields}
                done[id(part)] = cls.model_construct(_fields_set=_all_fields(cls), **fields)
            return done[id(part)]
        if type(part) is str:
            return sys.intern(part) if len(part) <= LONGEST_TEXT else part
        if type(part) is dict:
            parts = {compacted(key): compacted(inner) for key, inner in part.items()}
            return _shared(parts) if len(parts) <= LONGEST_SHARED else parts
        if type(part) in (tuple, list):
            return type(part)(map(compacted, part))
        return part

    whole: V = compacted(value)
    return whole


def _shared(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """A mapping of simple values that is equal to this one, and is the same object for all that ask."""
    if not all(isinstance(inner, (str, int, float, NoneType)) for inner in mapping.values()):
        return mapping
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0, and all are written differently
    return _first_of(
        tuple(
            (key, inner, repr(inner) if isinstance(inner, float) else type(inner))
            for key, inner in mapping.items()
        )
    )


@lru_cache(MOST_SHARED)
def _first_of(entries: tuple[tuple[Any, Any, Any], ...]) -> dict[Any, Any]:
    return {key: inner for key, inner, _ in entries}


@cache
def _all_fields(cls: type[BaseModel]) -> set[str]:
    return set(cls.model_fields)


def parse(cls: type[V], data: object, source: str) -> V:
    """Builds `cls` from plain data.

    Raises:
        UserError: naming `source`, the dotted path of the field, what was received and what would work.
    """
    if not isinstance(data, dict):
        raise UserError(f"{source}: expected a mapping of keys to values, received {type(data).__name__}.")
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{source}: {_explain(error, cls)}") from None


def without_removed(data: Any, removed: Mapping[str, tuple[Any, str]]) -> Any:
    """Returns plain data without keys that there were once, for a validator before all others.

    Args:
        data: what a value is built from.
        removed: the keys' defaults, which files of before may have, and what decides now.

    Raises:
        ValueError: for such a key with another value than its default.
    """
    if not isinstance(data, dict):
        return data
    for key in data.keys() & removed.keys():
        default, decides = removed[key]
        if data[key] != default:
            raise ValueError(f"the key {key!r} was removed: {decides}")
    return {key: value for key, value in data.items() if key not in removed}


def _explain(error: ValidationError, cls: type[BaseModel]) -> str:
    """The first problem in words; an unknown key explains more than the missing one it may stand for."""
    problems = error.errors()
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return str(unknown_name("key", path, _known_beside(cls, first["loc"])))
    if first["type"] == "missing":
        return f"the key {path!r} is missing."
    if first["type"] == "model_type":  # pydantic's words would name a class of ours
        below = ", ".join(_known_beside(cls, (*first["loc"], "")))
        return f"{path}: has keys of its own, give one of them: {below} (received {first['input']!r})"
    # if the field may be a word or else of another type, all that it may be
    location, message = first["loc"], first["msg"]
    beside = [p for p in problems if p["loc"][:-1] == location[:-1] and p["msg"].startswith(SHOULD_BE)]
    if any(str(p["loc"][-1]).startswith("literal[") for p in beside):
        allowed = (p["msg"].removeprefix(SHOULD_BE).partition(",")[0] for p in beside)
        location = location[:-1]
        message = SHOULD_BE + " or ".join(allowed).replace("a valid boolean", "yes or no")
    else:
        message = message.removeprefix("Value error, ").replace("a valid tuple", "a list, such as [a, b]")
        if first["type"] == "string_type" and isinstance(first["input"], int | float):
            message += "; a text that looks like a number stands in quotes"
    where = f"{'.'.join(map(str, location))}: " if location else ""
    if isinstance(first["input"], (dict, list, tuple, BaseModel)):
        return f"{where}{message}"
    return f"{where}{message} (received {first['input']!r})"


def _known_beside(cls: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The dotted names of the fields that were allowed where an unknown key stood."""
    current: type[BaseModel] | None = cls
    for part in location[:-1]:
        if isinstance(part, str) and current is not None:
            current = _value_class(current.model_fields[part].annotation)
    prefix = "".join(f"{part}." for part in location[:-1])
    return [prefix + name for name in current.model_fields] if current else []


def _value_class(annotation: object) -> type[BaseModel] | None:
    """The value class inside `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_value_class, get_args(annotation))), None)


def stays_below(path: str) -> str:
    """Returns a path that a file, or a store of files, gives.

    Raises:
        ValueError: if it is none that stays in its folder.
    """
    parts = PurePosixPath(path).parts
    half_a_character = any("\ud800" <= letter <= "\udfff" for letter in path)
    if not parts or parts[0] == "/" or ".." in parts or "\0" in path or half_a_character:
        raise ValueError("expected a relative path that stays in its folder")
    return path


PathBelow = Annotated[str, AfterValidator(stays_below)]
"""A path that a file gives, of another file below its own folder; whoever wrote it cannot lead out of there."""

TIME_UNITS = {"m": 60_000, "h": 3_600_000, "d": 86_400_000}
"""Milliseconds of the units of a length of time."""
EXPONENT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
"""A number with an exponent, as YAML 1.2 has it."""
MOST_VALUES = 1_000_000
"""Values that a YAML file may have."""


def milliseconds_of(text: str) -> int | None:
    """Returns the milliseconds of a length of time such as `3d`, `6h` or `30m`; None for any other text."""
    match = re.fullmatch(r"([0-9]+)([mhd])", text.strip())
    return int(match[1]) * TIME_UNITS[match[2]] or None if match else None


def load_yaml(path: Path) -> Any:
    """Reads a YAML (or JSON) file.

    Raises:
        UserError: when the file is missing or is no YAML, with the line.
    """
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except (IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error}).") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


class _Loader(yaml.SafeLoader):
    """YAML as PyYAML reads it, which is 1.1, with the exponents of 1.2 (`1e-3`), and with dates and all keys as
    text: a column may be called on, no or 12:30:45."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Makes a mapping whose keys are as they are written."""
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


class YamlDumper(yaml.SafeDumper):
    """Writes in quotes what `parse_yaml` would take for a number."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, YamlDumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """Reads YAML (or JSON); nothing that it names is executed. `1e-3` is a number, and dates are text.

    Raises:
        ValueError: if it is none, or if aliases stand for more than `MOST_VALUES` values.
    """
    try:
        data = yaml.load(text, _Loader)
    except RecursionError:
        raise ValueError("not valid YAML: too many levels.") from None
    # the constructors of single values raise whatever Python does
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise ValueError(f"not valid YAML: {reason}.") from None
    # of values once aliases are written out few lines may have any number
    waiting, count = [data], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values, once aliases (`*name`) are written out.")
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return data


def load_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
        UserError: when the file cannot be read or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error}).") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}).") from None


def dump_yaml(data: Any) -> str:
    """YAML in the order given."""
    return str(yaml.dump(data, Dumper=YamlDumper, sort_keys=False, allow_unicode=True, width=110))


# The identity of plain data, and of files: equal configurations, jobs and points have equal fingerprints.


def fingerprint(data: Any) -> str:
    """16 hex digits of SHA-256 over the canonical JSON of plain data."""
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
