"""Winners after a study: retrained, compared on test, ablated, sliced; by the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from command_line import AVERAGED, TIMEOUT_SECONDS, Run, looks_at_test, wait_until
from warm_process import WarmProcess

from dhen.config import DhenConfig
from dhen.errors import UserError
from search.analysis.ablate import without_parts
from search.analysis.confirm import better
from search.analysis.slices import slices
from search.bundles.bundle import read_bundle
from search.bundles.export import study_log
from search.read_study import read_study
from trials.records.findings import Ablation, WinnerVerdict
from trials.records.metrics import entropy
from trials.records.study_record import Comparison, StudyRecord
from trials.records.trial_record import Outcome

BOTH = 2
"""Seeds."""
SEEDS = (4, 5)
"""Those of the retrainings that there are: the study's is 3."""


def compared_networks(record: StudyRecord) -> set[int]:
    """The baseline, and the winners and what winners are averages of."""
    assert record.choice is not None
    numbers = (record.baseline or 0, *(winner.trial for winner in record.choice.winners))
    return {network.number for number in numbers for network in record.networks(record.trial(number))}


def test_winners_carry_a_verdict(averaged: Path) -> None:
    record = read_study(averaged)
    assert record.choice is not None
    winners = [winner.trial for winner in record.choice.winners]
    assert [each.trial for each in record.comparisons] == winners
    assert {reason for winner in record.choice.winners for reason in winner.reasons} >= {
        "knee",
        "best network",
    }
    assert {each.blocked_by for each in record.comparisons} == {"site"}
    networks = compared_networks(record)
    trained = {(each.origin.of, each.job.seed) for each in record.retrainings}
    assert trained == {(number, seed) for number in networks for seed in SEEDS}
    scored = networks | {record.baseline, *winners}
    assert looks_at_test(averaged) == len(scored) + BOTH * len(networks)
    assert read_bundle(averaged / "best").info.comparison == record.comparison(record.best)


@pytest.mark.parametrize(
    ("percent", "p_adjusted", "verdict"),
    [(-0.5, 0.04, WinnerVerdict.YES), (0.5, 0.04, WinnerVerdict.NO), (-0.5, 0.06, WinnerVerdict.CANNOT_TELL)],
)
def test_a_verdict_is_yes_no_or_cannot_tell(
    percent: float, p_adjusted: float, verdict: WinnerVerdict
) -> None:
    assert better(percent, p_adjusted) == verdict


def test_the_difference_is_that_of_the_metrics(averaged: Path) -> None:
    """Block sums of kept logits say of each pair what the metrics of their scoring say."""
    record = read_study(averaged)
    ne = {
        (each.origin.of, each.job.seed): each.result.test.ne
        for each in record.retrainings
        if each.result.test
    }
    alone = [each for each in record.comparisons if not record.trial(each.trial).origin.members]
    assert alone
    for each in alone:
        percents = [100.0 * (ne[each.trial, s] / ne[record.baseline or 0, s] - 1.0) for s in each.seeds]
        assert each.difference_percent == pytest.approx(float(np.mean(percents)), abs=1e-6)
        assert each.low_percent <= each.difference_percent <= each.high_percent


def test_report_and_mlflow_show_it(averaged: Path) -> None:
    record = read_study(averaged)
    page = (averaged / "report.html").read_text()
    assert 'id="winners"' in page
    assert "Winners and baseline retrained from 2 seeds other than" in page
    with sqlite3.connect(averaged / "mlflow.db") as store:
        kinds = [v for (v,) in store.execute("select value from tags where key = 'kind'")]
        verdicts = [v for (v,) in store.execute("select value from tags where key = 'baseline.better'")]
    assert kinds.count("retraining") == len(record.retrainings)
    assert verdicts == [each.better.value for each in record.comparisons]


