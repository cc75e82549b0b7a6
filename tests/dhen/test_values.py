"""Reading values: YAML errors in words, canonical fingerprints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from dhen.errors import UserError, unknown_name
from dhen.schema import FeatureSchema
from dhen.values import Value, compact, dump_yaml, fingerprint, load_yaml, parse, parse_yaml


def test_fingerprint_ignores_the_order_of_keys() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def test_yaml_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_yaml(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [1, 2\nb: 3")
    with pytest.raises(UserError, match=r"bad\.yaml: not valid YAML.*line 2"):
        load_yaml(bad)
    with pytest.raises(UserError, match="cannot be read"):
        load_yaml(tmp_path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "at least one feature column"),
        ({"tables": [{"name": "a", "rows": 3}, {"name": "a", "rows": 4}]}, "same name"),
        (
            {"tables": [{"name": "m", "rows": 3, "multi_hot": True}, {"name": "a", "rows": 4}]},
            "then multi-hot",
        ),
        ({"tables": [{"name": "a", "rows": 0}]}, "greater than 0"),
        ({"tables": [{"name": "a", "rows": 3, "mean_ids": float("inf")}]}, "finite"),
        ([1], "expected a mapping"),
    ],
)
def test_feature_schema_refuses(data: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(FeatureSchema, data, "schema")


@pytest.mark.parametrize(
    ("received", "meant"),
    [
        ("a100", "a100-80gb"),
        ("A100", "a100-80gb"),
        ("80gb", "a100-80gb"),
        ("zionx", "zionex"),
        ("rtx", "rtx-4090"),
        ("nothing", None),
        ("x", None),
    ],
)
def test_an_unknown_name_hints_at_the_one_it_is_a_part_of(received: str, meant: str | None) -> None:
    said = str(unknown_name("cluster", received, ["zionex", "a100-80gb", "h100", "rtx-4090"]))
    assert said.startswith(f"unknown cluster {received!r}.")
    assert said.endswith("Known: a100-80gb, h100, rtx-4090, zionex.")
    assert (f"Did you mean {meant!r}?" in said) if meant else "Did you mean" not in said


class Pair(Value):
    """Two numbers that go together."""

    first: int = 0
    """The smaller one."""
    second: int = 1
    """The larger one."""

    @model_validator(mode="after")
    def _are_ordered(self) -> Pair:
        if self.first > self.second:
            raise ValueError("first is above second")
        return self


class _Several(Value):
    answer: Literal["auto"] | bool = "auto"
    number: Annotated[int, Field(gt=0)] | Literal["auto", "none"] | None = None
    below: dict[str, int] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"answer": "maybe"}, "answer: Input should be 'auto' or yes or no (received 'maybe')"),
        ({"number": "many"}, "number: Input should be a valid integer or 'auto' or 'none' (received 'many')"),
        ({"number": -3}, "number: Input should be greater than 0 or 'auto' or 'none' (received -3)"),
        (
            {"below": {"a": "x", "b": "x"}},
            "below.a: Input should be a valid integer, unable to parse string as an integer (received 'x')",
        ),
    ],
)
def test_a_value_of_no_type_that_a_field_has_is_told_all_of_them(given: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"settings: {says}")):
        parse(_Several, given, "settings")


def test_replace_changes_what_is_named_and_refuses_other_names_and_values() -> None:
    before = Pair(first=1, second=5)
    assert before.replace(first=2) == Pair(first=2, second=5)
    assert before == Pair(first=1, second=5)
    with pytest.raises(TypeError, match=r"unknown field 'frist'.*Did you mean 'first'"):
        before.replace(frist=3)
    for value in ("many", 7):  # of another type, and above the second
        with pytest.raises(ValidationError):
            before.replace(first=value)


class Inner(Value):
    name: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)


class Outer(Value):
    first: Inner
    second: Inner | None = None
    others: tuple[Inner, ...] = ()


def test_what_is_kept_of_equal_values_is_one_object() -> None:
    given = [Outer(first=Inner(name="".join(["a", "b"]), settings={"x": 1, "y": [2]})) for _ in range(2)]
    one, other = map(compact, given)
    assert one == given[0]
    assert one.model_fields_set is other.model_fields_set
    assert one.first.name is other.first.name
    several = [compact(Inner(settings={"kind": "mlp", "widths": 3})) for _ in range(2)]
    assert several[0].settings is several[1].settings


def test_parts_that_were_one_object_stay_so() -> None:
    inner = Inner(name="a")
    kept = compact(Outer(first=inner, second=inner, others=(inner,)))
    assert kept.first is kept.second is kept.others[0]


@pytest.mark.parametrize("others", [[1, 1.0, True], [0, 0.0, -0.0, False], ["1", 1]])
def test_settings_that_are_equal_and_written_differently_stay_apart(others: list[Any]) -> None:
    values = [Inner(settings={"x": value}) for value in others]
    assert [repr(compact(value)) for value in values] == list(map(repr, values))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-2E5", -2e5),
        (".5e1", 5.0),
        ("1.5", 1.5),
        ("2024-06-01", "2024-06-01"),
        ("e5", "e5"),
    ],
)
def test_exponents_are_numbers_and_dates_are_text(text: str, value: object) -> None:
    assert parse_yaml(text) == value
    assert parse_yaml(dump_yaml({"a": value})) == {"a": value}
    assert parse_yaml(dump_yaml({"a": text})) == {"a": text}
