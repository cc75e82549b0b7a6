"""A study that judges its winners on earlier periods too, by the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_line import SMALL, Run, looks_at_test
from rich.console import Console

from dhen.errors import UserError
from search.analysis.choice import Evidence, with_earlier_periods
from search.bundles.export import study_log
from search.config import read_study_config
from search.read_study import read_study
from search.run_directory import folder_of
from search.study.run_session import finished_study
from trials.data.log_views import LogAtOrigin, check_origins, origins_of
from trials.data.prepared_log import PreparedLog
from trials.records.events import WEIGHTS

WORDS = ("trials=2", "averages=2", "origins=2", *SMALL)


@pytest.fixture(scope="module")
def judged(dhen_search: Run, click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study whose winners were judged on validation and on the two periods before it."""
    out = tmp_path_factory.mktemp("origins") / "study"
    dhen_search("run", "--data", click_log, "--out", out, *WORDS)
    return out


def test_winners_are_judged_on_the_periods_before_validation(judged: Path) -> None:
    record, log = read_study(judged), study_log(judged)
    choice = record.choice
    assert choice is not None
    assert (choice.origins, choice.periods) == (2, 12)
    assert {one.trial for one in choice.judged} == {choice.baseline, *(w.trial for w in choice.winners)}
    rows = log.manifest.rows
    origins = {rows["train"] - rows["validation"], rows["train"] - 2 * rows["validation"]}
    winners = [record.trial(one.trial) for one in choice.judged]
    networks = {network.number for winner in winners for network in record.networks(winner)}
    trained = {(each.origin.of, each.job.origin) for each in record.retrainings}
    assert trained == {(number, origin) for number in networks for origin in origins}
    for each in record.retrainings:
        assert each.result.curve[-1].examples <= 2 * (each.job.origin or 0)
        assert len(np.load(folder_of(judged, each) / "logits.validation.npy")) == rows["validation"]
        assert not (folder_of(judged, each) / WEIGHTS).exists()
        assert each.result.test is None


def test_no_look_at_test_is_taken_for_it_and_the_same_command_trains_nothing_again(
    dhen_search: Run, click_log: Path, judged: Path
) -> None:
    record = read_study(judged)
    assert record.choice is not None
    numbers = {record.choice.baseline, *(winner.trial for winner in record.choice.winners)}
    scored = numbers | {n.number for number in numbers for n in record.networks(record.trial(number))}
    assert looks_at_test(judged) == len(scored)
    dhen_search("run", "--data", click_log, "--out", judged, *WORDS)
    after = read_study(judged)
    assert (after.choice, after.retrainings) == (record.choice, record.retrainings)


def test_a_log_at_an_origin_ends_there(judged: Path) -> None:
    log = study_log(judged)
    whole, rows = log.split("train"), log.manifest.rows
    (late, _) = origins_of(log, 2)
    then = LogAtOrigin(log, late)
    train, period = then.split("train"), then.split("validation")
    assert then.manifest.rows["train"] == train.rows == late
    assert then.manifest.rows["validation"] == period.rows == rows["validation"]
    assert np.array_equal(np.concatenate([train.labels, period.labels]), whole.labels)
    assert np.array_equal(period.inputs.categorical, whole.inputs.categorical[late:])
    assert all(
        np.array_equal(part.take(np.arange(5)).ids, of_whole.take(np.arange(late, late + 5)).ids)
        for part, of_whole in zip(period.inputs.bags, whole.inputs.bags, strict=True)
    )
    assert period.base_rate == pytest.approx(float(period.labels.mean()))
    with pytest.raises(KeyError):
        then.split("test")


def test_bad_input(judged: Path) -> None:
    log = study_log(judged)
    with pytest.raises(UserError, match=r"origins=9: only 4 periods .* give at most origins=4"):
        check_origins(log, 9)
    disordered = PreparedLog(log.directory, log.manifest.replace(chronological=False))
    with pytest.raises(UserError, match="no time stamps, or are not in their order; leave origins out"):
        check_origins(disordered, 1)
    with pytest.raises(UserError, match="origins"):
        read_study_config(None, ["origins=-1"])


def test_a_network_that_a_teacher_taught_is_not_judged_on_rows_that_the_teacher_knew(judged: Path) -> None:
    """Without it the baseline is alone, and has nothing to be judged beside."""
    with finished_study(judged, Console(stderr=True, quiet=True)) as study:
        record = study.record
        assert record.choice is not None
        assert record.baseline is not None
        numbers = (record.baseline, record.networks(record.trial(record.choice.winners[0].trial))[0].number)
        baseline, network = map(record.trial, numbers)
        taught = network.replace(job=network.job.replace(teacher="0123456789abcdef"))
        flat = Evidence(
            trials=(baseline, network), loss_CK=np.ones((2, 4)), period_K=np.zeros(4, dtype=np.int64)
        )
        origins = origins_of(study.log, 2)
        for second, expected in ((network, 2), (taught, 0)):
            networks = {baseline.number: (baseline,), network.number: (second,)}
            _, used = with_earlier_periods(
                flat, origins, networks, record.trial, study.log, study.retrainings
            )
            assert used == expected