def test_more_seeds_add_to_those_there_are_and_it_goes_on_from_where_it_was(
    dhen_search: Run, averaged: Path, environment: dict[str, str]
) -> None:
    """Ctrl-C in one training, a kill in the next, then to the end."""
    before = {each.number: each.origin.started_at for each in read_study(averaged).retrainings}
    bundle, kept = read_bundle(averaged / "best"), before
    words = ("confirm", averaged, "--seeds", 3, "--block-by", "user")
    for how in (signal.SIGINT, signal.SIGKILL):
        known = len(read_study(averaged).retrainings)
        process = WarmProcess(words, environment)
        wait_until((averaged / "retrained" / "trials" / f"{known:05d}" / "events.jsonl").exists, process)
        os.killpg(process.pid, how)
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        assert "Traceback" not in errors
        assert process.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
        now = {
            e.number: e.origin.started_at
            for e in read_study(averaged).retrainings
            if e.result.test is not None
        }
        assert kept.items() <= now.items()
        kept = now
    done = dhen_search(*words, "--json")
    record = read_study(averaged)
    assert [Comparison.model_validate(each) for each in json.loads(done.stdout)] == list(record.comparisons)
    assert all(each.seeds == (*SEEDS, 6) and each.blocked_by == "user" for each in record.comparisons)
    assert all(each.result.outcome is Outcome.COMPLETED for each in record.retrainings)
    assert len(record.retrainings) == len(before) + len(compared_networks(record))
    assert kept.items() <= {each.number: each.origin.started_at for each in record.retrainings}.items()
    assert done.stderr.count("retrained trial") == len(record.retrainings) - len(kept)
    later = read_bundle(averaged / "best")
    assert later.info != bundle.info
    assert later.version == bundle.version, "increments of the bundle before follow it"
    said = dhen_search("confirm", averaged, "--seeds", 3).stdout
    assert any(f" {better.value} " in said for better in WinnerVerdict)
    assert {each.blocked_by for each in read_study(averaged).comparisons} == {"site"}  # the study's


def test_ablation(dhen_search: Run, averaged: Path) -> None:
    looked = looks_at_test(averaged)
    trial = next(
        trial
        for trial in read_study(averaged).candidates
        if sum(len(layer["modules"]) for layer in trial.job.model["layers"]) > 1
    )
    pick = ("--pick", trial.number)
    said = json.loads(dhen_search("ablate", averaged, *pick, "--seeds", BOTH, "--json").stdout)
    assert said["trial"] == trial.number
    assert {part["removed"] for part in said["parts"]} == set(
        without_parts(DhenConfig.model_validate(trial.job.model))
    )
    for part in said["parts"]:
        assert part["ne_percent"]["low"] <= part["ne_percent"]["mean"] <= part["ne_percent"]["high"]
        assert part["flops_percent"] == pytest.approx(100 * (1 - part["flops"] / said["flops"]))
    (kept,) = [each for each in read_study(averaged).ablations if each.trial == trial.number]
    assert kept == Ablation.model_validate(said)
    assert "figure-ablations" in (averaged / "report.html").read_text()
    assert looks_at_test(averaged) == looked


def test_without_parts_members_or_a_layer_that_they_share() -> None:
    layer = {"modules": ["attention", "linear"], "ensemble": "concat"}
    parts = without_parts(DhenConfig.model_validate({"layers": [layer, {"modules": ["cross"]}]}))
    assert set(parts) == {"layer0: attention", "layer0: linear", "layer0", "layer1"}
    assert [len(each.layers) for each in parts.values()] == [2, 2, 1, 1]
    assert parts["layer0: linear"].layers[0].ensemble.kind == "sum"
    with pytest.raises(UserError, match="nothing to remove"):
        without_parts(DhenConfig.model_validate({"layers": [{"modules": ["cross"]}]}))
    layers = [{"modules": ["cross"]}, {"modules": ["linear"]}]
    parts = without_parts(DhenConfig.model_validate({"layers": layers, "members": 4, "members_from": 1}))
    found = {name: (len(each.layers), each.members, each.members_from) for name, each in parts.items()}
    assert found == {"layer0": (1, 4, 0), "layer1": (1, 4, 1), "members": (2, 1, 0)}


def test_slices(averaged: Path) -> None:
    """Slices of a column are all rows, each once; their losses are those of the whole."""
    record, log = read_study(averaged), study_log(averaged)
    whole = record.comparisons[-1]
    for column in ("site", "hour_of_day", "price"):
        found = slices(record, whole.trial, log, column, most=4).slices
        assert sum(each.rows for each in found) == log.manifest.rows["test"]
        assert sum(each.base_rate * each.rows for each in found) == pytest.approx(
            log.split("test").base_rate * log.manifest.rows["test"]
        )
        bits = [each.rows * entropy(each.base_rate) if 0 < each.base_rate < 1 else 0.0 for each in found]
        loss = sum((each.ne or 0.0) * n for each, n in zip(found, bits, strict=True))
        if all(bits):
            rows = log.manifest.rows["test"]
            assert loss / rows / entropy(log.split("test").base_rate) == pytest.approx(whole.ne, rel=1e-6)
    assert found[-1].value != "(missing)" or found[-1].rows > 0
    assert len(slices(record, whole.trial, log, "site", most=4).slices) == 5


