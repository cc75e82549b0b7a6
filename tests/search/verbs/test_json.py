"""What verbs print with `--json`: each its own shape, on stdout alone.

The runner of tests (`tests/command_line.py`) holds every output to it, also those of other files.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import get_args

import pytest
from command_line import Run, output_of, write_log

from dhen.values import Value
from search.cli import VERBS, cli
from search.read_study import read_study

ROOT = Path(__file__).parent.parent.parent.parent
REPORT_NOTHING = {"ui", "serve"}
"""Verbs that go on until they are ended."""
ELSEWHERE = {
    "optuna": "tests/search/optuna/test_mirror.py",
    "confirm": "tests/search/analysis/test_winners.py",
    "ablate": "tests/search/analysis/test_winners.py",
    "slices": "tests/search/analysis/test_winners.py",
    "train": "tests/search/online/test_online.py",
    "online": "tests/search/online/test_online.py",
    "apply": "tests/search/online/test_online.py",
    "plan": "tests/search/verbs/test_plan.py",
    "fidelity": "tests/search/analysis/test_fidelity.py",
    "reproduce": "tests/search/analysis/test_reproduce.py",
    "clusters": "tests/search/verbs/test_clusters.py",
    "register": "tests/search/mlflow/test_registered_model.py",
    "worker": "tests/search/drivers/test_many_drivers.py",
}
"""Files that run a verb with `--json` on what it needs, which takes its time to make."""
HERE = {
    *("prepare", "demo", "run", "status", "leaderboard", "report", "export", "verify", "predict"),
    *("spaces", "blocks", "average", "cache"),
}


@pytest.fixture(scope="module")
def copied(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished study, to be written into."""
    out = tmp_path_factory.mktemp("json") / "study"
    shutil.copytree(study, out)
    return out


def test_every_verb_that_reports_has_a_shape_and_a_test_that_holds_it_to_it() -> None:
    for verb in VERBS:
        command = cli.get_command(None, verb)  # type: ignore[arg-type]
        assert command is not None
        prints_json = any("--json" in param.opts for param in command.params)
        assert prints_json == (output_of(verb) is not None) == (verb not in REPORT_NOTHING), verb
    assert HERE | ELSEWHERE.keys() | REPORT_NOTHING == VERBS.keys()
    for verb, path in ELSEWHERE.items():
        assert re.search(rf'"{verb}"[\s\S]*"--json"', (ROOT / path).read_text()), verb


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - REPORT_NOTHING))
def test_a_shape_is_a_frozen_value_that_the_page_of_formats_has(verb: str) -> None:
    shape = output_of(verb)
    (shape,) = get_args(shape) or (shape,)
    assert issubclass(shape, Value)
    page = (ROOT / "docs" / "formats.md").read_text()
    told = page.partition(f"## `{verb} --json`\n")[2].partition("\n## ")[0]
    told += "".join(line for line in page.splitlines() if line.startswith(f"| `{verb}` |"))
    assert [name for name in shape.model_fields if f"`{name}`" not in told] == []


def test_a_log_that_was_prepared(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    done = dhen_search("prepare", click_log, "--out", tmp_path / "log", "--json")
    said = json.loads(done.stdout)
    assert sum(said["rows"].values()) == 4000
    assert said["directory"] == str(tmp_path / "log")
    assert "reading: 4,000 of 4,000 rows" in done.stderr
    assert json.loads(dhen_search("demo", "--out", tmp_path / "demo.csv", "rows=1000", "--json").stdout) == {
        "file": str(tmp_path / "demo.csv"),
        "rows": 1000,
    }


def test_a_study_and_its_best(dhen_search: Run, copied: Path, click_log: Path) -> None:
    record = read_study(copied)
    ran = json.loads(dhen_search("run", "--out", copied, "trials=4", "--json").stdout)
    assert (ran["best"], ran["front"]) == (record.best, list(record.front))
    assert json.loads(dhen_search("status", copied, "--json").stdout)["name"] == "study"
    reported = json.loads(dhen_search("report", copied, "--json").stdout)
    assert Path(reported["report"]).exists()
    assert reported["sentences"] == ran["sentences"]
    out = copied.parent / "bundle"
    exported = json.loads(dhen_search("export", copied, "--pick", "knee", "--out", out, "--json").stdout)
    assert exported["trial"] == record.knee
    done = dhen_search("verify", out, "--data", click_log, "--json")
    verified = json.loads(done.stdout)
    assert verified["holds"]
    assert verified["same_log"]
    assert verified["splits"]["validation"]["now"]["ne"] == pytest.approx(exported["ne"], abs=1e-6)
    assert "files: whole, none altered" in done.stderr


def test_what_there_is(dhen_search: Run) -> None:
    (space,) = json.loads(dhen_search("spaces", "tiny", "--json").stdout)
    assert space["space"]["modules"]
    assert all("space" not in one for one in json.loads(dhen_search("spaces", "--json").stdout))
    assert json.loads(dhen_search("cache", "--json").stdout)["cleared"] == []
    assert json.loads(dhen_search("blocks", "attention", "--json").stdout)[0]["settings"]["heads"]["default"]


def test_a_leaderboard_scores_and_averages(dhen_search: Run, copied: Path, tmp_path: Path) -> None:
    record = read_study(copied)
    said = json.loads(dhen_search("leaderboard", copied, "--json").stdout)
    rows = {row["trial"]: row for row in said["rows"]}
    assert rows.keys() == {record.baseline, record.best, *record.front}
    whole = json.loads(dhen_search("leaderboard", copied, "--all", "--by", "flops", "--json").stdout)
    assert len(whole["rows"]) == whole["finished_trials"] == len(record.trials)
    for number, row in rows.items():
        trial = record.trial(number)
        assert row["ne"] == trial.result.validation.ne  # type: ignore[union-attr]
        assert row["flops"] == trial.job.flops
        assert row["technique"] == trial.result.technique
    best = rows[record.best]["export"].split()[1:]
    out = copied.parent / "by-command"
    dhen_search(*best[:-1], out)
    assert json.loads((out / "bundle.json").read_text())["trial"] == record.best
    log = write_log(tmp_path / "new.csv", 50, seed=1, label=False)
    words = ("predict", out, "--data", log, "--out", tmp_path / "scores.csv", "--json")
    assert json.loads(dhen_search(*words).stdout) == {"file": str(tmp_path / "scores.csv"), "rows": 50}
    averaged = json.loads(dhen_search("average", copied, "--most", 2, "--json").stdout)
    assert averaged["finished"]
    assert averaged["front"] == list(read_study(copied).front)
