"""The whole road through the public command line: run, look, take away, verify, train, predict."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL, Run, write_log

from dashboards.report.page import packed_plotly
from search.read_study import read_study
from search.selection import CONTENDERS
from search.verbs import verify
from trials.records.trial_record import Metrics, Outcome, TrialKind
from trials.store.database import sqlite_url
from trials.store.ledger import Ledger
from trials.training.evaluation import evaluate


def test_a_study_leaves_what_the_design_promises(study: Path) -> None:
    for name in ("study.yaml", "study.db", "mlflow.db", "artifacts", "report.html", "best"):
        assert (study / name).exists(), name
    record = read_study(study)
    assert record.finished
    assert [trial.kind for trial in record.trials].count(TrialKind.CANDIDATE) == 4
    assert all(trial.result.outcome is Outcome.COMPLETED for trial in record.trials)
    assert record.baseline == 0
    assert record.front
    assert record.choice is not None
    winners = {winner.trial for winner in record.choice.winners}
    assert record.best in {record.baseline, *winners}
    longest = max((trial.result.curve for trial in record.trials), key=len)
    for trial in record.trials:
        scored = trial.number == record.baseline or trial.number in winners
        assert (trial.result.test is not None) == scored
        assert trial.job.flops
        assert trial.result.measured.peak_memory_bytes
        examples = [point.examples for point in trial.result.curve]
        assert examples == [point.examples for point in longest[: len(examples)]]
    ledger = Ledger(sqlite_url(study / "study.db"), record.name)
    assert ledger.test_looks() == 1 + len(winners)
    ledger.close()
    html = (study / "report.html").read_text()
    assert packed_plotly() in html
    assert 'src="http' not in html


def test_only_what_may_be_exported_keeps_weights(study: Path) -> None:
    record = read_study(study)
    lowest = sorted(record.candidates, key=lambda trial: trial.result.validation.ne)[:CONTENDERS]
    kept = {int(path.parent.name) for path in (study / "trials").glob("*/weights.safetensors")}
    owners = {
        number if record.trial(number).origin.reused_from is None else record.trial(number).origin.reused_from
        for number in (*record.front, record.baseline or 0, *(trial.number for trial in lowest))
    }
    assert kept == owners


def test_the_same_command_again_does_nothing_twice_and_says_where_to_look(
    dhen_search: Run, study: Path, click_log: Path
) -> None:
    before = read_study(study)
    said = dhen_search("run", "--data", click_log, "--out", study, "trials=4", *SMALL).stdout.splitlines()
    after = read_study(study)
    assert after.trials == before.trials
    best = study / "best"
    assert said[-3:] == [
        f"report: {study / 'report.html'}",
        f"browse: dhen-search ui {study}",
        f"bundle: {best} (dhen-search predict {best} --data ...)",
    ]
    assert any(
        line.startswith(("The best candidate, trial ", "None is better than the tuned")) for line in said
    )
    assert any(line.startswith("On the test split, which no choice has seen, ") for line in said)


def test_status_needs_nothing_heavy(study: Path) -> None:
    code = "import sys; from search.cli import cli; cli.main(sys.argv[1:], standalone_mode=False); "
    code += "print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, "status", str(study)]
    modules = subprocess.run(command, capture_output=True, text=True, check=True).stderr.split()
    assert "search.run_directory" in modules
    assert {"torch", "mlflow", "optuna", "plotly", "pyarrow", "numpy"}.isdisjoint(modules)


@pytest.mark.parametrize("pick", ["best", "flops<=1e9"])
def test_export_and_verify(dhen_search: Run, study: Path, click_log: Path, tmp_path: Path, pick: str) -> None:
    bundle = tmp_path / "bundle"
    said = dhen_search("export", study, "--pick", pick, "--out", bundle).stdout
    record = read_study(study)
    if pick == "best" and record.best == record.baseline:
        assert "it is the baseline: no candidate is better beyond the noise of choosing" in said
    else:
        assert f"not confirmed: dhen-search confirm {study}" in said
    said = dhen_search("verify", bundle, "--data", click_log).stdout
    assert "the one it was trained on" in said
    info = json.loads((bundle / "bundle.json").read_text())
    assert f"at export NE {info['validation']['ne']:.5f}" in said
    other = write_log(tmp_path / "other.csv", 1500, seed=9)
    assert "another one" in dhen_search("verify", bundle, "--data", other).stdout


def test_verify_says_where_a_bundle_gives_other_numbers(
    dhen_search: Run, study: Path, click_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(*given: Any) -> Metrics:
        metrics = evaluate(*given)
        return metrics.replace(ne=metrics.ne + 0.1)

    monkeypatch.setattr(verify, "evaluate", off)
    said = dhen_search("verify", study / "best", "--data", click_log, code=1).stderr
    assert "NE differs by 0.1 from the export's" in said


def test_predict_scores_every_row_in_order(dhen_search: Run, study: Path, tmp_path: Path) -> None:
    log = write_log(tmp_path / "new.csv", 700, seed=3, label=False)
    lines = log.read_text().splitlines()
    unseen = "2026-02-01 00:00:00,never-seen,u99999999,q|r,,"
    log.write_text("\n".join([*lines, unseen]) + "\n")
    out = tmp_path / "scores.csv"
    dhen_search("predict", study / "best", "--data", log, "--out", out)
    rows = list(csv.reader(out.read_text().splitlines()))
    assert rows[0] == ["row", "score"]
    assert [int(row[0]) for row in rows[1:]] == list(range(701))
    assert all(0 < float(row[1]) < 1 for row in rows[1:])
    reordered = tmp_path / "reordered.csv"
    reordered.write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    dhen_search("predict", study / "best", "--data", reordered, "--out", out)
    backwards = [float(row[1]) for row in list(csv.reader(out.read_text().splitlines()))[1:]]
    assert backwards == pytest.approx([float(row[1]) for row in rows[700:0:-1]], abs=1e-6)


def test_train_again_and_go_on(dhen_search: Run, study: Path, click_log: Path, tmp_path: Path) -> None:
    again, on = tmp_path / "again", tmp_path / "on"
    dhen_search("train", study / "best", "--data", click_log, "--out", again)
    exported = json.loads((study / "best" / "bundle.json").read_text())
    retrained = json.loads((again / "bundle.json").read_text())
    assert retrained["job"] == exported["job"]
    assert retrained["validation"]["ne"] == pytest.approx(exported["validation"]["ne"], abs=1e-3)
    dhen_search(
        "train", study / "best", "--data", click_log, "--from-weights", "--out", on, "training.epochs=1"
    )
    continued = json.loads((on / "bundle.json").read_text())
    assert continued["validation"]["ne"] < 1.05 * exported["validation"]["ne"]
    dhen_search("verify", on)


def test_train_once_more_with_validation(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    """On one rank and on two."""
    words = ("train", "dlrm", "--data", click_log, "training.epochs=2", "training.precision=fp32", "--json")
    ends = {}
    for name, more in {"before": (), "alone": ("refit=yes",), "ranks": ("refit=yes", "ranks=1x2")}.items():
        out = tmp_path / name
        said = json.loads(dhen_search(*words, *more, "--out", out).stdout)
        bundle = json.loads((out / "bundle.json").read_text())
        assert said["refit"] == ("refit" in bundle["job"]) == (name != "before")
        assert said["test"] == bundle["test"]
        ends[name] = bundle["validation"]["ne"], bundle["test"]["ne"]
    assert ends["ranks"] == pytest.approx(ends["alone"], rel=5e-3)
    assert ends["alone"][0] == ends["before"][0]  # of what was not trained on validation
    assert abs(ends["alone"][1] / ends["before"][1] - 1) > 1e-4
    said = dhen_search("verify", tmp_path / "ranks", "--data", click_log).stdout
    assert "only NE on test compares" in said
    assert not [path for path in tmp_path.iterdir() if "training" in path.name]


def test_every_block_and_ensemble_trains(dhen_search: Run, tmp_path: Path) -> None:
    """Each registry entry, end to end."""
    from dhen.blocks import BLOCKS
    from dhen.ensembles import ENSEMBLES
    from dhen.values import dump_yaml

    layers = [
        {"modules": sorted(BLOCKS), "ensemble": ensemble, "out_embeddings": 2, "raw_numeric": True}
        for ensemble in sorted(ENSEMBLES)
    ]
    config, log = tmp_path / "all.yaml", write_log(tmp_path / "few.csv", 600)
    config.write_text(dump_yaml({"model": {"embedding_dim": 4, "layers": layers}, "training": {"epochs": 1}}))
    dhen_search("train", config, "--data", log, "--out", tmp_path / "all")
    dhen_search("verify", tmp_path / "all")


def test_numbers_as_buckets(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    """From schema.yaml to scores: one number has five buckets, one none."""
    prepared, config, scores = tmp_path / "prepared", tmp_path / "model.yaml", tmp_path / "scores.csv"
    dhen_search("prepare", click_log, "--out", prepared)
    schema = (prepared / "schema.yaml").read_text()
    price, visits = (
        line for line in schema.splitlines() if line.split(":")[0].strip() in ("price", "visits")
    )
    assert all(re.search(r"buckets: \d\d}", line) for line in (price, visits))
    schema = schema.replace(price, "  price: {role: numeric, buckets: 5}").replace(
        visits, "  visits: {role: numeric}"
    )
    (prepared / "schema.yaml").write_text(schema)
    said = dhen_search("prepare", click_log, "--out", prepared).stdout
    assert "1 of them of numbers' buckets" in said
    config.write_text("model: {layers: [{modules: [dlrm]}], buckets: interpolated}\ntraining: {epochs: 1}")
    dhen_search("train", config, "--data", prepared, "--out", tmp_path / "bundle")
    dhen_search("verify", tmp_path / "bundle")
    rows = tmp_path / "rows.csv"
    rows.write_text("time,site,user,tags,price,visits\n" + "2026-01-02 00:00:00,a,u1,x,{},1\n" * 4)
    rows.write_text(rows.read_text().format(0.1, 0.2, 9.9, ""))
    dhen_search("predict", tmp_path / "bundle", "--data", rows, "--out", scores)
    low, lowest, high, missing = (
        float(row["score"]) for row in csv.DictReader(scores.read_text().splitlines())
    )
    assert abs(low - lowest) < abs(low - high)  # one bucket, and another
    assert missing not in (low, high)


def test_every_verb_has_help_with_an_example(dhen_search: Run) -> None:
    from search.cli import VERBS

    assert all(verb in dhen_search("--help").stdout for verb in VERBS)
    for verb in VERBS:
        assert f"dhen-search {verb}" in dhen_search(verb, "--help").stdout.split("Options", 1)[1]
