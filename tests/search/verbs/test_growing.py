"""`growing.KEY`: a study whose tables grow, from the log to a bundle that scores."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from command_line import SMALL, Run
from safetensors.torch import load_file

from search.read_study import read_study

GROWING = ("growing.capacity=40", "growing.columns=[user,tags]", "growing.evict=lru")


@pytest.fixture(scope="module")
def grown(dhen_search: Run, click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("growing") / "study"
    dhen_search("run", "--data", click_log, "--out", out, *SMALL, "trials=1", *GROWING)
    return out


def test_a_study_trains_and_goes_on(dhen_search: Run, click_log: Path, grown: Path) -> None:
    assert len(read_study(grown).candidates) == 1
    dhen_search("run", "--data", click_log, "--out", grown, *SMALL, "trials=2", *GROWING)
    record = read_study(grown)
    assert len(record.candidates) == 2
    assert all(trial.result.validation is not None for trial in record.trials)
    other = (*GROWING[:1], "growing.columns=[user]")
    said = dhen_search("run", "--data", click_log, "--out", grown, *SMALL, "trials=2", *other, code=2).stderr
    assert "growing" in said


def test_its_bundle_scores_verifies_and_is_trained_again(
    dhen_search: Run, click_log: Path, grown: Path, tmp_path: Path
) -> None:
    bundle, scores = tmp_path / "bundle", tmp_path / "scores.csv"
    dhen_search("export", grown, "--pick", "lowest", "--out", bundle)
    weights = load_file(bundle / "weights.safetensors")
    keys = weights["features.growing.keys"]
    assert 40 < (keys != 0).sum() <= 80
    assert "within" in dhen_search("verify", bundle).stdout
    assert "as at export" in dhen_search("verify", bundle, "--data", click_log).stdout
    dhen_search("predict", bundle, "--data", click_log, "--out", scores)
    assert len(scores.read_text().splitlines()) == 4001
    changed = tmp_path / "changed.csv"
    changed.write_text(click_log.read_text().replace(",u1,", ",nobody,"))
    dhen_search("predict", bundle, "--data", changed, "--out", tmp_path / "other.csv")
    assert (tmp_path / "other.csv").read_text() != scores.read_text()
    trained = dhen_search("train", bundle, "--data", click_log, "--out", tmp_path / "again").stdout
    assert "NE" in trained


def test_the_share_of_the_capacity_is_an_axis(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    space, tiny = tmp_path / "space.yaml", yaml.safe_load(dhen_search("spaces", "tiny").stdout)
    space.write_text(yaml.safe_dump(tiny | {"model": {"capacity_share": [0.5], "embedding_dim": [4]}}))
    out = tmp_path / "study"
    words = [word for word in SMALL if not word.startswith("space=")]
    dhen_search("run", "--data", click_log, "--out", out, *words, f"space={space}", "trials=1", *GROWING)
    (candidate,) = read_study(out).candidates
    assert candidate.job.model["capacity_share"] == 0.5
    dhen_search("export", out, "--pick", "lowest", "--out", tmp_path / "bundle")
    assert len(load_file(tmp_path / "bundle" / "weights.safetensors")["features.growing.keys"]) == 1 + 20 + 20
    assert "within" in dhen_search("verify", tmp_path / "bundle").stdout
    shown = dhen_search("status", out).stdout
    assert "capacity 50%" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("growing.capacity=100",), "capacity.*and columns"),
        (
            ("growing.capacity=100", "growing.columns=[usr]"),
            "unknown categorical or multi_hot column 'usr'.*'user'",
        ),
        ((*GROWING[:2], "growing.ttl=soon"), "growing.ttl: expected a time such as 3d.*received 'soon'"),
        ((*GROWING[:2], "growing.ttl=6h"), "ttl of user, 6h.*training.order=log"),
    ],
)
def test_what_cannot_be_is_said(
    dhen_search: Run, click_log: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    said = dhen_search("run", "--data", click_log, "--out", tmp_path / "no", *SMALL, *words, code=2).stderr
    assert re.search(message, said), said


def test_a_ttl_in_time_needs_time_stamps(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    rows = [line.split(",") for line in click_log.read_text().splitlines()]
    log = tmp_path / "log.csv"
    log.write_text("\n".join(",".join([row[0], *row[2:]]) for row in rows) + "\n")
    words = ("--data", log, "--out", tmp_path / "no", *SMALL, *GROWING)
    said = dhen_search("run", *words, "growing.ttl=6h", "training.order=log", code=2).stderr
    assert "the ttl of user, 6h, is of the log's time, and no column has the role timestamp" in said


def test_a_study_trains_with_a_ttl_in_time(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    """Commands that failed before anything was trained leave the directory free for it."""
    out, growing = tmp_path / "study", ("growing.capacity=3000", "growing.columns=[user]", "growing.ttl=3h")
    words = ("--data", click_log, "--out", out, *SMALL, "trials=1", "confirm=2", *growing)
    assert "training.order=log" in dhen_search("run", *words, code=2).stderr
    words = (*words, "training.order=log", "training.epochs=1")
    for mistake in ("space=tyni", "sampler=tpee", "baseline=nothing"):
        dhen_search("run", *words, mistake, code=2)
    dhen_search("run", *words)
    assert all(trial.result.validation is not None for trial in read_study(out).trials)
    keys = load_file(out / "best" / "weights.safetensors")["features.growing.keys"]
    assert 0 < (keys != 0).sum() < 100  # of several hundred users
    dhen_search("verify", out / "best", "--data", click_log)
    dhen_search("train", out / "best", "--data", click_log, "--out", tmp_path / "again", "training.epochs=1")
    shuffled = ("--out", tmp_path / "no", "training.order=shuffled")
    said = dhen_search("train", out / "best", "--data", click_log, *shuffled, code=2).stderr
    assert "training.order=log" in said