def test_slices_by_the_command_line_have_the_blocks_of_the_comparison(
    dhen_search: Run, averaged: Path, click_log: Path
) -> None:
    winner = read_study(averaged).comparisons[-1]
    pick = ("--pick", winner.trial)
    shown = dhen_search("slices", averaged, "--column", "user", "--top", 3, *pick).stdout
    assert "others)" in shown
    assert f"intervals: over seeds and blocks of rows by {winner.blocked_by}\n" in shown
    (kept,) = [each for each in read_study(averaged).slices if each.column == "user"]
    assert (kept.trial, len(kept.slices), kept.blocked_by) == (winner.trial, 4, winner.blocked_by)
    for words, blocked_by in ((pick, winner.blocked_by), ((*pick, "--block-by", "time"), "time")):
        said = dhen_search("slices", averaged, "--column", "site", *words, "--json").stdout
        assert json.loads(said)["blocked_by"] == blocked_by
    for option in ("--pick", "--block-by"):
        words = ("slices", averaged / "best", "--data", click_log, "--column", "site", option, "user")
        assert f"leave {option} out" in dhen_search(*words, code=2).stderr


def test_bad_input_of_confirm(dhen_search: Run, averaged: Path, tmp_path: Path) -> None:
    def refused(*words: object) -> str:
        return dhen_search(*words, code=2).stderr

    assert "2 seeds at least" in refused("confirm", averaged, "--seeds", 1)
    expected = "expected a categorical column of the log: site"
    assert expected in refused("confirm", averaged, "--block-by", "nothing")
    assert "no study here" in refused("confirm", tmp_path)
    words = ("slices", averaged, "--column", "C", "--pick", read_study(averaged).comparisons[-1].trial)
    assert "expected a categorical or numeric column of the log: site" in refused(*words)
    with sqlite3.connect(averaged / "study.db") as connection:
        (facts,) = connection.execute("select facts from dhen_study").fetchone()
        undone = json.loads(facts)
        undone["record"]["finished"] = False
        connection.execute("update dhen_study set facts = ?", (json.dumps(undone),))
    try:
        assert "the study is not finished" in refused("confirm", averaged)
    finally:
        with sqlite3.connect(averaged / "study.db") as connection:
            connection.execute("update dhen_study set facts = ?", (facts,))


def test_an_export_says_the_verdict(dhen_search: Run, averaged: Path, tmp_path: Path) -> None:
    winner = read_study(averaged).comparisons[-1]
    said = dhen_search("export", averaged, "--pick", winner.trial, "--out", tmp_path / "bundle").stdout
    assert f"better than the baseline: {winner.better}, " in said
    assert " (95 % interval " in said


def test_ctrl_c_while_the_best_is_exported(dhen_search: Run, averaged: Path) -> None:
    """Nothing half made is left, and the same command goes on."""

    def interrupt() -> None:
        while not list(averaged.glob(".best.*.partial")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    said = dhen_search("run", "--out", averaged, *AVERAGED, code=130).stdout
    assert "the same command goes on" in said
    assert not list(averaged.glob(".best.*"))
    assert read_study(averaged).finished


def test_ends_without_a_verdict_where_the_baseline_diverges(dhen_search: Run, averaged: Path) -> None:
    """From other seeds than the study's: the last here, as its baseline is another from then on."""
    record = read_study(averaged)
    baseline = record.trial(record.baseline or 0)
    with sqlite3.connect(averaged / "study.db") as connection:
        diverging = baseline.with_job(training=baseline.job.training | {"learning_rate": 1e30})
        connection.execute(
            "update dhen_job set summary = ? where fingerprint = ?",
            (diverging.job.model_dump_json(), baseline.job.fingerprint),
        )
    shutil.rmtree(averaged / "best")
    for _ in range(2):
        said = dhen_search("run", "--out", averaged, *AVERAGED).stdout
        assert "fewer than 2 of 2 seeds" in said
        assert f"ends without a verdict; `dhen-search confirm {averaged}` goes on" in said
        assert read_study(averaged).finished
        assert (averaged / "best" / "bundle.json").exists()
    ended = [each for each in read_study(averaged).retrainings if each.result.outcome is Outcome.DIVERGED]
    assert [each.job.seed for each in ended] == [*SEEDS]
    assert "--seeds 4 tries as many more" in dhen_search("confirm", averaged, "--seeds", 2, code=2).stderr
