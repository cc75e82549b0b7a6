"""`objective=next_period`: candidates are judged by periods that are scored before they are trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import GROWING_MODEL, SMALL, Run, write_log

from search.bundles.bundle import read_bundle
from search.read_study import read_study
from trials.records.trial_record import Metrics, TrialRecord
from trials.store.weights import Weights, apply_changes, read_optimizer_state

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, VALIDATION, TEST = 4000, 3200, 3600
"""Number of rows, of which one is a minute, and where validation and test begin."""
WORDS = ("objective=next_period", "period=1h", "training.precision=fp32", *SMALL)
TRAINING = ("training.epochs=1", "training.precision=fp32", "training.batch_size=64")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.csv", ROWS)


@pytest.fixture(scope="module")
def study(dhen_search: Run, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("next_period") / "study"
    said = dhen_search("run", "--data", log, "--out", out, "trials=2", "averages=2", *WORDS).stdout
    assert "NE is of periods of 1h, each scored before the network was trained on it" in said
    return out


@pytest.fixture(scope="module")
def network(
    dhen_search: Run, study: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrialRecord, Path]:
    """A network that was scored on test, and its bundle."""
    record = read_study(study)
    tested = {trial.number for trial in record.trials if trial.result.test and not trial.origin.members}
    number = min(tested & {*record.front})
    out = tmp_path_factory.mktemp("bundle") / "bundle"
    dhen_search("export", study, "--pick", number, "--out", out)
    return record.trial(number), out


def scored_online(dhen_search: Run, bundle: Path, log: Path, rows: slice, folder: Path) -> float:
    """Mean log loss of rows that `online` scores before it trains on them."""
    header, *lines = log.read_text().splitlines()
    later = folder / "later.csv"
    later.write_text("\n".join([header, *lines[rows]]) + "\n")
    dhen_search("online", bundle, "--data", later, "--out", folder / "live", "period=1h")
    periods = [one.info.period.online for one in read_bundle(folder / "live").increments]
    assert len(periods) > 6
    return sum(one.log_loss * one.examples for one in periods) / sum(one.examples for one in periods)


def test_the_objective_is_what_online_training_would_show(
    dhen_search: Run, network: tuple[TrialRecord, Path], log: Path, tmp_path: Path
) -> None:
    trial, bundle = network
    validation, test = trial.result.validation, trial.result.test
    assert validation is not None
    assert test is not None
    (tmp_path / "both").mkdir()
    found = scored_online(dhen_search, bundle, log, slice(VALIDATION, TEST), tmp_path)
    assert validation.log_loss == pytest.approx(found, abs=1e-6)
    both = scored_online(dhen_search, bundle, log, slice(VALIDATION, ROWS), tmp_path / "both")
    assert (validation.log_loss + test.log_loss) / 2 == pytest.approx(both, abs=1e-6)
    of_trained_weights = min(point.validation.ne for point in trial.result.curve)
    assert abs(validation.ne - of_trained_weights) > 1e-4
    assert validation.examples == TEST - VALIDATION


def test_a_bundle_gives_its_numbers_again(
    dhen_search: Run, study: Path, network: tuple[TrialRecord, Path], log: Path
) -> None:
    for bundle in (network[1], study / "best"):
        said = dhen_search("verify", bundle, "--data", log).stdout
        assert "NE is of periods of 1h, each scored before it is trained on" in said
        assert "at export NE" in said


def test_a_study_of_the_other_objective_is_no_warm_start(
    dhen_search: Run, study: Path, log: Path, tmp_path: Path
) -> None:
    words = ("run", "--data", log, "--out", tmp_path / "study", "trials=1", *SMALL)
    said = dhen_search(*words, "training.precision=fp32", f"warm_start={study}").stdout
    assert "period 1h, here None" in said
    assert read_study(tmp_path / "study").period is None


def trained(dhen_search: Run, folder: Path, log: Path, *words: str) -> tuple[Metrics, Weights]:
    """Metrics on validation of a small network, as `train` comes to them, and its optimizer state."""
    folder.mkdir()
    (folder / "model.yaml").write_text(GROWING_MODEL)
    out = folder / "bundle"
    dhen_search("train", folder / "model.yaml", "--data", log, "--out", out, *TRAINING, *words)
    bundle = read_bundle(out)
    assert bundle.info.validation is not None
    return bundle.info.validation, read_optimizer_state(bundle.weights())


def test_ranks_and_levels_score_alike(dhen_search: Run, log: Path, tmp_path: Path) -> None:
    words = ("objective=next_period", "period=1h")
    alone, state = trained(dhen_search, tmp_path / "alone", log, *words)
    frozen, no_state = trained(dhen_search, tmp_path / "frozen", log)
    assert alone.ne != frozen.ne
    assert not no_state
    assert int(state["optimizer.steps"]) == VALIDATION // 64
    assert state["optimizer.tables.sum.site.0-4"].max() > 0
    for name, held in (("ranks", "ranks=1x2"), ("level", "technique=host_tables")):
        found, its_state = trained(dhen_search, tmp_path / name, log, *words, held)
        assert found.ne == pytest.approx(alone.ne, abs=1e-5), name
        assert found.examples == alone.examples
        assert its_state.keys() == state.keys(), name
        for key, values in state.items():
            torch.testing.assert_close(its_state[key], values, rtol=1e-3, atol=1e-6, msg=f"{name} {key}")


def test_online_training_begins_with_the_optimizers_state(
    dhen_search: Run, log: Path, tmp_path: Path
) -> None:
    header, *lines = log.read_text().splitlines()
    later = tmp_path / "later.csv"
    later.write_text("\n".join([header, *lines[VALIDATION:]]) + "\n")
    (tmp_path / "model.yaml").write_text(GROWING_MODEL)
    words = ("train", tmp_path / "model.yaml", "--data", log, *TRAINING, "training.epochs=2")
    first: dict[str, float] = {}
    for name, objective in (("kept", ("objective=next_period", "period=1h")), ("fresh", ())):
        dhen_search(*words, *objective, "--out", tmp_path / name)
        live = tmp_path / f"{name}-live"
        said = dhen_search("online", tmp_path / name, "--data", later, "--out", live, "period=1h").stdout
        assert ("no optimizer state" in said) == (name == "fresh")
        before = read_bundle(tmp_path / name).model().state_dict()
        after = {key: values.clone() for key, values in before.items()}
        apply_changes(after, read_bundle(live).increments[0].changes())
        tables = [key for key in before if key.startswith("features.tables")]
        moved = torch.cat([(after[key] - before[key]).abs().flatten() for key in tables])
        first[name] = float(moved.mean())
    assert first["kept"] < 0.5 * first["fresh"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("period=1h",), "give objective=next_period too"),
        (("objective=next_period", "period=soon"), "expected a time such as 1d"),
        (("objective=next_month",), "next_period"),
    ],
)
def test_what_does_not_go_together_is_said(
    dhen_search: Run, log: Path, tmp_path: Path, words: tuple[str, ...], expected: str
) -> None:
    said = dhen_search("run", "--data", log, "--out", tmp_path / "study", *SMALL, *words, code=2).stderr
    assert expected in said


def test_a_log_whose_validation_is_not_later_is_refused(dhen_search: Run, log: Path, tmp_path: Path) -> None:
    header, *lines = log.read_text().splitlines()
    turned = tmp_path / "turned.csv"
    turned.write_text("\n".join([header, *lines[TEST:], *lines[:TEST]]) + "\n")
    words = ("run", "--data", turned, "--out", tmp_path / "study", *SMALL, "objective=next_period")
    said = dhen_search(*words, "split.by=order", code=2).stderr
    assert "give split.by=timestamp" in said
