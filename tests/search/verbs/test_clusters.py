"""`dhen-search clusters`: the list, one with its sources, the documented JSON, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import Run

from dhen.values import parse
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import catalog


def test_the_list_names_all_and_each_is_shown_with_its_numbers_and_sources(dhen_search: Run) -> None:
    shown = dhen_search("clusters").stdout
    assert all(name in shown for name in [*catalog(), "this"])
    assert all(words in shown for words in ("16 x 8", "312 TFLOP/s", "Unverified"))
    for name, cluster in catalog().items():
        shown = dhen_search("clusters", name).stdout
        unwrapped = "".join(shown.split())
        for key, source in cluster.sources.items():
            assert key in shown, name
            assert source.split()[0] in unwrapped, name
        assert "Unverified" in shown


def test_json_is_a_list_of_complete_clusters(dhen_search: Run) -> None:
    rows = json.loads(dhen_search("clusters", "--json").stdout)
    assert [row["name"] for row in rows] == [*catalog(), "this"]
    written = set(Cluster.model_fields)
    assert all(set(row) == written for row in rows)
    for row in rows[:-1]:
        assert parse(Cluster, row, "json") == catalog()[row["name"]]
    assert rows[-1]["hosts"] == 1
    assert rows[-1]["peak_flops"] is None


def test_a_file_of_your_own_and_mistakes(dhen_search: Run, tmp_path: Path) -> None:
    own = tmp_path / "ours.yaml"
    (row,) = json.loads(dhen_search("clusters", "rtx-4090", "--json").stdout)
    own.write_text(json.dumps(row | {"name": "ours", "hbm": "12GiB"}))
    assert "12.0 GiB" in dhen_search("clusters", own).stdout
    own.write_text(json.dumps(row | {"memory": "12GiB"}))
    assert "unknown key 'memory'" in dhen_search("clusters", own, code=2).stderr
    assert "Known: a100-80gb" in dhen_search("clusters", "b200", code=2).stderr
