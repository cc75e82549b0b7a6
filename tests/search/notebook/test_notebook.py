"""What `from search import ...` gives, on a study that was really searched."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pandas as pd
import pytest
from command_line import TIMEOUT_SECONDS, Run
from warm_process import WarmProcess

import search
from dhen.errors import UserError
from search.notebook.study import Study
from search.read_study import read_study


def test_the_names_are_few_and_each_is_there() -> None:
    for name in search.__all__:
        assert getattr(search, name).__doc__, name
        assert name in dir(search)
    with pytest.raises(AttributeError, match="it has UserError, open_bundle, open_study, plan, run_study"):
        _ = search.open_run


@pytest.fixture(scope="module")
def opened(study: Path) -> Study:
    return search.open_study(study)


def test_frames_have_the_records_numbers(opened: Study, study: Path) -> None:
    record = read_study(study)
    assert list(opened.trials.index) == [each.number for each in record.trials]
    assert list(opened.front.index) == list(record.front)
    assert opened.best == record.best
    for each in record.trials:
        row = opened.trials.loc[each.number]
        assert row["flops"] == each.job.flops
        if each.result.validation:
            assert row["ne"] == pytest.approx(each.result.validation.ne)
        curve = opened.curves[opened.curves["trial"] == each.number]
        assert list(curve["examples"]) == [point.examples for point in each.result.curve]
        assert list(curve["ne"]) == pytest.approx([point.validation.ne for point in each.result.curve])
        attempts = opened.attempts[opened.attempts["trial"] == each.number]
        assert list(attempts["strategy"]) == [attempt.strategy for attempt in each.attempts]
    for each in record.candidates:
        point = opened.points.loc[each.number].dropna().to_dict()
        assert {name: point[name] for name in each.point} == each.point
    assert opened.winners.empty
    assert opened.trials.loc[record.baseline, "ne_vs_baseline_percent"] == pytest.approx(0.0)
    by_database = search.open_study(f"sqlite:///{study / 'study.db'}")
    pd.testing.assert_frame_equal(by_database.trials, opened.trials)
    assert by_database.directory == study.resolve()
    assert by_database.refresh().name == opened.name


def test_a_study_shows_itself_and_the_reports_figures_and_escapes(opened: Study, study: Path) -> None:
    assert {"front", "curves", "time", "ladder"} <= set(opened.figures)
    drawn = [len(trace.x) for trace in opened.figures["curves"].data if trace.x is not None]
    assert max(drawn) > 1
    shown = opened._repr_html_()
    assert f"<h3>{study.name}</h3>" in shown
    assert "<table" in shown
    assert opened.summary[0] in repr(opened)
    opened = search.open_study(study)
    opened.record = opened.record.replace(name="<script>alert(1)</script>")
    assert "<script>" not in opened._repr_html_()


def test_winners_have_their_intervals(averaged: Path) -> None:
    record, winners = read_study(averaged), search.open_study(averaged).winners
    assert list(winners.index) == [each.trial for each in record.comparisons]
    for each in record.comparisons:
        row = winners.loc[each.trial]
        assert (row["low_percent"], row["high_percent"]) == (each.low_percent, each.high_percent)
        assert (row["better"], row["flops"]) == (each.better.value, record.trial(each.trial).job.flops)


def test_a_bundle_scores_a_frame_as_predict_does(
    study: Path, click_log: Path, dhen_search: Run, tmp_path: Path
) -> None:
    rows = pd.read_csv(click_log, nrows=50).sample(frac=1.0, random_state=0)
    bundle = search.open_bundle(study / "best")
    scores = bundle.score(rows[list(bundle.columns)])
    assert list(scores.index) == list(rows.index)
    dhen_search("predict", study / "best", "--data", click_log, "--out", tmp_path / "scores.csv")
    expected = pd.read_csv(tmp_path / "scores.csv")["score"]
    assert list(scores) == pytest.approx(list(expected.iloc[rows.index]), abs=1e-5)
    assert bundle.metrics.loc[("model", "validation"), "ne"] > 0
    assert str(study / "best") in bundle._repr_html_()


def test_a_plan_is_the_command_lines(tmp_path: Path, dhen_search: Run) -> None:
    request = {
        "model": {
            "embedding_dim": 64,
            "layers": [{"modules": ["attention", "dcn_v2"], "out_embeddings": 64}] * 4,
        },
        "schema": {"tables": [{"name": "site", "rows": 1_000_000}], "numeric": 100},
        "training": {"batch_size": 65536, "precision": "bf16"},
    }
    (tmp_path / "model.yaml").write_text(json.dumps(request))
    words = ("--cluster", "zionex", "--ranks", "1x8", "--hbm", "8GiB", "--json")
    (printed,) = json.loads(dhen_search("plan", tmp_path / "model.yaml", *words).stdout)
    held = {"cluster": "zionex", "ranks": "1x8", "hbm": "8GiB"}
    for asked in (
        search.plan(request["model"], schema=request["schema"], training=request["training"], **held),
        search.plan(tmp_path / "model.yaml", **held),
    ):
        assert asked.technique == printed["chosen"]
        assert list(asked.ladder.index) == [strategy["name"] for strategy in printed["strategies"]]
        assert list(asked.ladder["peak_bytes"]) == [each["memory"]["total"] for each in printed["strategies"]]
        assert printed["chosen"] in asked._repr_html_()
    small = search.plan("dcn_v2", schema=request["schema"], training={"batch_size": 8192}, cluster="zionex")
    assert small.technique == "dp"
    nothing = search.plan(
        request["model"], **(held | {"hbm": "1MiB"}), **{k: request[k] for k in ("schema", "training")}
    )
    assert nothing.technique is None
    assert nothing.sentences


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("open_study('none')", "no study here"),
        ("open_study('sqlite:////none/study.db')", "cannot be used"),
        ("open_bundle('none')", "none"),
        ("run_study('none.csv', 'out')", "no such file"),
        ("run_study(trials=2, training={'epochz': 1})", "training.epoch"),
        ("run_study(trials=object())", "is no value of a setting"),
        ("plan('dcn_v2', space='wide')", "unknown key 'space'. Known: columns, csv, demo, format"),
        ("plan('dcn_v2')", "'schema' is missing"),
        ("plan('dcn_v2', cluster='zion', schema={'numeric': 3}, training={'batch_size': 8})", "zionex"),
    ],
)
def test_what_is_wrong_is_said(call: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        eval(call, {name: getattr(search, name) for name in search.__all__})


SCRIPT = """
import sys
from search import run_study

def search_on(trials):
    return run_study(
        sys.argv[1], sys.argv[2], trials=trials, space="tiny", training={"epochs": 1}, baseline_trials=1,
        parallel=1, threads=1, averages=0,
    )

try:
    search_on(50)
except KeyboardInterrupt:
    print("caught", flush=True)
study = search_on(2)
print("finished", study.finished, len(study.trials), flush=True)
"""
"""A program without `if __name__ == "__main__"`."""


def test_an_interrupt_leaves_a_study_that_the_same_call_goes_on_with(
    click_log: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """From `python -c`; from plain files tests/docs/test_examples.py runs studies."""
    process = WarmProcess((click_log, tmp_path / "out"), environment, code=SCRIPT)
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("trial 2 "):
            process.send_signal(signal.SIGINT)
    process.communicate(TIMEOUT_SECONDS)
    assert process.returncode == 0, said
    text = "".join(said)
    assert "interrupted; the same command goes on" in text
    assert "caught" in text
    assert "finished True" in text
    assert text.count("baseline 0 completed") == 1, "what was finished was trained again"
