"""A study over sparse attention, its export and its predictions, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import SMALL, Run

SPACE = """
depth: [1]
slots: 1
modules:
  sparse_attention:
    layout: [bigbird, given, sliding_window]
    block_size: [1, 2]
    feedforward: [8]
    given: [["101", "010", "011"]]
ensemble: sum
out_embeddings: [4]
raw_numeric: false
model: {embedding_dim: [8], numeric_mlp: [[8]], head: [[]]}
training: {}
"""


def test_a_study_finds_exports_and_predicts_with_it(
    dhen_search: Run, click_log: Path, tmp_path: Path
) -> None:
    space, out, bundle = tmp_path / "space.yaml", tmp_path / "study", tmp_path / "bundle"
    space.write_text(SPACE)
    words = [word for word in SMALL if not word.startswith("space=")]
    dhen_search("run", "--data", click_log, "--out", out, f"space={space}", "trials=3", *words)
    status = json.loads(dhen_search("status", out, "--json").stdout)
    candidates = [trial for trial in status["trials"] if trial["kind"] == "candidate"]
    modules = [trial["job"]["model"]["layers"][0]["modules"][0] for trial in candidates]
    assert [trial["result"]["outcome"] for trial in candidates] == ["completed"] * 3
    assert {module["kind"] for module in modules} == {"sparse_attention"}
    number = candidates[0]["number"]
    dhen_search("export", out, "--pick", number, "--out", bundle)
    assert "sparse_attention" in (bundle / "bundle.json").read_text()
    dhen_search("verify", bundle, "--data", click_log)
    scores = tmp_path / "scores.csv"
    dhen_search("predict", bundle, "--data", click_log, "--out", scores)
    lines = scores.read_text().splitlines()[1:]
    assert len({float(line.split(",")[1]) for line in lines}) > 100


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("{layout: [bigbrid]}", "'fixed', 'sliding_window', 'bigbird', 'variable' or 'given'"),
        ("{layout: [given]}", "layout given needs its rows"),
        ("{layout: [given], given: [['10', '1']]}", "2 rows need 2 characters each"),
        ("{window_size: [1]}", "Did you mean 'window'"),
    ],
)
def test_a_bad_layout_in_a_space_is_one_clear_message(
    dhen_search: Run, click_log: Path, tmp_path: Path, module: str, said: str
) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(f"modules: {{sparse_attention: {module}}}\nslots: 1\n")
    words = ("run", "--data", click_log, "--out", tmp_path / "study", f"space={space}", "trials=1")
    assert said in dhen_search(*words, code=2).stderr
