"""Reading values: YAML errors in words, canonical fingerprints."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhen.errors import UserError
from dhen.schema import FeatureSchema
from dhen.values import fingerprint, load_yaml, parse


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
            "before multi-hot",
        ),
        ({"tables": [{"name": "a", "rows": 0}]}, "greater than 0"),
        ([1], "expected a mapping"),
    ],
)
def test_feature_schema_refuses(data: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(FeatureSchema, data, "schema")
