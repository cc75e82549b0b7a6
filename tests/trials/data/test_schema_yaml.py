from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhen.errors import UserError
from dhen.values import parse_yaml
from trials.data.log_schema import (
    CYCLES,
    CategoricalColumn,
    IgnoredColumn,
    LabelColumn,
    LogSchema,
    MultiHotColumn,
    NumericColumn,
    OracleColumn,
    SplitRule,
    TimestampColumn,
    WeightColumn,
)
from trials.data.schema_yaml import check_columns, parse_schema, read_schema, schema_to_yaml
from trials.records.study_record import ColumnFinding

buckets = st.one_of(st.none(), st.just("auto"), st.integers(1, 10**9))
tables = st.one_of(
    st.builds(CategoricalColumn, min_count=st.integers(1, 99), hash_buckets=buckets),
    st.builds(
        MultiHotColumn, separator=st.one_of(st.none(), st.text(min_size=1, max_size=2)), hash_buckets=buckets
    ),
    st.builds(NumericColumn, transform=st.sampled_from(["standard", "log"])),
)
singles = st.tuples(
    st.builds(LabelColumn, positive=st.one_of(st.none(), st.text(max_size=5))),
    st.one_of(st.builds(WeightColumn), st.builds(IgnoredColumn)),
    st.one_of(st.builds(OracleColumn), st.builds(IgnoredColumn)),
    st.builds(
        TimestampColumn, format=st.sampled_from(["iso", "yymmddhh"]), derive=st.sampled_from([(), CYCLES])
    ),
)
rules = st.one_of(
    st.builds(SplitRule, by=st.sampled_from(["order", "timestamp"]), validation=st.floats(0.01, 0.4)),
    st.just(SplitRule(by="files", validation=("b.csv",), test=("c.csv", "d é.csv"))),
    st.just(SplitRule(by="order", validation=0.2, test=("c.csv", "d é.csv"))),
)
names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=200).filter(
    lambda name: not name.endswith("__missing") and name not in CYCLES
)


@st.composite
def schemas(draw: st.DrawFn) -> LogSchema:
    columns = [*draw(singles), *draw(st.lists(tables, min_size=1, max_size=6))]
    titles = draw(st.lists(names, min_size=len(columns), max_size=len(columns), unique=True))
    return LogSchema(
        columns=dict(zip(titles, columns, strict=True)),
        split=draw(rules),
        negative_sampling_rate=draw(st.floats(0.001, 1.0)),
    )


@given(schemas(), st.text(max_size=20))
def test_what_is_written_is_read_back(schema: LogSchema, note: str) -> None:
    text = schema_to_yaml(schema, [finding(name, note) for name in schema.columns])
    assert parse_schema(parse_yaml(text), "schema.yaml") == schema


def finding(name: str, why: str) -> ColumnFinding:
    return ColumnFinding(name=name, role="", why=why, distinct=73, missing=0.0, example="")


def test_names_that_yaml_takes_for_something_else_may_be_retyped_without_quotes() -> None:
    names = ("on", "no", "null", "~", "1e3", "0x1F", "12:30:45", "2026-11-01", "1.0", "y")
    text = "columns:\n" + "".join(f"  {name}: {{role: categorical}}\n" for name in names)
    assert tuple(parse_schema(parse_yaml(f"{text}  click: {{role: label}}\n"), "s.yaml").tables) == names


def test_it_is_made_to_be_edited(tmp_path: Path) -> None:
    schema = LogSchema(columns={"click": LabelColumn(), "age": NumericColumn()})
    text = schema_to_yaml(schema, [finding("age", "numbers")])
    assert "  age: {role: numeric, transform: standard, buckets: null}  # numbers; 73 values\n" in text
    path = tmp_path / "schema.yaml"
    path.write_text(text.replace("transform: standard", "transform: log"))
    assert read_schema(path).columns["age"] == NumericColumn(transform="log")


COLUMNS: dict[str, Any] = {"click": {"role": "label"}, "age": {"role": "numeric"}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"columns": COLUMNS, "splt": {}}, r"s.yaml: unknown key 'splt'. Did you mean 'split'"),
        ({"columns": COLUMNS, "split": {"bye": "order"}}, "Did you mean 'split.by'"),
        (
            {"columns": {**COLUMNS, "age": {"role": "numeric", "transfrm": "log"}}},
            "column 'age'.*Did you mean 'transform'",
        ),
        ({"columns": {**COLUMNS, "age": {"role": "numerc"}}}, "column 'age'.*Did you mean 'numeric'"),
        ({"columns": {**COLUMNS, "age": "numeric"}}, "column 'age': expected {role: ...}"),
        ({"columns": {**COLUMNS, "age": {"role": "categorical", "min_count": 0}}}, "min_count.*greater than"),
        ({"columns": {**COLUMNS, "age": {"role": "timestamp", "format": "ddmmyy"}}}, "format.*'iso'"),
        ({"columns": {"age": {"role": "numeric"}}}, "no column has the role label"),
        ({"columns": {"click": {"role": "label"}}}, "no column is a feature"),
        ({"columns": {**COLUMNS, "c2": {"role": "label"}}}, "2 columns have the role label.*click, c2"),
        ({"columns": COLUMNS, "split": {"by": "timestamp"}}, "needs a column with the role timestamp"),
        ({"columns": COLUMNS, "split": {"by": "order", "test": 0.95}}, "leave rows for training"),
        ({"columns": COLUMNS, "split": {"by": "files"}}, "lists of file names"),
        (
            {"columns": COLUMNS, "split": {"by": "column", "validation": ["a"], "test": ["b"]}},
            "needs a column with the role split",
        ),
        (
            {"columns": COLUMNS, "split": {"by": "files", "validation": ["a"], "test": ["a"]}},
            "both in validation and",
        ),
        ({"columns": COLUMNS, "negative_sampling_rate": 0}, "negative_sampling_rate"),
        ({"columns": {**COLUMNS, "age__missing": {"role": "numeric"}}}, "age__missing is the name"),
        (
            {"columns": {**COLUMNS, "t": {"role": "timestamp"}, "hour_of_day": {"role": "categorical"}}},
            "'hour_of_day' itself",
        ),
        ([], "expected a mapping"),
        ({}, "'columns' is missing"),
    ],
)
def test_mistakes_are_named(data: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_schema(data, "s.yaml")


def test_columns_that_the_log_lacks() -> None:
    schema = parse_schema({"columns": COLUMNS}, "s.yaml")
    check_columns(schema, ["click", "age", "more"], "s.yaml")
    with pytest.raises(
        UserError, match=r"s.yaml: unknown column in the schema 'age'.*'aged'.*Known: aged, click"
    ):
        check_columns(schema, ["click", "aged"], "s.yaml")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_schema(tmp_path / "schema.yaml")
